"""Owns what a step that ran out of memory had still to make, asked of the process that failed: gradients and optimizer states.

``running.launch`` and the notebook magic ask it before the error leaves. It never imports torch, changes nothing of the
script's, and knows nothing where an optimizer cannot be tried.

Note: [A twin of the optimizer]
    What an optimizer keeps of a parameter is known once it has stepped. One that has not is copied, its groups given a
    parameter of a few elements each, and the copy stepped, without the hooks that listen to steps.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

__all__ = ["to_come"]

#: Of the parameter that a twin steps on: enough that a state is told from a counter of steps.
_ELEMENTS = 64


def to_come() -> tuple[int, int] | None:
    """Bytes of (gradients, states) that optimizers alive in this process lack; None where there is none, or nobody knows."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    try:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes(), torch.enable_grad():
            # By type: to ask a proxy for its class may raise.
            alive = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
            found = [_lacks(each) for each in alive if each.param_groups]
    except Exception:
        # Whatever it was: the script ends by an error of its own, and this says less of it.
        return None
    return (sum(gradients for gradients, _ in found), sum(states for _, states in found)) if found else None


def _lacks(optimizer: Any) -> tuple[int, int]:
    gradients = states = 0
    for group, kept in zip(optimizer.param_groups, _kept(optimizer), strict=True):
        for parameter in _local(group["params"]):
            nbytes = parameter.numel() * parameter.element_size()
            gradients += nbytes if parameter.grad is None else 0
            states += 0 if optimizer.state.get(parameter) else round(kept * nbytes)
    return gradients, states


def _local(parameters: list[Any]) -> Iterator[Any]:
    """Those that are trained; of a DTensor this rank's shard is what counts, so that it is not known here."""
    for parameter in parameters:
        if parameter.requires_grad:
            if hasattr(parameter, "to_local") or parameter.is_sparse:
                raise TypeError("its bytes on this rank are not known")
            yield parameter


def _kept(optimizer: Any) -> list[float]:
    """Of each group, bytes of states a byte of parameters; see Note: [A twin of the optimizer]."""
    torch = sys.modules["torch"]
    dtypes = [_dtype(group["params"]) for group in optimizer.param_groups]
    made = [torch.nn.Parameter(torch.zeros(8, _ELEMENTS // 8, dtype=dtype)) for dtype in dtypes]
    for each in made:
        each.grad = torch.zeros_like(each)
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": [each]} for group, each in zip(optimizer.param_groups, made, strict=True)]
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(twin)
    return [
        sum(value.numel() * value.element_size() for value in twin.state[each].values() if _like(value, each))
        / (each.numel() * each.element_size())
        for each in made
    ]


def _dtype(parameters: list[Any]) -> Any:
    return parameters[0].dtype if parameters else None


def _like(value: Any, parameter: Any) -> bool:
    return hasattr(value, "element_size") and value.numel() == parameter.numel()
