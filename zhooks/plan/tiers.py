"""What the tiers of an attachment will hold, by its policy, and whether they may.

``plan.py`` asks once the units are laid out, and ``apply`` again; ``build/tiers.py`` opens what was admitted.  It never touches
a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.budget import available
from offload.device import Device, open_device
from offload.errors import BudgetError, CapabilityError, PolicyError
from offload.kernels import available as available_kernels
from offload.policy import Policy
from offload.text import as_enough, as_size
from offload.tier import Tier
from zhooks.comm import Comm, ControlPlane
from zhooks.layout import UnitPlan, flats_of
from zhooks.optim import check_rounding
from zhooks.plan.layouts import STAGED_NBYTES

__all__ = ["PASSING", "SMALLER_UNITS", "Admission", "Need", "admit", "admit_any", "check_change", "in_all", "limit_of", "needs"]

#: Host memory for what nothing but transfers need there, and what makes it less, as errors say it.
PASSING = "what passes to and from the disk"
SMALLER_UNITS = "name smaller units in [units]"

#: Arrays of a unit that an update works on (masters, gradient, two moments), for this unit and the next; write-backs of the
#: one before are waited for.
_STAGED = 8


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes a rank will hold off the device, as far as they are known before the optimizer has made its states.

    Attributes:
        largest: of a flat's share of masters, the most.
        passing: the least of host memory that the disk's values pass through: a flat's masters with their copy in the compute
            dtype, or its gradient.
    """

    off_device: Mapping[Tier, int]
    largest: int
    passing: int


