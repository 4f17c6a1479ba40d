"""Into the run, what was found in its order: values, gradients and states, one tensor of one flat buffer at a time.

``check_shard.py`` makes a ``Loading`` once it has found nothing wrong, ``save_load.py`` applies it when no rank has.  It
writes to whatever tier a tensor is on, and never decides whether a file fits the run.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.store import Mode
from offload.tier import Tier
from zhooks.checkpoint.ignored_values import plain_of
from zhooks.checkpoint.rng import restore
from zhooks.checkpoint.saved_folder import InFlat, Run, SavedFolder, pour, runs
from zhooks.checkpoint.shard_contents import RunState, buffer_name, extra_states, gradient_name, kept_whole
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
        owned_nbytes: of those of which this rank is the owner, the bytes of their tensors.
    """

    optimizer: torch.optim.Optimizer
    options: Sequence[dict[str, Any]]
    entries: Mapping[nn.Parameter, dict[Any, Any]]
    owned: Mapping[nn.Parameter, Callable[[], OwnedStates]]
    owned_nbytes: Mapping[nn.Parameter, int]
    loose: Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class FlatState:
    """One kind of state of one flat buffer: the dtype it is kept in, and where it is of the parameters that have it."""

    states: OptimizerStates
    key: Any
    dtype: torch.dtype
    held: Mapping[int, InFlat]


