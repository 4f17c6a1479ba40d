"""What each ATen operation does to one rank's range: local, combined over the ranks, gathered, or refused by name.

``ShardedTensor.__torch_dispatch__`` reads ``ATEN``, below autograd.  Element-wise work is done on the 1-D ranges; totals are
combined over the ranks; anything else reads the gathered value of a parameter, and is refused for a gradient or a state.
It never guesses: an operation it cannot do right raises and says what to do instead.
"""

from __future__ import annotations

from typing import Any

import torch

from zhooks.tensor.collectives import collective
from zhooks.tensor.elementwise import (
    ReadOnly,
    elementwise,
    in_place,
    lists_in_place,
    local,
    readable_whole,
    stepping,
    whole,
    writes_only_self,
)
from zhooks.tensor.norms import foreach_norm, norm
from zhooks.tensor.range_tensor import Handler, Origin
from zhooks.tensor.totals import TOTALS, equal, total, unscale
from zhooks.tensor.written import is_collective

aten = torch.ops.aten

_ALIASES = {aten.detach.default, aten.alias.default, aten.detach_.default}
_RANDOM = {
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.exponential_.default, aten.rand_like.default,
    aten.randn_like.default, aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default, aten.random_.default,
}  # fmt: skip
_NOT_POINTWISE_FOREACH = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}


class _Rules(dict[Any, Handler]):
    """Overload -> its handler, found out when it is first met."""

    def __missing__(self, func: Any) -> Handler:
        rule = self[func] = _rule(func)
        return rule


def _rule(func: Any) -> Handler:
    name = func._schema.name.split("::")[1]
    if func in _ALIASES:
        return _alias
    if is_collective(func):
        return collective
    if func in _RANDOM:
        return _random
    if func in TOTALS:
        return total
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return unscale
    if name == "linalg_vector_norm" or name == "norm":
        return norm
    if name == "_foreach_norm":
        return foreach_norm
    if func in _BY_OVERLOAD:
        return _BY_OVERLOAD[func]
    if name in ("_local_scalar_dense", "_has_compatible_shallow_copy_type", "view"):
        return whole
    if name.startswith("_foreach_") and name not in _NOT_POINTWISE_FOREACH:
        return lists_in_place if name.endswith("_") else local
    if name.startswith("_fused_") and name.endswith("_"):
        return lists_in_place
    if name.startswith("_fused_") or elementwise(func):
        return in_place if writes_only_self(func) else local
    return whole


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    # As in plain torch, an alias of a normal tensor is one under inference_mode too: it shares the version counter.
    with torch.inference_mode(tensor.is_inference()):
        origin = Origin(0) if tensor._bound is None and isinstance(tensor, torch.nn.Parameter) else tensor._origin
        alias = type(tensor)(tensor._at, tensor._spec, bound=tensor._bound, device=tensor._on, origin=origin)
    tensor._spec.aliases[id(alias)] = alias
    return alias


def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The shape it has already; any other needs the whole."""
    tensor, shape = args[0], args[1]
    if tuple(shape) == tuple(tensor.shape):
        return _alias(func, args, kwargs)
    if tensor._origin is not None and not tensor._spec.contiguous and readable_whole(tensor):
        # reshape has cloned it to be contiguous, and the clone has kept the parameter's strides.
        return ReadOnly.of(func(tensor.full_tensor().contiguous(), shape), ())
    return whole(func, args, kwargs)


def _same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor and keep the range: the same numbers as the plain model's with the same generator."""
    tensor = args[0]
    spec = tensor._spec
    whole = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor._on)
    drawn = func(whole, *args[1:], **{key: value for key, value in kwargs.items() if key != "memory_format"})
    if not func._schema.is_mutable and tensor.numbers is not None and not stepping():
        return drawn  # each rank has a generator of its own
    local = spec.take(drawn).clone()
    if not func._schema.is_mutable:
        return type(tensor)(local, spec, device=tensor._on)
    tensor._local.copy_(local)
    tensor._written()
    return tensor


_BY_OVERLOAD: dict[Any, Handler] = {
    aten.equal.default: equal,
    aten.is_same_size.default: _same_size,
    aten.view.default: view,
    aten._unsafe_view.default: view,
}

#: How each ATen overload is carried out on sharded arguments.
ATEN = _Rules()
