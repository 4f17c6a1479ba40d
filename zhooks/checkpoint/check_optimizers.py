"""Whether the optimizers that were saved are those of the run: their groups, options, owners and the states of each parameter.

``check_shard.py`` calls it.  It compares what the file that stands for this rank says in each folder, and never writes to an
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.errors import CheckpointError
from offload.text import counted
from zhooks.checkpoint.load_shard import OptimizerStates
from zhooks.checkpoint.saved_folder import Saved, SavedFolder, require
from zhooks.checkpoint.shard_contents import SHARDED, RunState, group_names, param_names
from zhooks.optim import OwnedStates, assign, stand_in_of, step_stand_in, vectors_in
from zhooks.tensor import ShardedTensor

__all__ = ["IN_FILE", "check_optimizers", "state_dtype"]

#: Stands in a parameter's state for a tensor that lies in a flat buffer of the file.
IN_FILE = object()
#: Options of torch's optimizers that are None, True or False.
_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize"})


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter's states in one folder: its place among the groups there, the states as packed, and who owned it."""

    folder: SavedFolder
    number: int
    place: tuple[int, int]
    packed: Any
    owned: bool
    owner: int | None

    def of_owner(self) -> tuple[int, Any]:
        """The file that has the states of a parameter that is updated whole, and what it says of them."""
        folder = self.folder
        rank = folder.counterpart if self.owner is None else folder.rank_at(None, self.owner)
        if rank == folder.counterpart:
            return rank, self.packed
        saved = folder.document(rank)["optimizers"][self.number]
        mine = folder.own["optimizers"][self.number]
        require(saved["groups"] == mine["groups"] and saved["owners"] == mine["owners"], "the same owners on all ranks")
        return rank, next((found for *place, found in saved["entries"] if tuple(place) == self.place), [])


def check_optimizers(saved: Saved) -> list[OptimizerStates]:
    """What each optimizer shall hold, once it has been found to be like the one that was saved; nothing is changed."""
    run = saved.run
    if run.model_only:
        return []
    kinds = [type(optimizer).__name__ for optimizer in run.optimizers]
    for folder in saved.folders:
        found = [str(one["type"]) for one in folder.own["optimizers"]]
        if found != kinds:
            what = "Pass the same ones in the same order" if kinds else "Build them before loading"
            raise CheckpointError(
                f"load expected the optimizers of the checkpoint ({', '.join(found) or 'none'}), "
                f"found {', '.join(kinds) or 'none'}. {what}, or pass optimizer=() to load only the model."
            )
    return [_check_optimizer(saved, number, optimizer) for number, optimizer in enumerate(run.optimizers)]


def _check_optimizer(saved: Saved, number: int, optimizer: torch.optim.Optimizer) -> OptimizerStates:
    """Group by group and name by name."""
    run, main = saved.run, saved.main
    found = _match(saved, number, optimizer)
    options = _options(saved, number, optimizer)
    loose = saved.unpacker(main).unpack(main.own["optimizers"][number]["loose"])
    require(isinstance(loose, dict), "states without a parameter as a dict")
    follow = {param: _follows(run, param, one.folder) for param, one in found.items() if one.owned}
    entries = _check_entries(saved, optimizer, found, follow)
    _check_names(optimizer, entries)
    owners = _owners(run, {param: one for param, one in found.items() if one.owned})
    owned, owned_nbytes = {}, {}
    names, device_rank = param_names(run), run.comm.shard.axis.rank
    for param, owner in owners.items():
        here, name = owner is None or owner == device_rank, names.get(id(param), "")
        owned[param] = partial(_owned, saved, name, owner, found[param], follow[param], here=here)
        states = entries.pop(param, {})
        if here:
            owned_nbytes[param] = sum(each.nbytes for each in tree_leaves(states) if isinstance(each, Tensor))
    return OptimizerStates(optimizer, options, entries, owned, owned_nbytes, loose)


