"""How flats are updated: what a step has to do for each, torch's own arithmetic, and parameters in a row as one tensor.

Note: [What a run is]
    Each element is updated by itself, so what torch's own optimizers compute on a run of parameters as one tensor is what they
    compute on the parameters one by one: a unit of nine parameters costs what one does, and nothing is looked up in the tables
    of tensor types.  A run are parameters of one group whose ranges, gradients and states follow each other in memory, in one
    order, and whose other states (counts of steps) are equal.  States alone that lie apart (a state dict was loaded) are put
    together first.  Numbers in states stay one tensor a parameter: the first one's is changed, the others are set to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.device import computes_on_host
from zhooks.optim.groups import Arguments, narrowed, step_of
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

__all__ = [
    "BY_RANGES", "FlatUpdate", "TorchKernel", "by_runs", "sharded_states", "state_keys", "states_of", "step_groups",
    "update_here", "updates_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlatUpdate:
    """What a step has to do for one flat buffer: the parameters the optimizer holds, by its groups."""

    flat: Flat
    groups: tuple[tuple[nn.Parameter, ...], ...]

    def params(self) -> Iterator[nn.Parameter]:
        for group in self.groups:
            yield from group

    def in_order(self) -> Iterator[tuple[nn.Parameter, int]]:
        """As they lie in the flat, each with the number of its group."""
        group_of = {id(param): number for number, group in enumerate(self.groups) for param in group}
        return ((param, group_of[id(param)]) for param in self.flat.params if id(param) in group_of)


def updates_of(optimizer: Optimizer, flats: Iterable[Flat], without: Set[int] = frozenset()) -> list[FlatUpdate]:
    """What a step of the optimizer has to do for these flats, in their order; ``without`` parameters of these identities."""
    place: dict[int, Flat] = {id(param): flat for flat in flats for param in flat.params if id(param) not in without}
    if not place:
        return []
    by_flat: dict[int, tuple[Flat, list[list[nn.Parameter]]]] = {}
    count = len(optimizer.param_groups)
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            flat = place.get(id(param))
            if flat is not None:
                by_flat.setdefault(flat.number, (flat, [[] for _ in range(count)]))[1][number].append(param)
    return [FlatUpdate(flat, tuple(tuple(group) for group in groups)) for _, (flat, groups) in sorted(by_flat.items())]


# States of one flat's parameters.


def sharded_states(flat: Flat, optimizer: Optimizer) -> Iterator[tuple[int, Any, ShardedTensor]]:
    """Those that are ranges like the parameters: each parameter's place in the flat, the state's name and the state."""
    for index, param in enumerate(flat.params):
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, ShardedTensor):
                yield index, key, value


def state_keys(flat: Flat, optimizer: Optimizer) -> list[Any]:
    """Their names, in an order that is the same on every rank."""
    return sorted({key for _, key, _ in sharded_states(flat, optimizer)})


def states_of(flat: Flat, optimizer: Optimizer, key: Any) -> list[Any]:
    """The state of this name of each parameter; None where there is none."""
    return [optimizer.state.get(param, {}).get(key) for param in flat.params]


# Kernels.


#: torch's optimizers whose step goes over ranges alone: no rank is asked, nothing is gathered, no attribute is kept.
BY_RANGES = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
)
#: Options under which a step works on the device, in the order of a stream that another thread does not know.
_ON_DEVICE = ("fused", "capturable", "differentiable")


class TorchKernel:
    """How one flat is updated, with everything it needs in memory: by the optimizer's own step; other kernels derive from it.

    Note: [Whose step may have a thread of its own]
        Those of torch's own classes, as they are.  Any other may ask all ranks in its step (a norm), at a place that would
        differ by rank, and may keep itself or its groups under other names, where a narrowed copy of it would not reach.
    """

    def writes_copy(self, flat: Flat) -> bool:
        """An update of the flat writes all of its copy in the compute dtype, too."""
        return False

    def apart(self, optimizer: Optimizer) -> bool:
        """An update needs nothing but the values it is given and the optimizer's groups and states: any thread may make it, on
        another optimizer of the same type that shares the states."""
        if type(optimizer) not in BY_RANGES:
            return False
        groups = optimizer.param_groups
        tensors = [value for group in groups for value in group.values() if isinstance(value, Tensor)]
        on_device = not all(computes_on_host(value.device) for value in tensors)
        return not on_device and not any(group.get(option) for group in groups for option in _ON_DEVICE)

    def check(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        """Before anything of a step is updated.

        Raises:
            ShardedOpError: it cannot update these parameters of this optimizer.
        """

    def update(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        """Update its parameters and states; a copy that it writes is leased for a whole write."""
        update_here(optimizer, [update], arguments)


def by_runs(optimizer: Optimizer) -> bool:
    """A step of it may go over many parameters as one tensor; see Note [What a run is]."""
    return type(optimizer) in BY_RANGES and not any(group.get("differentiable") for group in optimizer.param_groups)


def step_groups(optimizer: Optimizer, arguments: Arguments, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Its own step over these parameters alone."""
    with narrowed(optimizer, groups):
        step_of(optimizer)(optimizer, *arguments.args, **arguments.kwargs)


