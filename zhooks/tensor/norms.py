"""Norms of sharded tensors: lazy, so that they are combined over the ranks once, however many tensors there are.

``aten.py`` calls ``norm`` and ``foreach_norm``; what they return makes ``torch.nn.utils.clip_grad_norm_`` one all-reduce and
not one a parameter.  It never keeps a value that was combined from changing: anything but stacking combines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from zhooks.comm import norms_of_runs
from zhooks.layout import PP, SHARD, TP
from zhooks.tensor.elementwise import refuse
from zhooks.tensor.group import ShardGroup
from zhooks.tensor.range_tensor import ParamShard, RangeTensor

aten = torch.ops.aten


def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The norm of one tensor, not combined over the ranks yet where they share it."""
    name = func._schema.name.split("::")[1]
    ord = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    tensor = args[0]
    if not isinstance(ord, (int, float)) and ord is not None:
        ord = 2
    if dim not in (None, [], ()):
        refused: Tensor = refuse(func, tensor)
        return refused
    dtype = kwargs.get("dtype") or tensor.dtype
    order = 2.0 if ord is None else float(ord)
    local, group = tensor._local.to(tensor._on), tensor._spec.group  # as in `total`
    if not (group.sharded or group.spans(TP) or group.spans(PP)):
        plain: Tensor = func(local, *args[1:], **kwargs) if name == "norm" else aten.linalg_vector_norm(local, order)
        return plain.to(dtype)
    return partial_norm(local, order, tensor._spec, dtype, tensor._on)


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The same of a list."""
    ord = float(args[1]) if len(args) > 1 else float(kwargs.get("ord", 2))
    out: list[Tensor] = []
    for tensor in args[0]:
        if isinstance(tensor, RangeTensor):
            out.append(norm(aten.linalg_vector_norm.default, (tensor, ord), {}))
        else:
            out.append(torch.linalg.vector_norm(tensor, ord))
    return out


class PartialNorm(torch.Tensor):
    """A scalar, or a vector of them: |x|^p summed (or maximised) over this rank's ranges, still to be combined.

    What all ranks of the tp axis hold alike counts on the first of them, so that every element is summed over both axes.
    """

    _powers: Tensor
    _ord: float
    _group: ShardGroup

    @staticmethod
    def __new__(cls, powers: Tensor, ord: float, group: ShardGroup, dtype: torch.dtype) -> PartialNorm:
        made = torch.Tensor._make_wrapper_subclass(cls, powers.shape, dtype=dtype, device=powers.device)
        norm: PartialNorm = made
        norm._powers, norm._ord, norm._group = powers, ord, group
        return norm

    def over_ranks(self, axes: tuple[str, ...] = (SHARD, TP)) -> Tensor:
        """The norms themselves, the same on every rank of these axes.  Collective."""
        powers = self._powers.clone()
        self._group.all_reduce(powers, _combination(self._ord), axes)
        return _root(powers, self._ord).to(self.dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"PartialNorm(shape={tuple(self.shape)}, ord={self._ord}): not combined over the ranks yet"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.stack.default:
            return _stack(args[0])
        if func is aten.detach.default or func is aten.alias.default:
            norm = args[0]
            return PartialNorm(norm._powers, norm._ord, norm._group, norm.dtype)
        if func is aten.linalg_vector_norm.default and _total(args, kwargs):
            norm = args[0]
            combined = PartialNorm(_combine(norm._powers, norm._ord), norm._ord, norm._group, norm.dtype)
            # Of a stack, the whole model's; other stages have stacks of their own.
            return combined.over_ranks((SHARD, TP, PP) if norm.dim() else (SHARD, TP))
        plain = tree_map(lambda value: value.over_ranks() if isinstance(value, PartialNorm) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def partial_norm(local: Tensor, ord: float, spec: ParamShard, dtype: torch.dtype, device: torch.device) -> PartialNorm:
    """The norm of ``local`` as this rank's part of the whole, on ``device``; an empty range counts for nothing."""
    group = spec.group
    half = local.dtype in (torch.float16, torch.bfloat16)
    again = spec.place is None and not group.first(TP) and _combination(ord) == "sum"
    if local.numel() == 0 or again:
        empty = math.inf if ord == -math.inf else 0.0
        nothing = torch.full((), empty, dtype=torch.float32 if half else local.dtype, device=device)
        return PartialNorm(nothing, ord, group, dtype)
    # 16 bits are summed in fp32, whose copy of the values is a buffer like others: bounded.
    norms = norms_of_runs(local, ord, group.buffer_nbytes) if half else [torch.linalg.vector_norm(local, ord)]
    power = _power(norms[0], ord) if len(norms) == 1 else _combine(_power(torch.stack(norms), ord), ord)
    return PartialNorm(power.to(device), ord, group, dtype)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    lead = next(part for part in parts if isinstance(part, PartialNorm))
    alike = all(
        not isinstance(part, PartialNorm) or (part._ord == lead._ord and part._group.sharded == lead._group.sharded)
        for part in parts
    )
    if not alike:
        return torch.stack([part.over_ranks() if isinstance(part, PartialNorm) else part for part in parts])
    powers = [part._powers if isinstance(part, PartialNorm) else _known(part, lead) for part in parts]
    return PartialNorm(torch.stack([power.to(lead._powers.dtype) for power in powers]), lead._ord, lead._group, lead.dtype)


def _known(norm: Tensor, lead: PartialNorm) -> Tensor:
    """The norm of a tensor every rank of a stage holds whole: only the first rank adds it to a sum."""
    power = _power(norm, lead._ord)
    if _combination(lead._ord) == "sum" and not (lead._group.first(SHARD) and lead._group.first(TP)):
        return torch.zeros_like(power)
    return power


def _total(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    ord = args[1] if len(args) > 1 else (kwargs or {}).get("ord", 2)
    dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim")
    return isinstance(args[0], PartialNorm) and ord == args[0]._ord and dim is None


def _combination(ord: float) -> str:
    return {math.inf: "max", -math.inf: "min"}.get(ord, "sum")


def _combine(powers: Tensor, ord: float) -> Tensor:
    reduce: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
    return reduce[_combination(ord)](powers)


def _power(norm: Tensor, ord: float) -> Tensor:
    return norm if math.isinf(ord) or ord in (0, 1) else norm.square() if ord == 2 else norm.pow(ord)


def _root(powers: Tensor, ord: float) -> Tensor:
    return powers if math.isinf(ord) or ord in (0, 1) else powers.sqrt() if ord == 2 else powers.pow(1.0 / ord)
