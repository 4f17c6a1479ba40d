"""The cost model: from what an operation does to the seconds it takes on a profile, and a step's joules and price.

The virtual device, the simulator and the planner call it. All times are float seconds (`as_ns` is for clocks that count);
it is pure: no clock, no torch, and the same answer every time.

Note: [Roofline]
    An operation takes the longer of its compute and its memory traffic, each at the fraction of the peak that operations of
    its size reach, and never less than the shortest kernel (Williams, Waterman and Patterson, 2009). Issuing it takes the
    host `dispatch`, which runs beside a GPU and adds to a CPU's own time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offload.errors import HardwareError
from offload.hardware import collectives
from offload.hardware.collectives import Collective, Group, grouped
from offload.hardware.hardware import Hardware
from offload.hardware.tables import DTYPES, fraction_at

__all__ = ["CostModel", "StepCost", "as_ns"]

_WORDS = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}


@dataclass(frozen=True, slots=True)
class StepCost:
    """Energy and price of a step.

    Attributes:
        joules: of all devices and nodes; None if the profile has no [power].
        price: US dollars; None if it has no [price].
    """

    joules: float | None
    price: float | None


@dataclass(frozen=True, slots=True)
class CostModel:
    """Compute how long operations take on a hardware profile.

    Attributes:
        hardware: the profile.
    """

    hardware: Hardware

    @property
    def dispatch(self) -> float:
        """Seconds that the host takes to issue one operation; not included in ``compute``."""
        return self.hardware.host.dispatch

    def compute(
        self, flops: float, nbytes: float, dtype: str = "fp32", size: int | None = None, operation: str = ""
    ) -> float:
        """Return the seconds of one kernel.

        Args:
            flops: of matrix products; 0 for an operation that only moves memory.
            nbytes: bytes read and written, each once.
            dtype: what products compute in, "bf16" or torch's "bfloat16"; only used if there are FLOPs.
            size: the smallest dimension of a product; None ignores the shape.
            operation: torch's name of the operation, for profiles with curves by operation.
        Raises:
            HardwareError: the profile has no rate for that dtype.
        """
        device, bound = self.hardware.device, self.hardware.memory_bound
        _from_zero("compute", FLOPs=flops, bytes=nbytes)
        bandwidth = device.memory_bandwidth * fraction_at(bound.by_operation.get(operation, bound.points), nbytes)
        seconds = max(device.launch, nbytes / bandwidth)
        if flops > 0:
            seconds = max(seconds, flops / self.rate(dtype, flops, size, operation))
        return seconds

    def rate(self, dtype: str, flops: float, size: int | None = None, operation: str = "") -> float:
        """Return the FLOPs per second that a matrix product of ``flops`` FLOPs reaches; arguments as in ``compute``.

        Raises:
            HardwareError: as in ``compute``.
        """
        name = self.dtype(dtype)
        peak = getattr(self.hardware.peak, name)
        curves = self.hardware.matmul
        own = curves.by_operation.get(operation)
        if own is not None:
            return float(peak * fraction_at(own, flops))
        reached: float = peak * fraction_at(getattr(curves, name) or curves.points, flops)
        return reached * (fraction_at(curves.by_dim, size) if curves.by_dim and size else 1.0)

    def dtype(self, name: str) -> str:
        """Return the key of ``[peak]`` for a dtype's name; TF32 on a device that has none is fp32.

        Raises:
            HardwareError: the profile has no rate for it.
        """
        word = name.removeprefix("torch.")
        word = "fp8" if word.startswith("float8") else _WORDS.get(word, word)
        if word == "tf32" and self.hardware.peak.tf32 is None:
            word = "fp32"
        if word not in DTYPES or getattr(self.hardware.peak, word) is None:
            known = ", ".join(each for each in DTYPES if getattr(self.hardware.peak, each) is not None)
            raise HardwareError(
                f"{self.hardware.name}: [peak] has no rate for {name}, it has {known}; use one of these, or write its rate "
                "in a profile of your own"
            )
        return word

    def copy(self, direction: str, nbytes: float, sharing: int = 1) -> float:
        """Return the seconds of one copy.

        Args:
            direction: "h2d", "d2h", "h2h" by one thread, or "d2d" in one device's memory.
            nbytes: how many bytes.
            sharing: how many devices of the node copy in that direction at once, including this one.
        Raises:
            HardwareError: there is no such direction.
        """
        host, device, link = self.hardware.host, self.hardware.device, self.hardware.host_link
        _at_least_one("copy", sharing=sharing)
        _from_zero("copy", bytes=nbytes)
        if direction == "h2h":
            return nbytes / min(host.copy_rate, host.memory_bandwidth / (2 * sharing))
        if direction == "d2d":
            return max(device.launch, self.compute(0, 2 * nbytes))
        if direction not in ("h2d", "d2h"):
            raise HardwareError(f'copy expected "h2d", "d2h", "h2h" or "d2d", found {direction!r}')
        rate = link.bandwidth if link.node_bandwidth is None else min(link.bandwidth, link.node_bandwidth / sharing)
        rate *= 1.0 if link.points is None else fraction_at(link.points, nbytes)
        return link.latency + nbytes / min(rate, host.memory_bandwidth / sharing)

    def fresh(self, nbytes: float) -> float:
        """Return the seconds of the first touch of ``nbytes`` of new host pages; 0 if the profile has no figure."""
        _from_zero("fresh", bytes=nbytes)
        return 0.0 if self.hardware.host.fresh_rate is None else nbytes / self.hardware.host.fresh_rate

    def disk(self, kind: str, nbytes: float, depth: int = 1, sharing: int = 1) -> float:
        """Return the seconds that one request adds to its queue.

        Args:
            kind: "read" or "write".
            nbytes: the size of the request.
            depth: how many such requests are in flight; their latencies overlap, and they share the drives' bandwidth.
            sharing: how many ranks of the node use the drives at once, each with such a queue.
        Raises:
            HardwareError: there is no such kind, or the node has no drives.
        """
        disk = self.hardware.disk
        if disk is None:
            raise HardwareError(f"{self.hardware.name}: the profile has no [disk]; write one, or keep everything in memory")
        if kind not in ("read", "write"):
            raise HardwareError(f'disk expected "read" or "write", found {kind!r}')
        _from_zero("disk", bytes=nbytes)
        _at_least_one("disk", depth=depth, sharing=sharing)
        drive = disk.read if kind == "read" else disk.write
        # Of the drive that has most of the request: a stripe, or its share of many.
        most = max(min(nbytes, disk.stripe), nbytes / disk.count)
        alone = (disk.latency + most / drive) / depth
        return max(alone, nbytes * sharing / (disk.count * drive))

    def group(self, ranks: Sequence[int]) -> Group:
        """Return how these ranks are placed on nodes: in order, as many per node as it has devices.

        Raises:
            HardwareError: there are none, or one is given twice.
        """
        return grouped(ranks, self.hardware.device.count)

    def collective(self, kind: str, nbytes: int, group: Group, *, sharing: int = 1, algorithm: str = "auto") -> Collective:
        """Return the time and traffic of one collective.

        Args:
            kind: "all_gather" (``nbytes`` of the gathered tensor), "reduce_scatter" (of the whole input), "all_reduce",
                "broadcast", "reduce", "send" (of the tensor), "all_to_all" (the most that a rank sends or receives, including
                what it keeps) or "barrier".
            nbytes: see ``kind``.
            group: the ranks, see ``group``.
            sharing: how many such groups use the same nodes at once, including this one; ``Group.alike`` if all devices do.
            algorithm: "auto" is the fastest that NCCL has for the call: a ring, or a tree for an all-reduce; "hierarchical" is
                one collective inside each node and one between nodes for each device of a node.
        Raises:
            HardwareError: an unknown kind or algorithm, or a group that spans nodes without a ``[network]``.
        """
        return collectives.collective(self.hardware, kind, nbytes, group, sharing=sharing, algorithm=algorithm)

    def exchange(self, rows: Sequence[Sequence[int]], group: Group, *, sharing: int = 1) -> Collective:
        """Return the time and traffic of an all-to-all of uneven messages.

        Args:
            rows: ``rows[i][j]`` bytes go from the group's rank i to its rank j.
            group: the ranks.
            sharing: as in ``collective``.
        Raises:
            HardwareError: the rows do not match the group, or as in ``collective``.
        """
        return collectives.exchange(self.hardware, rows, group, sharing=sharing)

    def host_update(self, nbytes: float, flops: float = 0.0, sharing: int = 1) -> float:
        """Return the seconds of an optimizer's pass over host memory.

        Args:
            nbytes: bytes read and written.
            flops: its floating-point operations.
            sharing: how many ranks of the node update at once; each has its share of cores and bandwidth.
        """
        host = self.hardware.host
        _at_least_one("host_update", sharing=sharing)
        _from_zero("host_update", bytes=nbytes, FLOPs=flops)
        if self.hardware.kind == "cpu":
            # A device is one thread: it reaches what it reaches as a device, and no more than its share of the host.
            points = self.hardware.memory_bound.points
            alone = self.hardware.device.memory_bandwidth * fraction_at(points, nbytes)
            return max(nbytes / min(alone, host.memory_bandwidth / sharing), flops / (host.flops / max(sharing, host.cores)))
        return max(nbytes / host.memory_bandwidth, flops / host.flops) * sharing

    def step(self, seconds: float, busy: float, devices: int) -> StepCost:
        """Return energy and price of a step.

        Args:
            seconds: how long it takes.
            busy: the fraction of it in which a device computes, from 0 to 1.
            devices: of the whole run; nodes are counted whole.
        """
        power, price = self.hardware.power, self.hardware.price
        _from_zero("step", seconds=seconds, busy=busy)
        _at_least_one("step", devices=devices)
        joules = None
        if power is not None:
            nodes = math.ceil(devices / self.hardware.device.count)
            busy = min(1.0, busy)
            joules = seconds * (devices * (power.idle + busy * (power.max - power.idle)) + nodes * power.node)
        return StepCost(joules, None if price is None else price.device_hour * devices * seconds / 3600)


def _at_least_one(what: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise HardwareError(f"{what}: {name} expected a number from 1, found {number}")


def _from_zero(what: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise HardwareError(f"{what}: {name} expected a finite number from 0, found {number}")


def as_ns(seconds: float) -> int:
    """Whole nanoseconds, rounded up, for clocks that count: what takes time never takes none."""
    return math.ceil(seconds * 1e9 - 1e-3)
