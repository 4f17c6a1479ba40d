"""The first steps of optimizers, which show what they will keep: before them a budget is held against it.

``device_budget.py`` and ``state_budgets.py`` are built on it.  It never counts a byte.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch.optim import Optimizer

from zhooks.grad import in_backward
from zhooks.optim import Step
from zhooks.unit import Unit

__all__ = ["FirstSteps"]


class FirstSteps:
    """Called before every optimizer's step.

    Args:
        units: the attachment's own list.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        # How many groups of parameters each had when it was counted: a step with more counts it again.
        self._counted: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def before(self, step: Step) -> None:
        """Every step.  Collective at the first step of an optimizer that holds parameters of the model, and at the first
        after it was given more, where there is a budget.

        Raises:
            BudgetError: its states would not fit; nothing has been updated, on any rank.
        """
        # Ranks need not come to a step in backward (an optimizer a parameter) in one order.
        if not self._bounded or in_backward():
            return
        optimizer = step.optimizer
        if self._counted.get(optimizer) == len(optimizer.param_groups):
            return
        if step.ours:
            self._admit_states(optimizer)
        self._counted[optimizer] = len(optimizer.param_groups)

    @property
    def _bounded(self) -> bool:
        """There is a budget; alike on every rank."""
        raise NotImplementedError

    def _admit_states(self, optimizer: Optimizer) -> None:
        """It is about to make states.  Collective.

        Raises:
            BudgetError: as ``before``.
        """
        raise NotImplementedError
