"""An optimizer's states of one flat buffer's parameters: which of them are sharded like the parameters.

``checkpoint/``, ``report/`` and ``tiered_update.py`` read states through here.  It never makes, moves or changes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

__all__ = ["sharded_states", "state_keys", "states_of"]


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
