"""What the machine has: memory by the kernel, by cgroups and by limits of the process; free space in file systems; and whether
a plan fits there, asked before anything is taken."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from offload.errors import BudgetError
from offload.text import as_size
from offload.tier import Tier

if TYPE_CHECKING:
    # For its name only: the arithmetic of budgets runs where torch is not.
    import torch

__all__ = [
    "ALONE", "THIS_MACHINE", "Bound", "Machine", "Ranks", "Shared", "available", "existing", "kept_free", "preflight",
]  # fmt: skip

#: cgroup v1 says "no limit" as the largest whole number of pages.
_NO_LIMIT = 1 << 60
_CAP_IPC_LOCK = 14


def kept_free(total: int) -> int:
    """Bytes of a file system of ``total`` that scratch files leave free: a checkpoint, a log, or the system may need them."""
    return min(total // 20, 1 << 30)


class Shared(Enum):
    """Which ranks a bound is shared by: those of this process alone, of its container, or of the machine."""

    PROCESS, CONTAINER, MACHINE = "process", "container", "machine"


@dataclass(frozen=True, slots=True)
class Bound:
    """One thing that bounds memory.

    Attributes:
        name: what it is and what it says, e.g. "cgroup /a (memory.max 4 GiB, 1 GiB in use)".
        free: bytes it still allows; may be negative.
        remedy: what raises it.
        shared: the ranks that it bounds together.
        limit: bytes in all; None where it is no number that somebody set.
        most: bytes that ever counted against it at once; None where nobody knows.
    """

    name: str
    free: int
    remedy: str
    shared: Shared = Shared.MACHINE
    limit: int | None = None
    most: int | None = None

    @property
    def of_process(self) -> bool:
        """It bounds this process alone."""
        return self.shared is Shared.PROCESS


class Machine:
    """Where the facts are read; ``root`` is "/" outside tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def memory_bounds(self, *, pinned: bool = False) -> list[Bound]:
        """Everything that bounds host memory: what is available, each cgroup above this process, its own limits.

        Args:
            pinned: the memory is to be locked, and locking counts against RLIMIT_MEMLOCK.
        """
        bounds = [Bound("available memory (MemAvailable)", self._mem_available(), "end other processes or add memory")]
        return [*bounds, *self._cgroup_bounds(), *self._process_bounds(pinned)]

    def resident(self) -> tuple[int, int]:
        """Bytes that this process has in memory: now, and at most since it began."""
        held = _counts(self._read("proc/self/status"))
        if "VmRSS" not in held:
            import psutil

            now = int(psutil.Process().memory_info().rss)
            return now, now
        return held["VmRSS"], max(held["VmRSS"], held.get("VmHWM", 0))

    def places(self) -> tuple[str, str]:
        """Where this process runs: texts that are the same for all processes of the machine, and for all of its container."""
        boot = self._read("proc/sys/kernel/random/boot_id").strip() or socket.gethostname()
        try:
            namespace = os.readlink(self.root / "proc/self/ns/cgroup")
        except OSError:
            namespace = ""
        # Of containers that share the host's namespace each has its own part of the tree mounted.
        mounts = _mounts(self._read("proc/self/mountinfo"))
        parts = dict.fromkeys(str(mount.root) for mount in mounts if mount.kind in ("cgroup", "cgroup2"))
        return boot, " ".join((boot, namespace, *parts))

    def disk_free(self, folder: Path) -> int:
        """Bytes this user may still write below ``folder``, or below what exists of it, without those of `kept_free`."""
        usage = shutil.disk_usage(existing(folder))
        return max(0, usage.free - kept_free(usage.total))

    def is_memory(self, folder: Path) -> bool:
        """Whether files below ``folder`` are held in memory (tmpfs), so that the disk tier is a second host tier."""
        # By device number: mounts may lie on or under each other in any order.
        number = existing(folder).stat().st_dev
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
        # A container without a cgroup namespace sees its host's path, and only its own subtree mounted.
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
            name = f"cgroup /{folder} (limit {as_size(limit)}, {as_size(held)} in use)"
            remedy = "raise the container's or the job's memory limit"
            bounds.append(Bound(name, limit - held, remedy, Shared.CONTAINER, limit))
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
            remedy = f"raise it with ulimit {option} unlimited"
            remedy += " (docker run --ulimit memlock=-1)" if option == "-l" else ""
            said = f"{name} (limit {as_size(limit)}, {as_size(held)} in use)"
            most = status.get("VmPeak") if name == "RLIMIT_AS" else None
            bounds.append(Bound(said, limit - held, remedy, Shared.PROCESS, limit, most))
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


@dataclass(frozen=True, slots=True)
class _Mount:
    """One line of mountinfo: the subtree ``root`` of a file system of ``kind`` on ``device`` is seen at ``point``."""

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


def existing(folder: Path) -> Path:
    """``folder``, or the nearest above it that exists."""
    return next((here for here in (folder, *folder.absolute().parents) if here.exists()), Path("/"))


# --- whether a plan fits ------------------------------------------------------------------------------------------------

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
    machine: Machine = THIS_MACHINE,
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
    machine: Machine = THIS_MACHINE,
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
    need: Mapping[Tier, int], device: Measured | None, folder: Path | None, machine: Machine
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
