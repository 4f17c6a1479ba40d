"""What a simulated step came to: when streams were busy, and who held what of each memory when it held the most.

``run.py`` adds these to a machine and to an attachment.  They keep intervals and sums, no tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from offload.events import Event
from offload.virtual import ACCELERATOR, Access, Happening, Moment, Stream

__all__ = ["Busy", "Holders", "Peak", "covered", "merged"]

Span = tuple[float, float]


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


class Busy:
    """When each stream had something to do, since ``reset``."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = {}

    def reset(self) -> None:
        self.spans = {}

    def happened(self, happening: Happening) -> None:
        self.spans.setdefault(happening.stream.name, []).append((happening.begin, happening.end))

    def recorded(self, moment: Moment, stream: Stream) -> None: ...
    def awaited(self, moment: Moment, stream: Stream) -> None: ...
    def kept(self, access: Access, stream: Stream) -> None: ...
    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None: ...
    def freed(self, address: int, nbytes: int, index: int) -> None: ...

    def on(self, *names: str) -> list[Span]:
        """Spans of streams whose names begin so, in order and merged where they touch."""
        return merged(span for name, spans in self.spans.items() if name.startswith(names) for span in spans)


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


@dataclass(slots=True)
class _Memory:
    rest: str
    held: int = 0
    by: Counter[str] = field(default_factory=Counter)
    peak: Peak = field(default_factory=lambda: Peak(0, 0.0, {}))


class Holders(Busy):
    """Who holds what: storages as the machine counts them, named by the events of an attachment."""

    def __init__(self) -> None:
        super().__init__()
        self._memories = (_Memory("temporary and activations"), _Memory("tiers"))
        #: By address: bytes, and what they are held for.
        self._named: dict[int, tuple[int, str]] = {}
        self._live: set[int] = set()
        self._now = self._begin = 0.0

    def reset(self) -> None:
        """A step begins now: peaks are of what comes."""
        super().reset()
        self._begin = self._now
        for memory in self._memories:
            memory.peak = Peak(memory.held, 0.0, _holders(memory))

    def peak(self, index: int) -> Peak:
        return self._memories[index].peak

    def happened(self, happening: Happening) -> None:
        super().happened(happening)
        self._now = max(self._now, happening.begin)

    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None:
        memory = self._memories[index]
        memory.held += nbytes
        if index == ACCELERATOR:
            self._live.add(address)
        if memory.held > memory.peak.nbytes:
            memory.peak = Peak(memory.held, self._now - self._begin, _holders(memory))

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
        memory = self._memories[ACCELERATOR]
        if before:
            memory.by[named] -= before
        memory.by[what] += event.nbytes
        self._named[address] = (event.nbytes, what)


def _holders(memory: _Memory) -> dict[str, int]:
    found = {what: nbytes for what, nbytes in memory.by.most_common() if nbytes > 0}
    rest = memory.held - sum(found.values())
    return {**found, **({memory.rest: rest} if rest > 0 else {})}
