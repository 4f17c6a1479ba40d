"""Which kernels torch has for what it calls by one name on several devices: those of a GPU or of a CPU, for the virtual device.

``torch_device.py`` registers them.  Attention, dropout and recurrent layers are other operations on a CPU than on CUDA, with
other memory; it computes nothing and keeps no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DispatchKey

from offload.virtual.dispatch import by_key
from offload.virtual.recurrent import RECURRENT, layer_workspace

__all__ = ["Choices", "made_whole"]

_aten: Any = torch.ops.aten
#: Of these torch has one kernel on CPUs and on CUDA, and for other devices one that is made of several operations.
_ONE_KERNEL = ("native_layer_norm", "native_group_norm", "silu_backward", "mish_backward")


class Choices:
    """The kernels, by what the machine of the moment is.

    Args:
        run: carries out any operation, below autograd.
        accelerated: whether the machine is a GPU, or a CPU.
    """

    def __init__(self, run: Callable[..., Any], accelerated: Callable[[], bool]) -> None:
        self._run, self._accelerated = run, accelerated

    def register(self, aten: torch.library.Library) -> None:
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            aten.impl("scaled_dot_product_attention", self._attention, key)
            aten.impl("dropout", self._dropout, key)
            for name in RECURRENT:
                aten.impl(name, partial(self._recurrent, name), key)
        aten.impl("_safe_softmax", self._safe_softmax, "PrivateUse1")
        for name in _ONE_KERNEL:
            aten.impl(name, partial(self._run, getattr(_aten, name).default), "PrivateUse1")

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """The kernel that torch's choice would most likely fall on; its memory is that of the fused ones."""
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        fits = query.dim() == 4 and query.shape[-1] == value.shape[-1]
        constant = attn_mask is None or not attn_mask.requires_grad
        if not self._accelerated() and fits and constant and not dropout_p:
            if attn_mask is not None and attn_mask.dtype is torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
            on_cpu: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
            return on_cpu
        if self._accelerated() and fits and attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
            flash: Tensor = _aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return flash
        if self._accelerated() and fits and constant:
            bias = attn_mask
            if bias is not None:
                bias = torch.zeros_like(bias, dtype=query.dtype) if bias.dtype is torch.bool else bias
                bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            needs = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
            efficient: Tensor = _aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, needs, dropout_p, is_causal, scale=scale
            )[0]
            return efficient
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        plain: Tensor = _aten._scaled_dot_product_attention_math(*arguments, scale=scale)[0]
        return plain

    def _dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        """A CPU has no fused kernel for it."""
        if self._accelerated() or not train or not 0 < p < 1 or not x.numel():
            fused: Tensor = by_key(DispatchKey.CompositeImplicitAutograd, _aten.dropout.default, x, p, train)
            return fused
        noise = torch.empty_like(x).bernoulli_(1 - p)
        noise.div_(1 - p)
        return x * noise

    def _safe_softmax(self, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """One operation on a CPU, whatever is inside; on a GPU it is those it is made of."""
        if not self._accelerated():
            return cast(Tensor, self._run(_aten._safe_softmax.default, x, dim, dtype))
        made: Tensor = by_key(DispatchKey.CompositeExplicitAutograd, _aten._safe_softmax.default, x, dim, dtype)
        return made

    def _recurrent(self, name: str, *arguments: Any) -> Any:
        """A CPU's, or the cells of a GPU one after the other."""
        if not self._accelerated():
            return RECURRENT[name](*arguments)
        packet, _, overload = name.partition(".")
        return by_key(DispatchKey.CompositeImplicitAutograd, getattr(getattr(_aten, packet), overload or "default"), *arguments)


def made_whole(overload: Any, args: tuple[Any, ...], found: Any) -> Any:
    """What a meta kernel found, with what it does not know."""
    if overload is not _aten.mkldnn_rnn_layer.default:
        return found
    size = layer_workspace(tuple(args[0].shape), tuple(args[1].shape), args[-1])
    return (*found[:3], torch.empty(size, dtype=torch.uint8, device="meta"))
