"""Owns what is known of a process under the recorded one whose death ended the script: which it was, and by which signal.

`running.launch` asks it of the error that a script ends by, and leaves the answer in the trace; `explanation` reads it there.
It starts and ends no process, and never imports torch: what nobody says stays unknown.
"""

from __future__ import annotations

import re
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zprof.recording.recorder import Recorder
    from zprof.trace.reader import Trace

__all__ = ["DIED", "Death", "death_of", "recorded_death", "write_death"]

#: The note.
DIED = "child died"
_LOADER = re.compile(r"DataLoader worker \(pid(?:\(s\))? (\d+)[\d, ]*\) (?:exited unexpectedly|is killed by signal: ([\w ]+))")
#: torch says what strsignal(3) does.
_SIGNALS = {"Killed": signal.SIGKILL, "Bus error": signal.SIGBUS, "Segmentation fault": signal.SIGSEGV}
_MOST_TEXT = 500
#: What somebody gets who waited for an answer.
_CUT_OFF = (EOFError, ConnectionError)


@dataclass(frozen=True, slots=True)
class Death:
    """A process that was ended.

    Attributes:
        name: what it was, such as "loader worker".
        signal: that ended it; 0 where nobody says, or it exited by itself.
        message: the error's own words.
    """

    pid: int
    name: str
    signal: int
    message: str

    @property
    def who(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid else self.name


def death_of(error: BaseException) -> Death | None:
    """Whose death ``error`` is about; None where it is about something else."""
    text = str(error)[:_MOST_TEXT]
    found = _LOADER.search(text) if isinstance(error, RuntimeError) else None
    if found is not None:
        pid = int(found[1])
        by = next((number for words, number in _SIGNALS.items() if (found[2] or "").startswith(words)), 0)
        return Death(pid, "loader worker", int(by) or _signal_of(pid), text)
    if type(error).__name__ == "ProcessExitedException" and type(error).__module__.startswith("torch."):
        pid, name = getattr(error, "error_pid", 0), getattr(error, "signal_name", None)
        by = getattr(signal, str(name), 0)
        return Death(pid if type(pid) is int else 0, "a process of torch.multiprocessing.spawn", int(by), text)
    code = getattr(error, "returncode", None)
    if type(error).__name__ == "CalledProcessError" and type(code) is int and code < 0:
        return Death(0, "a command", -code, text)
    if isinstance(error, _CUT_OFF) or type(error).__name__ == "BrokenProcessPool":
        # The other end of a connection is gone: most likely one that was ended, though the error does not say so.
        for pid, (name, number) in _ended().items():
            if number in (signal.SIGKILL, signal.SIGBUS):
                return Death(pid, name, number, text)
    return None


def _signal_of(pid: int) -> int:
    """By which signal a process of this one's multiprocessing has ended; 0 where it does not say."""
    return _ended().get(pid, ("", 0))[1]


def _ended() -> dict[int, tuple[str, int]]:
    """Those that signals have ended: pid -> (name, signal)."""
    known: Any = getattr(sys.modules.get("multiprocessing.process"), "_dangling", ())
    found = {}
    with suppress(RuntimeError):
        for process in tuple(known):
            with suppress(ValueError, AttributeError, AssertionError):
                if process.pid and (process.exitcode or 0) < 0:
                    found[process.pid] = (str(process.name)[:100], -process.exitcode)
    return found


def write_death(recorder: Recorder, death: Death) -> None:
    """Put it into the trace."""
    recorder.note(DIED, asdict(death))


def recorded_death(trace: Trace) -> Death | None:
    """The last one that a trace has a note of."""
    notes = trace.notes(DIED)
    if not notes:
        return None
    values = [notes[-1].body.get(name) for name in ("pid", "name", "signal", "message")]
    if [type(value) for value in values] != [int, str, int, str]:
        return None
    return Death(*values)  # type: ignore[arg-type]
