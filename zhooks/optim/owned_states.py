"""The states of a parameter that an optimizer updates whole: on the one rank that owns it, and nowhere else.

``owners.py`` makes them; ``checkpoint/``, ``build/`` and ``report/`` read them through here.  It never moves one between ranks
or tiers.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from offload.errors import ShardedOpError
from zhooks.tensor import StoredTensor, check_together

__all__ = [
    "OwnedStates",
    "flags_of",
    "holds_states",
    "nbytes_of",
    "plain_parts",
    "plain_states_of",
    "replaced",
    "tensors_in",
    "with_owners",
]


class OwnedStates(dict[Any, Any]):
    """What ``optimizer.state`` has for such a parameter: on the owner all of its states, plain and whole, else flags alone.

    Attributes:
        name: of the parameter.
        owner: the owner's place among the ranks that shard it; None where every rank has all of it and updates it itself.
        here: the states are this rank's.
        stored: what ``whole/`` notes of tensors that lie on a tier between steps.
    """

    __slots__ = ("here", "name", "owner", "stored")

    def __init__(self, name: str, owner: int | None, states: Any = (), *, here: bool) -> None:
        super().__init__(states)
        self.name, self.owner, self.here = name, owner, here
        self.stored: Any = None

    def __missing__(self, key: Any) -> Any:
        if self.here:
            raise KeyError(key)
        raise ShardedOpError(
            f"Cannot read state {key!r} of {self.name} here. Expected it on this rank, found that the optimizer updates the "
            f"whole parameter on its owner, rank {self.owner} of the shard axis. Read it there, or in attachment.state_dict()."
        )

    def __repr__(self) -> str:
        where = "of every rank" if self.owner is None else f"on rank {self.owner} of the shard axis"
        return f"OwnedStates({self.name}, {where}, {dict(self)!r})"

    def items(self) -> Any:
        """As a dict's; refused in a save of ``torch.distributed.checkpoint`` that would leave other ranks' states out."""
        if self.owner is not None:
            check_together(self.name)
        return super().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedStates:
        return OwnedStates(self.name, self.owner, copy.deepcopy(dict(self), memo), here=self.here)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordered dict (``weights_only`` loads it) where this rank has all states; else refused, for no file says
        where the rest is.

        Raises:
            ShardedOpError: other ranks have states that this one has not.
        """
        if self.owner is not None:
            raise ShardedOpError(
                f"Cannot pickle the optimizer state of {self.name} (torch.save, or a checkpoint of Lightning or Accelerate)."
                f" Expected all of it, found a parameter whose states are only on rank {self.owner} of the shard axis. Call,"
                " on every rank, attachment.save(folder) to resume, or attachment.state_dict(optimizer), whole on rank 0."
            )
        return OrderedDict, (), None, None, iter(self.items())


def with_owners(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, OwnedStates]]:
    """Those of ``params`` that have such states, in their order."""
    for param in params:
        states = optimizer.state.get(param)
        if isinstance(states, OwnedStates):
            yield param, states


def flags_of(states: Any) -> dict[Any, Any]:
    """What an optimizer notes of a parameter and never changes (``use_muon``): every rank keeps it."""
    if not isinstance(states, dict):
        return {}
    return {key: value for key, value in states.items() if value is None or isinstance(value, (bool, str))}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a state, however deep in lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, deque)):
        for item in value:
            yield from tensors_in(item)


def parts_of(tensor: Tensor) -> dict[str, Any] | None:
    """What a tensor that is made of others (a quantised state) is made of; None of any other."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if type(tensor) in (Tensor, nn.Parameter) or flatten is None:
        return None
    names: list[str] = flatten()[0]
    return {name: getattr(tensor, name) for name in names}


def plain_parts(value: Any) -> Iterator[Tensor]:
    """Every tensor in a state that is made of no others."""
    for tensor in tensors_in(value):
        parts = parts_of(tensor)
        if parts is None:
            yield tensor
        else:
            yield from plain_parts(parts)


def holds_states(states: Any) -> bool:
    """A step has made states of a parameter, or they were loaded: anything but flags."""
    return isinstance(states, dict) and len(states) > len(flags_of(states))


def nbytes_of(tensor: Tensor) -> int:
    """Memory of a tensor; of one made of others, theirs."""
    return sum(one.numel() * one.element_size() for one in plain_parts(tensor))


def replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A state with every tensor changed; lists and dicts stay the same objects, what is made of tensors does not."""
    if isinstance(value, Tensor):
        parts = parts_of(value)
        if parts is None:
            return change(value)
        made: Any = value
        new = {name: replaced(part, change) for name, part in parts.items()}
        if all(new[name] is part for name, part in parts.items()):
            return value
        return type(made).__tensor_unflatten__(new, made.__tensor_flatten__()[1], value.shape, value.stride())
    if isinstance(value, dict):
        for key, item in list(value.items()):
            if (changed := replaced(item, change)) is not item:
                value[key] = changed
    elif isinstance(value, (list, deque)):
        for place, item in enumerate(value):
            if (changed := replaced(item, change)) is not item:
                value[place] = changed
    elif isinstance(value, tuple):
        row = [replaced(item, change) for item in value]
        if any(one is not item for one, item in zip(row, value, strict=True)):
            return type(value)(*row) if hasattr(value, "_fields") else type(value)(row)
    return value


def plain_states_of(states: OwnedStates) -> dict[Any, Any]:
    """The same states with plain tensors in memory; what was there already is shared, as by ``dict``."""
    copies: dict[int, Any] = {}
    return {key: _plain(value, copies) for key, value in states.items()}


def _plain(value: Any, copies: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        fresh = {key: _plain(item, copies) for key, item in value.items()}
        return fresh if any(fresh[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple, deque):
        row = [_plain(item, copies) for item in value]
        changed = any(one is not item for one, item in zip(row, value, strict=True))
        return (deque(row, value.maxlen) if isinstance(value, deque) else type(value)(row)) if changed else value
    return replaced(value, lambda one: one.copied(copies) if isinstance(one, StoredTensor) else one)
