"""States what this rank holds on the device, for whoever begins to listen: shards, gathered units, gradients, states.

``attach.py`` gives it to the bus; what changes afterwards is said where it changes. It reads storages, allocates nothing and
never communicates. What is kept on the other tiers is stated by the store's account.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from offload.events import Bus
from offload.policy import Policy
from offload.store import Store
from offload.tier import Tier
from zhooks.checkpoint import RunState
from zhooks.grad import Reducer
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

__all__ = ["state_held"]


def state_held(live: RunState, policy: Policy, store: Store | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """The policy, the units, and hold after hold of what is in a tensor; the store states what it keeps."""
    bus = live.bus
    bus.instant("policy", json.dumps(policy.values(), default=str))
    for unit in live.units:
        bus.instant("unit", unit.name, unit.full_nbytes)
        for flat in unit.flats:
            _state_flat(bus, flat, live.reducer)
            for param in flat.params:
                for optimizer in optimizers:
                    # A copy: who begins to listen on another thread meets a step under way.
                    for value in tuple(optimizer.state.get(param, {}).values()):
                        _hold(bus, "optimizer", flat, value)
    bus.counter("communication on host", "message rings", live.comm.nbytes)
    if store is not None:
        for tier in Tier:
            limit = store.budget.limit(tier)
            if limit is not None:
                bus.counter("budget", tier.value, limit)
        store.budget.account.tell()


def _state_flat(bus: Bus, flat: Flat, reducer: Reducer) -> None:
    full = flat.full
    if full is not None:
        bus.hold("parameter on device", flat.name, full.untyped_storage())
    if (own := flat.buffer.memory) is not None:
        # Masters beside a copy that stays are the optimizer's, as in the paper's count.
        category = "optimizer" if flat.resident else "parameter"
        bus.hold(f"{category} on device", flat.name, own.untyped_storage())
    gradient = reducer.gradients.get(flat.number)
    if gradient is not None:
        # Until parameters claim the gradients in it, the shard is its owner's.
        for held in (gradient.partial, gradient.shard.at):
            _hold(bus, "gradient", flat, held)
    with torch._C.DisableTorchFunctionSubclass():
        grads = [param.grad for param in flat.params]
    for grad in grads:
        _hold(bus, "gradient", flat, grad)


def _hold(bus: Bus, category: str, flat: Flat, value: object) -> None:
    """A gradient or a state of a parameter; one that is in a block is the store's to state."""
    if isinstance(value, ShardedTensor):
        value = value._at
    elif isinstance(value, Tensor) and value.dim() == 0:
        # Counters of steps: they belong to nobody's unit alone, and to name them would cost more than they hold.
        return
    if isinstance(value, Tensor) and value.numel():
        bus.hold(f"{category} on device", flat.name, value.untyped_storage())
