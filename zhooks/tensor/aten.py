"""What each ATen operation does to one rank's range: local, combined over the ranks, gathered, or refused by name.

`RangeTensor` reads ``ATEN``, below autograd.  Element-wise work is done on the 1-D ranges; totals are combined over the ranks;
anything else reads the gathered value of a parameter, and is refused for a gradient or a state.

Note: [Over which axes]
    A range is summed over the shard axis where the buffer is cut there, and over tp where the parameter is divided there;
    what all ranks of an axis hold alike counts once.  A total over many tensors (a clip's norm, an overflow) concerns the
    whole model and is combined over tp and pp too; pp has other tensors, so those of one tensor never are.

Note: [The user's collectives]
    What reads a parameter gets the gathered value.  What writes the same values on every rank into one (an all-reduce, a
    broadcast) works on the whole value, of which each rank keeps its range; anything else that writes is refused, as its
    result would be a different parameter on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from offload.errors import ShardedOpError
from offload.store import BlockRange
from zhooks.comm import wait_for
from zhooks.layout import SHARD, TP
from zhooks.tensor.elementwise import (
    ReadOnly,
    elementwise,
    in_place,
    lists,
    local,
    localise,
    readable_whole,
    refuse,
    stepping,
    whole,
    writes_only_self,
)
from zhooks.tensor.group import Watch, hash_of
from zhooks.tensor.norms import foreach_norm, norm
from zhooks.tensor.shard import Origin, ParamShard, RealShard, VectorShard
from zhooks.tensor.sharded import ATEN, OTHERS, Handler, RangeTensor, ShardedTensor, ShardedVector
from zhooks.tensor.stored import Args, Kwargs, Overload, is_collective, written_values

aten = torch.ops.aten

_RANDOM = {
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.exponential_.default, aten.rand_like.default,
    aten.randn_like.default, aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default, aten.random_.default,
}  # fmt: skip
_NOT_POINTWISE_FOREACH = {"_foreach_max", "_foreach_powsum"}
# Overload -> how the ranks' parts combine.
_TOTALS = {
    aten.sum.default: "sum", aten.max.default: "max", aten.min.default: "min", aten.all.default: "min", aten.any.default: "max",
    aten.mean.default: "mean", aten.count_nonzero.default: "sum",
}  # fmt: skip
_SAME_ON_ALL_RANKS = {
    "allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_",
    "all_reduce_", "all_reduce_coalesced_", "all_gather_into_tensor_out",
}  # fmt: skip


def _found(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    """Carry out an overload that is met for the first time, and remember how."""
    ATEN[func] = _rule(func)
    return ATEN[func](func, args, kwargs)


def _rule(func: Overload) -> Handler:
    name = func._schema.name.split("::")[1]
    if is_collective(func):
        return _collective
    if func in _RANDOM:
        return _random
    if func in _TOTALS:
        return _total
    if name == "linalg_vector_norm" or name == "norm":
        return norm
    if name in ("_local_scalar_dense", "_has_compatible_shallow_copy_type", "view"):
        return whole
    if name.startswith("_foreach_") and name not in _NOT_POINTWISE_FOREACH:
        return lists
    if name.startswith("_fused_") and name.endswith("_"):
        return lists
    if elementwise(func):
        return in_place if writes_only_self(func) else local
    return whole


# The same range, of the same or another shape.


def _alias(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    tensor, shard = args[0], args[0].local_shard
    # As in plain torch, an alias of a normal tensor is one under inference_mode too: it shares the version counter.
    with torch.inference_mode(tensor.is_inference()):
        origin = Origin(0) if shard.owner is None and isinstance(tensor, torch.nn.Parameter) else shard.origin
        alias = type(tensor)(shard.memory, shard.spec, owner=shard.owner, device=shard.device, origin=origin)
    shard.spec.aliases[id(alias)] = alias
    return alias


def _view(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    """The shape it has already, a vector, or the parameter's shape of a vector of one; any other needs the whole."""
    tensor, shape, shard = args[0], tuple(args[1]), args[0].local_shard
    spec = shard.spec
    if _derived(tensor) and func is aten.view.default:
        with torch.inference_mode(tensor.is_inference()):
            if isinstance(spec, VectorShard):
                # The one of its parameters that has elements; of none that have, the first.
                full = [part for part in spec.parts if part.numel] or spec.parts[:1]
                if len(full) == 1 and shape == tuple(full[0].shape):
                    return ShardedTensor(shard.values, full[0], device=shard.device)
                if shape in ((-1,), (spec.numel,)):
                    return ShardedVector(shard.values, spec, device=shard.device)
            elif shape in ((-1,), (spec.numel,)) and shape != tuple(spec.shape) and spec.contiguous:
                return ShardedVector(shard.values, VectorShard(_parts(spec)), device=shard.device)
    if shape == tuple(tensor.shape):
        return _alias(func, args, kwargs)
    if shard.origin is not None and not spec.contiguous and readable_whole(tensor):
        # reshape has cloned it to be contiguous, and the clone has kept the parameter's strides.
        return ReadOnly.of(func(tensor.full_tensor().contiguous(), shape), ())
    return whole(func, args, kwargs)


