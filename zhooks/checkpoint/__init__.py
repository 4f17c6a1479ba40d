"""Every way state leaves and enters: full values, folders of shards, state dicts of torch."""

from __future__ import annotations

from zhooks.checkpoint.contents import RunState, check_handed
from zhooks.checkpoint.export import save_full
from zhooks.checkpoint.full import full_state, gathered, load_full_state
from zhooks.checkpoint.save_load import load, save
from zhooks.checkpoint.torch_state import StockState

__all__ = [
    "RunState",
    "StockState",
    "check_handed",
    "full_state",
    "gathered",
    "load",
    "load_full_state",
    "save",
    "save_full",
]
