"""What observers get: the handle that ``Attachment.observe`` returns, and what is held already when one begins to listen.

What changes afterwards is emitted where it changes; what lies on tiers the store's account emits.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload.errors import AttachError
from offload.events import Bus, Observer
from offload.tier import Tier
from zhooks.grad import Reducer
from zhooks.optim import plain_parts
from zhooks.tensor import ShardedTensor, ShardedVector, StoredTensor
from zhooks.unit import Flat

if TYPE_CHECKING:
    from zhooks.session.session import Session

__all__ = ["Observation", "state_held"]


class Observation:
    """An observer that listens; ``close()`` or leaving the ``with`` block ends it."""

    def __init__(self, bus: Bus, observer: Observer) -> None:
        if not callable(getattr(observer, "on_event", None)):
            raise AttachError(
                f"observe expected an observer with a method on_event(event), found {type(observer).__name__}. Pass a "
                "Recorder, or your own object with this method."
            )
        self._bus, self.observer, self._open = bus, observer, True
        start = getattr(observer, "start", None)
        if start is not None:
            start()
        try:
            bus.attach(observer)
        except BaseException:
            # Interrupted: nobody will have a handle to end it by.
            self.close()
            raise

    def close(self) -> None:
        """End it; again changes nothing."""
        if not self._open:
            return
        self._open = False
        self._bus.detach(self.observer)
        close = getattr(self.observer, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def state_held(session: Session) -> None:
    """State the policy, the units, and hold after hold of what is in a tensor; the store and the pool state what they keep."""
    bus, store, optimizers = session.bus, session.tiers.store, session.optimizers.here()
    session.runtime.saved.partition.state_held()
    if session.why:
        bus.instant("policy chosen", session.why)
    bus.instant("policy", json.dumps(session.policy.values(), default=str))
    for unit in session.units:
        bus.instant("unit", unit.name, unit.plan.full_nbytes)
        for flat in unit.flats:
            _state_flat(bus, flat, session.runtime.reducer)
            for param in flat.params:
                for optimizer in optimizers:
                    # A copy: who begins to listen on another thread meets a step under way.
                    for value in tuple(plain_parts(optimizer.state.get(param, {}))):
                        _hold(bus, "optimizer", flat, value)
    bus.counter("communication on host", "message rings", session.comm.nbytes)
    if store is not None:
        for tier in Tier:
            limit = store.budget.limit(tier)
            if limit is not None:
                bus.counter("budget", tier.value, limit)
        store.budget.account.state()
    session.pool.state_held()


def _state_flat(bus: Bus, flat: Flat, reducer: Reducer) -> None:
    full = flat.full
    if full is not None:
        bus.hold("parameter on device", flat.name, full.untyped_storage())
    if (own := flat.storage.memory) is not None:
        # Masters beside a copy that stays are the optimizer's, as in the paper's count.
        category = "optimizer" if flat.resident else "parameter"
        bus.hold(f"{category} on device", flat.name, own.untyped_storage())
    gradient = reducer.gradients.get(flat.number)
    if gradient is not None:
        # Until parameters claim the gradients in it, the shard is its owner's.
        for held in (gradient.partial, gradient.at):
            _hold(bus, "gradient", flat, held)
    with torch._C.DisableTorchFunctionSubclass():
        grads = [param.grad for param in flat.params]
    for grad in grads:
        _hold(bus, "gradient", flat, grad)


def _hold(bus: Bus, category: str, flat: Flat, value: object) -> None:
    """A gradient or a state of a parameter; one that is in a block is the store's to state."""
    if isinstance(value, StoredTensor):
        return
    if isinstance(value, (ShardedTensor, ShardedVector)):
        value = value.local_shard.memory
    elif isinstance(value, Tensor) and value.dim() == 0:
        # Counters of steps: they belong to nobody's unit alone, and to name them would cost more than they hold.
        return
    if isinstance(value, Tensor) and value.numel():
        bus.hold(f"{category} on device", flat.name, value.untyped_storage())
