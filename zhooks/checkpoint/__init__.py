"""Every way state leaves and enters: full values, folders of shards, state dicts of torch."""

from __future__ import annotations

from offload.shards import Series, check_memory, destination, latest, remove_dead_jobs, run_of, when_saved
from zhooks.checkpoint.background import Progress, Saving
from zhooks.checkpoint.extra_entry import saved_extra
from zhooks.checkpoint.full_state_dict import full_state, gathered, load_full_state
from zhooks.checkpoint.owned_states import check_owned, own_anew, plain_states
from zhooks.checkpoint.peer_memory import PeerMemory, save_to_peers
from zhooks.checkpoint.peer_state import Ask, OfferedState, PeerLostError, extra_of, replica_facts, take_over
from zhooks.checkpoint.pretrained_folder import Pretrained, StockFolders, save_pretrained
from zhooks.checkpoint.resume import resume
from zhooks.checkpoint.rng import generators, restore
from zhooks.checkpoint.save_load import load, save, save_beside
from zhooks.checkpoint.shard_contents import RunState, check_handed
from zhooks.checkpoint.snapshot import Snapshot, SnapshotMemory
from zhooks.checkpoint.state_tree import Packer
from zhooks.checkpoint.torch_state_dict import StockState
from zhooks.checkpoint.whole_folder import save_full

__all__ = [
    "Ask",
    "OfferedState",
    "Packer",
    "PeerLostError",
    "PeerMemory",
    "Pretrained",
    "Progress",
    "RunState",
    "Saving",
    "Series",
    "Snapshot",
    "SnapshotMemory",
    "StockFolders",
    "StockState",
    "check_handed",
    "check_memory",
    "check_owned",
    "destination",
    "extra_of",
    "full_state",
    "gathered",
    "generators",
    "latest",
    "load",
    "load_full_state",
    "own_anew",
    "plain_states",
    "remove_dead_jobs",
    "replica_facts",
    "restore",
    "resume",
    "run_of",
    "save",
    "save_beside",
    "save_full",
    "save_pretrained",
    "save_to_peers",
    "saved_extra",
    "take_over",
    "when_saved",
]
