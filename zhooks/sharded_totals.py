"""What concerns a whole tensor: sums, extremes, norms, equality and overflow, settled over every axis that cuts it.

``sharded_ops.py`` calls it, below autograd.

Note: [Over which axes]
    A range is summed over the shard axis where the buffer is cut there, and over tp where the parameter is divided there;
    what all ranks of an axis hold alike counts once.  A total over many tensors (a clip's norm, an overflow) concerns the
    whole model and is settled over tp and pp too; pp has other tensors, so those of one tensor never are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from offload.block import Part
from zhooks.mesh import PP, SHARD, TP
from zhooks.norms import partial_norm
from zhooks.overflow import Watch
from zhooks.sharded import ShardedTensor, Spec
from zhooks.sharded_ranges import localise, refuse

aten = torch.ops.aten

# Overload -> how the ranks' parts combine.
TOTALS = {
    aten.sum.default: "sum", aten.max.default: "max", aten.min.default: "min", aten.all.default: "min", aten.any.default: "max",
    aten.mean.default: "mean", aten.count_nonzero.default: "sum",
}  # fmt: skip


def _axes(spec: Spec) -> tuple[str, ...]:
    """The axes that cut one tensor; see Note [Over which axes]."""
    return (*((SHARD,) if spec.home.sharded else ()), *((TP,) if spec.place is not None else ()))


def total(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A sum, mean, maximum, ... over the whole tensor: this rank's part combined with the others'.  Collective."""
    tensor, how = args[0], TOTALS[func]
    # Summed where the compute is, whatever the tier: another order of additions would give other bits.
    local, home, axes = tensor._local.to(tensor._on), tensor._spec.home, _axes(tensor._spec)
    if not axes:
        return cast(Tensor, func(local, *args[1:], **kwargs))
    if local.numel() == 0 and how in ("max", "min") and func in (aten.max.default, aten.min.default):
        low = torch.finfo(local.dtype).min if local.is_floating_point() else torch.iinfo(local.dtype).min
        high = torch.finfo(local.dtype).max if local.is_floating_point() else torch.iinfo(local.dtype).max
        part = torch.full((), low if how == "max" else high, dtype=local.dtype, device=local.device)
    else:
        part = local.sum() if how == "mean" else func(local, *args[1:], **kwargs)
    wide = part.to(torch.float32) if part.dtype in (torch.float16, torch.bfloat16) else part
    wide = (wide.to(torch.int32) if part.dtype == torch.bool else wide.clone())
    home.all_reduce(wide, "sum" if how == "mean" else how, axes)
    return (wide / tensor._spec.numel if how == "mean" else wide).to(part.dtype)


def equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors of one shape have the same values on all ranks.  Collective."""
    lead = args[0] if isinstance(args[0], ShardedTensor) else args[1]
    if args[0].shape != args[1].shape:
        return False
    one, two = (localise(value, lead, [lead]) for value in args[:2])
    same = torch.tensor([torch.equal(one, two)], dtype=torch.int32, device=lead._on)
    lead._spec.home.all_reduce(same, "min", (SHARD, TP))
    return bool(same.item())


def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The norm of one tensor, not settled over the ranks yet where they share it."""
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
    local, home = tensor._local.to(tensor._on), tensor._spec.home  # as in `total`
    if not (home.sharded or home.spans(TP) or home.spans(PP)):
        plain: Tensor = func(local, *args[1:], **kwargs) if name == "norm" else aten.linalg_vector_norm(local, order)
        return plain.to(dtype)
    return partial_norm(local, order, tensor._spec, dtype, tensor._on)


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The same of a list."""
    ord = float(args[1]) if len(args) > 1 else float(kwargs.get("ord", 2))
    out: list[Tensor] = []
    for tensor in args[0]:
        if isinstance(tensor, ShardedTensor):
            out.append(norm(aten.linalg_vector_norm.default, (tensor, ord), {}))
        else:
            out.append(torch.linalg.vector_norm(tensor, ord))
    return out


def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's check: an overflow on any rank, of any stage, is an overflow on all."""
    grads, found, scale = args[0], args[1], args[2]
    sharded = [grad for grad in grads if isinstance(grad, ShardedTensor)]
    watched: dict[Watch, list[ShardedTensor]] = {}
    for grad in sharded:
        watch: Watch | None = getattr(grad._spec.home, "watch", None)
        if watch is not None:
            watched.setdefault(watch, []).append(grad)
    for watch in watched:
        watch.scaler_comes()
    apart = [grad for grad in sharded if type(grad._at) is Part]
    near = [grad for grad in grads if not any(grad is other for other in apart)]
    if near:
        func([grad._local if isinstance(grad, ShardedTensor) else grad for grad in near], *args[1:], **kwargs)
    numbers = {found.device: (found, scale)}
    for grad in apart:
        local = grad._local
        if local.device not in numbers:
            numbers[local.device] = (found.to(local.device), scale.to(local.device))
        func([local], *numbers[local.device], *args[3:], **kwargs)
        grad._written()
    for here, _ in numbers.values():
        found.copy_(torch.maximum(found, here.to(found.device)))
    sharded[0]._spec.home.all_reduce(found, "max", (SHARD, TP))
    for watch in watched:
        watch.ask_stages(found)
    for watch, mine in watched.items():
        watch.unscaled(mine, found, scale)
