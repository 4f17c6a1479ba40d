"""Owns what is read of other processes: who descends from one, what each holds, and what it is called.

`children` asks it at a look. It reads the kernel's files under /proc alone, keeps no process and no file open, and leaves out
what has gone meanwhile or may not be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zprof.recording import kernel_files

__all__ = ["Shares", "Stat", "command", "descendants", "executable", "queued_ns", "shares", "stat_of"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stat:
    """One process, by the kernel's one line on it.

    Attributes:
        start: when it began, in ticks since the boot; a pid that comes again has another.
        name: the name of its first thread, at most 15 letters.
        rss: resident bytes, those it shares included. cpu_ns: spent so far, in user and kernel mode.
    """

    pid: int
    parent: int
    start: int
    name: str
    zombie: bool
    rss: int
    cpu_ns: int

    @property
    def began_ns(self) -> int:
        """When it began, nanoseconds since the boot."""
        return self.start * _TICK_NS


@dataclass(frozen=True, slots=True)
class Shares:
    """What a process holds, each page divided by how many have it: over all who share, each byte counts once.

    Attributes:
        shmem: of it, in shared memory and tmpfs; None where the kernel does not say.
    """

    pss: int
    shmem: int | None


def descendants(pid: int, root: Path = Path("/")) -> list[Stat]:
    """The processes that ``pid`` has started, those that they have, and so on; zombies among them."""
    found: list[Stat] = []
    if (root / f"proc/{pid}/task/{pid}/children").exists():
        waiting = [pid]
        while waiting:
            for child in _children(waiting.pop(), root):
                stat = stat_of(child, root)
                if stat is not None:
                    found.append(stat)
                    waiting.append(child)
        return found
    # A kernel built without these files: every process is looked at.
    of: dict[int, list[Stat]] = {}
    for name in os.listdir(root / "proc"):
        stat = stat_of(int(name), root) if name.isdecimal() else None
        if stat is not None:
            of.setdefault(stat.parent, []).append(stat)
    waiting = [pid]
    while waiting:
        children = of.pop(waiting.pop(), [])
        found += children
        waiting += [child.pid for child in children]
    return found


def _children(pid: int, root: Path) -> Iterator[int]:
    """Of every thread, for each is the parent of what it has started."""
    try:
        threads = os.listdir(root / f"proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        for child in kernel_files.read(f"{root}/proc/{pid}/task/{thread}/children").split():
            yield int(child)


def stat_of(pid: int, root: Path = Path("/")) -> Stat | None:
    """One process; None where it has gone."""
    before, _, after = kernel_files.read(f"{root}/proc/{pid}/stat").rpartition(b")")
    # proc(5) counts from 1; what follows the name begins with field 3.
    fields = after.split()
    if len(fields) < 22:
        return None
    name = before.partition(b"(")[2].decode(errors="replace")
    rss, cpu = int(fields[21]) * _PAGE, int(fields[11]) + int(fields[12])
    return Stat(pid, int(fields[1]), int(fields[19]), name, fields[0] in (b"Z", b"X"), rss, cpu * _TICK_NS)


def shares(pid: int, root: Path = Path("/")) -> Shares | None:
    """What ``pid`` holds with its share of what it has in common with others; None where that may not be read.

    The kernel walks over all of its pages, which takes milliseconds for gigabytes.
    """
    pss = shmem = None
    for line in kernel_files.read(f"{root}/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            pss = int(line.split()[1]) << 10
        elif line.startswith(b"Pss_Shmem:"):
            shmem = int(line.split()[1]) << 10
    return None if pss is None else Shares(pss, shmem)


def queued_ns(pid: int, root: Path = Path("/")) -> int | None:
    """Nanoseconds that its first thread was ready to run and had no core so far; None where the kernel does not say."""
    fields = kernel_files.read(f"{root}/proc/{pid}/schedstat").split()
    return int(fields[1]) if len(fields) == 3 else None


def command(pid: int, root: Path = Path("/")) -> list[str]:
    """Its command line; empty where it has none, or it may not be read."""
    return [word.decode(errors="replace") for word in kernel_files.read(f"{root}/proc/{pid}/cmdline").split(b"\0") if word]


def executable(pid: int, root: Path = Path("/")) -> str:
    """The file that it runs; "" where that may not be read."""
    try:
        return os.readlink(root / f"proc/{pid}/exe")
    except OSError:
        return ""