@dataclass(frozen=True, slots=True)
class Loading:
    """Folders that fit the run, ready to be applied.  Made by ``check``.

    Attributes:
        folders: all that are loaded from, the first one's loss scale too.
        values, gradients, partials: where they are, by name of the parameter; of gradients those that are held.
        buffers: the file of each, by name.
        flat_states: by the place of the flat among the run's.
    """

    run: RunState
    folders: Sequence[SavedFolder]
    values: Mapping[str, InFlat]
    buffers: Mapping[str, tuple[SavedFolder, int]]
    ignored: Mapping[str, SavedFolder]
    gradients: Mapping[str, InFlat]
    partials: Mapping[str, InFlat]
    states: Sequence[OptimizerStates]
    flat_states: Mapping[int, Sequence[FlatState]]
    modules: Mapping[str, Any]
    objects: Mapping[str, Any]
    rng: dict[str, Any]
    rounding: Mapping[str, Any]
    extra: dict[str, Any]

    def new_states(self) -> Counter[Tier]:
        """Bytes of states that loading makes, by the tier that they go to."""
        needed = Counter[Tier]()
        for number, found in self.flat_states.items():
            flat = self.run.flats[number]
            for saved in found:
                # Where one parameter's lies on the tier there is room for all of its flat buffer.
                held = [saved.states.optimizer.state.get(flat.params[index], {}).get(saved.key) for index in saved.held]
                if not any(isinstance(state, ShardedTensor) and state._block is not None for state in held):
                    needed[flat.kind.tiers.optimizer] += flat.shard_numel * saved.dtype.itemsize
        for states in self.states:
            for param, nbytes in states.owned_nbytes.items():
                if param not in states.optimizer.state:
                    tiers = [flat.kind.tiers.optimizer for flat in self.run.flats if any(param is one for one in flat.params)]
                    needed.update(dict.fromkeys(tiers, nbytes))
        return needed

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
                    f"Cannot load {self.folders[0].path}. Expected states that their objects accept, found that {name} rejects "
                    f"its own: {type(error).__name__}: {error}. Pass the objects that were saved, or load another checkpoint."
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
                folder, rank = self.buffers[name]
                value.copy_(folder.tensor(rank, buffer_name(name)))
            for name, param in plain_of(self.run.ignored, "load").items():
                param.grad = None
                if name in self.ignored:
                    param.grad = torch.empty_like(param)
                    folder = self.ignored[name]
                    part_of(param.grad).copy_(folder.tensor(folder.counterpart, gradient_name(name)))
        for states in self.states:
            _finish_optimizer(states, self.run)
        if self.rng:
            restore(self.rng, self.run.devices)
        if self.rounding:
            self.run.rounding.restore(self.rounding)

    def _flat(self, number: int, flat: Flat) -> None:
        shard = flat.storage.overwritten()
        _fill(shard, flat, {index: self.values[spec.name] for index, spec in enumerate(flat.specs)})
        del shard
        flat.written()
        with torch._C.DisableTorchFunctionSubclass():
            for param in flat.params:
                param.grad = None
            self._partial(flat)
            self._gradient(flat)
        for saved in self.flat_states.get(number, ()):
            self._state(flat, saved)
        for states in self.states:
            for param in flat.params:
                states.optimizer.state.pop(param, None)
                if param in states.owned:
                    states.optimizer.state[param] = states.owned[param]()
                elif param in states.entries:
                    states.optimizer.state[param] = states.entries[param]

    def _gradient(self, flat: Flat) -> None:
        held = {index: self.gradients[spec.name] for index, spec in enumerate(flat.specs) if spec.name in self.gradients}
        if not held:
            return
        gradient = self.run.reducer.gradients.get(flat.number)
        if gradient is not None and (shard := gradient.reserve()) is not None:
            try:
                _fill(shard.overwritten(), flat, held)
                for index in held:
                    flat.params[index].grad = gradient.claim(index)
            finally:
                gradient.hand_over()
            return
        grads = {index: _new(flat, index, flat.kind.master) for index in held}
        pour(run for index, grad in grads.items() for run in runs(held[index], flat.specs[index], grad._local))
        for index, grad in grads.items():
            flat.params[index].grad = grad

    def _partial(self, flat: Flat) -> None:
        """What ``no_sync`` had held back on this rank: the next backward adds to it."""
        gradient = self.run.reducer.gradients.get(flat.number)
        if gradient is None:
            return
        gradient.resume(None, [False] * len(flat.params))
        held = [self.partials.get(spec.name) for spec in flat.specs]
        if any(held):
            partial = gradient.buffer(flat.layout.padded).zero_()
            places = zip(held, flat.layout.starts, flat.layout.numels, strict=True)
            pour(
                Run(found.folder, found.folder.counterpart, found.name, found.param.saved.start, partial[start : start + numel])
                for found, start, numel in places
                if found is not None
            )
            gradient.resume(partial, [found is not None for found in held])

    def _state(self, flat: Flat, saved: FlatState) -> None:
        """One kind of state: into the tensors that exist, else into new ones."""
        made: list[tuple[int, ShardedTensor]] = []
        for index in saved.held:
            param = flat.params[index]
            held = saved.states.optimizer.state.get(param, {}).get(saved.key)
            fits = isinstance(held, ShardedTensor) and held.dtype == saved.dtype and held._spec is flat.specs[index]
            made.append((index, held if fits else _new(flat, index, saved.dtype)))
            saved.states.entries[param][saved.key] = made[-1][1]
        if len(made) == len(flat.params):
            # All of it is overwritten: what a failed disk has lost is not asked for.
            for block in {block for _, state in made if (block := state._block) is not None}:
                block.tensor(Mode.WRITE_ALL).zero_()
        pour(run for index, state in made for run in runs(saved.held[index], flat.specs[index], state._local))


def _new(flat: Flat, index: int, dtype: torch.dtype) -> ShardedTensor:
    local = torch.empty(flat.span(index)[1], dtype=dtype, device=flat.kind.device)
    return ShardedTensor(local, flat.specs[index])


def _fill(shard: Tensor, flat: Flat, held: Mapping[int, InFlat]) -> None:
    """Overwrite all of a shard-sized tensor: these parameters' ranges, and zeros where nothing is."""
    if len(held) < len(flat.params) or sum(flat.span(index)[1] for index in held) < shard.numel():
        shard.zero_()
    pour(run for index, found in held.items() for run in runs(found, flat.specs[index], flat.local(index, shard)))


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
