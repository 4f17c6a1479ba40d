"""Paths that users hand over: whatever is wrong with one, on whichever rank, every rank says so and nothing has changed.

pytest runs it, on one and two ranks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import zhooks
from tests.support.on_ranks import folder, from_first, on_ranks, place
from tests.support.resuming import Run
from tests.support.values import same

SMALL = {"stage": 3, "units": {"min_numel": 0}}


@contextmanager
def refused(run: Run, match: str) -> Iterator[None]:
    """The block raises on every rank, in bounded words, and changes nothing."""
    before = run.everything()
    with pytest.raises(zhooks.CheckpointError, match=match) as caught:
        yield
    assert len(str(caught.value)) < 1000 and "\0" not in str(caught.value)
    assert same(run.everything(), before)


def verbs(run: Run) -> dict[str, Callable[[Any], Any]]:
    return {"save": run.save, "load": run.load, "save_full": run.attachment.save_full}


@on_ranks(1, 2)
def test_what_is_no_path_is_refused_by_every_verb() -> None:
    run = Run(SMALL)
    with folder() as path:
        for verb, call in verbs(run).items():
            for wrong in ("", "run\0", b"run", None, 7, [7] if verb == "load" else ["run"]):
                with refused(run, f"{verb} expected the path of a .*, found"):
                    call(wrong)
            for much in ("x" * 300, "x" * 100_000, "/".join(["x" * 200] * 30)):
                with refused(run, f"{verb} .*[. ][Ee]xpected .*"):
                    call(path / much)
        for nowhere in (Path("/"), path / ("x" * 240)):
            with refused(run, "save .*Expected a folder whose name has 1 to 234 bytes, found"):
                run.save(nowhere)
        if place()[0] == 0:
            (path / "circle").symlink_to("circle")
        from_first(None)
        for verb in ("save", "load"):
            with refused(run, f"{verb} .*circle"):
                verbs(run)[verb](path / "circle")
        assert os.listdir(path) == ["circle"]


@on_ranks(1, 2)
def test_a_path_that_is_taken_by_something_else_is_refused_by_every_verb() -> None:
    run = Run(SMALL)
    with folder() as path:
        if place()[0] == 0:
            (path / "file").write_text("mine")
            os.mkfifo(path / "pipe")
            (path / "full").mkdir()
            (path / "full" / "notes").write_text("mine")
        from_first(None)
        for name, found in (("file", "a file"), ("pipe", "a pipe or a device"), ("full", "a folder with other files")):
            with refused(run, f"save .*{name}. Expected no such path.*found {found}"):
                run.save(path / name)
            with refused(run, f"load .*{name}. Expected a checkpoint"):
                run.load(path / name)
        for name, found in (("full", "a folder"), ("pipe", "a pipe or a device"), ("/dev/null", "a pipe or a device")):
            with refused(run, f"Cannot write .*{name}. Expected a file or no such path, found {found}"):
                run.attachment.save_full(path / name)
        assert sorted(os.listdir(path)) == ["file", "full", "pipe"] and (path / "file").read_text() == "mine"
        assert os.listdir(path / "full") == ["notes"] and stat.S_ISCHR(os.stat("/dev/null").st_mode)


@on_ranks(2)
def test_a_path_that_is_wrong_on_one_rank_only_is_refused_on_both() -> None:
    run = Run(SMALL)
    with folder() as path:
        run.save(path / "run")
        for verb, call in verbs(run).items():
            for bad in (0, 1):
                wrong = {"save_full": path / "full.safetensors"}.get(verb, path / "run")
                with refused(run, f"{verb} expected the path of a .*, found|rank 1: {verb} expected the path of"):
                    call(None if place()[0] == bad else wrong)
        with refused(run, "rank 1: Cannot save .*Expected the folder that the first rank made"):
            run.save(path / ("run" if place()[0] == 0 else "other"))
        assert sorted(os.listdir(path)) == ["run"]
        run.save(path / "run" / ".." / "run")
        assert sorted(os.listdir(path)) == ["run"]
        run.load(Path(os.path.relpath(path / "run")))
