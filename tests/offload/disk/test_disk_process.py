"""The scratch file and the lives of processes: killed, ended, forked, and who may clean up after whom."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload.disk import DiskFile, Owner
from offload.disk.disk_tier import ALIGN, CHECK
from offload.disk.scratch import remove_stale
from offload.errors import TierError
from offload.events import Bus, Recorder
from offload.pages import aligned
from tests.support.forked import python

OPEN = """
import sys, os, signal
from pathlib import Path
from offload.pages import aligned
from offload.disk import DiskFile
from offload.disk.disk_tier import CHECK
disk = DiskFile(Path(sys.argv[1]))
extent = disk.allocate(4 * CHECK, "b")
disk.write(extent, aligned(4 * CHECK).fill_(7))
"""
KILLED = OPEN + "os.kill(os.getpid(), signal.SIGKILL)"
RAISED = OPEN + "raise SystemExit(3)"
WAITING = OPEN + "print(disk.path, flush=True); sys.stdin.read()"


def stale(folder: Path, owner: Owner, *, name: str = "zhooks-r0-1-aa.scratch") -> Path:
    path = folder / name
    path.write_bytes(owner.page() + bytes(ALIGN))
    return path


def gone() -> Owner:
    """This process, had it started earlier: over."""
    here = Owner.here()
    return dataclasses.replace(here, started_ticks=here.started_ticks - 1)


def test_a_killed_process_leaves_a_file_that_the_next_removes_and_says_so(tmp_path: Path) -> None:
    assert python("-c", KILLED, str(tmp_path)).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    nbytes = left.stat().st_size
    owner = Owner.of_page(left.read_bytes()[:ALIGN])
    assert owner is not None and owner.is_over()
    bus, recorder = Bus(), Recorder()
    bus.attach(recorder)
    disk = DiskFile(tmp_path, bus=bus)
    assert list(tmp_path.iterdir()) == [disk.path]
    assert [(event.what, event.key, event.nbytes) for event in recorder.events] == [("disk stale", str(left), nbytes)]
    disk.close()


def test_a_process_that_ends_without_closing_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RAISED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_living_processs_file_is_never_touched(tmp_path: Path) -> None:
    mine = DiskFile(tmp_path)
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        assert sorted(tmp_path.iterdir()) == sorted([mine.path, theirs])
        DiskFile(tmp_path).close()
        assert theirs.exists() and mine.path.exists()
        other.communicate()
    assert other.returncode == 0 and list(tmp_path.iterdir()) == [mine.path]
    mine.close()


def test_only_files_that_are_certainly_stale_are_removed(tmp_path: Path) -> None:
    here = Owner.here()
    old_boot = dataclasses.replace(here, boot="0" * 8)
    removed = [
        stale(tmp_path, gone(), name="zhooks-r0-1-01.scratch"),
        stale(tmp_path, old_boot, name="zhooks-r0-1-02.scratch"),
    ]
    kept = [
        stale(tmp_path, here, name="zhooks-r0-1-03.scratch"),
        stale(tmp_path, dataclasses.replace(gone(), host="another"), name="zhooks-r0-1-04.scratch"),
        stale(tmp_path, dataclasses.replace(gone(), namespace="pid:[1]"), name="zhooks-r0-1-05.scratch"),
        stale(tmp_path, gone(), name="somebody.else"),
    ]
    assert [path for path, _ in remove_stale(tmp_path)] == removed
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_file_of_an_unknown_format_is_never_touched(tmp_path: Path) -> None:
    page = gone().page()
    texts = {
        "empty": b"",
        "cut": page[:100],
        "zeros": bytes(ALIGN),
        "later": page.replace(b"scratch 1", b"scratch 2").ljust(ALIGN, b"\0"),
        "words": b"zhooks scratch 1\nnot json\n".ljust(ALIGN, b"\0"),
        "list": b"zhooks scratch 1\n[1, 2]\n".ljust(ALIGN, b"\0"),
        "deep": (b"zhooks scratch 1\n" + b"[" * 4000).ljust(ALIGN, b"\0"),
        "types": page.replace(b'"pid": ', b'"pid": 0.').ljust(ALIGN, b"\0")[:ALIGN],
        "bytes": b"zhooks scratch 1\n\xff\xfe\n".ljust(ALIGN, b"\0"),
    }
    for name, text in texts.items():
        (tmp_path / f"zhooks-{name}.scratch").write_bytes(text)
    (tmp_path / "zhooks-folder.scratch").mkdir()
    os.mkfifo(tmp_path / "zhooks-pipe.scratch")
    target = stale(tmp_path, gone(), name="target")
    (tmp_path / "zhooks-link.scratch").symlink_to(target)
    before = sorted(tmp_path.iterdir())
    assert remove_stale(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_somebody_has_locked_is_never_touched(tmp_path: Path) -> None:
    path = stale(tmp_path, gone())
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert remove_stale(tmp_path) == []
    assert remove_stale(tmp_path) == [(path, 2 * ALIGN)]


def test_an_owner_is_read_back_from_its_page() -> None:
    here = Owner.here()
    assert Owner.of_page(here.page()) == here
    assert len(here.page()) == ALIGN and not here.is_over() and gone().is_over()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_neither_uses_nor_removes_its_parents_file(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path)
    extent = disk.allocate(CHECK, "b")
    source = aligned(CHECK).fill_(3)
    disk.write(extent, source).wait()
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            lambda: disk.allocate(1, "late"),
            lambda: disk.write(extent, source),
            lambda: disk.free(extent),
        ):
            try:
                use()
            except TierError as error:
                refused += "Expected process" in str(error)
        disk.close()
        disk._discard()
        own = DiskFile(tmp_path)
        own.write(own.allocate(CHECK, "own"), source).wait()
        own.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert disk.path.exists()
    disk.read(extent, into := aligned(CHECK)).wait()
    assert torch.equal(into, source)
    disk.close()
