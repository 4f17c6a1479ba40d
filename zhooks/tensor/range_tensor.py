"""What a sharded tensor is: one rank's range of a tensor whose shape, dtype and device are global, and what it belongs to.

``sharded.py`` adds what torch's calls do to it; the handlers of those calls know it as the type here.  It never moves data
between ranks itself: it asks the flat buffer it belongs to.

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
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from offload.errors import ShardedOpError
from offload.store import Block, BlockRange
from zhooks.layout import SHARD, TP, Division, Piece, is_divided, part_of, whole_of
from zhooks.tensor.checkpoint_chunks import ChunkTensor, chunk_at, chunk_list, chunks_of, write_items, written_by
from zhooks.tensor.group import Owner, ShardGroup

#: What carries out a call: (the function or overload, its arguments, its keywords).
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class ParamShard:
    """What all tensors of one parameter's range have in common; replaced ranges reach every one of them.

    ``shape`` and ``stride`` are global; ``part_shape`` and ``part_stride`` are those of what this place on the tp axis has,
    which the flat buffer holds.  ``pieces`` say which elements of the part, in storage order, this rank owns.  ``aliases`` are
    the tensors made by ``data`` and ``detach``, ``views`` those of gathered values, by id, as long as somebody has them.
    """

    __slots__ = (
        "__weakref__", "_key", "aliases", "contiguous", "device", "division", "dtype", "group", "hooks", "index", "name",
        "part_shape", "part_stride", "pieces", "place", "post_hooks", "shape", "stride", "views",
    )  # fmt: skip

    _key: tuple[Any, ...]

    def __init__(
        self, name: str, like: Tensor, group: ShardGroup, index: int, pieces: tuple[Piece, ...], device: torch.device
    ) -> None:
        self.name, self.group, self.index, self.pieces = name, group, index, pieces
        self.shape, self.dtype, self.device = like.shape, like.dtype, device
        self.stride = like.stride() if _dense(like) else _contiguous(like.shape)
        division = cast(Any, like)._spec.division if isinstance(like, RangeTensor) else Division.of(like)
        self.division: Division | None = division
        #: Which part of the whole this tp rank has: dim, index and count; None where it has all of it.
        self.place: tuple[int, int, int] | None = None if division is None else division.place
        self.part_shape, self.part_stride = self.shape, self.stride
        if isinstance(like, RangeTensor):
            self.part_shape, self.part_stride = like._spec.part_shape, like._spec.part_stride
        elif self.division is not None:
            part = part_of(like)
            self.part_shape = part.shape
            self.part_stride = part.stride() if _dense(part) else _contiguous(part.shape)
        #: The part lies in memory as torch lays out a new tensor.
        self.contiguous = self.part_stride == _contiguous(self.part_shape)
        # The parameter's own tables where it has any, before attach and after detach: torch's handles refer to them.
        self.hooks: OrderedDict[int, Callable[[Tensor], Tensor | None]] = OrderedDict()
        self.post_hooks: OrderedDict[int, Callable[[Tensor], None]] = OrderedDict()
        self.aliases: WeakValueDictionary[int, RangeTensor] = WeakValueDictionary()
        self.views: WeakValueDictionary[int, Any] = WeakValueDictionary()

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamShard:
        """A copy of a tensor is a range of the same parameter."""
        return self

    def key(self) -> tuple[Any, ...]:
        """Two are equal where every rank has the same elements of both, which each rank finds alike: some then gather."""
        if not hasattr(self, "_key"):
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
        return part.reshape(-1) if self.contiguous else in_storage_order(part, self.part_stride)

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
        self.of, self.name, self.group, self.index, self.device = of, of.name, of.group, of.index, of.device
        self.dtype = of.dtype.to_real()
        self.pieces = tuple(Piece(2 * piece.start, 2 * piece.local, 2 * piece.numel) for piece in of.pieces)
        self.shape = self.part_shape = torch.Size((*of.shape, 2))
        self.stride = self.part_stride = (*(2 * step for step in of.stride), 1)
        self.division = self.place = None
        self.contiguous = of.contiguous
        self.hooks, self.post_hooks = OrderedDict(), OrderedDict()

    def key(self) -> tuple[Any, ...]:
        return (self.shape, self.of.key())


def in_storage_order(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``tensor`` as 1-D in the order a dense tensor of these strides lies in memory."""
    if stride == _contiguous(tensor.shape):
        return tensor.reshape(-1)
    laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    laid.copy_(tensor)
    return laid.as_strided((tensor.numel(),), (1,))


class Origin:
    """Where the values of an expression come from; see Note [Expressions].  Aliases share it.

    Attributes:
        numbers: a checksum of the numbers it was computed with, 0 of none; None once something else went into it.
    """

    __slots__ = ("numbers",)

    def __init__(self, numbers: int | None) -> None:
        self.numbers = numbers


