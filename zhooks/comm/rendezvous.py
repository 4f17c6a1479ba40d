"""Where all ranks of the process group meet before an attachment opens its transports, each as often as every other.

Making groups is collective over the whole process group, and a rank that attaches fewer models (stages of a pipeline) than
another, under other settings, or not at all because it was refused, would let the others wait for ever.  Ranks meet through
the process group's store, and wait no longer than ``[comm] timeout_s``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from offload import errors
from offload.errors import AttachError, DivergenceError, ZhooksError
from offload.job_rank import launched_among
from offload.policy import Policy
from offload.virtual import NAME
from zhooks.comm.group_store import GroupStore, StoreLost, capital
from zhooks.comm.lost_rank import ANSWER_S, GONE, LOOK_S, AgreedFailure, Process, as_subject, own_output

__all__ = ["Facts", "Meeting", "difference", "error_of", "meet", "policy_facts"]

T = TypeVar("T")
#: What a rank knows of one subject: its keys, and their values as text.
Facts = dict[str, str]
#: How to make a subject the same on every rank.
_ALIKE = {
    "policy": "Give every rank the same policy; only its tables [budget], [disk] and [host] may differ",
    "mesh": "Build the same mesh on every rank",
    "optimizer": "Build the same optimizer on every rank",
    "versions": "Install the same versions for every rank",
}
#: Backends of process groups of which one process alone exists.
_ON_PAPER = ("fake", NAME)
_SHOWN = 200
#: The most characters of one rank's refusal that the others repeat.
_MOST_TEXT = 2048
#: Between two questions to the store: at first, and at most by the number of ranks, for all of them ask one server.
_FIRST_PAUSE_S, _PAUSE_A_RANK_S, _PAUSE_S = 0.001, 0.0005, 0.1
_COMPARISON = "comparison of settings"
#: What describes a rank's own machine; of budgets the least of all ranks counts anyway.
_OWN_TABLES = ("budget", "disk", "host")
#: Keys that may differ: each host may have its own.
_OWN_KEYS = ("resilience.memory",)
#: What a rank that has made fewer calls than others has not done, and what to do.
_NOT_COME = {
    "attach": (
        "call attach as often",
        "Attach the same number of models on every rank, pipeline stages included, in the same order, or raise [comm] "
        "timeout_s.",
    ),
    "recover": (
        "call recover()",
        "A rank that is cut off cannot, nor one that has ended: then load the last checkpoint in new processes.",
    ),
    "apply": ("move to the same mesh", "Call apply(mesh=...) on every rank, or raise [comm] timeout_s."),
}
#: What stages of a pipeline, which have policies of their own, share with each other all the same.
_SHARED_TABLES = ("comm",)


class Meeting:
    """One attach or recovery, on every rank of the process group; each rank makes one a call, one that is refused among them.

    Args:
        verb: the call: "attach", "recover", or "apply" where an attachment moves to another mesh.
        timeout_s: how long one wait may take; ``compare`` takes the policy's.
    """

    def __init__(self, verb: str = "attach", timeout_s: float | None = None) -> None:
        self._world, self._rank, self._verb = dist.get_world_size(), dist.get_rank(), verb
        timeout_s = Policy().comm.timeout_s if timeout_s is None else timeout_s
        self._store = GroupStore.of_all(f"rank {self._rank} in {verb}", timeout_s)
        # By the number of ranks: a launcher's store may still have the counts of ranks that it has started again since.
        self._counted = f"zhooks/{verb}/{self._world} ranks"
        self._count = self._store.add(f"{self._counted}/of {self._rank}", 1)
        self._at = f"{self._counted}/{self._count}"
        self._steps = 0
        self._processes: dict[int, Process] = {}
        self.say("process", Process.here().text())

    def met(self) -> AgreedFailure:
        """What all ranks, which have come to ``compare``, agree on when one of them is gone or late."""
        self._read_processes()
        store = GroupStore.of_all(f"rank {self._rank}", ANSWER_S)
        return AgreedFailure(store, self._at, self._rank, self._processes, self._store.timeout_s)

    def say(self, what: str, text: str) -> None:
        """Leave ``text`` for whoever asks for ``what`` of this rank."""
        self._store.set(f"{self._at}/{what}/{self._rank}", text)

    def heard(self, what: str, rank: int) -> str:
        """What ``rank`` said; waits for it.

        Raises:
            DivergenceError: it has not, within the time.
        """
        key = f"{self._at}/{what}/{rank}"
        self._wait(key, what)
        return self._store.get(key)

    def arrive(self, places: Iterable[str]) -> None:
        """This rank is one of each of these places; the others know once they have come to ``agree`` or ``compare``."""
        for place in places:
            self._store.add(f"{self._at}/at/{place}", 1)

    def arrived(self, place: str) -> int:
        """How many ranks are at a place."""
        return self._store.add(f"{self._at}/at/{place}", 0)

    def agree(self, what: str, problem: str = "") -> str:
        """Return once every rank has come here: the problem of one of them, the same on all; "" where none has any.

        Raises:
            DivergenceError: a rank has not come within the time; names it.
        """
        at, self._steps = f"{self._at}/{what}", self._steps + 1
        self._store.add(f"{self._at}/steps/{self._rank}", 1)
        if problem:
            self._store.set_once(f"{at}/problem", problem)
        if self._store.add(f"{at}/arrived", 1) == self._world:
            self._store.set(f"{at}/everybody", "here")
        self._wait(f"{at}/everybody", what)
        return self._store.get_once(f"{at}/problem")

    def compare(self, everywhere: Mapping[str, Facts], stage: Mapping[str, Facts], leader: int, timeout_s: float) -> None:
        """Every rank has the first rank's facts, and those of its own stage its leader's, by subject.

        Raises:
            AttachError: one has others; every rank names the subject, the key and both ranks.
            ZhooksError: another rank was refused: its kind of error, and its number before its message.
        """
        self._store.timeout_s = timeout_s
        self.say("settings", json.dumps([everywhere, stage]))
        problem = ""
        for place, rank, mine in ((0, 0, everywhere), (1, leader, stage)):
            theirs = json.loads(self.heard("settings", rank))
            # A rank that was refused has none; what it said instead is the problem that all agree on below.
            problem = problem or (difference(mine, self._rank, theirs[place], rank) if theirs else "")
        kind, _, why = self.agree(_COMPARISON, f"{AttachError.__name__}\n{problem}" if problem else "").partition("\n")
        if kind:
            raise error_of(kind)(why)

    def refuse(self, error: Exception) -> None:
        """Have all others raise what this rank raises, where they compare settings; it waits for none of them."""
        if isinstance(error, ZhooksError):
            why = str(error)
        else:
            why = f"attach expected no exception, found {type(error).__name__}: {error}. Correct it and attach again."
        why = why.encode(errors="backslashreplace").decode()
        why = why if len(why) <= _MOST_TEXT else f"{why[:_MOST_TEXT]}..."
        at = f"{self._at}/{_COMPARISON}"
        # The store may be gone with the rank that served it; this rank's own error is what matters here.
        with suppress(StoreLost):
            self._store.add(f"{self._at}/steps/{self._rank}", 1)
            self._store.set_once(f"{at}/problem", f"{type(error).__name__}\nrank {self._rank}: {why}")
            self._store.set(f"{at}/everybody", "here")
            self.say("settings", json.dumps([]))

    def connect(self, make: Callable[[], T]) -> T:
        """What ``make`` returns or raises, which connects ranks that have agreed to, by torch's own calls of the store."""
        return self._store.within(make)

    def _wait(self, key: str, what: str) -> None:
        """Ask for the key until it is there: of a wait in the store that runs out, torch prints warnings on every rank."""
        began = looked = time.monotonic()
        pause, timeout_s = _FIRST_PAUSE_S, self._store.timeout_s
        longest = min(_PAUSE_S, max(_FIRST_PAUSE_S, _PAUSE_A_RANK_S * self._world))
        while True:
            lost = None
            try:
                if self._store.has(key, max(LOOK_S, began + timeout_s - time.monotonic())):
                    return
            except StoreLost as error:
                lost = error
            now = time.monotonic()
            late = now - began >= timeout_s
            if lost is not None or late or now - looked >= LOOK_S:
                looked = now
                with suppress(StoreLost):
                    self._read_processes()
                over = [rank for rank, process in self._processes.items() if process.has_ended()]
                if over:
                    raise self._absent("gone", dict.fromkeys(over, 0), what) from lost
                if lost is not None:
                    raise lost
                if late:
                    raise self._absent(*self._missing(), what)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _read_processes(self) -> None:
        """Those of the ranks that have come to this meeting."""
        for rank in range(self._world):
            key = f"{self._at}/process/{rank}"
            if rank not in self._processes and self._store.has(key):
                self._processes[rank] = Process(*json.loads(self._store.get(key)))

    def _missing(self) -> tuple[str, dict[int, int]]:
        """Ranks that have not come: with how often they made this call, or how many steps of it."""
        calls = {rank: self._store.add(f"{self._counted}/of {rank}", 0) for rank in range(self._world)}
        steps = {rank: self._store.add(f"{self._at}/steps/{rank}", 0) for rank in range(self._world)}
        fewer = {rank: number for rank, number in calls.items() if number < self._count}
        return ("fewer", fewer) if fewer else ("late", {rank: each for rank, each in steps.items() if each < self._steps})

    def _absent(self, kind: str, ranks: dict[int, int], what: str) -> DivergenceError:
        """What the first rank that gives up has found, on all that do: others end because it has."""
        with suppress(StoreLost):
            self._store.set_once(f"{self._at}/found", json.dumps([kind, list(ranks.items())]))
            kind, found = json.loads(self._store.get(f"{self._at}/found"))
            ranks = dict(found)
        within = f"within {self._store.timeout_s} s"
        who = " and ".join(f"rank {rank}{', this one,' if rank == self._rank else ''}" for rank in ranks)
        waits = f"Expected every rank in {self._verb} {within}, found rank {self._rank} waiting for it."
        if kind == "gone":
            problem, remedy = f"{as_subject(who)} {GONE}.", own_output()
        elif kind == "fewer":
            call, remedy = _NOT_COME[self._verb]
            problem = f"{capital(who)} did not {call}."
            if self._verb == "attach":
                numbers = ", ".join(f"rank {rank}: {number}" for rank, number in ranks.items())
                own = f"model {self._count} of its process"
                waits = f"Expected every rank to attach {own} {within}, found a lower number on some ({numbers})."
        else:
            come = f"{capital(who)} did not come to {self._verb} in time."
            problem = come if who else f"The ranks did not meet in {self._verb}."
            remedy = "Look at that rank's own error first; if it is merely slow, raise [comm] timeout_s."
        return DivergenceError(f"{problem} {waits} {remedy} (Rank {self._rank}: {self._verb}, {what}.)")


