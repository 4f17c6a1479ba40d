"""What operations, copies, collectives and Python's own calls take on a hardware profile: a machine's `Costs`.

What an operation does is counted by ``offload.counting``.

Note: [The slowest rank]
    One rank stands for all that are alike.  Every rank meets every other in a step's collectives, if not in one group then over
    those of other axes, so a step takes what it takes the slowest rank, which waits for nobody: that one is simulated.  A ring
    or a tree is as fast as its slowest link, and of the groups beside each other on an axis one has it.  Ranks that are slow in
    different things are taken to be one that is slow in all of them, which is the most that a step can take.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload import device, disk
from offload.counting import flops, moved, name_of
from offload.errors import SimulationError
from offload.hardware import Collective, CostModel, Hardware
from offload.virtual import ACCELERATOR, HOST, Calls, Happening, Listener, Machine, Operation

__all__ = ["HardwareCosts", "Pace", "Slowdown", "program_calls", "slowest"]

@dataclass(frozen=True, slots=True)
class Slowdown:
    """Ranks that are slower than the hardware profile says, by factors.

    Attributes:
        ranks: which ranks.
        compute: factor for operations on their devices.
        link: factor for bytes over the links inside their nodes; 2.0 is half the bandwidth.
        network: factor for bytes between their nodes and others.
    """

    ranks: Sequence[int]
    compute: float = 1.0
    link: float = 1.0
    network: float = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """That of the slowest rank, see Note [The slowest rank].

    Attributes:
        rank: its number.
        slow: how many ranks are slower in something.
    """

    rank: int
    slow: int
    compute: float
    link: float
    network: float


def slowest(given: Slowdown | Iterable[Slowdown], world: int) -> Pace | None:
    """All of them in one; None where nothing is slow.

    Raises:
        SimulationError: something else than slowdowns, a factor below 1, or ranks that are not there.
    """
    every = [given] if isinstance(given, Slowdown) else list(given) if isinstance(given, Iterable) else [given]
    for one in every:
        if not isinstance(one, Slowdown):
            raise SimulationError(f"slow expected a Slowdown, or several of them, found {one!r}.")
        for name in ("compute", "link", "network"):
            factor = getattr(one, name)
            if not isinstance(factor, int | float) or not 1.0 <= factor < math.inf:
                raise SimulationError(
                    f"slow expected {name} to be a factor of at least 1.0, by which it takes longer, found {factor!r}. For "
                    "faster devices, use another hardware profile."
                )
        ranks: object = one.ranks
        if not isinstance(ranks, Collection) or not ranks or not all(isinstance(at, int) and 0 <= at < world for at in ranks):
            shown = list(ranks) if isinstance(ranks, range) else ranks
            raise SimulationError(f"slow expected ranks as numbers from 0 to {world - 1}, found {shown}.")
    every = [one for one in every if max(one.compute, one.link, one.network) > 1.0]
    if not every:
        return None
    shown = max(every, key=lambda one: (one.compute, one.network, one.link))
    factors = [max(getattr(one, name) for one in every) for name in ("compute", "link", "network")]
    return Pace(min(shown.ranks), len({rank for one in every for rank in one.ranks}), *factors)


def slowed(hardware: Hardware, pace: Pace) -> Hardware:
    """The profile whose collectives are those of the slowest groups."""
    link, network = hardware.link, hardware.network
    node = None if link.node_bandwidth is None else link.node_bandwidth / pace.link
    changed = {"link": {"bandwidth": link.bandwidth / pace.link, **({} if node is None else {"node_bandwidth": node})}}
    if network is not None:
        changed["network"] = {"bandwidth": network.bandwidth / pace.network}
    return hardware.replaced(**changed)


_aten: Any = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._grouped_mm})
_COPIES = {(ACCELERATOR, ACCELERATOR): "d2d", (ACCELERATOR, HOST): "d2h", (HOST, ACCELERATOR): "h2d", (HOST, HOST): "h2h"}


class HardwareCosts:
    """Costs of one of ``world`` ranks, each with a device of its own; of the slowest where there is a ``pace``.

    Attributes:
        operations: how many of the device were asked for so far.
        flops: of all of them, and of the host's.
        link_nbytes: what this rank's collectives sent over its link.
        network_nbytes: what its node sent over the network for them, and for those of its other ranks' groups meanwhile.
    """

    def __init__(self, hardware: Hardware, world: int, pace: Pace | None = None) -> None:
        self.hardware, self.model = hardware, CostModel(hardware)
        self._compute = 1.0 if pace is None else pace.compute
        self._links = self.model if pace is None else CostModel(slowed(hardware, pace))
        self.accelerated = hardware.kind == "gpu"
        self.issue, self.call = self.model.dispatch, hardware.host.call or 0.0
        # What ranks of one node share.
        self._beside = min(world, hardware.device.count)
        self.spare_cores = self.accelerated or hardware.host.cores > self._beside
        disk = 0 if hardware.disk is None else hardware.disk.count * hardware.disk.capacity
        self.memory = (hardware.device.memory, hardware.host.memory // self._beside, disk // self._beside)
        self.operations, self.flops, self.link_nbytes, self.network_nbytes = 0, 0, 0.0, 0.0
        self._operations: dict[Any, tuple[float, int]] = {}
        self._collectives: dict[Any, tuple[Collective, int]] = {}

    def counted(self) -> tuple[float, float, float]:
        """FLOPs, bytes over the link, bytes over the network, so far."""
        return float(self.flops), self.link_nbytes, self.network_nbytes

    def operation(self, operation: Operation, index: int) -> float:
        known = self._operations.get((operation.kind, index))
        if known is None:
            known = self._take(operation, index)
            if operation.kind is not None:
                self._operations[operation.kind, index] = known
        seconds, flops = known
        self.operations += index == ACCELERATOR
        self.flops += flops
        return seconds

    def _take(self, operation: Operation, index: int) -> tuple[float, int]:
        overload, made = operation.overload, operation.made if operation.made is not None else operation.writes[0]
        done = flops(overload, operation.args, operation.kwargs, made)
        nbytes = moved(overload, operation.reads, operation.writes)
        if index == HOST and self.accelerated:
            return self.model.host_update(nbytes, done, self._beside), 0
        dtype = next((str(tensor.dtype) for tensor in operation.reads if tensor.is_floating_point()), "float32")
        size: int | None = None
        if overload.overloadpacket in _PRODUCTS:
            matrices = [tensor.shape[-2:] for tensor in operation.reads if tensor.dim() >= 2][-2:]
            size = min((length for shape in matrices for length in shape), default=1)
        return self._compute * self.model.compute(done, nbytes, dtype, size, name_of(overload)), done

    def copy(self, source: int | None, out: int, nbytes: int) -> float:
        if not self.accelerated:
            return self.model.copy("h2h", nbytes, self._beside)
        direction = _COPIES[HOST if source is None else source, out]
        if direction == "d2d":
            return self._compute * self.model.copy(direction, nbytes)
        return self.model.copy(direction, nbytes, self._beside)

    def disk(self, verb: str, nbytes: int) -> float:
        return self.model.disk(verb, nbytes, sharing=self._beside)

    def collective(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        key = (kind, tuple(ranks[:2]), len(ranks), nbytes)
        known = self._collectives.get(key)
        if known is None:
            group = self.model.group(ranks)
            sharing = group.alike(self.hardware.device.count)
            known = self._collectives[key] = (self._links.collective(kind, nbytes, group, sharing=sharing), sharing)
        done, groups = known
        self.link_nbytes += done.link_nbytes
        self.network_nbytes += groups * done.network_nbytes
        return done.seconds


#: What stands in for the parts of a real run that are not Python's, with this package: streams, disks, other ranks.
_APART = ((device, "virtual.py"), (device, "clock.py"), (disk, "virtual_disk.py"))


class _Follower(Listener):
    """Threads that issue operations are followed from their first on."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def happened(self, happening: Happening) -> None:
        self._calls.follow()


@contextmanager
def program_calls(machine: Machine) -> Iterator[None]:
    """Calls of the program inside take their time."""
    call = machine.costs.call
    if not call:
        yield
        return

    def called() -> None:
        machine.now += call

    package = Path(__file__).parent
    beside = [Path(str(of.__file__)).with_name(name) for of, name in _APART]
    calls = Calls((str(package), *map(str, beside)), called)
    follower = _Follower(calls)
    machine.listeners.append(follower)
    try:
        with calls.on():
            yield
    finally:
        machine.listeners.remove(follower)
