"""Any torch optimizer over tiers: its step, flat by flat; updates in backward; compiled kernels; rounding."""

from __future__ import annotations

from zhooks.optim.assign_owners import assign
from zhooks.optim.choose_kernel import choices_of
from zhooks.optim.closures import Closures
from zhooks.optim.groups import holders, holds, params_of
from zhooks.optim.kernel import grad_of
from zhooks.optim.optimizers import Optimizers, about_state, optimizer_facts, partitions
from zhooks.optim.overlap import Overlap
from zhooks.optim.owned_states import OwnedStates, flags_of, nbytes_of, plain_parts, tensors_in, with_owners
from zhooks.optim.owners import Owners, Whole
from zhooks.optim.rounding import Rounding, check_rounding
from zhooks.optim.stand_in import Place, stand_in_of, step_stand_in
from zhooks.optim.states import sharded_states, state_keys, states_of
from zhooks.optim.step_hooks import Stepper
from zhooks.optim.step_pipeline import Step, StepPipeline, closure_of, watch_steps
from zhooks.optim.steps import Steps
from zhooks.optim.stored_states import plain_states_of
from zhooks.optim.tiered_update import Updater
from zhooks.optim.update_thread import open_worker
from zhooks.optim.vector_states import mapped, shard_vectors, vectors_in, whole_copies, whole_vectors
from zhooks.optim.whole_tiers import InMemory, OverTiers
from zhooks.optim.whole_update import WholeUpdater

__all__ = [
    "Closures",
    "InMemory",
    "Optimizers",
    "OverTiers",
    "Overlap",
    "OwnedStates",
    "Owners",
    "Place",
    "Rounding",
    "Step",
    "StepPipeline",
    "Stepper",
    "Steps",
    "Updater",
    "Whole",
    "WholeUpdater",
    "about_state",
    "assign",
    "check_rounding",
    "choices_of",
    "closure_of",
    "flags_of",
    "grad_of",
    "holders",
    "holds",
    "mapped",
    "nbytes_of",
    "open_worker",
    "optimizer_facts",
    "params_of",
    "partitions",
    "plain_parts",
    "plain_states_of",
    "shard_vectors",
    "sharded_states",
    "stand_in_of",
    "state_keys",
    "states_of",
    "step_stand_in",
    "tensors_in",
    "vectors_in",
    "watch_steps",
    "whole_copies",
    "whole_vectors",
    "with_owners",
]
