"""Every way state leaves and enters: full values, folders of shards, state dicts of torch."""

from __future__ import annotations

from zhooks.checkpoint.full_safetensors import save_full
from zhooks.checkpoint.full_state_dict import full_state, gathered, load_full_state
from zhooks.checkpoint.owned_states import own_anew, plain_states
from zhooks.checkpoint.save_load import load, save
from zhooks.checkpoint.shard_contents import RunState, check_handed
from zhooks.checkpoint.torch_state_dict import StockState

__all__ = [
    "RunState",
    "StockState",
    "check_handed",
    "full_state",
    "gathered",
    "load",
    "load_full_state",
    "own_anew",
    "plain_states",
    "save",
    "save_full",
]
