"""Any torch optimizer over tiers: its step, flat by flat; updates in backward; compiled kernels; rounding."""

from __future__ import annotations

from zhooks.optim.choose_kernel import kernels_of
from zhooks.optim.optimizers import Optimizers, about_state, holders, optimizer_facts, partitions
from zhooks.optim.overlap import Overlap, Worker
from zhooks.optim.rounding import Rounding, check_rounding
from zhooks.optim.states import sharded_states, state_keys, states_of
from zhooks.optim.step_hooks import Stepper, watch_steps
from zhooks.optim.tiered_update import Updater

__all__ = [
    "Optimizers",
    "Overlap",
    "Rounding",
    "Stepper",
    "Updater",
    "Worker",
    "about_state",
    "check_rounding",
    "holders",
    "kernels_of",
    "optimizer_facts",
    "partitions",
    "sharded_states",
    "state_keys",
    "states_of",
    "watch_steps",
]