class RangeTensor(torch.Tensor):
    """See ``ShardedTensor``, which every one is.

    ``to_local()`` is the 1-D range in storage order; ``full_tensor()`` gathers the whole (every rank must call it).
    """

    _at: Tensor | BlockRange
    _on: torch.device
    _spec: ParamShard
    #: Of bound ones: the flat buffer.
    _bound: Owner | None
    #: Of expressions.
    _origin: Origin | None
    #: Of a view as another dtype: what it shares its range with.
    _parent: RangeTensor | None = None

    @staticmethod
    def __new__(
        cls,
        local: Tensor | BlockRange,
        spec: ParamShard,
        *,
        bound: Owner | None = None,
        requires_grad: bool = False,
        device: torch.device | None = None,
        origin: Origin | None = None,
    ) -> RangeTensor:
        on = local.device if device is None else device
        made = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=local.dtype, device=on, requires_grad=requires_grad
        )
        tensor: RangeTensor = made
        tensor._at, tensor._on, tensor._spec, tensor._bound, tensor._origin = local, on, spec, bound, origin
        return tensor

    @property
    def _local(self) -> Tensor:
        at = self._at
        return at.open() if type(at) is BlockRange else cast(Tensor, at)

    @property
    def _block(self) -> Block | None:
        """The block of a store that the range lies in; None of memory of its own."""
        return self._at.block if type(self._at) is BlockRange else None

    @property
    def _paged(self) -> bool:
        """The range is on disk: opening many at once would bring them all into memory."""
        block = self._block
        return block is not None and block.paged

    @property
    def numbers(self) -> int | None:
        """As ``Origin.numbers``; of a parameter 0, and None of a gradient or a state."""
        if self._bound is not None or isinstance(self, nn.Parameter):
            return 0
        return None if self._origin is None else self._origin.numbers

    def _written(self, numbers: int | None = None) -> None:
        """Its range was written below autograd, where torch counts no version; of an expression, ``numbers`` went into it."""
        if self._origin is not None:
            self._origin.numbers = numbers
        block = self._block
        if block is not None:
            block.touch()
        if self._bound is not None:
            self._bound.written(self._spec.index)
        if self._parent is not None:
            self._parent._written(numbers)
            torch.autograd.graph.increment_version(self._parent)

    def leave(self) -> None:
        """Share the range with no other tensor any more: the parameter keeps it, an alias takes a copy of the values.

        As after ``p.data = value`` in plain PyTorch, where ``p`` gets other memory: here it is the aliases that do.
        """
        spec = self._spec
        leaving = [alias for alias in spec.aliases.values() if alias._at is self._at]
        if any(alias is self for alias in leaving):
            leaving = [self]
        elif self._bound is not None:
            for view in spec.views.values():
                view.leave()
        kept = self._local.clone() if leaving else None
        for alias in leaving:
            assert kept is not None
            if alias._bound is not None:
                alias._bound, alias._origin = None, Origin(0)
            alias._at = kept

    def to_local(self) -> Tensor:
        """This rank's range: 1-D, in storage order, on the device it really lives on.

        Shares memory with the shard on the device and in host memory; a range on disk is a copy in host memory.
        """
        return self._local.clone() if self._paged else self._local

    def full_tensor(self) -> Tensor:
        """The whole value as a new plain tensor on every rank.  Collective; not differentiable.

        Raises:
            ShardedOpError: an expression that ranks computed with different numbers.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            spec = self._spec
            if isinstance(spec, RealShard):
                return torch.view_as_real(self.as_complex().full_tensor())
            self.check_numbers()
            if not spec.group.sharded:
                return spec.whole(self._local.as_strided(spec.part_shape, spec.part_stride).to(self._on, copy=True))
            return spec.group.assemble(self)

    def check_numbers(self) -> None:
        """Before ranks put an expression together: they computed it with the same numbers.  Collective where there were any.

        Raises:
            ShardedOpError: they did not.
        """
        if self.numbers and not self.alike(self.numbers):
            raise ShardedOpError(
                f"Cannot compute an expression of {self._spec.name}. Expected the same numbers on every rank, because each has "
                f"a range of the result; found different ones. Read the parameter first: {self._spec.name}.full_tensor(), then "
                "compute."
            )

    def alike(self, number: int) -> bool:
        """Every rank that has a range of it gives the same number.  Collective."""
        both = torch.tensor([number, -number], dtype=torch.int64, device=self._on)
        self._spec.group.all_reduce(both, "max", (SHARD, TP))
        return bool(both[0] == -both[1])

    def as_real(self) -> RangeTensor:
        """The range of a complex tensor as pairs of numbers, in the same memory: short-lived where that is on disk."""
        return self._viewed(torch.view_as_real(self._local).view(-1), RealShard(self._spec))

    def as_complex(self) -> RangeTensor:
        """The range of what ``as_real`` gave, as it was."""
        assert isinstance(self._spec, RealShard)
        return self._viewed(torch.view_as_complex(self._local.view(-1, 2)), self._spec.of)

    def _viewed(self, local: Tensor, spec: ParamShard) -> RangeTensor:
        view = type(self)(local, spec, device=self._on, origin=self._origin)
        view._parent = self
        return view

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        kind = "parameter" if self._bound else "tensor"
        return (
            f"ShardedTensor({kind} of {self._spec.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"local={self._local.numel()} of {self._spec.numel} elements, requires_grad={self.requires_grad})"
        )

    # What torch.distributed.checkpoint asks for, see ``checkpoint_chunks.py``.

    def opened(self) -> Tensor:
        return self._local

    def changed(self) -> None:
        self._written()

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        if self._bound is not None:
            self._bound.engine.due()
        return write_items(fqn, self._spec.shape, self._at.dtype, written_by(self._spec, fqn))

    def __create_chunk_list__(self) -> list[Any]:
        if self._bound is not None:
            self._bound.engine.due()
        if self._origin is not None:
            self._origin.numbers = None  # who asks loads values, on the ranks that have a range: no expression on any
        return chunk_list(chunks_of(self._spec))

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        chunk = chunk_at(chunks_of(self._spec), index, self._spec.name)
        return ChunkTensor.of(self, chunk, self._at.dtype, self._on)

    def __deepcopy__(self, memo: dict[int, Any]) -> RangeTensor:
        if id(self) in memo:
            return cast(RangeTensor, memo[id(self)])
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            origin = None if self.numbers is None else Origin(self.numbers)
            copied = type(self)(self._local.clone(), self._spec, device=self._on, origin=origin)
            made: Any = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
            if self.grad is not None:
                made.grad = self.grad.__deepcopy__(memo)
            refuse_gradients(made)
        memo[id(self)] = made
        return cast(RangeTensor, made)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the plain tensor where this rank has all of it; a range is refused, for no file says where the rest is.

        Raises:
            ShardedOpError: this rank has a range.
        """
        spec = self._spec
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if spec.group.sharded or (spec.place is not None and spec.place[2] > 1):
                raise range_alone("pickle", self)
            plain = self._local.detach().as_strided(spec.part_shape, spec.part_stride).clone()
            whole = nn.Parameter(plain, False) if isinstance(self, nn.Parameter) else plain
        return whole.requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def refuse_gradients(tensor: RangeTensor) -> None:
    """A range that no unit owns shall get no gradient: it would be this rank's alone, and no step with it right anywhere."""
    leaf, name = cast(Any, tensor), tensor._spec.name
    if tensor._bound is not None or not tensor.requires_grad or not tensor._spec.group.sharded:
        return

    def refuse(grad: Tensor) -> None:
        raise ShardedOpError(
            f"backward expected gradients of the attached model's own parameters, found that of a copy of {name}, which "
            "is still sharded and whose gradient is not reduced. Call requires_grad_(False) on a copy that does not train; "
            "use full_tensor() for this rank's own value, or copy the model before attach and attach both."
        )

    with torch._C.DisableTorchFunctionSubclass():
        leaf.register_hook(refuse)