def _is_same_size(func: Overload, args: Args, kwargs: Kwargs) -> bool:
    return bool(args[0].shape == args[1].shape)


def _random(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    """Draw the whole tensor and keep the range: the same numbers as the plain model's with the same generator."""
    tensor, shard = args[0], args[0].local_shard
    full = torch.empty_strided(shard.spec.shape, shard.spec.stride, dtype=tensor.dtype, device=shard.device)
    drawn = func(full, *args[1:], **{key: value for key, value in kwargs.items() if key != "memory_format"})
    if not func._schema.is_mutable:
        if tensor.numbers is not None and not stepping():
            return drawn  # each rank has a generator of its own
        return type(tensor)(shard.spec.take(drawn).clone(), shard.spec, device=shard.device)
    shard.values.copy_(shard.spec.take(drawn))
    shard.written()
    return tensor


# Vectors of many parameters, see Note [Vectors].


def _derived(value: Any) -> bool:
    """A gradient, a state or a temporary, in memory of its own; see Note [Bound and derived]."""
    return isinstance(value, RangeTensor) and not (value.local_shard.block or readable_whole(value))


def _parts(spec: ParamShard) -> Sequence[ParamShard]:
    """What a vector of this one is of; the pairs of numbers of a complex vector are those of its parts."""
    if isinstance(spec, RealShard) and isinstance(spec.of, VectorShard):
        return tuple(map(RealShard, spec.of.parts))
    return (spec,)


def _cat(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    tensors = args[0]
    plain = next((one for one in tensors if not isinstance(one, RangeTensor)), None)
    vector = next((one for one in tensors if isinstance(one, ShardedVector)), None)
    if plain is not None and vector is not None:
        raise ShardedOpError(
            f"Cannot concatenate {vector.local_shard.spec.name} and others. Expected only gradients or states of attached "
            "parameters, because the optimizer uses them as one vector (as LBFGS does); found a plain tensor of shape "
            f"{tuple(plain.shape)}. Use a separate optimizer for parameters that are not attached, or are in [units] "
            "ignore."
        )
    if kwargs or not all(_derived(one) and one.dim() == 1 for one in tensors):
        return whole(func, args, kwargs)
    shards = [one.local_shard for one in tensors]
    # A 1-D tensor has one order of its elements, so a range of it is a range of the vector.
    parts = [part for one in shards for part in (one.spec.parts if type(one.spec) is VectorShard else (one.spec,))]
    return ShardedVector(torch.cat([one.values for one in shards]), VectorShard(parts), device=shards[0].device)


def _slice(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    shard = args[0].local_shard
    if not isinstance(shard.spec, VectorShard):
        return whole(func, args, kwargs)
    given = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
    start, end, step = slice(*given[1:]).indices(shard.spec.numel)
    taken: list[ParamShard] = []
    first = here = at = 0
    for part in shard.spec.parts:
        after = at + part.numel
        if start <= at and after <= end:
            first = here if not taken else first
            taken.append(part)
        here, at = here + part.own_numel, after
    if step != 1 or not taken or sum(part.numel for part in taken) != end - start:
        return whole(func, args, kwargs)
    values = shard.values[first : first + sum(part.own_numel for part in taken)]
    return ShardedVector(values, VectorShard(taken), device=shard.device)


def _dot(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    lead = args[0] if isinstance(args[0], RangeTensor) else args[1]
    if any(isinstance(one, RangeTensor) and not _derived(one) for one in args) or args[0].shape != args[1].shape:
        return whole(func, args, kwargs)
    spec = lead.local_shard.spec
    for own in args:
        if not isinstance(own, RangeTensor) and spec.group.sharded and not lead.alike(hash_of(own) >> 1):
            raise ShardedOpError(
                f"Cannot compute the dot product with {spec.name}. Expected the same plain tensor on every rank, "
                "because each multiplies a range of it; found different ones. Broadcast it first."
            )
    part: Tensor = func(*(localise(value, lead) for value in args))
    wide = part.to(torch.float32) if part.dtype in (torch.float16, torch.bfloat16) else part
    spec.group.all_reduce(wide, "sum", (SHARD,))
    return wide.to(part.dtype)


# Over the ranks.


def _total(func: Overload, args: Args, kwargs: Kwargs) -> Tensor:
    """A sum, mean, maximum, ... over the whole tensor: this rank's part combined with the others'.  Collective."""
    tensor, shard, how = args[0], args[0].local_shard, _TOTALS[func]
    tensor.check_numbers()
    # Summed where the compute is, whatever the tier: another order of additions would give other bits.
    values, spec = shard.values.to(shard.device), shard.spec
    axes = (*((SHARD,) if spec.group.sharded else ()), *((TP,) if spec.place is not None else ()))
    if not axes:
        return cast(Tensor, func(values, *args[1:], **kwargs))
    if values.numel() == 0 and func in (aten.max.default, aten.min.default):
        limits = torch.finfo(values.dtype) if values.is_floating_point() else torch.iinfo(values.dtype)
        part = torch.full((), limits.min if how == "max" else limits.max, dtype=values.dtype, device=values.device)
    else:
        part = values.sum() if how == "mean" else func(values, *args[1:], **kwargs)
    wide = part.to(torch.float32) if part.dtype in (torch.float16, torch.bfloat16) else part
    wide = wide.to(torch.int32) if part.dtype == torch.bool else wide.clone()
    spec.group.all_reduce(wide, "sum" if how == "mean" else how, axes)
    return (wide / spec.numel if how == "mean" else wide).to(part.dtype)


def _equal(func: Overload, args: Args, kwargs: Kwargs) -> bool:
    """Whether two tensors of one shape have the same values on all ranks.  Collective."""
    lead = args[0] if isinstance(args[0], RangeTensor) else args[1]
    if args[0].shape != args[1].shape:
        return False
    one, two = (localise(value, lead) for value in args[:2])
    same = torch.tensor([torch.equal(one, two)], dtype=torch.int32, device=lead.local_shard.device)
    lead.local_shard.spec.group.all_reduce(same, "min", (SHARD, TP))
    return bool(same.item())


def _unscale(func: Overload, args: Args, kwargs: Kwargs) -> None:
    """GradScaler's check: an overflow on any rank, of any stage, is an overflow on all."""
    grads, found, scale = args[0], args[1], args[2]
    sharded = [grad for grad in grads if isinstance(grad, RangeTensor)]
    watched: dict[Watch, list[Any]] = {}
    for grad in sharded:
        watch: Watch | None = getattr(grad.local_shard.spec.group, "watch", None)
        if watch is not None:
            watched.setdefault(watch, []).append(grad)
    for watch in watched:
        watch.scaler_comes()
    stored = {id(grad): grad.local_shard for grad in sharded if type(grad.local_shard.memory) is BlockRange}
    near = [grad.local_shard.values if isinstance(grad, RangeTensor) else grad for grad in grads if id(grad) not in stored]
    if near:
        func(near, *args[1:], **kwargs)
    numbers = {found.device: (found, scale)}
    for shard in stored.values():
        values = shard.values
        if values.device not in numbers:
            numbers[values.device] = (found.to(values.device), scale.to(values.device))
        func([values], *numbers[values.device], *args[3:], **kwargs)
        shard.written()
    for here, _ in numbers.values():
        found.copy_(torch.maximum(found, here.to(found.device)))
    sharded[0].local_shard.spec.group.all_reduce(found, "max", (SHARD, TP))
    for watch in watched:
        watch.ask_stages(found)
    for watch, mine in watched.items():
        watch.unscaled(mine, found, scale)


def overflowed(grads: Iterable[Tensor | None], device: torch.device | str) -> Tensor:
    """Flags [n] on ``device``: this rank's range of a gradient holds an inf or a nan.  Waits for no GPU."""
    flags = [torch.zeros((), dtype=torch.float32, device=device)]
    for grad in grads:
        values = grad.local_shard.values if isinstance(grad, RangeTensor) else grad
        flags.append(flags[0] if values is None else (~torch.isfinite(values).all()).to(device, torch.float32))
    return torch.stack(flags)[1:]


def _collective(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    """A collective of torch.distributed; what writes a sharded tensor is complete when it returns.

    Raises:
        ShardedOpError: it writes a gradient or a state, or each rank would get other values.
    """
    written = [value for value in written_values(func, args, kwargs) if isinstance(value, RangeTensor)]
    if not written:
        return whole(func, args, kwargs)
    gathered, values = False, dict[int, Tensor]()
    for tensor in written:
        shard, spec = tensor.local_shard, tensor.local_shard.spec
        apart = spec.group.sharded or spec.division is not None or shard.block is not None
        if shard.owner is None or (apart and func._schema.name.split("::")[1] not in _SAME_ON_ALL_RANKS):
            refuse(func, tensor, writes=True)
        gathered = gathered or apart
        # Where this rank has all of it, in the memory that it is kept in.
        own = None if apart else shard.values.as_strided(spec.part_shape, spec.part_stride)
        values[id(tensor)] = tensor.full_tensor() if own is None else own
    plain, named = tree_map_only(RangeTensor, lambda value: values.get(id(value), value), (args, kwargs))
    out = func(*plain, **named)
    if gathered:
        wait_for(out)
    for tensor in written:
        if values[id(tensor)].untyped_storage()._cdata == tensor.local_shard.values.untyped_storage()._cdata:
            tensor.local_shard.written()
        else:
            tensor.copy_(values[id(tensor)])
    return out


ATEN.update({
    OTHERS: _found,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.detach_.default: _alias,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.is_same_size.default: _is_same_size,
    aten.cat.default: _cat,
    aten.slice.Tensor: _slice,
    aten.dot.default: _dot,
    aten.equal.default: _equal,
    aten._foreach_norm.Scalar: foreach_norm,
    aten._foreach_norm.Scalar_out: foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
})
