"""The tiers of one attachment, put together from its policy: what will rest where, whether it fits, and the store.

``attach.py`` calls it once the units are known and before anything is allocated.  It never touches a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from offload.budget import Budget, available, preflight, shown
from offload.device import Device, open_device
from offload.disk import DiskFile
from offload.disk_io import BufferedIo
from offload.errors import BudgetError, CapabilityError, PolicyError
from offload.events import Bus
from offload.host import HostPool, slab_within
from offload.kernels import available as available_kernels
from offload.policy import Policy
from offload.store import Store
from offload.tier import Tier
from zhooks.agree import least
from zhooks.comm import Comm
from zhooks.kind import DTYPES, PIECE_NBYTES
from zhooks.optim import Stepper
from zhooks.optim_kernels import Numba
from zhooks.overlap import Overlap, Worker
from zhooks.placement import Placement, Table
from zhooks.rounding import Rounding, StandIns, check_rounding
from zhooks.runtime import Runtime
from zhooks.sharded import part_numel
from zhooks.together import all_or_none
from zhooks.unit import Unit
from zhooks.units import Group

__all__ = ["Need", "limit_of", "needs", "open_stepper", "open_store"]

#: Arrays of a unit that an update works on (masters, gradient, two moments), for this unit and the next; write-backs of the
#: one before are waited for.
_STAGED = 8


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes a rank will hold, as far as they are known before the optimizer has made its states."""

    resting: Mapping[Tier, int]
    largest: int