def range_alone(what: str, tensor: RangeTensor) -> ShardedOpError:
    """The refusal of a writer that would take this rank's range for the tensor."""
    spec = tensor._spec
    here = tensor._local.numel()
    found = f"one rank's range of it, {here} of {spec.numel} elements"
    if here == spec.numel:
        found = f"one rank's range of the model, which has all {here} elements of this parameter and lacks others"
    if not spec.group.sharded and spec.place is None:
        found = "it in memory it shares with its unit"
    through, folder = "torch.save, safetensors", ""
    if spec.group.pretrained:
        through = f"{through}, save_pretrained"
        folder = "attachment.save_pretrained(folder) for the folder that from_pretrained reads, "
    return ShardedOpError(
        f"Cannot {what} {spec.name} ({through}, or a checkpoint of Lightning, Accelerate or Trainer). Expected the whole "
        f"tensor, found {found}. Call, on every rank, attachment.save(folder) to resume, {folder}attachment.save_full(file) "
        "for only the weights, or attachment.state_dict(optimizer), whole on rank 0."
    )


def part_numel(param: Tensor) -> int:
    """Elements of what this place on the tp axis has of a parameter, sharded or not."""
    return param._spec.part_shape.numel() if isinstance(param, RangeTensor) else part_of(param).numel()


def _dense(tensor: Tensor) -> bool:
    """The tensor fills its memory without gaps or overlap, so its own strides can be kept."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != size:
            return False
        size *= length
    return True


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    """The strides torch gives a new tensor of ``shape``."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
