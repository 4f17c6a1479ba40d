"""Where tensors of the virtual device lie: addresses that nothing else has, storages without data, new tensors over them; and
the machine that is told of all that happens there.

An empty tensor at any index of the device comes by DLPack, the one public way to say where memory lies.  Source:
https://dmlc.github.io/dlpack/latest/c_api.html.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack
from torch import Tensor
from torch._C import DispatchKey

from offload.errors import SimulationError
from offload.pages import ALIGN

if TYPE_CHECKING:
    from offload.virtual.machine import Machine

__all__ = [
    "ACCELERATOR", "HOST", "NAME", "by_key", "fresh", "machine_on", "memory_at", "new", "reach", "running", "take_address",
    "turn_to",
]  # fmt: skip

NAME = "virtual"
#: Indices, see Note [Two places].
ACCELERATOR, HOST = 0, 1
#: Storages begin on multiples of this, as those of CUDA's caching allocator do.
_GRAIN = 512
_aten: Any = torch.ops.aten

_machine: Machine | None = None


def turn_to(machine: Machine | None) -> None:
    """Everything on the virtual device happens on ``machine`` from now on."""
    global _machine
    _machine = machine


def machine_on() -> Machine | None:
    """The machine that is on, if any."""
    return _machine


def running() -> Machine:
    """The machine that is on.

    Raises:
        SimulationError: none is: a model on the virtual device is attached outside of a simulation.
    """
    if _machine is None:
        raise SimulationError(
            'device "virtual" needs to be used inside a simulation, found none. Call zhooks.simulate(build, step, ...).'
        )
    return _machine


def by_key(key: DispatchKey, overload: Any, *args: Any, **kwargs: Any) -> Any:
    """What the kernel of an operation for one dispatch key returns, whatever modes of Python surround the call."""
    # Inside a mode of torch functions (``with torch.device(...)`` is one) torch asks the mode, which knows no key.
    with torch._C.DisableTorchFunction():
        return overload._op_dk(key, *args, **kwargs)


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
    bare = by_key(DispatchKey.CPU, _aten.as_strided.default, _template(dtype, index), (0,), (1,), 0)
    out: Tensor = by_key(DispatchKey.CPU, _aten.set_.source_Storage_storage_offset, bare, storage, 0, size, stride)
    return out


@cache
def _template(dtype: torch.dtype, index: int) -> Tensor:
    """An empty tensor of that place, which torch lets be made elsewhere than at index 0 by DLPack alone."""
    bare: Tensor = torch.utils.dlpack.from_dlpack(_Empty(index))
    return bare.view(dtype)


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
    """A storage of its own, which the machine that is on is told of, and of its end."""
    address = take_address(nbytes)
    storage = _storage(address, nbytes, index)
    if nbytes and _machine is not None:
        _machine.allocated(address, nbytes, index)
        # The machine that is on by then counts other storages.
        weakref.finalize(storage, _machine.freed, address, nbytes, index).atexit = False
    return storage


_EXTENSION = 12
_UINT, _BITS = 1, 8


class _Managed(ctypes.Structure):
    """DLManagedTensor, its inner structures laid out flat."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
#: Whoever consumed a capsule refers to it as long as its tensor lives, here for ever.
_consumed: list[Any] = []


class _Empty:
    """uint8 [0] at an index of torch's extension device."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __dlpack_device__(self) -> tuple[int, int]:
        return _EXTENSION, self._index

    def __dlpack__(self, **_: Any) -> Any:
        shape, strides = (ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(1)
        pointer = ctypes.POINTER(ctypes.c_int64)
        managed = _Managed(None, _EXTENSION, self._index, 1, _UINT, _BITS, 1, ctypes.cast(shape, pointer))
        managed.strides, managed.deleter = ctypes.cast(strides, pointer), type(managed.deleter)(_nothing)
        _consumed.append((managed, shape, strides))
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)


def _nothing(_: Any) -> None:
    return None
