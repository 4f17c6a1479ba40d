"""Which kernels torch has for what it calls by one name on several devices: those of a GPU or of a CPU, for the virtual device.

``torch_device.py`` registers them.  Attention, dropout and recurrent layers are other operations on a CPU than on CUDA, with
other memory.

Note: [Recurrent layers]
    torch's own functions for these layers ask for the device of their tensors, and have the fused cells of a GPU for the
    virtual one.  A CPU has one kernel of oneDNN for a layer of an LSTM, and for all else cells of several operations, after one
    product of the layer's inputs for all steps.  Source: ``aten/src/ATen/native/RNN.cpp`` and ``mkldnn/RNN.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey

from offload.virtual.memory import by_key, machine_on
from offload.virtual.operations import run

__all__ = ["register_choices"]

_aten: Any = torch.ops.aten
#: Of these torch has one kernel on CPUs and on CUDA, and for other devices one that is made of several operations.
_ONE_KERNEL = ("native_layer_norm", "native_group_norm", "silu_backward", "mish_backward")


def register_choices(aten: torch.library.Library) -> None:
    """The kernels, by what the machine of the moment is."""
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        aten.impl("scaled_dot_product_attention", _attention, key)
        aten.impl("dropout", _dropout, key)
        for name in _ON_CPU:
            aten.impl(name, partial(_recurrent_layer, name), key)
    aten.impl("_safe_softmax", _safe_softmax, "PrivateUse1")
    for name in _ONE_KERNEL:
        aten.impl(name, partial(run, getattr(_aten, name).default), "PrivateUse1")


def _accelerated() -> bool:
    """The machine is a GPU; else a CPU, for which torch has other kernels."""
    machine = machine_on()
    return machine is None or machine.accelerated


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The kernel that torch's choice would most likely fall on; its memory is that of the fused ones."""
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    fits = query.dim() == 4 and query.shape[-1] == value.shape[-1]
    constant = attn_mask is None or not attn_mask.requires_grad
    if not _accelerated() and fits and constant and not dropout_p:
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        on_cpu: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
        return on_cpu
    if _accelerated() and fits and attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        flash: Tensor = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return flash
    if _accelerated() and fits and constant:
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


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """A CPU has no fused kernel for it."""
    if _accelerated() or not train or not 0 < p < 1 or not x.numel():
        fused: Tensor = by_key(DispatchKey.CompositeImplicitAutograd, _aten.dropout.default, x, p, train)
        return fused
    noise = torch.empty_like(x).bernoulli_(1 - p)
    noise.div_(1 - p)
    return x * noise


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """One operation on a CPU, whatever is inside; on a GPU it is those it is made of."""
    if not _accelerated():
        return cast(Tensor, run(_aten._safe_softmax.default, x, dim, dtype))
    made: Tensor = by_key(DispatchKey.CompositeExplicitAutograd, _aten._safe_softmax.default, x, dim, dtype)
    return made


def _recurrent_layer(name: str, *arguments: Any) -> Any:
    """A CPU's, or the cells of a GPU one after the other."""
    if not _accelerated():
        return _ON_CPU[name](*arguments)
    packet, _, overload = name.partition(".")
    return by_key(DispatchKey.CompositeImplicitAutograd, getattr(getattr(_aten, packet), overload or "default"), *arguments)


# --- recurrent layers of a CPU --------------------------------------------------------------------------------------------

#: What a cell hands on: its output, and of an LSTM the cell's state.
State = tuple[Tensor, ...]
_LSTM = 2


@dataclass(frozen=True, slots=True)
class _Weights:
    """One direction of a layer."""

    inner: Tensor
    back: Tensor
    inner_bias: Tensor | None = None
    back_bias: Tensor | None = None
    projection: Tensor | None = None

    def of_input(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner, self.inner_bias)

    def of_state(self, state: State) -> Tensor:
        return F.linear(state[0], self.back, self.back_bias)


#: The input's share of the gates, the state and the weights to the next state.
Cell = Callable[[Tensor, State, _Weights], State]
#: A cell, the input, the state and the weights to the output and the last state; the last argument reverses the steps.
Layer = Callable[[Cell, Tensor, State, _Weights, bool], tuple[Tensor, State]]


def _tanh_cell(gates: Tensor, state: State, weights: _Weights) -> State:
    return (torch.tanh(weights.of_state(state).add_(gates)),)


def _relu_cell(gates: Tensor, state: State, weights: _Weights) -> State:
    return (torch.relu(weights.of_state(state).add_(gates)),)


def _gru_cell(gates: Tensor, state: State, weights: _Weights) -> State:
    inputs, own = gates.unsafe_chunk(3, 1), weights.of_state(state).unsafe_chunk(3, 1)
    reset = own[0].add_(inputs[0]).sigmoid_()
    update = own[1].add_(inputs[1]).sigmoid_()
    new = inputs[2].add(own[2].mul_(reset)).tanh_()
    return ((state[0] - new).mul_(update).add_(new),)


def _lstm_cell(gates: Tensor, state: State, weights: _Weights) -> State:
    chunks = weights.of_state(state).add_(gates).unsafe_chunk(4, 1)
    take, keep, new, give = chunks[0].sigmoid_(), chunks[1].sigmoid_(), chunks[2].tanh_(), chunks[3].sigmoid_()
    cell = (keep * state[1]).add_(take * new)
    out = give * cell.tanh()
    return (out if weights.projection is None else out.matmul(weights.projection.t())), cell


