"""The optimizers of a checkpoint: whether they are those of the run (their groups, options, owners and the states of each
parameter), and loading them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.errors import CheckpointError
from offload.store import Mode
from offload.text import counted, shown
from zhooks.checkpoint.saved_folder import InFlat, Saved, SavedFolder, pour, runs
from zhooks.checkpoint.shard import SHARDED, RunState, group_names, state_name
from zhooks.optim import OwnedStates, assign, stand_in_of, step_stand_in, vectors_in
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

#: Options of torch's optimizers that are None, True or False.
_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize"})


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """What one optimizer shall hold.  Made by `check_optimizers`.

    Attributes:
        options: group by group.
        entries: each parameter's states in order; an `InFlat` stands for one that is a range like the parameter.
        flats: those, by the place of the flat among the run's, the state's key and the dtype it is kept in, and the parameter's
            place in the flat.
        owned: reads the states of a parameter that is updated whole, which may be on a tier before the next one's are read.
        owned_nbytes: of those of which this rank is the owner, the bytes of their tensors.
        loose: states without a parameter.
    """

    optimizer: torch.optim.Optimizer
    options: Sequence[dict[str, Any]]
    entries: Mapping[nn.Parameter, dict[Any, Any]]
    flats: Mapping[int, Mapping[tuple[Any, torch.dtype], Mapping[int, InFlat]]]
    owned: Mapping[nn.Parameter, Callable[[], OwnedStates]]
    owned_nbytes: Mapping[nn.Parameter, int]
    loose: Mapping[Any, Any]

    def load_flat(self, number: int, flat: Flat) -> None:
        """The states of one flat's parameters: into the tensors that exist, else into new ones."""
        state = self.optimizer.state
        for (key, dtype), held in self.flats.get(number, {}).items():
            made: dict[int, ShardedTensor] = {}
            for index in held:
                old = state.get(flat.params[index], {}).get(key)
                fits = isinstance(old, ShardedTensor) and old.dtype == dtype and old.local_shard.spec is flat.specs[index]
                made[index] = old if fits else new_range(flat, index, dtype)
                self.entries[flat.params[index]][key] = made[index]
            if len(made) == len(flat.params):
                # All of it is overwritten: what a failed disk has lost is not asked for.
                for block in {block for each in made.values() if (block := each.local_shard.block) is not None}:
                    block.tensor(Mode.WRITE_ALL).zero_()
            pour(run for index, each in made.items() for run in runs(held[index], flat.specs[index], each.local_shard.values))
        for param in flat.params:
            state.pop(param, None)
            if param in self.owned:
                state[param] = self.owned[param]()
            elif param in self.entries:
                state[param] = self.entries[param]

    def finish(self, run: RunState) -> None:
        """Parameters of other models, states without a parameter, and the groups' options as they were saved."""
        optimizer = self.optimizer
        own = {id(param) for flat in run.flats for param in flat.params}
        for key in [key for key in optimizer.state if id(key) not in own and not isinstance(key, ShardedTensor)]:
            del optimizer.state[key]
        optimizer.state.update({param: state for param, state in self.entries.items() if id(param) not in own})
        optimizer.state.update(self.loose)
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)


