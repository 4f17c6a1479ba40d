"""Operations of the virtual device that need a kernel of their own: what has no tensor to go by, moves data, or reads values.

``torch_device.py`` registers `KERNELS`.  Whatever is not here, `operations.run` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey

from offload.virtual.dispatch import by_key
from offload.virtual.memory import NAME, new
from offload.virtual.operations import run
from offload.virtual.refused import no_data
from offload.virtual.watcher import watcher

__all__ = ["COMPOSITES", "KERNELS"]

_aten: Any = torch.ops.aten


def _empty(
    size: Sequence[int],
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    chosen = torch.contiguous_format if memory_format is None else memory_format
    twin = torch.empty(size, dtype=dtype, device="meta", memory_format=chosen)
    return new(twin.shape, twin.stride(), twin.dtype, (device.index or 0) if device is not None else 0)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    return new(size, stride, dtype or torch.get_default_dtype(), (device.index or 0) if device is not None else 0)


def _set_storage(self: Tensor, source: Any, storage_offset: int, size: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    out: Tensor = by_key(DispatchKey.CPU, _aten.set_.source_Storage_storage_offset, self, source, storage_offset, size, stride)
    return out


def _alias(tensor: Tensor) -> Tensor:
    size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    out: Tensor = by_key(DispatchKey.CPU, _aten.as_strided.default, tensor, size, stride, offset)
    return out


def _copy_from(source: Tensor, out: Tensor, non_blocking: bool = False) -> Tensor:
    if out.device.type != NAME:
        raise no_data(f"a copy to {out.device}")
    watcher().copied(out, source, waits=not non_blocking)
    return out


def _item(tensor: Tensor) -> Any:
    if tensor.dtype is torch.bool and _initialises():
        return False
    raise no_data("item()")


def _initialises() -> bool:
    """``trunc_normal_`` draws again while some value is outside of its bounds: values that are not there are none of these."""
    frame: FrameType | None = sys._getframe()  # one of autograd's threads has no more than ours
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename == nn.init.__file__:
            return True
        frame = frame.f_back
    return False


#: Of the frames between a function of ``torch.nn.init`` and what it calls.
_TORCH = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _grouped_mm(*arguments: Any) -> Any:
    return run(_aten._grouped_mm.default, *arguments)


def _record_stream(tensor: Tensor, stream: Any) -> None:
    return None


def _convolution(*arguments: Any) -> Any:
    return run(_aten.convolution.default, *arguments)


def _convolution_backward(
    grad: Tensor, value: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool, output: Any,
    groups: int, mask: Any,
) -> Any:  # fmt: skip
    bias = [grad.shape[1]]
    arguments = (grad, value, weight, bias, stride, padding, dilation, transposed, output, groups, mask)
    return run(_aten.convolution_backward.default, *arguments)


def _cumprod_backward(grad: Tensor, value: Tensor, dim: int, output: Tensor) -> Tensor:
    """As torch has it where no factor is 0, which it asks of the values."""
    weighted = output * grad
    _zero = (value == 0).any()
    return weighted.flip(dim).cumsum(dim).flip(dim).div(value.conj())


def _binary_cross_entropy(value: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    """The one number is left in the memory of the losses of all elements."""
    losses: Tensor = run(_aten.binary_cross_entropy.default, value, target, weight, 0)
    return losses if reduction == 0 else losses.resize_(())


#: What torch makes of other operations and values, by operations alone; above autograd and below.
COMPOSITES: dict[str, Callable[..., Any]] = {"cumprod_backward": _cumprod_backward}
KERNELS: dict[str, Callable[..., Any]] = {
    "_grouped_mm": _grouped_mm,
    "alias": _alias,
    "binary_cross_entropy": _binary_cross_entropy,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "set_.source_Storage_storage_offset": _set_storage,
    "_copy_from": _copy_from,
    "_local_scalar_dense": _item,
    "record_stream": _record_stream,
}
