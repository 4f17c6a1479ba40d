"""Functions of tensors that torch writes in Python and that read memory: printing, ``numpy``, ``copy.deepcopy``.

A machine enters `PythonFunctions` while it is on, a mode of torch's own; it leaves every other function to torch.  Threads of
torch's (backward) are outside of it: there printing is refused as whatever reads values is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offload.virtual.memory import NAME
from offload.virtual.refused import no_data

__all__ = ["PythonFunctions"]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class PythonFunctions(TorchFunctionMode):
    """``repr``, ``print``, f-strings without a format and deep copies of plain tensors of this device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known: Any = _KNOWN.get(func)
        if known is not None and type(args[0]) in _PLAIN and args[0].device.type == NAME:
            return known(*args)
        return func(*args, **(kwargs or {}))


def _shown(tensor: Tensor) -> str:
    render: Any = Tensor.__repr__
    text: str = render(tensor, tensor_contents=f"no data, size={tuple(tensor.shape)}")
    return text


def _formatted(tensor: Tensor, text: str) -> str:
    render: Any = Tensor.__format__
    shown: str = render(tensor, text) if text else _shown(tensor)
    return shown


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """In memory of its own, which torch would copy where there is none to read."""
    if id(tensor) in memo:
        known: Tensor = memo[id(tensor)]
        return known
    if not tensor.is_leaf:
        refuse: Any = Tensor.__deepcopy__
        refuse(tensor, memo)
    with torch.no_grad():
        made = tensor.clone()
    made.requires_grad_(tensor.requires_grad)
    with PythonFunctions():  # torch leaves a mode while it handles a function
        made.__dict__ = copy.deepcopy(tensor.__dict__, memo)
        if tensor.grad is not None:
            made.grad = copy.deepcopy(tensor.grad, memo)
    memo[id(tensor)] = made
    return made


def _as_array(*_: Any) -> Any:
    raise no_data("numpy()")


_KNOWN = {
    Tensor.__repr__: _shown,
    Tensor.__format__: _formatted,
    Tensor.__deepcopy__: _copied,
    Tensor.numpy: _as_array,
    Tensor.__array__: _as_array,
}
