"""Owns what a recording can say: which measures its level, its device and what was attached let it see, and why not the others.

Measures, reports, pages and exports ask it before they show a number. It never turns what was not seen into 0: the answer is
an `Unseen`, which is no number and says what to do.

Note: [Who sees what]
    Every storage of torch is seen at level "alloc" and above. Below, only what models under zhooks place is: of the device its
    parameters, gradients, optimizer states and communication buffers, not what the model makes besides. Tiers that only
    zhooks fills, buffers that it alone knows as communication, passes and transfers are seen of models under zhooks, at any
    level; waits of those and, in any script, for the collectives of torch.distributed. A GPU's host queues work and goes on:
    how long the device stood still is seen where its streams were marked, which the note "lanes" says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zprof.rows import CATEGORIES, TIERS

if TYPE_CHECKING:
    from zprof.trace.reader import Trace

__all__ = ["NOT_MEASURED", "Coverage", "Unseen", "coverage"]

#: What zhooks says of the device; the categories of the other tiers are its own altogether.
_PLACED = ("parameter", "gradient", "optimizer", "communication")
#: What is recorded of any script that torch.distributed's collectives are seen of.
_OF_COLLECTIVES = frozenset({"wait", "wait collective", "wait point to point", "collective", "point to point"})
#: Spans that end when the host has queued what they stand for, where the device has streams of its own.
_QUEUED = ("gather", "gather activation", "reduce", "collective", "point to point", "forward", "backward", "update")
#: Why nothing was followed at level "ops", in one that saw no such moment.
_BEGINS = (
    "which at level ops begins outside of recorded steps, with a forward that keeps a graph or the end of an optimizer's step; "
    "record with --level alloc"
)
#: In place of the times of those.
NOT_MEASURED = "not measured on CUDA"


@dataclass(frozen=True, slots=True)
class Unseen:
    """In place of a number: why the recording does not hold it, and what would."""

    why: str

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True, slots=True)
class Coverage:
    """What one rank's recording saw.

    Attributes:
        level: of the recording. every_storage: every storage of torch was followed, from the first to the last.
        zhooks: a model was under zhooks. cuda: the device is a GPU.
        used: the tiers that anything was held on.
        dropped, lost: rows that are not in the file; those of them that were not thinned out but lost.
        spans_kept: of a file that was thinned out, the spans that are all there still.
        stopped: why the storages were not followed to the end, "" where they were; never: not at all.
        lacking: what else could not be recorded, a line each.
        lanes: streams of the device were marked. untimed: spans that have no time of the device's nevertheless, and why.
        collectives: None where none of torch.distributed's were recorded, else why not all of them, "" where they were.
        loaders: of torch's data loaders, in the same way.
        unfollowed: when storages that were made were not followed, because operators were recorded, in words.
    """

    level: str
    zhooks: bool
    cuda: bool
    used: tuple[str, ...]
    dropped: int = 0
    lost: int = 0
    spans_kept: tuple[str, ...] = ()
    stopped: str = ""
    never: bool = False
    collectives: str | None = None
    lacking: tuple[str, ...] = ()
    lanes: bool = False
    untimed: tuple[tuple[str, str], ...] = ()
    loaders: str | None = None
    unfollowed: tuple[str, ...] = ()

    @property
    def every_storage(self) -> bool:
        return self.level != "events" and not self.stopped

    # Bytes.

    def place(self, category: str, tier: str) -> Unseen | None:
        """Why the bytes of a category on a tier are not known; None where they are."""
        if self.lost:
            return Unseen(f"{self.lost:,} recorded rows are not in the file")
        if self._by_zhooks_alone(tier):
            return None if self.zhooks else _no_zhooks(f"the {tier} tier")
        if category == "communication":
            return None if self.zhooks else _no_zhooks("communication buffers")
        if self.every_storage:
            return None
        if self.stopped:
            return Unseen(f"storages were {'not followed, ' if self.never else 'followed only until '}{self.stopped}")
        if self.zhooks and (category in _PLACED or (tier == "host" and category == "activation")):
            return None
        return Unseen("not recorded at level events: record with --level alloc")

    def tier(self, tier: str) -> Unseen | None:
        """Why what a tier holds in all is not known: one of its categories is not.

        Where every storage is seen, what is not known as communication is counted elsewhere, and in the whole.
        """
        whole = self.every_storage and not self._by_zhooks_alone(tier)
        for category in CATEGORIES:
            if not (whole and category == "communication") and (unseen := self.place(category, tier)) is not None:
                return unseen
        return None

    def missing(self, tier: str) -> tuple[str, ...]:
        """The categories whose bytes on a tier are not known."""
        return tuple(category for category in CATEGORIES if self.place(category, tier) is not None)

    def scope(self, tier: str) -> tuple[object, ...]:
        """Recordings that agree on it hold the same kind of bytes on a tier, so that they can be compared."""
        return (self.every_storage or self._by_zhooks_alone(tier), self.tier(tier) is None or self.missing(tier))

    def anything(self, tier: str) -> bool:
        """Whether any category on a tier is known."""
        return len(self.missing(tier)) < len(CATEGORIES)

    def lines(self) -> list[str]:
        """What a reader of totals must know, a line each: what is missing of the tiers in use, and whether waits are."""
        found = []
        for tier in TIERS:
            unseen = self.tier(tier)
            if unseen is not None and (tier in self.used or (tier == "device" and not self.used)):
                missing = "nothing" if not self.anything(tier) else f"no {', '.join(self.missing(tier))}"
                found.append(f"{tier}: {missing}: {unseen}")
        waits = self.waits()
        if waits is None and not self.zhooks:
            seen = ["data loaders"] * (self.loaders == "") + ["torch.distributed's collectives"] * (self.collectives == "")
            waits = Unseen(f"only those for {' and '.join(seen)} are seen, and none inside compiled code")
        aside = [f"storages made {when}" for when in self.unfollowed]
        return [*found, *aside, *([f"waits: {waits}"] if waits is not None else []), *self.lacking]

    def _by_zhooks_alone(self, tier: str) -> bool:
        """Nobody else's bytes would be on the tier: the disk, and without a GPU the host, whose memory is the device."""
        if tier == "host":
            return not self.cuda and (self.level == "events" or tier not in self.used or self.zhooks)
        return tier == "disk"

    # Time.

    def steps(self) -> Unseen | None:
        """Why the steps are not known."""
        return self._thinned("step")

    def spans(self, *whats: str) -> Unseen | None:
        """Why spans that zhooks emits are not known: passes, waits, transfers."""
        if not self.zhooks and not all(what in _OF_COLLECTIVES for what in whats):
            return _no_zhooks("passes and transfers")
        if not self.zhooks and self.collectives is None:
            return Unseen("not seen: no collective of torch.distributed was recorded; other waits are seen under zhooks only")
        if not self.zhooks and self.collectives:
            return Unseen(f"not seen: torch.distributed's collectives could not be followed: {self.collectives}")
        for what in whats:
            if (unseen := self.queued(what) or self._thinned(what)) is not None:
                return unseen
        return None

    def queued(self, what: str) -> Unseen | None:
        """Why the times of such spans, where they were recorded, are not those of what they stand for."""
        if not self.cuda or not (what in _QUEUED or what.startswith("wait")):
            return None
        if not self.lanes:
            return Unseen(f"{NOT_MEASURED}: the host only queues them; use nsys or torch.profiler for the device's time")
        lost = next((why for name, why in self.untimed if name == what or (what == "wait" and name.startswith("wait "))), None)
        return None if lost is None else Unseen(f"{NOT_MEASURED}: {lost}")

    def amounts(self, what: str) -> Unseen | None:
        """Why the bytes that such spans moved are not known."""
        lost = self.queued(what) if self.lanes else None
        return (None if self.zhooks else self.spans(what)) or lost or self._thinned(what)

    def sees_collectives(self) -> bool:
        """Whether the ranks can be compared by when they began them."""
        return self.zhooks or self.collectives == ""

    def waits(self) -> Unseen | None:
        """Why exposed time is not known; it is also where data loaders are all that was waited for."""
        if not self.zhooks and self.collectives is None and self.data() is None:
            return self.queued("wait")
        return self.spans("wait")

    def data(self) -> Unseen | None:
        """Why it is not known how long the training thread waited for data loaders, which keep the host itself waiting."""
        if self.loaders is None:
            return Unseen("not seen: no data loader of torch's was iterated")
        if self.loaders:
            return Unseen(f"not seen: torch's data loaders could not be followed: {self.loaders}")
        return self._thinned("wait data")

    def _thinned(self, what: str) -> Unseen | None:
        if not self.dropped or (what in self.spans_kept and not self.lost):
            return None
        return Unseen(f"{self.dropped:,} recorded rows are not in the file")


