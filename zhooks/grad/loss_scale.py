"""The loss scale as numbers, and the step that is not made.

``scaling.py`` tells it what happened; it answers with the scale.  It never sees a gradient.

Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2; hysteresis as DeepSpeed has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from offload.policy import Precision

__all__ = ["LossScale", "leave_nothing"]


class LossScale:
    """The scale and its counters: numbers in, a number out."""

    def __init__(self, precision: Precision) -> None:
        self.rules = precision
        given = precision.loss_scale
        self.value = float(precision.initial_scale if given is None or given == "dynamic" else given)
        self.good_steps, self.overflows_left = 0, precision.hysteresis

    @property
    def dynamic(self) -> bool:
        return self.rules.loss_scale == "dynamic"

    def overflowed(self) -> bool:
        """A step overflowed; False where the scale should go down and is at its minimum."""
        self.good_steps = 0
        if not self.dynamic:
            return True
        self.overflows_left -= 1
        if self.overflows_left > 0:
            return True
        self.overflows_left = 1
        before, self.value = self.value, max(self.value * self.rules.backoff_factor, self.rules.min_scale)
        return before > self.rules.min_scale

    def succeeded(self) -> None:
        """A step was made."""
        if not self.dynamic:
            return
        self.good_steps += 1
        if self.good_steps >= self.rules.growth_interval:
            grown = self.value * self.rules.growth_factor
            self.value = grown if grown <= torch.finfo(torch.float32).max else self.value
            self.good_steps, self.overflows_left = 0, self.rules.hysteresis

    def follow(self, precision: Precision) -> None:
        """Other rules; the scale goes on from where it is, unless it is given as a number or scaling was not on."""
        if self.rules.loss_scale is None or precision.loss_scale != "dynamic":
            self.value = LossScale(precision).value
        self.rules = precision
        self.overflows_left = min(self.overflows_left, precision.hysteresis)


def leave_nothing(optimizer: Any) -> Callable[[], None]:
    """Leave a step nothing to do and nothing to count; returns what puts everything back."""
    groups = optimizer.param_groups
    table, hooks, after = optimizer._optimizer_step_pre_hooks, None, optimizer._optimizer_step_post_hooks
    hooks = dict(table)

    def undo() -> None:
        optimizer.param_groups = groups
        table.update(hooks)
        optimizer._optimizer_step_post_hooks = after

    # The table itself: torch has begun to walk through it.
    table.clear()
    optimizer.param_groups = [{**group, "params": []} for group in groups]
    optimizer._optimizer_step_post_hooks = OrderedDict()
    return undo
