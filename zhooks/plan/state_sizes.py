"""What an optimizer keeps, or will keep once it has stepped, of the parameters of units: bytes of this rank, by tier.

``device_budget.py`` and ``state_budgets.py`` hold it against budgets, ``planning/`` against machines.  It steps no optimizer of
the user's and allocates nothing on the device.

Note: [States ahead]
    Only an optimizer knows what it will keep.  So a stand-in steps once (`zhooks.optim.stand_in_of`), and what it then holds in
    the shape of its parameters is what ours will hold of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.tier import Tier
from zhooks.layout import UnitPlan
from zhooks.optim import OwnedStates, StateKind, grad_of, nbytes_of, stand_in_of, tensors_in, vectors_in

__all__ = ["Stored", "Whole", "state_nbytes", "stored_states"]

Whole = tuple[nn.Parameter, int]
"""A parameter that stays whole on the device, and the bytes that it takes."""


def state_nbytes(
    optimizer: Optimizer,
    units: Sequence[UnitPlan],
    rank: int,
    *,
    wide: bool = False,
    ignored: Sequence[Whole] = (),
) -> tuple[int, bool]:
    """Bytes of states on the device, those it has and those it will make, and whether the latter could be foreseen; see
    Note [States ahead].

    Args:
        rank: among the data ranks.
        wide: bf16 parameters are updated in fp32 and have states in it.
        ignored: parameters that this rank updates whole.
    """
    numels = {id(param): numel for unit in units for param, numel in _on_device(unit, rank)}
    numels.update((id(param), param.numel()) for param, _ in ignored if param.requires_grad)
    held, coming = 0, list[tuple[StateKind, int]]()
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            numel = numels.get(id(param), 0)
            states = optimizer.state.get(param) if numel else None
            dtype = _updated(param, wide=wide)
            if isinstance(states, OwnedStates):
                # Its owner will keep them whole, the others nothing.
                held += sum(map(nbytes_of, tensors_in(states)))
                if states.here and next(tensors_in(states), None) is None:
                    coming.append(((number, dtype, param.dim()), param.numel()))
            elif states:
                held += sum(one.to_local().nbytes for one in vectors_in(states))
                held += numel * _itemsize(states, param.shape)
            elif numel:
                coming.append(((number, dtype, param.dim()), numel))
    made = _made(optimizer, {place for place, _ in coming})
    return held + sum(made[place] * numel for place, numel in coming if made is not None), made is not None


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of states that a rank stores on one tier, or will once a step is made.

    Attributes:
        by_flat: bytes by the number of the flat that they are of.
        least: some could not be counted, so that there are, or will be, more.
    """

    by_flat: Mapping[int, int]
    least: bool

    @property
    def nbytes(self) -> int:
        return sum(self.by_flat.values())


def stored_states(optimizer: Optimizer, units: Sequence[UnitPlan], tier: Tier, *, wide: bool = False) -> Stored:
    """States on a tier off the device: those that are there, and those that a step now would place there.

    A parameter without a gradient gets none in that step, and one that is updated whole has whatever its owner keeps of it.
    """
    groups = {id(param): number for number, group in enumerate(optimizer.param_groups) for param in group["params"]}
    flats = [
        (flat, [param for param in unit.params(flat) if id(param) in groups])
        for unit in units
        for flat in unit.flats
        if flat.kind.trainable and flat.kind.tiers.optimizer is tier
    ]
    places = {param: (groups[id(param)], _updated(param, wide=wide), param.dim()) for _, params in flats for param in params}
    made = _made(optimizer, {place for param, place in places.items() if not optimizer.state.get(param)})
    by_flat, least = dict[int, int](), made is None
    for flat, params in flats:
        # A state has one block a flat, as long as the flat's range.
        widest = 0
        for param in params:
            states = optimizer.state.get(param)
            if isinstance(states, OwnedStates):
                least = True
            elif states:
                widest = max(widest, _itemsize(states, param.shape))
            elif grad_of(param) is None:
                least = True
            elif made is not None:
                widest = max(widest, made[places[param]])
        by_flat[flat.number] = flat.shard_numel * widest
    return Stored(by_flat, least)


def _updated(param: nn.Parameter, *, wide: bool) -> torch.dtype:
    """The dtype that is updated, and that states have."""
    return torch.float32 if wide and param.dtype is torch.bfloat16 else param.dtype


def _on_device(unit: UnitPlan, rank: int) -> Iterator[tuple[nn.Parameter, int]]:
    """Trainable parameters whose states are kept on the device, and the elements of each that a rank owns."""
    for flat in unit.flats:
        if flat.kind.trainable and flat.kind.tiers.optimizer is Tier.DEVICE:
            for index, param in enumerate(unit.params(flat)):
                yield param, flat.owned_numel(index, rank)


def _itemsize(states: Any, shape: torch.Size) -> int:
    """Bytes of state for each element of a parameter of ``shape``."""
    values = states.values() if isinstance(states, dict) else ()
    return sum(value.dtype.itemsize for value in values if isinstance(value, Tensor) and value.dim() and value.shape == shape)


def _made(optimizer: Optimizer, places: set[StateKind]) -> dict[StateKind, int] | None:
    """Bytes of state an element that a first step of this optimizer makes for parameters of each kind."""
    if not places:
        return {}
    made = stand_in_of(optimizer, places)
    if made is None:
        return None
    stand_in, params = made
    if any(one.dim() and one.shape != param.shape for param in params.values() for one in _held(stand_in, param)):
        return None  # how large those are for another shape, nobody knows
    return {place: _itemsize(stand_in.state.get(param), param.shape) for place, param in params.items()}


def _held(optimizer: Any, param: nn.Parameter) -> Iterator[Tensor]:
    return tensors_in(optimizer.state.get(param, {}))
