"""A full optimizer state, made of ranges and of what owners have; and the first rank's, checked and sharded over all ranks.

What is no range travels as JSON and the bytes of its tensors: the states of a parameter that is updated whole one parameter at
a time, the others together.  Before a load changes anything, what can go wrong on one rank has gone wrong on all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.errors import CheckpointError
from offload.shards import CODES, DTYPES, blocks
from zhooks.checkpoint.state_tree import Packer, Unpacker
from zhooks.checkpoint.whole_values import is_first, spread_values, whole_values
from zhooks.comm import CONTROL, GATHER, Call, Comm, ControlPlane, Transport
from zhooks.layout import flats_of
from zhooks.optim import (
    OwnedStates,
    Owners,
    flags_of,
    mapped,
    params_of,
    plain_states_of,
    shard_vectors,
    state_keys,
    states_of,
    whole_copies,
    with_owners,
)
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Unit

_CPU = torch.device("cpu")


def make_whole(
    optimizer: Optimizer,
    state: dict[Any, Any],
    units: Sequence[Unit],
    comm: Comm,
    ranks: Collection[int],
    device: torch.device | None,
    *,
    here: bool,
) -> set[int]:
    """Put whole values in place of ranges in ``state``, never in the optimizer's own; on ranks that are ``here``.  Collective.

    Args:
        state: of ``optimizer.state_dict()``.
        ranks: those of the shard axis that get what owners have.
        device: where they go; None: to where the parameters are.
    Returns:
        The tensors of ranges that were made, by identity.
    """
    order, flats = params_of(optimizer), flats_of(units)
    index = {id(param): number for number, param in enumerate(order)}
    copies = whole_copies(dict(optimizer.state), device, here=here)
    made = {id(copy) for copy in copies.values()}
    for flat in flats:
        for key in state_keys(flat, optimizer):
            shards = states_of(flat, optimizer, key)
            wanted = range(len(shards) if here else 0)
            values = whole_values(flat, shards, wanted, device or flat.kind.device)
            for param, shard, value in zip(flat.params, shards, values, strict=True):
                if value is not None and shard is not None:
                    at = index[id(param)]
                    state[at] = {**state[at], key: value}
                    made.add(id(value))
    if copies:
        state.update({at: mapped(states, lambda value: copies.get(id(value), value)) for at, states in state.items()})
    ours = {id(param) for flat in flats for param in flat.params}
    for param, states in with_owners(optimizer, [param for param in order if id(param) in ours]):
        got = from_owner(states, comm.shard, ranks, param.device)
        if got is None:
            continue
        # Of a parameter that no step has updated there are none.
        if here and got:
            state[index[id(param)]] = got
        else:
            state.pop(index[id(param)], None)
    return made


# The first rank's state, on its way to all.


def packed_state(given: Any, optimizer: Optimizer, flats: Sequence[Flat]) -> Tensor:
    """All but ranges and what owners get of a state that the first rank was given, as bytes that `load_packed` takes.

    Args:
        given: ``optimizer.state_dict()`` with full tensors.
    Raises:
        CheckpointError: it is not of this optimizer.
    """
    groups = given.get("param_groups") if isinstance(given, dict) else None
    if not isinstance(groups, list) or not isinstance(given.get("state"), dict):
        raise _expected(f"{type(given).__name__} without state and param_groups")
    saved = [
        len(group["params"]) if isinstance(group, dict) and isinstance(group.get("params"), (list, tuple)) else None
        for group in groups
    ]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        raise _expected(f"groups of {saved} parameters where it has {here}")
    order = params_of(optimizer)
    shapes = {id(param): spec.shape for flat in flats for param, spec in flat.members()}
    sharded: dict[int, dict[str, torch.dtype]] = {}
    plain: dict[int, dict[str, Any]] = {}
    owned: list[int] = []
    for index, entry in given["state"].items():
        if not isinstance(index, int) or not 0 <= index < len(order) or not isinstance(entry, dict):
            raise _expected(f"the state of parameter {index!r} of {len(order)}")
        known = optimizer.state.get(order[index])
        if isinstance(known, OwnedStates):
            # Refused here, where every rank hears of it; its bytes are made when their turn comes.
            Packer("load_state_dict").pack(_taken_apart(entry), known.name)
            owned.append(index)
            continue
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dtype not in CODES:
                raise _expected(f"a state of dtype {value.dtype}, which checkpoints cannot hold")
            if isinstance(value, Tensor) and value.dim() and tuple(value.shape) == shapes.get(id(order[index])):
                sharded.setdefault(index, {})[key] = value.dtype
            else:
                plain.setdefault(index, {})[key] = value
    options = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in groups
    ]
    said = {"sharded": sharded, "plain": plain, "owned": owned, "groups": options}
    return _bytes_of(said, "the optimizer's state", "load_state_dict")


def load_packed(blob: Tensor | None, given: Any, optimizer: Optimizer, flats: Sequence[Flat], comm: Comm) -> None:
    """Load what `packed_state` says; ``blob`` and ``given`` are read on the first rank alone.  Collective.

    Raises:
        CheckpointError: torch cannot make this optimizer of it; it is as it was.
    """
    said = _unpacked(_broadcast(comm, "all parameters", blob), _CPU)
    source = given["state"] if isinstance(given, dict) else {}
    order = params_of(optimizer)
    place = {id(param): index for index, param in enumerate(order)}
    state: dict[int, dict[str, Any]] = {}
    for flat in flats:
        _shard(comm, flat, [place.get(id(param), -1) for param in flat.params], said["sharded"], source, state)
    for index, plain in said["plain"].items():
        state.setdefault(index, {}).update(plain)
    # Who owns a parameter goes on to, whatever is loaded.
    owned: dict[Tensor, OwnedStates] = {
        param: OwnedStates(old.name, old.owner, here=old.here) for param, old in with_owners(optimizer, order)
    }
    for index in said["owned"]:
        old = owned[order[index]]
        packed = _bytes_of(source[index], old.name, "load_state_dict") if is_first(comm) else None
        got = _unpacked(_broadcast(comm, old.name, packed), order[index].device)
        owned[order[index]] = OwnedStates(old.name, old.owner, got if old.here else flags_of(got), here=old.here)
        state[index] = dict(owned[order[index]])
    groups = [
        {**options, "params": group["params"]}
        for options, group in zip(said["groups"], optimizer.state_dict()["param_groups"], strict=True)
    ]
    # Loading may add some that no group has (torch's own does).
    needed = set(optimizer.defaults)

    def load() -> None:
        try:
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        except Exception as error:
            raise _expected(f"a state that it cannot load: {type(error).__name__}: {error}") from error
        missing = sorted(key for group in optimizer.param_groups for key in needed if key not in group)
        if missing:
            raise _expected(f"groups without {missing[0]}")
        optimizer.state.update(owned)
        for index, entry in state.items():
            # torch has cast them to the parameter's dtype: of a bf16 one that is rounded stochastically they are fp32.
            wide = {key: value for key, value in entry.items() if isinstance(value, ShardedTensor)}
            if wide:
                optimizer.state[order[index]].update(wide)
        shard_vectors(optimizer)

    before = optimizer.state, optimizer.param_groups
    try:
        ControlPlane(comm.stage, "load_state_dict", "the optimizer's state").run(load)
    except CheckpointError:
        optimizer.state, optimizer.param_groups = before
        raise


def _shard(
    comm: Comm,
    flat: Flat,
    indices: Sequence[int],
    sharded: Mapping[int, Mapping[str, torch.dtype]],
    source: Mapping[int, Mapping[str, Any]],
    state: dict[int, dict[str, Any]],
) -> None:
    """The ``sharded`` values of one flat's parameters, ``indices`` in the optimizer: key by key, alike on all ranks."""
    here = [sharded.get(index, {}) for index in indices]
    for key in sorted({key for keys in here for key in keys}):
        dtype = next(keys[key] for keys in here if key in keys)
        shard = torch.empty(flat.shard_numel, dtype=dtype, device=flat.kind.device)
        found = [source.get(index, {}).get(key) if key in keys else None for index, keys in zip(indices, here, strict=True)]
        spread_values(comm, flat, found, shard)
        for at, (index, keys, spec) in enumerate(zip(indices, here, flat.specs, strict=True)):
            if key in keys:
                state.setdefault(index, {})[key] = ShardedTensor(flat.local(at, shard).clone(), spec)


