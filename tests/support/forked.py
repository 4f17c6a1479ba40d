"""Programs run by interpreters that have imported torch and zhooks already: forks of the server that ranks are forks of.

Tests call it for programs whose own start is not what is tested; a fresh interpreter spends seconds on importing torch.
Working folder, environment, standard streams, arguments, warnings, exit code and what is called at exit are those of a
process of its own.  A signal sent to it, a limit on what it imports, or finalizers of objects at its exit need `subprocess`.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from tests.support.parent import end_with_parent
from tests.support.ranks import forks

Warn = tuple[Literal["default", "error", "ignore"], type[Warning]]
# For what hangs: no test may fail because the machine is busy.
LIMIT_S = 600.0
_REALLY_EXIT, _REALLY_SPAWN = os._exit, os.posix_spawn


@dataclass(frozen=True, slots=True)
class Program:
    """What a fork does: ``words`` are those after ``python``: -c CODE, -m MODULE or SCRIPT, and arguments.

    ``warn`` is the action and the category of -W.
    """

    words: Sequence[str]
    at: str
    environment: Mapping[str, str]
    warn: Warn | None = None


class Running:
    """A program that was started; `wait` for it."""

    def __init__(self, program: Program, given: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self._words = list(program.words)
        streams = [str(Path(self._folder.name, name)) for name in ("in", "out", "err")]
        Path(streams[0]).write_text(given, encoding="utf-8")
        self._streams = streams
        self._process = forks().Process(target=_serve, args=(program, streams), daemon=False)
        self._process.start()

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """End it at once; what it started may live on."""
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    def wait(self, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """How it ended and what it wrote.

        Raises:
            TimeoutExpired: it has not ended in time, and is killed.
        """
        self._process.join(limit_s)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self._words, limit_s)
        from tests.support.torches import without_chatter

        out, err = (without_chatter(Path(name).read_text(encoding="utf-8")) for name in self._streams[1:])
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._words, self._process.exitcode, out, err)


def start(
    *words: str,
    at: Path | None = None,
    given: str = "",
    warn: Warn | None = None,
    environment: Mapping[str, str] | None = None,
) -> Running:
    """Start ``python *words`` in the folder ``at`` with ``given`` at its stdin; other programs may be started meanwhile."""
    return Running(Program(words, str(at or Path.cwd()), dict(environment or os.environ), warn), given)


def python(
    *words: str,
    at: Path | None = None,
    given: str = "",
    warn: Warn | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run([sys.executable, *words], ...)`` answers."""
    return start(*words, at=at, given=given, warn=warn, environment=environment).wait()


def launch(
    world: int,
    *words: str,
    at: Path | None = None,
    warn: Warn | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """``python *words`` as `torchrun --nproc_per_node world` runs it: a process a rank, and how each has ended.

    The ranks meet at a store of this process, as they meet at their launcher's, so that no port can be taken meanwhile.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    told = dict(os.environ if environment is None else environment) | job
    running = [start(*words, at=at, warn=warn, environment=told | one) for one in own]
    return [one.wait() for one in running]


# ---- the fork's side


def _serve(program: Program, streams: list[str]) -> NoReturn:
    end_with_parent()
    for number, (name, mode) in enumerate(zip(streams, ("rb", "wb", "wb"), strict=True)):
        with Path(name).open(mode) as file:
            os.dup2(file.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(program.at)
    os.environ.clear()
    os.environ.update(program.environment)
    warnings.resetwarnings()
    if program.warn is not None:
        from tests.support.torches import ignore_its_own_warnings

        warnings.simplefilter(*program.warn)
        ignore_its_own_warnings()
    # As zprof run starts what it records: in a process of its own, but for the interpreter's start.
    os.posix_spawn = _spawned  # type: ignore[assignment]
    _end_as(lambda: _run(list(program.words)))


def _run(words: list[str]) -> None:
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec", dont_inherit=True), {"__name__": "__main__", "__builtins__": __builtins__})
    elif words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _spawned(path: str, argv: list[str], environment: Mapping[str, str], **how: Any) -> int:
    """``os.posix_spawn``; of the interpreter that `zprof.running.child` starts, a fork that does what its code does."""
    from zprof.running.child import _BOOT
    from zprof.running.launch import main

    if _BOOT not in argv:
        return _REALLY_SPAWN(path, argv, environment, **how)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    for _, here, there in how["file_actions"]:
        os.dup2(here, there)
    for number in how["setsigdef"]:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, how["setsigmask"])
    sys.argv = ["-c", *argv[argv.index(_BOOT) + 1 :]]
    _end_as(main)


def _end_as(program: Callable[[], object]) -> NoReturn:
    """End the process as the interpreter ends after ``program``, in the interpreter's order."""
    atexit._clear()
    code = 0
    try:
        program()
    except SystemExit as error:
        if isinstance(error.code, int):
            code = error.code & 0xFF
        elif error.code is not None:
            sys.stderr.write(f"{error.code}\n")
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    _REALLY_EXIT(code)
