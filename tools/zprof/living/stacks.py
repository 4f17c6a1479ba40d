"""Owns the stacks of a running process: every thread's frames, read from outside, or by the process itself on Python 3.14.

`zprof attach` and `zprof hang` call `stacks_of`. py-spy reads them where it is installed, which changes nothing in the process;
it never guesses: what cannot be read is an error that says why and what to do.

Note: [Who can see what]
    py-spy reads the interpreter's memory, so it sees a thread that waits in C for good, and with ``native`` the C frames it
    waits in. What `sys.remote_exec` hands over runs at the next line of Python that the main thread comes to: of a process that
    hangs in C it sees nothing, and the request stays until it does.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import CapabilityError, ZhooksError
from offload.regular_files import read_regular
from offload.text import one_line
from zprof.living.processes import Process, State, found, refusal

__all__ = ["OWN_THREADS", "Frame", "Stacks", "Thread", "py_spy", "sampled", "stacks_of"]

#: The recorder's, by name.
OWN_THREADS = ("zprof", "zprof-silence", "zprof-rewriting", "zprof-end")
#: A dump takes some hundredths of a second; C frames are looked up in the libraries' symbols, which takes seconds.
_LONGEST_S, _LONGEST_NATIVE_S = 20.0, 60.0
_MOST_NBYTES, _MOST_SAMPLED_NBYTES = 32 << 20, 1 << 30
_MOST_THREADS, _MOST_FRAMES, _MOST_TEXT = 1024, 512, 400
#: What py-spy says where the system does not let it read, in any release so far.
_DENIED = ("permission denied", "operation not permitted", "eperm", "eacces", "failed to suspend")
_NO_PYTHON = ("failed to find python version", "failed to find a python", "unsupported version")


@dataclass(frozen=True, slots=True)
class Frame:
    """A call: ``line`` is 0 and ``native`` true for one of C, whose file is a library."""

    file: str
    function: str
    line: int
    native: bool = False


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread of Python's, with its frames, the innermost first.

    Attributes:
        number: the system's; 0 where it is not known.
        active: it was on a CPU; None where that was not seen.
    """

    name: str
    number: int
    frames: tuple[Frame, ...]
    active: bool | None = None


@dataclass(frozen=True, slots=True)
class Stacks:
    """All threads, the main one first; ``source`` says who read them."""

    threads: tuple[Thread, ...]
    source: str

    @property
    def main(self) -> Thread | None:
        return self.threads[0] if self.threads else None


def py_spy() -> str | None:
    """The program: beside this interpreter, or on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() and os.access(beside, os.X_OK) else shutil.which("py-spy")


def stacks_of(process: Process, *, native: bool = False) -> Stacks:
    """Every thread of ``process``.

    Raises:
        CapabilityError: it may not be read here, or nothing here can.  ZhooksError: it is gone, or has no interpreter.
    """
    program = py_spy()
    if program is not None:
        return _by_py_spy(program, process, native)
    from zprof.living.remote import remote_stacks, why_not

    lacks = why_not(process)
    if lacks or native:
        raise CapabilityError(
            f"pid {process.pid}: expected py-spy to read its stacks, found none{'' if native else f', and {lacks}'}; "
            "pip install 'zhooks[attach]'"
        )
    threads = remote_stacks(process)
    return Stacks(_in_order(threads, process), "sys.remote_exec")


def sampled(process: Process, seconds: float) -> bytes:
    """The stacks of its threads, a hundred times a second for so long, as a file for speedscope.

    Raises:
        CapabilityError: it may not be read here, or there is no py-spy.  ZhooksError: it is gone, or has no interpreter.
    """
    program = py_spy()
    if program is None:
        raise CapabilityError(f"pid {process.pid}: expected py-spy to sample it, found none; pip install 'zhooks[attach]'")
    with tempfile.TemporaryDirectory(prefix="zprof-") as folder:
        # Its time is whole seconds; it is ended sooner by the signal that a Ctrl-C is, and then writes what it has.
        words = [program, "record", "--format", "speedscope", "--output", f"{folder}/sampled.json", "--threads"]
        words += ["--full-filenames", "--pid", str(process.pid), "--duration", str(math.ceil(seconds))]
        done = _run(words, process, seconds + _LONGEST_NATIVE_S)
        if done.returncode:
            raise _problem(process, done.stderr.decode(errors="replace"))
        return read_regular(f"{folder}/sampled.json", _MOST_SAMPLED_NBYTES)


def _run(words: Sequence[str], process: Process, longest_s: float) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=longest_s,
            env={**os.environ, "RUST_BACKTRACE": "0", "NO_COLOR": "1"},
        )
    except subprocess.TimeoutExpired:
        raise ZhooksError(
            f"pid {process.pid}: expected an answer of py-spy within {longest_s:.0f} s, found none"
        ) from None
    except OSError as error:
        raise CapabilityError(f"{words[0]}: cannot be run: {error.strerror}; pip install 'zhooks[attach]'") from None


def _by_py_spy(program: str, process: Process, native: bool) -> Stacks:
    still = process.state in (State.STOPPED, State.TRACED) or process.tracer
    words = [program, "dump", "--json", "--pid", str(process.pid)]
    # A process that is held already cannot be held again, and does not run on meanwhile.
    words += ["--nonblocking"] if still else ["--native"] if native else []
    done = _run(words, process, _LONGEST_NATIVE_S if native else _LONGEST_S)
    if done.returncode:
        raise _problem(process, done.stderr.decode(errors="replace"))
    if len(done.stdout) > _MOST_NBYTES:
        raise ZhooksError(f"pid {process.pid}: expected stacks of at most {_MOST_NBYTES >> 20} MiB, found more")
    try:
        threads = [_thread(each) for each in json.loads(done.stdout)[:_MOST_THREADS]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        kind = type(error).__name__
        raise ZhooksError(f"pid {process.pid}: expected stacks from py-spy, found another format ({kind}: {error})") from None
    return Stacks(_in_order(threads, process), "py-spy")


def _problem(process: Process, said: str) -> ZhooksError:
    now = found(process.pid)
    if now is None or not now.alive:
        return ZhooksError(f"pid {process.pid}: expected a running process, found that it has just ended")
    lowered = said.lower()
    if any(word in lowered for word in _DENIED):
        return refusal(process)
    if any(word in lowered for word in _NO_PYTHON):
        return ZhooksError(f"pid {process.pid}: expected a Python process, found {process.command}")
    first = one_line(said.partition("\n\n")[0].removeprefix("Error: "))
    return ZhooksError(f"pid {process.pid}: its stacks cannot be read: {first[:_MOST_TEXT] or 'py-spy does not say why'}")


def _thread(fields: dict[str, Any]) -> Thread:
    frames = [
        Frame(_text(each["filename"]), _text(each["name"]), int(each["line"]), each.get("module") is not None)
        for each in fields["frames"][:_MOST_FRAMES]
    ]
    number = fields.get("os_thread_id")
    active = fields.get("active")
    return Thread(
        _text(fields.get("thread_name") or ""),
        number if type(number) is int else 0,
        tuple(frames),
        active if type(active) is bool else None,
    )


def _in_order(threads: Sequence[Thread], process: Process) -> tuple[Thread, ...]:
    """The main thread first: the one with the process's own number, or by its name."""
    numbers = {process.pid, process.inner}
    return tuple(sorted(threads, key=lambda each: (each.number not in numbers, each.name != "MainThread", each.number)))


def _text(value: object) -> str:
    text = one_line(str(value))
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."
