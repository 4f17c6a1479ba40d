"""What each ATen operation does to one rank's range: local, settled over the ranks, gathered, or refused by name.

``ShardedTensor.__torch_dispatch__`` calls it, below autograd.  Element-wise work is done on the 1-D ranges; totals are
combined over the ranks; anything else reads the gathered value of a parameter, and is refused for a gradient or a state.
It never guesses: an operation it cannot do right raises and says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from offload.block import Part
from offload.errors import ShardedOpError
from zhooks.norms import partial_norm
from zhooks.sharded import ReadOnly, ShardedTensor, doors

aten = torch.ops.aten

# Element-wise, though torch does not tag them so.
_LOCAL = {
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.clone.default, aten._to_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default, aten.empty_like.default, aten.full_like.default, aten.copy_.default, aten.lift_fresh.default,
    aten.clamp_.default, aten.nan_to_num_.default, aten.masked_fill_.Scalar, aten.where.self, aten.positive.default,
    aten.lerp_.Scalar, aten.lerp_.Tensor, aten.addcmul_.default, aten.addcdiv_.default, aten.copy.default,
    aten.contiguous.default,
    aten.masked_fill.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar,
}  # fmt: skip
_ALIASES = {aten.detach.default, aten.alias.default, aten.detach_.default}
_RANDOM = {
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.exponential_.default, aten.rand_like.default,
    aten.randn_like.default, aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default, aten.random_.default,
}  # fmt: skip
# Overload -> how the ranks' parts combine.
_TOTALS = {
    aten.sum.default: "sum", aten.max.default: "max", aten.min.default: "min", aten.all.default: "min", aten.any.default: "max",
    aten.mean.default: "mean", aten.count_nonzero.default: "sum",
}  # fmt: skip
_NOT_POINTWISE_FOREACH = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out one ATen overload on sharded arguments."""
    rule = _RULES.get(func)
    if rule is None:
        rule = _RULES[func] = _rule(func)
    return rule(func, args, kwargs)


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A list operation over ranges on disk, of which all at once may not fit in memory, or on several tiers."""
    count = len(args[0])

    def at(index: int, value: Any) -> Any:
        return [value[index]] if type(value) in (list, tuple) and len(value) == count else value

    out: list[Any] = []
    for index in range(count):
        named = {key: at(index, value) for key, value in kwargs.items()}
        out.extend(_local(func, tuple(at(index, value) for value in args), named) or ())
    return out or None


def _scattered(tensors: Any) -> bool:
    """Ranges on disk, or ranges in different memories: no one operation may have them all."""
    sharded = [tensor for tensor in tensors if type(tensor) is ShardedTensor]
    apart = any(t._on.type != "cpu" for t in sharded) and len({t._local.device for t in sharded if not t._paged}) > 1
    return apart or any(t._paged for t in sharded)


def _rule(func: Any) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    name = func._schema.name.split("::")[1]
    if func in _ALIASES:
        return _alias
    if func in _RANDOM:
        return _random
    if func in _TOTALS:
        return _total
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale
    if name == "linalg_vector_norm" or name == "norm":
        return _norm
    if name == "_foreach_norm":
        return _foreach_norm
    if name in ("equal", "_local_scalar_dense", "is_same_size", "_has_compatible_shallow_copy_type", "view", "_unsafe_view"):
        return {"equal": _equal, "is_same_size": _same_size, "view": _view}.get(name, _whole)
    if name.startswith("_foreach_") and name not in _NOT_POINTWISE_FOREACH:
        return _local
    if name.startswith("_fused_") or func in _LOCAL or torch.Tag.pointwise in func.tags:
        return _in_place if _writes_only_self(func) else _local
    return _whole


def _writes_only_self(func: Any) -> bool:
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    return bool(writes) and writes[0] and not any(writes[1:])


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The short way of an optimizer's inner loop: one tensor changed by others of its own range, and by numbers."""
    lead = args[0]
    if type(lead) is not ShardedTensor or any(isinstance(value, Tensor) for value in kwargs.values()):
        return _local(func, args, kwargs)
    spec = lead._spec
    plain = [lead._local]
    for value in args[1:]:
        if type(value) is ShardedTensor and value._spec is spec:
            plain.append(_near(value, lead))
        elif isinstance(value, Tensor) and (value.dim() > 0 or value.device != plain[0].device):
            return _local(func, args, kwargs)
        else:
            plain.append(value)
    func(*plain, **kwargs)
    lead._written()
    return lead


