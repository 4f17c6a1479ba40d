"""Element-wise work on one rank's ranges, and what an operation falls back to: the gathered value, or a refusal by name.

``aten.py`` and ``totals.py`` call it, below autograd.  It never communicates, but for what a gathered value
asks for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.errors import ShardedOpError
from offload.store import BlockRange
from zhooks.layout import whole_of
from zhooks.tensor.range_tensor import Origin, ParamShard, RangeTensor
from zhooks.tensor.written import written_names, written_values

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


def elementwise(func: Any) -> bool:
    """Each element of the result comes from one element of every argument."""
    return func in _LOCAL or torch.Tag.pointwise in func.tags


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


def _copies_state() -> bool:
    """torch copies states to save them; the copies must be ranges as they are."""
    return _called_by(lambda frame: frame.f_globals.get("__name__", "").startswith(_COPIES_STATES))


def _called_by(found: Callable[[FrameType], bool]) -> bool:
    """One of the frames below the caller's is such a one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not found(frame):
        frame = frame.f_back
    return frame is not None


def numbers_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
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


def _meets_own_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A new value of parameters or expressions and of what is this rank's own; see Note [Expressions]."""
    if func._schema.is_mutable or (args and isinstance(args[0], (list, tuple))):
        return False
    values = (*args, *kwargs.values())
    sharded = [value for value in values if isinstance(value, RangeTensor)]
    own: tuple[type, ...] = (int, float, complex, Tensor) if all(value.numel() == 1 for value in sharded) else (Tensor,)
    meets = any(isinstance(value, own) and not isinstance(value, (RangeTensor, bool)) for value in values)
    return meets and all(value.numbers is not None for value in sharded) and not stepping()


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A list operation over ranges on disk, of which all at once may not fit in memory, or on several tiers."""
    count = len(args[0])

    def at(index: int, value: Any) -> Any:
        return [value[index]] if type(value) in (list, tuple) and len(value) == count else value

    out: list[Any] = []
    for index in range(count):
        named = {key: at(index, value) for key, value in kwargs.items()}
        out.extend(local(func, tuple(at(index, value) for value in args), named) or ())
    return out or None


def _scattered(tensors: Any) -> bool:
    """Ranges on disk, or ranges in different memories: no one operation may have them all."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, RangeTensor)]
    apart = any(t._on.type != "cpu" for t in sharded) and len({t._local.device for t in sharded if not t._paged}) > 1
    return apart or any(t._paged for t in sharded)


def writes_only_self(func: Any) -> bool:
    """The overload changes its first argument and no other."""
    return written_names(func) == {argument.name for argument in func._schema.arguments[:1]}


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The short way of an optimizer's inner loop: one tensor changed by others of its own range, and by numbers."""
    plain = own_ranges(args, kwargs)
    if plain is None:
        return local(func, args, kwargs)
    func(*plain, **kwargs)
    args[0]._written(None if args[0]._origin is None else numbers_of(args, kwargs))
    return args[0]


