"""Which rank is gone or late: found out once by all that are left, who then raise the same error.

The transports come here when a wait has failed, and look here while they wait; ``attachment/recovery.py`` asks whether ranks
can go on.  It speaks through the process group's store alone, and never decides how long a wait may take.

Note: [Roll call]
    A rank whose wait fails knows little: that a connection was closed, or that nothing came.  What it waits for may be a rank
    that itself waits for another.  So it closes its own connections, which ends the waits of whoever waits for it, and says in
    the store that it is here and what it saw; so does everyone whom that reaches.  Who is missing then is the rank that is
    gone, or late: the first rank that can tell writes it down, and all raise that.  Processes of this machine that have ended
    need no wait; for others there is ``GRACE_S``, which is taken from the time that a wait may last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol
from weakref import WeakMethod

from offload.errors import DivergenceError
from offload.text import plural
from zhooks.comm.group_store import GroupStore, StoreLost, advice, capital
from zhooks.comm.processes import Process, ended
from zhooks.comm.progress import Progress, describe_evaluations, describe_progress
from zhooks.comm.transport import Call
from zhooks.layout import Axis

#: How long a roll call waits for ranks that may be alive, at most; see Note [Roll call].
GRACE_S = 2.0
_PAUSE_S = 0.02
#: How long the store may take for an answer: in a roll call, and while this rank waits for something else.
ANSWER_S, _POLL_S = 5.0, 0.5
_METHODS = "call save, load, detach and the like on all ranks"
_ON_ALL = f"{_METHODS}, not under `if rank == 0:`"
_EVALUATE = (
    "evaluate and generate on all ranks, not under `if rank == 0:`, because a forward of a sharded model gathers from every "
    "rank; or on some ranks inside `with attachment.resident():`, which all of them enter"
)
#: What is true of all calls where nobody is gone or late.
SAME_ORDER = "Expected every rank to make the same calls in the same order."
_SLOW = "If a rank is only slow, raise [comm] timeout_s."
#: What to do where all ranks are alive.
_TO_CONTINUE = "To continue, call attachment.recover() on every rank."
_ONCE_BACK = (
    "Once it answers again, call attachment.recover() on every rank; if it does not, end the processes and load the last "
    "checkpoint in new ones."
)
#: What has become of a rank whose process has ended.
GONE = "gone: killed, stopped by an error of its own, or at the end of its script"


def same_calls(on_all: str) -> str:
    """What to do about ranks whose calls differ."""
    return f"Let every rank run the same model code, and {on_all}; where ranks drop layers, set [schedule] uneven = true."


def own_output(on_all: str) -> str:
    """What to do about a rank whose process has ended."""
    return f"Look at that rank's own output first. If it shows no error, the rank ended without making this call: {on_all}."


SAME_CALLS, OWN_OUTPUT = same_calls(_ON_ALL), own_output(_ON_ALL)


class Interrupted(Protocol):
    """A transport, as far as is needed here."""

    def interrupt(self) -> None:
        """End the waits of those who wait for this rank; nothing is sent any more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks raise: ``kind`` is "gone", "late", "apart" (all are here, in different calls) or "open" (all are here, and
    did not meet); or "cut": this rank does not reach the store, and raises what it knows alone.

    Attributes:
        who: the ranks that are gone or late, in words.
        found: a sentence where they are apart, and else what a rank saw.
        progress: that of the ranks that are left, in words.
        on_all: what to do on all ranks, in words; of a rank that is cut off, what to do.
    """

    kind: str
    who: str
    found: str
    within_s: float = 0.0
    progress: str = ""
    on_all: str = _ON_ALL

    @property
    def subject(self) -> str:
        """The begin of a sentence: "Ranks 0 and 2 on node1 are"."""
        return as_subject(self.who)

    def error(self, call: Call, axis: Axis) -> DivergenceError:
        """In the words of a rank that was in ``call``."""
        seen = self.found if self.kind in ("gone", "late", "open") else ""
        if self.kind == "apart":
            why = f"{self.found} {same_calls(self.on_all)} {_TO_CONTINUE}"
        elif self.kind == "gone":
            why = f"{self.subject} {GONE}. {waiting(call, axis)} {own_output(self.on_all)}"
        elif self.kind == "cut":
            why = f"{capital(self.found)}. {waiting(call, axis, f' within {self.within_s} s')} {self.on_all}"
        else:
            found = f"{self.subject} late." if self.who else "All ranks are alive, but their calls did not finish."
            within = f" within {self.within_s} s" if self.who else ""
            why = f"{found} {waiting(call, axis, within)} {same_calls(self.on_all)} {_SLOW} {_TO_CONTINUE}"
        return DivergenceError(" ".join(filter(None, [why, self.progress, internals(call, axis, seen)])))


def as_subject(who: str) -> str:
    """``who`` ("rank 1", "ranks 0 and 2 on node1") at the begin of a sentence, with its verb."""
    return f"{capital(who)} {'are' if who.startswith('ranks') or ' and rank' in who else 'is'}"


def waiting(call: Call, axis: Axis, within: str = "") -> str:
    """What this rank expects of the others."""
    return f"Expected every rank in {call.words}{within}, found rank {axis.ranks[axis.rank]} waiting for it."


def internals(call: Call, axis: Axis, found: str) -> str:
    """The end of an error: the call in our own words, and what was seen of the others."""
    seen = f"; {found.rstrip('.')}" if found else ""
    return f"(Rank {axis.ranks[axis.rank]}: {call.what} {call.key}, axis {axis.name}{seen}.)"


def grace_of(timeout_s: float) -> float:
    """What of a wait's time is left to a roll call."""
    return min(GRACE_S, timeout_s / 4)


