"""What ``attach`` will build, as data: units, tiers, islands of dtype, what may stay gathered, what the arena reserves.

``attach.py`` looks once ranks are connected, and then builds the plan.  Whatever the model, the ranks or a budget do not allow
is refused here.  It never changes the model, and makes no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from zhooks.comm import Comm
from zhooks.layout import Table, UnitPlan, find_units
from zhooks.plan.arena import shards_reserve
from zhooks.plan.checks import check_ranks_equal, check_same_model
from zhooks.plan.device_budget import Headroom, device_headroom, ignored_here
from zhooks.plan.layouts import Layouts
from zhooks.plan.request import Request
from zhooks.plan.tiers import Admission, admit_any
from zhooks.run import Map, chart
from zhooks.unit import Reserve

__all__ = ["Plan", "look"]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What will be built.

    Attributes:
        units: in order; no tensor is in them but the model's own parameters, by their names.
        islands: where the model changes dtype.
        tiers: what is kept off the device; None where nothing is.
        headroom: what ``[budget] device`` leaves.
        reserve: what the arena reserves for shards.
    """

    request: Request
    table: Table
    units: tuple[UnitPlan, ...]
    islands: Map
    tiers: Admission | None
    headroom: Headroom
    reserve: Reserve


def look(request: Request, comm: Comm) -> Plan:
    """What building ``request`` comes to.  Collective.

    Raises:
        AttachError: ranks have other models or values, or a rule splits a module over dtypes.
        BudgetError, CapabilityError: a tier or the device cannot hold what the policy keeps there; on every rank.
    """
    model, policy, device = request.model, request.policy, request.device
    if not request.sync:
        check_ranks_equal(model, comm, request.ignored)
    groups = find_units(model, policy, request.ignored)
    check_same_model(groups, request.ignored, comm.stage)
    units = Layouts.of(model, policy, comm, device).units(groups)
    tiers = admit_any(policy, device, units, comm)
    headroom = device_headroom(policy, device, units, request.known, comm, ignored_here(request.ignored, device))
    islands = chart(model, units, policy)
    return Plan(
        request, Table.of(policy.table()), units, islands, tiers, headroom, shards_reserve(policy, device, units)
    )