def _broadcast(comm: Comm, name: str, blob: Tensor | None) -> Tensor:
    """The first rank's bytes on every rank.  Collective."""
    call = Call(CONTROL, "load states of", name)
    length = torch.tensor([0 if blob is None else blob.numel()], dtype=torch.int64, device="cpu")
    comm.stage.broadcast(call, length)
    blob = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu") if blob is None else blob
    comm.stage.broadcast(call, blob)
    return blob


def _expected(found: str) -> CheckpointError:
    return CheckpointError(
        f'load_state_dict expected "optimizer" to be what state_dict() returned for this optimizer, found {found}. Build the '
        "same optimizer with the same groups, or omit it to load only the model."
    )


# States of parameters that are updated whole.


def from_owner(states: OwnedStates, shard: Transport, ranks: Collection[int], device: torch.device) -> dict[Any, Any] | None:
    """What the owner has, on ``ranks`` of the shard axis; None elsewhere.  Collective.

    Raises:
        CheckpointError: the owner has states that are no plain data and tensors; on every rank.
    """
    rank, world, owner = shard.axis.rank, shard.axis.world, states.owner
    if owner is None:
        return plain_states_of(states) if rank in ranks else None
    blob = torch.empty(0, dtype=torch.uint8, device="cpu")
    with ControlPlane(shard, "send states").all_or_none():
        if states.here:
            blob = _bytes_of(states, f"the optimizer state of {states.name}")
    length = torch.tensor([blob.numel()], dtype=torch.int64, device="cpu")
    shard.all_reduce(Call(CONTROL, "send states of", states.name), length, "max")
    nbytes = int(length.item())
    sizes = [[nbytes if writer == owner and reader in ranks else 0 for reader in range(world)] for writer in range(world)]
    sent, received = blob.to(device), torch.empty(nbytes if rank in ranks else 0, dtype=torch.uint8, device=device)
    sends = [[sent] if sizes[rank][reader] else [] for reader in range(world)]
    receives = [[received] if sizes[writer][rank] else [] for writer in range(world)]
    shard.exchange(Call(GATHER, "send states of", states.name), sends, receives, sizes).wait()
    return _unpacked(received.cpu(), device) if rank in ranks else None


