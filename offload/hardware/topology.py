"""Owns how ranks lie on nodes, and at which rate and latency the links between them carry one collective.

`collectives.py` asks it. It never knows an algorithm; ranks are laid on nodes in order, as launchers do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from offload.errors import HardwareError
from offload.hardware.curves import fraction_at
from offload.hardware.hardware import Hardware
from offload.hardware.tables import Points

__all__ = ["Group", "Wire", "grouped", "wires"]


@dataclass(frozen=True, slots=True)
class Group:
    """Where the ranks of a process group are.

    Attributes:
        ranks: how many.
        nodes: how many nodes have one.
        local: the most that one node has.
    """

    ranks: int
    nodes: int
    local: int

    def alike(self, devices: int) -> int:
        """How many groups of this shape a node of so many devices takes part in, where all of them are in one."""
        return max(1, devices // self.local)


def grouped(ranks: Sequence[int], devices: int) -> Group:
    """The group of these ranks, where a node has so many devices.

    Raises:
        HardwareError: no rank, one twice, or one below 0.
    """
    if min(ranks, default=0) < 0:
        raise HardwareError(f"group expected ranks from 0, found {min(ranks)}")
    if not ranks or len(set(ranks)) != len(ranks):
        raise HardwareError(f"group expected ranks, each once, found {len(ranks)}, of which {len(set(ranks))} are distinct")
    counts = Counter(rank // devices for rank in ranks)
    return Group(len(ranks), len(counts), max(counts.values()))


@dataclass(frozen=True, slots=True)
class Wire:
    """What one protocol makes of the links under a group.

    Attributes:
        start: seconds before the first byte.
        hop, long_hop: seconds of a hop inside a node and between nodes.
        rate: bytes a second of one device, in one direction, inside its node.
        node_rate: bytes a second that a node sends to others for this group.
        points: the fraction of ``rate`` by bytes, or None.
    """

    start: float
    hop: float
    long_hop: float
    rate: float
    node_rate: float
    points: Points | None = None

    def seconds(self, hops: int, long_hops: int, nbytes: float, node_nbytes: float) -> float:
        """Of so many hops one after another, while a device moves ``nbytes`` in its node and the node ``node_nbytes``."""
        rate = self.rate * (1.0 if self.points is None else fraction_at(self.points, nbytes))
        return self.start + hops * self.hop + long_hops * self.long_hop + max(nbytes / rate, node_nbytes / self.node_rate)


def wires(hardware: Hardware, group: Group, sharing: int) -> list[Wire]:
    """The protocols a group may use, where ``sharing`` groups like it use the same nodes' links at once.

    Raises:
        HardwareError: the group spans nodes, and the profile has no network.
    """
    link, network = hardware.link, hardware.network
    if group.nodes > 1 and network is None:
        where = f"{group.ranks} ranks are on {group.nodes} nodes of {hardware.device.count} devices"
        raise HardwareError(f"{hardware.name}: {where}, and the profile has no [network]; write one, or use fewer ranks")
    rate = link.bandwidth
    if link.node_bandwidth is not None:
        rate = min(rate, link.node_bandwidth / (group.local * sharing))
    rate *= link.efficiency
    node_rate, long_hop, long_short = rate, 0.0, 0.0
    if network is not None:
        # A device reaches the network through its own host link, whatever the node's adapters could do together.
        node_rate = min(network.bandwidth / sharing, group.local * hardware.host_link.bandwidth) * network.efficiency
        long_hop = network.latency
        long_short = network.latency if network.short_latency is None else network.short_latency
    full = Wire(link.start, link.latency, long_hop, rate, node_rate, link.points)
    if link.short_latency is None:
        return [full]
    start = link.start if link.short_start is None else link.short_start
    part = link.short_fraction
    return [full, Wire(start, link.short_latency, long_short, rate * part, node_rate * part, link.points)]
