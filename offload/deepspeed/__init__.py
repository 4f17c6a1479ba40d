"""Checkpoints of DeepSpeed, read without it: parameters, optimizer states and options by name, values by ranges."""

from __future__ import annotations

from offload.deepspeed.folder import find, is_deepspeed
from offload.deepspeed.saved import VALUE, DeepSpeedModel, SavedRun, SavedTensor, Values
from offload.deepspeed.zero import read

__all__ = ["VALUE", "DeepSpeedModel", "SavedRun", "SavedTensor", "Values", "find", "is_deepspeed", "read"]
