"""Bytes per tier: what may be held, what is held, the most that was held, and what the machine could hold at all.

The store admits every block here before memory is asked for, and ``attach`` runs `preflight` before anything is allocated.
It allocates nothing, moves nothing, and reads the machine only when asked to.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from offload.account import Account
from offload.errors import BudgetError
from offload.tier import Tier

if TYPE_CHECKING:
    # For its name only: the arithmetic of budgets runs where torch is not.
    from offload.device import Device

__all__ = ["Bound", "Budget", "Machine", "available", "cannot_admit", "kept_free", "preflight", "shown"]

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_MENDS = {
    Tier.DEVICE: 'raise [budget] device, or set [optimizer] tier = "host"',
    Tier.HOST: 'raise [budget] host, or set [optimizer] tier = "disk"',
    Tier.DISK: "raise [budget] disk, or run on more ranks",
}
#: cgroup v1 says "no limit" as the largest whole number of pages.
_NO_LIMIT = 1 << 60
_CAP_IPC_LOCK = 14


def kept_free(total: int) -> int:
    """Bytes of a file system of ``total`` that scratch files leave free: a checkpoint, a log, or the system may need them."""
    return min(total // 20, 1 << 30)


def shown(nbytes: int) -> str:
    """``nbytes`` for a reader: three digits in a unit that suits, exact where that is a whole number."""
    for unit, name in _UNITS:
        if abs(nbytes) >= unit:
            value = nbytes / unit
            return f"{nbytes // unit if nbytes % unit == 0 else f'{value:.3g}' if value < 999.5 else f'{value:.0f}'} {name}"
    return f"{nbytes} B"


def cannot_admit(tier: Tier, key: str, nbytes: int, *, used: int, limit: int, note: str = "") -> BudgetError:
    """The error of a tier that is full, with its arithmetic and the mend.

    Args:
        used: bytes in use before the request.
        note: more to say between the arithmetic and the mend, e.g. "on rank 3".
    """
    unit, name = next(((unit, name) for unit, name in _UNITS if limit >= unit), (1, "B"))
    digits = 0 if unit == 1 else 1
    held = f"{used / unit:.{digits}f} of {limit / unit:.{digits}f} {name} in use"
    # Rounded figures can look as if there were room.
    short = f"{shown(used + nbytes - limit)} short" if used + nbytes > limit else "no hole is large enough"
    said = f" {note}" if note else ""
    return BudgetError(f"{tier.value} tier cannot admit {key} ({shown(nbytes)}): {held}, {short}{said}; {_MENDS[tier]}")


class Budget:
    """Bytes admitted to each tier, against each tier's limit; any thread may call.

    Args:
        limits: bytes per tier; a tier that is missing or None has no limit.
        rank: named in errors where given.
    """

    def __init__(self, limits: Mapping[Tier, int | None], *, rank: int | None = None) -> None:
        assert all(limit is None or limit >= 0 for limit in limits.values()), "a limit is not negative"
        self._limits = {tier: limits.get(tier) for tier in Tier}
        self._used = dict.fromkeys(Tier, 0)
        self._high_water = dict.fromkeys(Tier, 0)
        self._note = "" if rank is None else f"on rank {rank}"
        #: Who holds what was admitted.
        self.account = Account()
        self._change = threading.Lock()

    def admit(self, tier: Tier, key: str, nbytes: int) -> None:
        """Count ``nbytes`` for block ``key`` as held by ``tier``.

        Raises:
            BudgetError: the limit does not allow it; nothing is counted.
        """
        if not self.try_admit(tier, nbytes):
            limit = self._limits[tier]
            assert limit is not None, "a tier without a limit admits everything"
            raise cannot_admit(tier, key, nbytes, used=self._used[tier], limit=limit, note=self._note)

    def try_admit(self, tier: Tier, nbytes: int) -> bool:
        """As `admit`, answering instead of raising: for whoever can wait or evict."""
        assert nbytes >= 0, "a block's size is not negative"
        with self._change:
            used, limit = self._used[tier] + nbytes, self._limits[tier]
            if limit is not None and used > limit and nbytes:
                return False
            self._used[tier] = used
            self._high_water[tier] = max(self._high_water[tier], used)
            return True

    def release(self, tier: Tier, nbytes: int) -> None:
        """Count ``nbytes`` that were admitted as held no longer."""
        with self._change:
            assert 0 <= nbytes <= self._used[tier], f"{tier.value}: {nbytes} B released, {self._used[tier]} B were admitted"
            self._used[tier] -= nbytes

    def used(self, tier: Tier) -> int:
        """Bytes held now."""
        return self._used[tier]

    def high_water(self, tier: Tier) -> int:
        """The most bytes held since the start or the last `reset_high_water`."""
        return self._high_water[tier]

    def reset_high_water(self) -> None:
        """Start the marks again from what is held now, as a profiler does between steps."""
        with self._change:
            self._high_water = dict(self._used)

    def change(self, limits: Mapping[Tier, int | None]) -> None:
        """Other limits from now on; what is held above one stays, and nothing more is admitted."""
        with self._change:
            self._limits = {tier: limits.get(tier) for tier in Tier}

    def limit(self, tier: Tier) -> int | None:
        """Bytes the tier may hold; None is no limit."""
        return self._limits[tier]

    def room(self, tier: Tier) -> int | None:
        """Bytes that would still be admitted; None where nothing bounds them, never negative."""
        limit = self._limits[tier]
        return None if limit is None else max(0, limit - self._used[tier])


@dataclass(frozen=True, slots=True)
class Bound:
    """One thing that bounds memory.

    Attributes:
        name: what it is and what it says, e.g. "cgroup /a (memory.max 4 GiB, 1 GiB in use)".
        free: bytes it still allows; may be negative.
        mend: what raises it.
        of_process: it bounds this process alone, not all ranks of the machine together.
    """

    name: str
    free: int
    mend: str
    of_process: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the facts are read; ``root`` is "/" outside tests."""

    root: Path = Path("/")

    def memory_bounds(self, *, pinned: bool = False) -> list[Bound]:
        """Everything that bounds host memory: what is available, each cgroup above this process, its own limits.

        Args:
            pinned: the memory is to be locked, and locking counts against RLIMIT_MEMLOCK.
        """
        bounds = [Bound("available memory (MemAvailable)", self._mem_available(), "end other processes or add memory")]
        return [*bounds, *self._cgroup_bounds(), *self._process_bounds(pinned)]

    def disk_free(self, folder: Path) -> int:
        """Bytes this user may still write below ``folder``, or below what exists of it, without those of `kept_free`."""
        usage = shutil.disk_usage(_existing(folder))
        return max(0, usage.free - kept_free(usage.total))

    def is_memory(self, folder: Path) -> bool:
        """Whether files below ``folder`` are held in memory (tmpfs), so that the disk tier is a second host tier."""
        # By device number: mounts may lie on or under each other in any order.
        number = _existing(folder).stat().st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        mounts = _mounts(self._read("proc/self/mountinfo"))
        return any(mount.device == device and mount.kind in ("tmpfs", "ramfs") for mount in mounts)

    def _mem_available(self) -> int:
        values = _counts(self._read("proc/meminfo"))
        if "MemAvailable" in values:
            return values["MemAvailable"]
        # Here, for commands that must answer at once start without it where the kernel says.
        import psutil

        return int(psutil.virtual_memory().available)

    def _cgroup_bounds(self) -> list[Bound]:
        mounts = _mounts(self._read("proc/self/mountinfo"))
        bounds: list[Bound] = []
        for controllers, path in re.findall(r"^\d+:([^:\n]*):(/.*)$", self._read("proc/self/cgroup"), re.MULTILINE):
            version = 1 if controllers else 2
            if version == 1 and "memory" not in controllers.split(","):
                continue
            for mount in mounts:
                if mount.kind == "cgroup2" if version == 2 else mount.kind == "cgroup" and "memory" in mount.options:
                    bounds.extend(self._along(mount, PurePosixPath(path), version))
        return bounds

    def _along(self, mount: _Mount, path: PurePosixPath, version: int) -> list[Bound]:
        """Bounds of the cgroup at ``path`` and of all above it that the mount shows."""
        # A container without a cgroup namespace sees its host's path, and only its own part of the tree mounted.
        seen = path.is_relative_to(mount.root) and ".." not in path.parts
        inside = path.relative_to(mount.root) if seen else PurePosixPath(".")
        bounds = []
        for here in (inside, *inside.parents):
            folder = str(mount.point / here).lstrip("/")
            limit = self._number(f"{folder}/{'memory.max' if version == 2 else 'memory.limit_in_bytes'}")
            usage = self._number(f"{folder}/{'memory.current' if version == 2 else 'memory.usage_in_bytes'}")
            if limit is None or usage is None or limit >= _NO_LIMIT:
                continue
            held = max(0, usage - _reclaimable(self._read(f"{folder}/memory.stat"), version))
            name = f"cgroup /{folder} (limit {shown(limit)}, {shown(held)} in use)"
            bounds.append(Bound(name, limit - held, "raise the container's or the job's memory limit"))
        return bounds

    def _process_bounds(self, pinned: bool) -> list[Bound]:
        status = _counts(self._read("proc/self/status"))
        limits = _limits(self._read("proc/self/limits"))
        watched = [("Max address space", "RLIMIT_AS", "VmSize", "-v"), ("Max data size", "RLIMIT_DATA", "VmData", "-d")]
        if pinned and not _may_lock_all(self._read("proc/self/status")):
            watched.append(("Max locked memory", "RLIMIT_MEMLOCK", "VmLck", "-l"))
        bounds = []
        for line, name, held_line, option in watched:
            limit = limits.get(line)
            if limit is None:
                continue
            held = status.get(held_line, 0) + (status.get("VmPin", 0) if option == "-l" else 0)
            mend = f"raise it with ulimit {option} unlimited"
            mend += " (docker run --ulimit memlock=-1)" if option == "-l" else ""
            said = f"{name} (limit {shown(limit)}, {shown(held)} in use)"
            bounds.append(Bound(said, limit - held, mend, of_process=True))
        return bounds

    def _read(self, path: str) -> str:
        """A small text below the root; empty where there is none."""
        try:
            return (self.root / path).read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def _number(self, path: str) -> int | None:
        text = self._read(path).strip()
        return int(text) if text.isascii() and text.isdigit() else None