def needs(groups: Sequence[Group], policy: Policy, table: Table, ranks: int) -> Need:
    """Parameters, masters and gradients by tier, and the largest flat's share of masters, in bytes of this rank."""
    resting = dict.fromkeys(Tier, 0)
    largest = 0
    for name, param in [named for group in groups for named in group.params.items()]:
        for tier, nbytes in _cells(name, param, policy, table, ranks):
            resting[tier] += nbytes
        nbytes = max(part_numel(param) * param.element_size(), PIECE_NBYTES)
        largest = max(largest, -(-nbytes // ranks) if table.shards_optimizer else nbytes)
    return Need(resting, largest)


def _cells(name: str, param: torch.nn.Parameter, policy: Policy, table: Table, ranks: int) -> list[tuple[Tier, int]]:
    tiers = policy.tiers(name)

    def share(placement: Placement) -> int:
        return -(-part_numel(param) // ranks) if placement is Placement.SHARD else part_numel(param)

    master = param.element_size()
    chosen = policy.dtypes(name).param
    compute = DTYPES[chosen].itemsize if chosen is not None and param.is_floating_point() else master
    apart = compute != master or table.parameter is not table.optimizer
    cells = [(tiers.parameter, share(table.parameter) * compute)]
    if apart:
        cells.append((tiers.optimizer, share(table.optimizer) * master))
    if param.requires_grad:
        cells.append((tiers.gradient, share(table.gradient) * master))
    return cells


def open_store(policy: Policy, device: torch.device, groups: Sequence[Group], table: Table, comm: Comm, bus: Bus) -> Store:
    """The store of this rank, empty.

    Raises:
        BudgetError: what is to rest on a tier exceeds its budget or what the machine has; nothing was allocated.
        CapabilityError: the machine lacks what the policy asks for.
    """
    check_compute(policy, device, groups)
    seam, axis = open_device(device), comm.stage.axis
    limits = {tier: limit_of(policy, tier, seam, comm) for tier in Tier}
    need = needs(groups, policy, table, comm.shard.axis.world)
    _admit(limits, need, comm)
    budget = Budget(limits, rank=axis.ranks[axis.rank])
    budget.account.bus = seam.bus = bus
    with ExitStack() as undo:
        with all_or_none(comm.stage, "open tiers"):
            _fits(policy, seam, need, comm)
            host = HostPool(
                seam,
                limit=limits[Tier.HOST],
                slab_nbytes=slab_within(policy.host.slab, limits[Tier.HOST]),
                pin=policy.host.pin is not False,
            )
            disk = _disk(policy, axis.ranks[axis.rank], bus, budget)
            store = Store(seam, host, disk, budget, staging_nbytes=_STAGED * need.largest)
            undo.callback(store.shut)
            # Now, while nothing has changed, is the time to hear that there is no thread to be had, or no folder to write in.
            seam.start()
            if need.resting[Tier.DISK] or any(policy.tiers(name).optimizer is Tier.DISK for g in groups for name in g.params):
                assert store.disk.path
        undo.pop_all()
    return store


def _fits(policy: Policy, seam: Device, need: Need, comm: Comm) -> None:
    """Refuse what this machine cannot hold; ranks that share memory rings share the machine."""
    away: dict[Tier, int] = {tier: nbytes for tier, nbytes in need.resting.items() if tier is not Tier.DEVICE}
    pinned = seam.pins() and policy.host.pin is not False and seam.memlock_applies()
    ranks = comm.stage.axis.world if comm.stage.name == "shm" else 1
    preflight(away, device=seam, folder=policy.disk.folder, pinned=pinned, ranks=ranks)


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
        tiers, computed = policy.tiers(name), policy.dtypes(name).param
        apart = computed is not None and param.is_floating_point() and DTYPES[computed] != param.dtype
        if Tier.DEVICE in (tiers.gradient, tiers.optimizer) or (tiers.parameter is Tier.DEVICE and not apart):
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
    groups = groups_of(units)
    if store is None:
        return open_store(policy, device, groups, table, comm, bus)
    check_compute(policy, device, groups)
    limits = {tier: limit_of(policy, tier, store.device, comm) for tier in Tier}
    need = needs(groups, policy, table, comm.shard.axis.world)
    _admit(limits, need, comm)
    store.change_limits(limits)
    store.staging.limit = _STAGED * need.largest
    return store


def open_stepper(
    policy: Policy, store: Store, bus: Bus, units: Sequence[Unit], runtime: Runtime, rounding: Rounding
) -> Stepper:
    """What steps optimizers over the tiers, listening from now on; ``units`` may change under it."""
    place = Tier.HOST if policy.optimizer.compute == "host" else Tier.DEVICE
    stepper = Stepper(
        store,
        bus,
        lambda: [flat for unit in units for flat in unit.flats],
        runtime.due,
        place,
        min(policy.schedule.prefetch, 1),
    )
    reducer = runtime.reducer
    reducer.early, reducer.early_over = None, _nothing
    if policy.optimizer.overlap:
        axis = reducer.comm.stage.axis
        # On a device that computes by itself an update takes none of backward's time.
        worker = Worker() if place is Tier.HOST else None
        overlap = Overlap(stepper, worker, rank=axis.ranks[axis.rank])
        stepper.overlap, reducer.early, reducer.early_over = overlap, overlap.early, overlap.finish
    stochastic = rounding if policy.optimizer.rounding == "stochastic" else None
    if policy.optimizer.kernel == "numba":
        stepper.kernel = Numba(stochastic)
    elif stochastic is not None:
        stepper.kernel = StandIns(stochastic)
    stepper.open()
    return stepper


def _nothing() -> None:
    """No update has a thread of its own."""


def limit_of(policy: Policy, tier: Tier, seam: Device, comm: Comm) -> int | None:
    """The least that any rank's budget allows; None is no bound.  Collective."""
    folder = policy.disk.folder
    return least(comm.stage, policy.budget.resolve(tier, lambda: available(tier, seam, folder)))


def _admit(limits: Mapping[Tier, int | None], need: Need, comm: Comm) -> None:
    for tier, nbytes in need.resting.items():
        limit = limits[tier]
        if tier is not Tier.DEVICE and limit is not None and nbytes > limit:
            raise BudgetError(
                f"[budget] {tier.value}: expected room for the parameters, masters and gradients that are to rest there, "
                f"{shown(nbytes)} a rank, found {shown(limit)}, {shown(nbytes - limit)} short. Raise it, or change the tier of "
                "[parameter] or [gradient] (of [optimizer] where [precision] param is 16 bit: its masters)."
            )
