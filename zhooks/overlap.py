"""``[optimizer] overlap = true``: a flat is updated in backward, as soon as its reduction has landed.

``reduce.py`` tells it of every landing; ``optim.py`` asks at the step what is left to do.  An update made early cannot know
of a clip, an unscale, another backward or a new learning rate, so each of these is refused by name when it comes.

Note: [Early or not]
    A flat is updated early when an optimizer that has stepped before, with the states it has, holds its parameters, all of
    them got a gradient on this rank, no earlier gradient was waiting, and no other forward of this backward is still to
    come through it.  Any other is left to the step, which does the same arithmetic:
    which of the two happened never changes a bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zhooks.flat import Flat
from zhooks.grad import Gradient
from zhooks.group_numbers import numbers
from zhooks.optim import Arguments, Job, Stepper
from zhooks.refusals import too_late

__all__ = ["Overlap"]


class Overlap:
    """The early updates of one attachment, between two steps."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        #: Optimizers, each with the ``state`` of its last step: what was loaded since has not been made ranges yet.
        self._known: list[tuple[weakref.ref[Optimizer], Any]] = []
        self._start: dict[int, list[dict[str, Any]]] = {}
        self._spent: dict[int, set[int]] = {}

    def early(self, gradient: Gradient) -> None:
        """A whole reduced gradient lies in its shard: update now where that is right.

        Raises:
            ShardedOpError: the flat was updated already in this step: a second backward.
        """
        flat = gradient.flat
        if flat.spent:
            self._forget()
            raise too_late(f"unit {flat.name}", "a second backward")
        if flat.nodes > 1 or any(param.grad is not None for param in flat.params):
            return
        mine = [(optimizer, job) for optimizer in self._optimizers() if (job := self._job(optimizer, flat)) is not None]
        if not mine:
            return
        for index, param in enumerate(flat.params):
            param.grad = gradient.tensor(index)
        for optimizer, job in mine:
            self._start.setdefault(id(optimizer), numbers(optimizer))
            self._stepper.run(optimizer, [job], last=False)
            self._spent.setdefault(id(optimizer), set()).add(flat.number)
        for param in flat.params:
            param.grad = None
        flat.spent = True

    def left(self, optimizer: Optimizer, jobs: Sequence[Job], arguments: Arguments) -> list[Job]:
        """What a step still has to do.

        Raises:
            ShardedOpError: the optimizer's numbers have changed since the first early update, or the step has arguments.
        """
        self._known = [(known, state) for known, state in self._known if known() is not optimizer]
        self._known.append((weakref.ref(optimizer), optimizer.state))
        spent, start = self._spent.pop(id(optimizer), set()), self._start.pop(id(optimizer), None)
        for job in jobs:
            job.flat.spent = False
            job.flat.nodes = 0
        if start is not None and not _same(start, numbers(optimizer)):
            raise too_late(type(optimizer).__name__, "other numbers in its groups (a learning rate)")
        if start is not None and arguments.given:
            raise too_late(f"{type(optimizer).__name__}.step", f"arguments ({', '.join(arguments.given)})")
        return [job for job in jobs if job.flat.number not in spent]

    def _forget(self) -> None:
        """Said once; from here on the step is an ordinary one."""
        self._spent.clear()
        self._start.clear()
        for flat in self._stepper.flats():
            flat.spent = False

    def _optimizers(self) -> list[Optimizer]:
        self._known = [entry for entry in self._known if entry[0]() is not None]
        found = [(known(), state) for known, state in self._known]
        return [optimizer for optimizer, state in found if optimizer is not None and optimizer.state is state]

    def _job(self, optimizer: Optimizer, flat: Flat) -> Job | None:
        return next((job for job in self._stepper.jobs(optimizer) if job.flat is flat), None)


def _same(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> bool:
    return all(
        before.keys() == now.keys() and all(_equal(before[key], now[key]) for key in before)
        for before, now in zip(one, two, strict=True)
    )


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return bool(one == two)
