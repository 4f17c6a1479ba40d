"""Into the run, what was found in its order: values, gradients and states, one tensor of one flat buffer at a time.

``check_shard.py`` makes a ``Loading`` once it has found nothing wrong, ``save_load.py`` applies it when no rank has.  It
writes to whatever tier a tensor is on, and never decides whether a file fits the run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.shards import ShardReader
from offload.store import Mode
from zhooks.checkpoint.ignored_values import plain_of
from zhooks.checkpoint.rng import restore
from zhooks.checkpoint.shard_contents import RunState, buffer_name, extra_states, gradient_name, kept_whole, tensor_name
from zhooks.layout import part_of
from zhooks.optim import OwnedStates
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

__all__ = ["FlatState", "Loading", "OptimizerStates"]


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """What one optimizer shall hold: options group by group, and each parameter's state in order.

    Attributes:
        owned: reads the states of a parameter that is updated whole.
    """

    optimizer: torch.optim.Optimizer
    options: Sequence[dict[str, Any]]
    entries: Mapping[nn.Parameter, dict[Any, Any]]
    owned: Mapping[nn.Parameter, Callable[[], OwnedStates]]
    loose: Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class FlatState:
    """One kind of state of one flat buffer: the tensor in the file, and which parameters have it."""

    states: OptimizerStates
    key: Any
    name: str
    held: Sequence[int]


@dataclass(frozen=True, slots=True)
class Loading:
    """A file that fits the run, ready to be applied.  Made by ``check``."""

    run: RunState
    reader: ShardReader
    buffers: Mapping[str, ShardReader]
    ignored: Sequence[str]
    gradients: Sequence[Sequence[int] | None]
    partials: Sequence[Sequence[bool] | None]
    states: Sequence[OptimizerStates]
    flat_states: Mapping[int, Sequence[FlatState]]
    modules: Mapping[str, Any]
    objects: Mapping[str, Any]
    rng: dict[str, Any]
    rounding: Mapping[str, Any]
    extra: dict[str, Any]

    def hand_over(self) -> Callable[[], None]:
        """Give objects and modules their own states: they alone can refuse what was checked.  Returns what undoes that.

        Raises:
            CheckpointError: one refused; all have what they had.
        """
        given = self.run.objects or {}
        pairs: list[tuple[str, Any, Any, Any]] = [
            (f"objects[{name!r}]", given[name].state_dict, given[name].load_state_dict, state)
            for name, state in self.objects.items()
        ]
        for name, module in extra_states(self.run.model).items():
            pairs.append((f"extra state of {name}", module.get_extra_state, module.set_extra_state, self.modules[name]))
        done: list[tuple[Any, Any]] = []

        def undo() -> None:
            while done:
                put, old = done.pop()
                put(old)

        for name, get, put, state in pairs:
            old = copy.deepcopy(get())
            try:
                put(state)
            except Exception as error:
                with suppress(Exception):
                    # Who refuses one state half-way may refuse its own, too.
                    put(old)
                undo()
                raise CheckpointError(
                    f"{self.reader.path}: expected states that their owners take, found that {name} refuses its own: "
                    f"{type(error).__name__}: {error}. Pass the objects that were saved, or load another checkpoint."
                ) from error
            done.append((put, old))
        return undo

    def apply(self) -> None:
        """Load everything else, the random states last.

        Raises:
            CheckpointError: the file cannot be read a second time; the run is partly loaded.
        """
        bus = self.run.bus
        with torch.inference_mode(False), torch.no_grad():
            for number, flat in enumerate(self.run.flats):
                nbytes = flat.shard_numel * flat.kind.master.itemsize
                bus.begin("load", flat.name, nbytes)
                self._flat(number, flat)
                self.run.landed(flat)
                bus.end("load", flat.name, nbytes)
            for name, value in kept_whole(self.run, "load").items():
                value.copy_(self.buffers[name].tensor(buffer_name(name)))
            for name, param in plain_of(self.run.ignored, "load").items():
                param.grad = None
                if name in self.ignored:
                    param.grad = torch.empty_like(param)
                    part_of(param.grad).copy_(self.reader.tensor(gradient_name(name)))
        for states in self.states:
            _finish_optimizer(states, self.run)
        restore(self.rng, self.run.devices)
        if self.rounding:
            self.run.rounding.restore(self.rounding)

    def _flat(self, number: int, flat: Flat) -> None:
        shard = flat.buffer.overwritten()
        _pour(self.reader, tensor_name(number, "value"), [(0, shard)])
        del shard
        flat.written()
        with torch._C.DisableTorchFunctionSubclass():
            for param in flat.params:
                param.grad = None
            self._partial(number, flat)
            self._gradient(number, flat)
        for saved in self.flat_states.get(number, ()):
            self._state(flat, saved)
        for states in self.states:
            for param in flat.params:
                states.optimizer.state.pop(param, None)
                if param in states.owned:
                    states.optimizer.state[param] = states.owned[param]()
                elif param in states.entries:
                    states.optimizer.state[param] = states.entries[param]

    def _gradient(self, number: int, flat: Flat) -> None:
        held, name = self.gradients[number], tensor_name(number, "gradient")
        if held is None:
            return
        gradient = self.run.reducer.gradients.get(flat.number)
        if gradient is not None and gradient.shard.reserve():
            try:
                _pour(self.reader, name, [(0, gradient.shard.overwritten())])
                for index in held:
                    flat.params[index].grad = gradient.shard.claim(index)
            finally:
                gradient.shard.hand_over()
            return
        grads = {index: _new(flat, index, flat.kind.master) for index in held}
        _pour(self.reader, name, [(flat.span(index)[0], grad._local) for index, grad in grads.items()])
        for index, grad in grads.items():
            flat.params[index].grad = grad

    def _partial(self, number: int, flat: Flat) -> None:
        """What ``no_sync`` had held back: the next backward adds to it."""
        gradient, present = self.run.reducer.gradients.get(flat.number), self.partials[number]
        if gradient is None:
            return
        gradient.resume(None, [False] * len(flat.params))
        if present is not None:
            partial = gradient.buffer(flat.layout.padded)
            _pour(self.reader, tensor_name(number, "partial"), [(0, partial)])
            gradient.resume(partial, present)

    def _state(self, flat: Flat, saved: FlatState) -> None:
        """One kind of state: into the tensors that exist, else into new ones."""
        dtype = self.reader.entry(saved.name).dtype
        made: list[tuple[int, ShardedTensor]] = []
        for index in saved.held:
            param = flat.params[index]
            held = saved.states.optimizer.state.get(param, {}).get(saved.key)
            fits = isinstance(held, ShardedTensor) and held.dtype == dtype and held._spec is flat.specs[index]
            made.append((index, held if fits else _new(flat, index, dtype)))
            saved.states.entries[param][saved.key] = made[-1][1]
        if len(made) == len(flat.params):
            # All of it is overwritten: what a failed disk has lost is not asked for.
            for block in {block for _, state in made if (block := state._block) is not None}:
                block.tensor(Mode.WRITE_ALL).zero_()
        _pour(self.reader, saved.name, [(flat.span(index)[0], state._local) for index, state in made])


def _new(flat: Flat, index: int, dtype: torch.dtype) -> ShardedTensor:
    local = torch.empty(flat.span(index)[1], dtype=dtype, device=flat.kind.device)
    return ShardedTensor(local, flat.specs[index])


def _pour(reader: ShardReader, name: str, places: Sequence[tuple[int, Tensor]]) -> None:
    """Copy a tensor of the file chunk by chunk into 1-D tensors that begin at these elements of it, in order."""
    first = 0
    for at, chunk in reader.chunks(name):
        end = at + chunk.numel()
        while first < len(places) and places[first][0] + places[first][1].numel() <= at:
            first += 1
        for start, out in places[first:]:
            if start >= end:
                break
            low, high = max(start, at), min(start + out.numel(), end)
            out[low - start : high - start].copy_(chunk[low - at : high - at])


def _finish_optimizer(states: OptimizerStates, run: RunState) -> None:
    """Parameters of other models, states without a parameter, and the groups' options as they were saved."""
    optimizer = states.optimizer
    own = {id(param) for flat in run.flats for param in flat.params}
    for key in [key for key in optimizer.state if id(key) not in own and not isinstance(key, ShardedTensor)]:
        del optimizer.state[key]
    optimizer.state.update({param: state for param, state in states.entries.items() if id(param) not in own})
    optimizer.state.update(states.loose)
    for group, options in zip(optimizer.param_groups, states.options, strict=True):
        group.update(options)