def preflight(
    need: Mapping[Tier, int],
    *,
    device: Device | None = None,
    folder: Path | None = None,
    pinned: bool = False,
    ranks: int = 1,
    machine: Machine = Machine(),
) -> None:
    """Refuse a plan that this machine cannot hold, before anything of it is allocated.

    Args:
        need: bytes per tier that one rank will hold.
        device: where DEVICE is; None and a CPU share the host's memory, so DEVICE and HOST are summed.
        folder: where DISK is; it need not exist yet. In memory (tmpfs) it counts as host memory too.
        pinned: locked memory counts against RLIMIT_MEMLOCK here (`Device.memlock_applies`).
        ranks: ranks on this machine, which share its memory and its disk, each with a device of its own.
    Raises:
        BudgetError: names the bound, the need, what is free and the mend.
    """
    in_memory, terms = _in_memory(need, device, folder, machine)
    if in_memory:
        said = f"host memory for {shown(in_memory)} a rank ({' + '.join(terms)})"
        bounds = machine.memory_bounds(pinned=pinned)
        _refuse(said, in_memory, ranks, bounds, 'lower [budget], or set tier = "disk" with a [disk] path on a disk')
    wanted = need.get(Tier.DEVICE, 0)
    if wanted and not _shares_memory(device):
        assert device is not None, "no device shares the host's memory"
        free, total = device.memory()
        bound = Bound(f"device {device.device} ({shown(total)} in all)", free, "end what else runs on it", of_process=True)
        _refuse(f"device memory for {shown(wanted)} a rank", wanted, 1, [bound], 'lower [budget] device, or set tier = "host"')
    wanted = need.get(Tier.DISK, 0)
    if wanted:
        assert folder is not None, "a need of disk names its folder"
        name = f"free disk below {folder} (a 20th of the disk, at most 1 GiB, stays free)"
        bound = Bound(name, machine.disk_free(folder), "free some")
        said = f"disk for {shown(wanted)} a rank"
        _refuse(said, wanted, ranks, [bound], "point [disk] path at a larger disk, or lower [budget] disk")


