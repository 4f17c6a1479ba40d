"""Every way state leaves and enters: full values, folders of shards, state dicts of torch."""

from __future__ import annotations

from zhooks.checkpoint.background import Saving, Snapshot, SnapshotMemory, host_budget, write_file
from zhooks.checkpoint.full_optimizer_state import check_owned, own_anew, plain_states
from zhooks.checkpoint.full_state import StockState, full_state, gathered, load_full_state
from zhooks.checkpoint.loading import Loading
from zhooks.checkpoint.pretrained_folder import Pretrained, StockFolders, save_pretrained
from zhooks.checkpoint.save_load import load, save, saved_extra
from zhooks.checkpoint.saved_folder import GAP, Place, Present, SavedFolder, tagged
from zhooks.checkpoint.saved_ranges import difference
from zhooks.checkpoint.shard import (
    DOCUMENT,
    FileTensor,
    Piece,
    RunState,
    about_run,
    buffer_name,
    check_handed,
    contents,
    describe,
    gradient_name,
    group_names,
    opened,
    whole_digests,
)
from zhooks.checkpoint.state_tree import Packer, Unpacker
from zhooks.checkpoint.whole_folder import save_full

__all__ = [
    "DOCUMENT",
    "GAP",
    "FileTensor",
    "Loading",
    "Packer",
    "Piece",
    "Place",
    "Present",
    "Pretrained",
    "RunState",
    "SavedFolder",
    "Saving",
    "Snapshot",
    "SnapshotMemory",
    "StockFolders",
    "StockState",
    "Unpacker",
    "about_run",
    "buffer_name",
    "check_handed",
    "check_owned",
    "contents",
    "describe",
    "difference",
    "full_state",
    "gathered",
    "gradient_name",
    "group_names",
    "host_budget",
    "load",
    "load_full_state",
    "opened",
    "own_anew",
    "plain_states",
    "save",
    "save_full",
    "save_pretrained",
    "saved_extra",
    "tagged",
    "whole_digests",
    "write_file",
]