def _layer(cell: Cell, x: Tensor, state: State, weights: _Weights, reverse: bool) -> tuple[Tensor, State]:
    """Over [steps, rows, width]."""
    steps, outputs = weights.of_input(x).unbind(0), []
    for gates in reversed(steps) if reverse else steps:
        state = cell(gates, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _packed_layer(
    sizes: Sequence[int], cell: Cell, x: Tensor, state: State, weights: _Weights, reverse: bool
) -> tuple[Tensor, State]:
    """Over [all rows, width] of sequences that end one by one: so many rows at each step."""
    gates, whole = weights.of_input(x), state
    offsets = [sum(sizes[:step]) for step in range(len(sizes))]
    outputs, ended, rows = [], list[State](), sizes[-1 if reverse else 0]
    if reverse:
        state = _rows(whole, 0, rows)
    for offset, size in reversed(list(zip(offsets, sizes, strict=True))) if reverse else zip(offsets, sizes, strict=True):
        if size > rows:
            state = _joined([state, _rows(whole, rows, size)])
        elif size < rows:
            ended.append(_rows(state, size, rows))
            state = _rows(state, 0, size)
        rows = size
        state = cell(gates.narrow(0, offset, size), state, weights)
        outputs.append(state[0])
    last = state if reverse else _joined([state, *reversed(ended)])
    return torch.cat(outputs[::-1] if reverse else outputs), last


def _rows(state: State, start: int, stop: int) -> State:
    return tuple(each.narrow(0, start, stop - start) for each in state)


def _joined(states: Sequence[State]) -> State:
    return tuple(torch.cat(each) for each in zip(*states, strict=True))


def _layers(
    layer: Layer, cell: Cell, x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, State]:  # fmt: skip
    """All layers, each in one or two directions; the state has one row for each."""
    states = list(zip(*(each.unbind(0) for each in state), strict=True))
    directions = 2 if bidirectional else 1
    own, last = _weights(weights, len(states), has_biases), list[State]()
    for number in range(num_layers):
        outputs = []
        for direction in range(directions):
            place = number * directions + direction
            out, end = layer(cell, x, states[place], own[place], direction == 1)
            outputs.append(out)
            last.append(end)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and number < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x, tuple(torch.stack(each) for each in zip(*last, strict=True))


def _weights(weights: Sequence[Tensor], count: int, has_biases: bool) -> list[_Weights]:
    each = len(weights) // count
    rows = [list(weights[place : place + each]) for place in range(0, len(weights), each)]
    if has_biases:
        return [_Weights(*row) for row in rows]
    return [_Weights(row[0], row[1], projection=row[2] if each == 3 else None) for row in rows]


def _recurrent(cell: Cell, x: Tensor, state: Tensor, weights: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    *rest, batch_first = options
    out, (last,) = _layers(_layer, cell, x.transpose(0, 1) if batch_first else x, (state,), weights, *rest)
    return out.transpose(0, 1) if batch_first else out, last


def _packed(
    cell: Cell, x: Tensor, sizes: Tensor, state: Tensor, weights: Sequence[Tensor], *options: Any
) -> tuple[Tensor, Tensor]:
    out, (last,) = _layers(partial(_packed_layer, sizes.tolist()), cell, x, (state,), weights, *options)
    return out, last


def _lstm(x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *rest, batch_first = options
    steps = x.transpose(0, 1) if batch_first else x
    if x.dtype is torch.float32 and state[0].shape[-1] == state[1].shape[-1] and torch.backends.mkldnn.is_available():
        out, (hidden, cell) = _onednn_layers(steps.contiguous(), (state[0], state[1]), weights, *options)
    else:
        out, (hidden, cell) = _layers(_layer, _lstm_cell, steps, (state[0], state[1]), weights, *rest)
    return out.transpose(0, 1) if batch_first else out, hidden, cell


def _packed_lstm(
    x: Tensor, sizes: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    layer = partial(_packed_layer, sizes.tolist())
    out, (hidden, cell) = _layers(layer, _lstm_cell, x, (state[0], state[1]), weights, *options)
    return out, hidden, cell


def _onednn_layers(
    x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, State]:  # fmt: skip
    """One kernel for each layer and direction."""
    hidden, cell = (each.contiguous() for each in state)
    directions, last = 2 if bidirectional else 1, list[State]()
    each = 4 if has_biases else 2
    for number in range(num_layers):
        outputs = []
        for direction in range(directions):
            place = number * directions + direction
            own = list(weights[each * place : each * place + each])
            own += [] if has_biases else [torch.zeros_like(weight) for weight in own]
            out, *end, _ = torch.ops.aten.mkldnn_rnn_layer(
                x, *own, hidden[place], cell[place], direction == 1, [], _LSTM, hidden.shape[-1], num_layers, has_biases,
                bidirectional, batch_first, train,
            )  # fmt: skip
            outputs.append(out)
            last.append(tuple(end))
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and number < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x, tuple(torch.stack(each) for each in zip(*last, strict=True))


def _one_step(cell: Cell, x: Tensor, state: Tensor, *weights: Any) -> Tensor:
    own = _Weights(*weights)
    return cell(own.of_input(x), (state,), own)[0]


def _lstm_step(x: Tensor, state: Sequence[Tensor], *weights: Any) -> State:
    own = _Weights(*weights)
    return _lstm_cell(own.of_input(x), (state[0], state[1]), own)


#: By the operation's name.
_ON_CPU: dict[str, Callable[..., Any]] = {
    "lstm.input": _lstm,
    "lstm.data": _packed_lstm,
    "lstm_cell": _lstm_step,
}
for _name, _cell in (("gru", _gru_cell), ("rnn_tanh", _tanh_cell), ("rnn_relu", _relu_cell)):
    _ON_CPU[f"{_name}.input"] = partial(_recurrent, _cell)
    _ON_CPU[f"{_name}.data"] = partial(_packed, _cell)
    _ON_CPU[f"{_name}_cell"] = partial(_one_step, _cell)
