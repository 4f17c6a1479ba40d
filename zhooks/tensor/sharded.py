"""The sharded tensor of law 2: global shape, dtype and compute device outside, one rank's range inside.

``unit/unit.py`` swaps parameters for these at attach and ``detach`` swaps them back; optimizers, clipping and the user's loop
meet them between steps.  It computes nothing: the tables of ``functions.py`` and ``aten.py`` say who carries out a call.

Note: [The way of a call]
    ``grad`` and ``is_sparse`` the class answers itself.  Anything else torch asks ``__torch_function__`` first, above autograd:
    ``FUNCTIONS`` has what a parameter answers there, and what an optimizer's loop does to ranges; with grad enabled a bound
    parameter that requires grad becomes its gathered value there.  What is left comes down to
    ``__torch_dispatch__``, where ``ATEN`` names one handler an overload: element-wise on the ranges, a total over the
    ranks, the gathered value, or a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types as _of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _of_clipping

from offload.errors import ShardedOpError
from offload.store import BlockRange
from zhooks.tensor.aten import ATEN
from zhooks.tensor.functions import FUNCTIONS, swapped, with_values
from zhooks.tensor.group import HeldSums
from zhooks.tensor.range_tensor import Handler, ParamShard, RangeTensor
from zhooks.tensor.vectors import Vectors, VectorShard

_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data


def _get_grad(tensor: RangeTensor) -> Any:
    if not torch._C._is_torch_function_enabled():  # this package asks
        return _GRAD.__get__(tensor)
    if tensor._bound is not None:
        tensor._bound.look(tensor._spec.name)
        sums = tensor._bound.sums
        if sums is not None and sums.holds(tensor._spec.index):
            return HeldGradient.of(tensor, sums)
    with torch._C.DisableTorchFunctionSubclass():
        return _GRAD.__get__(tensor)


def _set_grad(tensor: RangeTensor, value: torch.Tensor | None) -> None:
    # What earlier backward passes still owe belongs to the gradient that goes.
    if torch._C._is_torch_function_enabled() and tensor._bound is not None:
        tensor._bound.look(tensor._spec.name)
        if tensor._bound.sums is not None:
            tensor._bound.sums.drop(tensor._spec.index)
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(tensor, value)


class _ByTables(RangeTensor):
    """A range whose calls are looked up in the two tables."""

    is_sparse = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler: Handler = FUNCTIONS.get(func, with_values)
        return handler(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return ATEN[func](func, args, kwargs or {})


class ShardedTensor(_ByTables):
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
        if self._bound is not None and torch._C._is_torch_function_enabled():
            raise swapped(self._spec.name)
        count: int = super()._use_count()  # type: ignore[misc]
        return count


class HeldGradient(ShardedTensor):
    """What a parameter's ``.grad`` is while ``no_sync`` holds back a sum of it: see Note [Held gradients].

    Note: [Held gradients]
        Whoever clears gradients reads ``.grad`` first and clears nothing where it is None.  So it is this: clearing it, or
        setting it to zero, does that to the sum, on this rank alone, as a rank does that drops its batch.  Whoever uses its
        values needs the sum of all ranks: that is reduced then, and this is the parameter's gradient from then on.
    """

    _param: RangeTensor
    _sums: HeldSums
    _drops: int
    _reduced: torch.Tensor | BlockRange | None

    @classmethod
    def of(cls, param: RangeTensor, sums: HeldSums) -> HeldGradient:
        """That of a bound parameter."""
        spec = param._spec
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=param.dtype, device=param.device
        )
        made._on, made._spec, made._bound, made._origin, made._reduced = param._on, spec, None, None, None
        made._param, made._sums, made._drops = param, sums, sums.drops(spec.index)
        held: HeldGradient = made
        return held

    @property
    def _at(self) -> torch.Tensor | BlockRange:
        if self._reduced is None:
            index, name = self._spec.index, self._spec.name
            if self._sums.drops(index) == self._drops:
                self._sums.reduce()
            with torch._C.DisableTorchFunctionSubclass():
                grad = _GRAD.__get__(self._param)
            if self._sums.drops(index) != self._drops or not isinstance(grad, ShardedTensor):
                raise ShardedOpError(
                    f"Cannot use {name}.grad. Expected the gradient that was read inside no_sync, found that it was cleared or "
                    f"set since. Clone it before, or read {name}.grad again."
                )
            self._reduced = grad._at
        return self._reduced

    @_at.setter
    def _at(self, value: torch.Tensor | BlockRange) -> None:
        self._reduced = value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._foreach_zero_:
            for grad in args[0]:
                grad.zero_()
            return None
        if func in _OF_HELD and isinstance(args[0], HeldGradient) and args[0]._reduced is None:
            if func is torch.Tensor.zero_:
                args[0]._zero()
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def _zero(self) -> None:
        self._sums.zero(self._spec.index)
        with torch._C.DisableTorchFunctionSubclass():
            grad = _GRAD.__get__(self._param)
        if grad is not None:
            grad.zero_()


#: What is done to a gradient on the way to clearing it.
_OF_HELD: tuple[Any, ...] = (
    torch.Tensor.zero_, torch.Tensor.detach, torch.Tensor.detach_, torch.Tensor.requires_grad_,
    _DATA.__get__,
)  # fmt: skip


class ShardedVector(_ByTables):
    """Ranges of many parameters as one vector, see Note [Vectors]: no parameter's gradient or state, and no `ShardedTensor`."""

    @property
    def parts(self) -> tuple[ParamShard, ...]:
        """The parameters, in the vector's order."""
        assert isinstance(self._spec, VectorShard)
        return self._spec.parts

    def full_tensor(self) -> torch.Tensor:
        """The whole vector as a new plain tensor on every rank.  Collective; not differentiable."""
        counts = [sum(piece.numel for piece in part.pieces) for part in self.parts]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            pairs = zip(self._local.split(counts), self.parts, strict=True)
            return torch.cat([ShardedTensor(own, part).full_tensor().reshape(-1) for own, part in pairs])


_VECTORS = Vectors(ShardedTensor, ShardedVector)
ATEN.update(_VECTORS.aten())
FUNCTIONS.update(_VECTORS.functions())


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
