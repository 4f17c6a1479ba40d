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
from torch.optim.optimizer import _foreach_supported_types

from zhooks.tensor.aten import ATEN
from zhooks.tensor.functions import FUNCTIONS, with_values
from zhooks.tensor.range_tensor import Handler, ParamShard, RangeTensor
from zhooks.tensor.vectors import Vectors, VectorShard

_GRAD: Any = torch.Tensor.grad


def _get_grad(tensor: RangeTensor) -> Any:
    if not torch._C._is_torch_function_enabled():  # this package asks
        return _GRAD.__get__(tensor)
    if tensor._bound is not None:
        tensor._bound.look(tensor._spec.name)
    with torch._C.DisableTorchFunctionSubclass():
        return _GRAD.__get__(tensor)


def _set_grad(tensor: RangeTensor, value: torch.Tensor | None) -> None:
    # What earlier backward passes still owe belongs to the gradient that goes.
    if torch._C._is_torch_function_enabled() and tensor._bound is not None:
        tensor._bound.look(tensor._spec.name)
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


_KINDS = (ShardedTensor, ShardedOverTp)
_open = 0


class Registries:
    """One attachment's claim on the list torch keeps of the tensor types that its optimizers may batch.

    The process' first attachment puts ours there, the last takes them off; nothing of torch is patched.
    """

    def __init__(self) -> None:
        self._held = False

    def open(self) -> None:
        global _open
        _open += 1
        self._held = True
        _foreach_supported_types.extend(kind for kind in _KINDS if kind not in _foreach_supported_types)

    def close(self) -> None:
        global _open
        if not self._held:
            return
        self._held = False
        _open -= 1
        if _open == 0:
            for kind in _KINDS:
                _foreach_supported_types.remove(kind)
