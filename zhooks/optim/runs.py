"""Steps torch's own optimizers on runs: ranges of parameters that lie one after another, as one tensor each.

Each element is updated by itself, so what an optimizer computes on a run is what it computes on its parameters one by one: a
unit of nine parameters costs what one does, and nothing is looked up in the tables of tensor types.  ``step_hooks.py`` steps so
what is on the device, ``kernel.py`` a flat that a tier has brought.  It never decides which flats, and moves nothing.

Note: [What a run is]
    Parameters of one group whose ranges, gradients and states follow each other in memory, in one order, and whose other states
    (counts of steps) are equal.  Where states alone lie apart (a state dict was loaded), they are put together first.  Numbers
    in states stay one tensor a parameter: of a run the first one's is changed, and the others are set to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zhooks.tensor import ShardedTensor

__all__ = ["runs_of", "step_runs"]

States = dict[Any, Any]


class Run:
    """Parameters that are updated as one tensor.

    Attributes:
        group: the number of theirs.
        values, grads: each one's range, 1-D.
        states: each one's, as the optimizer holds them.
    """

    def __init__(self, group: int) -> None:
        self.group = group
        self.params: list[Any] = []
        self.values: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.states: list[States] = []
        self._ends: Any = None
        self._kinds: States = {}

    def add(self, param: Any, value: Tensor, grad: Tensor, states: States) -> bool:
        """Take one more parameter, if it follows what is here."""
        kinds = {key: _kind(state) for key, state in states.items()}
        if self.params and kinds != self._kinds:
            return False
        if value.numel():
            if self._ends not in (None, (_start(value), _start(grad))):
                return False
            self._ends = _end(value), _end(grad)
        self._kinds = kinds
        self.params.append(param)
        self.values.append(value)
        self.grads.append(grad)
        self.states.append(states)
        return True

    def joined(self) -> tuple[Tensor, Tensor, States]:
        """Value, gradient and states as one tensor each; numbers are the first parameter's."""
        states = {key: self._joined(key) if isinstance(one, ShardedTensor) else one for key, one in self.states[0].items()}
        return _joined(self.values), _joined(self.grads), states

    def _joined(self, key: Any) -> Tensor:
        """A state of all of them, whose ranges are in one memory from now on."""
        states = [states[key] for states in self.states]
        ranges = [state._local for state in states]
        filled = [one for one in ranges if one.numel()]
        if all(_end(one) == _start(two) for one, two in pairwise(filled)):
            return _joined(ranges)
        packed = torch.cat(ranges)
        for state, own in zip(states, self.split(packed), strict=True):
            before = state._at
            for alias in (state, *state._spec.aliases.values()):
                if alias._at is before:
                    alias._at = own
        return packed

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Each parameter's range of a tensor for all of them."""
        return tensor.split_with_sizes([one.numel() for one in self.values])


def runs_of(optimizer: Optimizer, params: Iterable[tuple[Any, int]]) -> list[Run] | None:
    """Parameters that have gradients, in the order of their flats and each with the number of its group, as runs.

    None where a gradient or a state is no range like its parameter, or a number in a state is on a device.
    """
    runs: list[Run] = []
    with torch._C.DisableTorchFunctionSubclass():
        for param, group in params:
            grad: Any = param.grad
            if grad is None:
                continue
            states = optimizer.state.get(param, {})
            if not _like(grad, param) or not all(_known(state, param) for state in states.values()):
                return None
            value, local = param._local, grad._local
            if (value.dtype, value.device) != (local.dtype, local.device):
                return None
            if not (runs and runs[-1].group == group and runs[-1].add(param, value, local, states)):
                runs.append(Run(group))
                runs[-1].add(param, value, local, states)
    return runs


@torch.no_grad()
def step_runs(optimizer: Optimizer, runs: Sequence[Run], step: Callable[[Sequence[Sequence[nn.Parameter]]], None]) -> None:
    """Update the parameters of runs and their states.

    Args:
        step: steps the optimizer on these tensors alone, group by group.
    """
    groups: list[list[Any]] = [[] for _ in optimizer.param_groups]
    stands: list[tuple[Run, Any, States]] = []
    try:
        for run in runs:
            stand: Any
            stand, stand.grad, given = run.joined()
            stands.append((run, stand, given))
            if given:
                optimizer.state[stand] = dict(given)
            groups[run.group].append(stand)
        step(groups)
    finally:
        written: list[Any] = []
        for run, stand, given in stands:
            written.extend(_give_back(optimizer, run, given, optimizer.state.pop(stand, {})))
        for tensor in written:
            tensor._written()
        torch.autograd.graph.increment_version(written)


def _give_back(optimizer: Optimizer, run: Run, given: States, found: States) -> Iterator[Any]:
    """The states that the step left, to each parameter; returns what it has written."""
    kept: list[States] = [optimizer.state[param] for param in run.params] if found else run.states
    for key, value in found.items():
        in_place = key in given and value is given[key]
        if isinstance(value, Tensor) and value.dim():
            if in_place:
                yield from (states[key] for states in kept)
                continue
            for param, states, own in zip(run.params, kept, run.split(value), strict=True):
                states[key] = ShardedTensor(own, param._spec, device=param._on)
        elif isinstance(value, Tensor) and in_place:
            others = [states[key] for states in kept[1:]]
            if others:
                torch._foreach_copy_(others, [value] * len(others))
        else:
            for states in kept:
                states[key] = value.clone() if isinstance(value, Tensor) else value
    yield from run.params


def _like(tensor: Any, param: Any) -> bool:
    """It is a range like the parameter's."""
    return isinstance(tensor, ShardedTensor) and isinstance(param, ShardedTensor) and tensor._spec is param._spec


def _known(state: Any, param: Any) -> bool:
    """A range, a number in host memory, or no tensor."""
    if isinstance(state, Tensor) and not _like(state, param):
        return type(state) is Tensor and state.dim() == 0 and state.device.type == "cpu"
    return True


def _kind(state: Any) -> Any:
    """What states of parameters in one run have in common."""
    if isinstance(state, ShardedTensor):
        return state.dtype
    return (state.dtype, state.item()) if isinstance(state, Tensor) else state


def _start(tensor: Tensor) -> tuple[int, torch.dtype, int]:
    """Its memory, and where in it the tensor begins: memory of two allocations may be adjacent, too."""
    return tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.data_ptr()


def _end(tensor: Tensor) -> tuple[int, torch.dtype, int]:
    """Where the next one's begins."""
    memory, dtype, start = _start(tensor)
    return memory, dtype, start + tensor.nbytes


def _joined(ranges: Sequence[Tensor]) -> Tensor:
    """Ranges that follow each other in memory, as one."""
    first = next((one for one in ranges if one.numel()), ranges[0])
    return first.as_strided((sum(one.numel() for one in ranges),), (1,))