def new_range(flat: Flat, index: int, dtype: torch.dtype) -> ShardedTensor:
    """This rank's range of one parameter, with no values yet."""
    return ShardedTensor(torch.empty(flat.span(index)[1], dtype=dtype, device=flat.kind.device), flat.specs[index])


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter's states in one folder.

    Attributes:
        name: of the parameter; "" of another model's.
        number: of the optimizer; ``place``: the parameter's among the groups there.
        packed: pairs of keys and values, as the file that stands for this rank has them.
    """

    folder: SavedFolder
    name: str
    number: int
    place: tuple[int, int]
    packed: list[tuple[Any, Any]]
    owned: bool
    owner: int | None

    def of_owner(self) -> tuple[int, list[tuple[Any, Any]]]:
        """The file that has the states of a parameter that is updated whole, and what it says of them."""
        folder = self.folder
        rank = folder.counterpart if self.owner is None else folder.rank_at(None, self.owner)
        if not self.owned or rank == folder.counterpart:
            return folder.counterpart, self.packed
        saved, mine = folder.document(rank).optimizers[self.number], folder.own.optimizers[self.number]
        if (saved.groups, saved.owners) != (mine.groups, mine.owners):
            raise ValueError("something other than the same owners on all ranks")
        return rank, next((packed for *place, packed in saved.entries if tuple(place) == self.place), [])


def check_optimizers(saved: Saved) -> list[OptimizerStates]:
    """What each optimizer shall hold, once it has been found to be like the one that was saved; nothing is changed.

    Raises:
        CheckpointError: there are other optimizers, or one of them has other groups, options or states.
    """
    run = saved.run
    if run.model_only:
        return []
    kinds = [type(optimizer).__name__ for optimizer in run.optimizers]
    for folder in saved.folders:
        found = [one.type for one in folder.own.optimizers]
        if found != kinds:
            what = "Pass the same ones in the same order" if kinds else "Build them before loading"
            raise CheckpointError(
                f"load expected the optimizers of the checkpoint ({', '.join(found) or 'none'}), "
                f"found {', '.join(kinds) or 'none'}. {what}, or pass optimizer=() to load only the model."
            )
    return [_check_optimizer(saved, number, optimizer) for number, optimizer in enumerate(run.optimizers)]


def _check_optimizer(saved: Saved, number: int, optimizer: torch.optim.Optimizer) -> OptimizerStates:
    run, main = saved.run, saved.main
    found = _match(saved, number, optimizer)
    options = _options(saved, number, optimizer)
    loose = saved.unpacker(main).unpack(main.own.optimizers[number].loose)
    if not isinstance(loose, dict):
        raise ValueError("states without a parameter that are no dict")
    entries = _check_entries(saved, optimizer, found)
    _check_names(optimizer, entries)
    flats: dict[int, dict[tuple[Any, torch.dtype], dict[int, InFlat]]] = {}
    for place, flat in enumerate(run.flats):
        for index, (param, spec) in enumerate(flat.members()):
            for key, value in entries.get(param, {}).items():
                if isinstance(value, InFlat):
                    kept = _dtype_here(saved, spec.name, value.dtype)
                    flats.setdefault(place, {}).setdefault((key, kept), {})[index] = value
    owned, owned_nbytes = {}, {}
    for param, owner in _owners(run, {param: one for param, one in found.items() if one.owned}).items():
        here = owner is None or owner == run.comm.shard.axis.rank
        owned[param] = partial(_owned, saved, owner, found[param], here=here)
        states = entries.pop(param, {})
        if here:
            owned_nbytes[param] = sum(each.nbytes for each in tree_leaves(states) if isinstance(each, Tensor))
    return OptimizerStates(optimizer, options, entries, flats, owned, owned_nbytes, loose)


def _match(saved: Saved, number: int, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, _Entry]:
    """Where the states of each parameter are; nothing of one that had none.

    Raises:
        CheckpointError: other groups.
    """
    named = group_names(saved.run, optimizer)

    def grouped(group: int) -> CheckpointError:
        there = len(saved.folders[0].own.optimizers[number].groups)
        return CheckpointError(
            f"load expected {type(optimizer).__name__} with the parameter groups of the checkpoint, found different ones from "
            f"group {group} on ({counted(len(named), 'group')} here, {there} there). Group parameters in the same way."
        )

    places: dict[tuple[int, str, int], _Entry | None] = {}
    for folder in saved.folders:
        one = folder.own.optimizers[number]
        if len(one.groups) != len(named):
            raise grouped(0)
        owners = {(group, index): owner for group, index, owner in one.owners}
        entries = {(group, index): packed for group, index, packed in one.entries}
        for group, each in enumerate(one.groups):
            for index, key in enumerate(_keys(group, each.params)):
                if key in places:
                    raise grouped(group)
                at, packed = (group, index), entries.pop((group, index), None)
                entry = None if packed is None else _Entry(folder, key[1], number, at, packed, at in owners, owners.get(at))
                places[key] = entry
        if entries:
            raise ValueError(f"states of parameters in no group, {min(entries)}")
    matched: dict[nn.Parameter, _Entry] = {}
    for group, names in enumerate(named):
        for key, param in zip(_keys(group, names), optimizer.param_groups[group]["params"], strict=True):
            if key not in places:
                raise grouped(group)
            found = places.pop(key)
            if found is not None:
                matched[param] = found
    if places and not saved.in_stages:
        raise grouped(min(places)[0])
    return matched


def _keys(group: int, names: Sequence[str]) -> Iterator[tuple[int, str, int]]:
    """The parameters of a group by name, those of other models (which have none) by their order."""
    seen = Counter[str]()
    for name in names:
        seen[name] += 1
        yield group, name, seen[name]


# Options.


def _options(saved: Saved, number: int, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, which are those this optimizer has, each of the kind it has, and the same in all folders."""
    kind = type(optimizer).__name__
    first: list[dict[str, Any]] = []
    for folder in saved.folders:
        unpacker = saved.unpacker(folder)
        every = [unpacker.unpack(group.options) for group in folder.own.optimizers[number].groups]
        for group, (here, options) in enumerate(zip(optimizer.param_groups, every, strict=True)):
            _check_options(optimizer, here, options)
            one = first[group] if first else options
            for key in one.keys() | options.keys():
                if key not in one or key not in options or not _equal(one[key], options[key]):
                    raise CheckpointError(
                        f"load expected the same options of {kind} in all folders, found {str(one.get(key))[:40]} and "
                        f"{str(options.get(key))[:40]} as {key} of group {group}. Load each stage's own folder."
                    )
        first = first or every
    return first


