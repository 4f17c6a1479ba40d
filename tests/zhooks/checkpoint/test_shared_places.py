"""Checkpoints where others are at work: the same path, a folder that everybody can write to, a folder that is somebody's own.

pytest runs it.  What another user would do, root does in his name.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.regular_files import open_regular
from offload.shards.folder import Folder
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.resuming import Run

SMALL = {"stage": 3, "units": {"min_numel": 0}}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")
STRANGER = 4711
#: What a shard file is opened by.
READER = "offload.shards.file.open_regular"


def given_away(path: Path) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, STRANGER, STRANGER, follow_symlinks=False)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def run() -> Run:
    return Run(SMALL)


# ---- a folder for everybody


@as_root
@pytest.mark.parametrize("left", ["old", "tmp and old"])
def test_what_another_user_left_in_a_folder_for_everybody_is_not_loaded(shared: Path, run: Run, left: str) -> None:
    token = "0123456789abcdef"
    run.save(shared / "theirs", extra={"who": "stranger"})
    found = re.search(r'"token": ?"([0-9a-f]{16})"', (shared / "theirs" / "manifest.json").read_text())
    assert found
    token = found[1]
    if left == "old":
        (shared / "theirs").rename(shared / f"run.old-{token}")
    else:
        (shared / "theirs").rename(shared / f"run.tmp-{token}")
        (shared / f"run.old-{token}").mkdir()
    assert run.load(shared / "run") == {"who": "stranger"} and zhooks.latest(shared) == shared / "run"
    for each in shared.iterdir():
        given_away(each)
    assert zhooks.latest(shared) is None
    with pytest.raises(zhooks.CheckpointError, match=rf"found nothing there but what another user \(uid {STRANGER}\) left"):
        run.load(shared / "run")
    run.save(shared / "run", extra={"who": "me"})
    assert run.load(shared / "run") == {"who": "me"} and zhooks.latest(shared) == shared / "run"


@as_root
def test_the_newest_in_a_folder_for_everybody_is_this_users_own(shared: Path, run: Run) -> None:
    run.save(shared / "step-1")
    run.save(shared / "step-2")
    given_away(shared / "step-2")
    assert zhooks.latest(shared) == shared / "step-1"
    shared.chmod(0o755)
    assert zhooks.latest(shared) == shared / "step-2"


@as_root
@pytest.mark.parametrize("dangling", [False, True])
def test_another_users_link_in_a_folder_for_everybody_is_named_as_one(
    shared: Path, tmp_path: Path, run: Run, dangling: bool
) -> None:
    if not dangling:
        (tmp_path / "mine").mkdir()
    (shared / "run").symlink_to(tmp_path / "mine")
    given_away(shared / "run")
    words = rf"found a link at \S+ that another user \(uid {STRANGER}\) made"
    for verb in (lambda: run.save(shared / "run"), lambda: run.load(shared / "run"), lambda: zhooks.latest(shared / "run")):
        with pytest.raises(zhooks.CheckpointError, match=words):
            verb()
    with pytest.raises(zhooks.CheckpointError, match=words):
        run.attachment.save_full(shared / "run" / "model.safetensors")
    with pytest.raises(zhooks.PolicyError, match=rf"as \[disk\] path.*{words}"):
        Run({**SMALL, "optimizer": {"tier": "disk"}, "disk": {"path": str(shared / "run")}})
    assert not (tmp_path / "mine").exists() or not os.listdir(tmp_path / "mine")


def test_a_loop_of_links_is_named_as_one(tmp_path: Path, run: Run) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(zhooks.CheckpointError, match="found a loop of links"):
        run.save(tmp_path / "a")


# ---- folders that are somebody's own


@pytest.mark.parametrize("given", [".", "..", "here", "home"])
def test_a_folder_that_others_rely_on_is_not_replaced(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    here = tmp_path / "above" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    target = {"here": str(here), "home": str(tmp_path / "home")}.get(given, given)
    before = os.stat(Path(target))
    for wait in (True, False):
        with pytest.raises(zhooks.CheckpointError, match=r"a folder that a new one may replace, found .*Name a folder in it"):
            run.attachment.save(target, run.optimizer, wait=wait)
    assert os.path.samestat(os.stat(target), before) and Path.cwd() == here
    run.save(Path("inside"))
    assert (here / "inside" / "manifest.json").exists()


def test_a_mount_point_is_not_replaced(run: Run) -> None:
    with pytest.raises(zhooks.CheckpointError, match="found a mount point"):
        run.save(Path("/dev/shm") if os.path.ismount("/dev/shm") else Path("/proc"))


# ---- others at the same path


def replacing(run: Run, path: Path, times: int) -> Callable[..., Any]:
    """Opening a shard file, before which another process has saved there, so often."""
    left = [times]

    def open_later(name: Path, **how: Any) -> int:
        if left[0] and threading.current_thread() is threading.main_thread():
            left[0] -= 1
            run.attachment.save(path, run.optimizer, objects=run.objects, extra={"saved": times - left[0]})
        return open_regular(name, **how)

    return open_later


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_loaded_anew(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Run(SMALL, seed=3)
    run.save(tmp_path / "run", extra={"saved": 0})
    monkeypatch.setattr(READER, replacing(other, tmp_path / "run", 3))
    assert run.load(tmp_path / "run") == {"saved": 3}
    assert all(map(torch.equal, run.everything(), other.everything()))


def test_damage_is_not_looked_at_twice(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(tmp_path / "run")
    path = tmp_path / "run" / "rank-00000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    opened: list[Path] = []
    monkeypatch.setattr(READER, lambda name: opened.append(name) or open_regular(name))
    with pytest.raises(zhooks.CheckpointError, match="whose checksum does not match"):
        run.load(tmp_path / "run")
    assert len(opened) == 1


@pytest.mark.parametrize("when", ["before the mark", "while the mark is written"])
def test_a_save_whose_new_folder_another_takes_for_a_leftover_goes_on(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    other, real, done = Run(SMALL, seed=3), Folder.create, list[str]()

    def create(self: Folder, name: str, data: bytes) -> None:
        if not done and name.startswith("saving-"):
            done.append(name)
            if when == "before the mark":
                other.attachment.save(tmp_path / "run", other.optimizer)
            else:
                os.close(os.open(name, os.O_CREAT | os.O_EXCL, dir_fd=self.fd))
                other.attachment.save(tmp_path / "run", other.optimizer)
                os.unlink(name, dir_fd=self.fd)
        real(self, name, data)

    monkeypatch.setattr(Folder, "create", create)
    run.save(tmp_path / "run", extra={"who": "me"})
    assert done and run.load(tmp_path / "run") == {"who": "me"} and os.listdir(tmp_path) == ["run"]


# ---- what is not here, and why


@on_ranks(2)
def test_a_process_out_of_descriptors_is_told_so_and_not_of_its_file_system() -> None:
    run = Run(SMALL)
    with folder() as path, pytest.MonkeyPatch.context() as patched:
        real = os.open

        def full(name: Any, *rest: Any, **how: Any) -> int:
            if place()[0] == 1 and str(name).startswith("run.tmp-"):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(name))
            return real(name, *rest, **how)

        patched.setattr(os, "open", full)
        with pytest.raises(zhooks.CheckpointError, match=r"^rank 1: Cannot save .*Too many open files at \S+\. Raise"):
            run.save(path / "run")


def test_the_newest_is_not_unknown_because_descriptors_are_short(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(tmp_path / "step-1")
    run.save(tmp_path / "step-2")
    real = os.open

    def full(name: Any, *rest: Any, **how: Any) -> int:
        if str(name).endswith("manifest.json"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(name))
        return real(name, *rest, **how)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises((zhooks.CheckpointError, OSError), match="Too many open files"):
        zhooks.latest(tmp_path)


@on_ranks(2)
def test_a_folder_that_is_read_only_on_one_host_is_named_as_that() -> None:
    run = Run(SMALL)
    with folder() as path, pytest.MonkeyPatch.context() as patched:
        if place()[0] == 1:
            patched.setattr(os, "statvfs", lambda name: os.statvfs_result((4096, 4096, 1, 1, 1, 1, 1, 1, os.ST_RDONLY, 255)))
        with pytest.raises(zhooks.CheckpointError, match=r"none on this host, where the file system at \S+ is mounted read"):
            run.save(path / f"host{place()[0]}" / "run" if place()[0] == 0 else path / "run")


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def test_everything_that_a_save_makes_is_its_users_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    disk = {"path": str(tmp_path / "x" / "y" / "scratch")}
    attachment = zhooks.attach(model, policy={"disk": disk, "optimizer": {"tier": "disk"}})
    attachment.save(tmp_path / "a" / "b" / "run", ())
    attachment.save_full(tmp_path / "model.safetensors")
    made = list(tmp_path.rglob("*"))
    assert {path.name for path in made} >= {"a", "b", "run", "x", "y", "scratch", "manifest.json", "model.safetensors"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in made), [path for path in made if path.stat().st_mode & 0o077]
    attachment.detach()
    shutil.rmtree(tmp_path / "x")
