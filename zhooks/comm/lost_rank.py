"""Which rank is gone or late: found out once by all that are left, who then raise the same error.

The transports wait through here, and ask while they wait whether another rank has given up; ``resilience/recovery.py`` asks
whether ranks can go on.

Note: [Roll call]
    A rank whose wait fails knows little: that a connection was closed, or that nothing came.  What it waits for may be a rank
    that itself waits for another.  So it closes its own connections, which ends the waits of whoever waits for it, and says in
    the store that it is here and what it saw; so does everyone whom that reaches.  Who is missing then is the rank that is
    gone, or late: the first rank that can tell writes it down, and all raise that.  Processes of this machine that have ended
    need no wait; for others there is ``GRACE_S``, which is taken from the time that a wait may last.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor

from offload.disk import started_ticks
from offload.errors import DivergenceError
from offload.text import plural
from zhooks.comm.group_store import GroupStore, StoreLost, advice, capital
from zhooks.comm.progress import Progress, describe_evaluations, describe_progress
from zhooks.comm.transport import Call, Transport
from zhooks.layout import Axis

__all__ = ["AgreedFailure", "BackendWork", "Process", "Verdict", "interrupt_group"]

#: How long a roll call waits for ranks that may be alive, at most; see Note [Roll call].
GRACE_S = 2.0
#: So often a rank that waits asks whether another has found out that one is gone or late.
LOOK_S = 0.5
_PAUSE_S = 0.02
#: How long the store may take for an answer: in a roll call, and while this rank waits for something else.
ANSWER_S, _POLL_S = 5.0, 0.5
#: What Gloo says of a rank whose process has ended, or has closed its group.
_PARTED = re.compile(r"(closed|reset) by peer|[Bb]roken pipe")
#: What it says of calls in a group that this rank has closed itself.
_OVER = re.compile(r"pair closure|[Tt]imed out|[Cc]onnection refused|not connected|already closed")
#: A tag that no call has, see ``p2p.tag_of``: its channel would be 3.
_NO_TAG = (1 << 31) - 1

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


def own_output(on_all: str = _ON_ALL) -> str:
    """What to do about a rank whose process has ended."""
    return f"Look at that rank's own output first. If it shows no error, the rank ended without making this call: {on_all}."


def as_subject(who: str) -> str:
    """``who`` ("rank 1", "ranks 0 and 2 on node1") at the begin of a sentence, with its verb."""
    return f"{capital(who)} {'are' if who.startswith('ranks') or ' and rank' in who else 'is'}"


@dataclass(frozen=True, slots=True)
class Process:
    """A process by its machine (of one boot, and one space of process numbers), number and start, and its host's name."""

    machine: str
    number: int
    ticks: int
    host: str

    @staticmethod
    def here() -> Process:
        """This process."""
        number = os.getpid()
        return Process(machine(), number, started_ticks(number) or 0, _host())

    def text(self) -> str:
        return json.dumps(astuple(self))

    def is_elsewhere(self) -> bool:
        """It runs on another machine, or in another container: only connections tell of it."""
        return self.machine != machine()

    def has_ended(self) -> bool:
        """It is over; of another machine's nothing is known."""
        return self.ticks > 0 and not self.is_elsewhere() and started_ticks(self.number) != self.ticks


def machine() -> str:
    """The same for processes that see each other's numbers; without spaces."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return _host()


def _host() -> str:
    return socket.gethostname().replace(" ", "-") or "localhost"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks raise.

    Attributes:
        kind: "gone", "late", "apart" (all are here, in different calls), "open" (all are here, and did not meet), or "cut":
            this rank does not reach the store, and raises what it knows alone.
        problem: the first sentence.
        remedy: the last one.
        found: what a rank saw.
        within_s: the time that a wait may last, where that is to be said.
        progress: that of the ranks that are left, in words.
    """

    kind: str
    problem: str
    remedy: str
    found: str = ""
    within_s: float = 0.0
    progress: str = ""

    def error(self, call: Call, axis: Axis) -> DivergenceError:
        """In the words of a rank that was in ``call``."""
        me, waits = axis.ranks[axis.rank], ""
        if self.kind != "apart":
            within = f" within {self.within_s} s" if self.within_s else ""
            waits = f"Expected every rank in {call.words}{within}, found rank {me} waiting for it."
        seen = "" if self.kind in ("apart", "cut") or not self.found else f"; {self.found.rstrip('.')}"
        internals = f"(Rank {me}: {call.what} {call.key}, axis {axis.name}{seen}.)"
        return DivergenceError(" ".join(filter(None, [self.problem, waits, self.remedy, self.progress, internals])))


