"""A cgroup with a memory limit of its own below that of the tests, where one may be made.

Tests of what the kernel's killer does put processes into it. It skips the test where cgroups cannot be made, and removes what
it made.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.waiting import soon
from zprof.running.child import Kills


@contextmanager
def cgroup_of(nbytes: int) -> Iterator[Path]:
    """Its folder; whose file "cgroup.procs" takes the pid of who shall be in it."""
    own = next(iter(Kills.read().cgroup), None)
    folder = Path(own or "/nowhere") / f"zprof-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error.strerror}")
    try:
        limit = next((folder / name for name in ("memory.max", "memory.limit_in_bytes") if (folder / name).exists()), None)
        if limit is None:
            pytest.skip("the cgroup made here has no memory controller")
        limit.write_text(str(nbytes))
        yield folder
    finally:
        # Workers whose parent was ended may wait for it for ever; those that are ended are in it until they are gone.
        soon(lambda: not _ended(folder))
        folder.rmdir()


def _ended(folder: Path) -> list[str]:
    """Who is in it still; each is sent its end."""
    left = (folder / "cgroup.procs").read_text().split()
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return left
