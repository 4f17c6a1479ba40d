"""What was given, whether it can be attached, and what it comes to: layouts, bytes, budgets, as data."""

from __future__ import annotations

from zhooks.plan.arena import rest_reserve, shards_reserve
from zhooks.plan.checks import check_holds, check_ignored, check_module, check_resilience, check_scaled
from zhooks.plan.device_budget import Headroom, device_floor, device_headroom, headroom_within, ignored_here
from zhooks.plan.globs import unmatched, warn_of_unmatched
from zhooks.plan.initialisers import initialiser_of, is_meta
from zhooks.plan.layouts import STAGED_NBYTES, Layouts
from zhooks.plan.plan import Plan, look
from zhooks.plan.request import Request, read
from zhooks.plan.state_budgets import check_states, states_bounds
from zhooks.plan.state_sizes import state_nbytes
from zhooks.plan.tiers import Admission, Need, admit, admit_any, check_change

__all__ = [
    "STAGED_NBYTES",
    "Admission",
    "Headroom",
    "Layouts",
    "Need",
    "Plan",
    "Request",
    "admit",
    "admit_any",
    "check_change",
    "check_holds",
    "check_ignored",
    "check_module",
    "check_resilience",
    "check_scaled",
    "check_states",
    "device_floor",
    "device_headroom",
    "headroom_within",
    "ignored_here",
    "initialiser_of",
    "is_meta",
    "look",
    "read",
    "rest_reserve",
    "shards_reserve",
    "state_nbytes",
    "states_bounds",
    "unmatched",
    "warn_of_unmatched",
]
