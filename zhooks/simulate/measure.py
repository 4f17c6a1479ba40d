"""What a simulated step came to: when streams were busy, who held what of each memory, what torch's allocator would reserve.

Listeners of a machine; they keep intervals and sums, no tensor.

Note: [Memory of several streams]
    A block of the caching allocator goes back to the stream that took it.  What another stream was recorded to use is pending
    until that stream has come so far; the allocator looks when it is next asked for memory, by the host's clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from offload.allocator import ALLOC, RELEASE, REQUEST, Events, Lane, Settings, replay
from offload.events import Event
from offload.virtual import ACCELERATOR, Access, Happening, Listener, Machine, Stream
from zhooks.optim import watch_steps

__all__ = ["RESOURCES", "Allocations", "Holders", "Peak", "Reserved", "Usage", "covered"]

Span = tuple[float, float]

#: What a step may be busy with, in the order in which it is shown.
RESOURCES = ("compute", "update", "gather", "reduce", "collectives", "copies", "disk", "host update", "dispatch", "control")
#: Of torch's process groups, as ``zhooks.comm`` calls them on a CPU's one stream.
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def merged(spans: Iterable[Span]) -> list[Span]:
    """In order, those that touch or overlap as one."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        elif end > begin:
            out.append((begin, end))
    return out


def covered(spans: Iterable[Span], without: Iterable[Span] = ()) -> float:
    """Seconds of ``spans`` in which nothing of ``without`` goes on; both merged."""
    left, total = list(without), 0.0
    for begin, end in spans:
        total += end - begin
        total -= sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in left)
    return total


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that one memory held.

    Attributes:
        nbytes: allocated then.
        at: seconds after the step began.
        holders: bytes by what they were held for, the largest first; of the device what nobody named is "temporary and
            activations", of the host all is its tier's.
    """

    nbytes: int
    at: float
    holders: dict[str, int]


@dataclass(slots=True)
class _Memory:
    unnamed: str
    held: int = 0
    by: Counter[str] = field(default_factory=Counter)
    peak: Peak = field(default_factory=lambda: Peak(0, 0.0, {}))

    def holders(self) -> dict[str, int]:
        found = {what: nbytes for what, nbytes in self.by.most_common() if nbytes > 0}
        left = self.held - sum(found.values())
        return {**found, self.unnamed: left} if left > 0 else found


class Holders(Listener):
    """Who holds what: storages as the machine counts them, named by the events of an attachment; and when streams were busy."""

    def __init__(self) -> None:
        self._spans: dict[str, list[Span]] = {}
        self._memories = (_Memory("temporary and activations"), _Memory("tiers"))
        #: By address: bytes, and what they are held for.
        self._named: dict[int, tuple[int, str]] = {}
        self._live: set[int] = set()
        self._now = self._begin = 0.0

    def reset(self) -> None:
        """A step begins now: spans and peaks are of what comes."""
        self._spans = {}
        self._begin = self._now
        for memory in self._memories:
            memory.peak = Peak(memory.held, 0.0, memory.holders())

    def peak(self, index: int) -> Peak:
        return self._memories[index].peak

    def on(self, *names: str) -> list[Span]:
        """Spans of streams whose names begin so, in order and merged where they touch."""
        return merged(span for name, spans in self._spans.items() if name.startswith(names) for span in spans)

    def happened(self, happening: Happening) -> None:
        self._spans.setdefault(happening.stream.name, []).append((happening.begin, happening.end))
        self._now = max(self._now, happening.begin)

    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None:
        memory = self._memories[index]
        memory.held += nbytes
        if index == ACCELERATOR:
            self._live.add(address)
        if memory.held > memory.peak.nbytes:
            memory.peak = Peak(memory.held, self._now - self._begin, memory.holders())

    def freed(self, address: int, nbytes: int, index: int) -> None:
        self._memories[index].held -= nbytes
        self._live.discard(address)
        known, what = self._named.pop(address, (0, ""))
        if known:
            self._memories[index].by[what] -= known

    def on_event(self, event: Event) -> None:
        """An attachment's event: a storage is held for something from now on."""
        if event.kind != "hold":
            return
        storage: object = event.subject
        address = storage.data_ptr()  # type: ignore[attr-defined]
        if address not in self._live:
            return  # a range of other memory, which is counted as a whole
        what = event.what.removesuffix(" on device")
        before, named = self._named.get(address, (0, ""))
        by = self._memories[ACCELERATOR].by
        if before:
            by[named] -= before
        by[what] += event.nbytes
        self._named[address] = (event.nbytes, what)