def plain_states(optimizer: Optimizer, params: Iterable[nn.Parameter], shard: Transport) -> None:
    """Every rank has all states of those of ``params`` that have owners, as a plain optimizer has them.  Collective."""
    for param, states in list(with_owners(optimizer, params)):
        got = from_owner(states, shard, range(shard.axis.world), param.device)
        assert got is not None
        if got:
            optimizer.state[param] = got
        else:
            del optimizer.state[param]


def check_owned(optimizer: Optimizer, owners: Owners) -> None:
    """That the states this rank owns can be sent to another.

    Raises:
        CheckpointError: they are no plain data and tensors.
    """
    for one in owners.whole(optimizer):
        states = optimizer.state.get(one.param)
        if isinstance(states, OwnedStates) and states.here:
            Packer().pack(_taken_apart(dict(states)), f"the optimizer state of {states.name}")


def own_anew(optimizer: Optimizer, owners: Owners, before: Transport, shard: Transport) -> None:
    """Parameters that were sharded, or are no more, or by other ranks than ``before``: owners take their states, or every rank
    does.  Collective."""
    for one, owner in owners.over(optimizer, before):
        states = optimizer.state.get(one.param)
        if not isinstance(states, OwnedStates) or states.owner is None or (one.flat.sharded and before is shard):
            continue
        # Ranks that shared it hold all of it between them, so that each new owner finds it among those it was with.
        places = enumerate(before.axis.ranks)
        ranks = [place for place, rank in places if owner is None or shard.axis.place(rank) == owner]
        got = from_owner(states, before, ranks, one.param.device) if ranks else None
        here = owner is None or shard.axis.rank == owner
        optimizer.state[one.param] = OwnedStates(states.name, owner, flags_of(states) if got is None else got, here=here)
    owners.choose(optimizer, "apply")


