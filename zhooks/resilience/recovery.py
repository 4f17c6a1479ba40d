"""``Attachment.recover``: after ranks have not met, all are at rest, connected anew, and found to stand at one step.

Note: [What is repeated]
    Nothing by itself.  A collective may have reached some ranks and not others, and adding up twice is an effect; so a call
    that failed fails on all ranks, and the loop repeats its step, or the verb, after ``recover``.  What has no effect when it
    is done twice (looking into the process group's store, waiting there) is waited for in slices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offload.device import computes_on_host
from offload.errors import CapabilityError, DivergenceError
from zhooks.comm import Meeting, reopen_comm
from zhooks.session import Session

__all__ = ["Recovery", "recover"]

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


def recover(session: Session) -> Recovery:
    """See ``Attachment.recover``.  Collective."""
    session.attached("recover")
    runtime, steps, failure = session.runtime, session.steps, session.comm.failure
    if not computes_on_host(session.device):
        raise CapabilityError(f"recover expected parameters on the CPU, found them on {session.device}. {_RESTART}")
    if failure.is_alone:
        return _recovered(session, runtime.abandon() or runtime.reducer.holds, "")
    verdict = failure.verdict
    if verdict is not None and verdict.kind == "gone":
        raise DivergenceError(f"{verdict.problem} recover() needs every rank. {_RESTART}")
    session.bus.begin("recover", "all ranks")
    try:
        under_way = "a backward that updates" if runtime.updated_early else steps.under_way
        lost = runtime.abandon() or runtime.reducer.holds
        saving = session.saving is not None and not session.saving.concluded
        # The others may have begun to wait for this rank just now, and come when they have given it up.
        meeting = Meeting("recover", 2 * session.policy.comm.timeout_s)
        stands: dict[str, Any] = {"steps": steps.count, "under way": under_way, "lost": lost, "apart": session.apart}
        stands |= {"behind": steps.behind, "saving": saving, "scale": runtime.scaling.saved()}
        stands["cause"] = "" if verdict is None else verdict.found
        meeting.say("stands", json.dumps(stands))
        meeting.agree("recovery")
        every = [json.loads(meeting.heard("stands", rank)) for rank in failure.processes]
        reopen_comm(session.comm, session.policy, session.device, meeting)
        meeting.agree("recovered transports")
        failure.begin_anew()
        runtime.evaluations = 0
    finally:
        session.bus.end("recover", "all ranks")
    session.optimizers.meet_again()
    for watch in session.watches:
        watch.meet_again()
    stage = session.comm.stage.axis
    ours = [every[rank] for rank in stage.ranks]
    if saving and not all(one["saving"] for one in ours) and session.saving is not None:
        session.saving.give_up()
    stages = [{rank: every[rank] for rank in ranks} for ranks in stage.siblings or (stage.ranks,)]
    session.apart = next((found for found in map(_apart, stages) if found), "") or _stages_apart(stages)
    cause = next((one["cause"] for one in every if one["cause"]), "")
    recovered = _recovered(session, any(one["lost"] for one in every), cause)
    session.check_whole("recover:")
    return recovered


def _recovered(session: Session, lost: bool, cause: str) -> Recovery:
    if lost:
        session.runtime.reducer.drop()
        session.steps.dropped = True
    return Recovery(lost, session.steps.count, cause)


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
