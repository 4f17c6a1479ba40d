"""The sharded tensor of law 2: global shape, dtype and compute device outside, one rank's range inside.

Note: [The way of a call]
    ``grad`` and ``is_sparse`` the class answers itself.  Anything else torch asks ``__torch_function__`` first, above autograd:
    ``FUNCTIONS`` has what a parameter answers there, and what an optimizer's loop does to ranges; with grad enabled a bound
    parameter that requires grad becomes its gathered value there.  What is left comes down to
    ``__torch_dispatch__``, where ``ATEN`` names one handler an overload: element-wise on the ranges, a total over the
    ranks, the gathered value, or a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types as _of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _of_clipping

from offload.errors import ShardedOpError
from offload.store import BlockRange
from zhooks.layout import SHARD, TP, part_of
from zhooks.tensor.group import HeldSums, Owner
from zhooks.tensor.shard import Origin, ParamShard, RealShard, Shard, VectorShard
from zhooks.tensor.stored import Args, ChunkTensor, Kwargs, Overload, chunk_at, chunk_list, chunks_of, write_items, written_by

#: What carries out a call: (the function or overload, its arguments, its keywords).
Handler = Callable[[Any, Args, Kwargs], Any]

#: How calls on sharded tensors are carried out, by torch's function (``functions.py``) and by ATen overload (``aten.py``).
FUNCTIONS: dict[Any, Handler] = {}
ATEN: dict[Any, Handler] = {}
#: The key of what carries out any other.
OTHERS = "others"

_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data


class RangeTensor(torch.Tensor):
    """A tensor of which this rank has a range: a `ShardedTensor` or a `ShardedVector`."""

    local_shard: Shard
    is_sparse = False

    @staticmethod
    def __new__(
        cls,
        memory: Tensor | BlockRange,
        spec: ParamShard,
        *,
        owner: Owner | None = None,
        requires_grad: bool = False,
        device: torch.device | None = None,
        origin: Origin | None = None,
    ) -> RangeTensor:
        on = memory.device if device is None else device
        tensor: RangeTensor = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=memory.dtype, device=on, requires_grad=requires_grad
        )
        tensor.local_shard = Shard(memory, spec, on, owner, origin)
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        handler = FUNCTIONS.get(func) or FUNCTIONS[OTHERS]
        return handler(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Overload, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        handler = ATEN.get(func) or ATEN[OTHERS]
        return handler(func, args, kwargs or {})

    @property
    def numbers(self) -> int | None:
        """As ``Origin.numbers``; of a parameter 0, and None of a gradient or a state."""
        shard = self.local_shard
        if shard.owner is not None or isinstance(self, nn.Parameter):
            return 0
        return None if shard.origin is None else shard.origin.numbers

    def leave(self) -> None:
        """Share the range with no other tensor any more: the parameter keeps it, an alias takes a copy of the values.

        As after ``p.data = value`` in plain PyTorch, where ``p`` gets other memory: here it is the aliases that do.
        """
        shard = self.local_shard
        leaving = [alias for alias in shard.spec.aliases.values() if alias.local_shard.memory is shard.memory]
        if any(alias is self for alias in leaving):
            leaving = [self]
        elif shard.owner is not None:
            for view in shard.spec.views.values():
                view.leave()
        if not leaving:
            return
        kept = shard.values.clone()
        for alias in leaving:
            one = alias.local_shard
            if one.owner is not None:
                one.owner, one.origin = None, Origin(0)
            one.memory = kept

    def to_local(self) -> Tensor:
        """This rank's range: 1-D, in storage order, on the device it really lives on.

        Shares memory with the shard on the device and in host memory; a range on disk is a copy in host memory.
        """
        shard = self.local_shard
        return shard.values.clone() if shard.paged else shard.values

    def full_tensor(self) -> Tensor:
        """The whole value as a new plain tensor on every rank.  Collective; not differentiable.

        Raises:
            ShardedOpError: an expression that ranks computed with different numbers.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            shard, spec = self.local_shard, self.local_shard.spec
            if isinstance(spec, RealShard):
                return torch.view_as_real(self.as_complex().full_tensor())
            self.check_numbers()
            if spec.group.sharded:
                return spec.group.assemble(spec, shard.values)
            return spec.whole(shard.values.as_strided(spec.part_shape, spec.part_stride).to(shard.device, copy=True))

    def check_numbers(self) -> None:
        """Before ranks put an expression together: they computed it with the same numbers.  Collective where there were any.

        Raises:
            ShardedOpError: they did not.
        """
        if self.numbers and not self.alike(self.numbers):
            name = self.local_shard.spec.name
            raise ShardedOpError(
                f"Cannot compute an expression of {name}. Expected the same numbers on every rank, because each has a range of "
                f"the result; found different ones. Read the parameter first: {name}.full_tensor(), then compute."
            )

    def alike(self, number: int) -> bool:
        """Every rank that has a range of it gives the same number.  Collective."""
        both = torch.tensor([number, -number], dtype=torch.int64, device=self.local_shard.device)
        self.local_shard.spec.group.all_reduce(both, "max", (SHARD, TP))
        return bool(both[0] == -both[1])

    def as_real(self) -> RangeTensor:
        """The range of a complex tensor as pairs of numbers, in the same memory: short-lived where that is on disk."""
        shard = self.local_shard
        return self._viewed(torch.view_as_real(shard.values).view(-1), RealShard(shard.spec))

    def as_complex(self) -> RangeTensor:
        """The range of what ``as_real`` gave, as it was."""
        shard = self.local_shard
        assert isinstance(shard.spec, RealShard)
        return self._viewed(torch.view_as_complex(shard.values.view(-1, 2)), shard.spec.of)

    def _viewed(self, values: Tensor, spec: ParamShard) -> RangeTensor:
        view = type(self)(values, spec, device=self.local_shard.device, origin=self.local_shard.origin)
        view.local_shard.parent = self
        return view

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        shard = self.local_shard
        kind = "parameter" if shard.owner else "tensor"
        return (
            f"ShardedTensor({kind} of {shard.spec.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"local={shard.values.numel()} of {shard.spec.numel} elements, requires_grad={self.requires_grad})"
        )

    # What torch.distributed.checkpoint asks for, and a ``ChunkTensor``.

    def opened(self) -> Tensor:
        return self.local_shard.values

    def changed(self) -> None:
        self.local_shard.written()

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        shard = self.local_shard
        if shard.owner is not None:
            shard.owner.engine.due()
        return write_items(fqn, shard.spec.shape, shard.memory.dtype, written_by(shard.spec, fqn))

    def __create_chunk_list__(self) -> list[Any]:
        shard = self.local_shard
        if shard.owner is not None:
            shard.owner.engine.due()
        if shard.origin is not None:
            shard.origin.numbers = None  # who asks loads values, on the ranks that have a range: no expression on any
        return chunk_list(chunks_of(shard.spec))

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        shard = self.local_shard
        chunk = chunk_at(chunks_of(shard.spec), index, shard.spec.name)
        return ChunkTensor.of(self, chunk, shard.memory.dtype, shard.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> RangeTensor:
        if id(self) in memo:
            return cast(RangeTensor, memo[id(self)])
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            shard, origin = self.local_shard, None if self.numbers is None else Origin(self.numbers)
            copied = type(self)(shard.values.clone(), shard.spec, device=shard.device, origin=origin)
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
        spec = self.local_shard.spec
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if spec.group.sharded or (spec.place is not None and spec.place[2] > 1):
                raise range_alone("pickle", self)
            plain = self.local_shard.values.detach().as_strided(spec.part_shape, spec.part_stride).clone()
            whole = nn.Parameter(plain, False) if isinstance(self, nn.Parameter) else plain
        return whole.requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def _get_grad(tensor: RangeTensor) -> Any:
    if not torch._C._is_torch_function_enabled():  # this package asks
        return _GRAD.__get__(tensor)
    shard = tensor.local_shard
    owner = shard.owner
    if owner is not None:
        owner.look(shard.spec.name)
        if owner.sums is not None and owner.sums.holds(shard.spec.index):
            return HeldGradient.of(tensor, owner.sums)
    with torch._C.DisableTorchFunctionSubclass():
        return _GRAD.__get__(tensor)


def _set_grad(tensor: RangeTensor, value: torch.Tensor | None) -> None:
    # What earlier backward passes still owe belongs to the gradient that goes.
    shard = tensor.local_shard
    owner = shard.owner
    if owner is not None and torch._C._is_torch_function_enabled():
        owner.look(shard.spec.name)
        if owner.sums is not None:
            owner.sums.drop(shard.spec.index)
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(tensor, value)


class ShardedTensor(RangeTensor):
    """One rank's range of a tensor; its shape, dtype and device are those of the whole.

    Parameters of an attached model and their gradients are of this class.  ``to_local()`` is the range, 1-D in storage order,
    where it is kept (of one on disk, a copy in host memory); ``full_tensor()`` gathers the whole value on every rank as a new
    plain tensor, and is collective and not differentiable.
    """

    # Asked of every parameter in every step (zero_grad, clipping, the optimizer): answered without torch's dispatch.
    grad = property(_get_grad, _set_grad, lambda tensor: _set_grad(tensor, None))

    def _use_count(self) -> int:
        """``torch.utils.swap_tensors`` asks for it before it changes anything.

        Raises:
            ShardedOpError: the user swaps an attached parameter, whose values would stay where they are.
        """
        if self.local_shard.owner is not None and torch._C._is_torch_function_enabled():
            raise swapped(self.local_shard.spec.name)
        count: int = super()._use_count()  # type: ignore[misc]
        return count


class _HeldShard(Shard):
    """That of a `HeldGradient`: reduced when its values are needed."""

    __slots__ = ("drops", "param", "reduced", "sums")

    def __init__(self, param: RangeTensor, sums: HeldSums) -> None:
        shard = param.local_shard
        self.param, self.sums, self.drops = param, sums, sums.drops(shard.spec.index)
        self.reduced: Tensor | BlockRange | None = None
        self.spec, self.device, self.owner, self.origin, self.parent = shard.spec, shard.device, None, None, None

    @property
    def memory(self) -> Tensor | BlockRange:
        if self.reduced is None:
            index, name = self.spec.index, self.spec.name
            if self.sums.drops(index) == self.drops:
                self.sums.reduce()
            with torch._C.DisableTorchFunctionSubclass():
                grad = _GRAD.__get__(self.param)
            if self.sums.drops(index) != self.drops or not isinstance(grad, ShardedTensor):
                raise ShardedOpError(
                    f"Cannot use {name}.grad. Expected the gradient that was read inside no_sync, found that it was cleared or "
                    f"set since. Clone it before, or read {name}.grad again."
                )
            self.reduced = grad.local_shard.memory
        return self.reduced

    @memory.setter
    def memory(self, value: Tensor | BlockRange) -> None:
        self.reduced = value

    def zero(self) -> None:
        self.sums.zero(self.spec.index)
        with torch._C.DisableTorchFunctionSubclass():
            grad = _GRAD.__get__(self.param)
        if grad is not None:
            grad.zero_()


class HeldGradient(ShardedTensor):
    """What a parameter's ``.grad`` is while ``no_sync`` holds back a sum of it: see Note [Held gradients].

    Note: [Held gradients]
        Whoever clears gradients reads ``.grad`` first and clears nothing where it is None.  So it is this: clearing it, or
        setting it to zero, does that to the sum, on this rank alone, as a rank does that drops its batch.  Whoever uses its
        values needs the sum of all ranks: that is reduced then, and this is the parameter's gradient from then on.
    """

    local_shard: _HeldShard

    @classmethod
    def of(cls, param: RangeTensor, sums: HeldSums) -> HeldGradient:
        """That of a bound parameter."""
        spec = param.local_shard.spec
        held: HeldGradient = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=param.dtype, device=param.device
        )
        held.local_shard = _HeldShard(param, sums)
        return held

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func is torch._foreach_zero_:
            for grad in args[0]:
                grad.zero_()
            return None
        # What is computed of one has a range of its own.
        held = args[0].local_shard if func in _OF_HELD and isinstance(args[0], HeldGradient) else None
        if isinstance(held, _HeldShard) and held.reduced is None:
            if func is torch.Tensor.zero_:
                held.zero()
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