# States as bytes; nothing is pickled.

#: Stands for a tensor that is made of others (a quantised state): between ranks of one run, whose classes are the same.
_MADE = "zhooks: a tensor made of others"


def _bytes_of(states: Mapping[Any, Any], where: str, verb: str = "save") -> Tensor:
    """The length of a description, the description, and the tensors in its order; ``where`` names them in errors."""
    packer = Packer(verb)
    tree = packer.pack(_taken_apart(dict(states)), where)
    about = [[key, CODES[value.dtype], list(value.shape)] for key, value in packer.tensors.items()]
    raw = json.dumps({"tree": tree, "tensors": about}, separators=(",", ":")).encode()
    head = torch.frombuffer(bytearray(len(raw).to_bytes(8, "little") + raw), dtype=torch.uint8)
    return torch.cat([head, *(torch.from_numpy(block) for value in packer.tensors.values() for block in blocks(value))])


def _unpacked(blob: Tensor, device: torch.device) -> dict[Any, Any]:
    length = int.from_bytes(blob[:8].numpy().tobytes(), "little")
    said = json.loads(blob[8 : 8 + length].numpy().tobytes())
    at, tensors = 8 + length, dict[str, Tensor]()
    for key, code, shape in said["tensors"]:
        dtype = DTYPES[code]
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        # In memory of its own, where every dtype is aligned.
        tensors[key] = blob[at : at + nbytes].clone().view(dtype).reshape(shape)
        at += nbytes
    unpacked: dict[Any, Any] = _put_together(Unpacker(tensors.__getitem__, device).unpack(said["tree"]))
    return unpacked


def _taken_apart(value: Any) -> Any:
    if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter) and hasattr(value, "__tensor_flatten__"):
        made: Any = value
        names, about = made.__tensor_flatten__()
        kind = [type(value).__module__, type(value).__qualname__, _taken_apart(about), tuple(value.shape)]
        kind.append(tuple(value.stride()))
        return {_MADE: kind, "inner": {name: _taken_apart(getattr(value, name)) for name in names}}
    if isinstance(value, torch.dtype):
        return {_MADE: str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        if _MADE in value:
            # Read from a file, it would choose the code that puts it together.
            raise _expected(f"a dict with the key {_MADE!r}")
        return {key: _taken_apart(item) for key, item in value.items()}
    return type(value)(map(_taken_apart, value)) if type(value) in (list, tuple) else value


def _put_together(value: Any) -> Any:
    if isinstance(value, dict) and _MADE in value:
        if isinstance(value[_MADE], str):
            return getattr(torch, value[_MADE])
        module, name, about, shape, stride = value[_MADE]
        kind: Any = attrgetter(name)(import_module(module))
        inner = {key: _put_together(item) for key, item in value["inner"].items()}
        return kind.__tensor_unflatten__(inner, _put_together(about), torch.Size(shape), stride)
    if isinstance(value, dict):
        return {key: _put_together(item) for key, item in value.items()}
    return type(value)(map(_put_together, value)) if type(value) in (list, tuple) else value
