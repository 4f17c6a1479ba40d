"""Which kernels torch has for what it calls by one name on several devices: those of a GPU or of a CPU, for the virtual device.

``torch_device.py`` registers them.  Attention, dropout and recurrent layers are other operations on a CPU than on CUDA, with
other memory; it computes nothing and keeps no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DispatchKey

from offload.virtual.dispatch import by_key

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
            aten.impl("lstm.input", self._lstm, key)
            aten.impl("dropout", self._dropout, key)
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

    def _lstm(
        self, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """A CPU's layers are one kernel each; elsewhere, and where a CPU has none, it is the cells one after the other."""
        plain = x.dtype is torch.float32 and has_biases and not bidirectional and weights[1].shape[1] == state[0].shape[-1]
        if self._accelerated() or not plain or not torch.backends.mkldnn.is_available():
            arguments = (x, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)
            cells: tuple[Tensor, Tensor, Tensor] = by_key(DispatchKey.CompositeImplicitAutograd, _aten.lstm.input, *arguments)
            return cells
        x = x.transpose(0, 1) if batch_first else x
        hidden, cell = [], []
        for layer in range(num_layers):
            own = weights[4 * layer : 4 * layer + 4]
            x, last, inner, _ = torch.ops.aten.mkldnn_rnn_layer(
                x, *own, state[0][layer], state[1][layer], False, [], 2, state[0].shape[-1], num_layers, has_biases,
                bidirectional, batch_first, train,
            )  # fmt: skip
            hidden.append(last)
            cell.append(inner)
            if dropout and train and layer < num_layers - 1:
                x = torch.dropout(x, dropout, train)
        return x.transpose(0, 1) if batch_first else x, torch.stack(hidden), torch.stack(cell)


def made_whole(overload: Any, args: tuple[Any, ...], found: Any) -> Any:
    """What a meta kernel found, with what it does not know."""
    if overload is not _aten.mkldnn_rnn_layer.default:
        return found
    size = _rnn_workspace(tuple(args[0].shape), tuple(args[1].shape), args[-1])
    return (*found[:3], torch.empty(size, dtype=torch.uint8, device="meta"))


@cache
def _rnn_workspace(shape: tuple[int, ...], weight: tuple[int, ...], train: bool) -> int:
    """Bytes that oneDNN keeps of a layer for its backward: its own affair, so one layer of that shape runs for real."""
    gates = weight[0]
    hidden = gates // 4
    x, own, back, bias, state = (
        torch.zeros(size, dtype=torch.float32, device="cpu")
        for size in (shape, weight, (gates, hidden), (gates,), (1, shape[1], hidden))
    )
    made = torch.ops.aten.mkldnn_rnn_layer(
        x, own, back, bias, bias, state, state, False, [], 2, hidden, 1, True, False, False, train
    )
    return int(made[3].nbytes)
