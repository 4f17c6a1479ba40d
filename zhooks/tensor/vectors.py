"""One vector of many parameters' ranges: what an optimizer makes that flattens and joins gradients (LBFGS).

``sharded.py`` adds its handlers to the tables of ``aten.py`` and ``functions.py``: a flattened gradient or state, several of
them joined, a slice between borders of parameters, and that slice in its parameter's shape again.  It never gathers, and reads
no parameter: one that is flattened is its whole value.

Note: [Vectors]
    This rank's elements of a vector are its ranges of the parameters, in the vector's order, in one 1-D tensor.  So
    element-wise work is local, and a total is one local operation and one all-reduce.  That holds where the same ranks share
    all the parameters and none is divided over tp; anything else is refused when the vector is made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from offload.errors import ShardedOpError
from zhooks.layout import PP, SHARD, Piece
from zhooks.tensor.aten import view
from zhooks.tensor.elementwise import localise, readable_whole, whole
from zhooks.tensor.functions import with_values
from zhooks.tensor.hashes import hash_of
from zhooks.tensor.range_tensor import Handler, ParamShard, RangeTensor, RealShard

aten = torch.ops.aten

__all__ = ["VectorShard", "Vectors"]


class VectorShard(ParamShard):
    """What vectors of the same parameters' ranges have in common; ``parts`` are the parameters, in order.

    Raises:
        ShardedOpError: other ranks share some of them, or one is divided over tp.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[ParamShard]) -> None:
        first = parts[0]
        self.parts = tuple(parts)
        self.name = f"{first.name} in one vector"
        if len(parts) > 1:
            self.name = f"{len(parts)} parameters in one vector, {first.name} to {parts[-1].name}"
        for part in parts:
            found = _not_together(part, first)
            if found:
                raise ShardedOpError(
                    f"{self.name} cannot be one vector. Expected parameters that the same ranks share, because the optimizer "
                    f"uses them as one vector (as LBFGS does); found {part.name} {found}. Pass it to another optimizer, or "
                    "train without that axis."
                )
        self.group, self.index, self.device, self.dtype = first.group, first.index, first.device, first.dtype
        starts = accumulate((part.numel for part in parts[:-1]), initial=0)
        pieces, local = [], 0
        for part, start in zip(parts, starts, strict=True):
            for piece in part.pieces:
                pieces.append(Piece(start + piece.start, local, piece.numel))
                local += piece.numel
        self.pieces = tuple(pieces)
        self.shape = self.part_shape = torch.Size([sum(part.numel for part in parts)])
        self.stride = self.part_stride = (1,)
        self.division = self.place = None
        self.contiguous = True
        self.hooks, self.post_hooks = OrderedDict(), OrderedDict()
        self.aliases, self.views = WeakValueDictionary(), WeakValueDictionary()

    def key(self) -> tuple[Any, ...]:
        return tuple(part.key() for part in self.parts)


def _not_together(part: ParamShard, first: ParamShard) -> str:
    """Why it cannot be in one vector with ``first``; "" where it can."""
    if part.place is not None:
        return "divided over the tp axis of the mesh"
    if part.group.spans(PP):
        return "on one of several pipeline stages"
    if part.group.sharded is not first.group.sharded or part.group.ranks() != first.group.ranks():
        return f"shared by different ranks than {first.name}"
    return ""


def _parts(spec: ParamShard) -> Sequence[ParamShard]:
    """What a vector of this one is of; the pairs of numbers of a complex vector are those of its parts."""
    if isinstance(spec, RealShard) and isinstance(spec.of, VectorShard):
        return tuple(map(RealShard, spec.of.parts))
    return (spec,)


def _own_numel(part: ParamShard) -> int:
    return sum(piece.numel for piece in part.pieces)