def _no_zhooks(what: str) -> Unseen:
    return Unseen(f"not seen: {what} {'is' if what.startswith('the') else 'are'} recorded for models under zhooks only")


def coverage(trace: Trace, used: tuple[str, ...] = TIERS) -> Coverage:
    """What ``trace`` saw; ``used`` are the tiers its ledger has."""
    from zprof.trace.operators import WINDOW
    from zprof.trace.reader import DROPPED

    thinned = [note.body for note in trace.notes(DROPPED)]
    rows = [body.get("rows") for body in thinned]
    most = max((count for count in rows if type(count) is int), default=0)
    kept = thinned[-1].get("spans") if thinned else None
    stopped = [str(note.body.get("why"))[:200] for note in trace.notes("storages")]
    windows = [note.body for note in trace.notes(WINDOW)]
    waited = any("steps" in body for body in windows) and not any("followed_from_ns" in body for body in windows)
    if waited and not stopped:
        stopped = [_BEGINS]
    never = bool(stopped) and (waited or stopped[-1].startswith("not with torch"))
    marked = [note.body for note in trace.notes("lanes")]
    untimed = marked[-1].get("untimed") if marked else None
    collectives = [str(note.body.get("why", ""))[:200] for note in trace.notes("collectives")]
    return Coverage(
        trace.header.level,
        bool(trace.notes("policy")),
        trace.accelerated,
        used,
        trace.dropped,
        max(0, trace.dropped - most),
        tuple(what for what in kept if isinstance(what, str)) if isinstance(kept, list) else (),
        stopped[-1] if stopped else "",
        never,
        collectives[-1] if collectives else None,
        tuple(f"{str(note.body.get('what'))[:80]}: {str(note.body.get('why'))[:200]}" for note in trace.notes("lacking")[:8]),
        bool(marked),
        tuple((str(what)[:80], str(why)[:200]) for what, why in untimed.items()) if isinstance(untimed, dict) else (),
        _followed(trace),
        () if never else _unfollowed(windows, trace.header.mono_ns),
    )


