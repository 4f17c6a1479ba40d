"""What happens once, at attach: look at the model and refuse, lay out, shard, open tiers, and the way back."""

from __future__ import annotations

from zhooks.setup.arena import open_arena, reserve_rest, shards_reserve
from zhooks.setup.build import BuildContext, build_units, forget_laid_out, lay_out, plain_unit, relayout
from zhooks.setup.checks import check_holds, check_scaled, read
from zhooks.setup.device_budget import DeviceBudget
from zhooks.setup.looking import look
from zhooks.setup.plan import Plan
from zhooks.setup.tiers import change_store, check_change, groups_of, open_stepper, open_store

__all__ = [
    "BuildContext",
    "DeviceBudget",
    "Plan",
    "build_units",
    "change_store",
    "check_change",
    "check_holds",
    "check_scaled",
    "forget_laid_out",
    "groups_of",
    "lay_out",
    "look",
    "open_arena",
    "open_stepper",
    "open_store",
    "plain_unit",
    "read",
    "relayout",
    "reserve_rest",
    "shards_reserve",
]
