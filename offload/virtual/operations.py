"""Operations on tensors of the virtual device: views by the CPU's kernels, what moves data or reads values by kernels of ours
(`KERNELS`), anything else by meta kernels.

``torch_device.py`` registers `run` and the kernels.  The machine that is on is told of each.

Note: [Calls alike]
    What a meta kernel makes follows from the operation, the shapes, strides and dtypes of its tensors, its other arguments and
    the default dtype.  So it runs once for all calls that agree in these.  A tensor of the real host has a value, too, which a
    meta kernel may read: calls that are given one are like no other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._prims_common import suggest_memory_format

from offload.errors import SimulationError
from offload.virtual.memory import NAME, by_key, fresh, machine_on, new, reach
from offload.virtual.refused import no_data, other_autocast, user_line

__all__ = ["COMPOSITES", "KERNELS", "Operation", "forget", "run"]

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that a kernel would carry out.

    Attributes:
        kind: the same object for all calls whose arguments agree in all but their memory; None of one that is like no other.
        overload: torch's name for it.
        args, kwargs: as it was called.
        made: what it returns.
        reads, writes: the virtual tensors it reads and writes; what it makes is among the latter.
    """

    kind: object | None
    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Any
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Signature:
    """What an operation does to its arguments; their names and places, as its schema has them."""

    view: bool
    written: tuple[tuple[int, str], ...]
    returns: int
    tensors: frozenset[int]
    out: frozenset[str]


