"""Element-wise work on one rank's ranges, and what an operation falls back to: the gathered value, or a refusal.

Below autograd.  Nothing here communicates, but for what a gathered value asks for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from itertools import compress
from types import FrameType
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.errors import ShardedOpError
from offload.store import BlockRange
from zhooks.layout import whole_of
from zhooks.tensor.shard import Origin, ParamShard
from zhooks.tensor.sharded import RangeTensor
from zhooks.tensor.stored import Args, Kwargs, Overload, written_names, written_values

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


def elementwise(func: Overload) -> bool:
    """Each element of the result comes from one element of every argument."""
    return func in _LOCAL or torch.Tag.pointwise in func.tags


# Who calls.


def as_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, an optimizer's step that is called without what torch puts around one."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return step


#: The code that an optimizer's step runs under.
_STEPS = frozenset(wrap(lambda: None).__code__ for wrap in (as_step, Optimizer.profile_hook_step))
#: Where torch copies states to save them.
_COPIES_STATES = ("torch.distributed.checkpoint", "torch.distributed._state_dict_utils")


def stepping() -> bool:
    """An optimizer's step runs on this thread."""
    return _called_by(lambda frame: frame.f_code in _STEPS)


def _called_by(found: Callable[[FrameType], bool]) -> bool:
    """One of the frames below the caller's is such a one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not found(frame):
        frame = frame.f_back
    return frame is not None


# Expressions.


def numbers_of(args: Args, kwargs: Kwargs) -> int | None:
    """As ``Origin.numbers``, of what is computed from these; see Note [Expressions]."""
    found = 0
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, RangeTensor):
            if value.numbers is None:
                return None
            value = value.numbers or None
        elif isinstance(value, Tensor):
            return None
        if isinstance(value, (bool, int, float, complex)):
            found = crc32(repr(value).encode(), found)
    return found


def _meets_own_values(func: Overload, args: Args, kwargs: Kwargs) -> bool:
    """A new value of parameters or expressions and of what is this rank's own; see Note [Expressions]."""
    if func._schema.is_mutable or (args and isinstance(args[0], (list, tuple))):
        return False
    values = (*args, *kwargs.values())
    sharded = [value for value in values if isinstance(value, RangeTensor)]
    own: tuple[type, ...] = (int, float, complex, Tensor) if all(value.numel() == 1 for value in sharded) else (Tensor,)
    meets = any(isinstance(value, own) and not isinstance(value, (RangeTensor, bool)) for value in values)
    return meets and all(value.numbers is not None for value in sharded) and not stepping()


def readable_whole(tensor: RangeTensor) -> bool:
    """A parameter, or an expression outside of an optimizer's step; of a gradient or a state only the range can be read."""
    of_parameter = tensor.local_shard.owner is not None or isinstance(tensor, torch.nn.Parameter)
    return of_parameter or (tensor.numbers is not None and not stepping())


# On the ranges.


def writes_only_self(func: Overload) -> bool:
    """The overload changes its first argument and no other."""
    return written_names(func) == {argument.name for argument in func._schema.arguments[:1]}