def _local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an element-wise operation to the ranges."""
    first = args[0]
    if type(first) in (list, tuple) and len(first) > 1 and _scattered(first):
        return _one_by_one(func, args, kwargs)
    mixed = _mixed(args)
    if mixed is not None:
        parts = {side: func(*_side(args, mixed, side), **kwargs) for side in (True, False)}
        if parts[True] is None:
            return None
        queues = {side: iter(part) for side, part in parts.items()}
        return [next(queues[side]) for side in mixed]
    leads = _leads(args, kwargs)
    lead = leads[0]
    if func is aten.copy_.default and not isinstance(args[0], ShardedTensor):
        return _whole(func, args, kwargs)
    written = _written(func, args, kwargs)
    if written is None:
        return _whole(func, args, kwargs)
    plain = [_localise(value, lead, leads) for value in args]
    named = {key: _localise(value, lead, leads) for key, value in kwargs.items() if key != "memory_format"}
    if any(value is NotImplemented for value in (*plain, *named.values())):
        return _whole(func, args, kwargs)
    assert lead._on.type == "cpu" or len({tensor._local.device for tensor in written}) < 2, f"{func} writes on two tiers"
    out = func(*plain, **named)
    for tensor in written:
        tensor._written()
    if written:
        return args[0] if out is not None else None
    device = kwargs.get("device") or lead._on
    if isinstance(out, Tensor):
        return ShardedTensor(out, lead._spec, device=device)
    if isinstance(out, (list, tuple)):
        pairs = zip(out, leads, strict=False)
        return type(out)(ShardedTensor(item, of._spec, device=device) for item, of in pairs)
    return out


def _mixed(args: tuple[Any, ...]) -> list[bool] | None:
    """Which of a list operation's tensors are sharded, where some are and some are not."""
    if not args or not isinstance(args[0], (list, tuple)):
        return None
    mask = [isinstance(value, ShardedTensor) for value in args[0]]
    return mask if any(mask) and not all(mask) else None


def _side(args: tuple[Any, ...], mask: list[bool], side: bool) -> list[Any]:
    """The arguments of the sharded tensors alone, or of the others."""
    return [
        [item for item, sharded in zip(value, mask, strict=True) if sharded is side]
        if isinstance(value, (list, tuple)) and len(value) == len(mask)
        else value
        for value in args
    ]


def _leads(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ShardedTensor]:
    """The sharded tensors that say what range this is: the first, or the first list's, one an element."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, ShardedTensor):
            return [value]
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, ShardedTensor) for item in value):
            return list(value)
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            found = [item for item in value if isinstance(item, ShardedTensor)]
            if found:
                return found
    raise AssertionError("an operation without a sharded argument was dispatched here")


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ShardedTensor] | None:
    """The sharded tensors this operation writes; None when it writes into something that is not sharded."""
    if not func._schema.is_mutable:
        return []
    out: list[ShardedTensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if position >= len(args) else args[position]
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, ShardedTensor):
                out.append(item)
            elif isinstance(item, Tensor) and item.dim() > 0:
                return None
    return out


def _localise(value: Any, lead: ShardedTensor, leads: list[ShardedTensor]) -> Any:
    if isinstance(value, ShardedTensor):
        return _matching(value, lead)
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return _beside(value, lead)
        if torch.broadcast_shapes(value.shape, lead.shape) != lead.shape:
            return NotImplemented
        return _beside(lead._spec.take(value), lead)
    if isinstance(value, (list, tuple)) and value and any(isinstance(item, Tensor) for item in value):
        if len(value) == len(leads):
            return [_localise(item, of, leads) for item, of in zip(value, leads, strict=True)]
        return [_localise(item, lead, leads) for item in value]
    return value


def _beside(value: Tensor, lead: ShardedTensor) -> Tensor:
    """A plain tensor where the range is: beside one in host memory, the number a user's loop computed on the device."""
    if lead._on == value.device and value.device.type != "cpu":
        return value.to(lead._local.device)
    return value


def _near(value: ShardedTensor, lead: ShardedTensor) -> Tensor:
    """A range to be read where the lead's is: their tiers may differ."""
    return value._local if value is lead or lead._on.type == "cpu" else value._local.to(lead._local.device)


def _matching(value: ShardedTensor, lead: ShardedTensor) -> Any:
    if value._spec is lead._spec or value._spec.key() == lead._spec.key():
        return _near(value, lead)
    if value.shape != lead.shape and value._bound:
        return NotImplemented
    if value.shape != lead.shape:
        raise ShardedOpError(
            f"element-wise operation on {lead._spec.name} {tuple(lead.shape)} and {value._spec.name} "
            f"{tuple(value.shape)}: expected "
            "sharded tensors of one shape, found two. Use full_tensor() on both."
        )
    if value._bound:
        return lead._spec.take(value._spec.home.view(value._spec.index).detach())
    raise ShardedOpError(
        f"{lead._spec.name} and {value._spec.name}: expected the same range of elements on this rank, found two. "
        "Load at the world "
        "size that saved, or use full values (attachment.state_dict())."
    )


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    return ShardedTensor(tensor._at, tensor._spec, bound=tensor._bound, device=tensor._on)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, shape = args[0], args[1]
    if tuple(shape) == tuple(tensor.shape):
        return _alias(func, args, kwargs)
    return _whole(func, args, kwargs)


