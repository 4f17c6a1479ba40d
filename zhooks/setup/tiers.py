"""The tiers of one attachment, put together from its policy: what will rest where, whether it fits, and the store.

``looking.py`` asks whether they can be had once the units are known; ``attach.py`` opens them.  It never touches a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from offload.budget import Budget, available, preflight, shown
from offload.device import Device, open_device
from offload.disk import BufferedIo, DiskFile
from offload.errors import BudgetError, CapabilityError, PolicyError
from offload.events import Bus
from offload.kernels import available as available_kernels
from offload.memory import HostPool, slab_within
from offload.policy import Policy
from offload.store import Store
from offload.tier import Tier
from zhooks.comm import Comm, all_or_none, least
from zhooks.layout import PIECE_NBYTES, Group, Table, kind_of
from zhooks.optim import Overlap, Rounding, Stepper, Updater, Worker, check_rounding, kernels_of
from zhooks.run import Runtime
from zhooks.tensor import part_numel
from zhooks.unit import Unit

__all__ = ["Admission", "Need", "admit", "limit_of", "needs", "open_stepper", "open_store"]

#: Arrays of a unit that an update works on (masters, gradient, two moments), for this unit and the next; write-backs of the
#: one before are waited for.
_STAGED = 8


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes a rank will hold off the device, as far as they are known before the optimizer has made its states."""

    off_device: Mapping[Tier, int]
    largest: int


