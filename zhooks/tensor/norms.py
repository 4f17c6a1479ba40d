"""Norms of sharded tensors: lazy, so that they are combined over the ranks once, however many tensors there are.

That makes ``torch.nn.utils.clip_grad_norm_`` one all-reduce and not one a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

from offload.errors import ShardedOpError
from zhooks.comm import norms_of_runs
from zhooks.layout import PP, SHARD, TP
from zhooks.tensor.elementwise import in_compute_memory, whole
from zhooks.tensor.group import ShardGroup
from zhooks.tensor.sharded import RangeTensor
from zhooks.tensor.stored import Args, Kwargs, OpenedTensor, Overload

aten = torch.ops.aten
#: A sum, or one for each norm of a list, and who combines it.
Term = tuple[ShardGroup, Tensor]


def norm(func: Overload, args: Args, kwargs: Kwargs) -> Tensor:
    """The norm of one tensor, not combined over the ranks yet where they share it."""
    tensor, given = args[0], _norm_arguments(func, args, kwargs)
    if not isinstance(tensor, RangeTensor) or not _of_all(tensor, given["dim"]):
        return cast(Tensor, whole(func, args, kwargs))
    (made,) = _norms([tensor], 2.0 if given["ord"] is None else float(given["ord"]), given["dtype"])
    made = made.reshape((1,) * tensor.dim()) if given["keepdim"] else made
    return _into(kwargs["out"], made) if "out" in kwargs else made


def foreach_norm(func: Overload, args: Args, kwargs: Kwargs) -> list[Tensor] | None:
    """The same of a list; of ranges in the memory they are computed in by one list operation for each kind of them."""
    named = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    tensors, ord, dtype = named["self"], float(named.get("ord", 2)), named.get("dtype")
    norms: dict[int, Tensor] = {}
    batches: dict[Hashable, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if not isinstance(tensor, RangeTensor):
            norms[at] = torch.linalg.vector_norm(tensor, ord, dtype=dtype)
        elif in_compute_memory(tensor):
            batches.setdefault((tensor.local_shard.spec.group.ranks(), tensor.dtype, tensor.local_shard.device), []).append(at)
        else:
            batches[at] = [at]  # others would take memory for all of them at once
    for places in batches.values():
        norms |= zip(places, _norms([tensors[at] for at in places], ord, dtype), strict=True)
    made = [norms[at] for at in range(len(tensors))]
    if "out" not in kwargs:
        return made
    for out, one in zip(kwargs["out"], made, strict=True):
        _into(out, one)
    return None


def _norms(tensors: Sequence[RangeTensor], ord: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norms of tensors that the same ranks share, of one dtype and device.

    Args:
        dtype: what values are converted to before they are summed; None: of 16 bits fp32, else their own.
    """
    for tensor in tensors:
        tensor.check_numbers()
    shards = [tensor.local_shard for tensor in tensors]
    on, own_dtype, group = shards[0].device, tensors[0].dtype, shards[0].spec.group
    ranges = [shard.values.to(on) for shard in shards]  # as in `aten._total`
    if not (group.sharded or group.spans(TP) or group.spans(PP)):
        return list(torch._foreach_norm(ranges, ord, dtype=dtype))
    # What all ranks of the tp axis hold alike counts on the first of them.
    again = not group.first(TP) and _combination(ord) == "sum"
    pairs = zip(ranges, shards, strict=True)
    counted = [bool(local.numel()) and not (again and shard.spec.place is None) for local, shard in pairs]
    values = [local for local, counts in zip(ranges, counted, strict=True) if counts]
    half = own_dtype in (torch.float16, torch.bfloat16)
    sums = torch.float32 if half and dtype is None else dtype
    if half and sums == torch.float32 and on.type == "cpu":
        # The CPU converts all values before it sums them, and that copy is a buffer like others: bounded.
        made = [_over_runs(norms_of_runs(local, ord, group.buffer_nbytes), ord) for local in values]
    else:
        made = list(torch._foreach_norm(values, ord, dtype=sums)) if values else []
    if not all(counted):
        nothing = torch.full((), _nothing(ord), dtype=_real(sums or own_dtype), device=on)
        rest = iter(made)
        made = [next(rest) if counts else nothing for counts in counted]
    uncombined = _Uncombined([(group, _power(torch.stack(made), ord))], ord, _real(dtype or own_dtype))
    return [PartialNorm(uncombined, at) for at in range(len(tensors))]