def own_ranges(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The ranges in place of tensors that are all of the first one's range; None where one is not, or lies elsewhere."""
    lead = args[0]
    if not isinstance(lead, RangeTensor):
        return None
    for value in kwargs.values():
        if isinstance(value, Tensor):
            return None
    spec = lead._spec
    plain, near = [lead._local], lead._on.type == "cpu"
    for value in args[1:]:
        if getattr(value, "_spec", None) is spec:
            plain.append(value._local if near else _near(value, lead))
        elif isinstance(value, Tensor) and (value.dim() > 0 or value.device != plain[0].device):
            return None
        else:
            plain.append(value)
    return plain


def in_compute_memory(tensor: RangeTensor) -> bool:
    """The range is in the memory that it is computed in: in no block of a store, and in host memory only on the CPU."""
    return type(tensor._at) is not BlockRange and (tensor._on.type == "cpu" or tensor._at.device == tensor._on)


@cache
def _positions_written(func: Any) -> tuple[int, ...]:
    return tuple(number for number, one in enumerate(func._schema.arguments) if one.name in written_names(func))


def lists_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same of a foreach or fused optimizer: lists of ranges that all are in the memory they are computed in."""
    if any(isinstance(value, (Tensor, list, tuple)) for value in kwargs.values()):
        return local(func, args, kwargs)
    leads, plain = args[0], list[Any]()
    if not all(isinstance(lead, RangeTensor) and in_compute_memory(lead) for lead in leads):
        return local(func, args, kwargs)
    memories = [None if lead._on.type == "cpu" else lead._on for lead in leads]
    for values in args:
        if isinstance(values, Tensor) and (values.dim() > 0 or any(memory not in (None, values.device) for memory in memories)):
            return local(func, args, kwargs)
        if not isinstance(values, (list, tuple)) or not values:
            plain.append(values)
            continue
        if len(values) != len(leads):
            return local(func, args, kwargs)
        ranges: list[Any] = []
        for value, lead, memory in zip(values, leads, memories, strict=True):
            found = value
            if getattr(value, "_spec", None) is lead._spec:
                found = value._at
                if type(found) is BlockRange or (memory is not None and found.device != memory):
                    return local(func, args, kwargs)
            elif isinstance(value, Tensor) and (value.dim() > 0 or (memory is not None and value.device != memory)):
                return local(func, args, kwargs)
            ranges.append(found)
        plain.append(ranges)
    func(*plain, **kwargs)
    for position in _positions_written(func):
        for written in args[position] if position < len(args) else ():
            if isinstance(written, RangeTensor):
                written._written()
    return None


def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an element-wise operation to the ranges."""
    if _meets_own_values(func, args, kwargs):
        args, kwargs = tree_map_only(RangeTensor, whole_value, (args, kwargs))
        return func(*args, **kwargs)
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
    targets = [value for value in written_values(func, args, kwargs) if isinstance(value, Tensor)]
    written = [target for target in targets if isinstance(target, RangeTensor)]
    if targets and not written:
        return _into_plain(func, args, kwargs)
    if any(target.dim() > 0 for target in targets if not isinstance(target, RangeTensor)):
        return whole(func, args, kwargs)
    if not _over_one_range(func, args, kwargs):
        return whole(func, args, kwargs)
    leads = _leads(args, kwargs)
    lead = leads[0]
    plain = [localise(value, lead, leads) for value in args]
    named = {key: localise(value, lead, leads) for key, value in kwargs.items() if key != "memory_format"}
    if any(value is NotImplemented for value in (*plain, *named.values())):
        return whole(func, args, kwargs)
    assert lead._on.type == "cpu" or len({tensor._local.device for tensor in written}) < 2, f"{func} writes on two tiers"
    numbers = numbers_of(args, kwargs) if lead.numbers is not None else None
    out = func(*plain, **named)
    for tensor in written:
        tensor._written(numbers)
    if written:
        named_outs = [kwargs[name] for name in outs_of(func) if name in kwargs]
        return (named_outs[0] if len(named_outs) == 1 else tuple(named_outs) or args[0]) if out is not None else None
    device = kwargs.get("device") or lead._on
    if device.type == "cpu":
        device = torch.device("cpu")  # a number means nothing there, and no plain tensor has it
    origin = None if numbers is None else Origin(numbers)
    if isinstance(out, Tensor):
        return type(lead)(out, lead._spec, device=device, origin=origin)
    if isinstance(out, (list, tuple)):
        pairs = zip(out, leads, strict=False)
        return type(out)(type(of)(item, of._spec, device=device, origin=origin) for item, of in pairs)
    return out


def _mixed(args: tuple[Any, ...]) -> list[bool] | None:
    """Which of a list operation's tensors are sharded, where some are and some are not."""
    if not args or not isinstance(args[0], (list, tuple)):
        return None
    mask = [isinstance(value, RangeTensor) for value in args[0]]
    return mask if any(mask) and not all(mask) else None


def _side(args: tuple[Any, ...], mask: list[bool], side: bool) -> list[Any]:
    """The arguments of the sharded tensors alone, or of the others."""
    return [
        [item for item, sharded in zip(value, mask, strict=True) if sharded is side]
        if isinstance(value, (list, tuple)) and len(value) == len(mask)
        else value
        for value in args
    ]


def _leads(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RangeTensor]:
    """The sharded tensors that say what range this is: the first, or the first list's, one an element."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, RangeTensor):
            return [value]
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, RangeTensor) for item in value):
            return list(value)
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            found = [item for item in value if isinstance(item, RangeTensor)]
            if found:
                return found
    raise AssertionError("an operation without a sharded argument was dispatched here")


def localise(value: Any, lead: RangeTensor, leads: list[RangeTensor]) -> Any:
    """An argument as the range that lies beside ``lead``'s; NotImplemented where there is none."""
    if isinstance(value, RangeTensor):
        return _matching(value, lead)
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return _beside(value, lead)
        if torch.broadcast_shapes(value.shape, lead.shape) != lead.shape:
            return NotImplemented
        return _beside(lead._spec.take(value), lead)
    if isinstance(value, (list, tuple)) and value and any(isinstance(item, Tensor) for item in value):
        if len(value) == len(leads):
            return [localise(item, of, leads) for item, of in zip(value, leads, strict=True)]
        return [localise(item, lead, leads) for item in value]
    return value


def _beside(value: Tensor, lead: RangeTensor) -> Tensor:
    """A plain tensor where the range is: beside one in host memory, the number a user's loop computed on the device."""
    if lead._on == value.device and value.device.type != "cpu":
        return value.to(lead._local.device)
    return value


def _near(value: RangeTensor, lead: RangeTensor) -> Tensor:
    """A range to be read where the lead's is: their tiers may differ."""
    return value._local if value is lead or lead._on.type == "cpu" else value._local.to(lead._local.device)


def _matching(value: RangeTensor, lead: RangeTensor) -> Any:
    if value._spec is lead._spec or value._spec.key() == lead._spec.key():
        return _near(value, lead)
    if value.shape != lead.shape and readable_whole(value):
        return NotImplemented
    if value.shape != lead.shape:
        raise ShardedOpError(
            f"Cannot compute an element-wise operation on {lead._spec.name} {tuple(lead.shape)} and {value._spec.name} "
            f"{tuple(value.shape)}. Expected sharded tensors of the same shape, found two shapes. Use full_tensor() on both."
        )
    if readable_whole(value):
        return lead._spec.take(whole_value(value))
    raise ShardedOpError(
        f"{lead._spec.name} and {value._spec.name} do not match. Expected the same range of elements on this rank, found "
        "different ones. Load at the world size that saved it, or use full values (attachment.state_dict())."
    )


def outs_of(func: Any) -> list[str]:
    """Names of the arguments that the overload writes its results to, whatever they held."""
    return [one.name for one in func._schema.arguments if one.kwarg_only and one.name in written_names(func)]


def _over_one_range(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Results that go to a sharded ``out=`` are of its shape, and of the range that every sharded argument is of."""
    outs = [kwargs[name] for name in outs_of(func) if isinstance(kwargs.get(name), Tensor)] if kwargs else []
    if not outs:
        return True
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    first = outs[0]
    inputs = [value.shape for value in given if not any(value is out for out in outs)]
    return (
        isinstance(first, RangeTensor)
        and torch.broadcast_shapes(*inputs or [first.shape]) == first.shape
        and all(
            value._spec.key() == first._spec.key() and value._local.device == first._local.device
            for value in given
            if isinstance(value, RangeTensor)
        )
    )


def _into_outs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[str]) -> Any:
    """Compute whole results beside ``out=`` and keep this rank's ranges of them."""
    beside: dict[str, Tensor] = {}
    for name in outs:
        out = kwargs[name]
        fresh = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        beside[name] = fresh
    made = func(*args, **{**kwargs, **beside})
    for name, value in beside.items():
        out = kwargs[name]
        if value.shape != out.shape:
            raise ShardedOpError(
                f"Cannot write {func._schema.name.split('::')[1]} into {out._spec.name}. Expected a result of shape "
                f"{tuple(out.shape)}, found {tuple(value.shape)}. Compute it separately, then copy_() it."
            )
    for name, value in beside.items():
        kwargs[name].copy_(value)
    if isinstance(made, Tensor):
        return kwargs[outs[0]]
    return tuple(kwargs.get(name) for name in outs_of(func))


def _into_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An element-wise operation that writes whole tensors and reads ranges, in lists one by one.  Collective."""
    first = args[0]
    if type(first) in (list, tuple) and len(first) > 1:
        return _one_by_one(func, args, kwargs)

    def read(value: RangeTensor) -> Tensor:
        if value._bound is None:
            if func is aten.copy_.default and _copies_state():
                raise _copied_out(value)
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
    return None if tensor._bound is None else whole_of(tensor._bound.view(tensor._spec.index).detach())


def whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read parameters whole; refuse anything that would need the whole of a gradient or a state, or write more than a range."""
    outs = [name for name in outs_of(func) if isinstance(kwargs.get(name), RangeTensor)] if kwargs else []
    if outs:
        return _into_outs(func, args, kwargs, outs)
    for value in written_values(func, args, kwargs):
        if isinstance(value, RangeTensor):
            _check_shapes(func, args, kwargs)
            return refuse(func, value, writes=True)
    gathered: list[tuple[Tensor, tuple[ParamShard, ...]]] = []

    def swap(value: Any) -> Any:
        if not isinstance(value, RangeTensor):
            return value
        if not readable_whole(value):
            _check_shapes(func, args, kwargs)
            return refuse(func, value)
        view = _gathered(value)
        if view is None:
            return value.full_tensor()
        gathered.append((view, (value._spec,)))
        return view

    plain, named = tree_map_only(Tensor, swap, (args, kwargs))
    return _read_only(func(*plain, **named), gathered)


def readable_whole(tensor: RangeTensor) -> bool:
    """A parameter, or an expression outside of an optimizer's step; of a gradient or a state only the range can be read."""
    of_parameter = tensor._bound is not None or isinstance(tensor, torch.nn.Parameter)
    return of_parameter or (tensor.numbers is not None and not stepping())


def _copied_out(tensor: RangeTensor) -> ShardedOpError:
    return ShardedOpError(
        f"Cannot copy the sharded tensor of {tensor._spec.name} {tuple(tensor.shape)} into a plain tensor. Expected the whole "
        "value, found a gradient or an optimizer state, of which this rank has a range. Copy its full_tensor(), on every rank. "
        "torch.distributed.checkpoint.async_save of torch 2.8 copies states like this and needs a newer torch; until then use "
        "torch.distributed.checkpoint.save, or attachment.save(folder, optimizer, wait=False)."
    )


def refuse(func: Any, tensor: RangeTensor, *, writes: bool = False) -> Any:
    """Raise the error of an operation that needs more than a range."""
    name, spec = func._schema.name.split("::")[1], tensor._spec
    if writes and tensor._bound is not None:
        advice = "To write it, use `with attachment.gathered(parameter, write=True):`, or copy_() the whole value."
    elif writes:
        advice = "To write it, assign (tensor[index] = value), or copy_() the whole value."
    elif stepping():
        advice = "Its optimizer needs whole parameters. Use one that updates each element by itself (AdamW, SGD)."
    elif tensor._origin is not None:
        advice = "It was changed in place with values of this rank's own. Compute with the parameter's full_tensor()."
    else:
        advice = (
            "It is a gradient or an optimizer state. Read its full_tensor(), on every rank; to change rows of it, assign them: "
            "tensor[index] = value."
        )
    raise ShardedOpError(
        f"Cannot compute {name} on the sharded tensor of {spec.name} {tuple(tensor.shape)}. Expected an element-wise operation "
        f"or a total, because a rank has a range of it; found one that needs whole rows or matrices. {advice}"
    )


def _check_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
            f"Cannot compute {func._schema.name.split('::')[1]} with a gradient or a state of {found._spec.name} "
            f"{tuple(found.shape)}. Expected tensors of one shape, found {shapes}. Check states that were loaded or made for "
            "another parameter."
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
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
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
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, ReadOnly) for value in written_values(func, args, kwargs)):
            raise _written_to_a_copy(func._schema.name.split("::")[1])
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
