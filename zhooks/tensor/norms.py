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

from offload.errors import ShardedOpError
from zhooks.comm import norms_of_runs
from zhooks.layout import PP, SHARD, TP
from zhooks.tensor.elementwise import whole
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
        of_rows: Tensor = whole(func, args, kwargs)
        return of_rows
    tensor.check_numbers()
    dtype = kwargs.get("dtype") or (tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype)
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

    Attributes:
        _terms: tensors of its shape, one for each set of ranks, which combines it; elements of others count for nothing.
        _plain: norms of plain tensors among them, which only these ranks' own code can have made alike.
    """

    _terms: tuple[tuple[ShardGroup, Tensor], ...]
    _plain: tuple[Tensor, ...]
    _ord: float

    @staticmethod
    def __new__(
        cls, terms: Sequence[tuple[ShardGroup, Tensor]], ord: float, dtype: torch.dtype, plain: Sequence[Tensor] = ()
    ) -> PartialNorm:
        shape, device = terms[0][1].shape, terms[0][1].device
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        norm: PartialNorm = made
        norm._terms, norm._plain, norm._ord = tuple(terms), tuple(plain), ord
        return norm

    def over_ranks(self, axes: tuple[str, ...] = (SHARD, TP)) -> Tensor:
        """The norms themselves, the same on every rank of these axes.  Collective.

        Raises:
            ShardedOpError: ranks have other plain tensors among them.
        """
        self._check_plain()
        summed: Tensor | None = None
        for group, powers in self._terms:
            own = powers.clone()
            group.all_reduce(own, _combination(self._ord), axes)
            summed = own if summed is None else _combine(torch.stack([summed, own]), self._ord, dim=0)
        assert summed is not None
        return _root(summed, self._ord).to(self.dtype)

    def _check_plain(self) -> None:
        if not self._plain:
            return
        mine = torch.stack([norm.to(torch.float64) for norm in self._plain])
        both = torch.cat([mine, -mine])
        self._terms[0][0].all_reduce(both, "max", (SHARD, TP))
        most, least = both.chunk(2)
        if not torch.equal(most.nan_to_num(), (-least).nan_to_num()):
            raise ShardedOpError(
                "norm over gradients of attached and other parameters: expected the others to be the same on every rank, found "
                f"norms of {_few(mine)} here and up to {_few(most)} elsewhere: what is not attached ([units] ignore) is not "
                "reduced. Reduce them before you clip (torch.distributed.all_reduce), or clip them separately."
            )

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
            return PartialNorm(norm._terms, norm._ord, norm.dtype, norm._plain)
        if func is aten.linalg_vector_norm.default and _total(args, kwargs):
            norm = args[0]
            terms = [(group, _combine(powers, norm._ord)) for group, powers in norm._terms]
            # Of a stack, the whole model's; other stages have stacks of their own.
            axes = (SHARD, TP, PP) if norm.dim() else (SHARD, TP)
            terms = _with_absent(terms, norm._ord) if norm.dim() else terms
            return PartialNorm(terms, norm._ord, norm.dtype, norm._plain).over_ranks(axes)
        plain = tree_map(lambda value: value.over_ranks() if isinstance(value, PartialNorm) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def partial_norm(local: Tensor, ord: float, spec: ParamShard, dtype: torch.dtype, device: torch.device) -> PartialNorm:
    """The norm of ``local`` as this rank's part of the whole, on ``device``; an empty range counts for nothing."""
    group = spec.group
    half = local.dtype in (torch.float16, torch.bfloat16)
    again = spec.place is None and not group.first(TP) and _combination(ord) == "sum"
    if local.numel() == 0 or again:
        kind = torch.float32 if half else local.dtype.to_real() if local.dtype.is_complex else local.dtype
        nothing = torch.full((), _nothing(ord), dtype=kind, device=device)
        return PartialNorm([(group, nothing)], ord, dtype)
    # 16 bits are summed in fp32, whose copy of the values is a buffer like others: bounded.
    norms = norms_of_runs(local, ord, group.buffer_nbytes) if half else [torch.linalg.vector_norm(local, ord)]
    power = _power(norms[0], ord) if len(norms) == 1 else _combine(_power(torch.stack(norms), ord), ord)
    return PartialNorm([(group, power.to(device))], ord, dtype)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Norms one by one; those that the same ranks combine as one term."""
    partial = [part for part in parts if isinstance(part, PartialNorm)]
    lead = partial[0]
    if any(part._ord != lead._ord or len(part._terms) > 1 or part._plain for part in partial):
        return torch.stack([part.over_ranks() if isinstance(part, PartialNorm) else part for part in parts])
    groups: dict[Any, ShardGroup] = {}
    for one in partial:
        groups.setdefault(one._terms[0][0].ranks(), one._terms[0][0])
    first, dtype, device = next(iter(groups)), lead._terms[0][1].dtype, lead.device
    nothing = torch.full((), _nothing(lead._ord), dtype=dtype, device=device)
    terms = []
    for key, group in groups.items():
        powers: list[Tensor] = []
        for part in parts:
            where = part._terms[0][0].ranks() if isinstance(part, PartialNorm) else first
            value = part._terms[0][1] if isinstance(part, PartialNorm) else _known(part, lead)
            powers.append(value.to(dtype) if where == key else nothing)
        terms.append((group, torch.stack(powers)))
    whole = [part for part in parts if type(part) is not PartialNorm]
    return PartialNorm(terms, lead._ord, lead.dtype, whole)


def _with_absent(terms: list[tuple[ShardGroup, Tensor]], ord: float) -> list[tuple[ShardGroup, Tensor]]:
    """Terms in one order on all ranks, with those of experts that got no gradient here and may have elsewhere."""
    watch = terms[0][0].watch
    apart = {group.ranks(): group for group in (() if watch is None else watch.apart())}
    here = {group.ranks(): powers for group, powers in terms}
    nothing = torch.full_like(terms[0][1], _nothing(ord))
    others = [(group, powers) for group, powers in terms if group.ranks() not in apart]
    return [*others, *((group, here.get(key, nothing)) for key, group in apart.items())]


def _known(norm: Tensor, lead: PartialNorm) -> Tensor:
    """The norm of a tensor every rank of a stage holds whole: only the first rank adds it to a sum."""
    power, group = _power(norm, lead._ord), lead._terms[0][0]
    if _combination(lead._ord) == "sum" and not (group.first(SHARD) and group.first(TP)):
        return torch.zeros_like(power)
    return power


def _few(values: Tensor) -> str:
    return ", ".join(f"{value:.6g}" for value in values[:3].tolist())


def _nothing(ord: float) -> float:
    return math.inf if ord == -math.inf else 0.0


def _total(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    ord = args[1] if len(args) > 1 else (kwargs or {}).get("ord", 2)
    dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim")
    # Of order 0, torch's norm of norms counts those that are not zero, not the elements behind them.
    return isinstance(args[0], PartialNorm) and ord == args[0]._ord and ord != 0 and dim is None


def _combination(ord: float) -> str:
    return {math.inf: "max", -math.inf: "min"}.get(ord, "sum")


def _combine(powers: Tensor, ord: float, dim: int | None = None) -> Tensor:
    reduce: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
    return reduce[_combination(ord)](powers) if dim is None else reduce[_combination(ord)](powers, dim=dim)


def _power(norm: Tensor, ord: float) -> Tensor:
    return norm if math.isinf(ord) or ord in (0, 1) else norm.square() if ord == 2 else norm.pow(ord)


def _root(powers: Tensor, ord: float) -> Tensor:
    return powers if math.isinf(ord) or ord in (0, 1) else powers.sqrt() if ord == 2 else powers.pow(1.0 / ord)
