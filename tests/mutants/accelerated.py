"""Each call that orders streams is taken out in turn on the accelerator, and what is computed without it compared, bit by bit.

test_accelerated.py and ``python -m tests.mutants --accelerator`` call it.  A mutant is shown where values are others, where it
fails, or where nothing moves any more, under the lazy schedule or one of three random ones; under the eager one, where streams
run at once, none may be shown.

Note: [The control on several ranks]
    A stream cannot go on from a collective before the other ranks have come to it, whatever its schedule.  So under the eager
    schedule the host waits for each collective where it is begun: with all calls in the same order on all ranks, as they are
    in these workloads, nothing waits for what comes later, and streams run at once there, too.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.mutants.programs import PROGRAMS, run_on_accelerator
from tests.mutants.run import BROKEN, Verdict
from tests.mutants.sites import Site, counted, sites, unordered
from tests.mutants.workloads import train_on_accelerator
from tests.support.ranks import End, Outcome, Pool
from tests.support.schedules import SCHEDULES, schedule
from zhooks.comm import wait_for
from zhooks.comm.lost_rank import BackendWork

Schedule = tuple[str, int]
CONTROL, *ADVERSE = SCHEDULES
UNSTEADY = "other bits with no call missing"
#: Of a call that nobody misses.
REPEATED = "waited for again"
#: For what takes a second: then nothing moves.
LIMIT_S = 60.0

#: Calls that nothing here shows to be missing, by function and text, and why.
UNSEEN: dict[str, str] = {
    "Reducer.came_to: self._context.adding()": "what is skipped there has no gradient that another stream has written",
    "WholeUpdater._step_shared: coming[1].work.wait()": "after the error nothing takes memory that the round still writes",
    "Lease.arrived: self._lent.wait()": "no workload drops what a thread updates; it waits for that thread, and for no stream",
    "ParamStorage.sent: keep(block.lease.values)": "no schedule tried has the next copy to that memory before the gather",
}


# ---- the ranks' side


#: Programs for the virtual device alone, where a wait that is taken out is not made at all.
OF_THREADS = ("second of a failed first", "end in a thread")
#: What is run, by the number of ranks that shows what it is for; the quicker first.
RUN: dict[int, tuple[str, ...]] = {
    1: (
        *(name for name in PROGRAMS if name not in OF_THREADS),
        "one rank", "disk", "disk, updated on the host", "activations on disk", "towers, activations on the host",
        "overlap over tiers", "overlap, updated on the host", "overlap, states looked at", "dropped", "owners alone",
        "branches on one rank",
    ),
    2: (
        "device", "towers", "towers in an arena, prefetch 4", "branches, kept gathered", "host, prefetch 0",
        "arena over tiers", "stage 2", "stage 1 in segments", "small buffers", "long parameters", "gradients asked for",
        "read over tiers", "owners", "owners over tiers", "owners moved", "owners failing", "owners exported", "averaged",
        "two streams", "overlap, updated on the host from disk", "a stream that goes on", "saved", "saved from tiers",
        "kept by peers", "inputs divided", "towers over tiers", "layers skipped",
    ),
    4: ("replicas",),
}  # fmt: skip
WORLD = {name: world for world, names in RUN.items() for name in names}


def bits(name: str, chosen: Schedule) -> list[str]:
    """What a program or a workload computes under a schedule."""
    mode, seed = chosen
    rank = torch.accelerator.current_device_index()
    with schedule(mode, 10 * seed + rank), _at_once() if chosen == CONTROL else nullcontext():
        seen = run_on_accelerator(name) if name in PROGRAMS else train_on_accelerator(name)
        torch.accelerator.synchronize()
    return [_digest(tensor) for tensor in seen]


@contextmanager
def _at_once() -> Iterator[None]:
    """Inside, a collective that was begun is over; see Note [The control on several ranks]."""

    def over(made: Callable[..., Any]) -> Callable[..., Any]:
        def make(*arguments: Any, **named: Any) -> Any:
            torch.accelerator.synchronize()
            return made(*arguments, **named)

        return make

    # Those of the user are begun elsewhere, and waited for here.
    users = mock.patch("zhooks.tensor.aten.wait_for", over(wait_for))
    with mock.patch("zhooks.comm.stock.BackendWork", over(BackendWork)), users:
        yield


def _digest(tensor: Tensor) -> str:
    values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


@functools.cache
def expected(name: str) -> list[str]:
    """The bits with every call in its place."""
    return bits(name, CONTROL)


def reach(name: str) -> tuple[set[Site], set[Site]]:
    """The calls that a workload makes on this rank, and which of them order streams, or the host after one."""
    found, ordering = set[Site](), set[Site]()
    with counted(found, sites(on_accelerator=True), ordering):
        expected(name)
        hold_to_the_control(name, ADVERSE[0])
    return found, ordering


@functools.cache
def hold_to_the_control(name: str, chosen: Schedule) -> None:
    """With every call in its place a schedule changes no bit."""
    assert bits(name, chosen) == expected(name), f"{UNSTEADY}: {name} under {chosen} and under {CONTROL}"


def steady(name: str) -> None:
    """The same of all of them."""
    for chosen in ADVERSE:
        hold_to_the_control(name, chosen)


def miss(name: str, site: Site, schedules: list[Schedule]) -> str:
    """The first schedule under which a workload computes other bits without the call.

    Where all compute the same it is `REPEATED`, if somebody else waited for all that the call had to, and "" if not.
    """
    try:
        right, repeated = expected(name), True
        for chosen in schedules:
            hold_to_the_control(name, chosen)
    except Exception as error:
        raise AssertionError(f"{UNSTEADY}: {name}") from error
    for chosen in schedules:
        try:
            with unordered(site) as skipped:
                here = bits(name, chosen)
        except BROKEN:
            raise
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            error.add_note(f"{_named(chosen)}: {type(error).__name__}: {said[:80]}")
            raise
        if here != right:
            wrong = sum(one != other for one, other in zip(here, right, strict=True))
            return f"{_named(chosen)}: {wrong} of {len(right)} values differ"
        repeated &= not skipped.left
    return REPEATED if repeated else ""


def _named(chosen: Schedule) -> str:
    return " ".join(map(str, chosen))


# ---- the caller's side


class Judge:
    """Tries mutants on pools of ranks: ``accelerators(world)``."""

    def __init__(self, accelerators: Callable[[int], Pool]) -> None:
        self._pools = accelerators
        self._made: dict[str, tuple[frozenset[Site], frozenset[Site]]] = {}

    def made_by(self, name: str) -> tuple[frozenset[Site], frozenset[Site]]:
        """The calls that a workload makes, and those of them that order streams, on any rank."""
        if name not in self._made:
            made, ordering = zip(*self._pools(WORLD[name]).run(f"{__name__}:reach", name=name), strict=True)
            self._made[name] = frozenset().union(*made), frozenset().union(*ordering)
        return self._made[name]

    def judge(self, site: Site, names: Iterable[str] = tuple(WORLD)) -> Verdict:
        """Take the call out of each workload in which it orders streams, until one shows it."""
        verdict = Verdict(site, None, "", 0, repeated=_waits(site))
        for name in names:
            made, ordering = self.made_by(name)
            verdict = replace(verdict, made=verdict.made or site in made)
            if site not in ordering:
                continue
            verdict = replace(verdict, tried=verdict.tried + 1)
            how = self.attempt(name, site, list(SCHEDULES))
            if how.startswith(_named(CONTROL)):
                return replace(verdict, control=f"{how} in {name!r}")
            if how and how != REPEATED:
                return replace(verdict, shown_by=name, how=how)
            verdict = replace(verdict, repeated=verdict.repeated and how == REPEATED)
        return verdict

    def attempt(self, name: str, site: Site, schedules: list[Schedule]) -> str:
        """How it shows that the call is missing; "" where it does not."""
        pool = self._pools(WORLD[name])
        outcomes = pool.attempt(f"{__name__}:miss", limit_s=LIMIT_S, name=name, site=site, schedules=schedules)
        seen = [_shown(outcome) for outcome in outcomes]
        # Of ranks on which all was repeated and others on which it was not, the others count.
        found = next((how for how in seen if how and how != REPEATED), REPEATED if set(seen) == {REPEATED} else "")
        if found in _STOPPED:
            # A machine that is too busy must not pass for it.
            pool.run(f"{__name__}:steady", limit_s=LIMIT_S, name=name)
            if schedules[:1] == [CONTROL] and self.attempt(name, site, [CONTROL]) not in ("", REPEATED):
                return f"{_named(CONTROL)}: {found}"
        return found


def _waits(site: Site) -> bool:
    return site.text.endswith((".wait()", ".synchronize()"))


_STOPPED = ("nothing moves", "the process died")


def _shown(outcome: Outcome) -> str:
    if outcome.end in (End.RETURNED, End.SKIPPED):
        return str(outcome.value or "")
    if outcome.end is not End.RAISED:
        return _STOPPED[0] if outcome.end is End.SILENT else _STOPPED[1]
    error = outcome.text.strip().splitlines()[-1]
    assert not error.startswith(tuple(kind.__name__ for kind in BROKEN)) and UNSTEADY not in error, outcome.text
    return error[:100]
