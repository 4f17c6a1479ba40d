"""Any torch optimizer over tiers: its step, flat by flat; updates in backward; compiled kernels; rounding."""

from __future__ import annotations

from zhooks.optim.assign_owners import assign, cost_of
from zhooks.optim.choose_kernel import choices_of
from zhooks.optim.closures import Closures
from zhooks.optim.counters import options_kept
from zhooks.optim.groups import holders, holds, params_of
from zhooks.optim.kernel import Arguments, grad_of, narrowed, step_of
from zhooks.optim.optimizers import Optimizers, about_state, optimizer_facts, partitions
from zhooks.optim.overlap import Overlap
from zhooks.optim.owned_states import (
    OwnedStates,
    flags_of,
    nbytes_of,
    plain_parts,
    plain_states_of,
    replaced,
    tensors_in,
    with_owners,
)
from zhooks.optim.owners import Owners, Whole
from zhooks.optim.references import kept_elsewhere, memory_beside
from zhooks.optim.rounding import Rounding, check_rounding
from zhooks.optim.stand_in import Place, stand_in_of, step_stand_in
from zhooks.optim.stand_ins import OURS
from zhooks.optim.states import sharded_states, state_keys, states_of
from zhooks.optim.step_hooks import Stepper
from zhooks.optim.step_pipeline import Step, StepPipeline, closure_of, watch_steps
from zhooks.optim.steps import Steps
from zhooks.optim.tiered_update import Fetched, Updater
from zhooks.optim.update_thread import open_worker
from zhooks.optim.vector_states import mapped, shard_vectors, vectors_in, whole_copies, whole_vectors

__all__ = [
    "OURS",
    "Arguments",
    "Closures",
    "Fetched",
    "Optimizers",
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
    "about_state",
    "assign",
    "check_rounding",
    "choices_of",
    "closure_of",
    "cost_of",
    "flags_of",
    "grad_of",
    "holders",
    "holds",
    "kept_elsewhere",
    "mapped",
    "memory_beside",
    "narrowed",
    "nbytes_of",
    "open_worker",
    "optimizer_facts",
    "options_kept",
    "params_of",
    "partitions",
    "plain_parts",
    "plain_states_of",
    "replaced",
    "shard_vectors",
    "sharded_states",
    "stand_in_of",
    "state_keys",
    "states_of",
    "step_of",
    "step_stand_in",
    "tensors_in",
    "vectors_in",
    "watch_steps",
    "whole_copies",
    "whole_vectors",
    "with_owners",
]