def needs(groups: Sequence[Group], policy: Policy, table: Table, ranks: int, device: torch.device) -> Need:
    """Parameters, masters and gradients by tier, and the largest flat's share of masters, in bytes of this rank."""
    off_device = {Tier.HOST: 0, Tier.DISK: 0}
    largest = 0
    ranks = ranks if table.shards_optimizer else 1
    for name, param in [named for group in groups for named in group.params.items()]:
        kind, numel = kind_of(name, param, policy, device), part_numel(param)
        for cell in kind.footprint(numel, -(-numel // ranks), resident=table.keeps_gathered(kind.tiers)):
            for tier in off_device:
                off_device[tier] += cell.on(tier)
        largest = max(largest, -(-max(numel * param.element_size(), PIECE_NBYTES) // ranks))
    return Need(off_device, largest)


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


def admit(
    policy: Policy, device: torch.device, groups: Sequence[Group], table: Table, comm: Comm, seam: Device | None = None
) -> Admission:
    """Whether the policy's tiers can take these parameters.  Collective.

    Args:
        seam: to the device, where it is open already.
    Raises:
        BudgetError: what is to be kept on a tier exceeds its budget; nothing was allocated.
        CapabilityError: the machine lacks what the policy asks for.
    """
    check_compute(policy, device, groups)
    opened = seam or open_device(device)
    try:
        limits = {tier: limit_of(policy, tier, opened, comm) for tier in Tier}
    finally:
        if seam is None:
            opened.close()
    need = needs(groups, policy, table, comm.shard.axis.world, device)
    _check_limits(limits, need)
    later = any(policy.tiers(name).optimizer is Tier.DISK for group in groups for name in group.params)
    return Admission(limits, need, bool(need.off_device[Tier.DISK]) or later)


def open_store(policy: Policy, device: torch.device, admitted: Admission, comm: Comm, bus: Bus) -> Store:
    """The store of this rank, empty.  Collective.

    Raises:
        BudgetError, CapabilityError: the machine has not what was admitted; nothing was allocated.
    """
    seam, axis, limits = open_device(device), comm.stage.axis, admitted.limits
    budget = Budget(limits, rank=axis.ranks[axis.rank])
    budget.account.bus = seam.bus = bus
    with ExitStack() as undo:
        with all_or_none(comm.stage, "open tiers"):
            _fits(policy, seam, admitted.need, comm)
            host = HostPool(
                seam,
                limit=limits[Tier.HOST],
                slab_nbytes=slab_within(policy.host.slab, limits[Tier.HOST]),
                pin=policy.host.pin is not False,
            )
            disk = _disk(policy, axis.ranks[axis.rank], bus, budget)
            store = Store(seam, host, disk, budget, staging_nbytes=admitted.staging_nbytes)
            undo.callback(store.shut)
            # Now, while nothing has changed, is the time to hear that there is no thread to be had, or no folder to write in.
            seam.start()
            if admitted.on_disk:
                assert store.disk.path
        undo.pop_all()
    return store


def _fits(policy: Policy, seam: Device, need: Need, comm: Comm) -> None:
    """Refuse what this machine cannot hold; ranks that share memory rings share the machine."""
    pinned = seam.pins() and policy.host.pin is not False and seam.memlock_applies()
    ranks = comm.stage.axis.world if comm.stage.name == "shm" else 1
    preflight(dict(need.off_device), device=seam, folder=policy.disk.folder, pinned=pinned, ranks=ranks)


def _disk(policy: Policy, rank: int, bus: Bus, budget: Budget) -> Callable[[], DiskFile]:
    chosen = policy.disk

    def opened() -> DiskFile:
        io = BufferedIo() if chosen.direct is False else None
        limit = budget.limit(Tier.DISK)
        file = DiskFile(
            chosen.folder, label=f"r{rank}", limit=limit, threads=chosen.threads, block=chosen.block, io=io, bus=bus
        )
        if chosen.direct is True and not file.direct:
            file.close()
            raise CapabilityError(
                f"[disk] direct = true: expected a file system that does direct I/O, found none at {chosen.folder}. Choose "
                'another [disk] path, or direct = "auto".'
            )
        return file

    return opened


def check_compute(policy: Policy, device: torch.device, groups: Sequence[Group]) -> None:
    """Where and by whom updates are to be computed must be possible.

    Raises:
        CapabilityError: the kernel cannot run where the policy wants it.
    """
    check_rounding(policy, groups)
    chosen = policy.optimizer
    if chosen.kernel == "numba":
        lacks = available_kernels()
        if device.type != "cpu" and chosen.compute == "device":
            lacks = f'the numba kernels run on the host, found compute = "device" on {device}; set [optimizer] compute = "host"'
        if lacks is not None:
            raise CapabilityError(f'[optimizer] kernel = "numba": {lacks}.')
    if chosen.compute == "device":
        return
    for name, param in [named for group in groups for named in group.params.items() if named[1].requires_grad]:
        kind = kind_of(name, param, policy, device)
        tiers = kind.tiers
        if Tier.DEVICE in (tiers.gradient, tiers.optimizer) or (tiers.parameter is Tier.DEVICE and not kind.apart):
            raise CapabilityError(
                f'[optimizer] compute = "host": expected masters, gradient and states of {name} off the device, found '
                f"parameter {tiers.parameter.value}, gradient {tiers.gradient.value}, optimizer {tiers.optimizer.value}. Place "
                'them on "host" or "disk" (the parameter may stay where [precision] param is 16 bit), or compute = "device".'
            )


def check_change(old: Policy, new: Policy, store: Store | None) -> None:
    """What ``Attachment.apply`` cannot change.

    Raises:
        PolicyError: the new policy changes it.
    """
    fixed = ["units", "comm"] + (["disk", "host"] if store is not None else [])
    changed = [name for name in fixed if getattr(old, name) != getattr(new, name)]
    if changed:
        raise PolicyError(
            f"apply: expected [{'], ['.join(changed)}] as the model was attached with, found a change. Write it into the new "
            "policy as it was, or detach() and attach again."
        )


def groups_of(units: Sequence[Unit]) -> list[Group]:
    """The groups that the units were built of."""
    return [
        Group(unit.name, unit.entries, {s.name: p for f in unit.flats for s, p in zip(f.specs, f.params, strict=True)})
        for unit in units
    ]


def change_store(
    store: Store | None, policy: Policy, device: torch.device, units: Sequence[Unit], table: Table, comm: Comm, bus: Bus
) -> Store:
    """The store under another policy: a new one, or the old one with other limits.

    Raises:
        BudgetError: what is to rest on a tier exceeds its budget.
        CapabilityError: the machine lacks what the policy asks for.
    """
    admitted = admit(policy, device, groups_of(units), table, comm, None if store is None else store.device)
    if store is None:
        return open_store(policy, device, admitted, comm, bus)
    store.change_limits(admitted.limits)
    store.staging_limit = admitted.staging_nbytes
    return store


def open_stepper(
    policy: Policy, store: Store, bus: Bus, units: Sequence[Unit], runtime: Runtime, rounding: Rounding
) -> Stepper:
    """What steps optimizers over the tiers, listening from now on; ``units`` may change under it."""
    place = Tier.HOST if policy.optimizer.compute == "host" else Tier.DEVICE
    updater = Updater(
        store,
        bus,
        lambda: [flat for unit in units for flat in unit.flats],
        kernel_of=kernels_of(policy, rounding),
        place=place,
        ahead=min(policy.schedule.prefetch, 1),
    )
    reducer = runtime.reducer
    overlap: Overlap | None = None
    if policy.optimizer.overlap:
        axis = reducer.comm.stage.axis
        # On a device that computes by itself an update takes none of backward's time.
        worker = Worker() if place is Tier.HOST else None
        overlap = Overlap(updater, worker, rank=axis.ranks[axis.rank])
    reducer.update_early(overlap)
    stepper = Stepper(updater, runtime.due, overlap)
    stepper.open()
    return stepper


def limit_of(policy: Policy, tier: Tier, seam: Device, comm: Comm) -> int | None:
    """The least that any rank's budget allows; None is no bound.  Collective."""
    folder = policy.disk.folder
    return least(comm.stage, policy.budget.resolve(tier, lambda: available(tier, seam, folder)))


def _check_limits(limits: Mapping[Tier, int | None], need: Need) -> None:
    for tier, nbytes in need.off_device.items():
        limit = limits[tier]
        if limit is not None and nbytes > limit:
            raise BudgetError(
                f"[budget] {tier.value}: expected room for the parameters, masters and gradients that are to rest there, "
                f"{shown(nbytes)} a rank, found {shown(limit)}, {shown(nbytes - limit)} short. Raise it, or change the tier of "
                "[parameter] or [gradient] (of [optimizer] where [precision] param is 16 bit: its masters)."
            )
