"""How many optimizer steps an attachment has behind it, and whether one, or another change of its values, is under way.

``resilience/recovery.py`` compares it over the ranks when they have not met: a run can go on where all stand before the same
step; errors of ``report/`` say the step's number.  The step pipeline calls it; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offload.errors import DivergenceError
from zhooks.optim.step_pipeline import Step

__all__ = ["Steps"]


class Steps:
    """The steps of all optimizers that hold parameters of one attachment.

    Attributes:
        count: steps that have ended since the attach or the last load.
        number: the step that is being made, counted from 0 at the attach and at every load: those of several optimizers
            between two training passes are one.
        under_way: what has begun to change values and has not ended: "" where nothing has.
        dropped: gradients were, and no training pass has come since.
    """

    def __init__(self) -> None:
        self.count, self.under_way, self.dropped = 0, "", False
        self.number, self._made = 0, False

    def before(self, step: Step) -> None:
        if step.ours:
            if self.dropped:
                raise DivergenceError(
                    f"{type(step.optimizer).__name__}.step expected a backward after recover(), which dropped all gradients, "
                    "found none. Repeat the step from its first forward."
                )
            self.under_way = f"{type(step.optimizer).__name__}.step"

    def after(self, step: Step) -> None:
        if step.ours:
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
