"""Lazy partial norms: the norm of a range, settled over the ranks once, however many tensors are combined first.

``sharded_ops.py`` returns these for the norm of a sharded tensor, so that ``torch.nn.utils.clip_grad_norm_`` makes one
all-reduce and not one a parameter.  It never keeps a value that was settled from changing: anything but stacking settles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from zhooks.home import Home
from zhooks.mesh import PP, SHARD, TP
from zhooks.pieces import norms_of_runs
from zhooks.sharded import Spec

aten = torch.ops.aten


class PartialNorm(torch.Tensor):
    """A scalar, or a vector of them: |x|^p summed (or maximised) over this rank's ranges, still to be combined.

    What all ranks of the tp axis hold alike counts on the first of them, so that every element is summed over both axes.
    """

    _powers: Tensor
    _ord: float
    _home: Home

    @staticmethod
    def __new__(cls, powers: Tensor, ord: float, home: Home, dtype: torch.dtype) -> PartialNorm:
        made = torch.Tensor._make_wrapper_subclass(cls, powers.shape, dtype=dtype, device=powers.device)
        norm: PartialNorm = made
        norm._powers, norm._ord, norm._home = powers, ord, home
        return norm

    def settled(self, axes: tuple[str, ...] = (SHARD, TP)) -> Tensor:
        """The norms themselves, the same on every rank of these axes.  Collective."""
        powers = self._powers.clone()
        self._home.all_reduce(powers, _combination(self._ord), axes)
        return _root(powers, self._ord).to(self.dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"PartialNorm(shape={tuple(self.shape)}, ord={self._ord}): not settled over the ranks yet"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.stack.default:
            return _stack(args[0])
        if func is aten.detach.default or func is aten.alias.default:
            norm = args[0]
            return PartialNorm(norm._powers, norm._ord, norm._home, norm.dtype)
        if func is aten.linalg_vector_norm.default and _total(args, kwargs):
            norm = args[0]
            combined = PartialNorm(_combine(norm._powers, norm._ord), norm._ord, norm._home, norm.dtype)
            # Of a stack, the whole model's; other stages have stacks of their own.
            return combined.settled((SHARD, TP, PP) if norm.dim() else (SHARD, TP))
        plain = tree_map(lambda value: value.settled() if isinstance(value, PartialNorm) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def partial_norm(local: Tensor, ord: float, spec: Spec, dtype: torch.dtype, device: torch.device) -> PartialNorm:
    """The norm of ``local`` as this rank's part of the whole, on ``device``; an empty range counts for nothing."""
    home = spec.home
    half = local.dtype in (torch.float16, torch.bfloat16)
    again = spec.place is None and not home.first(TP) and _combination(ord) == "sum"
    if local.numel() == 0 or again:
        empty = math.inf if ord == -math.inf else 0.0
        return PartialNorm(torch.full((), empty, dtype=torch.float32 if half else local.dtype, device=device), ord, home, dtype)
    # 16 bits are summed in fp32, whose copy of the values is a buffer like others: bounded.
    norms = norms_of_runs(local, ord, home.buffer_nbytes) if half else [torch.linalg.vector_norm(local, ord)]
    power = _power(norms[0], ord) if len(norms) == 1 else _combine(_power(torch.stack(norms), ord), ord)
    return PartialNorm(power.to(device), ord, home, dtype)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    lead = next(part for part in parts if isinstance(part, PartialNorm))
    alike = all(
        not isinstance(part, PartialNorm) or (part._ord == lead._ord and part._home.sharded == lead._home.sharded)
        for part in parts
    )
    if not alike:
        return torch.stack([part.settled() if isinstance(part, PartialNorm) else part for part in parts])
    powers = [part._powers if isinstance(part, PartialNorm) else _known(part, lead) for part in parts]
    return PartialNorm(torch.stack([power.to(lead._powers.dtype) for power in powers]), lead._ord, lead._home, lead.dtype)


def _known(norm: Tensor, lead: PartialNorm) -> Tensor:
    """The norm of a tensor every rank of a stage holds whole: only the first rank adds it to a sum."""
    power = _power(norm, lead._ord)
    if _combination(lead._ord) == "sum" and not (lead._home.first(SHARD) and lead._home.first(TP)):
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
