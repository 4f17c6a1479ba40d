"""What an operation on tensors of the virtual device makes: views by the CPU's kernels, anything else by meta kernels.

``torch_device.py`` gives torch `run` for all operations that `kernels.py` has no kernel for.  It moves no data and counts no
time: the `Watcher` of the moment is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from offload.virtual.memory import NAME, fresh, new
from offload.virtual.refused import no_data
from offload.virtual.watcher import Operation, watcher

__all__ = ["run"]

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Signature:
    """What an operation does to its arguments; their names and places, as its schema has them."""

    view: bool
    written: tuple[tuple[int, str], ...]
    returns: int


@cache
def _signature(overload: Any) -> _Signature:
    schema = overload._schema
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    view = not written and any(result.alias_info is not None for result in schema.returns)
    return _Signature(view, written, len(schema.returns))


def run(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation with a tensor of this device among its arguments, below autograd."""
    signature = _signature(overload)
    if signature.view:
        return overload._op_dk(DispatchKey.CPU, *args, **kwargs)
    tensors: list[Tensor] = []
    twins = [_twin(value, tensors) for value in args]
    named = {name: _twin(value, tensors) for name, value in kwargs.items()}
    device = kwargs.get("device")
    if device is not None:
        named["device"] = torch.device("meta")
    try:
        found = overload(*twins, **named)
    except NotImplementedError as error:
        raise no_data(str(overload)) from error
    index = tensors[0].device.index if device is None else device.index or 0
    if not signature.written:
        made = _made(found, index)
        watcher().ran(Operation(overload, args, kwargs, made, tuple(tensors), tuple(_tensors(made))))
        return made
    written: list[Any] = []
    for place, name in signature.written:
        own, twin = (args[place], twins[place]) if place < len(args) else (kwargs[name], named[name])
        if isinstance(own, Tensor) and twin.shape != own.shape:
            _resize(own, twin)
        written.append(own)
    changed = tuple(_tensors(written))
    watcher().ran(Operation(overload, args, kwargs, None, tuple(tensors), changed))
    assert signature.returns <= len(written) or not signature.returns, f"{overload}: makes and writes"
    return written[0] if signature.returns == 1 else tuple(written[: signature.returns]) or None


def _twin(value: Any, tensors: list[Tensor]) -> Any:
    """The same on meta; tensors of this device are noted.  A number of the host stays what it is."""
    if isinstance(value, Tensor):
        if value.device.type == NAME:
            tensors.append(value)
        elif value.dim() == 0:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_twin(each, tensors) for each in value)
    return value


def _made(value: Any, index: int) -> Any:
    if isinstance(value, Tensor):
        return new(value.shape, value.stride(), value.dtype, index)
    if isinstance(value, list | tuple):
        return type(value)(_made(each, index) for each in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def _resize(own: Tensor, twin: Tensor) -> None:
    """An ``out`` argument that takes the shape of the result."""
    storage = fresh(twin.untyped_storage().nbytes(), own.device.index)
    _aten.set_.source_Storage_storage_offset._op_dk(DispatchKey.CPU, own, storage, 0, twin.shape, twin.stride())
