"""How many optimizer steps an attachment has behind it, and whether one, or another change of its values, is under way.

``attachment/recovery.py`` compares it over the ranks when they have not met: a run can go on where all stand before the same
step; errors of ``report/`` say the step's number.  It is called by torch's step hooks and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from offload.errors import DivergenceError
from zhooks.optim.groups import holds

__all__ = ["HeldSteps", "Steps"]


class HeldSteps:
    """At a step, gradients are those of all backward passes so far: what ``no_sync`` holds back is reduced first.

    DistributedDataParallel would step with each rank's own gradients, so that its ranks train apart.

    Args:
        params: says which parameters are attached.
        held: whether something may be held back, alike on every rank.
        reduce: reduces it.  Collective.
    """

    def __init__(self, params: Callable[[], list[nn.Parameter]], held: Callable[[], bool], reduce: Callable[[], None]) -> None:
        self._params, self._held, self._reduce = params, held, reduce

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._held() and holds(optimizer, self._params()):
            self._reduce()

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's post-hook."""


class Steps:
    """The steps of all optimizers that hold parameters of one attachment.

    Args:
        params: says which parameters those are.
    Attributes:
        count: steps that have ended since the attach or the last load.
        number: the step that is being made, counted from 0 at the attach and at every load: those of several optimizers
            between two training passes are one.
        under_way: what has begun to change values and has not ended: "" where nothing has.
        dropped: gradients were, and no training pass has come since.
    """

    def __init__(self, params: Callable[[], list[nn.Parameter]]) -> None:
        self._params = params
        self.count, self.under_way, self.dropped = 0, "", False
        self.number, self._made = 0, False

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.ours(optimizer):
            if self.dropped:
                raise DivergenceError(
                    f"{type(optimizer).__name__}.step expected a backward after recover(), which dropped all gradients, found "
                    "none. Repeat the step from its first forward."
                )
            self.under_way = f"{type(optimizer).__name__}.step"

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.ours(optimizer):
            self.count, self.under_way, self._made = self.count + 1, "", True

    @property
    def behind(self) -> int:
        """As ``number``, of the steps that have been made."""
        return self.number + self._made

    def training_begins(self) -> None:
        """A training pass begins: what was stepped before it was one step."""
        self.number, self._made = self.number + self._made, False

    def begin_anew(self) -> None:
        """A checkpoint was loaded: ranks that had come to different steps have one again."""
        self.count, self.under_way, self.number, self._made = 0, "", 0, False

    def go_on(self) -> None:
        """The loop went on after an error that was no lost rank's: whatever that left, all ranks have."""
        self.under_way, self.dropped = "", False

    @contextmanager
    def changing(self, verb: str) -> Iterator[None]:
        """``verb`` changes values inside; it counts as one step."""
        self.under_way = verb
        try:
            yield
        except DivergenceError:
            raise
        except Exception:
            # It failed on every rank, and each knows what it has left.
            self.under_way = ""
            raise
        self.count, self.under_way = self.count + 1, ""

    def ours(self, optimizer: Optimizer) -> bool:
        """It holds some parameter of the attachment."""
        return holds(optimizer, self._params())
