"""Where tensors of the virtual device lie: addresses that nothing else has, storages without data, new tensors over them.

`operations.py` and `kernels.py` make results of it, devices and disks their runs of memory.  It runs no operation.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor
from torch._C import DispatchKey

from offload.pages import ALIGN
from offload.virtual.dispatch import by_key
from offload.virtual.dlpack import Empty
from offload.virtual.watcher import watcher

__all__ = ["ACCELERATOR", "HOST", "NAME", "fresh", "memory_at", "new", "reach", "take_address"]

NAME = "virtual"
#: Indices, see Note [Two places].
ACCELERATOR, HOST = 0, 1
#: Storages begin on multiples of this, as those of CUDA's caching allocator do.
_GRAIN = 512
_aten: Any = torch.ops.aten

_place = threading.Lock()
_next = 1 << 40


def take_address(nbytes: int) -> int:
    """Where ``nbytes`` lie that nothing else ever lies at: on a page of its own where it is a page or more."""
    global _next
    grain = _GRAIN if nbytes < ALIGN else ALIGN
    with _place:
        address = -(-_next // grain) * grain
        _next = address + -(-max(nbytes, 1) // grain) * grain
        return address


def memory_at(address: int, span: int, nbytes: int, index: int) -> Tensor:
    """uint8 [nbytes] at an address, in a storage of its own of ``span`` bytes that is nobody's to free."""
    with torch.inference_mode(False), torch.no_grad():
        return _over(_storage(address, span, index), (nbytes,), (1,), torch.uint8, index)


def _storage(address: int, nbytes: int, index: int) -> torch.UntypedStorage:
    construct: Any = torch._C._construct_storage_from_data_pointer
    made: torch.UntypedStorage = construct(address, torch.device(NAME, index), nbytes)
    return made


def _over(storage: Any, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, index: int) -> Tensor:
    bare = _bare(dtype, index)
    out: Tensor = by_key(DispatchKey.CPU, _aten.set_.source_Storage_storage_offset, bare, storage, 0, size, stride)
    return out


@cache
def _template(dtype: torch.dtype, index: int) -> Tensor:
    """An empty tensor of that place, which torch lets be made elsewhere than at index 0 by DLPack alone."""
    bare: Tensor = torch.utils.dlpack.from_dlpack(Empty(index))
    return bare.view(dtype)


def _bare(dtype: torch.dtype, index: int) -> Tensor:
    bare: Tensor = by_key(DispatchKey.CPU, _aten.as_strided.default, _template(dtype, index), (0,), (1,), 0)
    return bare


def reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last."""
    if 0 in size:
        return 0
    last = 0
    for length, step in zip(size, stride, strict=True):
        last += (length - 1) * step
    return last + 1


def new(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, index: int) -> Tensor:
    """A tensor in fresh memory, as large as its strides reach."""
    return _over(fresh(reach(size, stride) * dtype.itemsize, index), size, stride, dtype, index)


def fresh(nbytes: int, index: int) -> torch.UntypedStorage:
    """A storage of its own, which the watcher of the moment is told of, and of its end."""
    address = take_address(nbytes)
    storage = _storage(address, nbytes, index)
    if nbytes:
        watcher().allocated(address, nbytes, index)
        # Whoever watches by then counts other storages.
        weakref.finalize(storage, watcher().freed, address, nbytes, index).atexit = False
    return storage