def in_place(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    """The short way of an optimizer's inner loop: one tensor changed by others of its own range, and by numbers."""
    return args[0] if change(func, args, kwargs) else local(func, args, kwargs)


def change(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> bool:
    """Change a tensor by ranges that are all of its own; False where one is not, or lies elsewhere."""
    lead = args[0]
    if not isinstance(lead, RangeTensor) or any(isinstance(value, Tensor) for value in kwargs.values()):
        return False
    shard = lead.local_shard
    spec, near = shard.spec, shard.device.type == "cpu"
    plain = [shard.values]
    for value in args[1:]:
        held = getattr(value, "local_shard", None)
        if held is not None and held.spec is spec:
            plain.append(held.values if near else _near(value, lead))
        elif isinstance(value, Tensor) and (value.dim() > 0 or value.device != plain[0].device):
            return False
        else:
            plain.append(value)
    func(*plain, **kwargs)
    shard.written(None if shard.origin is None else numbers_of(args, kwargs))
    return True


def in_compute_memory(tensor: RangeTensor) -> bool:
    """The range is in the memory that it is computed in: in no block of a store, and in host memory only on the CPU."""
    shard = tensor.local_shard
    return type(shard.memory) is not BlockRange and (shard.device.type == "cpu" or shard.memory.device == shard.device)


def lists(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    """A list operation, of a foreach or fused optimizer: on the ranges at once where all lie in one memory, else one by one.

    Of ranges on disk all at once might not fit in memory.
    """
    plain = _ranges_of_lists(args, kwargs)
    if plain is None:
        return _one_by_one(func, args, kwargs)
    leads = next(value for value in args if isinstance(value, (list, tuple)))
    numbers = None
    if not func._schema.is_mutable and next(one for one in leads if isinstance(one, RangeTensor)).numbers is not None:
        # Tensors of a list that are not sharded are no part of what is computed of those that are.
        sharded = [isinstance(lead, RangeTensor) for lead in leads]
        own = [list(compress(value, sharded)) if isinstance(value, (list, tuple)) else value for value in args]
        numbers = numbers_of(tuple(own), kwargs)
    out = func(*plain, **kwargs)
    for position in _positions_written(func):
        for written in args[position] if position < len(args) else ():
            if isinstance(written, RangeTensor):
                written.local_shard.written()
    if out is None:
        return None
    origin = None if numbers is None else Origin(numbers)
    return [
        type(lead)(value, lead.local_shard.spec, device=lead.local_shard.device, origin=origin)
        if isinstance(lead, RangeTensor)
        else value
        for value, lead in zip(out, leads, strict=True)
    ]


@cache
def _positions_written(func: Overload) -> tuple[int, ...]:
    return tuple(number for number, one in enumerate(func._schema.arguments) if one.name in written_names(func))


def _ranges_of_lists(args: Args, kwargs: Kwargs) -> list[Any] | None:
    """The arguments with ranges in place of tensors; None where one is on disk, in another memory or another range."""
    leads = next((value for value in args if isinstance(value, (list, tuple)) and value), ())
    lead = next((value for value in leads if isinstance(value, RangeTensor)), None)
    if lead is None or lead.local_shard.paged or any(isinstance(value, (list, tuple)) for value in kwargs.values()):
        return None
    # On the CPU there is one memory.
    memory = None if lead.local_shard.device.type == "cpu" else lead.local_shard.values.device
    plain: list[Any] = []
    for values in (*args, *kwargs.values()):
        # A vector has a number for each tensor of the lists, on the host.
        if isinstance(values, Tensor) and values.dim() != 1 and memory is not None and values.device != memory:
            return None
        if not isinstance(values, (list, tuple)) or not values:
            plain.append(values)
            continue
        if len(values) != len(leads):
            return None
        ranges: list[Any] = []
        for value, lead in zip(values, leads, strict=True):
            found = value
            if isinstance(value, Tensor):
                shard = getattr(value, "local_shard", None)
                if shard is None:
                    if (isinstance(lead, RangeTensor) and value.dim() > 0) or (memory is not None and value.device != memory):
                        return None
                elif not isinstance(lead, RangeTensor) or not _alike(shard.spec, lead.local_shard.spec):
                    return None
                else:
                    found = shard.memory
                    if type(found) is BlockRange:
                        if found.block.paged:
                            return None
                        found = found.open()
                    if memory is not None and found.device != memory:
                        return None
            ranges.append(found)
        plain.append(ranges)
    return plain[: len(args)]


def _alike(one: ParamShard, other: ParamShard) -> bool:
    return one is other or one.key() == other.key()


def _one_by_one(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    """A list operation as one on lists of one for each tensor."""
    count = len(next(value for value in args if isinstance(value, (list, tuple))))

    def at(index: int, value: Any) -> Any:
        return [value[index]] if type(value) in (list, tuple) and len(value) == count else value

    if func._schema.is_mutable:
        # What does not match is refused before anything is changed.
        for row in zip(*(value for value in args if isinstance(value, (list, tuple)) and len(value) == count), strict=True):
            ranges = [value for value in row if isinstance(value, RangeTensor)]
            for value in ranges[1:]:
                _same_range(value, ranges[0])
    out: list[Any] = []
    for index in range(count):
        named = {key: at(index, value) for key, value in kwargs.items()}
        out.extend(local(func, tuple(at(index, value) for value in args), named) or ())
    return out or None


def local(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    """Apply an element-wise operation to the ranges; of a list operation, to lists of one."""
    if _meets_own_values(func, args, kwargs):
        args, kwargs = tree_map_only(RangeTensor, whole_value, (args, kwargs))
        return func(*args, **kwargs)
    lead = args[0] if args and isinstance(args[0], RangeTensor) else _first((args, kwargs))
    if lead is None:
        return func(*args, **kwargs)  # of a list, one that is not sharded
    targets = [value for value in written_values(func, args, kwargs) if isinstance(value, Tensor)]
    written = [target for target in targets if isinstance(target, RangeTensor)]
    if targets and not written:
        return _into_plain(func, args, kwargs)
    if any(target.dim() > 0 for target in targets if not isinstance(target, RangeTensor)):
        return whole(func, args, kwargs)
    if not _over_one_range(func, args, kwargs):
        return whole(func, args, kwargs)
    plain = [localise(value, lead) for value in args]
    named = {key: localise(value, lead) for key, value in kwargs.items() if key != "memory_format"}
    if any(value is NotImplemented for value in (*plain, *named.values())):
        return whole(func, args, kwargs)
    numbers = numbers_of(args, kwargs) if lead.numbers is not None else None
    out = func(*plain, **named)
    for tensor in written:
        tensor.local_shard.written(numbers)
    if written:
        named_outs = [kwargs[name] for name in outs_of(func) if name in kwargs]
        return (named_outs[0] if len(named_outs) == 1 else tuple(named_outs) or args[0]) if out is not None else None
    device = kwargs.get("device") or lead.local_shard.device
    if device.type == "cpu":
        device = torch.device("cpu")  # a number means nothing there, and no plain tensor has it
    origin = None if numbers is None else Origin(numbers)
    if isinstance(out, Tensor):
        return type(lead)(out, lead.local_shard.spec, device=device, origin=origin)
    return tree_map_only(Tensor, lambda value: type(lead)(value, lead.local_shard.spec, device=device, origin=origin), out)


def _first(values: Any) -> RangeTensor | None:
    return next((value for value in tree_leaves(values) if isinstance(value, RangeTensor)), None)


def localise(value: Any, lead: RangeTensor) -> Any:
    """An argument as the range that lies with ``lead``'s; NotImplemented where there is none."""
    if isinstance(value, RangeTensor):
        return _matching(value, lead)
    if isinstance(value, Tensor):
        if value.dim() > 0:
            if torch.broadcast_shapes(value.shape, lead.shape) != lead.shape:
                return NotImplemented
            value = lead.local_shard.spec.take(value)
        # With a range in host memory goes the number that a user's loop computed on the device.
        near = lead.local_shard.device == value.device and value.device.type != "cpu"
        return value.to(lead.local_shard.values.device) if near else value
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        found = [localise(item, lead) for item in value]
        return NotImplemented if any(item is NotImplemented for item in found) else found
    return value


def _near(value: RangeTensor, lead: RangeTensor) -> Tensor:
    """A range to be read where the lead's is: their tiers may differ."""
    values = value.local_shard.values
    return values if value is lead or lead.local_shard.device.type == "cpu" else values.to(lead.local_shard.values.device)


def _matching(value: RangeTensor, lead: RangeTensor) -> Any:
    if _same_range(value, lead):
        return _near(value, lead)
    return NotImplemented if value.shape != lead.shape else lead.local_shard.spec.take(whole_value(value))


def _same_range(value: RangeTensor, lead: RangeTensor) -> bool:
    """Both are the same range; False where the first can be read whole, which else is refused."""
    own, spec = value.local_shard.spec, lead.local_shard.spec
    if own is spec or own.key() == spec.key():
        return True
    if readable_whole(value):
        return False
    if value.shape != lead.shape:
        raise ShardedOpError(
            f"Cannot compute an element-wise operation on {spec.name} {tuple(lead.shape)} and {own.name} "
            f"{tuple(value.shape)}. Expected sharded tensors of the same shape, found two shapes. Use full_tensor() on both."
        )
    raise ShardedOpError(
        f"{spec.name} and {own.name} do not match. Expected the same range of elements on this rank, found "
        "different ones. Load at the world size that saved it, or use full values (attachment.state_dict())."
    )


# On whole values.


def outs_of(func: Overload) -> list[str]:
    """Names of the arguments that the overload writes its results to, whatever they held."""
    return [one.name for one in func._schema.arguments if one.kwarg_only and one.name in written_names(func)]


def _over_one_range(func: Overload, args: Args, kwargs: Kwargs) -> bool:
    """Results that go to a sharded ``out=`` are of its shape, and of the range that every sharded argument is of."""
    outs = [kwargs[name] for name in outs_of(func) if isinstance(kwargs.get(name), Tensor)] if kwargs else []
    if not outs:
        return True
    first, given = outs[0], [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    inputs = [value.shape for value in given if not any(value is out for out in outs)]
    if not isinstance(first, RangeTensor) or torch.broadcast_shapes(*inputs or [first.shape]) != first.shape:
        return False
    shard = first.local_shard
    others = [value.local_shard for value in given if isinstance(value, RangeTensor)]
    return all(one.spec.key() == shard.spec.key() and one.values.device == shard.values.device for one in others)


def _into_outs(func: Overload, args: Args, kwargs: Kwargs, outs: list[str]) -> Any:
    """Compute whole results apart from ``out=`` and keep this rank's ranges of them."""
    fresh = {name: new_like(kwargs[name]) for name in outs}
    made = func(*args, **{**kwargs, **fresh})
    for name, value in fresh.items():
        out = kwargs[name]
        if value.shape != out.shape:
            raise ShardedOpError(
                f"Cannot write {_name(func)} into {out.local_shard.spec.name}. Expected a result of shape "
                f"{tuple(out.shape)}, found {tuple(value.shape)}. Compute it separately, then copy_() it."
            )
    for name, value in fresh.items():
        kwargs[name].copy_(value)
    return kwargs[outs[0]] if isinstance(made, Tensor) else tuple(kwargs.get(name) for name in outs_of(func))


def new_like(tensor: Tensor) -> Tensor:
    """A plain tensor of the shape, strides, dtype and device that a sharded one shows."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _into_plain(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    """An element-wise operation that writes whole tensors and reads ranges.  Collective."""

    def read(value: RangeTensor) -> Tensor:
        if value.local_shard.owner is None:
            # What torch copies to save it must stay the ranges that it is.
            copies = func is aten.copy_.default
            if copies and _called_by(lambda frame: frame.f_globals.get("__name__", "").startswith(_COPIES_STATES)):
                raise ShardedOpError(
                    f"Cannot copy the sharded tensor of {value.local_shard.spec.name} {tuple(value.shape)} into a plain "
                    "tensor. Expected the whole value, found a gradient or an optimizer state, of which this rank has a range. "
                    "Copy its full_tensor(), on every rank. torch.distributed.checkpoint.async_save of torch 2.8 copies states "
                    "like this and needs a newer torch; until then use torch.distributed.checkpoint.save, or "
                    "attachment.save(folder, optimizer, wait=False)."
                )
            if not outs_of(func):
                _check_shapes(func, args, kwargs)
        return whole_value(value)

    plain, named = tree_map_only(RangeTensor, read, (args, kwargs))
    return func(*plain, **named)


def whole_value(tensor: RangeTensor) -> Tensor:
    """All of it; a parameter as it is gathered, where that has its dtype.  Collective, but of what is gathered already."""
    gathered = _gathered(tensor)
    return tensor.full_tensor() if gathered is None or gathered.dtype != tensor.dtype else gathered


def _gathered(tensor: RangeTensor) -> Tensor | None:
    """The parameter that the tensor is, as it is gathered; None of anything else."""
    shard = tensor.local_shard
    return None if shard.owner is None else whole_of(shard.owner.view(shard.spec.index).detach())


def whole(func: Overload, args: Args, kwargs: Kwargs) -> Any:
    """Read parameters whole; refuse anything that would need the whole of a gradient or a state, or write more than a range."""
    outs = [name for name in outs_of(func) if isinstance(kwargs.get(name), RangeTensor)] if kwargs else []
    if outs:
        return _into_outs(func, args, kwargs, outs)
    for value in written_values(func, args, kwargs):
        if isinstance(value, RangeTensor):
            _check_shapes(func, args, kwargs)
            refuse(func, value, writes=True)
    gathered: list[tuple[Tensor, tuple[ParamShard, ...]]] = []

    def read(value: RangeTensor) -> Tensor:
        if not readable_whole(value):
            _check_shapes(func, args, kwargs)
            refuse(func, value)
        view = _gathered(value)
        if view is None:
            return value.full_tensor()
        gathered.append((view, (value.local_shard.spec,)))
        return view

    plain, named = tree_map_only(RangeTensor, read, (args, kwargs))
    return _read_only(func(*plain, **named), gathered)


def _name(func: Overload) -> str:
    return str(func._schema.name.split("::")[1])


def refuse(func: Overload, tensor: RangeTensor, *, writes: bool = False) -> NoReturn:
    """Raise the error of an operation that needs more than a range."""
    shard = tensor.local_shard
    if writes and shard.owner is not None:
        advice = "To write it, use `with attachment.gathered(parameter, write=True):`, or copy_() the whole value."
    elif writes:
        advice = "To write it, assign (tensor[index] = value), or copy_() the whole value."
    elif stepping():
        advice = "Its optimizer needs whole parameters. Use one that updates each element by itself (AdamW, SGD)."
    elif shard.origin is not None:
        advice = "It was changed in place with values of this rank's own. Compute with the parameter's full_tensor()."
    else:
        advice = (
            "It is a gradient or an optimizer state. Read its full_tensor(), on every rank; to change rows of it, assign them: "
            "tensor[index] = value."
        )
    raise ShardedOpError(
        f"Cannot compute {_name(func)} on the sharded tensor of {shard.spec.name} {tuple(tensor.shape)}. Expected an "
        f"element-wise operation or a total, because a rank has a range of it; found one that needs whole rows or matrices. "
        f"{advice}"
    )


def _check_shapes(func: Overload, args: Args, kwargs: Kwargs) -> None:
    """An element-wise operation whose tensors do not go together is not one that needs whole rows."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not elementwise(func) or len(tensors) < 2 or all(isinstance(value, RangeTensor) for value in tensors):
        return
    found = next(value for value in tensors if isinstance(value, RangeTensor))
    into = tensors[0].shape if func._schema.is_mutable else None
    try:
        shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    except RuntimeError:
        shape = None
    if shape is None or into not in (None, shape):
        shapes = ", ".join(str(tuple(value.shape)) for value in tensors)
        raise ShardedOpError(
            f"Cannot compute {_name(func)} with a gradient or a state of {found.local_shard.spec.name} {tuple(found.shape)}. "
            f"Expected tensors of one shape, found {shapes}. Check states that were loaded or made for another parameter."
        )


class ReadOnly(torch.Tensor):
    """A gathered value read outside a forward, or a view of one: writing to it would be lost, so it is refused."""

    #: The same memory, of values of these parameters.
    _plain: Tensor
    _specs: tuple[ParamShard, ...]

    @classmethod
    def of(cls, plain: Tensor, specs: tuple[ParamShard, ...]) -> ReadOnly:
        made = plain.as_subclass(cls)
        made._plain, made._specs = plain, specs
        for spec in specs:
            spec.views[id(made)] = made
        return made

    def leave(self) -> None:
        """Keep the values from now on, whatever the parameter gets."""
        self._plain = self._plain.clone()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is _SET_DATA:
                raise _written_to_a_copy("data = ...")
            if func not in _OF_MEMORY or not isinstance(args[0], ReadOnly):
                return func(*args, **(kwargs or {}))
            out = func(args[0]._plain, *args[1:], **(kwargs or {}))
            if func in (Tensor.numpy, Tensor.__array__):
                out.setflags(write=False)
            return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Overload, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, ReadOnly) for value in written_values(func, args, kwargs)):
            raise _written_to_a_copy(_name(func))
        sources = [(value._plain, value._specs) for value in tree_leaves((args, kwargs)) if isinstance(value, ReadOnly)]
        plain, named = tree_map_only(ReadOnly, lambda value: value._plain, (args, kwargs))
        return _read_only(func(*plain, **named), sources)


_PROPERTIES: Any = Tensor
_SET_DATA = _PROPERTIES.data.__set__
#: What torch does not do for a class with a dispatch of its own.
_OF_MEMORY = {Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__repr__, Tensor.__deepcopy__, Tensor.__reduce_ex__}


def _written_to_a_copy(name: str) -> ShardedOpError:
    return ShardedOpError(
        f"{name} writes to a gathered value. Expected reading, found a write that would be lost. Write to the parameter "
        "itself, or use `with attachment.gathered(parameter, write=True):`."
    )


def _read_only(out: Any, sources: Iterable[tuple[Tensor, tuple[ParamShard, ...]]]) -> Any:
    """What was read: in the memory of gathered values it is read-only, a new value is plain."""
    specs: dict[int, tuple[ParamShard, ...]] = {}
    for plain, of in sources:
        memory = plain.untyped_storage()._cdata
        specs[memory] = (*specs.get(memory, ()), *of)

    def mark(value: Tensor) -> Tensor:
        of = specs.get(value.untyped_storage()._cdata)
        return value if of is None else ReadOnly.of(value, of)

    return tree_map_only(Tensor, mark, out) if specs else out
