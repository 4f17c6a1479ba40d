"""A step of a pipeline: one rank of each stage simulated beside the others, and what they come to together.

``run.py`` calls it where the mesh has a pp axis.  Stages run as torch's schedules have them, taking turns where one waits for
another's messages; it knows no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from offload.hardware import Hardware
from offload.virtual import Machine, Turns
from zhooks.simulate.costs import HardwareCosts
from zhooks.simulate.virtual_group import check_no_group, join_on_paper
from zhooks.simulate.virtual_stages import stages_on_paper

if TYPE_CHECKING:
    from zhooks.simulate.run import Job, Simulation

__all__ = ["pipeline"]

RunRank = Callable[["Job", Machine, HardwareCosts, Callable[[], None]], "Simulation"]


def pipeline(job: Job, hardware: Hardware, run_rank: RunRank) -> Simulation:
    """Simulate one rank of each stage, and sum them up."""
    check_no_group()
    arrangement = job.arrangement
    places, world = range(arrangement.stages), arrangement.world
    costs = [HardwareCosts(hardware, world) for _ in places]
    machines = [Machine(each) for each in costs]
    ranks = [arrangement.first_of(place) for place in places]
    with stages_on_paper(ranks, arrangement.stage_of) as stages:

        def program(place: int) -> Simulation:
            join_on_paper(ranks[place], world)
            waited = 0.0

            def begins() -> None:
                nonlocal waited
                stages.together()
                waited = stages.waited[place]

            found = run_rank(job, machines[place], costs[place], begins)
            return replace(found, rank=ranks[place], bubble_s=stages.waited[place] - waited)

        turns = Turns(machines, [partial(program, place) for place in places], stages.begin, lambda place: f"stage {place}")
        stages.turns = turns
        found = turns.run()
    return _together(found, costs[0])


def _together(found: Sequence[Simulation], costs: HardwareCosts) -> Simulation:
    """The step takes what it takes the stage that is the last to end; the others wait for it."""
    seconds, each_world = max(one.step_s for one in found), found[0].world // len(found)

    def of_whole(one: Simulation) -> Simulation:
        share = one.step_s / seconds if seconds else 1.0
        cost = costs.model.step(seconds, min(1.0, one.compute_s / seconds) if seconds else 0.0, each_world)
        return replace(
            one, step_s=seconds, bubble_s=one.bubble_s + seconds - one.step_s, mfu=one.mfu * share, joules=cost.joules,
            price=cost.price,
        )  # fmt: skip

    every = tuple(of_whole(one) for one in found)
    largest = max(every, key=lambda one: one.device.nbytes)
    return replace(
        largest,
        compute_s=fmean(one.compute_s for one in every),
        exposed_s=fmean(one.exposed_s for one in every),
        bubble_s=fmean(one.bubble_s for one in every),
        host_s=max(one.host_s for one in every),
        host=max((one.host for one in every), key=lambda peak: peak.nbytes),
        flops=round(fmean(one.flops for one in every)),
        link_nbytes=fmean(one.link_nbytes for one in every),
        network_nbytes=fmean(one.network_nbytes for one in every),
        mfu=fmean(one.mfu for one in every),
        joules=_sum([one.joules for one in every]),
        price=_sum([one.price for one in every]),
        races=tuple(race for one in every for race in one.races),
        reserved=max((one.reserved for one in every if one.reserved is not None), key=lambda one: one.nbytes, default=None),
        stages=every,
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
