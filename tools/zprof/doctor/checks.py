"""Owns what ``zprof doctor`` checks of the software and the host: packages, memory, locking, shared memory, a disk folder.

`zprof.commands.doctor` prints the findings; those of GPUs are in `zprof.doctor.gpu`. It imports no torch, and leaves nothing
behind.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from offload.budget import Machine
from offload.text import as_size, counted
from zprof.gpu.answers import one_line

__all__ = ["FAIL", "OK", "WARN", "Finding", "Package", "host_findings", "installed_packages", "software_findings"]

OK, WARN, FAIL = "ok", "warn", "fail"
_OLDEST_PYTHON = (3, 11)
#: Package, the extra it is in, and what needs it.
_OPTIONAL = (
    ("plotly", "pages", "pages of timelines and flame graphs"),
    ("prometheus-client", "prometheus", "Prometheus export, and no live figures for it"),
    ("tensorboard", "tensorboard", "TensorBoard export"),
)
_ALIGN = 4096
#: Below this, ranks of one host cannot hand each other even a small model's unit through shared memory.
_SMALL_SHM = 1 << 30
_SMALL_MEMORY = 1 << 30
_SMALL_DISK = 10 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at. status: "ok", "warn" (works, with a loss) or "fail" (zhooks does not work so).
        found: what there is. remedy: what to do; empty where nothing is to be done.
    """

    name: str
    status: str
    found: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """As ``--json`` prints it."""
        return {"name": self.name, "status": self.status, "found": self.found, "remedy": self.remedy}


def software_findings() -> Iterator[Finding]:
    """Python, and the packages the project declares, by their metadata alone."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    old = sys.version_info < _OLDEST_PYTHON
    yield Finding("python", FAIL if old else OK, version, "install Python 3.11 or newer" if old else "")
    installed = installed_packages()
    own = installed.get("zhooks")
    if own is None:
        yield Finding("zhooks", WARN, "not installed; its sources are imported", "pip install -e . in its folder")
    else:
        yield Finding("zhooks", OK, own.version)
        for wanted in map(Requirement, own.requires()):
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                yield _package(wanted, installed.get(canonicalize_name(wanted.name)))
    for name, extra, serves in _OPTIONAL:
        if name in installed:
            yield Finding(name, OK, installed[name].version)
        else:
            yield Finding(name, WARN, f"not installed: no {serves}", f"pip install 'zhooks[{extra}]'")


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package: its version, and the folder of its metadata."""

    version: str
    folder: Path

    def requires(self) -> list[str]:
        """Its requirements, as it declares them."""
        try:
            text = (self.folder / "METADATA").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return re.findall(r"^Requires-Dist: (.+)$", text.partition("\n\n")[0], re.MULTILINE)


def installed_packages() -> dict[str, Package]:
    """What can be imported, by normal name, the first on the path as the import takes it.

    The name of a metadata folder says all that is asked for; importlib.metadata would load a mail parser to read it, and
    take longer than everything else in the report.
    """
    found: dict[str, Package] = {}
    for entry in dict.fromkeys(sys.path):
        try:
            names = sorted(os.listdir(entry or "."))
        except OSError:
            continue
        for name in names:
            match = re.fullmatch(r"(.+)-([^-]+)\.dist-info", name)
            if match:
                found.setdefault(canonicalize_name(match[1]), Package(match[2], Path(entry, name)))
    return found


def _package(wanted: Requirement, found: Package | None) -> Finding:
    remedy = f"pip install '{wanted.name}{wanted.specifier}'"
    version = _version_otherwise(wanted.name) if found is None else found.version
    if version is None:
        return Finding(wanted.name, FAIL, "not installed", remedy)
    if _meets(version, wanted.specifier):
        return Finding(wanted.name, OK, version)
    return Finding(wanted.name, FAIL, f"{version}, expected {wanted.specifier}", remedy)