class Usage(Listener):
    """What the last step of a simulation was busy with, by resource, and what the device held outside of updates.

    Attributes:
        busy: seconds by resource; "compute" is forward and backward on the device, "update" the optimizer's there,
            "collectives" those of the model's own code (``tp``).
        moved: bytes by resource.
        passes_peak: the most that the device held outside of updates.
    """

    def __init__(self) -> None:
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.moved: Counter[str] = Counter()
        self.passes_peak = 0
        self._spans: list[Span] = []
        self._machine: Machine | None = None
        self._counts = self._updating = False

    @property
    def passes_s(self) -> float:
        """Seconds in which forward and backward compute or wait for collectives of their own."""
        return covered(merged(self._spans))

    @contextmanager
    def following(self, machine: Machine) -> Iterator[None]:
        """Follow a machine inside, and torch's steps before those that attach later."""
        self._machine = machine
        machine.listeners.append(self)
        unwatch = watch_steps(self)
        try:
            yield
        finally:
            unwatch()
            machine.listeners.remove(self)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step is issued inside: what was seen before does not count, nor does what detaching does."""
        assert self._machine is not None
        self.busy, self.moved, self._spans = defaultdict(float), Counter(), []
        self.passes_peak = self._machine.held[ACCELERATOR]
        self._updating, self._counts = False, True
        yield
        self._counts = False

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._updating = True

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._updating = False

    def happened(self, happening: Happening) -> None:
        if not self._counts:
            return
        assert self._machine is not None
        resource = self._resource(happening, self._machine.costs.accelerated)
        self.busy[resource] += happening.end - happening.begin
        self.moved[resource] += happening.nbytes
        if resource in ("compute", "collectives"):
            self._spans.append((happening.begin, happening.end))
        if happening.what.startswith(("aten", "copy")):
            self.busy["dispatch"] += self._machine.costs.issue

    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None:
        if index == ACCELERATOR and self._counts and not self._updating:
            assert self._machine is not None
            self.passes_peak = max(self.passes_peak, self._machine.held[ACCELERATOR])

    def _resource(self, happening: Happening, accelerated: bool) -> str:
        stream, what = happening.stream.name, happening.what
        for name in ("gather", "reduce", "disk", "collectives"):
            if stream.startswith(name) or what.startswith(f"{name} "):
                return name
        operation = what.startswith(("aten", "copy"))
        if stream == "compute" or (stream == "host" and operation and not accelerated):
            return "update" if self._updating else "compute"
        if what.partition(" over ")[0] in _COLLECTIVES:
            return "collectives"
        if stream == "host":
            return "host update" if operation else "control"
        return "control" if stream.startswith("control") else "copies"


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the allocator reserved of the device, from ``build`` to the end of the last step.

    Attributes:
        settings: as PYTORCH_ALLOC_CONF has them; "" is torch's default.
        nbytes: the most that was reserved.
        allocated: the most that was in use, in blocks as large as the allocator makes them.
        stuck: the most that was free, and could not go back because its segment or page had something in use.
        retries: how often everything free was given back to go on.
        failed: requests that the device had no memory for.
    """

    settings: str
    nbytes: int
    allocated: int
    stuck: int
    retries: int
    failed: int


class Allocations(Listener):
    """The device's allocations in the order the allocator was asked; see Note [Memory of several streams]."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._rows: list[tuple[int, int, int, int, int]] = []
        #: By address: slot, bytes, lane.
        self._live: dict[int, tuple[int, int, int]] = {}
        self._lanes: dict[int, int] = {}
        #: By address: until when streams that did not take it use it.
        self._used: dict[int, float] = {}
        self._pending: list[tuple[float, int, int, int]] = []
        self._slots = 0

    def kept(self, access: Access, stream: Stream) -> None:
        base: int | None = access.start
        if base not in self._live:
            base = next((at for at, (_, size, _) in self._live.items() if at <= access.start < at + size), None)
        if base is not None:
            self._used[base] = max(self._used.get(base, 0.0), stream.ready)

    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None:
        if index != ACCELERATOR:
            return
        over = [one for one in self._pending if one[0] <= self._machine.now]
        self._pending = [one for one in self._pending if one[0] > self._machine.now]
        for _, slot, size, lane in over:
            self._note(RELEASE, slot, size, lane)
        lane = self._lanes.setdefault(stream.number, len(self._lanes))
        self._live[address] = (self._slots, nbytes, lane)
        self._note(ALLOC, self._slots, nbytes, lane)
        self._slots += 1

    def freed(self, address: int, nbytes: int, index: int) -> None:
        if index != ACCELERATOR or address not in self._live:
            return
        block = self._live.pop(address)
        until = self._used.pop(address, 0.0)
        if until > self._machine.now:
            self._pending.append((until, *block))
        self._note(REQUEST if until > self._machine.now else RELEASE, *block)

    def _note(self, action: int, slot: int, nbytes: int, lane: int) -> None:
        self._rows.append((action, slot, nbytes, lane, int(self._machine.now * 1e9)))

    def reserved(self, settings: Settings, limit: int) -> Reserved:
        """What the allocator makes of them under these settings, on a device of ``limit`` bytes."""
        action, slot, nbytes, lane, time_ns = np.asarray(self._rows, dtype=np.int64).reshape(-1, 5).T.copy()
        lanes = tuple(Lane((0, 0), number) for number in self._lanes) or (Lane((0, 0), 0),)
        events = Events(action.astype(np.uint8), slot, nbytes, lane.astype(np.int32), time_ns, lanes)
        found = replay(events, settings, limit=limit, points=2)
        return Reserved(
            settings.text, found.peak_reserved, found.peak_allocated, found.worst_stuck, found.retries, found.failed
        )