@dataclass(frozen=True, slots=True)
class Vectors:
    """The handlers of vectors.

    Args:
        tensor: the class of a parameter's ranges.
        vector: the class of vectors.
    """

    tensor: type[RangeTensor]
    vector: type[RangeTensor]

    def aten(self) -> dict[Any, Handler]:
        return {
            aten.view.default: self._view,
            aten.cat.default: self._cat,
            aten.slice.Tensor: self._slice,
            aten.dot.default: self._dot,
        }

    def functions(self) -> dict[Any, Handler]:
        return {Tensor.new: self._new}

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, shape, spec = args[0], tuple(args[1]), args[0]._spec
        flat = shape in ((-1,), (spec.numel,))
        if not _derived(tensor) or not (flat or isinstance(spec, VectorShard)):
            return view(func, args, kwargs)
        with torch.inference_mode(tensor.is_inference()):
            if isinstance(spec, VectorShard):
                for part in _only(spec.parts):
                    if shape == tuple(part.shape):
                        return self.tensor(tensor._local, part, device=tensor._on)
                if flat:
                    return self.vector(tensor._local, spec, device=tensor._on)
            elif shape != tuple(spec.shape) and spec.contiguous:
                return self.vector(tensor._local, VectorShard(_parts(spec)), device=tensor._on)
        return view(func, args, kwargs)

    def _cat(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = args[0]
        plain = next((one for one in tensors if not isinstance(one, RangeTensor)), None)
        vector = next((one for one in tensors if isinstance(one, self.vector)), None)
        if plain is not None and vector is not None:
            raise ShardedOpError(
                f"Cannot concatenate {vector._spec.name} and others. Expected only gradients or states of attached parameters, "
                "because the optimizer uses them as one vector (as LBFGS does); found a plain tensor of shape "
                f"{tuple(plain.shape)}. Use a separate optimizer for parameters that are not attached, or are in [units] "
                "ignore."
            )
        if kwargs or not all(_derived(one) and one.dim() == 1 for one in tensors):
            return whole(func, args, kwargs)
        parts = [part for one in tensors for part in (one._spec.parts if type(one._spec) is VectorShard else (one._spec,))]
        # A 1-D tensor has one order of its elements, so a range of it is a range of the vector.
        return self.vector(torch.cat([one._local for one in tensors]), VectorShard(parts), device=tensors[0]._on)

    def _slice(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, spec = args[0], args[0]._spec
        if not isinstance(spec, VectorShard):
            return whole(func, args, kwargs)
        given = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
        start, end, step = slice(*given[1:]).indices(spec.numel)
        taken: list[ParamShard] = []
        first = here = at = 0
        for part in spec.parts:
            after = at + part.numel
            if start <= at and after <= end:
                first = here if not taken else first
                taken.append(part)
            here, at = here + _own_numel(part), after
        if step != 1 or not taken or sum(part.numel for part in taken) != end - start:
            return whole(func, args, kwargs)
        local = tensor._local[first : first + sum(map(_own_numel, taken))]
        return self.vector(local, VectorShard(taken), device=tensor._on)

    def _dot(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lead = args[0] if isinstance(args[0], RangeTensor) else args[1]
        if any(isinstance(one, RangeTensor) and not _derived(one) for one in args) or args[0].shape != args[1].shape:
            return whole(func, args, kwargs)
        for own in args:
            if not isinstance(own, RangeTensor) and lead._spec.group.sharded and not lead.alike(hash_of(own) >> 1):
                raise ShardedOpError(
                    f"Cannot compute the dot product with {lead._spec.name}. Expected the same plain tensor on every rank, "
                    "because each multiplies a range of it; found different ones. Broadcast it first."
                )
        one, other = (localise(value, lead, [lead]) for value in args)
        part: Tensor = func(one, other)
        wide = part.to(torch.float32) if part.dtype in (torch.float16, torch.bfloat16) else part
        lead._spec.group.all_reduce(wide, "sum", (SHARD,))
        return wide.to(part.dtype)

    def _new(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``p.new(p.numel())``: what stands for a missing gradient in a vector, so of the parameter's range too."""
        tensor, sizes = args[0], args[1:]
        spec = tensor._spec if isinstance(tensor, self.tensor) else None
        if spec is None or torch.is_grad_enabled() or kwargs or sizes != (spec.numel,) or not spec.contiguous:
            return with_values(func, args, kwargs)
        if _not_together(spec, spec):
            return with_values(func, args, kwargs)
        local = torch.zeros(_own_numel(spec), dtype=tensor.dtype, device=tensor._on)
        return self.vector(local, VectorShard((spec,)), device=tensor._on)


def _derived(value: Any) -> bool:
    """A gradient, a state or a temporary, in memory of its own; see Note [Bound and derived]."""
    return isinstance(value, RangeTensor) and not (value._block or readable_whole(value))


def _only(parts: Sequence[ParamShard]) -> Sequence[ParamShard]:
    """The one of them that has elements; of none that have, the first."""
    full = [part for part in parts if part.numel]
    return full if len(full) == 1 else () if full else parts[:1]