def _over_runs(norms: list[Tensor], ord: float) -> Tensor:
    return norms[0] if len(norms) == 1 else _root(_combine(_power(torch.stack(norms), ord), ord), ord)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _norm_arguments(func: Overload, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """What a call of any overload of a norm says of order, dimensions and dtype."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    ord = named["ord"] if "ord" in named else named.get("p", 2)
    return {"ord": ord, "dim": named.get("dim"), "keepdim": named.get("keepdim", False), "dtype": named.get("dtype")}


def _of_all(tensor: Tensor, dim: Any) -> bool:
    """The norm is over every dimension."""
    if dim in (None, [], ()):
        return True
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return {one % tensor.dim() for one in dims} == set(range(tensor.dim())) if tensor.dim() else True


def _into(out: Tensor, made: Tensor) -> Tensor:
    """Write a result as torch's ``out=`` does: what it is written to gets its shape."""
    return cast(Tensor, aten.abs.out(made, out=out))


class _Uncombined:
    """The norms of a list, as sums to be combined over ranks; see Note [Filled at the first use].

    Attributes:
        terms: vectors with an element a norm, one for each set of ranks that combines it; elements of others count for nothing.
        plain: norms of plain tensors among them, which only these ranks' own code can have made alike.
        memory: what the combined norms are written to, a vector.
        stands: nobody can have changed the memory, so that the terms still say what is in it, or will be.
    """

    def __init__(self, terms: Sequence[Term], ord: float, dtype: torch.dtype, plain: Sequence[Tensor] = ()) -> None:
        self.terms, self.ord, self.plain = tuple(terms), ord, tuple(plain)
        # What reads the memory before it is filled, past torch's dispatch (an extension in C++), shall not find a number.
        self.memory = torch.full_like(terms[0][1], math.nan, dtype=dtype)
        self.stands, self.filled = True, False

    def fill(self) -> None:
        """Have the norms in memory.  Collective where they are not there yet."""
        if not self.filled:
            terms = [(group, powers.clone()) for group, powers in self.terms]
            self.memory.copy_(self._combined(terms, (SHARD, TP)))
            self.filled = True

    def of_one(self, at: int) -> Tensor:
        """One of the norms, the same on every rank.  Collective."""
        return self._combined([(group, powers[at].clone()) for group, powers in self.terms], (SHARD, TP))

    def total(self) -> Tensor:
        """The norm of all of them: the whole model's, as other stages have tensors of their own.  Collective."""
        terms = [(group, _combine(powers, self.ord)) for group, powers in self.terms]
        return self._combined(_with_absent(terms, self.ord), (SHARD, TP, PP))

    def _combined(self, terms: Sequence[Term], axes: tuple[str, ...]) -> Tensor:
        """What the terms add up to over the ranks of these axes; writes to them.

        Raises:
            ShardedOpError: ranks have other plain tensors among them.
        """
        self._check_plain()
        for group, powers in terms:
            group.all_reduce(powers, _combination(self.ord), axes)
        vectors = [powers for _, powers in terms]
        summed = vectors[0] if len(vectors) == 1 else _combine(torch.stack(vectors), self.ord, dim=0)
        return _root(summed, self.ord).to(self.memory.dtype)

    def _check_plain(self) -> None:
        if not self.plain:
            return
        mine = torch.stack([norm.to(torch.float64) for norm in self.plain])
        both = torch.cat([mine, -mine])
        self.terms[0][0].all_reduce(both, "max", (SHARD, TP))
        most, least = both.chunk(2)
        if not torch.equal(most.nan_to_num(), (-least).nan_to_num()):
            raise ShardedOpError(
                "Cannot compute the norm over gradients of attached and other parameters. Expected the others to be the same "
                f"on every rank, found norms of {_few(mine)} here and up to {_few(most)} elsewhere: what is not attached "
                "([units] ignore) is not reduced. Reduce them before you clip (torch.distributed.all_reduce), or clip them "
                "separately."
            )


class PartialNorm(OpenedTensor):
    """A norm, or a vector of them: |x|^p summed (or maximised) over this rank's ranges, still to be combined.

    What all ranks of the tp axis hold alike counts on the first of them, so that every element is summed over both axes.

    Args:
        sum: norms that were computed at once.
        at: which of them this is; None: all, a vector.

    Note: [Filled at the first use]
        It is a tensor with memory like any other, in which its values are missing.  Stacking, ``detach`` and the norm of a
        stack need the terms alone.  Anything else first combines the terms and fills the memory, once, and then works on that
        memory: what is done in place, through a view or an alias, or as ``out=``, is done to the norm itself.  From the first
        write or view on, the terms no longer count.
    """

    _sum: _Uncombined
    _at: int | None

    @staticmethod
    def __new__(cls, sum: _Uncombined, at: int | None = None) -> PartialNorm:
        norm: PartialNorm = torch.Tensor._make_subclass(cls, sum.memory if at is None else sum.memory[at])
        norm._sum, norm._at = sum, at
        return norm

    def opened(self) -> Tensor:
        """Its memory as a plain tensor, filled."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._sum.fill()
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
            return empty.set_(self.untyped_storage(), int(self.storage_offset()), tuple(self.shape), self.stride())

    def wrote(self, values: Tensor) -> None:
        """It has the memory and shape of ``values`` from now on (``unsqueeze_``, ``resize_``, ``out=``)."""
        self._sum.stands = False
        with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
            self.set_(values.untyped_storage(), int(values.storage_offset()), tuple(values.shape), values.stride())

    plain = opened

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if self._sum.filled:
            return repr(self.opened())
        return f"PartialNorm(shape={tuple(self.shape)}, ord={self._sum.ord}): not combined over the ranks yet"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func in _OF_MEMORY or func is _SET_DATA:
            args[0]._sum.stands = False
            args = (args[0] if func is _SET_DATA else args[0].opened(), *map(_values, args[1:]))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Overload, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if func is aten.stack.default and all(part.dim() == 0 for part in first):
            return _stack(func, args, kwargs)
        if isinstance(first, PartialNorm) and first._sum.stands:
            if func is aten.detach.default or func is aten.alias.default:
                return PartialNorm(first._sum, first._at)
            if func in (aten.linalg_vector_norm.default, aten.linalg_vector_norm.out):
                given = _norm_arguments(func, args, kwargs)
                # Of order 0, torch's norm of norms counts those that are not zero, not the elements behind them.
                if given["ord"] == first._sum.ord and given["ord"] != 0 and _of_all(first, given["dim"]):
                    total = first._sum.total() if first._at is None else first._sum.of_one(first._at)
                    total = total.to(given["dtype"] or first.dtype)
                    total = total.reshape((1,) * first.dim()) if given["keepdim"] else total
                    return _into(kwargs["out"], total) if "out" in kwargs else total
        return cls.on_values(func, args, kwargs)


# What reads memory past torch's dispatch, or copies it.
_OF_MEMORY = frozenset(
    {
        Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage,
        Tensor.__dlpack__, Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.share_memory_,
    }
)  # fmt: skip
_SET_DATA = cast(Any, Tensor.data).__set__


def _stack(func: Overload, args: Args, kwargs: Kwargs) -> Tensor:
    """Norms one by one; those that the same ranks combine are one term."""
    parts = args[0]
    sums = [part._sum if isinstance(part, PartialNorm) and part._sum.stands else None for part in parts]
    standing = [one for one in sums if one is not None]
    if not standing or any(one.ord != standing[0].ord or len(one.terms) > 1 or one.plain for one in standing):
        return cast(Tensor, PartialNorm.on_values(func, args, kwargs))
    lead, (leading, powers) = standing[0], standing[0].terms[0]
    plain = {at: _values(part) for at, part in enumerate(parts) if sums[at] is None}
    terms: list[Term] = []
    if all(one is lead for one in sums) and [part._at for part in parts] == list(range(len(powers))):
        terms = [(leading, powers)]
    else:
        nothing = torch.full_like(powers[0], _nothing(lead.ord))
        groups: dict[Hashable, ShardGroup] = {}
        for some in standing:
            groups.setdefault(some.terms[0][0].ranks(), some.terms[0][0])
        for key, group in groups.items():
            own = [nothing] * len(parts)
            for at, one in enumerate(sums):
                if one is None and group is leading:
                    own[at] = _known(plain[at], lead)
                elif one is not None and one.terms[0][0].ranks() == key:
                    own[at] = one.terms[0][1][parts[at]._at]
            terms.append((group, torch.stack([power.to(powers.dtype) for power in own])))
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    return PartialNorm(_Uncombined(terms, lead.ord, dtype, list(plain.values())))


def _values(part: Any) -> Any:
    return part.opened() if isinstance(part, PartialNorm) else part


def _with_absent(terms: list[Term], ord: float) -> list[Term]:
    """Terms in one order on all ranks, with those of experts that got no gradient here and may have elsewhere."""
    watch = terms[0][0].watch
    apart = {group.ranks(): group for group in (() if watch is None else watch.apart())}
    here = {group.ranks(): powers for group, powers in terms}
    if not apart:
        return terms
    nothing = torch.full_like(terms[0][1], _nothing(ord))
    others = [(group, powers) for group, powers in terms if group.ranks() not in apart]
    return [*others, *((group, here.get(key, nothing)) for key, group in apart.items())]


def _known(norm: Tensor, lead: _Uncombined) -> Tensor:
    """The norm of a tensor every rank of a stage holds whole: only the first rank adds it to a sum."""
    power, group = _power(norm, lead.ord), lead.terms[0][0]
    if _combination(lead.ord) == "sum" and not (group.first(SHARD) and group.first(TP)):
        return torch.zeros_like(power)
    return power


def _few(values: Tensor) -> str:
    return ", ".join(f"{value:.6g}" for value in values[:3].tolist())


def _nothing(ord: float) -> float:
    return math.inf if ord == -math.inf else 0.0


def _combination(ord: float) -> str:
    return {math.inf: "max", -math.inf: "min"}.get(ord, "sum")


def _combine(powers: Tensor, ord: float, dim: int | None = None) -> Tensor:
    reductions: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
    return reductions[_combination(ord)](powers) if dim is None else reductions[_combination(ord)](powers, dim=dim)


def _power(norm: Tensor, ord: float) -> Tensor:
    return norm if math.isinf(ord) or ord in (0, 1) else norm.square() if ord == 2 else norm.pow(ord)


def _root(powers: Tensor, ord: float) -> Tensor:
    return powers if math.isinf(ord) or ord in (0, 1) else powers.sqrt() if ord == 2 else powers.pow(1.0 / ord)
