"""Runs tests over a copy of this checkout in which one line is changed, in a fork of a process that has imported torch.

``__main__.py`` calls it.  The checkout itself is never changed.

Note: [Forks]
    Importing torch takes longer than most tests.  So this process imports torch and what tests need of others, and nothing of
    this repository that a fork could keep from before the change: what is here of it, a fork forgets before it imports the
    copy.  The ranks that tests start are forks of a server, and that is a fork of this fork before it has imported anything of
    ours: a server that is started as usual would spend longer on importing torch than most changes take.
"""

from __future__ import annotations

import itertools
import math
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from multiprocessing import util
from pathlib import Path

import pytest
import torch

from tests.mutation.changes import Change
from tests.mutation.reach import Marked, Reach, Watch, marked, read
from tests.support.paths import ROOT
from tests.support.ranks import PRELOADED

COPIED = ("benchmarks", "offload", "zhooks", "tools", "tests", "setup.cfg", "pyproject.toml")
OURS = frozenset({"offload", "zhooks", "zprof", "tests"})
#: What is changed may allocate or write without end.
MOST_NBYTES = 8 << 30
#: Of the processor, for one process: times as long as the tests take on what is unchanged, and as many seconds on top.
PATIENCE, PATIENCE_S = 5.0, 60.0
#: Of the clock, as many times more: what waits for ever uses no processor, and a busy machine is slow.
BUSY = 10.0
_times = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What found a change: the first test that failed, or that there was no end; None where none of those ``tried`` has."""

    change: Change
    tried: int
    found_by: str | None


class Copy:
    """A copy of the checkout, or of another copy with what that has compiled, in a folder of its own; one run at a time."""

    def __init__(self, folder: Path, of: Path = ROOT) -> None:
        self.folder = folder
        for name in COPIED:
            if (of / name).is_dir():
                shutil.copytree(of / name, folder / name, ignore=shutil.ignore_patterns("__pycache__") if of == ROOT else None)
            else:
                shutil.copy2(of / name, folder / name)

    def measure(self, sources: Sequence[str], tests: Sequence[str]) -> Reach:
        """Run the tests on what is unchanged: which of them run which lines, and how long they take.

        Raises:
            RuntimeError: one of them fails.
        """
        mapping, told = self.folder / "marks", self.folder / "ran"
        found: dict[str, Marked] = {}
        with ExitStack() as changed:
            for path in sources:
                before = sum(one.count for one in found.values())
                found[path] = marked((ROOT / path).read_text(encoding="utf-8"), before, mapping)
                changed.enter_context(self._with(path, found[path].source))
            mapping.write_bytes(bytes(1 + sum(one.count for one in found.values())))
            failed = self._run(tests, math.inf, math.inf, (mapping, told))
        if failed is not None:
            raise RuntimeError(f"{failed} fails without any change")
        return Reach(found, read(told))

    def judge(self, change: Change, reach: Reach) -> Verdict:
        """Which test finds the change, of those that run what it changes."""
        ran = reach.of(change.path, change.line)
        if not ran:
            return Verdict(change, 0, None)
        limit_s = PATIENCE * sum(one.seconds for one in ran) + PATIENCE_S
        silent_s = BUSY * max(one.seconds for one in reach.ran) + PATIENCE_S
        with self._with(change.path, change.source):
            return Verdict(change, len(ran), self._run([one.name for one in ran], limit_s, silent_s))

    @contextmanager
    def _with(self, path: str, source: str) -> Iterator[None]:
        """Another source in place of a file's own."""
        file = self.folder / path
        before = file.read_bytes()
        file.write_text(source, encoding="utf-8")
        # Compiled modules are known by time and size of their source, and a change may leave both.
        changed = next(_times)
        os.utime(file, (changed, changed))
        try:
            yield
        finally:
            file.write_bytes(before)

    def _run(self, tests: Sequence[str], limit_s: float, silent_s: float, marks: tuple[Path, Path] | None = None) -> str | None:
        """The first test that fails.

        Args:
            limit_s: for all of them, of the processor.
            silent_s: for ranks to answer, by the clock: they wait for each other where one of them is wrong.
            marks: the file of marks, and where tests are to be measured into.
        """
        log = self.folder / "log"
        fork = os.fork()
        if fork == 0:
            _test(self.folder, log, tests, limit_s, silent_s, marks)
        ended = _ended(fork, BUSY * limit_s)
        if ended is None:
            return "no end"
        if os.WIFEXITED(ended) and os.WEXITSTATUS(ended) == pytest.ExitCode.OK:
            return None
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return failed[0].partition(" - ")[0] if failed else f"ended with {ended}: {lines[-1:]}"


def _test(
    folder: Path, log: Path, tests: Sequence[str], limit_s: float, silent_s: float, marks: tuple[Path, Path] | None
) -> None:
    """The fork's side; it never returns."""
    try:
        os.setsid()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        for kind in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE):
            resource.setrlimit(kind, (MOST_NBYTES, resource.getrlimit(kind)[1]))
        if math.isfinite(limit_s):
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), resource.getrlimit(resource.RLIMIT_CPU)[1]))
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        sys.path[:] = [str(folder), str(folder / "tools"), *(entry for entry in sys.path if not _ours(entry))]
        sys.path_importer_cache.clear()
        # The run that measures compiles modules for those that follow.
        if marks is None:
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        _fork_server(silent_s)
        options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
        if marks is not None:
            mapping, told = marks
            watch = Watch(mapping)
            ended = int(pytest.main([*options, *tests], plugins=[watch]))
            watch.write(told)
        else:
            # Some of a function's cases are marked as slow by what the others are: those here have been chosen among all.
            ended = int(pytest.main([*options, "-m", "", *tests]))
        sys.stdout.flush()
        os._exit(ended)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(70)


def _fork_server(silent_s: float) -> None:
    """Start the server of ranks as a fork of this process."""
    from tests.support import ranks

    ranks.LIMIT_S = min(ranks.LIMIT_S, silent_s)
    started = util.spawnv_passfds

    def forked(path: bytes, words: Sequence[str], kept: Sequence[int]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                # What it would not have if it were started: it ends when nobody holds the other end of a pipe.
                for begin, end in pairwise([2, *sorted(kept), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]):
                    os.closerange(begin + 1, end)
                exec(words[-1], {})
            finally:
                os._exit(1)
        return pid

    util.spawnv_passfds = forked  # type: ignore[assignment]
    try:
        ranks.forks()
    finally:
        util.spawnv_passfds = started


def _ours(entry: str) -> bool:
    return entry == "" or Path(entry).resolve() in (ROOT, ROOT / "tools")


def _ended(fork: int, limit_s: float) -> int | None:
    """How it ended; None where it had to be killed, with all it started."""
    deadline = time.monotonic() + limit_s
    status: int | None = None
    while status is None:
        pid, ended = os.waitpid(fork, os.WNOHANG)
        if pid:
            status = ended
        elif time.monotonic() > deadline:
            break
        else:
            time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(fork, signal.SIGKILL)
    if status is None:
        os.waitpid(fork, 0)
    return status


torch.set_num_threads(1)
for _name in PRELOADED:
    # What is a plugin of pytest's, too, pytest wants to import itself.
    if _name not in {*OURS, "hypothesis"}:
        import_module(_name)
