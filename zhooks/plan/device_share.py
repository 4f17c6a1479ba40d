"""``[optimizer] device_share``: which flats keep their masters and states on the device, where a tier has the others.

``layouts.py`` asks once units are laid out, and again when parameters were frozen or unfrozen.  Integers and names: it
allocates nothing, and changes where a flat's states lie, never what is in the flat.

Note: [Which flats]
    The first ones that fit, in the order of the units.  Under ``overlap`` backward comes to them last, when nothing is left
    for a transfer to hide behind, and the next forward begins with their parameters.  Layouts are the same whatever the
    share, so that checkpoints are read under any other.  In which order a step updates them is Note [Both sides at once] in
    ``optim/tiered_update.py``.

    Where parameters were frozen or unfrozen nothing else moves: a budget was held to what lay on the device before.  What was
    unfrozen takes what is left of the share.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from offload.policy import Policy
from offload.tier import Tier
from zhooks.layout import FlatPlan, UnitPlan

__all__ = ["keep_on_device"]


def keep_on_device(
    plans: Sequence[UnitPlan], policy: Policy, laid: Container[UnitPlan] = frozenset()
) -> tuple[UnitPlan, ...]:
    """The units, with at most ``device_share`` of what [optimizer] tier places kept on the device; see Note [Which flats].

    Args:
        laid: units that stay as they are: what they keep on the device counts, and they are returned as the same objects.
    """
    if not policy.optimizer.device_share:
        return tuple(plans)
    tier = Tier(policy.optimizer.tier)
    # What a rule placed on another tier is where the rule has it.
    divided = [
        (plan, flat)
        for plan in plans
        for flat in plan.flats
        if flat.kind.trainable and policy.tiers(*plan.group.names(flat.names[0])).optimizer is tier
    ]
    left = policy.optimizer.kept_on_device(sum(flat.layout.numel for _, flat in divided))
    left -= sum(flat.layout.numel for plan, flat in divided if plan in laid and flat.kind.tiers.optimizer is Tier.DEVICE)
    on_device: set[int] = set()
    for flat in (flat for plan, flat in divided if plan not in laid):
        if flat.layout.numel <= left:
            on_device.add(flat.number)
            left -= flat.layout.numel

    def placed(flat: FlatPlan) -> FlatPlan:
        if flat.number not in on_device:
            return flat
        return replace(flat, kind=replace(flat.kind, tiers=replace(flat.kind.tiers, optimizer=Tier.DEVICE)))

    return tuple(
        UnitPlan(plan.group, plan.number, tuple(map(placed, plan.flats)))
        if any(flat.number in on_device for flat in plan.flats)
        else plan
        for plan in plans
    )
