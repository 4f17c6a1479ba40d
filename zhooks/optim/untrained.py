"""An error where a model has gradients that no optimizer will ever use, as the one that steps is of another model.

`attach.py` makes one an attachment, which torch's step hooks ask.  It looks through the interpreter's objects once, and changes
nothing.

Note: [Certain]
    That an optimizer steps which holds none of the attached parameters proves nothing: of a generator and its discriminator
    one is stepped while the other has gradients, for as many steps as the user likes.  That no optimizer in memory holds any of
    them does: whoever has built the right one, and will step it later, is not stopped.  Nor is whoever goes on to another model
    (the next cell of a notebook), and leaves one behind with the gradients of its last backward: the model must have run again
    between two such steps.  Nor is who updates parameters without an optimizer of torch, or by one over copies of them: between
    two such steps nobody may have written a parameter.  Where objects were frozen (``gc.freeze``) nothing is certain.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from offload.errors import AttachError
from zhooks.optim.groups import holders, holds
from zhooks.optim.kernel import grad_of

__all__ = ["Untrained"]


class Untrained:
    """Looks, at every step of an optimizer, whether nobody trains the attached model, until that is known.

    Args:
        model: what it is called in the error.
        params: says which parameters are attached.
        written: how often each flat buffer of them has been written.
    """

    def __init__(self, model: str, params: Callable[[], list[nn.Parameter]], written: Callable[[], list[int]]) -> None:
        self._model, self._params, self._written = model, params, written
        #: Somebody trains it, for good; a training pass has begun since the last step.
        self._known, self._ran = False, False
        #: ``written`` at the last step of another optimizer that came after such a pass.
        self._before: list[int] | None = None

    def training_begins(self) -> None:
        """A training pass of the attached model begins."""
        self._ran = True

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's pre-hook, called before a stepper takes out of the optimizer what it updates itself; see Note [Certain].

        Raises:
            AttachError: it is the second step of an optimizer while nobody trains the model.
        """
        if self._known:
            return
        params = self._params()
        if holds(optimizer, params):
            self._known = True
            return
        if not self._ran or all(grad_of(param) is None for param in params):
            return
        self._ran, before, self._before = False, self._before, self._written()
        if before is None:
            return
        self._known = before != self._before or bool(gc.get_freeze_count() or holders(params))
        if self._known:
            return
        kind = type(optimizer).__name__
        raise AttachError(
            f"{kind}.step trains nothing. Expected an optimizer with parameters of the attached {self._model}, which has "
            f"gradients, found none in memory: this {kind} holds other parameters, so nothing trains that model. Build the "
            "optimizer over the parameters of the model that was given to attach; if that shall not be trained, call "
            "requires_grad_(False) on it."
        )

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's post-hook."""