def _version_otherwise(name: str) -> str | None:
    """The version of a package that lies elsewhere than in a folder of the path: in an egg, or an archive."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _meets(version: str, bounds: SpecifierSet) -> bool:
    """Whether an installed version lies in ``bounds``; one that is none by PEP 440 is taken to."""
    try:
        return bounds.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def host_findings(folder: Path, machine: Machine, *, gpu: bool) -> Iterator[Finding]:
    """Memory and its bounds, processors, shared memory, huge pages, and ``folder`` as one for the disk tier.

    Args:
        gpu: memory will be locked for copies, so that limits on locking matter.
    """
    yield from _memory(machine)
    yield _locking(machine, gpu)
    yield _processors(machine)
    yield _shared_memory(machine)
    yield _huge_pages(machine)
    yield from _disk(folder, machine)


def _memory(machine: Machine) -> Iterator[Finding]:
    for bound in machine.memory_bounds():
        short = bound.free < _SMALL_MEMORY
        yield Finding(one_line(bound.name), WARN if short else OK, f"{as_size(bound.free)} free", bound.remedy if short else "")


def _locking(machine: Machine, gpu: bool) -> Finding:
    name = "locked memory (RLIMIT_MEMLOCK)"
    # The bounds of pinned memory have one more than those of other memory where a limit applies.
    locking = [bound for bound in machine.memory_bounds(pinned=True) if "RLIMIT_MEMLOCK" in bound.name]
    if not locking:
        return Finding(name, OK, "no limit applies to this process")
    found = f"{as_size(max(0, locking[0].free))} may still be locked"
    if not gpu:
        return Finding(name, OK, f"{found}; without a GPU nothing is locked")
    # Some drivers lock past the limit; the preflight of `attach` tries which this one is.
    return Finding(name, WARN, f"{found}, which some drivers enforce on pinned memory", locking[0].remedy)


def _processors(machine: Machine) -> Finding:
    usable, all_of = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    nodes = len(list((machine.root / "sys/devices/system/node").glob("node[0-9]*"))) or 1
    found = f"{usable} of {all_of} usable, {counted(nodes, 'NUMA node')}"
    if nodes > 1 and usable == all_of:
        remedy = "bind each rank to a node: numactl --cpunodebind=N --membind=N"
        return Finding("processors", WARN, f"{found}; ranks may run far from their memory", remedy)
    return Finding("processors", OK, found)


def _shared_memory(machine: Machine) -> Finding:
    """NCCL and the workers of a DataLoader exchange through files there; ranks on CPUs use memory without a name."""
    name, remedy = "/dev/shm", "mount -o remount,size=8G /dev/shm (docker run --shm-size=8g or --ipc=host)"
    users = "NCCL and data loader workers"
    try:
        stat = os.statvfs(machine.root / "dev/shm")
    except OSError as error:
        return Finding(name, WARN, f"cannot be used: {error.strerror}; {users} exchange through it", remedy)
    free = stat.f_bavail * stat.f_frsize
    found = f"{as_size(free)} free of {as_size(stat.f_blocks * stat.f_frsize)}"
    small = free < _SMALL_SHM
    return Finding(name, WARN, f"{found}: may be too small for {users}", remedy) if small else Finding(name, OK, found)


def _huge_pages(machine: Machine) -> Finding:
    name = "transparent huge pages"
    try:
        text = (machine.root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except (OSError, UnicodeDecodeError):
        return Finding(name, OK, "this kernel has none")
    chosen = re.search(r"\[(\w+)\]", text)
    mode = chosen[1] if chosen else "unknown"
    if mode == "never":
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding(name, WARN, f"{mode}: large host buffers cost more page faults", remedy)
    return Finding(name, OK, mode)


def _disk(folder: Path, machine: Machine) -> Iterator[Finding]:
    name = f"disk tier in {one_line(str(folder), 80)}"
    remedy = "point [disk] path (here: --path) at a folder on a local disk"
    try:
        free, in_memory = machine.disk_free(folder), machine.is_memory(folder)
    except (OSError, ValueError) as error:
        yield Finding(name, WARN, f"cannot be used: {getattr(error, 'strerror', None) or error}", remedy)
        return
    found = f"{as_size(free)} free"
    if in_memory:
        yield Finding(name, WARN, f"{found}, in memory (tmpfs): it counts as host memory", remedy)
    elif free < _SMALL_DISK:
        yield Finding(name, WARN, found, f"free some, or {remedy}")
    else:
        yield Finding(name, OK, found)
    # A folder that is still to be made lies on the file system of what is above it.
    existing = next((here for here in (folder, *folder.absolute().parents) if here.exists()), Path("/"))
    yield _direct(existing, f"direct I/O in {one_line(str(folder), 80)}", remedy)


def _direct(folder: Path, name: str, remedy: str) -> Finding:
    """Try it with one page."""
    page = mmap.mmap(-1, _ALIGN)
    try:
        handle = _nameless(folder)
        try:
            written = os.pwritev(handle, [page], 0)
        finally:
            os.close(handle)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EINVAL:
            return Finding(name, WARN, f"not supported ({why}): the disk tier goes through the page cache", remedy)
        return Finding(name, WARN, f"no file can be written: {why}", remedy)
    finally:
        page.close()
    if written != _ALIGN:
        return Finding(name, WARN, f"wrote {written} of {_ALIGN} bytes", remedy)
    return Finding(name, OK, "supported")


def _nameless(folder: Path) -> int:
    """A file in ``folder`` for direct I/O that is gone once it is closed."""
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        # Not every file system has files without a name; one that refuses for another reason will again.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    path = folder / f".zprof-doctor-{os.getpid()}"
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        # Refused direct I/O may leave the file made.
        path.unlink(missing_ok=True)
