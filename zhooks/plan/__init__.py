"""What was given, whether it can be attached, and what it comes to: layouts, bytes, budgets, as data."""

from __future__ import annotations

from zhooks.plan.budget import (
    Admission,
    Headroom,
    Need,
    admit,
    check_states,
    device_floor,
    device_headroom,
    headroom_within,
    ignored_here,
    rest_reserve,
    shards_reserve,
    state_nbytes,
)
from zhooks.plan.checks import (
    check_change,
    check_holds,
    check_ignored,
    check_module,
    check_resilience,
    check_scaled,
    initialiser_of,
    is_meta,
)
from zhooks.plan.globs import unmatched, warn_of_unmatched
from zhooks.plan.layouts import STAGED_NBYTES, Layouts
from zhooks.plan.plan import Plan, Request, make, read

__all__ = [
    "STAGED_NBYTES",
    "Admission",
    "Headroom",
    "Layouts",
    "Need",
    "Plan",
    "Request",
    "admit",
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
    "make",
    "read",
    "rest_reserve",
    "shards_reserve",
    "state_nbytes",
    "unmatched",
    "warn_of_unmatched",
]