@cache
def _signature(overload: Any) -> _Signature:
    schema = overload._schema
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    view = not written and any(result.alias_info is not None for result in schema.returns)
    tensors = frozenset(place for place, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor")
    out = frozenset(argument.name for argument in schema.arguments if argument.is_out)
    return _Signature(view, written, len(schema.returns), tensors, out)


def run(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation with a tensor of this device among its arguments, below autograd."""
    signature = _signature(overload)
    if signature.view:
        return by_key(DispatchKey.CPU, overload, *args, **kwargs)
    if torch.is_autocast_enabled("cuda"):
        raise other_autocast(user_line())
    tensors: list[Tensor] = []
    key = _key(overload, args, kwargs, signature.out, tensors)
    kind = _kinds.get(key)
    if kind is None:
        kind = _find_out(overload, args, kwargs)
        if key is not None:
            _kinds[key] = kind
    alike = None if key is None else kind
    device = kwargs.get("device")
    index = (tensors or _tensors([*args, *kwargs.values()]))[0].device.index if device is None else device.index or 0
    if not signature.written:
        made = _made(kind.made, index)
        _tell(Operation(alike, overload, args, kwargs, made, tuple(tensors), tuple(_tensors(made))))
        return made
    written = [args[place] if place < len(args) else kwargs[name] for place, name in signature.written]
    for own, size in zip(written, kind.resized, strict=True):
        if size is not None:
            _resize(own, size)
    _tell(Operation(alike, overload, args, kwargs, None, tuple(tensors), tuple(_tensors(written))))
    assert signature.returns <= len(written) or not signature.returns, f"{overload}: makes and writes"
    return written[0] if signature.returns == 1 else tuple(written[: signature.returns]) or None


def _tell(operation: Operation) -> None:
    machine = machine_on()
    if machine is not None:
        machine.ran(operation)


@dataclass(frozen=True, slots=True)
class _Size:
    """What a tensor is like that a meta kernel made."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """What calls alike come to: see Note [Calls alike].

    Attributes:
        made: what is returned, each tensor as its `_Size`.
        resized: the new size of each argument that is written, where that is not its own.
    """

    made: Any
    resized: tuple[_Size | None, ...]


_kinds: dict[Any, _Kind] = {}


def forget() -> None:
    """Nothing is known of calls from now on."""
    _kinds.clear()


def _key(
    overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: frozenset[str], tensors: list[Tensor]
) -> Any:
    """What calls alike have in common, or None where more counts than that; tensors of this device that are read are noted."""
    facts: list[Any] = [overload, torch.get_default_dtype()]
    known = _note(args, facts, tensors)
    for name, value in kwargs.items():
        facts.append(name)
        known &= _note((value,), facts, [] if name in out else tensors)
    return tuple(facts) if known else None


def _note(values: Iterable[Any], facts: list[Any], tensors: list[Tensor]) -> bool:
    known = True
    for value in values:
        if isinstance(value, Tensor):
            facts += (Tensor, value.shape, value.stride(), value.dtype)
            if value.device.type == NAME:
                tensors.append(value)
            else:
                known = False
        elif isinstance(value, list | tuple):
            facts += (list, len(value))
            known &= _note(value, facts, tensors)
        else:
            # 1, 1.0 and True are one key, and make tensors of other dtypes.
            facts += (type(value), value)
    return known


def _find_out(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Kind:
    _check_places(overload, args, kwargs)
    signature = _signature(overload)
    # Numbers that the dispatcher has unwrapped as what the operation takes: not all of them take numbers.
    twins = [
        torch.tensor(value, device="meta") if place in signature.tensors and isinstance(value, int | float) else _twin(value)
        for place, value in enumerate(args)
    ]
    named = {name: _twin(value) for name, value in kwargs.items()}
    if named.get("device") is not None:
        named["device"] = torch.device("meta")
    try:
        found = _SHAPES.get(overload, overload)(*twins, **named)
    except NotImplementedError as error:
        raise no_data(str(overload)) from error
    except RuntimeError as error:
        # "cannot repeat_interleave a meta tensor without output_size": torch's shape functions ask for values, too.
        if "meta tensor" in str(error):
            raise no_data(str(overload)) from error
        raise
    if overload is _aten.mkldnn_rnn_layer.default:
        # Its meta kernel does not know what is kept for backward.
        size = _layer_workspace(tuple(args[0].shape), tuple(args[1].shape), args[-1])
        found = (*found[:3], torch.empty(size, dtype=torch.uint8, device="meta"))
    resized: list[_Size | None] = []
    for place, name in signature.written:
        own, twin = (args[place], twins[place]) if place < len(args) else (kwargs[name], named[name])
        changed = isinstance(own, Tensor) and twin.shape != own.shape
        resized.append(_size(twin) if changed else None)
    return _Kind(_size(found), tuple(resized))


def _check_places(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """As CUDA has it: beside numbers, what lies on the CPU is refused, but for indices."""
    indexed = overload.overloadpacket in _INDEXED
    for tensor in _tensors((*args[:1], *args[2:], *kwargs.values()) if indexed else (*args, *kwargs.values())):
        if tensor.device.type != NAME and tensor.dim():
            raise SimulationError(
                f'{overload}{user_line()} expected all tensors on device "{NAME}", found one of shape {tuple(tensor.shape)} '
                f"on {tensor.device}. Move it first: tensor.to(x.device)."
            )


def _gru_cell(input_gates: Tensor, hidden_gates: Tensor, state: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor]:
    """What CUDA's kernel makes: the next state, and five gates for backward."""
    return torch.empty_like(state), state.new_empty(state.shape[0], 5 * state.shape[1])


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    gates, state = workspace.shape[1] // 5 * 3, workspace.shape[1] // 5
    inputs, hidden = (workspace.new_empty(workspace.shape[0], gates) for _ in range(2))
    biases = (workspace.new_empty(gates), workspace.new_empty(gates)) if has_bias else (None, None)
    return (inputs, hidden, workspace.new_empty(workspace.shape[0], state), *biases)


def _grouped_mm(first: Tensor, second: Tensor, offs: Tensor, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """torch's shape function knows bf16 alone; CUDA's kernel takes other dtypes, too."""
    overload = _aten._grouped_mm.default
    made: Tensor = overload(first.bfloat16(), second.bfloat16(), offs, bias)
    return made.to(out_dtype or first.dtype)


def _format(*tensors: Tensor) -> torch.memory_format:
    """Channels last where one of these lies so, as convolutions of oneDNN and of cuDNN take it."""
    formats = [suggest_memory_format(tensor) for tensor in tensors]
    return next((each for each in formats if each is not torch.contiguous_format), torch.contiguous_format)


def _convolution(value: Tensor, weight: Tensor, *others: Any) -> Tensor:
    made: Tensor = _aten.convolution.default(value, weight, *others)
    return made.contiguous(memory_format=_format(value, weight))


def _convolution_backward(grad: Tensor, value: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    layout = _format(value, weight)
    made: tuple[Tensor | None, ...] = _aten.convolution_backward.default(grad, value, weight, *others)
    of_value, of_weight = (None if each is None else each.contiguous(memory_format=layout) for each in made[:2])
    return (of_value, of_weight, *made[2:])


@cache
def _layer_workspace(shape: tuple[int, ...], weight: tuple[int, ...], train: bool) -> int:
    """Bytes that oneDNN keeps of a layer for its backward: its own affair, so one layer of that shape runs for real."""
    gates = weight[0]
    hidden = gates // 4
    x, own, back, bias, state = (
        torch.zeros(size, dtype=torch.float32, device="cpu")
        for size in (shape, weight, (gates, hidden), (gates,), (1, shape[1], hidden))
    )
    made = torch.ops.aten.mkldnn_rnn_layer(
        x, own, back, bias, bias, state, state, False, [], 2, hidden, 1, True, False, False, train
    )
    return int(made[3].nbytes)


_INDEXED = frozenset({_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_})
#: Shape functions that torch lacks, or that forget how results lie.
_SHAPES: dict[Any, Callable[..., Any]] = {
    _aten._grouped_mm.default: _grouped_mm,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten._thnn_fused_gru_cell.default: _gru_cell,
    _aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}


def _twin(value: Any) -> Any:
    """The same on meta.  A number of the host stays what it is."""
    if isinstance(value, Tensor):
        if value.device.type != NAME and value.dim() == 0:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_twin(each) for each in value)
    return value


def _size(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Size(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return type(value)(_size(each) for each in value)
    return value


def _made(value: Any, index: int) -> Any:
    if isinstance(value, _Size):
        return new(value.size, value.stride, value.dtype, index)
    if isinstance(value, list | tuple):
        return type(value)(_made(each, index) for each in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def _resize(own: Tensor, to: _Size) -> None:
    """An argument that takes the shape of the result, in the memory that it has where that is enough."""
    storage, offset = own.untyped_storage(), own.storage_offset()
    nbytes = (int(offset) + reach(to.size, to.stride)) * to.dtype.itemsize
    if storage.nbytes() < nbytes:
        storage = fresh(nbytes, own.device.index)
    by_key(DispatchKey.CPU, _aten.set_.source_Storage_storage_offset, own, storage, offset, to.size, to.stride)


# --- kernels of our own -------------------------------------------------------------------------------------------------


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
    machine = machine_on()
    if machine is not None:
        machine.copied(out, source, waits=not non_blocking)
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


def _record_stream(tensor: Tensor, stream: Any) -> None:
    return None


def _convolution_backward_overrideable(
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
    "_grouped_mm": partial(run, _aten._grouped_mm.default),
    "alias": _alias,
    "binary_cross_entropy": _binary_cross_entropy,
    "convolution_overrideable": partial(run, _aten.convolution.default),
    "convolution_backward_overrideable": _convolution_backward_overrideable,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "set_.source_Storage_storage_offset": _set_storage,
    "_copy_from": _copy_from,
    "_local_scalar_dense": _item,
    "record_stream": _record_stream,
}
