"""The newest checkpoint of a folder and the oldest ones that go: by manifests alone, and nothing that is not certainly ours."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import zhooks
from offload.shards import manifest as shard_manifest
from offload.shards import read_manifest
from tests.support.on_ranks import folder, from_first, on_ranks, place
from tests.support.resuming import Run

SMALL = {"stage": 3, "units": {"min_numel": 0}}


def names(path: Path) -> list[str]:
    """What lies there once every rank has come here."""
    return from_first(sorted(os.listdir(path)))


def rewritten(path: Path, **about: object) -> None:
    """The manifest says something else of the checkpoint, with a checksum that is right."""
    manifest = read_manifest(path)
    changed = manifest.model_copy(update={"about": {**manifest.about, **about}})
    (path / "manifest.json").write_bytes(shard_manifest.encoded(changed))


@on_ranks(1, 2, wait=(True, False))
def test_the_newest_stay_and_older_ones_go_once_a_newer_is_there(wait: bool) -> None:
    run = Run(SMALL)
    with folder() as path:
        run.save(path / "step-0")
        for step in (8, 9, 10, 11):
            run.save(path / f"step-{step}", keep=2, wait=wait, extra={"step": step})
        run.save(path / "last")
        assert names(path) == ["last", "step-0", "step-10", "step-11"]
        assert zhooks.latest(path) == path / "last"
        assert run.load(path / "step-11") == {"step": 11}


@on_ranks(2)
def test_a_run_that_was_resumed_goes_on_with_its_checkpoints_and_leaves_those_of_others() -> None:
    run, other = Run(SMALL), Run(SMALL)
    with folder() as path:
        for step in (1, 2):
            run.save(path / f"step-{step}", keep=2)
            other.save(path / f"step-{step + 10}", keep=2)
        resumed = Run(SMALL, seed=3)
        resumed.load(path / "step-2")
        resumed.save(path / "step-3", keep=1)
        assert names(path) == ["step-11", "step-12", "step-3"]
        resumed.save(path / "other-4", keep=1)
        assert names(path) == ["other-4", "step-11", "step-12", "step-3"]


@on_ranks(1)
def test_what_is_not_certainly_ours_stays() -> None:
    run = Run(SMALL)
    with folder() as path:
        for step in range(1, 6):
            run.save(path / f"step-{step}", keep=9)
        (path / "step-1" / "notes.txt").write_text("mine")
        (path / "step-2").rename(path / "elsewhere")
        (path / "step-2").symlink_to(path / "elsewhere")
        rewritten(path / "step-3", replaceable=False)
        (path / "step-4" / "manifest.json").write_text("{}")
        (path / "step-7").mkdir()
        (path / "step-8").write_text("a file")
        run.save(path / "step-6", keep=1)
        left = ["elsewhere", "step-1", "step-2", "step-3", "step-4", "step-6", "step-7", "step-8"]
        assert sorted(os.listdir(path)) == left
        assert (path / "step-1" / "notes.txt").read_text() == "mine" and read_manifest(path / "elsewhere").world == 1


@on_ranks(1)
def test_a_clock_that_was_put_back_makes_the_newest_no_older() -> None:
    run = Run(SMALL)
    with folder() as path:
        run.save(path / "step-1", keep=2)
        run.save(path / "step-2", keep=2)
        rewritten(path / "step-1", saved_ns=4 * 10**18)
        rewritten(path / "step-2", saved_ns=3 * 10**18)
        run.save(path / "step-3", keep=2)
        assert sorted(os.listdir(path)) == ["step-1", "step-3"] and zhooks.latest(path) == path / "step-3"


@on_ranks(1)
def test_the_newest_is_complete_and_of_those_that_do_not_say_when_the_last_by_number() -> None:
    run = Run(SMALL)
    with folder() as path:
        assert zhooks.latest(path) is None and zhooks.latest(path / "nowhere") is None
        for step in (9, 10):
            run.save(path / f"step-{step}")
        assert zhooks.latest(path) == path / "step-10"
        for step in (9, 10):
            manifest = read_manifest(path / f"step-{step}")
            about = {key: value for key, value in manifest.about.items() if key != "saved_ns"}
            (path / f"step-{step}" / "manifest.json").write_bytes(
                shard_manifest.encoded(manifest.model_copy(update={"about": about}))
            )
        assert zhooks.latest(path) == path / "step-10"
        os.truncate(path / "step-10" / "rank-00000.safetensors", 100)
        (path / "notes.txt").write_text("mine")
        assert zhooks.latest(path) == path / "step-9"
        # What a kill between the two renames of a save leaves counts by the name it shall have.
        token = read_manifest(path / "step-9").token
        shutil.copytree(path / "step-9", path / f"step-12.tmp-{token}")
        (path / f"step-12.old-{token}").mkdir()
        assert zhooks.latest(path) == path / "step-12" and run.load(path / "step-12") == {}
        shutil.rmtree(path / "step-9")
        shutil.rmtree(path / f"step-12.tmp-{token}")
        assert zhooks.latest(path) is None
        with pytest.raises(zhooks.CheckpointError, match="found a file"):
            zhooks.latest(path / "notes.txt")


@on_ranks(1, 2)
def test_what_cannot_be_one_of_several_is_refused() -> None:
    run = Run(SMALL)
    with folder() as path:
        for keep, name, match in ((1, "last", "expected a name with a number"), (0, "step-1", "a number from 1 as keep")):
            with pytest.raises(zhooks.CheckpointError, match=match):
                run.save(path / name, keep=keep)
        with pytest.raises(zhooks.CheckpointError, match="a number from 1 as keep"):
            run.save(path / "step-1", keep=True)
        run.save(path / "step-1", keep=1)
        assert names(path) == ["step-1"] and read_manifest(path / "step-1").world == place()[1]
