"""Runs tests over a copy of this checkout in which one line is changed, in a fork of a process that has imported torch.

``__main__.py`` calls it.  The checkout itself is never changed.

Note: [Forks]
    Importing torch takes longer than most tests.  So this process imports torch and what tests need of others, and nothing of
    this repository that a fork could keep from before the change: what is here of it, a fork forgets before it imports the
    copy.  The ranks that tests start are forks of a server that the fork starts, so they import the copy, too.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.mutation.changes import Change
from tests.support.paths import ROOT

COPIED = ("benchmarks", "offload", "zhooks", "tools", "tests", "setup.cfg", "pyproject.toml")
OURS = frozenset({"offload", "zhooks", "zprof", "tests"})
#: What is changed may allocate or write without end.
MOST_NBYTES = 8 << 30
#: Times as long as the tests take on what is unchanged, and as many seconds on top.
PATIENCE, PATIENCE_S = 5.0, 30.0


@dataclass(frozen=True, slots=True)
class Tests:
    """What may find a change: the quick tests first, the others for what these let through."""

    quick: tuple[str, ...]
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What found a change: the first test that failed, or that there was no end; None where nothing has."""

    change: Change
    found_by: str | None


class Copy:
    """A copy of the checkout in a folder of its own; one run at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._limits: dict[tuple[str, ...], float] = {}
        self._changed = 0
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, folder / name)

    def measure(self, tests: Tests) -> None:
        """Run them on what is unchanged: how long they take.

        Raises:
            RuntimeError: one of them fails.
        """
        for chosen in (tests.quick, tests.others):
            if chosen:
                # The first run compiles modules for those that follow.
                began = time.monotonic()
                found = self._run(chosen, None)
                if found is not None:
                    raise RuntimeError(f"{found} fails without any change")
                self._limits[chosen] = PATIENCE * (time.monotonic() - began) + PATIENCE_S

    def judge(self, change: Change, tests: Tests) -> Verdict:
        """Which test finds the change."""
        path = self._folder / change.path
        before = path.read_bytes()
        path.write_text(change.source, encoding="utf-8")
        # Compiled modules are known by time and size of their source, and a change may leave both.
        self._changed += 1
        os.utime(path, (self._changed, self._changed))
        try:
            for chosen in (tests.quick, tests.others):
                if chosen and (found := self._run(chosen, self._limits[chosen])) is not None:
                    return Verdict(change, found)
            return Verdict(change, None)
        finally:
            path.write_bytes(before)

    def _run(self, chosen: Sequence[str], limit_s: float | None) -> str | None:
        log = self._folder / "log"
        fork = os.fork()
        if fork == 0:
            _test(self._folder, log, chosen, keep_compiled=limit_s is None)
        ended = _ended(fork, limit_s)
        if ended is None:
            return "no end"
        if os.WIFEXITED(ended) and os.WEXITSTATUS(ended) == pytest.ExitCode.OK:
            return None
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return failed[0].partition(" - ")[0] if failed else f"ended with {ended}: {lines[-1:]}"


def _test(folder: Path, log: Path, chosen: Sequence[str], *, keep_compiled: bool) -> None:
    """The fork's side; it never returns."""
    try:
        os.setsid()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        for kind in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE):
            resource.setrlimit(kind, (MOST_NBYTES, resource.getrlimit(kind)[1]))
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        sys.path[:] = [str(folder), str(folder / "tools"), *(entry for entry in sys.path if not _ours(entry))]
        sys.path_importer_cache.clear()
        if not keep_compiled:
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
        ended = int(pytest.main([*options, *chosen]))
        sys.stdout.flush()
        os._exit(ended)
    finally:
        os._exit(70)


def _ours(entry: str) -> bool:
    return entry == "" or Path(entry).resolve() in (ROOT, ROOT / "tools")


def _ended(fork: int, limit_s: float | None) -> int | None:
    """How it ended; None where it had to be killed, with all it started."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    status: int | None = None
    while status is None:
        pid, ended = os.waitpid(fork, os.WNOHANG)
        if pid:
            status = ended
        elif deadline is not None and time.monotonic() > deadline:
            break
        else:
            time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(fork, signal.SIGKILL)
    if status is None:
        os.waitpid(fork, 0)
    return status


torch.set_num_threads(1)
