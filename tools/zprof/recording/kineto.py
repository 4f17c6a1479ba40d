"""Owns one session of torch.profiler (Kineto): how it is started and ended beside a script, and its events on our clock.

`zprof.recording.operators` opens one for each window of steps. It gives no event to anybody: `zprof.recording.joining` does.

Note: [All threads]
    The session is one of all threads (``profile_all_threads``): operators of threads that Python starts are seen, and it may be
    ended by any thread. One of a single thread could only be ended there; if a script then started torch.profiler on another,
    ending ours would crash the process (torch 2.13).

Note: [Kineto's clock]
    Since torch 2.2 Kineto reads the processor's counter and converts it into nanoseconds since 1970 by two looks at both. That
    is neither our clock nor a fixed distance from it. So marks of a known ``perf_counter_ns`` are recorded at its begin and
    end: each lies between two readings of our clock, the narrowest pair tells the distance, and between begin and end it is
    interpolated. What a device did is on Kineto's clock already.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType, _disable_profiler
from torch._C._profiler import ProfilerActivity, _ExperimentalConfig, _RecordFunctionFast
from torch.profiler import _KinetoProfile

from zprof.clock import now_ns
from zprof.trace.operators import KINDS

__all__ = ["Seen", "Session", "is_starting"]

OPERATOR, NODE, ANNOTATION, MODULE, RUNTIME, KERNEL, MEMCPY, MEMSET, MARK = range(len(KINDS))

_MARK = "zprof: clock"
_MARKS = 16
#: What the events of newer torches call themselves.
_ACTIVITIES = {
    "cpu_op": OPERATOR, "user_annotation": ANNOTATION, "kernel": KERNEL, "gpu_memcpy": MEMCPY, "gpu_memset": MEMSET,
    "gpu_user_annotation": MARK, "cuda_runtime": RUNTIME, "cuda_driver": RUNTIME,
    "xpu_runtime": RUNTIME, "privateuse1_runtime": RUNTIME, "overhead": MARK, "cuda_sync": MARK, "collective_comm": KERNEL,
}  # fmt: skip
#: How calls of a device's runtime begin, where the event does not say what it is.
_RUNTIME = ("cuda", "cuLaunch", "cuMem", "cuStream", "cuEvent", "hip", "ur", "ze")
_MOST_NAME = 400
#: Of torch.autograd.profiler's scopes, the one of a node of a backward.
_BACKWARD_SCOPE = 1


@dataclass(slots=True)
class Seen:
    """Events as torch.profiler saw them, columns of one length; times on our clock.

    Attributes:
        thread, end_thread: torch's number of the thread it began and ended on; another number is an event that went on
            elsewhere, 0 one that had not ended.
        lane: the system's number of a thread, or a stream. device: -1 for the host.
        sequence, forward_thread: which node of autograd's it made or ran, and on which thread that was made; -1 for none.
        scope: torch's. id, linked: correlation: what a device did has the ``id`` of the call that launched it, and
            ``linked`` is the ``id`` of the operator.
        line: the user's line that called it, where that was asked for.
        error_ns: of the times, at most. begin_ns, end_ns: when the session was open.
    """

    name: list[str] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    thread: list[int] = field(default_factory=list)
    end_thread: list[int] = field(default_factory=list)
    lane: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    forward_thread: list[int] = field(default_factory=list)
    scope: list[int] = field(default_factory=list)
    id: list[int] = field(default_factory=list)
    linked: list[int] = field(default_factory=list)
    line: list[str] = field(default_factory=list)
    begin_ns: int = 0
    end_ns: int = 0
    error_ns: int = 0


_starting = threading.local()


def is_starting() -> bool:
    """It is one of ours that this thread is starting."""
    return getattr(_starting, "now", False)


class Session:
    """A session of torch.profiler, not yet begun.

    Args:
        line_of: the user's line in a stack as torch has it ("file(line): function" from the inside out), "" for none; None
            where no stacks are wanted, which cost much.
    """

    def __init__(self, line_of: Callable[[list[str]], str] | None = None) -> None:
        self._line_of = line_of
        self._began: list[tuple[int, int]] = []
        self.activities = {ProfilerActivity.CPU}
        # Not by asking: to ask may start a device that the script does not use.
        if torch.cuda.is_initialized():
            self.activities.add(ProfilerActivity.CUDA)
        elif hasattr(torch, "xpu") and torch.xpu.is_initialized():
            self.activities.add(ProfilerActivity.XPU)
        stack = line_of is not None
        config = _ExperimentalConfig(profile_all_threads=True, verbose=stack)
        self._profile = _KinetoProfile(activities=self.activities, with_stack=stack, experimental_config=config)

    def prepare(self) -> None:
        """What takes long the first time, a step ahead."""
        with _quietly():
            self._profile.prepare_trace()

    def start(self) -> None:
        """Record from here on, once devices have done what was called for before: it would look as if they were idle."""
        if ProfilerActivity.CUDA in self.activities:
            for index in range(torch.cuda.device_count()):
                # Not of others: to wait for one may start it.
                if torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
                    torch.cuda.synchronize(index)
        elif self.activities != {ProfilerActivity.CPU}:
            torch.xpu.synchronize()
        with _quietly():
            self._profile.start_trace()
        self._began = _marks()

    def stop(self) -> None:
        """Record no more; in any thread."""
        self._ended = _marks()
        with _quietly():
            self._profile.stop_trace()

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        if self.activities == {ProfilerActivity.CPU}:
            _disable_profiler()
        else:
            # What the driver has under way is nothing a child may touch; this thread is heard no more.
            torch.autograd._enable_record_function(False)

    def seen(self) -> Seen:
        """The events, once it was stopped; none where another session took its place."""
        found = Seen()
        profiler = self._profile.profiler
        results = None if profiler is None else profiler.kineto_results
        events = [] if results is None else results.events()
        marks = [event for event in events if event.name() == _MARK]
        if len(marks) != len(self._began) + len(self._ended):
            return found
        marks.sort(key=lambda event: event.start_ns())
        begun = _distance(marks[: len(self._began)], self._began)
        ended = _distance(marks[len(self._began) :], self._ended)
        found.error_ns = max(begun[1], ended[1])
        found.begin_ns, found.end_ns = self._began[-1][1], self._ended[0][0]
        _take(found, events, (begun[2], begun[0]), (ended[2], ended[0]), self._line_of)
        return found


def _marks() -> list[tuple[int, int]]:
    """What our clock says before and after each mark."""
    found = []
    for _ in range(_MARKS):
        before = now_ns()
        with _RecordFunctionFast(_MARK):
            pass
        found.append((before, now_ns()))
    return found


def _distance(marks: list[Any], ours: list[tuple[int, int]]) -> tuple[int, int, int]:
    """(Kineto's clock less ours, how wrong that may be, when on Kineto's clock) of the mark that tells most."""
    best = (0, 1 << 62, 0)
    for mark, (before, after) in zip(marks, ours, strict=True):
        # Ours was read before the mark began, and again after it ended.
        high, low = mark.start_ns() - before, mark.end_ns() - after
        if high >= low and high - low < best[1]:
            best = ((high + low) // 2, high - low, mark.start_ns())
    return best[0], (best[1] + 1) // 2, best[2]


def _take(
    found: Seen, events: Any, first: tuple[int, int], last: tuple[int, int], line_of: Callable[[list[str]], str] | None
) -> None:
    host, says = DeviceType.CPU, bool(len(events)) and hasattr(events[0], "activity_type")
    hidden = bool(len(events)) and hasattr(events[0], "is_hidden_event")
    span, drift = max(last[0] - first[0], 1), last[1] - first[1]
    for event in events:
        name = event.name()
        if name == _MARK or (hidden and event.is_hidden_event()):
            continue
        on_host = event.device_type() == host
        scope = event.scope()
        kind = _kind(event, name, on_host, says)
        if kind < 0:
            continue
        begin, end = event.start_ns(), event.end_ns()
        found.name.append(name if len(name) <= _MOST_NAME else _short(name))
        found.kind.append(NODE if scope == _BACKWARD_SCOPE else kind)
        found.begin.append(begin - first[1] - drift * (begin - first[0]) // span)
        found.end.append(end - first[1] - drift * (end - first[0]) // span)
        found.thread.append(event.start_thread_id())
        found.end_thread.append(event.end_thread_id())
        found.lane.append(event.device_resource_id())
        found.device.append(-1 if on_host else event.device_index())
        found.sequence.append(event.sequence_nr())
        found.forward_thread.append(event.fwd_thread_id())
        found.scope.append(scope)
        found.id.append(event.correlation_id())
        found.linked.append(event.linked_correlation_id())
        found.line.append("" if line_of is None or not on_host else line_of(event.stack()))


def _kind(event: Any, name: str, on_host: bool, says: bool) -> int:
    """-1 of what is no event to be recorded; calls of Python's functions are what stacks are made of."""
    if name in ("[memory]", "[OutOfMemory]"):
        return -1
    if says:
        return -1 if event.is_python_function() else _ACTIVITIES.get(event.activity_type(), OPERATOR if on_host else KERNEL)
    if on_host:
        if ".py(" in name or name.startswith(("<built-in", "nn.Module: ")):
            return -1
        if event.is_user_annotation():
            return ANNOTATION
        return RUNTIME if event.linked_correlation_id() or (name.startswith(_RUNTIME) and ":" not in name) else OPERATOR
    if event.is_user_annotation():
        return MARK
    return MEMCPY if name.startswith("Memcpy") else MEMSET if name.startswith("Memset") else KERNEL


def _short(name: str) -> str:
    """A kernel's name may be a page of template arguments: beginning and end distinguish it."""
    import zlib

    return f"{name[: _MOST_NAME - 10]}~{zlib.crc32(name.encode('utf-8', 'backslashreplace')):08x}"


@contextmanager
def _quietly() -> Iterator[None]:
    """Kineto says on stderr that it starts and stops, which the script would not: by what it asks when it is first used."""
    name = "KINETO_LOG_LEVEL"
    ours = name not in os.environ
    if ours:
        os.environ[name] = "6"
    _starting.now = True
    try:
        yield
    finally:
        _starting.now = False
        if ours:
            os.environ.pop(name, None)
