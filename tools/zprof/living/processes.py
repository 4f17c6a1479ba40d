"""Owns what Linux says of a running process without touching it: whether it is there, whose it is, what it is, how it ended.

`zprof attach` and `zprof hang` ask it before anything else. It only reads below /proc, never stops a process, and sends none a
signal.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil

from offload.errors import CapabilityError
from offload.text import one_line

__all__ = [
    "Process", "State", "children_of", "ending_by", "everybody", "found", "recorded_by", "refusal", "stuck_in_kernel",
    "version_of",
]  # fmt: skip

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*\w*", re.ASCII)
#: The interpreter as a mapped file: the program, or the library in it.
_MAPPED = re.compile(r"/(?:lib)?python(3)\.(\d+)[\w.-]*$", re.ASCII)
#: What the child of ``zprof run`` has in its command line.
RECORDED = "zprof.running.launch"
_MOST_MAPS_NBYTES = 8 << 20
_MOST_WORDS = 200
#: A wait for memory or a page is over sooner.
_PATIENCE_S, _LOOKS = 0.5, 5
_SYS_PTRACE = 1 << 19


class State(Enum):
    """How a process is there."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    #: Waits in the kernel and takes no signal, as for a disk or a network file system.
    UNINTERRUPTIBLE = "in an uninterruptible wait of the kernel"
    STOPPED = "stopped by a signal"
    TRACED = "stopped by a debugger"
    #: It has ended, and its parent has not asked how.
    ENDED = "ended"


_STATES = {"R": State.RUNNING, "S": State.SLEEPING, "I": State.SLEEPING, "D": State.UNINTERRUPTIBLE}
_STATES |= {"T": State.STOPPED, "t": State.TRACED, "Z": State.ENDED, "X": State.ENDED}


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it was when it was asked for.

    Attributes:
        inner: its number in its own PID namespace, which is what it calls itself.
        began_s: when it began, in seconds since 1970; another process of the same number began later.
        ending: how it ended, in words; empty while it runs, and where that may not be seen.
        kernel: the kernel's function it waits in, where it says.
        tracer: the process that debugs it, or 0.
    """

    pid: int
    inner: int
    parent: int
    name: str
    words: tuple[str, ...]
    user: int
    state: State
    began_s: float
    ending: str = ""
    kernel: str = ""
    tracer: int = 0

    @property
    def alive(self) -> bool:
        return self.state is not State.ENDED

    @property
    def command(self) -> str:
        """Its command line, short and on one line."""
        text = one_line(" ".join(_as_typed(self.words))) or one_line(self.name)
        return text if len(text) <= 120 else f"{text[:117]}..."

    @property
    def is_recorded(self) -> bool:
        """It is the script's process of ``zprof run``."""
        return any(RECORDED in word for word in self.words)

    @property
    def is_python(self) -> bool:
        """It runs an interpreter, as far as may be seen."""
        return version_of(self.pid) is not None or bool(self.words and _PYTHON.fullmatch(Path(self.words[0]).name))

    @property
    def visible(self) -> bool:
        """What it runs may be seen from here."""
        try:
            os.readlink(f"/proc/{self.pid}/exe")
        except OSError:
            return False
        return True

    def environment(self) -> Mapping[str, str]:
        """As it was when the program began; empty where it may not be read."""
        try:
            return dict(psutil.Process(self.pid).environ())
        except (psutil.Error, OSError):
            return {}

    def spent_s(self) -> float | None:
        """Seconds of CPU it has used."""
        try:
            used = psutil.Process(self.pid).cpu_times()
        except (psutil.Error, OSError):
            return None
        return float(used.user + used.system)

    def moved_nbytes(self) -> int | None:
        """Bytes it has had read from disks and network file systems, and written; None where that may not be seen.

        Not those of its calls: a recorder reads files of the kernel's, and sockets are how ranks wait.
        """
        try:
            counters = psutil.Process(self.pid).io_counters()
        except (psutil.Error, OSError, AttributeError):
            return None
        return int(counters.read_bytes + counters.write_bytes)


def found(pid: int) -> Process | None:
    """The process of that number; None where there is none."""
    folder = Path(f"/proc/{pid}")
    try:
        with psutil.Process(pid).oneshot():
            # Behind the name, which may hold anything.
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            about = psutil.Process(pid)
            status = _status(folder)
            return Process(
                pid=pid,
                inner=_last_number(status.get("NSpid", ""), pid),
                parent=int(fields[1]),
                name=about.name(),
                words=tuple(_words(about)),
                user=about.uids().real,
                state=_STATES.get(fields[0], State.SLEEPING),
                began_s=about.create_time(),
                ending=_ending(fields) if fields[0] in "ZX" else "",
                kernel=_kernel(folder) if fields[0] == "D" else "",
                tracer=_last_number(status.get("TracerPid", ""), 0),
            )
    except (psutil.Error, OSError, IndexError, ValueError, OverflowError):
        return None