def _check_names(optimizer: torch.optim.Optimizer, entries: Mapping[nn.Parameter, Mapping[Any, Any]]) -> None:
    """The optimizer finds the states that its step asks for among those that were saved: a stand-in steps with their names.

    Raises:
        CheckpointError: it does not.
    """
    groups = {param: number for number, group in enumerate(optimizer.param_groups) for param in group["params"]}
    kinds = {((groups[param], param.dtype, param.dim()), frozenset(states)) for param, states in entries.items() if states}
    made = stand_in_of(optimizer, {place for place, _ in kinds}) if kinds else None
    if made is None:
        return
    stand_in, params = made
    for place, names in kinds:
        param, before = params[place], dict(stand_in.state[params[place]])
        if names == before.keys():
            continue
        stand_in.state[param] = {name: before[name] if name in before else torch.zeros_like(param) for name in names}
        try:
            step_stand_in(stand_in)
        except KeyError as error:
            kind, found = type(optimizer).__name__, ", ".join(sorted(map(str, names)))
            raise CheckpointError(
                f"load expected {kind}'s states of each parameter ({', '.join(map(str, before))}), found {found[:160]}, "
                f"without which its step fails (KeyError: {error}). Load another checkpoint."
            ) from error
        except Exception:
            # Of a stand-in's values nothing follows for those that were saved.
            pass
        stand_in.state[param] = before


def _match(saved: Saved, number: int, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, _Entry]:
    """Where the states of each parameter are; nothing of one that had none.

    Raises:
        CheckpointError: other groups.
    """
    named = group_names(saved.run, optimizer)
    first = saved.folders[0].own["optimizers"][number]["groups"]
    places: dict[tuple[int, str, int], _Entry | None] = {}
    for folder in saved.folders:
        groups = folder.own["optimizers"][number]["groups"]
        if len(groups) != len(named):
            raise _grouped(optimizer, 0, named, groups)
        entries = _entries(folder, number)
        for group, one in enumerate(groups):
            for key, index in _keys(group, one["params"]).items():
                if key in places:
                    raise _grouped(optimizer, group, named, groups)
                places[key] = entries.get((group, index))
    matched: dict[nn.Parameter, _Entry] = {}
    for group, names in enumerate(named):
        for key, index in _keys(group, names).items():
            if key not in places:
                raise _grouped(optimizer, group, named, first)
            entry = places.pop(key)
            if entry is not None:
                matched[optimizer.param_groups[group]["params"][index]] = entry
    if places and saved.run.comm.pp.axis.world == 1:
        raise _grouped(optimizer, min(places)[0], named, first)
    return matched


def _keys(group: int, names: Sequence[str]) -> dict[tuple[int, str, int], int]:
    """The parameters of a group by name, those of other models (which have none) by their order."""
    seen: dict[str, int] = {}
    out: dict[tuple[int, str, int], int] = {}
    for index, name in enumerate(names):
        require(type(name) is str, "names of parameters")
        nth = seen[name] = seen.get(name, 0) + 1
        require(nth == 1 or not name, "one parameter per name")
        out[group, name, nth] = index
    return out


def _grouped(optimizer: torch.optim.Optimizer, group: int, named: Sequence[Any], saved: Sequence[Any]) -> CheckpointError:
    return CheckpointError(
        f"load expected {type(optimizer).__name__} with the parameter groups of the checkpoint, found different ones from "
        f"group {group} on ({counted(len(named), 'group')} here, {len(saved)} there). Group parameters in the same way."
    )


def _entries(folder: SavedFolder, number: int) -> dict[tuple[int, int], _Entry]:
    """The states in one folder by place."""
    saved = folder.own["optimizers"][number]
    owners: dict[tuple[int, int], int | None] = {}
    for group, index, owner in saved.get("owners", []):
        require(type(group) is int and type(index) is int and min(group, index) >= 0, "places of parameters")
        require(owner is None or (type(owner) is int and 0 <= owner < folder.layout.shard), "a rank")
        require(index < len(saved["groups"][group]["params"]), "a place in a group")
        owners[group, index] = owner
    found: dict[tuple[int, int], _Entry] = {}
    for group, index, packed in saved["entries"]:
        require(type(group) is int and type(index) is int and min(group, index) >= 0, "places of parameters")
        require(index < len(saved["groups"][group]["params"]), "a place in a group")
        place = group, index
        require(place not in found, "one state per parameter")
        found[place] = _Entry(folder, number, place, packed, place in owners, owners.get(place))
    return found


