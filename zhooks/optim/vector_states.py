"""States that are one vector of many parameters' ranges (LBFGS keeps them in lists, with its first parameter).

``checkpoint/``, ``build/``, ``report/`` and ``plan/`` find, gather and shard them through here.  It never makes a state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zhooks.optim.groups import params_of
from zhooks.optim.owned_states import OwnedStates, tensors_in
from zhooks.tensor import ParamShard, ShardedTensor, ShardedVector, vector_of

__all__ = ["mapped", "shard_vectors", "vectors_in", "whole_copies", "whole_vectors"]


def vectors_in(states: Any) -> list[ShardedVector]:
    """Those in some states, in an order that is the same on every rank."""
    return [tensor for tensor in tensors_in(states) if isinstance(tensor, ShardedVector)]


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A state with every tensor changed, however deep in lists and dicts; itself where nothing is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        new = {key: mapped(item, change) for key, item in value.items()}
        return new if any(new[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple):
        row = type(value)(mapped(item, change) for item in value)
        return row if any(one is not item for one, item in zip(row, value, strict=True)) else value
    return value


def whole_copies(states: Any, device: torch.device | None, *, here: bool) -> dict[int, Tensor]:
    """Whole plain copies by identity, on ``device`` (None: where they are); none on ranks not ``here``.  Collective."""
    copies: dict[int, Tensor] = {}
    for vector in vectors_in(states):
        whole = vector.full_tensor()
        if here:
            copies[id(vector)] = whole if device is None else whole.to(device)
    return copies


def whole_vectors(optimizer: Optimizer) -> bool:
    """Every rank has them whole and plain, as a plain optimizer has them; whether there were any.  Collective."""
    found = bool(vectors_in(dict(optimizer.state)))
    for states in optimizer.state.values() if found else ():
        _change(states, lambda value: value.full_tensor() if isinstance(value, ShardedVector) else value)
    return found


def shard_vectors(optimizer: Optimizer) -> None:
    """Plain vectors as long as all parameters together become this rank's ranges of them; alike on every rank."""
    params: list[Any] = params_of(optimizer)
    # A vector of one 1-D parameter has its shape, and is a state like others.
    if not all(isinstance(param, ShardedTensor) for param in params) or (len(params) == 1 and params[0].dim() == 1):
        return
    specs: list[ParamShard] = [param._spec for param in params]
    numel = sum(spec.numel for spec in specs)

    def shard(value: Tensor) -> Tensor:
        plain = not isinstance(value, (ShardedTensor, ShardedVector))
        return vector_of(value, specs) if plain and tuple(value.shape) == (numel,) else value

    for param in params:
        states = optimizer.state.get(param)
        if isinstance(states, dict) and not isinstance(states, OwnedStates):
            _change(states, shard)


def _change(states: Any, change: Callable[[Tensor], Any]) -> None:
    for key, value in list(states.items()) if isinstance(states, dict) else ():
        states[key] = mapped(value, change)
