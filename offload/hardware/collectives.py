"""The time and traffic of collectives: latency and bandwidth of rings, trees and their nesting over a topology.

Of the algorithms that a library has for a call the quickest is taken, as the library does.  Ranks are laid on nodes in order,
as launchers do.

Note: [Rings and trees]
    Of S bytes over n ranks a ring's all-gather or reduce-scatter takes n - 1 hops and (n - 1)/n S bytes on every link, an
    all-reduce twice that (Patarasuk and Yuan, 2009). A tree's all-reduce takes 2 log2(nodes) hops between nodes and 2 S bytes
    (Sanders, Speck and Traeff, 2009). Hops of a ring that spans nodes: all but nodes - 1 of them are inside nodes, and latency
    adds to the time of the bytes, as in NCCL's own model (src/graph/tuning.cc), which also has the tree at 0.92 of the ring's
    bandwidth and no tree for all-gather and reduce-scatter. A hierarchical call is one collective inside each node and one
    between nodes for each device of a node, all at once, as two mesh axes that nest make it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from offload.errors import HardwareError
from offload.hardware.hardware import Hardware
from offload.hardware.tables import Points, fraction_at

__all__ = ["ALGORITHMS", "KINDS", "Collective", "Group", "collective", "exchange", "grouped"]

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "send", "all_to_all", "barrier")
ALGORITHMS = ("auto", "ring", "tree", "hierarchical")

_TREE_FRACTION = 0.92
#: Peers that an exchange talks to at once.
_PEERS_AT_ONCE = 8
_BARRIER_NBYTES = 4


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


@dataclass(frozen=True, slots=True)
class Collective:
    """The time and traffic of a collective.

    Attributes:
        seconds: from the last rank's arrival to the end.
        algorithm: "ring", "tree", "hierarchical", "direct", "memory", or "none" of one rank.
        link_nbytes: bytes that one rank sends inside its node (or copies, through memory); the most of all ranks.
        network_nbytes: bytes that one node sends to others for this group; the most of all nodes.
    """

    seconds: float
    algorithm: str
    link_nbytes: int = 0
    network_nbytes: int = 0


def collective(
    hardware: Hardware, kind: str, nbytes: int, group: Group, *, sharing: int = 1, algorithm: str = "auto"
) -> Collective:
    """The cost of one call; see `CostModel.collective`."""
    if kind not in KINDS or algorithm not in ALGORITHMS:
        known, word = (KINDS, kind) if kind not in KINDS else (ALGORITHMS, algorithm)
        raise HardwareError(f"collective expected one of {', '.join(known)}, found {word!r}")
    if not 0 <= nbytes < math.inf or sharing < 1:
        raise HardwareError(f"collective expected bytes from 0 and sharing from 1, found {nbytes} and {sharing}")
    if kind == "barrier":
        kind, nbytes = "all_reduce", _BARRIER_NBYTES
    if group.ranks == 1:
        return Collective(0.0, "none")
    if algorithm == "hierarchical" and group.nodes > 1 and group.local > 1:
        return _hierarchical(hardware, kind, nbytes, group, sharing)
    if group.nodes == 1 and hardware.link.through == "memory":
        return _in_memory(hardware, kind, nbytes, group, sharing)
    found = [make(nbytes, group, wire) for wire in wires(hardware, group, sharing) for make in _ways(kind, algorithm)]
    return min(found, key=lambda each: each.seconds)


Way = Callable[[int, Group, Wire], Collective]


def _ways(kind: str, algorithm: str) -> list[Way]:
    """What a library has for a call; of one that it has one way for, whatever the algorithm."""
    if kind in ("all_gather", "reduce_scatter"):
        return [partial(_ring, rounds=1)]
    if kind == "all_reduce":
        both: dict[str, Way] = {"ring": partial(_ring, rounds=2), "tree": _tree}
        return [both[algorithm]] if algorithm in both else list(both.values())
    return [_all_to_all] if kind == "all_to_all" else [_chain]


def _ring(nbytes: int, group: Group, wire: Wire, *, rounds: int) -> Collective:
    moved = rounds * nbytes * (group.ranks - 1) / group.ranks
    between = moved if group.nodes > 1 else 0.0
    inside = moved if group.local > 1 else 0.0
    hops = rounds * (group.ranks - group.nodes)
    seconds = wire.seconds(hops, rounds * (group.nodes - 1), inside, between)
    return Collective(seconds, "ring", math.ceil(inside), math.ceil(between))


def _tree(nbytes: int, group: Group, wire: Wire) -> Collective:
    inside = 2.0 * nbytes if group.local > 1 else 0.0
    between = 2.0 * nbytes if group.nodes > 1 else 0.0
    long_hops = 2 * math.ceil(math.log2(group.nodes))
    seconds = wire.seconds(2 * (group.local - 1), long_hops, inside / _TREE_FRACTION, between / _TREE_FRACTION)
    return Collective(seconds, "tree", math.ceil(inside), math.ceil(between))


def _chain(nbytes: int, group: Group, wire: Wire) -> Collective:
    """Broadcast, reduce and send: every byte passes every link once, in chunks that follow each other."""
    inside = float(nbytes) if group.local > 1 else 0.0
    between = float(nbytes) if group.nodes > 1 else 0.0
    seconds = wire.seconds(group.ranks - group.nodes, group.nodes - 1, inside, between)
    return Collective(seconds, "ring", math.ceil(inside), math.ceil(between))


def _all_to_all(nbytes: int, group: Group, wire: Wire) -> Collective:
    inside = nbytes * (group.local - 1) / group.ranks
    between = group.local * nbytes * (group.ranks - group.local) / group.ranks
    return _direct(inside, between, group, wire)


def _direct(inside: float, between: float, group: Group, wire: Wire) -> Collective:
    hops = math.ceil((group.local - 1) / _PEERS_AT_ONCE)
    long_hops = math.ceil((group.ranks - group.local) / _PEERS_AT_ONCE)
    return Collective(wire.seconds(hops, long_hops, inside, between), "direct", math.ceil(inside), math.ceil(between))


def exchange(hardware: Hardware, rows: Sequence[Sequence[int]], group: Group, *, sharing: int = 1) -> Collective:
    """An all-to-all of uneven messages, the group's nodes taken as full one after the other; see `CostModel.exchange`."""
    count = group.ranks
    if sharing < 1:
        raise HardwareError(f"exchange expected sharing from 1, found {sharing}")
    if len(rows) != count or any(len(row) != count or min(row, default=0) < 0 for row in rows):
        raise HardwareError(f"exchange expected {count} rows of {count} numbers of bytes from 0, found {len(rows)} rows")
    if count == 1:
        return Collective(0.0, "none")
    node = [rank // group.local for rank in range(count)]
    sent, received = [0] * count, [0] * count
    leaves, enters = [0] * group.nodes, [0] * group.nodes
    for i, row in enumerate(rows):
        for j, nbytes in enumerate(row):
            if i != j and node[i] == node[j]:
                sent[i] += nbytes
                received[j] += nbytes
            elif i != j:
                leaves[node[i]] += nbytes
                enters[node[j]] += nbytes
    if group.nodes == 1 and hardware.link.through == "memory":
        busiest = max(out + into for out, into in zip(sent, received, strict=True))
        return _copied(hardware, busiest, 1, group, sharing)
    inside, between = max(*sent, *received), max(*leaves, *enters)
    found = [_direct(inside, between, group, wire) for wire in wires(hardware, group, sharing)]
    return min(found, key=lambda each: each.seconds)


def _in_memory(hardware: Hardware, kind: str, nbytes: int, group: Group, sharing: int) -> Collective:
    """Through the host's memory every rank copies what others need in, and what it needs of others out."""
    others = (group.ranks - 1) / group.ranks
    copied = {
        "all_gather": 1.0,
        "reduce_scatter": 2 * others,
        "all_reduce": 2 * others + 1.0,
        "all_to_all": 2 * others,
    }.get(kind, 1.0)
    return _copied(hardware, copied * nbytes, 2 if kind == "all_reduce" else 1, group, sharing)


def _copied(hardware: Hardware, nbytes: float, rounds: int, group: Group, sharing: int) -> Collective:
    wire = wires(hardware, group, sharing)[0]
    return Collective(wire.seconds(rounds, 0, nbytes, 0.0), "memory", math.ceil(nbytes))


def _hierarchical(hardware: Hardware, kind: str, nbytes: int, group: Group, sharing: int) -> Collective:
    """One collective inside each node, and between nodes one for each device of a node."""
    if group.ranks != group.nodes * group.local:
        raise HardwareError(
            f"hierarchical {kind} expected as many ranks on every node, found {group.ranks} on {group.nodes} nodes, "
            f"{group.local} on one; use whole nodes, or another algorithm"
        )
    inside = Group(group.local, 1, group.local)
    between = Group(group.nodes, group.nodes, 1)
    share = math.ceil(nbytes / group.local)
    lanes = sharing * group.local

    def local(kind: str) -> Collective:
        return collective(hardware, kind, nbytes, inside, sharing=sharing)

    def across(kind: str, nbytes: int, lanes: int) -> Collective:
        done = collective(hardware, kind, nbytes, between, sharing=lanes)
        return replace(done, network_nbytes=done.network_nbytes * (lanes // sharing))

    if kind in ("all_gather", "reduce_scatter"):
        parts = [across(kind, share, lanes), local(kind)]
    elif kind == "all_reduce":
        parts = [local("reduce_scatter"), across("all_reduce", share, lanes), local("all_gather")]
    elif kind in ("broadcast", "reduce"):
        parts = [across(kind, nbytes, sharing), local(kind)]
    else:
        raise HardwareError(f"hierarchical {kind}: there is no such algorithm; leave algorithm at auto")
    return Collective(
        sum(each.seconds for each in parts),
        "hierarchical",
        sum(each.link_nbytes for each in parts),
        sum(each.network_nbytes for each in parts),
    )