def _check_options(optimizer: torch.optim.Optimizer, here: Mapping[str, Any], saved: Any) -> None:
    kind = type(optimizer).__name__
    if not isinstance(saved, dict) or "params" in saved or not all(type(key) is str for key in saved):
        raise ValueError(f"something other than options of {kind}")
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


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


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


# States.


def _check_entries(
    saved: Saved, optimizer: torch.optim.Optimizer, found: Mapping[nn.Parameter, _Entry]
) -> dict[nn.Parameter, dict[Any, Any]]:
    """The states of each parameter: of the kinds that they have here, or where there are none yet, all of one kind.

    Those of parameters that are updated whole are compared alone, and read later.
    """
    optimizer_name = type(optimizer).__name__
    entries: dict[nn.Parameter, dict[Any, Any]] = {}
    in_flats: dict[int, dict[tuple[Any, str], InFlat]] = {}
    kinds: dict[Any, Any] = {}
    dtypes: dict[Any, frozenset[torch.dtype]] = {}
    for param, one in found.items():
        if id(one.folder) not in in_flats:
            in_flats[id(one.folder)] = _in_flats(saved, one.folder, one.number)
        rank, packed = one.of_owner()
        unpacker = saved.unpacker(one.folder, rank, unread=one.owned)
        states: dict[Any, Any] = {}
        for packed_key, value in packed:
            key = unpacker.unpack(packed_key)
            if key in states:
                raise ValueError(f"two states {str(key)[:80]} of one parameter")
            if value != SHARDED:
                states[key] = unpacker.unpack(value)
                continue
            where = in_flats[id(one.folder)].get((key, one.name))
            if where is None or one.owned:
                raise CheckpointError(
                    f"Cannot load {one.folder.path}. Expected a tensor for every optimizer state, found none for "
                    f"{str(key)[:80]} of {one.name}. The file is damaged."
                )
            states[key] = where
        entries[param] = states
        here = optimizer.state.get(param, {})
        if one.owned:
            for (key, value), (_, packed_value) in zip(states.items(), packed, strict=True):
                # Their shape is the optimizer's affair; with other dtypes it would go on otherwise, or not at all.
                made = _dtypes(_as_kept(saved, one.name, value))
                if not made:
                    continue
                first = dtypes.setdefault((key, param.dtype), made)
                expected = _dtypes(here.get(key)) or first
                if made != expected:
                    names = [", ".join(sorted(map(str, each))) for each in (expected, made)]
                    raise CheckpointError(
                        f"load expected {optimizer_name}'s {str(key)[:80]} in {names[0]}, as it has it for every parameter, "
                        f"found {names[1]} in the checkpoint. Load another checkpoint."
                    )
                if made != _dtypes(value):
                    for each in tree_leaves(saved.unpacker(one.folder, rank).unpack(packed_value)):
                        _check_fits(saved, optimizer_name, key, each, one.name)
            continue
        # How long lists of vectors are depends on how many steps there were.
        free = bool(vectors_in([value for value in states.values() if not isinstance(value, InFlat)]))
        for key, value in states.items() if not free else ():
            if isinstance(value, InFlat):
                continue
            held = here.get(key)
            kind = kinds.setdefault(key, _kind(value)) if held is None or isinstance(held, ShardedTensor) else _kind(held)
            count = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
            counts = key != "step" or (isinstance(count, (int, float)) and 0 <= count < float("inf"))
            if _kind(value) != kind or not counts:
                raise CheckpointError(
                    f"load expected {optimizer_name}'s {str(key)[:80]} in the form it has for every parameter, found "
                    f"{str(value)[:80]}. Load another checkpoint."
                )
    return entries


