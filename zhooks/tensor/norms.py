"""Norms of sharded tensors: lazy, so that they are combined over the ranks once, however many tensors there are.

``aten.py`` calls ``norm`` and ``foreach_norm``; what they return makes ``torch.nn.utils.clip_grad_norm_`` one all-reduce and
not one a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.errors import ShardedOpError
from zhooks.comm import norms_of_runs
from zhooks.layout import PP, SHARD, TP
from zhooks.tensor.elementwise import in_compute_memory, whole
from zhooks.tensor.group import ShardGroup
from zhooks.tensor.range_tensor import RangeTensor
from zhooks.tensor.written import written_values

aten = torch.ops.aten
#: A sum, or one for each norm of a list, and who combines it.
Term = tuple[ShardGroup, Tensor]


@dataclass
class _Run:
    """Norms of a list that follow each other in one ``_Uncombined``; of ``sum`` None, plain ones by their place in the list."""

    sum: _Uncombined | None
    first: int
    count: int


def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The norm of one tensor, not combined over the ranks yet where they share it."""
    tensor, given = args[0], _norm_arguments(func, args, kwargs)
    if not isinstance(tensor, RangeTensor) or not _of_all(tensor, given["dim"]):
        return cast(Tensor, whole(func, args, kwargs))
    (made,) = _norms([tensor], 2.0 if given["ord"] is None else float(given["ord"]), given["dtype"])
    made = made.reshape((1,) * tensor.dim()) if given["keepdim"] else made
    return _into(kwargs["out"], made) if "out" in kwargs else made


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """The same of a list; of ranges in the memory they are computed in by one list operation for each kind of them."""
    named = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    tensors, ord, dtype = named["self"], float(named.get("ord", 2)), named.get("dtype")
    norms: dict[int, Tensor] = {}
    batches: dict[Hashable, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if not isinstance(tensor, RangeTensor):
            norms[at] = torch.linalg.vector_norm(tensor, ord, dtype=dtype)
        elif in_compute_memory(tensor):
            batches.setdefault((tensor._spec.group.ranks(), tensor.dtype, tensor._on), []).append(at)
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
    lead, group = tensors[0], tensors[0]._spec.group
    ranges = [tensor._local.to(tensor._on) for tensor in tensors]  # as in `total`
    if not (group.sharded or group.spans(TP) or group.spans(PP)):
        return list(torch._foreach_norm(ranges, ord, dtype=dtype))
    # What all ranks of the tp axis hold alike counts on the first of them.
    again = not group.first(TP) and _combination(ord) == "sum"
    pairs = zip(ranges, tensors, strict=True)
    counted = [bool(local.numel()) and not (again and tensor._spec.place is None) for local, tensor in pairs]
    values = [local for local, counts in zip(ranges, counted, strict=True) if counts]
    half = lead.dtype in (torch.float16, torch.bfloat16)
    sums = torch.float32 if half and dtype is None else dtype
    if half and sums == torch.float32 and lead._on.type == "cpu":
        # The CPU converts all values before it sums them, and that copy is a buffer like others: bounded.
        made = [_over_runs(norms_of_runs(local, ord, group.buffer_nbytes), ord) for local in values]
    else:
        made = list(torch._foreach_norm(values, ord, dtype=sums)) if values else []
    if not all(counted):
        nothing = torch.full((), _nothing(ord), dtype=_real(sums or lead.dtype), device=lead._on)
        rest = iter(made)
        made = [next(rest) if counts else nothing for counts in counted]
    uncombined = _Uncombined([(group, _power(torch.stack(made), ord))], ord, _real(dtype or lead.dtype))
    return [PartialNorm(uncombined, at) for at in range(len(tensors))]


def _over_runs(norms: list[Tensor], ord: float) -> Tensor:
    return norms[0] if len(norms) == 1 else _root(_combine(_power(torch.stack(norms), ord), ord), ord)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _norm_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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


class PartialNorm(torch.Tensor):
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

    def _plain(self) -> Tensor:
        """Its memory as a plain tensor, filled."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._sum.fill()
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
            return empty.set_(self.untyped_storage(), int(self.storage_offset()), tuple(self.shape), self.stride())

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if self._sum.filled:
            return repr(self._plain())
        return f"PartialNorm(shape={tuple(self.shape)}, ord={self._sum.ord}): not combined over the ranks yet"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_MEMORY or func is _SET_DATA:
            args[0]._sum.stands = False
            args = (args[0] if func is _SET_DATA else args[0]._plain(), *map(_values, args[1:]))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
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
        return _in_memory(func, args, kwargs)


# What reads memory past torch's dispatch, or copies it.
_OF_MEMORY = frozenset(
    {
        Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage,
        Tensor.__dlpack__, Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.share_memory_,
    }
)  # fmt: skip
_SET_DATA = cast(Any, Tensor.data).__set__


def _in_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out ``func`` on the memory of norms; see Note [Filled at the first use]."""
    opened: dict[int, tuple[PartialNorm, Tensor]] = {}

    def plain(norm: PartialNorm) -> Tensor:
        if id(norm) not in opened:
            opened[id(norm)] = (norm, norm._plain())
        return opened[id(norm)][1]

    used_args, used_kwargs = tree_map_only(PartialNorm, plain, (args, kwargs))
    result = func(*used_args, **used_kwargs)
    changed = tree_leaves((args, kwargs)) if func.is_view else written_values(func, args, kwargs)
    for norm in changed:
        if isinstance(norm, PartialNorm):
            norm._sum.stands = False
            _lay_out(norm, opened[id(norm)][1])
    same = {id(used): norm for norm, used in opened.values()}
    return tree_map_only(Tensor, lambda value: same.get(id(value), value), result)


def _lay_out(norm: PartialNorm, like: Tensor) -> None:
    """Give a norm the memory and shape that an operation left its plain tensor with (``unsqueeze_``, ``resize_``, ``out=``)."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        norm.set_(like.untyped_storage(), int(like.storage_offset()), tuple(like.shape), like.stride())


def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Norms one by one; those that the same ranks combine as one term."""
    parts = args[0]
    runs: list[_Run] = []
    for at, part in enumerate(parts):
        own = part._sum if isinstance(part, PartialNorm) and part._sum.stands else None
        first = at if own is None else part._at
        if runs and runs[-1].sum is own and runs[-1].first + runs[-1].count == first:
            runs[-1].count += 1
        else:
            runs.append(_Run(own, first, 1))
    standing = [run.sum for run in runs if run.sum is not None]
    if not standing or any(one.ord != standing[0].ord or len(one.terms) > 1 or one.plain for one in standing):
        return cast(Tensor, _in_memory(func, args, kwargs))
    lead = standing[0]
    groups: dict[Hashable, ShardGroup] = {}
    for one in standing:
        groups.setdefault(one.terms[0][0].ranks(), one.terms[0][0])
    whole = {at: _values(parts[at]) for run in runs if run.sum is None for at in range(run.first, run.first + run.count)}
    leading, made = lead.terms[0][0].ranks(), lead.terms[0][1].dtype
    nothing = torch.full_like(lead.terms[0][1][:1], _nothing(lead.ord)) if len(groups) > 1 else None
    terms = []
    for key, group in groups.items():
        vectors: list[Tensor] = []
        for run in runs:
            span = range(run.first, run.first + run.count)
            if (leading if run.sum is None else run.sum.terms[0][0].ranks()) != key:
                assert nothing is not None
                vectors.append(nothing.expand(run.count))
            elif run.sum is None:
                vectors.append(torch.stack([_known(whole[at], lead).to(made) for at in span]))
            else:
                vectors.append(run.sum.terms[0][1][span.start : span.stop].to(made))
        terms.append((group, vectors[0] if len(vectors) == 1 else torch.cat(vectors)))
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    return PartialNorm(_Uncombined(terms, lead.ord, dtype, list(whole.values())))


def _values(part: Any) -> Any:
    return part._plain() if isinstance(part, PartialNorm) else part


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
