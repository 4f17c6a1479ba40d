"""Owns what a recording says of the processes under the recorded one: the most they held, who did, and how busy they were.

Reports, measures and explanations ask it, each with a ledger that is there already. It adds nothing to the ledger, which is of
the recorded process alone, and says `Unseen` where nobody looked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zprof.analysis.coverage import Unseen
from zprof.analysis.remainder import peak_sample
from zprof.recording.children import CHILDREN, KINDS

if TYPE_CHECKING:
    from zprof.analysis.ledger import Ledger
    from zprof.trace.reader import Trace

__all__ = ["NOT_SAMPLED", "Child", "Children", "Kind", "children_of", "peak_note"]

NOT_SAMPLED = Unseen("not sampled: the recording did not look for child processes; --children memory does")
_MOST_NAMED = 64
#: What was there for less is not said to have been busy or idle.
_SHORT_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Child:
    """One process when all of them held most.

    Attributes:
        kind: one of `KINDS`.
        pss_nbytes: with its share of what it has in common with others. rss_nbytes: with all of that.
    """

    pid: int
    kind: str
    name: str
    pss_nbytes: int
    rss_nbytes: int


@dataclass(frozen=True, slots=True)
class Kind:
    """The processes of one kind.

    Attributes:
        most: at once.
        pss_nbytes, rss_nbytes: the most they held at once; None where it was not sampled.
        cpu_ns: the processor time of all of them.
        busy: of one core, each of them while it was there; None where that was too short to say.
        queued: for how much of that time each was ready to run and had no core; None where that was not sampled.
    """

    name: str
    most: int
    pss_nbytes: int | None
    rss_nbytes: int | None
    cpu_ns: int
    busy: float | None
    queued: float | None = None


@dataclass(frozen=True, slots=True)
class Children:
    """The processes under the recorded one.

    Attributes:
        seen: how many there have been. most: at once.
        kinds: those that there were, as in `KINDS`.
        pss_nbytes, pss_ns: the most they held at once, shared pages counted once, and when; None where that was not sampled.
        rss_nbytes: the most of their resident bytes, in which shared pages count for each.
        tree_nbytes: the most that they and the recorded process held; shared_nbytes: the most of it in shared memory.
        who: those that held most when the note was written that is nearest to the peak; who_ns is when.
        unread: of them, those of which the resident bytes stand for both.
        zombies: ended and not waited for, at the last look.
    """

    seen: int
    most: int
    kinds: tuple[Kind, ...]
    pss_nbytes: int | None
    pss_ns: int | None
    rss_nbytes: int | None
    tree_nbytes: int | None
    shared_nbytes: int | None
    who: tuple[Child, ...]
    who_ns: int | None
    unread: int = 0
    zombies: int = 0

    def kind(self, name: str) -> Kind | None:
        """The processes of that kind, if there were any."""
        return next((kind for kind in self.kinds if kind.name == name), None)


def children_of(ledger: Ledger) -> Children | Unseen:
    """What was sampled of them; of a run without any it says so in zeros."""
    notes = ledger.trace.notes(CHILDREN)
    if not notes:
        return NOT_SAMPLED
    body = notes[-1].body
    pss, rss = peak_sample(ledger, "children pss"), peak_sample(ledger, "children rss")
    tree, shared = peak_sample(ledger, "tree pss"), peak_sample(ledger, "tree shared memory")
    count = peak_sample(ledger, "children count")
    peak = peak_note(ledger.trace)
    found = (_kind(ledger, name) for name in KINDS)
    return Children(
        _count(body.get("seen")),
        0 if count is None else count[1],
        tuple(kind for kind in found if kind is not None),
        None if pss is None else pss[1],
        None if pss is None else pss[0],
        None if rss is None else rss[1],
        None if tree is None else tree[1],
        None if shared is None else shared[1],
        peak[0],
        peak[1],
        peak[2],
        _count(body.get("zombies")),
    )


def peak_note(trace: Trace) -> tuple[tuple[Child, ...], int | None, int]:
    """(who, when, how many unread) of the newest note of the moment they held most."""
    notes = trace.notes(CHILDREN)
    peak = notes[-1].body.get("peak") if notes else None
    if not isinstance(peak, dict):
        return (), None, 0
    listed = peak.get("who")
    who = tuple(Child(*each) for each in listed[:_MOST_NAMED] if _is_child(each)) if isinstance(listed, list) else ()
    when = peak.get("time_ns")
    return who, when if type(when) is int else None, _count(peak.get("unread"))


def _is_child(each: Any) -> bool:
    return isinstance(each, list) and [type(value) for value in each] == [int, str, str, int, int] and each[1] in KINDS


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _kind(ledger: Ledger, name: str) -> Kind | None:
    counts = ledger.samples("children count", points=1 << 17).get(name)
    if counts is None or not len(counts[1]) or not counts[1].max():
        return None
    time_ns, count = counts
    cpu = ledger.samples("children cpu", points=1 << 17).get(name)
    # From one look to the next there were as many as at the first of both.
    there_ns = int((np.diff(time_ns) * count[:-1]).sum())
    shares = (_rise(ledger, what, name, there_ns) for what in ("children cpu", "children queued"))
    cpu_ns = 0 if cpu is None or not len(cpu[1]) else int(cpu[1][-1])
    held = (_most(ledger, "children pss", name), _most(ledger, "children rss", name))
    return Kind(name, int(count.max()), *held, cpu_ns, *shares)


def _rise(ledger: Ledger, what: str, name: str, there_ns: int) -> float | None:
    """Of the time that they were there; what they had spent before the first look counts for none that is known."""
    found = ledger.samples(what, points=1 << 17).get(name)
    if found is None or len(found[1]) < 2 or there_ns < _SHORT_NS:
        return None
    return int(found[1][-1] - found[1][0]) / there_ns


def _most(ledger: Ledger, what: str, key: str) -> int | None:
    found = ledger.samples(what).get(key)
    return None if found is None or not len(found[1]) else int(found[1].max())
