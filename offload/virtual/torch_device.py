"""The device "virtual" as torch knows it: real tensors with shapes, strides, storages and addresses, and no data.

``register`` tells torch of it, once a process, by torch's own Python way in for new backends; from then on each operation on
such tensors comes here, finds out by its meta kernel what it makes, and is handed to the `Watcher` of the moment.  It keeps no
clock and no ledger: those are the watcher's.

Note: [Shapes without data]
    A tensor on this device is a plain ``torch.Tensor`` over a storage whose address nobody can read.  Views are made by the
    CPU's kernels, which touch numbers alone; anything else runs on twins of its arguments on meta, and its results get
    storages of their own.  So autograd, modules, optimizers and all code of ours take the ways they take on a GPU.  What asks
    for a value (``item()``, ``cpu()``, a mask's indices) cannot be answered, and is refused with the line that asked.

Note: [Two places]
    Index 0 is the accelerator's memory, index 1 page-locked memory of its host: what is computed there is the host's work.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.utils.dlpack
from torch import Tensor
from torch._C import DispatchKey

from offload.errors import CapabilityError, SimulationError
from offload.pages import ALIGN
from offload.virtual.dlpack import Empty

__all__ = ["ACCELERATOR", "HOST", "NAME", "Operation", "Watcher", "memory_at", "register", "take_address", "watch"]

NAME = "virtual"
#: Indices, see Note [Two places].
ACCELERATOR, HOST = 0, 1
#: Storages begin on multiples of this, as those of CUDA's caching allocator do.
_GRAIN = 512
_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that a kernel would carry out.

    Attributes:
        overload: torch's name for it.
        args, kwargs: as it was called.
        made: what it returns.
        reads, writes: the virtual tensors it reads and writes; what it makes is among the latter.
    """

    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Any
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]


class Watcher(Protocol):
    """Who is told what happens on the device."""

    def ran(self, operation: Operation) -> None:
        """An operation was issued by this thread."""

    def copied(self, out: Tensor, source: Tensor, *, waits: bool) -> None:
        """A copy was, between or within the two memories; a ``source`` of the real host is the user's data.

        ``waits``: one between memories is over when the call returns.
        """

    def allocated(self, address: int, nbytes: int, index: int) -> None:
        """Memory was taken for a new storage."""

    def freed(self, address: int, nbytes: int, index: int) -> None:
        """The storage there has died; any thread, also inside other calls."""


class _Nobody:
    def ran(self, operation: Operation) -> None: ...
    def copied(self, out: Tensor, source: Tensor, *, waits: bool) -> None: ...
    def allocated(self, address: int, nbytes: int, index: int) -> None: ...
    def freed(self, address: int, nbytes: int, index: int) -> None: ...


NOBODY = _Nobody()
_watcher: Watcher = NOBODY


def watch(watcher: Watcher | None) -> None:
    """Tell ``watcher`` from now on; None is nobody."""
    global _watcher
    _watcher = NOBODY if watcher is None else watcher


# Memory.

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
    out: Tensor = _aten.set_.source_Storage_storage_offset._op_dk(DispatchKey.CPU, bare, storage, 0, size, stride)
    return out


@cache
def _template(dtype: torch.dtype, index: int) -> Tensor:
    """An empty tensor of that place, which torch lets be made elsewhere than at index 0 by DLPack alone."""
    bare: Tensor = torch.utils.dlpack.from_dlpack(Empty(index))
    return bare.view(dtype)


def _bare(dtype: torch.dtype, index: int) -> Tensor:
    bare: Tensor = _aten.as_strided.default._op_dk(DispatchKey.CPU, _template(dtype, index), (0,), (1,), 0)
    return bare


def _new(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, index: int) -> Tensor:
    """A tensor in fresh memory, as large as its strides reach."""
    reach = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return _over(_fresh(reach * dtype.itemsize, index), size, stride, dtype, index)


def _fresh(nbytes: int, index: int) -> torch.UntypedStorage:
    address = take_address(nbytes)
    storage = _storage(address, nbytes, index)
    if nbytes:
        _watcher.allocated(address, nbytes, index)
        # Whoever watches by then counts other storages.
        weakref.finalize(storage, _watcher.freed, address, nbytes, index).atexit = False
    return storage


# Operations.


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


