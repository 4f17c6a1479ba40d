"""The attachment's way back to work after ranks have not met: at rest, connected anew, and found to stand at one place.

``Attachment`` is one of these.  It never waits for a rank that is gone, never repeats a collective, and never lets a run go on
whose ranks have taken different numbers of optimizer steps.

Note: [What is repeated]
    Nothing by itself.  A collective may have reached some ranks and not others, and adding up twice is an effect; so a call
    that failed fails on all ranks, and the loop repeats its step, or the verb, after ``recover``.  What has no effect when it
    is done twice (looking into the process group's store, waiting there) is waited for in slices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.device import computes_on_host
from offload.errors import CapabilityError, DivergenceError
from offload.events import Bus
from offload.policy import Policy
from zhooks.attachment.watch import Watch
from zhooks.checkpoint import Saving
from zhooks.comm import Comm, Meeting, reopen_comm
from zhooks.optim import Optimizers, Steps
from zhooks.run import Runtime

__all__ = ["Recovering", "Recovery"]

_RESTART = "End the processes and load the last checkpoint in new ones."
_LOAD = "Load a checkpoint: attachment.load(folder, optimizer)."


@dataclass(frozen=True, slots=True)
class Recovery:
    """What ``Attachment.recover`` found.

    Attributes:
        dropped: gradients, or an unfinished backward, were dropped on every rank, including those inside ``no_sync`` and
            ``accumulate``: repeat the step from its first forward.  A step before that is refused.
        steps: optimizer steps that every rank has taken since ``attach`` or the last load.
        cause: the error that was raised; "" if nothing had failed.
    """

    dropped: bool
    steps: int
    cause: str


class Recovering:
    """The verbs of an attachment after ranks have not met."""

    policy: Policy
    _comm: Comm
    _bus: Bus
    _device: torch.device
    _runtime: Runtime
    _optimizers: Optimizers
    _steps: Steps
    _watches: list[Watch]
    _check_attached: Callable[[str], None]
    _saving: Saving | None
    #: Why nothing but a load may come next; "" where there is no reason.
    _apart: str = ""

    def recover(self) -> Recovery:
        """Prepare to continue, or to save, after a ``DivergenceError``: a rank was late, or a connection failed.  Collective.

        Every rank calls it in ``except zhooks.DivergenceError:``, including the one that was late.  Unfinished work is
        dropped, transports are opened again, and the ranks compare which step they are at.  A rank that raised an error of its
        own calls it too; ranks wait for each other twice as long as usual here.  Then repeat the step from its first forward.
        If no rank had begun to update, the result is bit-identical to an undisturbed run, except that random states and
        running statistics are not rewound.

        Returns:
            What was found, and whether gradients were dropped.
        Raises:
            DivergenceError: a rank is gone, or does not come within twice ``[comm] timeout_s``.  Or the ranks are at different
                steps, or within one: then only ``load`` may come next.
            CapabilityError: parameters are not on the CPU, or a transport is no longer available.
        """
        self._check_attached("recover")
        failure = self._comm.failure
        if not computes_on_host(self._device):
            raise CapabilityError(f"recover expected parameters on the CPU, found them on {self._device}. {_RESTART}")
        if failure.is_alone:
            return self._at_rest(self._runtime.abandon() or self._runtime.reducer.holds, "")
        verdict = failure.verdict
        if verdict is not None and verdict.kind == "gone":
            raise DivergenceError(f"{verdict.problem} recover() needs every rank. {_RESTART}")
        self._bus.begin("recover", "all ranks")
        try:
            under_way = "a backward that updates" if self._runtime.updated_early else self._steps.under_way
            lost = self._runtime.abandon() or self._runtime.reducer.holds
            saving = self._saving is not None and not self._saving.concluded
            # The others may have begun to wait for this rank just now, and come when they have given it up.
            meeting = Meeting("recover", 2 * self.policy.comm.timeout_s)
            stands: dict[str, Any] = {"steps": self._steps.count, "under way": under_way, "lost": lost, "apart": self._apart}
            stands |= {"behind": self._steps.behind, "saving": saving, "scale": self._runtime.scaling.saved()}
            stands["cause"] = "" if verdict is None else verdict.found
            meeting.say("stands", json.dumps(stands))
            meeting.agree("recovery")
            every = [json.loads(meeting.heard("stands", rank)) for rank in failure.processes]
            reopen_comm(self._comm, self.policy, self._device, meeting)
            meeting.agree("recovered transports")
            failure.begin_anew()
            self._runtime.evaluations = 0
        finally:
            self._bus.end("recover", "all ranks")
        self._optimizers.meet_again()
        for watch in self._watches:
            watch.meet_again()
        stage = self._comm.stage.axis
        ours = [every[rank] for rank in stage.ranks]
        if saving and not all(one["saving"] for one in ours) and self._saving is not None:
            self._saving.give_up()
        stages = [{rank: every[rank] for rank in ranks} for ranks in stage.siblings or (stage.ranks,)]
        self._apart = next((found for found in map(_apart, stages) if found), "") or _stages_apart(stages)
        recovered = self._at_rest(any(one["lost"] for one in every), next((one["cause"] for one in every if one["cause"]), ""))
        if self._apart:
            raise DivergenceError(f"recover: {self._apart}")
        return recovered

    def _at_rest(self, lost: bool, cause: str) -> Recovery:
        if lost:
            self._runtime.reducer.drop()
            self._steps.dropped = True
        return Recovery(lost, self._steps.count, cause)

    def _check_whole(self, verb: str) -> None:
        """Nothing but a load follows a recovery that found ranks at different steps.

        Raises:
            DivergenceError: it did; on every rank.
        """
        if self._apart:
            raise DivergenceError(f"{verb} {self._apart}")

    def _check_reload(self, verb: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """After a recovery that found ranks at different steps, optimizers differ between them as parameters do.

        Raises:
            DivergenceError: one that has stepped is left as it is; on every rank.
        """
        if self._apart and any(all(one is not each for each in optimizers) for one in self._optimizers.here()):
            raise DivergenceError(
                f"{verb} expected all optimizers that have stepped, because ranks are at different steps, found that some are "
                "missing. Pass all of them."
            )

    def _loaded(self) -> None:
        """Every rank has what a checkpoint says."""
        self._apart = ""
        self._steps.begin_anew()
        for watch in self._watches:
            watch.begin_anew()


def _stages_apart(stages: Sequence[dict[int, dict[str, Any]]]) -> str:
    """As ``_apart``, of stages of which each has ranks that stand alike; a stage may step several optimizers."""
    behind = {next(iter(ranks)): next(iter(ranks.values()))["behind"] for ranks in stages}
    return _uneven(behind)


def _uneven(steps: dict[int, int]) -> str:
    low, high = min(steps, key=lambda rank: steps[rank]), max(steps, key=lambda rank: steps[rank])
    if steps[low] == steps[high]:
        return ""
    return (
        f"expected all ranks to be at the same step, found that rank {low} has taken {steps[low]} and rank {high} "
        f"{steps[high]}. {_LOAD}"
    )


def _apart(ranks: dict[int, dict[str, Any]]) -> str:
    """Why ranks that stand so cannot go on together; "" where they can."""
    for rank, stands in ranks.items():
        if stands["apart"]:
            return str(stands["apart"])
        if stands["under way"]:
            return (
                f"expected every rank between steps, found rank {rank} inside {stands['under way']}: some units have been "
                f"updated and some have not. {_LOAD}"
            )
    uneven = _uneven({rank: stands["steps"] for rank, stands in ranks.items()})
    if uneven:
        return uneven
    scales = [stands["scale"] for stands in ranks.values()]
    if any(scale != scales[0] for scale in scales):
        return f"expected the same loss scale on every rank, found different ones: some ranks have counted an overflow. {_LOAD}"
    return ""
