"""What concerns a whole tensor: sums, extremes, equality and overflow, combined over every axis that cuts it.

``aten.py`` calls it, below autograd; norms are in ``norms.py``.

Note: [Over which axes]
    A range is summed over the shard axis where the buffer is cut there, and over tp where the parameter is divided there;
    what all ranks of an axis hold alike counts once.  A total over many tensors (a clip's norm, an overflow) concerns the
    whole model and is combined over tp and pp too; pp has other tensors, so those of one tensor never are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from offload.store import BlockRange
from zhooks.layout import SHARD, TP
from zhooks.tensor.elementwise import localise
from zhooks.tensor.overflow import Watch
from zhooks.tensor.range_tensor import ParamShard, RangeTensor

aten = torch.ops.aten

# Overload -> how the ranks' parts combine.
TOTALS = {
    aten.sum.default: "sum", aten.max.default: "max", aten.min.default: "min", aten.all.default: "min", aten.any.default: "max",
    aten.mean.default: "mean", aten.count_nonzero.default: "sum",
}  # fmt: skip


def _axes(spec: ParamShard) -> tuple[str, ...]:
    """The axes that cut one tensor; see Note [Over which axes]."""
    return (*((SHARD,) if spec.group.sharded else ()), *((TP,) if spec.place is not None else ()))


def total(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A sum, mean, maximum, ... over the whole tensor: this rank's part combined with the others'.  Collective."""
    tensor, how = args[0], TOTALS[func]
    tensor.check_numbers()
    # Summed where the compute is, whatever the tier: another order of additions would give other bits.
    local, group, axes = tensor._local.to(tensor._on), tensor._spec.group, _axes(tensor._spec)
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
    group.all_reduce(wide, "sum" if how == "mean" else how, axes)
    return (wide / tensor._spec.numel if how == "mean" else wide).to(part.dtype)


def equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors of one shape have the same values on all ranks.  Collective."""
    lead = args[0] if isinstance(args[0], RangeTensor) else args[1]
    if args[0].shape != args[1].shape:
        return False
    one, two = (localise(value, lead, [lead]) for value in args[:2])
    same = torch.tensor([torch.equal(one, two)], dtype=torch.int32, device=lead._on)
    lead._spec.group.all_reduce(same, "min", (SHARD, TP))
    return bool(same.item())


def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's check: an overflow on any rank, of any stage, is an overflow on all."""
    grads, found, scale = args[0], args[1], args[2]
    sharded = [grad for grad in grads if isinstance(grad, RangeTensor)]
    watched: dict[Watch, list[Any]] = {}
    for grad in sharded:
        watch: Watch | None = getattr(grad._spec.group, "watch", None)
        if watch is not None:
            watched.setdefault(watch, []).append(grad)
    for watch in watched:
        watch.scaler_comes()
    apart = [grad for grad in sharded if type(grad._at) is BlockRange]
    near = [grad for grad in grads if not any(grad is other for other in apart)]
    if near:
        func([grad._local if isinstance(grad, RangeTensor) else grad for grad in near], *args[1:], **kwargs)
    numbers = {found.device: (found, scale)}
    for grad in apart:
        local = grad._local
        if local.device not in numbers:
            numbers[local.device] = (found.to(local.device), scale.to(local.device))
        func([local], *numbers[local.device], *args[3:], **kwargs)
        grad._written()
    for here, _ in numbers.values():
        found.copy_(torch.maximum(found, here.to(found.device)))
    sharded[0]._spec.group.all_reduce(found, "max", (SHARD, TP))
    for watch in watched:
        watch.ask_stages(found)
    for watch, mine in watched.items():
        watch.unscaled(mine, found, scale)