def _followed(trace: Trace) -> str | None:
    """Whether data loaders were: None where none was iterated, else why not all of them."""
    notes = [note.body for note in trace.notes("loaders")]
    whys = [str(body["why"])[:200] for body in notes if "why" in body]
    return whys[-1] if whys else "" if notes and notes[-1].get("loaders") else None


def _unfollowed(windows: Sequence[Mapping[str, Any]], began_ns: int) -> tuple[str, ...]:
    found: dict[int, str] = {}
    for body in windows:
        number, counted, first, bounds = (body.get(key) for key in ("window", "counted", "first", "bounds"))
        if body.get("followed") is True and type(number) is int and 0 <= number < 64:
            said = "the steps whose operators were recorded"
            if counted in ("step", "forward") and type(first) is int and isinstance(bounds, list) and len(bounds) > 1:
                last = first + len(bounds) - 2
                said = f"{counted} {first}" if last == first else f"{counted}s {first} to {last}"
            found[number] = f"in {said}: not followed while operators were recorded there"
    begins = [body["followed_from_ns"] for body in windows if "followed_from_ns" in body]
    if begins and type(begins[0]) is int:
        after_s = max(0, begins[0] - began_ns) / 1e9
        before = f"in the first {after_s:.3g} s: only those that lived longer, since they were followed from then on"
        return (before, *found.values())
    return tuple(found.values())
