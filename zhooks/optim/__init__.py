"""Any torch optimizer over tiers: its step, flat by flat; updates in backward; compiled kernels; rounding."""

from __future__ import annotations

from zhooks.optim.groups import Arguments, grad_of, holders, holds, narrowed, options_kept, params_of, step_of
from zhooks.optim.kernel import sharded_states, state_keys, states_of
from zhooks.optim.optimizers import Optimizers, about_state, of_another_layout, optimizer_facts, partitions
from zhooks.optim.overlap import Overlap, open_worker
from zhooks.optim.owners import Owners, Whole, assign, cost_of
from zhooks.optim.probe import StateKind, marked, stand_in_of, step_stand_in
from zhooks.optim.references import kept_elsewhere, memory_beside
from zhooks.optim.rounding import Rounding, check_rounding
from zhooks.optim.states import (
    OwnedStates,
    StoredRuns,
    flags_of,
    mapped,
    nbytes_of,
    plain_parts,
    plain_states_of,
    replaced,
    shard_vectors,
    tensors_in,
    vectors_in,
    whole_copies,
    whole_vectors,
    with_owners,
)
from zhooks.optim.step_pipeline import Closures, Step, Stepper, StepPipeline, Steps, closure_of, watch_steps
from zhooks.optim.tiered_update import Fetched, Updater, choices_of

__all__ = [
    "Arguments", "Closures", "Fetched", "Optimizers", "Overlap", "OwnedStates", "Owners", "Rounding", "StateKind",
    "Step", "StepPipeline", "Stepper", "Steps", "StoredRuns", "Updater", "Whole", "about_state", "assign", "check_rounding",
    "choices_of", "closure_of", "cost_of", "flags_of", "grad_of", "holders", "holds", "kept_elsewhere", "mapped", "marked",
    "memory_beside", "narrowed", "nbytes_of", "of_another_layout", "open_worker", "optimizer_facts", "options_kept",
    "params_of", "partitions", "plain_parts", "plain_states_of", "replaced", "shard_vectors", "sharded_states", "stand_in_of",
    "state_keys", "states_of", "step_of", "step_stand_in", "tensors_in", "vectors_in", "watch_steps", "whole_copies",
    "whole_vectors", "with_owners",
]  # fmt: skip