def available(
    tier: Tier,
    device: Device | None = None,
    folder: Path | None = None,
    *,
    pinned: bool = False,
    machine: Machine = Machine(),
) -> int:
    """Bytes of ``tier`` that this process could take now, alone on the machine: what "80%" in a policy is of.

    Arguments as `preflight`. On a CPU DEVICE and HOST are the same bytes, and each answer is all of them.
    """
    if tier is Tier.DISK:
        assert folder is not None, "the disk tier has a folder"
        return machine.disk_free(folder)
    if tier is Tier.DEVICE and device is not None and not _shares_memory(device):
        return device.memory()[0]
    return max(0, min(bound.free for bound in machine.memory_bounds(pinned=pinned)))


def _shares_memory(device: Device | None) -> bool:
    return device is None or device.device.type == "cpu"


def _in_memory(
    need: Mapping[Tier, int], device: Device | None, folder: Path | None, machine: Machine
) -> tuple[int, list[str]]:
    """What of the need lies in host memory, and its terms as text."""
    tiers = [Tier.HOST]
    if _shares_memory(device):
        tiers.insert(0, Tier.DEVICE)
    if need.get(Tier.DISK, 0) and folder is not None and machine.is_memory(folder):
        tiers.append(Tier.DISK)
    held = {tier: need[tier] for tier in tiers if need.get(tier, 0)}
    note = {Tier.DISK: f", {folder} being in memory"}
    return sum(held.values()), [f"{tier.value} {shown(nbytes)}{note.get(tier, '')}" for tier, nbytes in held.items()]


