"""How the modules of a model built under ``torch.device("meta")`` get values, and the refusal of those that cannot.

``request.py`` checks, ``build/materialize.py`` calls them.  It never guesses a value, and fills nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from offload.errors import AttachError
from zhooks import tree

__all__ = ["check_initialisers", "initialiser_of", "is_meta"]


def check_initialisers(model: nn.Module, init: Callable[[nn.Module], None] | None) -> None:
    """Every module on meta can be given values.

    Raises:
        AttachError: one has no initialiser, and none was passed.
    """
    meta = [(name, module) for name, module in tree.named_modules(model) if is_meta(module)] if init is None else []
    missing = [name or type(module).__name__ for name, module in meta if initialiser_of(model, module) is None]
    if missing:
        raise AttachError(
            "attach expected every module of a meta model to have reset_parameters, or the root _init_weights; found none for "
            f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. Pass init=function(module)."
        )


def initialiser_of(model: nn.Module, module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """The module's own reset, then the model's rule for its modules, which knows better where it says anything."""
    found = [getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters")]
    reset = next((method for method in found if callable(method)), None)
    weights = getattr(model, "_init_weights", None)
    if not callable(weights):
        return None if reset is None else lambda _: reset()

    def both(inner: nn.Module) -> None:
        if reset is not None:
            reset()
        weights(inner)

    return both


def is_meta(module: nn.Module) -> bool:
    """The module owns a tensor without memory."""
    tensors = [*tree.own_parameters(module), *module._buffers.values()]
    return any(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
