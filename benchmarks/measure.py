"""What a trial is measured by: step time of the slowest rank, peak resident memory, bytes handed to collectives.

`worker.py` and `units.py` call it around a driver it knows nothing about. It never starts a process, prints, or touches
the model.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from offload.events import Event

MB = 1e6
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_NET_DEV = Path("/proc/net/dev")
# Operators of the c10d namespaces that move no payload worth counting.
_SILENT = ("barrier", "monitored_barrier_", "wait_tensor", "recv_", "recv_any_source_")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step; forward includes zero_grad, as a user's loop has it.

    On one rank the parts add up to the total. Over ranks (`slowest_rank`) they need not: a rank that is late in forward
    is waited for in another's backward.
    """

    forward_s: float
    backward_s: float
    update_s: float
    total_s: float


def timed_step(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], object], update: Callable[[], object]
) -> tuple[Tensor, StepTimes]:
    """Run one step; returns the detached loss (0-d fp32) and the three times."""
    begin = time.perf_counter()
    loss = forward()
    forwarded = time.perf_counter()
    backward(loss)
    backwarded = time.perf_counter()
    update()
    end = time.perf_counter()
    times = StepTimes(forwarded - begin, backwarded - forwarded, end - backwarded, end - begin)
    return loss.detach().float().clone(), times


def slowest_rank(steps: list[StepTimes]) -> list[StepTimes]:
    """Each step as its slowest rank saw it: the maximum over ranks of the total, and of every part on its own."""
    rows = [(step.forward_s, step.backward_s, step.update_s, step.total_s) for step in steps]
    tensor = torch.tensor(rows, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [StepTimes(*row) for row in tensor.tolist()]


def median_step(steps: list[StepTimes]) -> StepTimes:
    """The median of the total, and of every part on its own."""
    return StepTimes(
        forward_s=statistics.median(step.forward_s for step in steps),
        backward_s=statistics.median(step.backward_s for step in steps),
        update_s=statistics.median(step.update_s for step in steps),
        total_s=statistics.median(step.total_s for step in steps),
    )


def rss_nbytes() -> int:
    """Resident bytes of this process now."""
    return _status_nbytes("VmRSS")


def peak_rss_nbytes() -> int:
    """The most bytes that were resident at once since `restart_peak` (or since the process began)."""
    return _status_nbytes("VmHWM")


def restart_peak() -> bool:
    """Give free heap back and restart the kernel's peak counter; False where the kernel does not let us.

    Without the restart a peak would be that of building the model or of importing torch, whichever was higher.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def loopback_nbytes() -> int:
    """Bytes sent over the loopback interface by every process of the machine: a check on the counted payload."""
    for line in _NET_DEV.read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == "lo":
            return int(counters.split()[8])
    return 0


def _status_nbytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no line {key}: peak memory is read there, on Linux only.")


@dataclass(slots=True)
class Traffic:
    """Calls, elements and bytes of one operator, as this rank must send them (see `WireCounter`)."""

    calls: int = 0
    wire_numel: float = 0.0
    wire_nbytes: float = 0.0


@dataclass(slots=True)
class WireReport:
    """What one step sent from this rank, by operator."""

    by_operator: dict[str, Traffic] = field(default_factory=dict)

    @property
    def nbytes(self) -> float:
        return sum(traffic.wire_nbytes for traffic in self.by_operator.values())

    @property
    def numel(self) -> float:
        return sum(traffic.wire_numel for traffic in self.by_operator.values())


class WireCounter(TorchDispatchMode):
    """Counts what c10d operators called inside the block must send from one rank.

    A collective is counted at the least any algorithm sends from a rank on average: 2 (n-1)/n of the tensor for an
    all-reduce, (n-1)/n of the unsharded side for the others. A point-to-point send is counted at what it really sends;
    the matching receive is not counted, or a byte would be counted twice.
    """

    def __init__(self, world: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.report = WireReport()
        self._world = world

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            if name not in _SILENT:
                self._count(name, [*args, *kwargs.values()])
        return func(*args, **kwargs)

    def _count(self, name: str, arguments: list[Any]) -> None:
        # The largest argument is the unsharded side of a gather or a scatter, and the tensor itself of the others.
        numel, nbytes = max((_payload(argument) for argument in arguments), key=lambda pair: pair[1], default=(0, 0))
        share = self._share(name)
        traffic = self.report.by_operator.setdefault(name, Traffic())
        traffic.calls += 1
        traffic.wire_numel += numel * share
        traffic.wire_nbytes += nbytes * share

    def _share(self, name: str) -> float:
        if name == "send":
            return 1.0
        once = (self._world - 1) / self._world
        return 2 * once if name.replace("_", "").startswith("allreduce") else once


class EventBytes:
    """An observer of zhooks that adds up what the runtime says it moved: needed where bytes pass no c10d operator.

    A span may state its bytes when it begins, when it ends, or both; the larger of the two sums counts.
    """

    # The verbs that send; a rank sends (n-1)/n of what they name (an all-reduce names its buffer twice).
    SENDING = ("gather", "reduce")

    def __init__(self, world: int) -> None:
        self._world = world
        self._sums: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()

    def on_event(self, event: Event) -> None:
        """Add the event's bytes to its verb; called on whatever thread emitted it."""
        with self._lock:
            kinds = self._sums.setdefault(event.what, {})
            kinds[event.kind] = kinds.get(event.kind, 0) + event.nbytes

    def nbytes_by_verb(self) -> dict[str, int]:
        """Bytes of every verb heard; levels (counters) are no movement and are left out."""
        return {
            what: max(kinds.get(kind, 0) for kind in ("begin", "end", "instant"))
            for what, kinds in self._sums.items()
            if set(kinds) != {"counter"}
        }

    def wire_nbytes(self) -> float:
        """Bytes one rank sent, as `WireCounter` counts them."""
        verbs = self.nbytes_by_verb()
        return sum(verbs.get(what, 0) for what in self.SENDING) * (self._world - 1) / self._world


def _payload(value: Any) -> tuple[int, int]:
    """Elements and bytes of a tensor or of a nest of lists of tensors; anything else holds none."""
    if isinstance(value, Tensor):
        return value.numel(), value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        parts = [_payload(item) for item in value]
        return sum(numel for numel, _ in parts), sum(nbytes for _, nbytes in parts)
    return 0, 0


def max_over_ranks(values: list[float]) -> list[float]:
    """The largest of each value over the ranks; the values themselves without a process group."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def mean_over_ranks(values: Tensor) -> Tensor:
    """The mean of each element over the ranks, fp32 in and out."""
    if dist.is_initialized():
        dist.all_reduce(values)
        values = values / dist.get_world_size()
    return values
