"""Functions of torch's in Python that read memory: printing, ``numpy``, ``copy.deepcopy``, objects sent between ranks.

A machine enters `PythonFunctions` while it is on, a mode of torch's own; it leaves every other function to torch.  Threads of
torch's (backward) are outside of it: there printing is refused as whatever reads values is.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offload.virtual.memory import NAME
from offload.virtual.refused import no_data

__all__ = ["PythonFunctions"]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class PythonFunctions(TorchFunctionMode):
    """``repr``, ``print``, f-strings without a format, deep copies of plain tensors of this device; objects for other ranks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MAKING and sys._getframe(1).f_code.co_name in _OF_THE_HOST and _torch_distributed(sys._getframe(1)):
            return _on_host(func, args, kwargs or {})
        known: Any = _KNOWN.get(func)
        if known is not None and type(args[0]) in _PLAIN and args[0].device.type == NAME:
            return known(*args)
        return func(*args, **(kwargs or {}))


def _torch_distributed(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_DISTRIBUTED)


def _on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What torch exchanges of objects and of schedules has values, which nothing but the real host can keep."""
    if func is Tensor.to:
        return args[0] if len(args) == 2 and torch.device(args[1]).type == NAME else func(*args, **kwargs)
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == NAME:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return func(*args, **kwargs)


_DISTRIBUTED = str(Path(torch.distributed.__file__).parent)
_MAKING = frozenset({torch.tensor, torch.zeros, torch.empty, Tensor.to})
#: Functions of torch.distributed that put small values on the device to send them, and read what they receive.
_OF_THE_HOST = frozenset({
    "_object_to_tensor", "_warmup_backward_result", "_warmup_forward_vote", "all_gather_object", "broadcast_object_list",
    "recv_object_list", "send_object_list",
})  # fmt: skip


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
