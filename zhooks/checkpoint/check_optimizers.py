"""Whether the optimizers that were saved are those of the run: their groups, options, owners and the states of each parameter.

``check_shard.py`` calls it with the documents of one file a folder.  It compares and reads, and never writes to an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.text import counted
from zhooks.checkpoint.check_whole_states import Follow, check_fits, check_whole, converted, dtypes_of, follows
from zhooks.checkpoint.load_shard import OptimizerStates
from zhooks.checkpoint.saved_files import SavedFolder
from zhooks.checkpoint.shard_contents import SHARDED, RunState, group_names, param_names
from zhooks.checkpoint.state_tree import Unpacker
from zhooks.optim import OwnedStates, assign, stand_in_of, step_stand_in, vectors_in
from zhooks.tensor import ShardedTensor

__all__ = ["IN_FILE", "Source", "check_optimizers", "require"]

#: Stands in a parameter's state for a tensor that lies in a flat buffer of the file.
IN_FILE = object()
#: Options of torch's optimizers that are None, True or False.
_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize"})


@dataclass(frozen=True, slots=True)
class Source:
    """The optimizers in one folder, as the file that stands for this rank says.

    Attributes:
        unpacker: of the folder and of a file of it, unread or not.
    """

    folder: SavedFolder
    optimizers: Sequence[Mapping[str, Any]]
    unpacker: Callable[..., Unpacker]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter's states in one folder: its place among the groups there, the states as packed, and who owned it."""

    source: Source
    number: int
    place: tuple[int, int]
    packed: Any
    owned: bool
    owner: int | None

    def of_owner(self) -> tuple[int, Any]:
        """The file that has the states of a parameter that is updated whole, and what it says of them."""
        folder = self.source.folder
        if self.owner is None:
            return folder.counterpart, self.packed
        rank = folder.rank_at(None, self.owner)
        if rank == folder.counterpart:
            return rank, self.packed
        saved = folder.document(rank)["optimizers"][self.number]
        mine = self.source.optimizers[self.number]
        require(saved["groups"] == mine["groups"] and saved["owners"] == mine["owners"], "the same owners on all ranks")
        return rank, next((found for *place, found in saved["entries"] if tuple(place) == self.place), [])


def check_optimizers(run: RunState, sources: Sequence[Source]) -> list[OptimizerStates]:
    """What each optimizer shall hold, once it has been found to be like the one that was saved; nothing is changed."""
    if run.model_only:
        return []
    kinds = [type(optimizer).__name__ for optimizer in run.optimizers]
    for source in sources:
        found = [str(one["type"]) for one in source.optimizers]
        if found != kinds:
            what = "Pass the same ones in the same order" if kinds else "Build them before loading"
            raise CheckpointError(
                f"load expected the optimizers of the checkpoint ({', '.join(found) or 'none'}), "
                f"found {', '.join(kinds) or 'none'}. {what}, or pass optimizer=() to load only the model."
            )
    return [_check_optimizer(run, number, optimizer, sources) for number, optimizer in enumerate(run.optimizers)]


