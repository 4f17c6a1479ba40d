"""Whether the machine has what a plan needs, asked before anything is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offload.budget.machine import Bound, Machine, Shared
from offload.errors import BudgetError
from offload.text import as_size
from offload.tier import Tier

if TYPE_CHECKING:
    # For its name only: the arithmetic of budgets runs where torch is not.
    import torch


#: The machine that this process runs on.
THIS_MACHINE = Machine()


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks share a machine, and how many of them a container on it (a cgroup's limits)."""

    machine: int = 1
    container: int = 1

    def under(self, bound: Bound) -> int:
        """How many of them a bound is for."""
        return {Shared.PROCESS: 1, Shared.CONTAINER: self.container, Shared.MACHINE: self.machine}[bound.shared]


#: Nobody shares the machine.
ALONE = Ranks()


class Facts(Protocol):
    """What a host has (`Machine`)."""

    def memory_bounds(self, *, pinned: bool = False) -> list[Bound]:
        """Everything that bounds its memory."""

    def disk_free(self, folder: Path) -> int:
        """Bytes that may still be written below ``folder``."""

    def is_memory(self, folder: Path) -> bool:
        """What is written there is in memory."""


class Measured(Protocol):
    """A device that says what it has (`offload.device.Device`)."""

    @property
    def device(self) -> torch.device:
        """The torch device, with its index."""

    def memory(self) -> tuple[int, int]:
        """Bytes (free, total)."""


def preflight(
    need: Mapping[Tier, int],
    *,
    device: Measured | None = None,
    folder: Path | None = None,
    pinned: bool = False,
    ranks: Ranks = ALONE,
    machine: Facts = THIS_MACHINE,
) -> None:
    """Refuse a plan that this machine cannot hold, before anything of it is allocated.

    Args:
        need: bytes per tier that one rank will hold.
        device: where DEVICE is; None and a CPU share the host's memory, so DEVICE and HOST are summed.
        folder: where DISK is; it need not exist yet. In memory (tmpfs) it counts as host memory too.
        pinned: locked memory counts against RLIMIT_MEMLOCK here (`Device.memlock_applies`).
        ranks: those that share its memory and its disk, each with a device of its own.
    Raises:
        BudgetError: names the bound, the need, what is free and the remedy.
    """
    in_memory, terms = _in_memory(need, device, folder, machine)
    if in_memory:
        said = f"host memory for {as_size(in_memory)} per rank ({' + '.join(terms)})"
        bounds = machine.memory_bounds(pinned=pinned)
        _refuse(said, in_memory, ranks, bounds, 'lower [budget], or set tier = "disk" with a [disk] path on a disk')
    wanted = need.get(Tier.DEVICE, 0)
    if wanted and not _shares_memory(device):
        assert device is not None, "no device shares the host's memory"
        free, total = device.memory()
        bound = Bound(f"device {device.device} ({as_size(total)} in all)", free, "end other processes on it", Shared.PROCESS)
        said = f"device memory for {as_size(wanted)} per rank"
        _refuse(said, wanted, ranks, [bound], 'lower [budget] device, or set tier = "host"')
    wanted = need.get(Tier.DISK, 0)
    if wanted:
        assert folder is not None, "a need of disk names its folder"
        name = f"free space in {folder} (5% of the disk, at most 1 GiB, is kept free)"
        bound = Bound(name, machine.disk_free(folder), "free some space")
        said = f"disk for {as_size(wanted)} per rank"
        _refuse(said, wanted, ranks, [bound], "point [disk] path at a larger disk, or lower [budget] disk")


def available(
    tier: Tier,
    device: Measured | None = None,
    folder: Path | None = None,
    *,
    pinned: bool = False,
    ranks: Ranks = ALONE,
    machine: Facts = THIS_MACHINE,
) -> int:
    """Bytes of ``tier`` that each of ``ranks`` could take now; of one alone what "80%" in a policy is of.

    Arguments as `preflight`. On a CPU DEVICE and HOST are the same bytes, and each answer is all of them.
    """
    if tier is Tier.DISK:
        assert folder is not None, "the disk tier has a folder"
        return machine.disk_free(folder) // ranks.machine
    if tier is Tier.DEVICE and device is not None and not _shares_memory(device):
        return device.memory()[0]
    return max(0, min(bound.free // ranks.under(bound) for bound in machine.memory_bounds(pinned=pinned)))


def _shares_memory(device: Measured | None) -> bool:
    return device is None or device.device.type == "cpu"


def _in_memory(
    need: Mapping[Tier, int], device: Measured | None, folder: Path | None, machine: Facts
) -> tuple[int, list[str]]:
    """What of the need lies in host memory, and its terms as text."""
    tiers = [Tier.HOST]
    if _shares_memory(device):
        tiers.insert(0, Tier.DEVICE)
    if need.get(Tier.DISK, 0) and folder is not None and machine.is_memory(folder):
        tiers.append(Tier.DISK)
    held = {tier: need[tier] for tier in tiers if need.get(tier, 0)}
    note = {Tier.DISK: f", as {folder} is in memory"}
    return sum(held.values()), [f"{tier.value} {as_size(nbytes)}{note.get(tier, '')}" for tier, nbytes in held.items()]


def _refuse(said: str, wanted: int, ranks: Ranks, bounds: list[Bound], remedy: str) -> None:
    """Raise for the bound that falls shortest of the need."""
    short = {bound: wanted * ranks.under(bound) - bound.free for bound in bounds}
    worst = max(short, key=lambda bound: short[bound])
    if short[worst] <= 0:
        return
    together = ranks.under(worst)
    total = "" if together == 1 else f", {as_size(wanted * together)} for {together} ranks"
    raise BudgetError(
        f"preflight expected {said}{total}; {worst.name} leaves {as_size(max(0, worst.free))}, {as_size(short[worst])} short; "
        f"{worst.remedy}, or {remedy}"
    )
