"""Whether the optimizers that were saved are those of the run: their groups, options, owners and the states of each parameter.

``check_shard.py`` calls it with the document of a file.  It compares and reads, and never writes to an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from zhooks.checkpoint.load_shard import OptimizerStates
from zhooks.checkpoint.shard_contents import SHARDED, RunState, group_names, param_names
from zhooks.checkpoint.state_tree import Unpacker
from zhooks.optim import OwnedStates, vectors_in
from zhooks.tensor import ShardedTensor

__all__ = ["IN_FILE", "check_optimizers", "require"]

#: Stands in a parameter's state for a tensor that lies in a flat buffer of the file.
IN_FILE = object()
#: Options of torch's optimizers that are None, True or False.
_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize"})


def _owned(name: str, owner: int | None, packed: Any, unpacker: Unpacker, *, here: bool) -> OwnedStates:
    """The states of one parameter, which may be on a tier before the next one's are read."""
    return OwnedStates(name, owner, {unpacker.unpack(key): unpacker.unpack(value) for key, value in packed}, here=here)


def check_optimizers(
    run: RunState, saved: Sequence[Mapping[str, Any]], unpacker: Unpacker, unread: Unpacker
) -> list[OptimizerStates]:
    """What each optimizer shall hold, once it has been found to be like the one that was saved; nothing is changed."""
    if not run.optimizers:
        return []
    kinds = [type(optimizer).__name__ for optimizer in run.optimizers]
    if [str(one["type"]) for one in saved] != kinds:
        raise CheckpointError(
            f"load: expected the optimizers of the checkpoint ({', '.join(str(one['type']) for one in saved) or 'none'}), "
            f"found {', '.join(kinds)}. Pass the same ones in the same order, or optimizer=() to load the model alone."
        )
    states, spec_names = [], param_names(run)
    for optimizer, one in zip(run.optimizers, saved, strict=True):
        named = group_names(run, optimizer)
        for number, names in enumerate(named):
            if len(one["groups"]) != len(named) or one["groups"][number]["params"] != names:
                raise CheckpointError(
                    f"load: expected {type(optimizer).__name__} with the parameter groups of the checkpoint, found others from "
                    f"group {number} on ({len(named)} groups here, {len(one['groups'])} there). Group parameters alike."
                )
        options = [unpacker.unpack(group["options"]) for group in one["groups"]]
        for group, option in zip(optimizer.param_groups, options, strict=True):
            _check_options(optimizer, group, option)
        loose = unpacker.unpack(one["loose"])
        require(isinstance(loose, dict), "states without a parameter as a dict")
        owners = _check_owners(run, optimizer, one.get("owners", []))
        entries = _check_entries(optimizer, one["entries"], unpacker, unread, owners)
        packed = {optimizer.param_groups[group]["params"][index]: found for group, index, found in one["entries"]}
        owned = {}
        for param, owner in owners.items():
            here, name = owner is None or owner == run.comm.shard.axis.rank, spec_names.get(id(param), "")
            owned[param] = partial(_owned, name, owner, packed.get(param, []), unpacker, here=here)
            entries.pop(param, None)
        states.append(OptimizerStates(optimizer, options, entries, owned, loose))
    return states


def require(holds: bool, what: str) -> None:
    """A file that was made by ``save`` says so.

    Raises:
        ValueError: it does not.
    """
    if not holds:
        raise ValueError(f"something else than {what}")


def _check_options(optimizer: torch.optim.Optimizer, here: Mapping[str, Any], saved: Any) -> None:
    """The options of a group are those this optimizer has, each of the kind it has."""
    kind = type(optimizer).__name__
    require(isinstance(saved, dict) and all(type(key) is str for key in saved) and "params" not in saved, f"options of {kind}")
    for key, usual in optimizer.defaults.items():
        if key not in here and key not in saved:
            continue  # torch adds defaults that no group has when it loads
        free = usual is None and key not in _FLAGS
        if key not in saved or not (free or _kind(saved[key], number=True) == _kind(usual, number=True)):
            raise CheckpointError(
                f"load: expected {kind}'s {key} to be like {str(here.get(key))[:80]} here, found {str(saved.get(key))[:80]} in "
                "the checkpoint. Make the optimizer as it was made there, or load another checkpoint."
            )


def _kind(value: Any, *, number: bool = False) -> Any:
    """What one state or option has in common with another it may stand for; ``number``: a tensor of one number is one."""
    if isinstance(value, Tensor):
        return "number" if number and value.dim() == 0 else ("tensor", value.dtype, value.dim() > 0)
    if value is None or isinstance(value, bool):
        return "flag"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, (list, tuple)):
        return ("row", *(_kind(item, number=number) for item in value))
    return type(value).__name__


def _check_owners(run: RunState, optimizer: torch.optim.Optimizer, saved: Any) -> dict[nn.Parameter, int | None]:
    """Who owns the parameters that the optimizer updates whole."""
    owners: dict[nn.Parameter, int | None] = {}
    for group, index, owner in saved:
        require(type(group) is int and type(index) is int and min(group, index) >= 0, "places of parameters")
        require(owner is None or (type(owner) is int and 0 <= owner < run.comm.shard.axis.world), "a rank")
        owners[optimizer.param_groups[group]["params"][index]] = owner
    return owners


def _check_entries(
    optimizer: torch.optim.Optimizer, saved: Any, unpacker: Unpacker, unread: Unpacker,
    owners: Mapping[nn.Parameter, int | None],
) -> dict[nn.Parameter, dict[Any, Any]]:  # fmt: skip
    """The states of each parameter: of the kinds that they have here, or where there are none yet, all of one kind.

    Args:
        unread: unpacks those of parameters that have ``owners``, which are read later.
    """
    entries: dict[nn.Parameter, dict[Any, Any]] = {}
    kinds: dict[Any, Any] = {}
    for group, index, packed in saved:
        require(type(group) is int and type(index) is int and min(group, index) >= 0, "places of parameters")
        param = optimizer.param_groups[group]["params"][index]
        require(param not in entries, "one state a parameter")
        entries[param] = {}
        of = unread if param in owners else unpacker
        values = [(unpacker.unpack(key), value, of.unpack(value) if value != SHARDED else None) for key, value in packed]
        # How long lists of vectors are depends on how many steps there were.
        free = param in owners or bool(vectors_in([value for _, _, value in values]))
        for key, packed_value, value in values:
            require(key not in entries[param], "one state of a name")
            if packed_value == SHARDED:
                require(param not in owners, "ranges of what is updated whole")
                entries[param][key] = IN_FILE
                continue
            entries[param][key] = value
            held = optimizer.state.get(param, {}).get(key)
            if free:
                continue  # as the parameter's shape will have it
            kind = kinds.setdefault(key, _kind(value)) if held is None or isinstance(held, ShardedTensor) else _kind(held)
            count = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
            counts = key != "step" or (isinstance(count, (int, float)) and 0 <= count < float("inf"))
            if _kind(value) != kind or not counts:
                raise CheckpointError(
                    f"load: expected {type(optimizer).__name__}'s {str(key)[:80]} as it keeps it for every parameter, found "
                    f"{str(value)[:80]}. Load another checkpoint."
                )
    return entries