def _in_flats(saved: Saved, folder: SavedFolder, number: int) -> dict[tuple[Any, str], InFlat]:
    """Where a folder has the states of one optimizer that are ranges like the parameters, by key and name of the parameter."""
    unpacker, file = saved.unpacker(folder), folder.reader(folder.counterpart)
    found: dict[tuple[Any, str], InFlat] = {}
    for flat, which, packed, name, held in folder.own.states:
        if which != number:
            continue
        key, members, dtype = unpacker.unpack(packed), folder.members[flat], file.entry(name).dtype
        if name != state_name(flat, which, key, dtype):
            raise ValueError(f"{name[:80]} as the name of a state of {dtype}")
        folder.expect(folder.counterpart, name, dtype, (members[0].flat.shard_numel,))
        new = {(key, members[index].name): InFlat(folder, members[index], name) for index in held}
        if not found.keys().isdisjoint(new):
            raise ValueError(f"the state {shown(key)} of {members[0].name} twice")
        found |= new
    return found


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


def _dtype_here(saved: Saved, name: str, dtype: torch.dtype) -> torch.dtype:
    """In which dtype a state of a parameter is kept that was saved in ``dtype``: those of the masters' dtype follow it, as the
    optimizer would make them; others stay what they are."""
    if name not in saved.params:
        return dtype
    there, here = saved.params[name][1].flat.dtype, saved.masters[name]
    stays = dtype is not there or here is there or (saved.run.rounding.stochastic and here is torch.bfloat16)
    return dtype if stays else here


# Parameters that are updated whole.


def _owners(run: RunState, found: Mapping[nn.Parameter, _Entry]) -> dict[nn.Parameter, int | None]:
    """Who shall own each parameter that is updated whole: who did where that rank is here, else by cost."""
    flats = {id(param): (flat, spec) for flat in run.flats for param, spec in flat.members()}
    world = run.comm.shard.axis.world
    owners: dict[nn.Parameter, int | None] = {}
    shapes: dict[nn.Parameter, torch.Size] = {}
    for param, one in found.items():
        owners[param] = None
        flat, spec = flats.get(id(param), (None, None))
        if flat is None or spec is None or not flat.sharded:
            continue
        if one.owner is not None and one.folder.layout.shard == world:
            owners[param] = one.owner
        else:
            shapes[param] = spec.shape
    return owners | dict(zip(shapes, assign(list(shapes.values()), world), strict=True))


def _owned(saved: Saved, owner: int | None, entry: _Entry, *, here: bool) -> OwnedStates:
    """The states of one parameter; on ranks other than the owner what all of them note."""
    rank, packed = entry.of_owner()
    unpacker = saved.unpacker(entry.folder, rank)
    flags = [pair for pair in packed if pair[1] is None or isinstance(pair[1], (bool, str))]
    kept = {
        unpacker.unpack(key): _as_kept(saved, entry.name, unpacker.unpack(value)) for key, value in (packed if here else flags)
    }
    return OwnedStates(entry.name, owner, kept, here=here)


def _as_kept(saved: Saved, name: str, value: Any) -> Any:
    """The tensors among these states in the dtypes that they have here; numbers stay what they are."""

    def one(tensor: Tensor) -> Tensor:
        return tensor.to(_dtype_here(saved, name, tensor.dtype)) if tensor.dim() else tensor

    return tree_map_only(Tensor, one, value)


def _dtypes(value: Any) -> frozenset[torch.dtype]:
    """Of the tensors that these are, numbers apart."""
    return frozenset(each.dtype for each in tree_leaves(value) if isinstance(each, Tensor) and each.dim())


def _check_fits(saved: Saved, kind: str, key: Any, value: Any, name: str) -> None:
    """Refuse numbers that would become infinite where the dtype of the masters, which this state follows, is narrower here."""
    if isinstance(value, Tensor):
        dtype = _dtype_here(saved, name, value.dtype)
        if bool((value.to(dtype).isinf() & value.isfinite()).any()):
            raise CheckpointError(
                f"load expected numbers that {dtype} can hold, found larger ones in {kind}'s {str(key)[:80]}, saved as "
                f"{value.dtype}. Attach a model in a dtype with that range."
            )