def meet(verb: str = "attach", timeout_s: float | None = None) -> Meeting | None:
    """The meeting of all ranks for this call; None where there is nobody to meet.

    Raises:
        AttachError: torchrun has started other ranks, and this process has no group with them.
    """
    launched = launched_among()
    if not dist.is_initialized() and launched is not None and launched[1] != "1":
        raise AttachError(
            f"attach expected a process group, because torchrun started this process as rank {launched[0]} of {launched[1]}, "
            "found none: every rank would train a model of its own. Call torch.distributed.init_process_group() before attach; "
            "for independent runs, set WORLD_SIZE=1."
        )
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() in _ON_PAPER:
        return None
    return Meeting(verb, timeout_s)


def error_of(kind: str) -> type[ZhooksError]:
    """The class of our errors that another rank named; AttachError for one that is not ours."""
    known = getattr(errors, kind, None)
    return known if isinstance(known, type) and issubclass(known, ZhooksError) else AttachError


def policy_facts(policy: Policy) -> tuple[Facts, Facts]:
    """The keys of a policy that all ranks of the process group must share, and those that the ranks of one model must."""
    shared, own = Facts(), Facts()
    for name, value in policy.values().items():
        if name in _OWN_TABLES:
            continue
        into = shared if name in _SHARED_TABLES else own
        keys = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        into |= {key: _text(each) for key, each in keys.items() if key not in _OWN_KEYS}
    return shared, own


def _text(value: object) -> str:
    return json.dumps(value, default=str)


def difference(mine: Mapping[str, Facts], rank: int, theirs: Mapping[str, Facts], other: int) -> str:
    """The first subject whose facts differ between two ranks, in the words of an error; "" where none does."""
    for subject in mine:
        here, there = mine[subject], theirs.get(subject, {})
        keys = [key for key in dict.fromkeys([*there, *here]) if here.get(key) != there.get(key)]
        if keys:
            more = f" (and {len(keys) - 1} more {'keys differ' if len(keys) > 2 else 'key differs'})" if len(keys) > 1 else ""
            low, high = sorted([(other, _shown(keys[0], there)), (rank, _shown(keys[0], here))])
            remedy = _ALIKE.get(subject, "Call it in the same way on every rank")
            return (
                f"Ranks differ in {subject}. Expected the same on every rank, found {low[1]} on rank {low[0]} and {high[1]} on "
                f"rank {high[0]}{more}. {remedy}."
            )
    return ""


def _shown(key: str, facts: Facts) -> str:
    value = facts.get(key)
    if value is None:
        return f"no {key}"
    return f"{key} = {value if len(value) <= _SHOWN else value[:_SHOWN] + '...'}"