def needs(units: Sequence[UnitPlan]) -> Need:
    """What parameters, masters and gradients need."""
    flats = flats_of(units)
    footprints = [flat.footprint() for flat in flats]
    cells = [cell for footprint in footprints for cell in footprint]
    off_device = {tier: sum(cell.on(tier) for cell in cells) for tier in (Tier.HOST, Tier.DISK)}
    # A rank's range of a flat is of one parameter, or of at most so many bytes.
    of_one = [-(-max(flat.layout.numels) * flat.kind.master.itemsize // flat.ranks) for flat in flats]
    largest = max((STAGED_NBYTES, *of_one)) if flats else 0
    on_disk = [[cell.on(Tier.DISK) for cell in footprint] for footprint in footprints]
    passing = max((max(parameter + masters, gradient) for parameter, gradient, masters in on_disk), default=0)
    return Need(off_device, largest, passing)


@dataclass(frozen=True, slots=True)
class Admission:
    """What the tiers of a rank will hold, and at most may.

    Attributes:
        limits: bytes a tier, the least of any rank; None is no bound.
        on_disk: something will be kept there from the first step on.
    """

    limits: Mapping[Tier, int | None]
    need: Need
    on_disk: bool

    @property
    def staging_nbytes(self) -> int:
        """What may be on its way between tiers at once."""
        return _STAGED * self.need.largest


def admit_any(policy: Policy, device: torch.device, units: Sequence[UnitPlan], comm: Comm) -> Admission | None:
    """As ``admit``; None where the policy keeps nothing off the device.  Collective."""
    return admit(policy, device, units, comm) if policy.tiered else None


def admit(
    policy: Policy, device: torch.device, units: Sequence[UnitPlan], comm: Comm, seam: Device | None = None
) -> Admission:
    """Whether the policy's tiers can take these parameters.  Collective.

    Args:
        seam: to the device, where it is open already.
    Raises:
        BudgetError: what is to be kept on a tier exceeds its budget; nothing was allocated.
        CapabilityError: the machine lacks what the policy asks for.
    """
    check_compute(policy, device, units)
    opened = seam or open_device(device)
    try:
        limits = {tier: limit_of(policy, tier, opened, comm) for tier in Tier}
    finally:
        if seam is None:
            opened.close()
    need = needs(units)
    _check_limits(limits, need)
    later = any(flat.kind.tiers.optimizer is Tier.DISK for flat in flats_of(units))
    return Admission(limits, need, bool(need.off_device[Tier.DISK]) or later)


def check_compute(policy: Policy, device: torch.device, units: Sequence[UnitPlan]) -> None:
    """Where and by whom updates are to be computed must be possible.

    Raises:
        CapabilityError: the kernel cannot run where the policy wants it.
    """
    check_rounding(policy, [unit.group for unit in units])
    chosen = policy.optimizer
    if chosen.kernel == "numba":
        lacks = available_kernels()
        if device.type != "cpu" and chosen.compute == "device":
            lacks = f'the numba kernels run on the host, found compute = "device" on {device}; set [optimizer] compute = "host"'
        if lacks is not None:
            raise CapabilityError(f'[optimizer] kernel = "numba": {lacks}.')
    if chosen.compute == "device":
        return
    for flat in [flat for flat in flats_of(units) if flat.kind.trainable]:
        kind, tiers, name = flat.kind, flat.kind.tiers, flat.names[0]
        if chosen.device_share and tiers.optimizer is Tier.DEVICE:
            # It is updated there.
            continue
        if Tier.DEVICE in (tiers.gradient, tiers.optimizer) or (tiers.parameter is Tier.DEVICE and not kind.apart):
            raise CapabilityError(
                f'[optimizer] compute = "host" needs masters, gradient and states of {name} off the device, found '
                f"parameter {tiers.parameter.value}, gradient {tiers.gradient.value}, optimizer {tiers.optimizer.value}. Place "
                'them on "host" or "disk" (the parameter may stay where [precision] param is 16 bit), or compute = "device".'
            )


def check_change(old: Policy, new: Policy, fixed: Sequence[str]) -> None:
    """What ``Attachment.apply`` cannot change: these tables of a policy.

    Raises:
        PolicyError: the new policy changes one.
    """
    changed = [name for name in fixed if getattr(old, name) != getattr(new, name)]
    if changed:
        raise PolicyError(
            f"apply expected [{'], ['.join(changed)}] as at attach, found a change. Write it into the new policy as it was, "
            "or detach() and attach again."
        )


def limit_of(policy: Policy, tier: Tier, seam: Device, comm: Comm) -> int | None:
    """The least that any rank's budget allows; None is no bound.  Collective."""
    folder = policy.disk.folder
    mine = policy.budget.resolve(tier, lambda: available(tier, seam, folder))
    return ControlPlane(comm.stage, "compare budgets").least(mine)


def _check_limits(limits: Mapping[Tier, int | None], need: Need) -> None:
    for tier, nbytes in need.off_device.items():
        limit = limits[tier]
        needed = {"the parameters, masters and gradients to be stored there": nbytes}
        if tier is Tier.HOST:
            needed[PASSING] = need.passing
        total = sum(needed.values())
        if limit is not None and total > limit:
            raise BudgetError(
                f"[budget] {tier.value} is too small. Expected memory for {in_all(needed)}, found {as_size(limit)}, "
                f"{as_size(total - limit)} short. Raise it to at least {as_enough(total)} (states of the optimizer come on top "
                "if they are stored there too), or change the tier of [parameter] or [gradient] (of [optimizer] where "
                f"[precision] param is 16 bit: its masters){f', or {SMALLER_UNITS}' if total > nbytes else ''}."
            )


def in_all(needed: Mapping[str, int], at_least: str = "") -> str:
    """What a rank needs memory for, the bytes of each, and their sum."""
    parts = [f"{what}, {as_size(nbytes)}" for what, nbytes in needed.items() if nbytes]
    total = f"{at_least}{as_size(sum(needed.values()))}"
    if len(parts) < 2:
        return f"{next(what for what, nbytes in needed.items() if nbytes)}, {total} per rank"
    return f"{', for '.join(parts[:-1])}, and for {parts[-1]}: {total} in all per rank"
