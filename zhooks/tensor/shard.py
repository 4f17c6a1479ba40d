"""A rank's range of a tensor whose shape is global: the record of each sharded tensor, and what those of a parameter share.

Note: [Bound and derived]
    A *bound* tensor is a parameter, or an alias of one (``detach``, ``data``): its values are those of the unit's shard.
    Any use in a forward gathers the unit.  A *derived* one (a gradient, an optimizer state, a temporary) holds the same
    range of another value; element-wise work stays local, whole-tensor norms and sums are combined over the ranks, and
    what needs rows or matrices raises ShardedOpError.

Note: [Expressions]
    An *expression* is derived from parameters and numbers alone (``log_std.exp()``, ``2 * weight``, a clone): every rank can
    have all of it, so what needs more than a range gathers it, as it gathers a parameter.  Where each rank brings something of
    its own, a plain tensor, the parameter is read whole at once and the result is this rank's, a plain tensor.  Numbers may
    differ between ranks too; ``Origin`` keeps a checksum of them, which is compared before an expression is gathered.  In an
    optimizer's step nothing of this applies: its arithmetic stays on the ranges.

Note: [Vectors]
    An optimizer that flattens and joins gradients (LBFGS) makes one vector of many parameters.  This rank's elements of it are
    its ranges of the parameters, in the vector's order, in one 1-D tensor.  So element-wise work is local, and a total is one
    local operation and one all-reduce.  That holds where the same ranks share all the parameters and none is divided over tp;
    anything else is refused when the vector is made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from offload.errors import ShardedOpError
from offload.store import Block, BlockRange
from zhooks.comm import in_order
from zhooks.layout import PP, Division, Piece, is_divided, part_of, whole_of
from zhooks.tensor.group import Owner, ShardGroup

if TYPE_CHECKING:
    from zhooks.tensor.sharded import RangeTensor


class Origin:
    """Where the values of an expression come from; see Note [Expressions].  Aliases share it.

    Attributes:
        numbers: a checksum of the numbers it was computed with, 0 of none; None once something else went into it.
    """

    __slots__ = ("numbers",)

    def __init__(self, numbers: int | None) -> None:
        self.numbers = numbers


class Shard:
    """What a sharded tensor is: this rank's range.

    Attributes:
        memory: where its values lie, 1-D in storage order.
        spec: what it is a range of.
        device: where it is computed with, which the tensor says it is on.
        owner: of bound tensors, the flat buffer.
        origin: of expressions.
        parent: of a view as another dtype, the tensor that it shares its range with.
    """

    __slots__ = ("device", "memory", "origin", "owner", "parent", "spec")

    def __init__(
        self,
        memory: Tensor | BlockRange,
        spec: ParamShard,
        device: torch.device,
        owner: Owner | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.memory, self.spec, self.device, self.owner, self.origin = memory, spec, device, owner, origin
        self.parent: RangeTensor | None = None

    @property
    def values(self) -> Tensor:
        """In memory: writes reach them; short-lived where they lie on disk."""
        memory = self.memory
        return memory.open() if type(memory) is BlockRange else cast(Tensor, memory)

    @property
    def block(self) -> Block | None:
        """The block of a store that they lie in; None of memory of its own."""
        return self.memory.block if type(self.memory) is BlockRange else None

    @property
    def paged(self) -> bool:
        """They are on disk: opening many at once would bring them all into memory."""
        return type(self.memory) is BlockRange and self.memory.block.paged

    def written(self, numbers: int | None = None) -> None:
        """They were written below autograd, where torch counts no version; into an expression, ``numbers`` went."""
        if self.origin is not None:
            self.origin.numbers = numbers
        if type(self.memory) is BlockRange:
            self.memory.block.touch()
        if self.owner is not None:
            self.owner.written(self.spec.index)
        if self.parent is not None:
            self.parent.local_shard.written(numbers)
            torch.autograd.graph.increment_version(self.parent)


class ParamShard:
    """What all tensors of one parameter's range have in common; replaced ranges reach every one of them.

    Attributes:
        shape, stride: global.
        place: which part of the whole this tp rank has: dim, index and count; None where it has all of it.
        part_shape, part_stride: those of this part, which the flat buffer holds.
        contiguous: the part lies in memory as torch lays out a new tensor.
        pieces: which elements of the part, in storage order, this rank owns.
        hooks, post_hooks: the parameter's own tables where it has any, before attach and after detach: torch's handles refer
            to them.
        aliases: the tensors made by ``data`` and ``detach``, by id, as long as somebody has them.
        views: those of gathered values, alike.
    """

    __slots__ = (
        "__weakref__", "_key", "aliases", "contiguous", "device", "division", "dtype", "group", "hooks", "index", "name",
        "part_shape", "part_stride", "pieces", "place", "post_hooks", "shape", "stride", "views",
    )  # fmt: skip

    def __init__(
        self, name: str, like: Tensor, group: ShardGroup, index: int, pieces: tuple[Piece, ...], device: torch.device
    ) -> None:
        self.name, self.group, self.index, self.pieces = name, group, index, pieces
        self.shape, self.dtype, self.device, self.stride = like.shape, like.dtype, device, _dense_stride(like)
        held = getattr(like, "local_shard", None)
        of: ParamShard | None = held.spec if isinstance(held, Shard) else None
        part = part_of(like)
        self.division: Division | None = Division.of(like) if of is None else of.division
        self.part_shape: torch.Size = part.shape if of is None else of.part_shape
        self.part_stride: tuple[int, ...] = _dense_stride(part) if of is None else of.part_stride
        self.place = None if self.division is None else self.division.place
        self.contiguous = self.part_stride == _contiguous(self.part_shape)
        self.hooks: OrderedDict[int, Callable[[Tensor], Tensor | None]] = OrderedDict()
        self.post_hooks: OrderedDict[int, Callable[[Tensor], None]] = OrderedDict()
        self.aliases: WeakValueDictionary[int, RangeTensor] = WeakValueDictionary()
        self.views: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._key: tuple[Any, ...] | None = None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def own_numel(self) -> int:
        """Elements of the range."""
        return sum(piece.numel for piece in self.pieces)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamShard:
        """A copy of a tensor is a range of the same parameter."""
        return self

    def key(self) -> tuple[Any, ...]:
        """Two are equal where every rank has the same elements of both, which each rank finds alike: some then gather."""
        if self._key is None:
            layout, held = self.group.layout, []
            for rank in range(layout.world):
                held.append(tuple((piece.start, piece.numel) for piece in layout.pieces(self.index, rank)))
            self._key = (self.shape, self.stride, self.place, self.group.transport.axis.ranks, tuple(held))
        return self._key

    def within(self, flat: Tensor, start: int) -> Tensor:
        """The part, in its shape, at ``start`` of a flat tensor, wherever that lies in its storage."""
        return flat.as_strided(self.part_shape, self.part_stride, flat.storage_offset() + start)

    def storage_order(self, part: Tensor) -> Tensor:
        """A tensor of the part's shape as 1-D in the order the parameter lies in memory."""
        return (part if self.contiguous else in_order(part, self.part_stride)).reshape(-1)

    def pick(self, part: Tensor) -> Tensor:
        """This rank's range of a tensor of the part's shape, 1-D."""
        flat = self.storage_order(part)
        parts = [flat[piece.start : piece.start + piece.numel] for piece in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else flat[:0]

    def take(self, tensor: Tensor) -> Tensor:
        """This rank's range of a global tensor, which is expanded to the global shape, 1-D."""
        if is_divided(tensor) and (self.division is None or tensor.shape != self.shape):
            tensor = whole_of(tensor)
        if not is_divided(tensor):
            tensor = tensor.expand(self.shape)
        return self.pick(tensor if self.division is None else self.division.cut(tensor))

    def wrap(self, part: Tensor) -> Tensor:
        """``part`` as the model had it before attach."""
        return part if self.division is None else self.division.wrap(part)

    def whole(self, part: Tensor) -> Tensor:
        """The global value of a tensor of the part's shape.  Collective over tp where it is divided."""
        return part if self.division is None else self.division.whole(part)


class RealShard(ParamShard):
    """What ``view_as_real`` of tensors of a complex parameter's range have in common: the same range of pairs of numbers."""

    __slots__ = ("of",)

    def __init__(self, of: ParamShard) -> None:
        self.of = of
        stride = (*(2 * step for step in of.stride), 1)
        like = torch.empty_strided((*of.shape, 2), stride, dtype=of.dtype.to_real(), device="meta")
        pieces = tuple(Piece(2 * piece.start, 2 * piece.local, 2 * piece.numel) for piece in of.pieces)
        super().__init__(of.name, like, of.group, of.index, pieces, of.device)

    def key(self) -> tuple[Any, ...]:
        return (self.shape, self.of.key())


class VectorShard(ParamShard):
    """What vectors of the same parameters' ranges have in common; ``parts`` are the parameters, in order.

    Raises:
        ShardedOpError: other ranks share some of them, or one is divided over tp.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[ParamShard]) -> None:
        first, self.parts = parts[0], tuple(parts)
        name = f"{first.name} in one vector"
        if len(parts) > 1:
            name = f"{len(parts)} parameters in one vector, {first.name} to {parts[-1].name}"
        for part in parts:
            if found := not_in_a_vector(part, first):
                raise ShardedOpError(
                    f"{name} cannot be one vector. Expected parameters that the same ranks share, because the optimizer "
                    f"uses them as one vector (as LBFGS does); found {part.name} {found}. Pass it to another optimizer, or "
                    "train without that axis."
                )
        pieces, local = list[Piece](), 0
        for part, start in zip(parts, accumulate((part.numel for part in parts), initial=0), strict=False):
            for piece in part.pieces:
                pieces.append(Piece(start + piece.start, local, piece.numel))
                local += piece.numel
        like = torch.empty(sum(part.numel for part in parts), dtype=first.dtype, device="meta")
        super().__init__(name, like, first.group, first.index, tuple(pieces), first.device)

    def key(self) -> tuple[Any, ...]:
        return tuple(part.key() for part in self.parts)


def not_in_a_vector(part: ParamShard, first: ParamShard) -> str:
    """Why it cannot be in one vector with ``first``; "" where it can."""
    if part.place is not None:
        return "divided over the tp axis of the mesh"
    if part.group.spans(PP):
        return "on one of several pipeline stages"
    if part.group.sharded is not first.group.sharded or part.group.ranks() != first.group.ranks():
        return f"shared by different ranks than {first.name}"
    return ""


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor that fills its memory without gaps or overlap; those of a new tensor for any other."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != size:
            return _contiguous(tensor.shape)
        size *= length
    return tensor.stride()


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    """The strides torch gives a new tensor of ``shape``."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
