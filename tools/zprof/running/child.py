"""Owns the process a recorded script runs in: how it is started, which signals it is sent, and how it ended.

``zprof run`` starts one and waits. It never reads a trace, and leaves stdin, stdout and stderr to the script, but where a live
view shares the terminal with it.

Note: [Signals reach it once]
    A Ctrl-C of the terminal and torchrun's SIGTERM reach the whole process group, the child included, and are not passed on;
    what somebody sends to our process id reaches us alone, and is. ``si_code`` is above 0 for what the terminal sent; of other
    signals the `Witness` knows. They are blocked and taken from the queue, so that none is lost between two looks. Of a script
    that has left the group they are all passed on: under plain python it would have led the group, and could not have left.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zprof.running.witness import Witness

__all__ = ["PASSED_ON", "Child", "Ending", "Kills", "end_as"]

#: Signals that are passed on. Those of job control are left alone: the terminal sends them to the group.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: Runs `zprof.running.launch` with sys.path as plain python has it: what lies in the working folder shadows nothing of ours.
_BOOT = "import sys; sys.flags.safe_path or sys.path.pop(0); from zprof.running.launch import main; main()"


@dataclass(frozen=True, slots=True)
class Ending:
    """How the child ended.

    Attributes:
        code: its exit code; 0 where a signal ended it.
        signal: the signal that ended it, or 0.
        most_nbytes: the most resident memory it ever had.
    """

    code: int
    signal: int
    most_nbytes: int

    @property
    def failed(self) -> bool:
        """It did not end well."""
        return bool(self.code or self.signal)


class Child:
    """A running interpreter of `launch`; signals for it are taken from here on, until `wait` has returned an ending.

    Args:
        arguments: what `zprof.running.launch` is handed.
        outputs: file descriptor -> what the child has there instead of ours.
    """

    def __init__(self, arguments: Sequence[str], outputs: dict[int, int] | None = None) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*PASSED_ON, signal.SIGCHLD))
        # First: of a group the kernel sends a signal to the newest process first, so that both have it before this one.
        self._witness = Witness(PASSED_ON, arguments)
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, *_flags(), "-c", _BOOT, *arguments],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, here, there) for there, here in (outputs or {}).items()],
                setsigmask=self._mask,
                # Python ignores these for itself; the child shall find what any program finds.
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
            )
        except BaseException:
            self._witness.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            raise

    def wait(self, seconds: float) -> Ending | None:
        """Pass on what arrives until the child has ended, or about ``seconds`` have gone by: then None."""
        ended, status, used = os.wait4(self.pid, os.WNOHANG)
        if not ended:
            self._hear(signal.sigtimedwait((*PASSED_ON, signal.SIGCHLD), seconds))
            ended, status, used = os.wait4(self.pid, os.WNOHANG)
        if not ended:
            return None
        self._witness.close()
        while signal.sigtimedwait(PASSED_ON, 0) is not None:
            pass  # They were for the child, and would end us in its stead.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        code = os.waitstatus_to_exitcode(status)
        return Ending(max(code, 0), max(-code, 0), used.ru_maxrss << 10)

    def _hear(self, heard: signal.struct_siginfo | None) -> None:
        """See Note: [Signals reach it once]."""
        if heard is None:
            self._witness.look()
        elif heard.si_signo != signal.SIGCHLD:
            of_group = self._witness.got(heard.si_signo) or heard.si_code > 0
            if (not of_group or self._has_left()) and heard.si_pid != self.pid:
                os.kill(self.pid, heard.si_signo)

    def _has_left(self) -> bool:
        """The child is in another process group than we are."""
        return os.getpgid(self.pid) != os.getpgrp()


def _flags() -> list[str]:
    """Options of this interpreter (-X, -W, -O, ...) that a child of it should have too."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def end_as(ending: Ending) -> int:
    """The exit code to end with; where a signal ended the child, end by the same signal, as shells expect."""
    if not ending.signal:
        return ending.code
    sys.stdout.flush()
    sys.stderr.flush()
    # The child may have left a core; ours would be of no use to anybody.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if ending.signal not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(ending.signal, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (ending.signal,))
    os.kill(os.getpid(), ending.signal)
    return 128 + ending.signal


@dataclass(frozen=True, slots=True)
class Kills:
    """Processes the kernel has ended for want of memory so far, by whose want it was.

    Attributes:
        cgroup: cgroup folder -> (kills, limit in bytes or None), for this process's cgroup and those above it.
        machine: kills on the whole machine, or None where Linux does not say.
    """

    cgroup: dict[str, tuple[int, int | None]]
    machine: int | None

    @classmethod
    def read(cls, root: Path = Path("/")) -> Kills:
        """As it is now."""
        found: dict[str, tuple[int, int | None]] = {}
        for line in _text(root / "proc/self/cgroup").splitlines():
            number, _, fields = line.partition(":")
            controllers, _, path = fields.partition(":")
            if number == "0" and not controllers:
                for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                    found |= _along(root / mount, path, "memory.events", "memory.max")
            elif "memory" in controllers.split(","):
                found |= _along(root / "sys/fs/cgroup/memory", path, "memory.oom_control", "memory.limit_in_bytes")
        return cls(found, _count(_text(root / "proc/vmstat"), "oom_kill"))

    def since(self, before: Kills) -> tuple[str, int | None] | None:
        """(whose want, its limit) of a kill since ``before``, the narrowest cgroup first; None where there was none."""
        for folder, (count, limit) in self.cgroup.items():
            if count > before.cgroup.get(folder, (count, None))[0]:
                return f"cgroup {folder}", limit
        if self.machine is not None and before.machine is not None and self.machine > before.machine:
            return "the machine", None
        return None


def _along(mount: Path, path: str, events: str, limit: str) -> dict[str, tuple[int, int | None]]:
    """Of the cgroup at ``path`` and those above it, as far as ``mount`` shows them."""
    found: dict[str, tuple[int, int | None]] = {}
    here = Path(path.lstrip("/"))
    least: int | None = None
    # From the top, for what bounds a folder bounds all below it.
    for folder in reversed([mount / part for part in (here, *here.parents)]):
        bound = _text(folder / limit).strip()
        if bound.isdecimal() and int(bound) < 1 << 60:
            least = int(bound) if least is None else min(least, int(bound))
        count = _count(_text(folder / events), "oom_kill")
        if count is not None:
            found = {str(folder): (count, least), **found}
    return found


def _count(text: str, name: str) -> int | None:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
