"""Every way state leaves and enters: full values, folders of shards, state dicts of torch."""

from __future__ import annotations

from offload.shards import Series, destination, latest, run_of
from zhooks.checkpoint.background import Progress, Saving
from zhooks.checkpoint.full_safetensors import save_full
from zhooks.checkpoint.full_state_dict import full_state, gathered, load_full_state
from zhooks.checkpoint.owned_states import own_anew, plain_states
from zhooks.checkpoint.save_load import load, save, save_beside
from zhooks.checkpoint.shard_contents import RunState, check_handed
from zhooks.checkpoint.snapshot import Snapshot, SnapshotMemory
from zhooks.checkpoint.torch_state_dict import StockState

__all__ = [
    "Progress",
    "RunState",
    "Saving",
    "Series",
    "Snapshot",
    "SnapshotMemory",
    "StockState",
    "check_handed",
    "destination",
    "full_state",
    "gathered",
    "latest",
    "load",
    "load_full_state",
    "own_anew",
    "plain_states",
    "run_of",
    "save",
    "save_beside",
    "save_full",
]
