"""Looks at what ``attach`` was given and plans what to build: units, tiers, islands of dtype, what may stay gathered.

``attach.py`` looks once ranks are connected, and then builds the plan.  Whatever the model, the ranks or a budget do not allow
is refused here.  It never changes the model, and allocates nothing that stays.
"""

from __future__ import annotations

from offload.events import Bus
from zhooks.comm import Comm
from zhooks.layout import Table, find_units
from zhooks.run import chart
from zhooks.setup.arena import shards_reserve
from zhooks.setup.build import BuildContext, forget_laid_out, lay_out
from zhooks.setup.checks import check_ranks_equal, check_same_model
from zhooks.setup.device_budget import device_headroom
from zhooks.setup.plan import Plan, Request
from zhooks.setup.tiers import admit
from zhooks.unit import Pool

__all__ = ["look"]


def look(request: Request, comm: Comm) -> Plan:
    """What building ``request`` comes to.  Collective.

    Raises:
        AttachError: ranks have other models or values, or a rule splits a module over dtypes.
        BudgetError, CapabilityError: a tier or the device cannot hold what the policy keeps there; on every rank.
    """
    model, policy, device = request.model, request.policy, request.device
    if not request.sync:
        check_ranks_equal(model, comm)
    table, groups = Table.of(policy.table()), tuple(find_units(model, policy))
    check_same_model(groups, comm.stage)
    tiers = admit(policy, device, groups, table, comm) if policy.tiered else None
    bus = Bus()
    units = lay_out(model, groups, BuildContext(policy, table, comm, Pool(policy.comm.buffer, bus), bus, request.sync), device)
    try:
        headroom = device_headroom(policy, device, units, request.known, comm)
        return Plan(request, table, groups, chart(model, units, policy), tiers, headroom, shards_reserve(policy, device, units))
    finally:
        forget_laid_out(units)