class AgreedFailure:
    """What went wrong between the ranks of an attachment; nothing, at first.

    Args:
        at: a prefix in the store for this attachment alone.
        processes: of all ranks.
        timeout_s: for one wait.
    """

    def __init__(self, store: GroupStore, at: str, rank: int, processes: Mapping[int, Process], timeout_s: float) -> None:
        self._store, self._root, self.rank, self.processes = store, at, rank, dict(processes)
        self.timeout_s, self._transports = timeout_s, list[Transport]()
        self.epoch = 0
        self.verdict: Verdict | None = None
        self._asked: WeakMethod[Callable[[], Progress]] | None = None

    @staticmethod
    def alone(ranks: Iterable[int], timeout_s: float) -> AgreedFailure:
        """Where this process is the only one: of one rank, or of all ranks of a group that exists on paper."""
        store = GroupStore.of_this_process("rank 0", ANSWER_S)
        return AgreedFailure(store, "alone", 0, dict.fromkeys(ranks, Process.here()), timeout_s)

    @property
    def is_alone(self) -> bool:
        return len(set(self.processes.values())) == 1

    @property
    def patience_s(self) -> float:
        """How long a wait lasts before the roll is called: some of its time is left to that."""
        return self.timeout_s - min(GRACE_S, self.timeout_s / 4)

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

    def watch(self, transports: Iterable[Transport]) -> None:
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

    @contextmanager
    def starting(self, call: Call, axis: Axis) -> Iterator[None]:
        """What the backend says, inside, of a rank that is gone, with names; anything else as it is.

        Raises:
            DivergenceError: another rank's process has ended, or has closed its group.
        """
        over = self.verdict is not None
        try:
            yield
        except DivergenceError:
            raise
        except RuntimeError as error:
            if not (over or _PARTED.search(str(error)) or _OVER.search(str(error))):
                raise
            raise self.ended_by(error, call, axis) from error

    def ended_by(self, error: RuntimeError, call: Call, axis: Axis, suspects: Iterable[int] = ()) -> DivergenceError:
        """The error of a wait or a start that the backend has ended with ``error``; see ``fail``."""
        kind = "gone" if _PARTED.search(str(error)) else "late"
        return self.fail(call, axis, f"the backend said: {str(error).splitlines()[0]}", kind=kind, suspects=suspects)

    def fail(self, call: Call, axis: Axis, found: str, *, kind: str = "late", suspects: Iterable[int] = ()) -> DivergenceError:
        """The error of a wait that failed here, the same on all ranks that are left.

        Args:
            kind: what it looked like from here: "gone", "late" or "apart", see ``Verdict``.
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
        deadline, here = time.monotonic() + self.timeout_s - self.patience_s, set[int]()
        while not self._store.has(f"{self._at}/verdict"):
            here |= {rank for rank in self.processes if rank not in here and self._store.has(f"{self._at}/here {rank}")}
            if self._ended(waited) or len(here) == len(self.processes) or time.monotonic() > deadline:
                if self._store.is_first(f"{self._at}/verdict"):
                    self._store.set(f"{self._at}/verdict", json.dumps(astuple(self._decide(sorted(here)))))
                break
            time.sleep(_PAUSE_S)
        return Verdict(*json.loads(self._store.get(f"{self._at}/verdict")))

    def _decide(self, here: list[int]) -> Verdict:
        """What is known from all that are ``here``."""
        seen = {rank: json.loads(self._store.get(f"{self._at}/here {rank}")) for rank in here}
        waited = {rank for _, _, ranks, *_ in seen.values() for rank in ranks}
        # Who waits for the one that is lost says nothing of others that are lost with it.
        silent = {rank for *_, ranks in seen.values() for rank in ranks} - set(here)
        missing = sorted(waited & silent)
        # A connection that was closed and nobody there: on another machine that is how a rank ends.
        closed = [rank for rank in missing if any(k == "gone" and rank in ranks for k, _, ranks, *_ in seen.values())]
        apart = next((said[1] for said in seen.values() if said[0] == "apart"), "")
        # Who gave up first; connections are closed to those whom that reaches.
        gave_up = [said[1] for said in seen.values() if said[0] == "late"]
        found, within_s = (gave_up or [seen[self.rank][1]])[0], 0.0
        if self._ended(waited):
            kind, problem, found = "gone", f"{self._subject(self._ended(waited | silent))} {GONE}.", ""
        elif missing:
            kind = "late" if gave_up or not closed else "gone"
            lost = missing if kind == "late" else closed
            others = silent.difference(lost)
            found += f"; nothing was heard of {self._named(sorted(others))} either" if others else ""
            problem = f"{self._subject(lost)} {'late' if kind == 'late' else GONE}."
            within_s = self.timeout_s if kind == "late" else 0.0
        elif apart:
            kind, problem, found = "apart", apart, apart
        else:
            kind, problem = "open", "All ranks are alive, but their calls did not finish."
        progress = {rank: Progress(**said[3]) for rank, said in seen.items() if said[3] is not None}
        evaluations = describe_evaluations(progress, self.processes)
        methods = f"; {_METHODS}, too" if any(said[4] for said in seen.values()) else ""
        on_all = f"{_EVALUATE}{methods}" if evaluations else _ON_ALL
        remedy = f"Let every rank run the same model code, and {on_all}; where ranks drop layers, set [schedule] uneven = true."
        remedy += f" {_TO_CONTINUE}" if kind == "apart" else f" {_SLOW} {_TO_CONTINUE}"
        if kind == "gone":
            remedy = own_output(on_all)
        return Verdict(kind, problem, remedy, found, within_s, f"{evaluations} {describe_progress(progress)}".strip())

    def _cut_off(self, axis: Axis, lost: StoreLost, parted: Iterable[int]) -> Verdict:
        """What this rank knows without the store; ``parted``: ranks that have closed their connections."""
        over = self._ended(axis.ranks)
        if over and lost.closed:
            return Verdict("gone", f"{self._subject(over)} {GONE}.", own_output())
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
        return Verdict("cut", f"{capital(what)}.", remedy, what, self.timeout_s, progress)

    def _subject(self, ranks: Iterable[int]) -> str:
        return as_subject(self._named(ranks))

    def _named(self, ranks: Iterable[int]) -> str:
        """Their numbers in words, and where there are several hosts, theirs."""
        numbers = [str(rank) for rank in ranks]
        listed = numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} and {numbers[-1]}"
        several = len({process.machine for process in self.processes.values()}) > 1
        hosts = dict.fromkeys(self.processes[int(rank)].host for rank in numbers) if several else {}
        return f"{plural(len(numbers), 'rank')} {listed}{' on ' if hosts else ''}{' and '.join(hosts)}"

    def _ended(self, ranks: Iterable[int]) -> list[int]:
        """Those whose processes have."""
        return [rank for rank in sorted(ranks) if rank != self.rank and self.processes[rank].has_ended()]


class BackendWork:
    """Works of a torch backend; a wait that fails or runs out of time names the rank, the unit and the call.

    Args:
        keep: what the works read or write, kept until they are done.
        peers: the rank that each of the works waits for; none where they are collectives.
        ordered: a wait orders the device's stream and does not hold the host; the backend itself limits how long they take.
    """

    __slots__ = ("_axis", "_call", "_failure", "_keep", "_ordered", "_peers", "_works")

    def __init__(
        self,
        call: Call,
        axis: Axis,
        failure: AgreedFailure,
        works: list[dist.Work],
        keep: list[Tensor],
        peers: Sequence[int] = (),
        *,
        ordered: bool = False,
    ) -> None:
        self._call, self._axis, self._failure, self._works = call, axis, failure, works
        self._keep, self._peers, self._ordered = keep, peers, ordered

    def wait(self) -> None:
        works, self._works = self._works, []
        deadline = None if self._ordered else time.monotonic() + self._failure.patience_s
        for place, work in enumerate(works):
            peers = self._peers[place : place + 1]
            try:
                if deadline is None:
                    work.wait()
                elif peers:
                    # A wait for a message closes its group when it runs out: it cannot be had in slices.
                    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
                else:
                    self._wait_in_slices(work, deadline)
            except DivergenceError:
                raise
            except RuntimeError as error:
                parted = self._parted(works[place + 1 :]) if peers and _PARTED.search(str(error)) else []
                raise self._failure.ended_by(error, self._call, self._axis, [*peers, *parted]) from error
        self._keep = []

    def _parted(self, later: Sequence[dist.Work]) -> list[int]:
        """Whose connections are closed as well: a host's ranks are lost together."""
        found: list[int] = []
        for work, peer in zip(later, self._peers[-len(later) :], strict=False):
            try:
                work.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if _PARTED.search(str(error)) is None:
                    # A wait that runs out closes the others, too.
                    break
                found.append(peer)
        return found

    def _wait_in_slices(self, work: dist.Work, deadline: float) -> None:
        """Wait for a collective: between slices this rank asks whether those that wait for its peers know more."""
        while True:
            left = deadline - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(0.001, min(LOOK_S, left))))
                return
            except RuntimeError:
                if work.is_completed():
                    break
                if left <= LOOK_S or self._failure.called(self._axis):
                    raise
        # It may have come to its end after the slice had: what it says itself counts.
        work.wait()

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)


def interrupt_group(group: dist.ProcessGroup, axis: Axis) -> None:
    """Close this rank's connections of a group of Gloo's: whoever waits for it there is told at once.

    A receive that nobody answers does it, when its wait runs out; the group's own ``abort`` leaves them open.
    """
    backend: Any = group._get_backend(torch.device("cpu"))
    for peer in range(axis.world):
        if peer == axis.rank:
            continue
        try:
            backend.recv([torch.zeros(1, dtype=torch.float32, device="cpu")], peer, _NO_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if _PARTED.search(str(error)) is None:
                return
