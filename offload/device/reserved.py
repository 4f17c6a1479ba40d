"""Memory that is reserved in one run, and storages over ranges of it: what an arena (``memory/arena.py``) is made of."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.device.streams import calls_of
from offload.device.virtual import MemoryRun
from offload.pages import mapped, over, round_up
from offload.virtual import ACCELERATOR, NAME, running

__all__ = ["Reserved", "can_reserve", "grain_of", "reserve"]


class Reserved(Protocol):
    """Reserved memory, alive as long as it or a range of it is referred to."""

    def range(self, start: int, whole: int, nbytes: int) -> tuple[Tensor, Any]:
        """uint8 [nbytes] over ``whole`` bytes from ``start``, and the object that dies with its storage."""


def can_reserve(device: torch.device) -> bool:
    """Memory of the device has addresses that torch takes storages at; without streams it may have none."""
    return device.type in ("cpu", NAME) or calls_of(device) is not None


def grain_of(device: torch.device) -> int:
    """What ranges start on: a cache line of a CPU, and what CUDA's own allocator keeps to."""
    return 64 if device.type == "cpu" else 512


def reserve(device: torch.device, nbytes: int) -> Reserved:
    """``nbytes`` of the device's memory, in one run.

    Raises:
        MemoryError, OSError, torch.OutOfMemoryError: there is none.
    """
    if device.type == NAME:
        return _VirtualMemory(nbytes)
    if device.type == "cpu":
        return _HostMemory(nbytes)
    return _CudaMemory(device, nbytes) if device.type == "cuda" else _DeviceMemory(device, nbytes)


class _HostMemory:
    def __init__(self, nbytes: int) -> None:
        self._view = memoryview(mapped(round_up(nbytes))) if nbytes else memoryview(b"")

    def range(self, start: int, whole: int, nbytes: int) -> tuple[Tensor, Any]:
        view = self._view[start : start + whole]
        return over(view, nbytes), view


class _DeviceMemory:
    """From torch's allocator, by what every type of device has: a tensor, and storages at addresses inside it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        with torch.inference_mode(False), torch.no_grad():
            self._whole = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def range(self, start: int, whole: int, nbytes: int) -> tuple[Tensor, Any]:
        construct: Any = torch._C._construct_storage_from_data_pointer
        storage = construct(self._whole.data_ptr() + start, self._device, whole)
        # Such a storage owns nothing: what it lies in stays as long as it does.
        weakref.finalize(storage, _let_go, self._whole).atexit = False
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=torch.uint8, device=self._device)
            return empty.set_(storage, 0, (nbytes,), (1,)), storage


def _let_go(whole: Tensor) -> None:
    """The last use of it."""


class _CudaMemory:
    """From the caching allocator, past torch's storages: whoever counts those counts the ranges and not this too."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._address = device, 0
        if nbytes:
            self._address = int(torch.cuda.caching_allocator_alloc(nbytes, device))

    def range(self, start: int, whole: int, nbytes: int) -> tuple[Tensor, Any]:
        subject = _CudaRange(self, self._address + start, whole)
        with torch.inference_mode(False), torch.no_grad():
            storage = torch.as_tensor(subject, device=self._device).untyped_storage()
            empty = torch.empty(0, dtype=torch.uint8, device=self._device)
            return empty.set_(storage, 0, (nbytes,), (1,)), subject

    def __del__(self) -> None:
        if self._address:
            torch.cuda.caching_allocator_delete(self._address)


class _CudaRange:
    """What torch makes a storage of without a copy: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    __slots__ = ("__cuda_array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: _CudaMemory, address: int, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


class _VirtualMemory:
    """On the virtual device, of the machine that is on."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = MemoryRun(running(), nbytes, ACCELERATOR, ACCELERATOR) if nbytes else None

    def range(self, start: int, whole: int, nbytes: int) -> tuple[Tensor, Any]:
        assert self._mapping is not None
        tensor = self._mapping.tensor(start, nbytes)
        return tensor, tensor.untyped_storage()

    def __del__(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
