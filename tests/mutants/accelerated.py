"""Each call that orders streams is taken out in turn on the accelerator, and what is computed without it compared, bit by bit.

test_accelerated.py and ``python -m tests.mutants --accelerator`` call it.  A mutant is shown where values are others, where it
fails, or where nothing moves any more, under the lazy schedule or one of three random ones; on one rank under the eager one,
where streams run at once, none may be shown.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tests.mutants.programs import PROGRAMS, run_on_accelerator
from tests.mutants.run import BROKEN, Verdict
from tests.mutants.sites import Site, counted, sites, without
from tests.mutants.workloads import train_on_accelerator
from tests.support.ranks import End, Outcome, Pool
from tests.support.schedules import SCHEDULES, schedule

Schedule = tuple[str, int]
CONTROL, *ADVERSE = SCHEDULES
UNSTEADY = "other bits with no call missing"
#: For what takes a second: then nothing moves.
LIMIT_S = 60.0

#: Calls that nothing here shows to be missing, by function and text, and why.
UNSEEN: dict[str, str] = {
    "Allocator.wait_for_oldest: work.synchronize()": "without it the store asks again and again until the work is over",
    "Store.drop: lease.wait()": "of a real disk: it gives no extent away under a request, and the buffer goes back after it",
    "Lease.arrived: self.wait()": "the buffer of a lease that nobody waited for goes back after what fills it, whoever asks",
    "Updater.run: fetched.wait()": "whoever opens a parameter, a gradient or a state waits for its own",
    "Away.wait: self._gradients.wait()": "for errors, before ranks meet: whoever uses the values waits again",
    "Away.wait: self._values.wait()": "for errors, before ranks meet: whoever uses the values waits again",
    "Partition._land: gather.work.wait()": "no workload divides a model over tp",
    "_numbers: running().current.synchronize()": "the virtual device's",
    "Stateful._finish_saving: saving.wait()": "a thread of the host: no workload saves beside training",
    "fetch: work.wait()": "no workload resumes from the memory of its peers",
    "_requests: transport.exchange(call, *lists, nbytes).wait()": "no workload resumes from the memory of its peers",
    "from_owner: shard.exchange(Call(GATHER, 'send states of', states.name), sends, receives, sizes).wait()": (
        "no workload saves"
    ),
    "BackendWork._look: work.wait()": "ranks on the CPU: a wait on a stream has no time limit of its own",
    "wait_for: Work.unbox(one).wait()": "no workload calls functional collectives of its own",
}
#: Calls whose lack shows under the eager schedule, too, and why that is none of the streams'.
NOT_OF_STREAMS: dict[str, str] = {
    "Ending.join: self._over.wait()": "for a thread of the host",
    "_Then.wait: self._begun.join()": "for a thread of the host",
    "_Then.synchronize: self._begun.join()": "for a thread of the host",
    "_Then._go_on: first.synchronize()": "it raises what has failed",
    "_Then.synchronize: self._second.synchronize()": "for a thread of the disk's",
    "Lease.wait: self._lent.wait()": "for a thread of the host, which updates",
    "Lease.wait: self._arriving.synchronize()": "for a thread of the disk's",
    "Store.lease: lease.wait()": "it notes from where on a change counts as one",
    "Store.tensor: lease.wait()": "it notes from where on a change counts as one",
}


# ---- the ranks' side


#: What is run, by the number of ranks that shows what it is for; the quicker first.
RUN: dict[int, tuple[str, ...]] = {
    1: (
        *PROGRAMS, "one rank", "disk", "disk, updated on the host", "activations on disk",
        "towers, activations on the host", "overlap over tiers", "overlap, updated on the host", "overlap, states looked at",
        "dropped", "owners alone", "branches on one rank",
    ),
    2: (
        "device", "towers", "towers in an arena", "branches, kept gathered", "host, prefetch 0", "arena over tiers", "stage 2",
        "stage 1 in segments", "small buffers", "long parameters", "gradients asked for", "replicas", "read over tiers",
        "owners", "owners over tiers", "owners moved", "owners failing", "two streams",
        "overlap, updated on the host from disk", "a stream that goes on",
    ),
}  # fmt: skip
WORLD = {name: world for world, names in RUN.items() for name in names}


def bits(name: str, chosen: Schedule) -> list[str]:
    """What a program or a workload computes under a schedule."""
    mode, seed = chosen
    rank = torch.accelerator.current_device_index()
    with schedule(mode, 10 * seed + rank):
        seen = run_on_accelerator(name) if name in PROGRAMS else train_on_accelerator(name)
        torch.accelerator.synchronize()
    return [_digest(tensor) for tensor in seen]


def _digest(tensor: Tensor) -> str:
    values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


@functools.cache
def expected(name: str) -> list[str]:
    """The bits with every call in its place."""
    return bits(name, CONTROL)


def reach(name: str) -> set[Site]:
    """The calls that a workload makes on this rank, where streams are ahead of the host or behind it."""
    found: set[Site] = set()
    with counted(found, sites(on_accelerator=True)):
        expected(name)
        hold_to_the_control(name, ADVERSE[0])
    return found


@functools.cache
def hold_to_the_control(name: str, chosen: Schedule) -> None:
    """With every call in its place a schedule changes no bit."""
    assert bits(name, chosen) == expected(name), f"{UNSTEADY}: {name} under {chosen} and under {CONTROL}"


def miss(name: str, site: Site, schedules: list[Schedule]) -> str:
    """The first schedule under which a workload computes other bits without the call; "" where all compute the same."""
    right = expected(name)
    for chosen in schedules:
        hold_to_the_control(name, chosen)
        with without(site):
            here = bits(name, chosen)
        if here != right:
            wrong = sum(one != other for one, other in zip(here, right, strict=True))
            return f"{' '.join(map(str, chosen))}: {wrong} of {len(right)} values differ"
    return ""


# ---- the caller's side


class Judge:
    """Tries mutants on pools of ranks: ``accelerators(world)``."""

    def __init__(self, accelerators: Callable[[int], Pool]) -> None:
        self._pools = accelerators
        self._made: dict[str, frozenset[Site]] = {}

    def made_by(self, name: str) -> frozenset[Site]:
        if name not in self._made:
            found = self._pools(WORLD[name]).run(f"{__name__}:reach", name=name)
            self._made[name] = frozenset().union(*found)
        return self._made[name]

    def judge(self, site: Site, names: Iterable[str] = tuple(WORLD)) -> Verdict:
        """Take the call out of each workload that makes it, until one shows it."""
        tried, control = 0, []
        for name in names:
            if site not in self.made_by(name):
                continue
            tried += 1
            how = self.attempt(name, site, list(ADVERSE))
            # On several ranks a stream waits for the others' collectives, whatever its schedule: nothing runs at once there.
            if WORLD[name] == 1 and (eager := self.attempt(name, site, [CONTROL])):
                control.append(f"{name}: {eager}")
            if how:
                return Verdict(site, name, how, tried, "; ".join(control))
        return Verdict(site, None, "", tried, "; ".join(control))

    def attempt(self, name: str, site: Site, schedules: list[Schedule]) -> str:
        pool = self._pools(WORLD[name])
        outcomes = pool.attempt(f"{__name__}:miss", limit_s=LIMIT_S, name=name, site=site, schedules=schedules)
        return next(filter(None, map(_shown, outcomes)), "")


def _shown(outcome: Outcome) -> str:
    if outcome.end in (End.RETURNED, End.SKIPPED):
        return str(outcome.value or "")
    if outcome.end is not End.RAISED:
        return "nothing moves" if outcome.end is End.SILENT else "the process died"
    error = outcome.text.strip().splitlines()[-1]
    assert not error.startswith(tuple(kind.__name__ for kind in BROKEN)) and UNSTEADY not in error, outcome.text
    return error[:100]
