"""The tiers of an attachment, open: the store of what is kept off the device, if anything is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType

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
from zhooks.plan import Admission, admit

__all__ = ["Tiers", "open_tiers"]


class Tiers:
    """What is kept off the device, as it was admitted; of an attachment that keeps everything there, nothing.

    Attributes:
        store: what is kept elsewhere.
        limits: bytes that each tier may hold, the least of any rank; None is no bound, and so is a tier left out.
        fixed: tables of the policy that cannot change any more.
    """

    def __init__(self, store: Store | None = None, admitted: Admission | None = None) -> None:
        self.store, self._admitted = store, admitted
        self.limits: Mapping[Tier, int | None] = MappingProxyType({}) if admitted is None else admitted.limits
        self.fixed = ("units", "comm") if store is None else ("units", "comm", "disk", "host")

    def change(self, policy: Policy, device: torch.device, units: Sequence[UnitPlan], comm: Comm, bus: Bus) -> Tiers:
        """The tiers under another policy, for units planned by it.  Collective.

        Raises:
            BudgetError: what is to be kept on a tier exceeds its budget.
            CapabilityError: the machine lacks what the policy asks for.
        """
        admitted = admit(policy, device, units, comm, None if self.store is None else self.store.device)
        if self.store is None or admitted is None:
            return open_tiers(policy, device, admitted, comm, bus)
        if self._admitted is not None and not self._admitted.on_disk:
            with ControlPlane(comm.stage, "apply").all_or_none():
                _warn_of_memory(policy, admitted, self.store.device)
        return Tiers(self.store, admitted)

    def bound(self) -> None:
        """From now on their budgets hold."""
        if self.store is not None and self._admitted is not None:
            self.store.change_limits(self._admitted.limits)
            self.store.staging_limit = self._admitted.staging_nbytes

    def shut_beside(self, others: Tiers) -> None:
        """Give back what ``others``, which stay, do not have: nothing is kept there any more."""
        if self.store is not others.store:
            self.shut()

    def check_room(self, needed: Mapping[Tier, int]) -> None:
        """Whether new optimizer states of so many bytes fit on their tiers.

        Raises:
            BudgetError: they do not.
        """
        for tier, nbytes in needed.items():
            if self.store is not None and tier is not Tier.DEVICE:
                self.store.budget.check_room(tier, "the optimizer's states", nbytes)

    def placed(self, tier: Tier) -> int:
        """Bytes that are kept on a tier off the device."""
        return 0 if self.store is None else self.store.budget.used(tier)

    def unwind(self) -> None:
        """The end is near: nothing is written back any more."""
        if self.store is not None:
            self.store.unwind()

    def shut(self) -> None:
        """Give everything back: memory, threads, the scratch file."""
        if self.store is not None:
            self.store.shut()


def open_tiers(policy: Policy, device: torch.device, admitted: Admission | None, comm: Comm, bus: Bus) -> Tiers:
    """The tiers of this rank, empty.  Collective.

    Args:
        admitted: what they will hold; None where nothing is kept off the device.
    Raises:
        BudgetError, CapabilityError: the machine has not what was admitted; nothing was allocated.
    """
    if admitted is None:
        return Tiers()
    seam, axis, limits = open_device(device), comm.stage.axis, admitted.limits
    budget = Budget(limits, rank=axis.ranks[axis.rank])
    budget.account.bus = seam.bus = bus
    with ExitStack() as undo:
        with ControlPlane(comm.stage, "open tiers").all_or_none():
            # What this machine cannot hold beside what its other ranks are to hold is refused.
            pinned = seam.pins() and policy.host.pin is not False and seam.memlock_applies()
            wanted, folder = dict(admitted.need.off_device), policy.disk.folder
            preflight(wanted, device=seam, folder=folder, pinned=pinned, ranks=comm.alike, machine=seam.facts)
            pin = policy.host.pin is not False
            host = HostPool(seam, limit=limits[Tier.HOST], slab_nbytes=policy.host.slab, pin=pin)
            disk = _disk(policy, seam, axis.ranks[axis.rank], bus, budget)
            store = Store(seam, host, disk, budget, staging_nbytes=admitted.staging_nbytes)
            undo.callback(store.shut)
            # Now, while nothing has changed, is the time to hear that there is no thread to be had, or no folder to write in.
            seam.start()
            if admitted.on_disk:
                assert store.disk.path
            _warn_of_memory(policy, admitted, seam)
        undo.pop_all()
    return Tiers(store, admitted)


def _warn_of_memory(policy: Policy, admitted: Admission, seam: Device) -> None:
    """Warn that the folder which nobody chose holds its files in memory, so that the disk tier saves none."""
    chosen, wanted = policy.disk, admitted.on_disk or policy.activation.tier == "disk"
    if wanted and chosen.path is None and seam.facts.is_memory(chosen.folder):
        warn_user(
            f"[disk] path is unset, and the system's folder for temporary files, {chosen.folder}, is on a tmpfs, which keeps "
            'files in memory: tier = "disk" takes as much memory as "host". Set [disk] path to a folder on a disk.'
        )


def _disk(policy: Policy, seam: Device, rank: int, bus: Bus, budget: Budget) -> Callable[[], Disk]:
    """What opens the disk, once something is put there."""
    chosen, limit = policy.disk, budget.limit
    if isinstance(seam, VirtualDevice):
        return lambda: VirtualDisk(seam.machine, limit=limit(Tier.DISK), bus=bus)

    def opened() -> Disk:
        io = BufferedIo() if chosen.direct is False else None
        threads, block = chosen.threads, chosen.block
        file = DiskFile(chosen.folder, label=f"r{rank}", limit=limit(Tier.DISK), threads=threads, block=block, io=io, bus=bus)
        if chosen.direct is True and not file.direct:
            file.close()
            raise CapabilityError(
                f"[disk] direct = true needs a file system that supports direct I/O, found none at {chosen.folder}. Choose "
                'another [disk] path, or direct = "auto".'
            )
        return file

    return opened
