"""A full optimizer state: made of ranges, and the first rank's checked and sharded over all ranks.

``full_state_dict.py`` and ``torch_state_dict.py`` call it.  Before a load changes anything there is a plan of it: what can go
wrong on one rank goes wrong on all, and leaves the optimizer as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards import CODES
from zhooks.checkpoint.owned_states import from_first_rank, states_of_owners
from zhooks.checkpoint.rank0_values import spread_values, whole_values
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.layout import flats_of
from zhooks.optim import (
    OwnedStates,
    mapped,
    params_of,
    shard_vectors,
    state_keys,
    states_of,
    whole_copies,
    with_owners,
)
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Unit

__all__ = ["apply_plan", "make_whole", "plan_of"]


def make_whole(
    optimizer: torch.optim.Optimizer,
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
    order = params_of(optimizer)
    index = {id(param): number for number, param in enumerate(order)}
    copies = whole_copies(dict(optimizer.state), device, here=here)
    made = {id(copy) for copy in copies.values()}
    for flat in flats_of(units):
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
    ours = {id(param) for flat in flats_of(units) for param in flat.params}
    held = [param for param in order if id(param) in ours]
    for param_id, states in states_of_owners(optimizer, held, comm.shard, ranks).items():
        # Of a parameter that no step has updated there are none.
        if here and states:
            state[index[param_id]] = states
        else:
            state.pop(index[param_id], None)
    return made


def plan_of(packed: Any, optimizer: torch.optim.Optimizer, flats: Sequence[Flat]) -> Any:
    """What the first rank's state consists of, as JSON: ``values`` by parameter and key, ``groups``, and which
    parameters are ``owned``; None without one.

    Args:
        packed: ``optimizer.state_dict()`` with full tensors.
    Raises:
        CheckpointError: it is not of this optimizer.
    """
    if packed is None:
        return None
    groups = packed.get("param_groups") if isinstance(packed, dict) else None
    if not isinstance(groups, list) or not isinstance(packed.get("state"), dict):
        raise _expected(f"{type(packed).__name__} without state and param_groups")
    saved = [len(group["params"]) if isinstance(group, dict) and _is_list(group.get("params")) else None for group in groups]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        raise _expected(f"groups of {saved} parameters where it has {here}")
    order = params_of(optimizer)
    shapes = {id(param): spec.shape for flat in flats for param, spec in flat.members()}
    values, owned = [], []
    for index, entry in packed["state"].items():
        if not isinstance(index, int) or not 0 <= index < len(order) or not isinstance(entry, dict):
            raise _expected(f"the state of parameter {index!r} of {len(order)}")
        if isinstance(optimizer.state.get(order[index]), OwnedStates):
            owned.append(index)
            continue
        values += [[index, key, _about(value, shapes.get(id(order[index])))] for key, value in entry.items()]
    plain = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in groups
    ]
    return {"values": values, "groups": plain, "owned": owned}


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _about(value: Any, shape: Any) -> dict[str, Any]:
    """How a value travels: sharded, whole, or, one number, here and now."""
    if _is_list(value) and any(isinstance(item, Tensor) for item in value):
        return {"items": [_about(item, shape) for item in value], "dtype": None}
    if not isinstance(value, Tensor):
        return {"dtype": None, "value": value}
    if value.dtype not in CODES:
        raise _expected(f"a state of dtype {value.dtype}, which checkpoints cannot hold")
    about: dict[str, Any] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if value.dim() == 0:
        return about | {"value": value.item()}
    return about | {"sharded": tuple(value.shape) == shape}


def apply_plan(
    plan: dict[str, Any], packed: Any, optimizer: torch.optim.Optimizer, flats: Sequence[Flat], comm: Comm
) -> None:
    """Load what ``plan`` says; ``packed`` is read on the first rank alone.  Collective.

    Raises:
        CheckpointError: torch cannot make this optimizer of it; it is as it was.
    """
    order = params_of(optimizer)
    place = {id(param): index for index, param in enumerate(order)}
    source = packed["state"] if isinstance(packed, dict) else {}
    state: dict[int, dict[str, Any]] = {}
    sharded: dict[int, dict[str, torch.dtype]] = {}
    for index, key, how in plan["values"]:
        if how.get("sharded"):
            sharded.setdefault(index, {})[key] = getattr(torch, how["dtype"])
    for flat in flats:
        _shard(comm, flat, [place.get(id(param), -1) for param in flat.params], sharded, source, state)
    for index, key, how in plan["values"]:
        if not how.get("sharded"):
            state.setdefault(index, {})[key] = _whole(comm, how, source.get(index, {}).get(key))
    # Who owns a parameter goes on to, whatever is loaded.
    before_owned = {id(param): states for param, states in with_owners(optimizer, order)}
    owned = {
        id(order[index]): from_first_rank(comm, source.get(index), before_owned[id(order[index])], order[index].device)
        for index in plan["owned"]
    }
    for index in plan["owned"]:
        state[index] = dict(owned[id(order[index])])
    groups = [
        {**saved, "params": group["params"]}
        for saved, group in zip(plan["groups"], optimizer.state_dict()["param_groups"], strict=True)
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
        for param in order:
            if (old := before_owned.get(id(param))) is not None:
                optimizer.state[param] = owned.get(id(param), OwnedStates(old.name, old.owner, here=old.here))
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
    sharded: dict[int, dict[str, torch.dtype]],
    source: dict[int, dict[str, Any]],
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


def _whole(comm: Comm, how: dict[str, Any], value: Any) -> Any:
    """A number, or a tensor that is not sharded, of the first rank on every rank."""
    if "items" in how:
        given = value if _is_list(value) else [None] * len(how["items"])
        return [_whole(comm, each, item) for each, item in zip(how["items"], given, strict=True)]
    if how["dtype"] is None:
        return how["value"]
    dtype = getattr(torch, how["dtype"])
    if "value" in how:
        return torch.tensor(how["value"], dtype=dtype, device="cpu")
    flat = torch.zeros(how["shape"], dtype=dtype, device="cpu").reshape(-1)
    if isinstance(value, Tensor):
        flat.copy_(value.detach().reshape(-1))
    comm.stage.broadcast(Call(CONTROL, "load", "value"), flat)
    return flat.reshape(how["shape"])


def _expected(found: str) -> CheckpointError:
    return CheckpointError(
        f'load_state_dict expected "optimizer" to be what state_dict() returned for this optimizer, found {found}. Build the '
        "same optimizer with the same groups, or omit it to load only the model."
    )