def update_here(optimizer: Optimizer, updates: Sequence[FlatUpdate], arguments: Arguments) -> None:
    """Update flats that are in the memory they are computed in, by one step."""
    members = chain.from_iterable(update.in_order() for update in updates)
    runs = _runs_of(optimizer, members) if by_runs(optimizer) else None
    if runs is None:
        groups = [tuple(chain.from_iterable(each)) for each in zip(*(update.groups for update in updates), strict=True)]
        step_groups(optimizer, arguments, groups)
    else:
        _step_runs(optimizer, arguments, runs)


# Runs.

_States = dict[Any, Any]


class _Run:
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
        self.states: list[_States] = []
        self._ends: Any = None
        self._kinds: _States = {}

    def add(self, param: Any, value: Tensor, grad: Tensor, states: _States) -> bool:
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

    def joined_states(self) -> _States:
        """As one tensor each, whose ranges are in one memory from now on; numbers are the first parameter's."""
        joined: _States = {}
        for key, first in self.states[0].items():
            if not isinstance(first, ShardedTensor):
                joined[key] = first
                continue
            states = [states[key] for states in self.states]
            ranges = [state.local_shard.values for state in states]
            filled = [one for one in ranges if one.numel()]
            if all(_end(one) == _start(two) for one, two in pairwise(filled)):
                joined[key] = _joined(ranges)
                continue
            joined[key] = torch.cat(ranges)
            for state, own in zip(states, self.split(joined[key]), strict=True):
                before = state.local_shard.memory
                for alias in (state, *state.local_shard.spec.aliases.values()):
                    if alias.local_shard.memory is before:
                        alias.local_shard.memory = own
        return joined

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Each parameter's range of a tensor for all of them."""
        return tensor.split_with_sizes([one.numel() for one in self.values])


def _runs_of(optimizer: Optimizer, params: Iterable[tuple[Any, int]]) -> list[_Run] | None:
    """Parameters that have gradients, in the order of their flats and each with the number of its group, as runs.

    None where a gradient or a state is no range like its parameter, or a number in a state is on a device.
    """
    runs: list[_Run] = []
    with torch._C.DisableTorchFunctionSubclass():
        for param, group in params:
            grad: Any = param.grad
            if grad is None:
                continue
            states = optimizer.state.get(param, {})
            if not _like(grad, param) or not all(_known(state, param) for state in states.values()):
                return None
            value, local = param.local_shard.values, grad.local_shard.values
            if (value.dtype, value.device) != (local.dtype, local.device):
                return None
            if not (runs and runs[-1].group == group and runs[-1].add(param, value, local, states)):
                runs.append(_Run(group))
                runs[-1].add(param, value, local, states)
    return runs


@torch.no_grad()
def _step_runs(optimizer: Optimizer, arguments: Arguments, runs: Sequence[_Run]) -> None:
    """Update the parameters of runs and their states."""
    groups: list[list[Any]] = [[] for _ in optimizer.param_groups]
    stands: list[tuple[_Run, Any, _States]] = []
    try:
        for run in runs:
            stand: Any = _joined(run.values)
            stand.grad, given = _joined(run.grads), run.joined_states()
            stands.append((run, stand, given))
            if given:
                optimizer.state[stand] = dict(given)
            groups[run.group].append(stand)
        step_groups(optimizer, arguments, groups)
    finally:
        written: list[Any] = []
        for run, stand, given in stands:
            written.extend(_give_back(optimizer, run, given, optimizer.state.pop(stand, {})))
        for tensor in written:
            tensor.local_shard.written()
        torch.autograd.graph.increment_version(written)


def _give_back(optimizer: Optimizer, run: _Run, given: _States, found: _States) -> Iterator[Any]:
    """The states that the step left, to each parameter; returns what it has written."""
    kept: list[_States] = [optimizer.state[param] for param in run.params] if found else run.states
    for key, value in found.items():
        in_place = key in given and value is given[key]
        if isinstance(value, Tensor) and value.dim():
            if in_place:
                yield from (states[key] for states in kept)
                continue
            for param, states, own in zip(run.params, kept, run.split(value), strict=True):
                states[key] = ShardedTensor(own, param.local_shard.spec, device=param.local_shard.device)
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
    both = isinstance(tensor, ShardedTensor) and isinstance(param, ShardedTensor)
    return both and tensor.local_shard.spec is param.local_shard.spec


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
