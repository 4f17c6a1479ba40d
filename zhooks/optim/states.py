"""Optimizer states that are not ranges like their parameters: whole ones on one owner rank, and vectors over many parameters.

A parameter that an optimizer updates whole has its states on the rank that owns it; LBFGS keeps vectors of many parameters'
ranges, in lists, with its first parameter.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.errors import ShardedOpError
from offload.store import Block
from zhooks.optim.groups import params_of
from zhooks.tensor import ParamShard, ShardedTensor, ShardedVector, StoredTensor, check_together, vector_of

__all__ = [
    "OwnedStates", "StoredRuns", "flags_of", "holds_states", "mapped", "nbytes_of", "plain_parts", "plain_states_of",
    "replaced", "shard_vectors", "tensors_in", "vectors_in", "whole_copies", "whole_vectors", "with_owners",
]  # fmt: skip


@dataclass(slots=True)
class StoredRuns:
    """The block of one parameter's states between its steps.

    Attributes:
        runs: where each run of bytes starts in the block, and how many there are.
        tensors: what stands for tensors that lie there, by place and form: the same one as long as it does.
    """

    block: Block
    runs: dict[int, int]
    tensors: dict[Any, StoredTensor] = field(default_factory=dict)


class OwnedStates(dict[Any, Any]):
    """What ``optimizer.state`` has for such a parameter: on the owner all of its states, plain and whole, else flags alone.

    Attributes:
        name: of the parameter.
        owner: the owner's place among the ranks that shard it; None where every rank has all of it and updates it itself.
        here: the states are this rank's.
        stored: where those of its tensors are that lie on a tier between steps.
    """

    __slots__ = ("here", "name", "owner", "stored")

    def __init__(self, name: str, owner: int | None, states: Any = (), *, here: bool) -> None:
        super().__init__(states)
        self.name, self.owner, self.here = name, owner, here
        self.stored: StoredRuns | None = None

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


def holds_states(states: Any) -> bool:
    """A step has made states of a parameter, or they were loaded: anything but flags."""
    return isinstance(states, dict) and len(states) > len(flags_of(states))


# Tensors in a state, however deep in lists and dicts.


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, deque)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def parts_of(tensor: Tensor) -> dict[str, Any] | None:
    """What a tensor that is made of others (a quantised state) is made of; None of any other."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if type(tensor) in (Tensor, nn.Parameter) or flatten is None:
        return None
    return {name: getattr(tensor, name) for name in flatten()[0]}


def plain_parts(value: Any) -> Iterator[Tensor]:
    """Every tensor in a state that is made of no others."""
    for tensor in tensors_in(value):
        parts = parts_of(tensor)
        if parts is None:
            yield tensor
        else:
            yield from plain_parts(parts)


def nbytes_of(tensor: Tensor) -> int:
    """Memory of a tensor; of one made of others, theirs."""
    return sum(one.numel() * one.element_size() for one in plain_parts(tensor))


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A state with every tensor changed; itself where none is, else in new lists and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        new = {key: mapped(item, change) for key, item in value.items()}
        return new if any(new[key] is not item for key, item in value.items()) else value
    if isinstance(value, (list, tuple, deque)):
        row = [mapped(item, change) for item in value]
        if all(one is item for one, item in zip(row, value, strict=True)):
            return value
        if isinstance(value, tuple):
            return type(value)(*row) if hasattr(value, "_fields") else type(value)(row)
        made = copy.copy(value)
        for at, item in enumerate(row):
            made[at] = item
        return made
    return value


def replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A state with every tensor that is made of no others changed, in the lists and dicts that it has."""
    if isinstance(value, Tensor):
        parts = parts_of(value)
        if parts is None:
            return change(value)
        made: Any = value
        new = {name: replaced(part, change) for name, part in parts.items()}
        if all(new[name] is part for name, part in parts.items()):
            return value
        return type(made).__tensor_unflatten__(new, made.__tensor_flatten__()[1], value.shape, value.stride())
    if isinstance(value, tuple):
        row = [replaced(item, change) for item in value]
        if any(one is not item for one, item in zip(row, value, strict=True)):
            return type(value)(*row) if hasattr(value, "_fields") else type(value)(row)
    elif isinstance(value, (dict, list, deque)):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if (changed := replaced(item, change)) is not item:
                value[key] = changed
    return value


def plain_states_of(states: OwnedStates) -> dict[Any, Any]:
    """The same states with plain tensors in memory; what was there already is shared, as by ``dict``."""
    copies: dict[int, Any] = {}

    def plain(tensor: Tensor) -> Any:
        return replaced(tensor, lambda one: one.copied(copies) if isinstance(one, StoredTensor) else one)

    return {key: mapped(value, plain) for key, value in states.items()}


# Vectors.


def vectors_in(states: Any) -> list[ShardedVector]:
    """Those in some states, in an order that is the same on every rank."""
    return [tensor for tensor in tensors_in(states) if isinstance(tensor, ShardedVector)]


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
    specs: list[ParamShard] = [param.local_shard.spec for param in params]
    numel = sum(spec.numel for spec in specs)

    def shard(value: Tensor) -> Tensor:
        plain = not isinstance(value, (ShardedTensor, ShardedVector))
        return vector_of(value, specs) if plain and tuple(value.shape) == (numel,) else value

    for param in params:
        states = optimizer.state.get(param)
        if not isinstance(states, OwnedStates):
            _change(states, shard)


def _change(states: Any, change: Callable[[Tensor], Any]) -> None:
    if isinstance(states, dict):
        states.update({key: mapped(value, change) for key, value in states.items()})
