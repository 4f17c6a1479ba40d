"""A warning where a model has gradients that no optimizer will ever use, as the one that steps is of another model.

`attach.py` makes one an attachment; torch's step hooks ask that of the first rank.  It looks through the interpreter's objects
once, and changes nothing.

Note: [Certain]
    That an optimizer steps which holds none of the attached parameters proves nothing: of a generator and its discriminator
    one is stepped while the other has gradients, for as many steps as the user likes.  That no optimizer in memory holds any of
    them does: whoever has built the right one, and will step it later, is not warned.  Nor is whoever goes on to another model
    (the next cell of a notebook), and leaves one behind with the gradients of its last backward: the model must have run again
    between two such steps.  Where objects were frozen (``gc.freeze``) nothing is certain.  An error it is not: gradients may be
    wanted for their own sake.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from offload.user_warnings import warn_user
from zhooks.optim.groups import holders, holds
from zhooks.optim.kernel import grad_of

__all__ = ["Untrained"]


class Untrained:
    """Looks, at every step of an optimizer, whether nobody trains the attached model, until that is known.

    Args:
        model: what it is called in the warning.
        params: says which parameters are attached.
    """

    def __init__(self, model: str, params: Callable[[], list[nn.Parameter]]) -> None:
        self._model, self._params = model, params
        #: It is known, for good; a training pass has begun since the last step; steps of others that came after one.
        self._known, self._ran, self._others = False, False, 0

    def training_begins(self) -> None:
        """A training pass of the attached model begins."""
        self._ran = True

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's pre-hook, called before a stepper takes out of the optimizer what it updates itself; see Note [Certain]."""
        if self._known:
            return
        params = self._params()
        ours = holds(optimizer, params)
        if not ours:
            if not self._ran or all(grad_of(param) is None for param in params):
                return
            self._ran, self._others = False, self._others + 1
            if self._others < 2:
                return
        self._known = True
        if ours or gc.get_freeze_count() or holders(params):
            return
        kind = type(optimizer).__name__
        warn_user(
            f"{kind}.step: expected an optimizer with parameters of the attached {self._model}, which has gradients, found "
            f"none in memory: this {kind} holds other parameters, so nothing trains that model. Build the optimizer over the "
            "parameters of the model that was given to attach; if that shall not be trained, call requires_grad_(False) on it."
        )

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's post-hook."""
