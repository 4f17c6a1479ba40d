"""``torch.autocast("virtual")``: operations cast what they are given by the rules of CUDA.

``torch_device.py`` registers `autocast_kernels`.  Which operations have a rule is asked of torch, whose table for CUDA is there
without CUDA; which rule it is, is below.  Casts are not cached: torch caches those of leaves alone, and gathered parameters are
none.

Source: ``aten/src/ATen/autocast_mode.h``; https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet

from offload.errors import SimulationError
from offload.virtual.memory import NAME
from offload.virtual.refused import other_autocast, user_line

__all__ = ["autocast_kernels", "refuses_cuda"]

#: In the dtype that autocast was given; any other with a rule, but for those below, is in fp32.
_LOWER = frozenset({
    "_convolution", "_convolution.deprecated", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d",
    "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "cudnn_convolution", "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot", "linear",
    "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention",
})  # fmt: skip
#: In the widest dtype that they are given.
_WIDEST = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot",
    "vdot",
})  # fmt: skip
#: Told to sum in fp32, unless the caller says otherwise.
_SUMS = frozenset({
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm", "log_softmax.int",
    "prod", "prod.dim_int", "softmax.int", "sum", "sum.dim_IntList",
})  # fmt: skip
#: How torch's warning begins, which differs by version.
_DISABLED = "User provided device_type of 'cuda'|CUDA is not available"
_REFUSED = "binary_cross_entropy"
_CUDA, _OURS = "AutocastCUDA", DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))


def autocast_kernels() -> dict[str, Callable[..., Any]]:
    """By the operation's name, for each that has one on CUDA."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        space, _, name_here = name.partition("::")
        if space == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(name, _CUDA):
            found[name_here] = _kernel(name_here)
    return found


def _kernel(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    below = getattr(getattr(torch.ops.aten, packet), overload or "default")
    if name in _SUMS:
        return _sums(below)
    if name == _REFUSED:
        return _refuse
    rule = _lower if name in _LOWER else _widest if name in _WIDEST else _fp32

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = rule(_floating((args, list(kwargs.values()))))
        with torch._C._ExcludeDispatchKeyGuard(_OURS):
            return below(*_cast(args, dtype), **{key: _cast(value, dtype) for key, value in kwargs.items()})

    return kernel


def _lower(_: list[Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype(NAME)


def _widest(given: list[Tensor]) -> torch.dtype:
    return torch.float32 if any(tensor.dtype is torch.float32 for tensor in given) else torch.get_autocast_dtype(NAME)


def _fp32(_: list[Tensor]) -> torch.dtype:
    return torch.float32


def _sums(below: Any) -> Callable[..., Any]:
    place = next(place for place, argument in enumerate(below._schema.arguments) if argument.name == "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        unsaid = len(args) <= place and kwargs.get("dtype") is None
        if unsaid and _counts(args[0]):
            kwargs["dtype"] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_OURS):
            return below(*args, **kwargs)

    return kernel


def _refuse(*_: Any, **__: Any) -> Any:
    raise SimulationError(
        "binary_cross_entropy expected it outside of autocast, in which CUDA refuses it as unsafe; found it inside. Use "
        "binary_cross_entropy_with_logits."
    )


def _counts(value: Any) -> bool:
    here = isinstance(value, Tensor) and value.device.type == NAME
    return here and value.is_floating_point() and value.dtype is not torch.float64


def _floating(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _floating(each)]
    return [value] if _counts(value) else []


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(each, dtype) for each in value)
    return value.to(dtype) if _counts(value) else value


@contextmanager
def refuses_cuda() -> Iterator[None]:
    """``torch.autocast("cuda")`` inside is an error: it would do nothing to tensors of this device.

    Where there is no CUDA torch warns of it and goes on without; where there is, `operations.run` sees that it is on.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_DISABLED, category=UserWarning)
        try:
            yield
        except UserWarning as warning:
            if not re.match(_DISABLED, str(warning)):
                raise
            raise other_autocast(user_line(warning.__traceback__)) from warning