def _check_optimizer(
    run: RunState, number: int, optimizer: torch.optim.Optimizer, sources: Sequence[Source]
) -> OptimizerStates:
    """Group by group and name by name."""
    found = _match(run, number, optimizer, sources)
    options = _options(number, optimizer, sources)
    main = sources[sources[0].folder.place.stage % len(sources)]
    loose = main.unpacker(main.folder).unpack(main.optimizers[number]["loose"])
    require(isinstance(loose, dict), "states without a parameter as a dict")
    follow = {param: follows(run, param, one.source.folder) for param, one in found.items() if one.owned}
    entries = _check_entries(optimizer, found, follow)
    _check_names(optimizer, entries)
    owners = _owners(run, {param: one for param, one in found.items() if one.owned})
    owned, owned_nbytes = {}, {}
    names, device_rank = param_names(run), run.comm.shard.axis.rank
    for param, owner in owners.items():
        here, name = owner is None or owner == device_rank, names.get(id(param), "")
        owned[param] = partial(_owned, name, owner, found[param], follow[param], here=here)
        states = entries.pop(param, {})
        if here:
            owned_nbytes[param] = sum(tensor.nbytes for value in states.values() for tensor in _tensors(value))
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


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those in a state, however deep."""
    if isinstance(value, Tensor):
        yield value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in items:
        yield from _tensors(item)


def _match(
    run: RunState, number: int, optimizer: torch.optim.Optimizer, sources: Sequence[Source]
) -> dict[nn.Parameter, _Entry]:
    """Where the states of each parameter are; nothing of one that had none.

    Raises:
        CheckpointError: other groups.
    """
    named = group_names(run, optimizer)
    places: dict[tuple[int, str, int], tuple[Source, tuple[int, int]]] = {}
    for source in sources:
        groups = source.optimizers[number]["groups"]
        if len(groups) != len(named):
            raise _grouped(optimizer, 0, named, groups)
        for group, saved in enumerate(groups):
            for key, index in _keys(group, saved["params"]).items():
                if key in places:
                    raise _grouped(optimizer, group, named, groups)
                places[key] = source, (group, index)
    matched: dict[nn.Parameter, _Entry] = {}
    entries = [_entries(source, number) for source in sources]
    left = set(places)
    for group, names in enumerate(named):
        for key, index in _keys(group, names).items():
            if key not in places:
                raise _grouped(optimizer, group, named, sources[0].optimizers[number]["groups"])
            source, place = places[key]
            left.discard(key)
            one = entries[sources.index(source)].get(place)
            if one is not None:
                matched[optimizer.param_groups[group]["params"][index]] = one
    if left and run.comm.pp.axis.world == 1:
        raise _grouped(optimizer, min(left)[0], named, sources[0].optimizers[number]["groups"])
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


def _entries(source: Source, number: int) -> dict[tuple[int, int], _Entry]:
    """The states in one folder by place."""
    saved = source.optimizers[number]
    owners: dict[tuple[int, int], int | None] = {}
    for group, index, owner in saved.get("owners", []):
        require(type(group) is int and type(index) is int and min(group, index) >= 0, "places of parameters")
        require(owner is None or (type(owner) is int and 0 <= owner < source.folder.layout.places.shard), "a rank")
        require(index < len(saved["groups"][group]["params"]), "a place in a group")
        owners[group, index] = owner
    found: dict[tuple[int, int], _Entry] = {}
    for group, index, packed in saved["entries"]:
        require(type(group) is int and type(index) is int and min(group, index) >= 0, "places of parameters")
        require(index < len(saved["groups"][group]["params"]), "a place in a group")
        place = group, index
        require(place not in found, "one state per parameter")
        found[place] = _Entry(source, number, place, packed, place in owners, owners.get(place))
    return found


def _options(number: int, optimizer: torch.optim.Optimizer, sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The options of each group, the same in all folders."""
    every = []
    for source in sources:
        unpacker = source.unpacker(source.folder)
        every.append([unpacker.unpack(group["options"]) for group in source.optimizers[number]["groups"]])
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
            kept = one.owner is not None and one.source.folder.layout.places.shard == world
            owners[param] = one.owner if kept else None
            if not kept:
                shapes[param] = spec.shape
    owners |= dict(zip(shapes, assign(list(shapes.values()), world), strict=True))
    return owners


def _owned(name: str, owner: int | None, entry: _Entry, follow: Follow, *, here: bool) -> OwnedStates:
    """The states of one parameter, which may be on a tier before the next one's are read; elsewhere what all ranks note."""
    rank, packed = entry.of_owner()
    unpacker = entry.source.unpacker(entry.source.folder, rank)
    flags = [pair for pair in packed if pair[1] is None or isinstance(pair[1], (bool, str))]
    kept = {unpacker.unpack(key): converted(follow, unpacker.unpack(value)) for key, value in (packed if here else flags)}
    return OwnedStates(name, owner, kept, here=here)


def require(holds: bool, what: str) -> None:
    """A file that was made by ``save`` says so.

    Raises:
        ValueError: it does not.
    """
    if not holds:
        raise ValueError(f"something other than {what}")


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
    optimizer: torch.optim.Optimizer, found: Mapping[nn.Parameter, _Entry], follow: Mapping[nn.Parameter, Follow]
) -> dict[nn.Parameter, dict[Any, Any]]:
    """The states of each parameter: of the kinds that they have here, or where there are none yet, all of one kind.

    Those of parameters that are updated whole are compared alone, and read later.
    """
    entries: dict[nn.Parameter, dict[Any, Any]] = {}
    kinds: dict[Any, Any] = {}
    whole: dict[Any, Any] = {}
    for param, one in found.items():
        entries[param] = {}
        rank, packed = one.of_owner() if one.owned else (one.source.folder.counterpart, one.packed)
        unpacker = one.source.unpacker(one.source.folder, rank, unread=one.owned)
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
                made = converted(follow[param], value)
                check_whole(optimizer, str(key), made, held, whole.setdefault((key, param.dtype), []))
                if dtypes_of(made) != dtypes_of(value):
                    read = one.source.unpacker(one.source.folder, rank).unpack(packed_value)
                    check_fits(optimizer, str(key), read, follow[param])
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