def _refuse(said: str, wanted: int, ranks: int, bounds: list[Bound], mend: str) -> None:
    """Raise for the bound that falls shortest of the need."""
    short = {bound: wanted * (1 if bound.of_process else ranks) - bound.free for bound in bounds}
    worst = max(short, key=lambda bound: short[bound])
    if short[worst] <= 0:
        return
    total = "" if worst.of_process or ranks == 1 else f", {shown(wanted * ranks)} for {ranks} ranks"
    raise BudgetError(
        f"preflight: expected {said}{total}; {worst.name} leaves {shown(max(0, worst.free))}, {shown(short[worst])} short; "
        f"{worst.mend}, or {mend}"
    )


# --- what the kernel writes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mount:
    """One line of mountinfo: the part ``root`` of a file system of ``kind`` on ``device`` is seen at ``point``."""

    device: str
    root: PurePosixPath
    point: PurePosixPath
    kind: str
    options: tuple[str, ...]


def _mounts(mountinfo: str) -> list[_Mount]:
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, more = left.split(), right.split()
        if len(fields) >= 5 and len(more) >= 2:
            root, point = (PurePosixPath(_unescaped(field)) for field in fields[3:5])
            found.append(_Mount(fields[2], root, point, more[0], tuple(more[-1].split(","))))
    return found


def _unescaped(field: str) -> str:
    """A path of mountinfo, which writes spaces and the like as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


def _counts(text: str) -> dict[str, int]:
    """Bytes by name from lines such as "MemAvailable:  123 kB"; other lines are left out."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(count) << 10 for name, count in found}


def _limits(text: str) -> dict[str, int]:
    """Soft limits by name from /proc/self/limits; those that are unlimited are left out."""
    found = re.findall(r"^(Max [a-z ]+?)\s{2,}(\d+)\s", text, re.MULTILINE)
    return {name: int(soft) for name, soft in found}


def _reclaimable(stat: str, version: int) -> int:
    """Page cache that is charged to a cgroup and given up before anybody is killed."""
    names = ("inactive_file", "active_file") if version == 2 else ("total_inactive_file", "total_active_file")
    return sum(int(count) for name, count in re.findall(r"^(\w+) (\d+)$", stat, re.MULTILINE) if name in names)


def _may_lock_all(status: str) -> bool:
    """Whether CAP_IPC_LOCK lifts RLIMIT_MEMLOCK."""
    found = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def _existing(folder: Path) -> Path:
    """``folder``, or the nearest above it that exists."""
    return next((here for here in (folder, *folder.absolute().parents) if here.exists()), Path("/"))
