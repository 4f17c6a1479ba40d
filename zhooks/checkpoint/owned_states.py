"""States of parameters that are updated whole, on their way: from their owner to other ranks, and from the first rank to it.

``full_state_dict.py``, ``full_optimizer_state.py``, ``torch_state_dict.py`` and ``build/`` call it.  The states of one
parameter travel at once, as JSON and the bytes of its tensors; nothing is pickled.  It never decides who owns what.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.shards import CODES, DTYPES, blocks
from zhooks.checkpoint.state_tree import Packer, Unpacker
from zhooks.comm import CONTROL, GATHER, Call, Comm, ControlPlane, Transport
from zhooks.optim import OwnedStates, Owners, flags_of, plain_states_of, with_owners

__all__ = ["check_owned", "from_first_rank", "from_owner", "own_anew", "plain_states", "states_of_owners"]


def states_of_owners(
    optimizer: Optimizer, params: Iterable[nn.Parameter], shard: Transport, ranks: Collection[int]
) -> dict[int, dict[Any, Any]]:
    """All states of those of ``params`` that have owners, by identity; on these ``ranks`` of the shard axis.  Collective."""
    found: dict[int, dict[Any, Any]] = {}
    for param, states in with_owners(optimizer, params):
        got = from_owner(states, shard, ranks, param.device)
        if got is not None:
            found[id(param)] = got
    return found


def from_owner(states: OwnedStates, shard: Transport, ranks: Collection[int], device: torch.device) -> dict[Any, Any] | None:
    """What the owner has, on ``ranks``; None elsewhere.  Collective.

    Raises:
        CheckpointError: the owner has states that are no plain data and tensors; on every rank.
    """
    if states.owner is None:
        return plain_states_of(states) if shard.axis.rank in ranks else None
    rank, world, owner = shard.axis.rank, shard.axis.world, states.owner
    call = Call(CONTROL, "send states of", states.name)
    blob = _packed(states, shard, states.name)
    length = torch.tensor([blob.numel()], dtype=torch.int64, device="cpu")
    shard.all_reduce(call, length, "max")
    nbytes = int(length.item())
    sizes = [[nbytes if writer == owner and reader in ranks else 0 for reader in range(world)] for writer in range(world)]
    sent, received = blob.to(device), torch.empty(nbytes if rank in ranks else 0, dtype=torch.uint8, device=device)
    sends = [[sent] if sizes[rank][reader] else [] for reader in range(world)]
    receives = [[received] if sizes[writer][rank] else [] for writer in range(world)]
    shard.exchange(Call(GATHER, "send states of", states.name), sends, receives, sizes).wait()
    return _unpacked(received.cpu(), device) if rank in ranks else None


def from_first_rank(comm: Comm, given: Any, states: OwnedStates, device: torch.device) -> OwnedStates:
    """What the first rank was given, as this rank keeps it: all of it where it owns the parameter.  Collective."""
    first = comm.stage.axis.rank == 0
    blob = _bytes_of(given if first else {}, states.name)
    length = torch.tensor([blob.numel()], dtype=torch.int64, device="cpu")
    comm.stage.broadcast(Call(CONTROL, "load states of", states.name), length)
    blob = blob if first else torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
    comm.stage.broadcast(Call(CONTROL, "load states of", states.name), blob)
    got = _unpacked(blob, device)
    return OwnedStates(states.name, states.owner, got if states.here else flags_of(got), here=states.here)


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


def _packed(states: OwnedStates, shard: Transport, name: str) -> Tensor:
    """The owner's states as bytes; nothing elsewhere.  Collective: what they cannot be, is said on every rank."""
    found: list[Tensor] = []
    with ControlPlane(shard, "send states").all_or_none():
        found.append(_bytes_of(states, name) if states.here else torch.empty(0, dtype=torch.uint8, device="cpu"))
    return found[0]


def _bytes_of(states: Any, name: str) -> Tensor:
    """The length of a description, the description, and the tensors in its order."""
    packer = Packer()
    tree = packer.pack(_taken_apart(dict(states)), f"the optimizer state of {name}")
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


#: Stands for a tensor that is made of others (a quantised state): between ranks of one run, whose classes are the same.
_MADE = "zhooks: a tensor made of others"


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