def everybody() -> Iterator[Process]:
    """All processes that may be seen, without this one."""
    for pid in psutil.pids():
        if pid != os.getpid() and (one := found(pid)) is not None:
            yield one


def children_of(pid: int) -> list[Process]:
    """Those that it started and that are there, the oldest first."""
    try:
        below = [found(each.pid) for each in psutil.Process(pid).children()]
    except (psutil.Error, OSError):
        return []
    return sorted((each for each in below if each is not None), key=lambda each: (each.began_s, each.pid))


def recorded_by(process: Process) -> Process | None:
    """The script's process, of one that is ``zprof run`` and watches over it; else None."""
    return next((child for child in children_of(process.pid) if child.is_recorded), None)


def version_of(pid: int) -> tuple[int, int] | None:
    """(3, 14) of the interpreter that it has mapped; None where there is none, or that may not be seen."""
    with suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps.read(_MOST_MAPS_NBYTES).splitlines():
            match = _MAPPED.search(line)
            if match and " r-xp " in line:
                return int(match[1]), int(match[2])
    return None


def ending_by(number: int) -> str:
    """How a process ended that a signal ended, in words."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "of no name"
    return f"killed by signal {number} ({name})"


def stuck_in_kernel(process: Process) -> str:
    """Where in the kernel it waits without taking a signal, at several looks over half a second; "" where it does not.

    What cannot be stopped cannot be read, and py-spy would wait for it.
    """
    now: Process | None = process
    for _ in range(_LOOKS):
        if now is None or now.state is not State.UNINTERRUPTIBLE:
            return ""
        time.sleep(_PATIENCE_S / _LOOKS)
        now = found(process.pid)
    if now is None or now.state is not State.UNINTERRUPTIBLE:
        return ""
    where = f" ({now.kernel})" if now.kernel else ""
    return f"{now.state.value}{where}, as for a disk or a network file system"


def refusal(process: Process) -> CapabilityError:
    """Why this process's memory may not be read, in one line with the remedy."""
    who = f"pid {process.pid} ({process.command})"
    if _may_trace():
        why = "that the system does not allow it though this user may trace, as under a seccomp profile"
        return CapabilityError(
            f"{who}: expected to read its memory, found {why}; start the container with --cap-add SYS_PTRACE, or run zprof "
            "outside of it"
        )
    if process.user != os.geteuid():
        return CapabilityError(
            f"{who}: expected a process of {_name(os.geteuid())}, found one of {_name(process.user)}; run zprof as that user, "
            "or with sudo"
        )
    scope = _scope()
    if scope:
        may = {1: "only its parents may", 2: "only root may"}.get(scope, "nobody may until the machine is restarted")
        do = "run zprof with sudo, or give the container SYS_PTRACE"
        return CapabilityError(f"{who}: expected to read its memory, found kernel.yama.ptrace_scope = {scope}: {may}; {do}")
    return CapabilityError(
        f"{who}: expected to read its memory, found that it has more rights than this process; run zprof with sudo, or start "
        "the container with --cap-add SYS_PTRACE"
    )


def _as_typed(words: tuple[str, ...]) -> tuple[str, ...]:
    """What the user called, of a script under ``zprof run``, whose process is handed an order."""
    at = next((at for at, word in enumerate(words) if RECORDED in word), None)
    if at is None:
        return words
    try:
        order = json.loads(words[at + 1])
        return ("zprof run", *(["-m"] if order["module"] else []), str(order["target"]), *words[at + 2 :])
    except (ValueError, KeyError, IndexError, TypeError):
        return words


def _words(about: psutil.Process) -> list[str]:
    try:
        return list(about.cmdline())[:_MOST_WORDS]
    except (psutil.Error, OSError):
        return []


def _status(folder: Path) -> dict[str, str]:
    text = (folder / "status").read_text(encoding="utf-8", errors="replace")
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def _last_number(text: str, otherwise: int) -> int:
    words = text.split()
    return int(words[-1]) if words and words[-1].isdecimal() else otherwise


def _ending(fields: list[str]) -> str:
    """Field 52 of proc(5), of which two stand before the bracket: the status that `waitpid` would give."""
    status = int(fields[49]) if len(fields) > 49 and fields[49].isdecimal() else 0
    if status & 0x7F:
        return ending_by(status & 0x7F)
    return f"ended with exit code {status >> 8}"


def _kernel(folder: Path) -> str:
    with suppress(OSError):
        text = (folder / "wchan").read_text(encoding="utf-8", errors="replace").strip()
        return "" if text == "0" else one_line(text)
    return ""


def _scope() -> int:
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    return 0


def _may_trace() -> bool:
    """This process has the capability that counts for any other."""
    with suppress(OSError, ValueError):
        return bool(int(_status(Path("/proc/self"))["CapEff"], 16) & _SYS_PTRACE)
    return False


def _name(user: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"
