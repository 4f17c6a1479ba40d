"""What ``memory()`` says in the middle of a step is, to the byte, what the allocator of an accelerator has given out.

Six equal layers at stage 3 on two ranks, on the asynchronous accelerator under its eager schedule. All sizes are whole blocks
of the allocator, so that it rounds nothing. Apart from zhooks there are the batch, what autograd keeps, and its gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

import zhooks
from tests.support.on_ranks import on_accelerators
from tests.support.schedules import native, schedule

WIDTH, LAYERS, ROWS, WORLD = 256, 6, 8, 2
#: A layer's weights, one input or output, and the smallest block.
UNIT, BATCH, BLOCK = WIDTH * WIDTH * 4, ROWS * WIDTH * 4, 512


class Moment(NamedTuple):
    """What was said when the runtime emitted an event."""

    event: str
    allocated: int
    report: Any

    def other(self) -> int:
        return next(int(row.nbytes) for row in self.report.rest if row.what == "other tensors")


class Watch:
    """Asks at every event."""

    def __init__(self, attachment: Any) -> None:
        self._attachment, self._asking = attachment, False
        self.moments: list[Moment] = []

    def on_event(self, event: Any) -> None:
        if self._asking:
            return
        self._asking = True
        self.moments.append(Moment(f"{event.kind} {event.what}", allocated("current"), self._attachment.memory()))
        self._asking = False


def allocated(when: str) -> int:
    return int(torch.accelerator.memory_stats()[f"allocated_bytes.all.{when}"])


@on_accelerators(2)
def test_the_peak_of_a_step_is_to_the_byte_what_memory_says_then() -> None:
    before = allocated("current")
    with schedule("eager"):
        torch.manual_seed(0)
        device = f"accel:{native().current_device()}"
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(device)
        attachment = zhooks.attach(net, policy={"units": {"classes": ["Linear"], "min_numel": 0}})
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        batch = torch.ones(ROWS, WIDTH, device=device)

        def step() -> None:
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        resting = attachment.memory()
        assert resting.by_tier["device"] - LAYERS * BATCH == 3 * LAYERS * UNIT // WORLD  # shards, and two states
        assert allocated("current") - before == 3 * LAYERS * UNIT // WORLD + BATCH
        watch = Watch(attachment)
        attachment.observe(watch)
        step()
        watch.moments.clear()
        torch.accelerator.reset_peak_memory_stats()
        step()
        peak = allocated("peak")
        attachment.detach()

    outside = {moment.event: set[int]() for moment in watch.moments}
    for moment in watch.moments:
        outside[moment.event].add(moment.other() - before)
    # The batch, or, counted by autograd by then, the gradient of an output in its place; and the loss with its gradient.
    for event in ("begin gather", "end gather", "end wait gather", "begin compute", "end compute", "begin forward"):
        assert outside[event] <= {BATCH, BATCH + 2 * BLOCK}, event
    # Autograd holds the gradient of the weight still, whose values have gone into the buffer that is reduced.
    assert outside["begin reduce"] == {BATCH + 2 * BLOCK + UNIT}

    highest = [moment for moment in watch.moments if moment.allocated == peak]
    assert highest, "the peak was at an event"
    report = next(moment.report for moment in highest if moment.event == "instant ready")
    states = {row.what: row.nbytes for row in report.rows}
    assert states["parameter"] == LAYERS * UNIT // WORLD and states["optimizer"] == 2 * states["parameter"]
    # The unit that is computed and the next one.
    assert report.transient["gathered units"] == 2 * UNIT
    # One has been reduced, but compute has not waited for it; one is reduced, and the third, just filled, reaches the bound.
    assert report.transient["partial gradients"] == report.bounds["partial gradients"] == 3 * UNIT
    activations = sum(row.nbytes for row in report.residual)
    autograds = BATCH + 2 * BLOCK + UNIT
    held = sum(states.values()) + 2 * UNIT + report.bounds["partial gradients"]
    assert peak - before == held + activations + autograds


@on_accelerators(2)
def test_sums_that_were_held_back_are_given_back_as_they_are_reduced() -> None:
    with schedule("eager"):
        device = f"accel:{native().current_device()}"
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(device)
        attachment = zhooks.attach(net, policy={"units": {"classes": ["Linear"], "min_numel": 0}})
        with attachment.accumulate():
            for _ in range(2):
                net(torch.ones(ROWS, WIDTH, device=device)).square().mean().backward()
            held = allocated("current")
            torch.accelerator.reset_peak_memory_stats()
        # Each reduction needs half a unit for the gradient, and gives back a whole one when two others are under way.
        assert allocated("peak") - held <= 3 * UNIT // WORLD
        assert allocated("current") - held == LAYERS * (UNIT // WORLD - UNIT)
        attachment.detach()