#: What is done to a gradient on the way to clearing it.
_OF_HELD: tuple[Any, ...] = (
    torch.Tensor.zero_, torch.Tensor.detach, torch.Tensor.detach_, torch.Tensor.requires_grad_,
    _DATA.__get__,
)  # fmt: skip


class ShardedVector(RangeTensor):
    """Ranges of many parameters as one vector, see Note [Vectors]: no parameter's gradient or state, and no `ShardedTensor`."""

    @property
    def parts(self) -> tuple[ParamShard, ...]:
        """The parameters, in the vector's order."""
        assert isinstance(self.local_shard.spec, VectorShard)
        return self.local_shard.spec.parts

    def full_tensor(self) -> torch.Tensor:
        """The whole vector as a new plain tensor on every rank.  Collective; not differentiable."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            ranges = self.local_shard.values.split([part.own_numel for part in self.parts])
            pairs = zip(ranges, self.parts, strict=True)
            return torch.cat([ShardedTensor(own, part).full_tensor().reshape(-1) for own, part in pairs])


def vector_of(value: torch.Tensor, parts: Sequence[ParamShard]) -> RangeTensor:
    """This rank's elements of a whole vector of these parameters.

    Raises:
        ShardedOpError: as ``VectorShard``.
    """
    spec = VectorShard(parts)
    return ShardedVector(spec.take(value).clone(), spec)


class _SlotsOfDTensor(torch.Tensor):
    __slots__ = ("_local_tensor", "_spec")


class ShardedOverTp(ShardedTensor, _SlotsOfDTensor):
    """The same, for a parameter that is a DTensor: ``swap_tensors`` exchanges only tensors of classes with the same slots."""

    __slots__ = ()


_KINDS: tuple[type[torch.Tensor], ...] = (ShardedTensor, ShardedOverTp, HeldGradient)
_open = 0


class Registries:
    """One attachment's claim on the lists torch keeps of the tensor types that optimizers and clipping may batch.

    The process' first attachment puts ours there, the last takes them off; nothing of torch is patched.
    """

    def __init__(self) -> None:
        self._held = False

    def open(self) -> None:
        global _open
        _open += 1
        self._held = True
        for supported in (_of_optimizers, _of_clipping):
            supported.extend(kind for kind in _KINDS if kind not in supported)

    def close(self) -> None:
        global _open
        if not self._held:
            return
        self._held = False
        _open -= 1
        if _open == 0:
            for supported in (_of_optimizers, _of_clipping):
                for kind in _KINDS:
                    supported.remove(kind)


def refuse_gradients(tensor: RangeTensor) -> None:
    """A range that no unit owns shall get no gradient: it would be this rank's alone, and no step with it right anywhere."""
    shard, leaf = tensor.local_shard, cast(Any, tensor)
    if shard.owner is not None or not tensor.requires_grad or not shard.spec.group.sharded:
        return
    name = shard.spec.name

    def refuse(grad: Tensor) -> None:
        raise ShardedOpError(
            f"backward expected gradients of the attached model's own parameters, found that of a copy of {name}, which "
            "is still sharded and whose gradient is not reduced. Call requires_grad_(False) on a copy that does not train; "
            "use full_tensor() for this rank's own value, or copy the model before attach and attach both."
        )

    with torch._C.DisableTorchFunctionSubclass():
        leaf.register_hook(refuse)


def swapped(name: str) -> ShardedOpError:
    """The refusal of ``torch.utils.swap_tensors``: the sharded values would stay where they are."""
    return ShardedOpError(
        f"Cannot use swap_tensors on parameter {name}. Expected a plain parameter, found an attached one, whose model would go "
        "on with the old values. To change values, use parameter.copy_(value) under torch.no_grad(); to change dtype or "
        "device (model.double(), model.to()), call attachment.detach(), change the model, attach again. With "
        "torch.__future__.set_swap_module_params_on_conversion(True) every conversion swaps, also one that changes nothing."
    )


def range_alone(what: str, tensor: RangeTensor) -> ShardedOpError:
    """The refusal of a writer that would take this rank's range for the tensor."""
    spec, here = tensor.local_shard.spec, tensor.local_shard.values.numel()
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
    return param.local_shard.spec.part_shape.numel() if isinstance(param, RangeTensor) else part_of(param).numel()