def _run(overload: Any, *args: Any, **kwargs: Any) -> Any:
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
        _watcher.ran(Operation(overload, args, kwargs, made, tuple(tensors), tuple(_tensors(made))))
        return made
    written: list[Any] = []
    for place, name in signature.written:
        own, twin = (args[place], twins[place]) if place < len(args) else (kwargs[name], named[name])
        if isinstance(own, Tensor) and twin.shape != own.shape:
            _resize(own, twin)
        written.append(own)
    changed = tuple(_tensors(written))
    _watcher.ran(Operation(overload, args, kwargs, None, tuple(tensors), changed))
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
        return _new(value.shape, value.stride(), value.dtype, index)
    if isinstance(value, list | tuple):
        return type(value)(_made(each, index) for each in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def _resize(own: Tensor, twin: Tensor) -> None:
    """An ``out`` argument that takes the shape of the result."""
    storage = _fresh(twin.untyped_storage().nbytes(), own.device.index)
    _aten.set_.source_Storage_storage_offset._op_dk(DispatchKey.CPU, own, storage, 0, twin.shape, twin.stride())


# What has no tensor to go by, and what moves data.


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
    return _new(twin.shape, twin.stride(), twin.dtype, (device.index or 0) if device is not None else 0)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    return _new(size, stride, dtype or torch.get_default_dtype(), (device.index or 0) if device is not None else 0)


def _set_storage(self: Tensor, source: Any, storage_offset: int, size: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    out: Tensor = _aten.set_.source_Storage_storage_offset._op_dk(
        DispatchKey.CPU, self, source, storage_offset, size, stride
    )
    return out


def _alias(tensor: Tensor) -> Tensor:
    size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    out: Tensor = _aten.as_strided.default._op_dk(DispatchKey.CPU, tensor, size, stride, offset)
    return out


def _copy_from(source: Tensor, out: Tensor, non_blocking: bool = False) -> Tensor:
    if out.device.type != NAME:
        raise no_data(f"a copy to {out.device}")
    _watcher.copied(out, source, waits=not non_blocking)
    return out


def _item(tensor: Tensor) -> Any:
    raise no_data("item()")


def _record_stream(tensor: Tensor, stream: Any) -> None:
    return None


def no_data(what: str) -> SimulationError:
    """The error of code that asks for a value, with the line of the user's that did."""
    where = _line()
    return SimulationError(
        f"{what}{where}: expected code that needs no values, for tensors of the virtual device have shapes and no data; found "
        "one that reads them. Log losses outside of what is simulated, and pass sizes, masks and lengths as Python numbers "
        "or as tensors on the CPU."
    )


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "zhooks"))


def _line() -> str:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


# Registration.


class _Backend:
    """What ``torch.virtual`` is."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return ACCELERATOR

    @staticmethod
    def device_count() -> int:
        return 2

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        return None

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_kept: list[Any] = []


def register() -> None:
    """Tell torch of the device; once a process, and for the rest of it.

    Raises:
        CapabilityError: this torch has no way in for devices written in Python, or another one is registered.
    """
    if _kept:
        return
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup
    except ImportError as error:
        raise CapabilityError(
            f"the virtual device: expected a torch that takes devices written in Python (2.10 and later), found "
            f"{torch.__version__}. Install a newer torch."
        ) from error
    known = torch._C._get_privateuse1_backend_name()
    if known not in ("privateuseone", NAME):
        raise CapabilityError(
            f'the virtual device: expected that no other backend of its kind is loaded, found "{known}". Simulate in a process '
            "that does not import it."
        )
    setup(rename=NAME, backend_module=_Backend())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_run, "PrivateUse1")
    with warnings.catch_warnings():
        # That a kernel takes the place of torch's own for this device is what is wanted.
        warnings.filterwarnings("ignore", message=".*[Oo]verrid", category=UserWarning)
        for name, kernel in _KERNELS.items():
            aten.impl(name, kernel, "PrivateUse1")
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            aten.impl("scaled_dot_product_attention", _attention, key)
    _kept.extend((every, aten))


def _convolution(*arguments: Any) -> Any:
    return _run(_aten.convolution.default, *arguments)


def _convolution_backward(
    grad: Tensor, value: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool, output: Any,
    groups: int, mask: Any,
) -> Any:  # fmt: skip
    bias = [grad.shape[1]]
    arguments = (grad, value, weight, bias, stride, padding, dilation, transposed, output, groups, mask)
    return _run(_aten.convolution_backward.default, *arguments)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The kernel that CUDA's choice would most likely fall on; its memory is that of the fused ones."""
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    fits = query.dim() == 4 and query.shape[-1] == value.shape[-1]
    if fits and attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        flash: Tensor = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return flash
    if fits and (attn_mask is None or not attn_mask.requires_grad):
        bias = attn_mask
        if bias is not None:
            bias = torch.zeros_like(bias, dtype=query.dtype) if bias.dtype is torch.bool else bias
            bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        needs = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        efficient: Tensor = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs, dropout_p, is_causal, scale=scale
        )[0]
        return efficient
    plain: Tensor = _aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    return plain


_KERNELS: dict[str, Callable[..., Any]] = {
    "alias": _alias,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "set_.source_Storage_storage_offset": _set_storage,
    "_copy_from": _copy_from,
    "_local_scalar_dense": _item,
    "record_stream": _record_stream,
}
