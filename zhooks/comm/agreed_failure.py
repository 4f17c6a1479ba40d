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
from typing import Any, Protocol
from weakref import WeakMethod

from offload.errors import DivergenceError
from offload.text import plural
from zhooks.comm.processes import Process, ended
from zhooks.comm.progress import Progress, describe_evaluations, describe_progress
from zhooks.comm.transport import Call
from zhooks.layout import Axis

#: How long a roll call waits for ranks that may be alive, at most; see Note [Roll call].
GRACE_S = 2.0
_PAUSE_S = 0.02
_METHODS = "call save, load, detach and the like on all ranks"
_ON_ALL = f"{_METHODS}, not under `if rank == 0:`"
_EVALUATE = (
    "evaluate and generate on all ranks, not under `if rank == 0:`, because a forward of a sharded model gathers from every "
    "rank; or on some ranks inside `with attachment.resident():`, which all of them enter"
)
_SLOW = "If a rank is only slow, raise [comm] timeout_s."
#: What to do where all ranks are alive.
_TO_CONTINUE = "To continue, call attachment.recover() on every rank."
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
    did not meet); ``progress`` is that of the ranks that are left, and ``on_all`` what to do on all ranks, in words."""

    kind: str
    ranks: tuple[int, ...]
    found: str
    within_s: float = 0.0
    progress: str = ""
    on_all: str = _ON_ALL

    @property
    def who(self) -> str:
        numbers = [str(rank) for rank in self.ranks]
        listed = numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} and {numbers[-1]}"
        return f"{plural(len(numbers), 'rank')} {listed}"

    def error(self, call: Call, axis: Axis) -> DivergenceError:
        """In the words of a rank that was in ``call``."""
        me = axis.ranks[axis.rank]
        expected = f"rank {me} in {call.what} {call.key}: expected every rank of axis {axis.name} to make the same call"
        if self.kind == "gone":
            why = f"{expected}, found {self.who} {GONE}{self.found}. {own_output(self.on_all)}"
        elif self.kind == "apart":
            why = f"{expected}, found that {self.found}. {same_calls(self.on_all)} {_TO_CONTINUE}"
        else:
            alive = ", found that all ranks are alive, but their calls did not finish"
            late = f" within {self.within_s} s, found {self.who} late" if self.ranks else alive
            why = f"{expected}{late}; {self.found}. {same_calls(self.on_all)} {_SLOW} {_TO_CONTINUE}"
        return DivergenceError(f"{why} {self.progress}".rstrip())


def grace_of(timeout_s: float) -> float:
    """What of a wait's time is left to a roll call."""
    return min(GRACE_S, timeout_s / 4)


class AgreedFailure:
    """What went wrong between the ranks of an attachment; nothing, at first.

    Args:
        at: a prefix in the store for this attachment alone.
        processes: of all ranks.
    """

    def __init__(self, store: Any, at: str, rank: int, processes: Mapping[int, Process], timeout_s: float) -> None:
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
        return self.verdict is not None or bool(self._ended(axis.ranks)) or self._has("open")

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
                self.verdict = self._call_roll(call, kind, found, waited)
            except RuntimeError as error:  # the store is gone, with the rank that served it
                over = self._ended(waited)
                lost = f"; the process group's store is gone: {str(error).splitlines()[0]}"
                self.verdict = Verdict("gone", over or tuple(waited), lost if not over else "", self.timeout_s)
        return self.verdict.error(call, axis)

    def _call_roll(self, call: Call, kind: str, found: str, waited: list[int]) -> Verdict:
        at = self.progress()
        progress = None if at is None else asdict(at)
        # Steps of a method of the attachment are called "save: ..." and the like.
        self._say(f"here {self.rank}", json.dumps([kind, found, waited, progress, ": " in call.what]))
        self._say("open", "")
        deadline = time.monotonic() + grace_of(self.timeout_s)
        while not self._has("verdict"):
            here = [rank for rank in self.processes if self._has(f"here {rank}")]
            if self._ended(waited) or len(here) == len(self.processes) or time.monotonic() > deadline:
                self._decide(here)
                break
            time.sleep(_PAUSE_S)
        said = json.loads(bytes(self._store.get(f"{self._at}/verdict")).decode())
        return Verdict(said[0], tuple(said[1]), *said[2:])

    def _ended(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those whose processes have."""
        return tuple(ended({rank: self.processes[rank] for rank in sorted(ranks) if rank != self.rank}))

    def _decide(self, here: list[int]) -> None:
        """Write down what is known; the first who does is heard by all."""
        if self._store.add(f"{self._at}/decided", 1) != 1:
            return
        seen = {rank: json.loads(bytes(self._store.get(f"{self._at}/here {rank}")).decode()) for rank in here}
        waited = {rank for _, _, ranks, *_ in seen.values() for rank in ranks}
        missing, over = tuple(sorted(waited - set(here))), self._ended(waited)
        kinds = {kind for kind, *_ in seen.values()}
        apart = next((said[1] for said in seen.values() if said[0] == "apart"), "")
        # Who gave up first; connections are closed to those whom that reaches.
        mine = next((said[1] for said in seen.values() if said[0] == "late"), seen[self.rank][1])
        if over:
            verdict = Verdict("gone", over, "")
        elif missing:
            # A connection that was closed and nobody there: on another machine that is how a rank ends.
            closed = tuple(rank for rank in missing if any(k == "gone" and rank in ranks for k, _, ranks, *_ in seen.values()))
            late = "late" in kinds or not closed
            verdict = Verdict("late", missing, mine, self.timeout_s) if late else Verdict("gone", closed, f"; {mine}")
        elif apart:
            verdict = Verdict("apart", (), apart)
        else:
            verdict = Verdict("open", (), mine)
        progress = {rank: Progress(**said[3]) for rank, said in seen.items() if said[3] is not None}
        evaluations = describe_evaluations(progress, self.processes)
        methods = f"; {_METHODS}, too" if any(said[4] for said in seen.values()) else ""
        on_all = f"{_EVALUATE}{methods}" if evaluations else _ON_ALL
        words = f"{evaluations} {describe_progress(progress)}".strip()
        self._say("verdict", json.dumps([verdict.kind, verdict.ranks, verdict.found, verdict.within_s, words, on_all]))

    def _say(self, what: str, text: str) -> None:
        # An empty value is no value to some stores.
        self._store.set(f"{self._at}/{what}", text or "yes")

    def _has(self, what: str) -> bool:
        return bool(self._store.check([f"{self._at}/{what}"]))
