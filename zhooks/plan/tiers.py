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
from zhooks.comm import Comm, least
from zhooks.layout import UnitPlan
from zhooks.optim import check_rounding
from zhooks.plan.layouts import STAGED_NBYTES

__all__ = ["Admission", "Need", "admit", "admit_any", "check_change", "limit_of", "needs"]

#: Arrays of a unit that an update works on (masters, gradient, two moments), for this unit and the next; write-backs of the
#: one before are waited for.
_STAGED = 8


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes a rank will hold off the device, as far as they are known before the optimizer has made its states."""

    off_device: Mapping[Tier, int]
    largest: int


def needs(units: Sequence[UnitPlan]) -> Need:
    """Parameters, masters and gradients by tier, and the largest flat's share of masters, in bytes of a rank."""
    flats = [flat for unit in units for flat in unit.flats]
    cells = [cell for flat in flats for cell in flat.footprint()]
    off_device = {tier: sum(cell.on(tier) for cell in cells) for tier in (Tier.HOST, Tier.DISK)}
    # A flat is of one parameter, or of at most so many bytes.
    masters = [(max(max(flat.layout.numels) * flat.kind.master.itemsize, STAGED_NBYTES), flat.ranks) for flat in flats]
    return Need(off_device, max((-(-nbytes // ranks) for nbytes, ranks in masters), default=0))


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
    later = any(flat.kind.tiers.optimizer is Tier.DISK for unit in units for flat in unit.flats)
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
    for flat in [flat for unit in units for flat in unit.flats if flat.kind.trainable]:
        kind, tiers, name = flat.kind, flat.kind.tiers, flat.names[0]
        if chosen.device_share and tiers.optimizer is Tier.DEVICE:
            # It is updated there.
            continue
        if Tier.DEVICE in (tiers.gradient, tiers.optimizer) or (tiers.parameter is Tier.DEVICE and not kind.apart):
            raise CapabilityError(
                f'[optimizer] compute = "host": expected masters, gradient and states of {name} off the device, found '
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
            f"apply: expected [{'], ['.join(changed)}] as at attach, found a change. Write it into the new policy as it was, "
            "or detach() and attach again."
        )


def limit_of(policy: Policy, tier: Tier, seam: Device, comm: Comm) -> int | None:
    """The least that any rank's budget allows; None is no bound.  Collective."""
    folder = policy.disk.folder
    return least(comm.stage, policy.budget.resolve(tier, lambda: available(tier, seam, folder)))


def _check_limits(limits: Mapping[Tier, int | None], need: Need) -> None:
    for tier, nbytes in need.off_device.items():
        limit = limits[tier]
        if limit is not None and nbytes > limit:
            raise BudgetError(
                f"[budget] {tier.value}: expected memory for the parameters, masters and gradients to be stored there, "
                f"{as_size(nbytes)} per rank, found {as_size(limit)}, {as_size(nbytes - limit)} short. Raise it to at least "
                f"{as_enough(nbytes)} (states of the optimizer come on top if they are stored there too), or change the tier "
                "of [parameter] or [gradient] (of [optimizer] where [precision] param is 16 bit: its masters)."
            )
