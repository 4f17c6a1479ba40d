"""``[optimizer] device_share``: which flats keep their masters and states on the device, where a tier has the others.

``layouts.py`` asks once units are laid out, and again when parameters were frozen or unfrozen.  Integers and names: it
allocates nothing, and changes where a flat's states lie, never what is in the flat.

Note: [Which flats]
    The first ones that fit, in the order of the units.  Under ``overlap`` backward comes to them last, when nothing is left
    for a transfer to hide behind, and the next forward begins with their parameters.  Layouts are the same whatever the
    share, so that checkpoints are read under any other.  In which order a step updates them is Note [Both sides at once] in
    ``optim/tiered_update.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload.policy import Policy
from offload.tier import Tier
from zhooks.layout import FlatPlan, UnitPlan

__all__ = ["keep_on_device"]


def keep_on_device(plans: Sequence[UnitPlan], policy: Policy) -> tuple[UnitPlan, ...]:
    """The units, with at most ``device_share`` of what [optimizer] tier places kept on the device; see Note [Which flats].

    Units where nothing changes are the same objects.
    """
    if not policy.optimizer.device_share:
        return tuple(plans)
    tier = Tier(policy.optimizer.tier)
    # What a rule placed on another tier is where the rule has it.
    divided = {
        flat.number: flat.layout.numel
        for plan in plans
        for flat in plan.flats
        if flat.kind.trainable and policy.tiers(*plan.group.names(flat.names[0])).optimizer is tier
    }
    room = round(policy.optimizer.device_share * sum(divided.values()))
    on_device: set[int] = set()
    for number, numel in divided.items():
        if numel <= room:
            on_device.add(number)
            room -= numel

    def placed(flat: FlatPlan) -> FlatPlan:
        if flat.number not in divided:
            return flat
        tiers = replace(flat.kind.tiers, optimizer=Tier.DEVICE if flat.number in on_device else tier)
        return flat if tiers == flat.kind.tiers else replace(flat, kind=replace(flat.kind, tiers=tiers))

    out = []
    for plan in plans:
        flats = tuple(map(placed, plan.flats))
        same = all(new is old for new, old in zip(flats, plan.flats, strict=True))
        out.append(plan if same else UnitPlan(plan.group, plan.number, flats))
    return tuple(out)
