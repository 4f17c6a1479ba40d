"""What an operation of torch's does, as numbers: its name, its FLOPs, the bytes it reads and writes.

The simulator counts what a step calls by these, ``zprof bench`` what it measures, a recording what a run computes.  FLOPs
are torch's own formulas (``torch.utils.flop_counter``), and those below where torch has none; it knows no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["again", "counts", "flops", "moved", "name_of"]

_aten: Any = torch.ops.aten
#: They read rows of a table, and not all of it.
_ROWS = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather})


def name_of(overload: Any) -> str:
    """Torch's name of an operation, in place or not."""
    name: str = getattr(overload, "overloadpacket", overload).__name__
    return name.rstrip("_")


def flops(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> int:
    """Floating-point operations of its products and convolutions; 0 of what has none."""
    packet = getattr(overload, "overloadpacket", overload)
    own = _FORMULAS.get(packet)
    if own is not None:
        return int(own(*args))
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    named = {name: value for name, value in kwargs.items() if name != "out"}
    return int(formula(*args, **named, out_val=made))


def counts(overload: Any) -> bool:
    """Whether `flops` has a formula for the operation."""
    packet = getattr(overload, "overloadpacket", overload)
    return packet in _FORMULAS or packet in flop_registry


def again(overload: Any, args: tuple[Any, ...], count: int) -> int:
    """Those of an operation's ``count`` FLOPs that compute what was computed before: fused attention does not keep its scores,
    and its backward makes them anew, one of its five products.
    """
    if not name_of(overload).endswith(_ATTENTION_BACKWARD) or len(args) < 4:
        return 0
    query, value = int(args[1].shape[-1]), int(args[3].shape[-1])
    return count * query // (3 * query + 2 * value)


def moved(overload: Any, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> int:
    """Bytes read and written, each tensor once: of one that is expanded those that are there."""
    written = sum(tensor.nbytes for tensor in writes)
    read = sum(_reach(tensor) for tensor in reads)
    return written + (min(read, 2 * written) if overload.overloadpacket in _ROWS else read)


def _reach(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    span = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return min(tensor.numel(), span) * tensor.dtype.itemsize


def _vector(matrix: Tensor, *_: Any) -> int:
    return 2 * matrix.numel()


def _added_vector(added: Tensor, matrix: Tensor, *_: Any) -> int:
    return 2 * matrix.numel()


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    count: int = sdpa_flop_count(query.shape, key.shape, value.shape)
    return count


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    count: int = sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    return count


def _recurrent(x: Tensor, *weights: Any) -> int:
    """Products of a layer's input and of its state with the matrices of all gates, for each row of each step."""
    matrices = [each for each in weights[:2] if isinstance(each, Tensor)]
    return 2 * x.shape[0] * x.shape[1] * sum(each.numel() for each in matrices)


def _recurrent_backward(*args: Any) -> int:
    return 2 * _recurrent(*args)


def _grouped(first: Tensor, second: Tensor, *_: Any) -> int:
    """Each row, or column, meets the matrix of one group."""
    rows = second.dim() == 2 < first.dim()
    return 2 * (second.numel() * first.shape[-2] if rows else first.numel() * second.shape[-1])


_ATTENTION_BACKWARD = ("attention_backward", "attention_for_cpu_backward")
_FORMULAS: dict[Any, Any] = {
    _aten.mv: _vector,
    _aten.dot: _vector,
    _aten.addmv: _added_vector,
    _aten._grouped_mm: _grouped,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}