def _options(saved: Saved, number: int, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, the same in all folders."""
    every = []
    for folder in saved.folders:
        unpacker = saved.unpacker(folder)
        every.append([unpacker.unpack(group["options"]) for group in folder.own["optimizers"][number]["groups"]])
        for here, option in zip(optimizer.param_groups, every[-1], strict=True):
            _check_options(optimizer, here, option)
    for others in every[1:]:
        for group, (one, other) in enumerate(zip(every[0], others, strict=True)):
            for key in one.keys() | other.keys():
                if key not in one or key not in other or not _equal(one[key], other[key]):
                    raise CheckpointError(
                        f"load expected the same options of {type(optimizer).__name__} in all folders, found "
                        f"{str(one.get(key))[:40]} and {str(other.get(key))[:40]} as {key} of group {group}. Load each "
                        "stage's own folder."
                    )
    return every[0]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _owners(run: RunState, found: Mapping[nn.Parameter, _Entry]) -> dict[nn.Parameter, int | None]:
    """Who shall own each parameter that is updated whole: who did where that rank is here, else by cost."""
    flats = {id(param): (flat, spec) for flat in run.flats for param, spec in flat.members()}
    world = run.comm.shard.axis.world
    owners: dict[nn.Parameter, int | None] = {}
    shapes: dict[nn.Parameter, torch.Size] = {}
    for param, one in found.items():
        flat, spec = flats.get(id(param), (None, None))
        owners[param] = None
        if flat is not None and spec is not None and flat.sharded:
            kept = one.owner is not None and one.folder.layout.shard == world
            owners[param] = one.owner if kept else None
            if not kept:
                shapes[param] = spec.shape
    owners |= dict(zip(shapes, assign(list(shapes.values()), world), strict=True))
    return owners


def _owned(saved: Saved, name: str, owner: int | None, entry: _Entry, follow: _Follow, *, here: bool) -> OwnedStates:
    """The states of one parameter, which may be on a tier before the next one's are read; elsewhere what all ranks note."""
    rank, packed = entry.of_owner()
    unpacker = saved.unpacker(entry.folder, rank)
    flags = [pair for pair in packed if pair[1] is None or isinstance(pair[1], (bool, str))]
    kept = {unpacker.unpack(key): _converted(follow, unpacker.unpack(value)) for key, value in (packed if here else flags)}
    return OwnedStates(name, owner, kept, here=here)


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
                f"load expected {kind}'s {key} to be of the same kind as {str(here.get(key))[:80]} here, found "
                f"{str(saved.get(key))[:80]} in the checkpoint. Build the optimizer as it was saved, or load another "
                "checkpoint."
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


def _check_entries(
    saved: Saved,
    optimizer: torch.optim.Optimizer,
    found: Mapping[nn.Parameter, _Entry],
    follow: Mapping[nn.Parameter, _Follow],
) -> dict[nn.Parameter, dict[Any, Any]]:
    """The states of each parameter: of the kinds that they have here, or where there are none yet, all of one kind.

    Those of parameters that are updated whole are compared alone, and read later.
    """
    entries: dict[nn.Parameter, dict[Any, Any]] = {}
    kinds: dict[Any, Any] = {}
    whole: dict[Any, Any] = {}
    for param, one in found.items():
        entries[param] = {}
        rank, packed = one.of_owner() if one.owned else (one.folder.counterpart, one.packed)
        unpacker = saved.unpacker(one.folder, rank, unread=one.owned)
        values = [(unpacker.unpack(key), value, unpacker.unpack(value) if value != SHARDED else None) for key, value in packed]
        # How long lists of vectors are depends on how many steps there were.
        free = one.owned or bool(vectors_in([value for _, _, value in values]))
        for key, packed_value, value in values:
            require(key not in entries[param], "one state per name")
            if packed_value == SHARDED:
                require(not one.owned, "whole states of a parameter that is updated whole")
                entries[param][key] = IN_FILE
                continue
            entries[param][key] = value
            held = optimizer.state.get(param, {}).get(key)
            if one.owned:
                made = _converted(follow[param], value)
                _check_whole(optimizer, str(key), made, held, whole.setdefault((key, param.dtype), []))
                if _dtypes_of(made) != _dtypes_of(value):
                    read = saved.unpacker(one.folder, rank).unpack(packed_value)
                    _check_fits(optimizer, str(key), read, follow[param])
            if free:
                continue  # as the parameter's shape will have it
            kind = kinds.setdefault(key, _kind(value)) if held is None or isinstance(held, ShardedTensor) else _kind(held)
            count = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
            counts = key != "step" or (isinstance(count, (int, float)) and 0 <= count < float("inf"))
            if _kind(value) != kind or not counts:
                raise CheckpointError(
                    f"load expected {type(optimizer).__name__}'s {str(key)[:80]} in the form it has for every parameter, "
                    f"found {str(value)[:80]}. Load another checkpoint."
                )
    return entries


# Dtypes of states, and those of parameters that are updated whole.


def state_dtype(run: RunState, saved: torch.dtype, master_there: torch.dtype, master: torch.dtype) -> torch.dtype:
    """States of the masters' dtype follow it, as the optimizer would make them; others stay what they are."""
    if saved is not master_there or master is master_there or (run.rounding.stochastic and master is torch.bfloat16):
        return saved
    return master


_Follow = Callable[[torch.dtype], torch.dtype]


def _follows(run: RunState, param: nn.Parameter, folder: SavedFolder) -> _Follow:
    """Of what dtype a state of a parameter that is updated whole is here, by that in the file."""
    for flat in run.flats:
        for member, spec in flat.members():
            if member is param and spec.name in folder.params:
                there, master = folder.params[spec.name].flat.dtype, flat.kind.master
                return lambda saved: state_dtype(run, saved, there, master)
    return lambda saved: saved


def _converted(follow: _Follow, value: Any) -> Any:
    """The tensors among these states in the dtypes that they have here; numbers stay what they are."""

    def one(tensor: Tensor) -> Tensor:
        return tensor.to(follow(tensor.dtype)) if tensor.dim() else tensor

    return tree_map_only(Tensor, one, value)


def _check_whole(optimizer: torch.optim.Optimizer, key: str, value: Any, held: Any, seen: list[Any]) -> None:
    """A state of a parameter that is updated whole, whose shape is the optimizer's affair: of the dtypes that it has here, and
    where there is none yet, of those that it has for other parameters of the same dtype.

    Args:
        value: as it will be here, without values.
        seen: the dtypes of the states of this name that were compared before.
    Raises:
        CheckpointError: another dtype, with which the optimizer would go on otherwise, or not at all.
    """
    saved = _dtypes_of(value)
    expected = _dtypes_of(held) or next(iter(seen), frozenset())
    seen += [saved] if saved else []
    if saved and expected and saved != expected:
        names = [", ".join(sorted(map(str, each))) for each in (expected, saved)]
        raise CheckpointError(
            f"load expected {type(optimizer).__name__}'s {key[:80]} in {names[0]}, as it has it for every parameter, found "
            f"{names[1]} in the checkpoint. Load another checkpoint."
        )


def _dtypes_of(value: Any) -> frozenset[torch.dtype]:
    """Of the tensors that these are, numbers apart."""
    return frozenset(each.dtype for each in tree_leaves(value) if isinstance(each, Tensor) and each.dim())


def _check_fits(optimizer: torch.optim.Optimizer, key: str, value: Any, follow: _Follow) -> None:
    """Refuse numbers that would become infinite where the dtype of the masters, which this state _follows, is narrower here.

    Args:
        value: with its values.
    """
    for each in tree_leaves(value):
        if isinstance(each, Tensor) and bool((each.to(follow(each.dtype)).isinf() & each.isfinite()).any()):
            raise CheckpointError(
                f"load expected numbers that {follow(each.dtype)} can hold, found larger ones in {type(optimizer).__name__}'s "
                f"{key[:80]}, saved as {each.dtype}. Attach a model in a dtype with that range."
            )
