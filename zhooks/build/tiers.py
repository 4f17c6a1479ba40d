"""The tiers of an attachment, open: the store of what is kept off the device.

``session/open.py`` opens them as ``plan/tiers.py`` admitted, and asks nothing else whether there are any: an attachment that
keeps everything on the device has tiers that do nothing.  It never touches a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import ClassVar

import torch

from offload.budget import Budget, preflight
from offload.device import Device, VirtualDevice, open_device
from offload.disk import BufferedIo, Disk, DiskFile, VirtualDisk
from offload.errors import CapabilityError
from offload.events import Bus
from offload.memory import HostPool
from offload.policy import Policy
from offload.store import Store
from offload.tier import Tier
from offload.user_warnings import warn_user
from zhooks.comm import Comm, ControlPlane
from zhooks.layout import UnitPlan
from zhooks.plan import Admission, Need, admit, admit_any

__all__ = ["Tiers", "open_tiers"]


class Tiers:
    """Of an attachment that keeps everything on the device: nothing to open, to fetch or to put back.

    Attributes:
        store: what is kept elsewhere.
        limits: bytes that each tier may hold, the least of any rank; None is no bound, and so is a tier left out.
        fixed: tables of the policy that cannot change any more.
    """

    store: Store | None = None
    limits: Mapping[Tier, int | None] = MappingProxyType({})
    fixed: ClassVar[tuple[str, ...]] = ("units", "comm")

    def change(self, policy: Policy, device: torch.device, units: Sequence[UnitPlan], comm: Comm, bus: Bus) -> Tiers:
        """The tiers under another policy, for units planned by it.  Collective.

        Raises:
            BudgetError: what is to be kept on a tier exceeds its budget.
            CapabilityError: the machine lacks what the policy asks for.
        """
        return open_tiers(policy, device, admit_any(policy, device, units, comm), comm, bus)

    def bound(self) -> None:
        """From now on their budgets hold."""

    def shut_beside(self, others: Tiers) -> None:
        """Give back what ``others``, which stay, do not have: nothing is kept there any more."""
        if self.store is not others.store:
            self.shut()

    def check_room(self, needed: Mapping[Tier, int]) -> None:
        """Whether new optimizer states of so many bytes fit on their tiers.

        Raises:
            BudgetError: they do not.
        """

    def placed(self, tier: Tier) -> int:
        """Bytes that are kept on a tier off the device."""
        return 0

    def unwind(self) -> None:
        """The end is near: nothing is written back any more."""

    def shut(self) -> None:
        """Give everything back: memory, threads, the scratch file."""


class StoredTiers(Tiers):
    """Of an attachment that keeps something off the device, or may."""

    store: Store
    fixed = (*Tiers.fixed, "disk", "host")

    def __init__(self, store: Store, admitted: Admission) -> None:
        self.store, self._admitted, self.limits = store, admitted, admitted.limits

    def change(self, policy: Policy, device: torch.device, units: Sequence[UnitPlan], comm: Comm, bus: Bus) -> Tiers:
        admitted = admit(policy, device, units, comm, self.store.device)
        if not self._admitted.on_disk:
            with ControlPlane(comm.stage, "apply").all_or_none():
                _warn_of_memory(policy, admitted, self.store.device)
        return StoredTiers(self.store, admitted)

    def bound(self) -> None:
        self.store.change_limits(self._admitted.limits)
        self.store.staging_limit = self._admitted.staging_nbytes

    def check_room(self, needed: Mapping[Tier, int]) -> None:
        for tier, nbytes in needed.items():
            if tier is not Tier.DEVICE:
                self.store.budget.check_room(tier, "the optimizer's states", nbytes)

    def placed(self, tier: Tier) -> int:
        return self.store.budget.used(tier)

    def unwind(self) -> None:
        self.store.unwind()

    def shut(self) -> None:
        self.store.shut()


def open_tiers(policy: Policy, device: torch.device, admitted: Admission | None, comm: Comm, bus: Bus) -> Tiers:
    """The tiers of this rank, empty.  Collective.

    Args:
        admitted: what they will hold; None where nothing is kept off the device.
    """
    return Tiers() if admitted is None else StoredTiers(open_store(policy, device, admitted, comm, bus), admitted)


def open_store(policy: Policy, device: torch.device, admitted: Admission, comm: Comm, bus: Bus) -> Store:
    """The store of this rank, empty.  Collective.

    Raises:
        BudgetError, CapabilityError: the machine has not what was admitted; nothing was allocated.
    """
    seam, axis, limits = open_device(device), comm.stage.axis, admitted.limits
    budget = Budget(limits, rank=axis.ranks[axis.rank])
    budget.account.bus = seam.bus = bus
    with ExitStack() as undo:
        with ControlPlane(comm.stage, "open tiers").all_or_none():
            _fits(policy, seam, admitted.need, comm)
            host = HostPool(
                seam,
                limit=limits[Tier.HOST],
                slab_nbytes=policy.host.slab,
                pin=policy.host.pin is not False,
            )
            disk = _disk(policy, seam, axis.ranks[axis.rank], bus, budget)
            store = Store(seam, host, disk, budget, staging_nbytes=admitted.staging_nbytes)
            undo.callback(store.shut)
            # Now, while nothing has changed, is the time to hear that there is no thread to be had, or no folder to write in.
            seam.start()
            if admitted.on_disk:
                assert store.disk.path
            _warn_of_memory(policy, admitted, seam)
        undo.pop_all()
    return store


def _warn_of_memory(policy: Policy, admitted: Admission, seam: Device) -> None:
    """Warn that the folder which nobody chose holds its files in memory, so that the disk tier saves none."""
    chosen, wanted = policy.disk, admitted.on_disk or policy.activation.tier == "disk"
    if wanted and chosen.path is None and seam.facts.is_memory(chosen.folder):
        warn_user(
            f"[disk] path is unset, and the system's folder for temporary files, {chosen.folder}, is on a tmpfs, which keeps "
            'files in memory: tier = "disk" takes as much memory as "host". Set [disk] path to a folder on a disk.'
        )


def _fits(policy: Policy, seam: Device, need: Need, comm: Comm) -> None:
    """Refuse what this machine cannot hold beside what its other ranks are to hold."""
    pinned = seam.pins() and policy.host.pin is not False and seam.memlock_applies()
    need_by_tier, folder = dict(need.off_device), policy.disk.folder
    preflight(need_by_tier, device=seam, folder=folder, pinned=pinned, ranks=comm.alike, machine=seam.facts)


def _disk(policy: Policy, seam: Device, rank: int, bus: Bus, budget: Budget) -> Callable[[], Disk]:
    chosen = policy.disk
    if isinstance(seam, VirtualDevice):
        return lambda: VirtualDisk(seam.machine, limit=budget.limit(Tier.DISK), bus=bus)

    def opened() -> Disk:
        io = BufferedIo() if chosen.direct is False else None
        limit = budget.limit(Tier.DISK)
        file = DiskFile(
            chosen.folder, label=f"r{rank}", limit=limit, threads=chosen.threads, block=chosen.block, io=io, bus=bus
        )
        if chosen.direct is True and not file.direct:
            file.close()
            raise CapabilityError(
                f"[disk] direct = true needs a file system that supports direct I/O, found none at {chosen.folder}. Choose "
                'another [disk] path, or direct = "auto".'
            )
        return file

    return opened