def _same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor and keep the range: the same numbers as the plain model's with the same generator."""
    tensor = args[0]
    spec = tensor._spec
    whole = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor._on)
    drawn = func(whole, *args[1:], **{key: value for key, value in kwargs.items() if key != "memory_format"})
    local = spec.take(drawn).clone()
    if not func._schema.is_mutable:
        return ShardedTensor(local, spec, device=tensor._on)
    tensor._local.copy_(local)
    tensor._written()
    return tensor


def _total(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A sum, mean, maximum, ... over the whole tensor: this rank's part combined with the others'.  Collective."""
    tensor, how = args[0], _TOTALS[func]
    # Summed where the compute is, whatever the tier: another order of additions would give other bits.
    local, home = tensor._local.to(tensor._on), tensor._spec.home
    if not home.sharded:
        return cast(Tensor, func(local, *args[1:], **kwargs))
    if local.numel() == 0 and how in ("max", "min") and func in (aten.max.default, aten.min.default):
        low = torch.finfo(local.dtype).min if local.is_floating_point() else torch.iinfo(local.dtype).min
        high = torch.finfo(local.dtype).max if local.is_floating_point() else torch.iinfo(local.dtype).max
        part = torch.full((), low if how == "max" else high, dtype=local.dtype, device=local.device)
    else:
        part = local.sum() if how == "mean" else func(local, *args[1:], **kwargs)
    wide = part.to(torch.float32) if part.dtype in (torch.float16, torch.bfloat16) else part
    wide = (wide.to(torch.int32) if part.dtype == torch.bool else wide.clone())
    home.all_reduce(wide, "sum" if how == "mean" else how)
    return (wide / tensor._spec.numel if how == "mean" else wide).to(part.dtype)


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    lead = args[0] if isinstance(args[0], ShardedTensor) else args[1]
    if args[0].shape != args[1].shape:
        return False
    one, two = (_localise(value, lead, [lead]) for value in args[:2])
    same = torch.tensor([torch.equal(one, two)], dtype=torch.int32, device=lead._on)
    lead._spec.home.all_reduce(same, "min")
    return bool(same.item())


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    name = func._schema.name.split("::")[1]
    ord = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    tensor = args[0]
    if not isinstance(ord, (int, float)) and ord is not None:
        ord = 2
    if dim not in (None, [], ()):
        refused: Tensor = _refuse(func, tensor)
        return refused
    dtype = kwargs.get("dtype") or tensor.dtype
    order = 2.0 if ord is None else float(ord)
    local = tensor._local.to(tensor._on)  # as in `_total`
    if not tensor._spec.home.sharded:
        plain: Tensor = func(local, *args[1:], **kwargs) if name == "norm" else aten.linalg_vector_norm(local, order)
        return plain.to(dtype)
    return partial_norm(local, order, tensor._spec.home, dtype, tensor._on)


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    ord = float(args[1]) if len(args) > 1 else float(kwargs.get("ord", 2))
    out: list[Tensor] = []
    for tensor in args[0]:
        if isinstance(tensor, ShardedTensor):
            out.append(_norm(aten.linalg_vector_norm.default, (tensor, ord), {}))
        else:
            out.append(torch.linalg.vector_norm(tensor, ord))
    return out


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's check: an overflow on any rank is an overflow on all."""
    grads, found, scale = args[0], args[1], args[2]
    apart = [grad for grad in grads if isinstance(grad, ShardedTensor) and type(grad._at) is Part]
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
    lead = next(grad for grad in grads if isinstance(grad, ShardedTensor))
    lead._spec.home.all_reduce(found, "max")


def _whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read parameters whole; refuse anything that would need the whole of a gradient or a state."""
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]

    def swap(value: Any, writes: bool = False) -> Any:
        if isinstance(value, ShardedTensor):
            if writes or not (value._bound or isinstance(value, torch.nn.Parameter)):
                return _refuse(func, value)
            if not value._bound:
                return value.full_tensor()
            return value._spec.home.view(value._spec.index).detach()
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            return [swap(item, writes) for item in value]
        return value

    plain = [swap(value, writes) for value, writes in zip(args, written, strict=False)]
    out = func(*plain, **{key: swap(value) for key, value in kwargs.items()})
    if any(argument.alias_info is not None for argument in func._schema.returns) and isinstance(out, Tensor):
        return out.as_subclass(ReadOnly)
    return out


def _refuse(func: Any, tensor: ShardedTensor) -> Any:
    raise ShardedOpError(
        f"{func._schema.name.split('::')[1]} on the sharded tensor of {tensor._spec.name} {tuple(tensor.shape)}: "
        "expected an element-wise "
        "operation or a total, found one that needs whole rows or matrices (Adafactor, Muon, LBFGS and Shampoo do). Use an "
        "element-wise optimizer, or full_tensor(); to write, use `with attachment.gathered(parameter, write=True):`."
    )


_RULES: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {}

doors.dispatch = dispatch
