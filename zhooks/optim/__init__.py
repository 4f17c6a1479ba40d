"""Any torch optimizer over tiers: its step, flat by flat; updates in backward; compiled kernels; rounding."""

from __future__ import annotations

from zhooks.optim.choose_kernel import kernels_of
from zhooks.optim.optimizers import Optimizers, about_state, holders, optimizer_facts, partitions
from zhooks.optim.overlap import Overlap, Worker
from zhooks.optim.owned_states import OwnedStates, flags_of, nbytes_of, tensors_in, with_owners
from zhooks.optim.owners import Owners, Whole
from zhooks.optim.rounding import Rounding, check_rounding
from zhooks.optim.states import sharded_states, state_keys, states_of
from zhooks.optim.step_hooks import Stepper, watch_steps
from zhooks.optim.tiered_update import Updater
from zhooks.optim.whole_update import WholeUpdater

__all__ = [
    "Optimizers",
    "Overlap",
    "OwnedStates",
    "Owners",
    "Rounding",
    "Stepper",
    "Updater",
    "Whole",
    "WholeUpdater",
    "Worker",
    "about_state",
    "check_rounding",
    "flags_of",
    "holders",
    "kernels_of",
    "nbytes_of",
    "optimizer_facts",
    "partitions",
    "sharded_states",
    "state_keys",
    "states_of",
    "tensors_in",
    "watch_steps",
    "with_owners",
]