class AgreedFailure:
    """What went wrong between the ranks of an attachment; nothing, at first.

    Args:
        at: a prefix in the store for this attachment alone.
        processes: of all ranks.
    """

    def __init__(self, store: GroupStore, at: str, rank: int, processes: Mapping[int, Process], timeout_s: float) -> None:
        self._store, self._root, self.rank, self.processes = store, at, rank, dict(processes)
        self.timeout_s, self._transports = timeout_s, list[Interrupted]()
        self.epoch = 0
        self.verdict: Verdict | None = None
        self._asked: WeakMethod[Callable[[], Progress]] | None = None

    @property
    def _at(self) -> str:
        return f"{self._root}/failure {self.epoch}"

    def ask(self, asked: Callable[[], Progress] | None) -> None:
        """This method says where the rank is; None where nobody can.

        Held weakly: every gradient leads here, see Note [Group and owner] in ``tensor/group.py``.
        """
        self._asked = None if asked is None else WeakMethod(asked)

    def progress(self) -> Progress | None:
        """Where this rank is; None where nobody can say."""
        asked = None if self._asked is None else self._asked()
        return None if asked is None else asked()

    def watch(self, transports: Iterable[Interrupted]) -> None:
        """These are interrupted when something fails."""
        self._transports = list(transports)

    def begin_anew(self) -> None:
        """All ranks have met again: nothing has failed since."""
        self.epoch += 1
        self.verdict = None

    def called(self, axis: Axis) -> bool:
        """Some rank calls the roll, or one of the axis has ended: a wait is over.  Cheap, but not for every turn of a loop.

        What ranks of other axes do at their end is nothing that a wait here depends on.
        """
        if self.verdict is not None or self._ended(axis.ranks):
            return True
        try:
            return self._store.has(f"{self._at}/open", _POLL_S)
        except StoreLost as lost:
            # What this rank waits for may come all the same.
            return lost.closed

    def fail(self, call: Call, axis: Axis, found: str, *, kind: str = "late", suspects: Iterable[int] = ()) -> DivergenceError:
        """The error of a wait that failed here, the same on all ranks that are left.

        Args:
            kind: what it looked like from here, see ``Verdict``.
            found: what this rank saw, for those who read the error.
            suspects: the ranks that it was waiting for, where that is known.
        """
        if self.verdict is None:
            for transport in self._transports:
                transport.interrupt()
            waited = sorted(set(suspects) or set(axis.ranks) - {self.rank})
            try:
                self.verdict = self._call_roll(call, axis, kind, found, waited)
            except StoreLost as lost:
                self.verdict = self._cut_off(axis, lost, waited if kind == "gone" and suspects else ())
        return self.verdict.error(call, axis)

    def _call_roll(self, call: Call, axis: Axis, kind: str, found: str, waited: list[int]) -> Verdict:
        at = self.progress()
        progress = None if at is None else asdict(at)
        # Steps of a method of the attachment are called "save: ..." and the like.
        said = [kind, found, waited, progress, ": " in call.what, axis.ranks]
        self._store.set(f"{self._at}/here {self.rank}", json.dumps(said))
        self._store.set(f"{self._at}/open", "yes")
        deadline, here = time.monotonic() + grace_of(self.timeout_s), set[int]()
        while not self._store.has(f"{self._at}/verdict"):
            here |= {rank for rank in self.processes if rank not in here and self._store.has(f"{self._at}/here {rank}")}
            if self._ended(waited) or len(here) == len(self.processes) or time.monotonic() > deadline:
                self._decide(sorted(here))
                break
            time.sleep(_PAUSE_S)
        return Verdict(*json.loads(self._store.get(f"{self._at}/verdict")))

    def _cut_off(self, axis: Axis, lost: StoreLost, parted: Iterable[int]) -> Verdict:
        """What this rank knows without the store; ``parted``: ranks that have closed their connections."""
        over = self._ended(axis.ranks)
        if over and lost.closed:
            return Verdict("gone", self._named(over), "")
        elsewhere = [rank for rank in axis.ranks if self.processes[rank].is_elsewhere()]
        closed = [rank for rank in elsewhere if rank in parted]
        unknown = [rank for rank in elsewhere if rank not in parted]
        found = [lost.found]
        # A rank here that has ended may have ended by this very error.
        found += [f"{self._named(over)} ended"] if over else []
        found += [f"{self._named(closed)} closed the connection"] if closed else []
        found += [f"nothing is known of {self._named(unknown)}"] if unknown else []
        what = ", and ".join(found)
        remedy = advice(lost.closed) if lost.closed else f"{advice(lost.closed)} {_ONCE_BACK}"
        at = self.progress()
        progress = "" if at is None else describe_progress({self.rank: at})
        return Verdict("cut", "", what, self.timeout_s, progress, remedy)

    def _named(self, ranks: Iterable[int]) -> str:
        """Their numbers in words, and where there are several hosts, theirs."""
        numbers = [str(rank) for rank in ranks]
        listed = numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} and {numbers[-1]}"
        several = len({process.machine for process in self.processes.values()}) > 1
        hosts = dict.fromkeys(self.processes[int(rank)].host for rank in numbers) if several else {}
        return f"{plural(len(numbers), 'rank')} {listed}{' on ' if hosts else ''}{' and '.join(hosts)}"

    def _ended(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those whose processes have."""
        return tuple(ended({rank: self.processes[rank] for rank in sorted(ranks) if rank != self.rank}))

    def _decide(self, here: list[int]) -> None:
        """Write down what is known; the first who does is heard by all."""
        if self._store.add(f"{self._at}/decided", 1) != 1:
            return
        seen = {rank: json.loads(self._store.get(f"{self._at}/here {rank}")) for rank in here}
        waited = {rank for _, _, ranks, *_ in seen.values() for rank in ranks}
        # Who waits for the one that is lost says nothing of others that are lost with it.
        silent = {rank for *_, ranks in seen.values() for rank in ranks} - set(here)
        missing, over = sorted(waited & silent), self._ended(waited)
        kinds = {kind for kind, *_ in seen.values()}
        apart = next((said[1] for said in seen.values() if said[0] == "apart"), "")
        # Who gave up first; connections are closed to those whom that reaches.
        mine = next((said[1] for said in seen.values() if said[0] == "late"), seen[self.rank][1])
        if over:
            verdict = Verdict("gone", self._named(self._ended(waited | silent)), "")
        elif missing:
            # A connection that was closed and nobody there: on another machine that is how a rank ends.
            closed = [rank for rank in missing if any(k == "gone" and rank in ranks for k, _, ranks, *_ in seen.values())]
            late = "late" in kinds or not closed
            others = silent.difference(missing if late else closed)
            mine += f"; nothing was heard of {self._named(sorted(others))} either" if others else ""
            verdict = (
                Verdict("late", self._named(missing), mine, self.timeout_s)
                if late
                else Verdict("gone", self._named(closed), mine)
            )
        elif apart:
            verdict = Verdict("apart", "", apart)
        else:
            verdict = Verdict("open", "", mine)
        progress = {rank: Progress(**said[3]) for rank, said in seen.items() if said[3] is not None}
        evaluations = describe_evaluations(progress, self.processes)
        methods = f"; {_METHODS}, too" if any(said[4] for said in seen.values()) else ""
        on_all = f"{_EVALUATE}{methods}" if evaluations else _ON_ALL
        words = f"{evaluations} {describe_progress(progress)}".strip()
        said = [verdict.kind, verdict.who, verdict.found, verdict.within_s, words, on_all]
        self._store.set(f"{self._at}/verdict", json.dumps(said))
