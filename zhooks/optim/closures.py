"""Closures of optimizers that decide by the loss: all ranks are given one value, that of the loss the gradients are of.

``session/open.py`` makes it; the step pipeline calls it before every step.  It never calls a closure itself, and leaves those
alone whose optimizer could do without.

Note: [One value]
    Ranks have other batches, so their closures return other losses, while gradients are averaged (or summed) over the ranks.
    An optimizer that compares losses (a line search, a stop) would go other ways on each rank.  Whoever *requires* a closure
    is taken to look at its value: it gets the ranks' values averaged, or summed, as gradients are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zhooks.comm import CONTROL, Call, Transport
from zhooks.optim.step_pipeline import Step

__all__ = ["Closures"]


class Closures:
    """The closures given to optimizers of one attachment's parameters.

    Args:
        world: the ranks that have other batches.
        mean: gradients are averaged over them, now.
        idle: this rank has run out of batches, now.
    """

    def __init__(self, world: Transport, mean: Callable[[], bool], idle: Callable[[], bool]) -> None:
        self._world, self._mean, self._idle = world, mean, idle

    def before(self, step: Step) -> None:
        """Give the optimizer a closure whose value is that of all ranks, where it requires one."""
        kind: Any = type(step.optimizer)
        closure = step.closure
        if self._world.axis.world > 1 and step.ours and closure is not None and _requires_closure(kind):
            step.call_with(self._agreed(closure))

    def _agreed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        return closure if isinstance(closure, AgreedClosure) else AgreedClosure(closure, self._over_ranks)

    def _over_ranks(self, value: Any) -> Any:
        """The loss of all ranks.  Collective."""
        if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
            return value
        # A rank that repeats its last batch for others has no part in the gradients either.
        own = 0.0 if self._idle() else float(value.detach() if isinstance(value, Tensor) else value)
        total = torch.tensor([own], dtype=torch.float64, device="cpu")
        self._world.all_reduce(Call(CONTROL, "all-reduce sum", "the closure's loss"), total, "sum")
        found = float(total) / (self._world.axis.world if self._mean() else 1)
        return torch.full_like(value.detach(), found) if isinstance(value, Tensor) else found


class AgreedClosure:
    """A closure whose value is that of all ranks."""

    def __init__(self, closure: Callable[[], Any], over_ranks: Callable[[Any], Any]) -> None:
        self._closure, self._over_ranks = closure, over_ranks

    def __call__(self) -> Any:
        return self._over_ranks(self._closure())


@cache
def _requires_closure(kind: Any) -> bool:
    """Its step, or one that it overrides, cannot be called without."""
    steps = [vars(base)["step"] for base in kind.__mro__ if "step" in vars(base)]
    found = [inspect.signature(step).parameters.get("closure") for step in steps if callable(step)]
    return any(one is not None and one.default is inspect.Parameter.empty for one in found)
