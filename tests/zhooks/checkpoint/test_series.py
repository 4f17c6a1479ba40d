"""The newest checkpoint of a folder and the oldest ones that go: by manifests alone, and nothing that is not certainly ours."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zhooks
from offload.disk import Owner, started_ticks
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
        for keep, name, match in ((1, "last", "Expected a name with a number"), (0, "step-1", "keep to be None or at least 1")):
            with pytest.raises(zhooks.CheckpointError, match=match):
                run.save(path / name, keep=keep)
        with pytest.raises(zhooks.CheckpointError, match="keep to be None or at least 1"):
            run.save(path / "step-1", keep=True)
        run.save(path / "step-1", keep=1)
        assert names(path) == ["step-1"] and read_manifest(path / "step-1").world == place()[1]


# ---- what killed saves of the series left


def begun(path: Path, owner: Owner | None, age_s: int = 0) -> None:
    """A folder as a save of ``owner`` leaves it when it is killed; before it said whose it is where that is None."""
    path.mkdir()
    if owner is not None:
        (path / f"saving-{path.name[-16:]}").write_bytes(owner.page())
        (path / "rank-00000.safetensors").write_bytes(b"begun")
    moment = os.stat(path).st_mtime - age_s
    os.utime(path, (moment, moment))


@on_ranks(1, 2)
def test_a_save_tidies_what_killed_saves_of_other_numbers_left_and_touches_no_living_one() -> None:
    run = Run(SMALL)
    dead, alive = replace(Owner.here(), started_ticks=1), Owner.here()
    living = replace(alive, pid=os.getppid(), started_ticks=started_ticks(os.getppid()) or 0)
    with folder() as path:
        if place()[0] == 0:
            begun(path / "step-1.tmp-00000000000000a1", dead)
            begun(path / "step-2.tmp-00000000000000a2", living)
            begun(path / "step-3.tmp-00000000000000a3", None)
            begun(path / "step-4.tmp-00000000000000a4", None, age_s=7200)
            begun(path / "step-5.old-00000000000000a5", None)
            begun(path / "other-1.tmp-00000000000000a6", dead)
            begun(path / "last.tmp-00000000000000a7", dead)
        run.save(path / "step-9")
        left = ["last.tmp-00000000000000a7", "other-1.tmp-00000000000000a6", "step-2.tmp-00000000000000a2"]
        assert names(path) == [*left, "step-3.tmp-00000000000000a3", "step-9"]


@on_ranks(1)
def test_a_save_between_its_renames_is_finished_for_it_only_once_its_process_has_ended() -> None:
    run = Run(SMALL)
    living = replace(Owner.here(), pid=os.getppid(), started_ticks=started_ticks(os.getppid()) or 0)
    for owner in (living, replace(living, started_ticks=1)):
        with folder() as path:
            run.save(path / "step-1", extra={"step": "old"})
            run.save(path / "step-2", extra={"step": "new"})
            token = read_manifest(path / "step-2").token
            (path / "step-2" / f"saving-{token}").write_bytes(owner.page())
            os.rename(path / "step-1", path / f"step-1.old-{token}")
            os.rename(path / "step-2", path / f"step-1.tmp-{token}")
            run.save(path / "step-3")
            between = ["step-1.old", "step-1.tmp", "step-3"]
            found = [name.removesuffix(f"-{token}") for name in names(path)]
            assert found == (between if owner is living else ["step-1", "step-3"])
            assert run.load(path / "step-1") == {"step": "new"}


@on_ranks(1)
def test_a_neighbour_that_may_not_be_opened_fails_no_save() -> None:
    run, real = Run(SMALL), os.open

    def refuse(name: Any, *arguments: Any, **named: Any) -> int:
        if str(name).startswith("step-1"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(name, *arguments, **named)

    with folder() as path:
        for each in ("step-1", "step-1.tmp-00000000000000a1", "step-1.old-00000000000000a1"):
            (path / each).mkdir()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "open", refuse)
            run.save(path / "step-2")
        assert len(names(path)) == 4 and run.load(path / "step-2") == {}
