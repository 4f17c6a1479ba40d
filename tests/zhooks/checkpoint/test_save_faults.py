"""Save and resume when things go wrong: killed saves, full disks, damaged files, other models.

pytest runs it, on one, two and four ranks. After every error the run trains on, and an earlier checkpoint loads.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import zhooks
from offload.disk import Owner
from offload.disk.scratch import started_ticks
from offload.events import Event
from offload.shards import Entry, ShardReader, ShardWriter
from offload.shards import commit as shard_commit
from offload.shards.folder import Folder
from offload.text import as_size
from tests.support.forked import python
from tests.support.inside import checksum_of, units_of
from tests.support.json_damage import mutate, places
from tests.support.on_ranks import folder, from_first, on_ranks, place
from tests.support.ranks import End, Pool
from tests.support.resuming import Run
from tests.support.slow import slow
from tests.support.values import same

SMALL = {"stage": 3, "units": {"min_numel": 0}}


@contextmanager
def refused(run: Run, match: str) -> Iterator[None]:
    """The block raises on every rank, changes nothing, and the run trains on."""
    before = run.everything()
    with pytest.raises(zhooks.CheckpointError, match=match):
        yield
    assert same(run.everything(), before)
    run.train(range(50, 51))


# ---- killed saves

KILLED = '''
import os, sys
from pathlib import Path
import zhooks
from tests.support.forked import python
from tests.support.inside import EXCHANGE
from tests.support.killed import ends_unless_killed_at
from tests.support.resuming import Run

path, every = Path(sys.argv[1]), int(sys.argv[2])
run = Run({"stage": 3})
run.train(range(1))

def save_killed_at(number, target):
    """Save, and die before the call of that number; True when the save came to its end."""
    names = ("open", "fsync", "rename", "unlink", "mkdir", "rmdir")
    return ends_unless_killed_at(number, names, lambda: run.save(target, extra={"saved": number}))

def loaded(target):
    try:
        return run.load(target)["saved"]
    except zhooks.CheckpointError:
        return None

for earlier, exchanges in ((True, True), (True, False), (False, True)):
    if not exchanges:
        setattr(*EXCHANGE, lambda *names: False)
    # What one of the three leaves out, the next one kills.
    number, found = -int(exchanges and every > 1), []
    while not found or not ended:
        number += every
        folder = path / f"{earlier}{exchanges}{number}"
        folder.mkdir(parents=True)
        if earlier:
            run.save(folder / "run", extra={"saved": 0})
        ended = save_killed_at(number, folder / "run")
        assert (folder / "run").exists() or not (earlier and exchanges)
        found.append(loaded(folder / "run"))
        assert found[-1] in (0 if earlier else None, number), (earlier, number, found)
        run.train(range(1))
        run.save(folder / "run", extra={"saved": -1})
        assert os.listdir(folder) == ["run"] and loaded(folder / "run") == -1, (earlier, number, os.listdir(folder))
    new = [saved not in (0, None) for saved in found]
    assert new == sorted(new) and new[-1] and not new[0] and number > 15, (earlier, found)
'''


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_save_killed_at_any_call_leaves_one_checkpoint_that_loads(tmp_path: Path, every: int) -> None:
    """SIGKILL before each call that touches the file system: the earlier one loads, or from the commit on the new one.

    Where the file system exchanges two folders, and where the commit takes two renames.
    """
    done = python("-c", KILLED, str(tmp_path), str(every))
    assert done.returncode == 0, done.stderr


def saves_and_dies(path: str) -> None:
    run = Run(SMALL)
    run.train(range(1))
    run.save(Path(path), extra={"step": 1})
    run.train(range(1, 2))
    if place()[0] == 1:
        real = ShardWriter.finish

        def finish(writer: ShardWriter) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)
            return real(writer)

        ShardWriter.finish = finish  # type: ignore[method-assign, assignment]
    run.save(Path(path), extra={"step": 2})


def loads_and_saves(path: str) -> dict[str, Any]:
    run = Run(SMALL, seed=4)
    extra = run.load(Path(path))
    run.save(Path(path), extra={"step": 3})
    run.train(range(1))
    return extra


def test_a_rank_killed_in_its_save_leaves_the_earlier_checkpoint(ranks2: Pool, tmp_path: Path) -> None:
    outcomes = ranks2.attempt(f"{__name__}:saves_and_dies", path=str(tmp_path / "run"))
    # A process that was killed may take long to be gone where one of its threads waits for a disk.
    assert outcomes[1].end is not End.RETURNED
    assert "Rank 1 is gone: killed" in outcomes[0].text, outcomes
    # The other rank clears away what was begun, unless it is ended before it has seen that this one has gone.
    assert {re.sub("-.*", "", name) for name in os.listdir(tmp_path)} in ({"run"}, {"run", "run.tmp"})
    assert ranks2.run(f"{__name__}:loads_and_saves", path=str(tmp_path / "run")) == [{"step": 1}] * 2
    assert os.listdir(tmp_path) == ["run"]


# ---- disks and folders


@contextmanager
def small_files(nbytes: int, *, rank: int) -> Iterator[None]:
    """Files of this process cannot grow beyond that: a full disk's write error, on one rank."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if place()[0] == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def failing(call: str, code: int, *, rank: int) -> Iterator[None]:
    """That call of the system fails in this process, on one rank."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patched:
        if place()[0] == rank:
            patched.setattr(os, call, fail)
        yield


@on_ranks(1, 2, room=(0, 1000, 9000))
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_leaves_nothing(room: int) -> None:
    run = Run(SMALL)
    run.train(range(1))
    last = place()[1] - 1
    with folder() as path:
        run.save(path / "run", extra={"step": 1})
        named = f"rank {last}: " if last else ""
        found = rf"File too large. Raise the limit on the size of one file \(ulimit -f, {re.escape(as_size(room))} here"
        match = f"^{named}Cannot save .*run. Expected space and permission .*found: {found}.*another path"
        with refused(run, match), small_files(room, rank=last):
            run.save(path / "run")
        # Whatever call it is that fails on this rank, up to the commit.
        for code, advice in ((errno.ENOSPC, "Free space there"), (errno.EDQUOT, "Free space within the user's quota")):
            for call in ("pwritev", "fsync", "ftruncate"):
                found = rf"{os.strerror(code)}.*\. {advice}"
                match = f"^{named}Cannot save .*run. Expected space and permission .*found: {found}.*another path"
                with refused(run, match), failing(call, code, rank=last):
                    run.save(path / "run")
        assert os.listdir(path) == ["run"] and run.load(path / "run") == {"step": 1}


@on_ranks(2)
def test_a_full_disk_on_the_rank_that_makes_the_folder_leaves_no_folder() -> None:
    run = Run(SMALL)
    with folder() as path:
        with refused(run, os.strerror(errno.ENOSPC)), failing("fsync", errno.ENOSPC, rank=0):
            run.save(path / "run")
        assert os.listdir(path) == []


@on_ranks(1)
def test_a_save_that_commits_where_another_has_just_done_so_takes_its_place() -> None:
    one, other = Run(SMALL), Run(SMALL)
    other.train(range(1))
    real = Folder.rename

    def later(self: Folder, old: str, new: str) -> None:
        patched.undo()
        other.attachment.save(path / "run", other.optimizer, extra={"of": "other"})
        real(self, old, new)

    with folder() as path, pytest.MonkeyPatch.context() as patched:
        patched.setattr(Folder, "rename", later)
        one.attachment.save(path / "run", one.optimizer, extra={"of": "one"})
        assert one.attachment.load(path / "run", one.optimizer) == {"of": "one"} and os.listdir(path) == ["run"]


@on_ranks(1, 2)
def test_paths_that_cannot_become_a_checkpoint_are_refused_before_anything_is_written() -> None:
    run = Run(SMALL)
    with folder() as path:
        if place()[0] == 0:
            (path / "full").mkdir()
            (path / "full" / "manifest.json").write_text("a web app's")
            (path / "file").write_text("mine")
            (path / "empty").mkdir()
        for name, match in (("full", "found a folder with other files"), ("file", "found a file")):
            with refused(run, match):
                run.save(path / name)
        assert (path / "full" / "manifest.json").read_text() == "a web app's" and (path / "file").read_text() == "mine"
        with refused(run, "Expected space and permission"):
            run.save(Path("/proc/nowhere/run"))
        with refused(run, "Expected space and permission"):
            run.save(path / "file" / "run")
        run.save(path / "empty")
        run.load(path / "empty")


@on_ranks(1, 2)
def test_a_manifest_nobody_would_read_is_refused_before_it_takes_an_earlier_ones_place() -> None:
    run = Run(SMALL)
    with folder() as path:
        run.save(path / "run", extra={"step": 1})
        match = r"Expected a manifest of at most 200 bytes, found \d+ for \d rank"
        with refused(run, match), pytest.MonkeyPatch.context() as narrow:
            narrow.setattr(shard_commit, "MANIFEST_MOST", 200)
            run.save(path / "run")
        assert os.listdir(path) == ["run"] and run.load(path / "run") == {"step": 1}


@on_ranks(2)
def test_ranks_that_do_not_share_a_folder_are_told_so() -> None:
    run = Run(SMALL)
    with folder() as path:
        with refused(run, "rank 1: Cannot save .*Expected the folder that the first rank made, found none on this host"):
            run.save(path / f"host{place()[0]}" / "run")
        assert not list(path.glob("*/*"))
        run.save(path / "run")
        with refused(run, "rank 1: .*manifest.json. Expected the manifest of a checkpoint, found No such file"):
            run.load(path / ("run" if place()[0] == 0 else "else"))


@on_ranks(2)
def test_another_checkpoint_at_one_ranks_path_is_seen() -> None:
    run = Run(SMALL)
    with folder() as path:
        for name in ("one/run", "two/run"):
            run.save(path / name)
        with refused(run, "rank 1: Cannot load .*Expected the same checkpoint on all ranks, found a different one"):
            run.load(path / ("one" if place()[0] == 0 else "two") / "run")


@on_ranks(1, 2)
def test_what_would_need_pickle_is_refused_by_name() -> None:
    run = Run(SMALL)
    with folder() as path:
        with refused(run, r"save expected numbers.* in extra\['fn'\]\[1\], found function"):
            run.save(path / "run", extra={"fn": [1, lambda: 1]})
        with refused(run, r"expected plain dense tensors in objects\['model'\].*, found a sharded tensor"):
            run.attachment.save(path / "run", objects={"model": run.model})
        deep: list[Any] = []
        for _ in range(5000):
            deep = [deep]
        with refused(run, "Expected no exception, found RecursionError"):
            run.save(path / "run", extra={"deep": deep})
        assert os.listdir(path) == []
        with refused(run, "Expected a checkpoint that attachment.save.. wrote, found nothing there"):
            run.load(path / "run")


# ---- damaged files


def damages(path: Path) -> list[tuple[str, Callable[[], None]]]:
    """Each damage by name; applied to the last rank's file."""
    target = sorted(path.glob("rank-*"))[-1]
    size = target.stat().st_size

    def flip(position: int) -> Callable[[], None]:
        def apply() -> None:
            with target.open("r+b") as file:
                file.seek(position)
                byte = file.read(1)[0]
                file.seek(position)
                file.write(bytes([byte ^ 1]))

        return apply

    def grow() -> None:
        with target.open("ab") as file:
            file.write(b"more")

    cuts = [(f"cut to {keep}", lambda keep=keep: os.truncate(target, keep)) for keep in (0, 7, 100, size - 1)]
    flips = [(f"flip at {position}", flip(position)) for position in (0, 7, 9, *range(50, size, size // 12), size - 1)]
    return [*cuts, *flips, ("grow", grow), ("remove", target.unlink)]


@on_ranks(1, 2)
def test_every_damage_to_one_file_is_found_on_all_ranks_before_anything_is_changed() -> None:
    run = Run(SMALL)
    run.train(range(2))
    with folder() as path:
        run.save(path / "good")
        run.train(range(2, 3))
        for number in range(len(damages(path / "good"))):
            bad = path / f"bad{number}"
            if place()[0] == 0:
                shutil.copytree(path / "good", bad)
                damages(bad)[number][1]()
            from_first(None)
            with refused(run, r"rank-0000\d\.safetensors. Expected the shard file its manifest describes, found"):
                run.load(bad)
        run.load(path / "good")


@on_ranks(1, 2)
def test_what_is_no_file_in_place_of_one_is_refused_on_all_ranks_without_waiting() -> None:
    run = Run(SMALL)
    run.train(range(1))
    with folder() as path:
        run.save(path / "good")
        last = f"rank-{place()[1] - 1:05d}.safetensors"
        ways: dict[str, Callable[[Path], object]] = {
            "a named pipe": os.mkfifo,
            "a device": lambda file: file.symlink_to("/dev/zero"),
            "a folder": lambda file: file.mkdir(),
        }
        for kind, make in ways.items():
            for name in ("manifest.json", last):
                bad = path / f"{kind} as {name}"
                if place()[0] == 0:
                    shutil.copytree(path / "good", bad)
                    (bad / name).unlink()
                    make(bad / name)
                from_first(None)
                with refused(run, rf"{name}. Expected .*, found {kind}, not a regular file"):
                    run.load(bad)
        if place()[0] == 0:
            (path / "linked").symlink_to(path / "good")
            (path / "files").mkdir()
            for file in (path / "good").iterdir():
                (path / "files" / file.name).symlink_to(file)
        from_first(None)
        run.load(path / "linked")
        run.load(path / "files")


class Breaks:
    """An observer that cuts a file when the load of this rank has begun."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key

    def on_event(self, event: Event) -> None:
        if (event.kind, event.what, event.key) == ("begin", "load", self.key) and self.path.stat().st_size > 2000:
            os.truncate(self.path, 2000)


@on_ranks(1, 2)
def test_a_file_that_breaks_between_verifying_and_loading_says_that_the_run_is_partly_loaded() -> None:
    run = Run(SMALL)
    run.train(range(2))
    last = place()[1] - 1
    with folder() as path:
        run.save(path / "good")
        run.save(path / "run")
        file = path / "run" / f"rank-{last:05d}.safetensors"
        unit = units_of(run.attachment)[1].flats[0].name
        breaks = run.attachment.observe(Breaks(file, unit if place()[0] == last else ""))
        with breaks, pytest.raises(zhooks.CheckpointError, match=r"found its end at byte .*The run is partly loaded now"):
            run.load(path / "run")
        run.train(range(2, 3))
        run.load(path / "good")
        run.train(range(2, 3))


MUTATED = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=3), st.just([]), st.just({}), st.just("F64")
)


@on_ranks(1, limit_s=180, signed=(True, *slow(False)), times=(60, *slow(400)))
def test_a_mutated_manifest_is_an_error_or_means_the_same(signed: bool, times: int) -> None:
    """``signed``: the checksum is made to fit, so that the checks behind it have to find out."""
    run = Run(SMALL)
    run.train(range(1))
    with folder() as path:
        run.save(path / "run", extra={"step": 1})
        file = path / "run" / "manifest.json"
        good = json.loads(file.read_text())
        wanted = run.everything()
        refusals = 0

        def loads_or_refuses() -> None:
            nonlocal refusals
            try:
                assert run.load(path / "run") == {"step": 1}
            except zhooks.CheckpointError:
                refusals += 1
            assert same(run.everything(), wanted)

        @settings(max_examples=times, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.data())
        def mutated(data: st.DataObject) -> None:
            outer = json.loads(json.dumps(good))
            at = data.draw(st.sampled_from(places(outer["manifest"] if signed else outer)))
            mutate(outer["manifest"] if signed else outer, at, data.draw(st.one_of(MUTATED, st.just("remove"))))
            if signed:
                outer["checksum"] = checksum_of(outer["manifest"])
            file.write_text(json.dumps(outer))
            loads_or_refuses()

        mutated()
        assert refusals > times // 2  # few changes mean the same

        @settings(max_examples=times // 2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.integers(0, 10**6), st.binary(min_size=0, max_size=4), st.integers(0, 6))
        def scribbled(position: int, new: bytes, cut: int) -> None:
            raw = json.dumps(good).encode()
            position %= len(raw)
            file.write_bytes(raw[:position] + new + raw[position + cut :])
            loads_or_refuses()

        scribbled()
        assert refusals > times * 7 // 8  # of half as many more
        file.write_text("[" * 100_000)
        with refused(run, "found something else than its JSON"):
            run.load(path / "run")


@on_ranks(1)
def test_a_shard_file_of_hostile_lengths_is_refused_before_memory_is_taken() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rank-00000.safetensors"
        writer = ShardWriter(path, [Entry("a", torch.float32, (4,))])
        writer.write("a", [torch.ones(4)])
        record = writer.finish()
        raw = path.read_bytes()
        for length in (2**62, 2**63, len(raw), 0):
            path.write_bytes(length.to_bytes(8, "little") + raw[8:])
            with pytest.raises(zhooks.CheckpointError, match="found a header"):
                ShardReader(path.parent, record)
        header = json.loads(raw[8:].split(b"}}")[0] + b"}}")
        for change in ({"shape": [2**40]}, {"shape": [-4]}, {"dtype": "F13"}, {"data_offsets": [0, 2**50]}, {"shape": None}):
            text = json.dumps({"a": {**header["a"], **change}}).encode()
            bad = len(text).to_bytes(8, "little") + text
            path.write_bytes(bad + bytes(16))
            signed = record.model_copy(update={"nbytes": len(bad) + 16, "header": xxhash.xxh3_64_hexdigest(bad)})
            with pytest.raises(zhooks.CheckpointError, match=r"contradicts itself|other tensors"):
                ShardReader(path.parent, signed)


# ---- another run


@on_ranks(1, 2)
def test_another_model_or_optimizer_is_refused_by_the_first_difference() -> None:
    run = Run(SMALL)
    run.train(range(1))

    def changed(change: Callable[[nn.Sequential], None]) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))
        change(model)
        return zhooks.attach(model, policy=SMALL), model

    cases = {
        r"parameter 0\.weight of shape \[9, 7\] where the checkpoint has \[9, 6\]": lambda m: m.__setitem__(0, nn.Linear(7, 9)),
        r"parameter 3\.weight of stride \[1, 9\] where": lambda m: setattr(m[3], "weight", nn.Parameter(torch.randn(9, 9).t())),
        r"parameter 6\.weight of shape \[3, 3\], which the checkpoint does not have": lambda m: m.append(nn.Linear(3, 3)),
        r"no parameter 5\.weight, which the checkpoint has, of shape \[3, 9\]": lambda m: m.__setitem__(5, nn.Tanh()),
        r"buffers here as in the checkpoint, found mask only here": lambda m: m.register_buffer("mask", torch.ones(1)),
    }
    with folder() as path:
        run.save(path / "run")
        for match, change in cases.items():
            attachment, model = changed(change)
            with pytest.raises(zhooks.CheckpointError, match=match):
                attachment.load(path / "run", (), objects={})
            attachment.detach()
            del attachment, model
        for kind, match in (("sgd", "AdamW.*found SGD"), ("amsgrad", "AdamW.*found Adam")):
            with refused(Run(SMALL, kind=kind), match):
                Run(SMALL, kind=kind).load(path / "run")
        grouped = torch.optim.AdamW([{"params": [p]} for p in run.model.parameters()])
        with refused(run, "parameter groups of the checkpoint, found different ones from group 0 on .8 groups here, 1 there"):
            run.attachment.load(path / "run", grouped, objects=run.objects)
        with refused(run, r"expected the objects that were saved \(scheduler\), found none.*objects=\{\}"):
            run.attachment.load(path / "run", run.optimizer)
        with refused(run, "same objects here as in the checkpoint, found scheduler only in the checkpoint; scaler only here"):
            run.attachment.load(path / "run", run.optimizer, objects={"scaler": run.scheduler})


@on_ranks(2)
def test_an_object_that_refuses_its_state_fails_the_load_on_all_ranks() -> None:
    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if place()[0] == 1:
                raise ValueError("not mine")

    run = Run(SMALL)
    run.train(range(2))
    with folder() as path:
        run.attachment.save(path / "run", run.optimizer, objects={"odd": Refuses(), "scheduler": run.scheduler})
        run.train(range(2, 3))
        for objects in ({"odd": Refuses(), "scheduler": run.scheduler}, {"scheduler": run.scheduler, "odd": Refuses()}):
            with refused(run, r"rank 1: .*found that objects\['odd'\] rejects its own: ValueError: not mine"):
                run.attachment.load(path / "run", run.optimizer, objects=objects)


# ---- what others left in a shared folder

STRANGE = "0123456789abcdef"


def content(path: Path) -> dict[str, bytes]:
    """Every file below ``path``, links followed."""
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def given_away(path: Path) -> bool:
    """Whether the folder is another user's now; only root may give one away, and elsewhere it goes."""
    if os.geteuid() == 0:
        os.chown(path, 4711, 4711)
        return True
    if path.name.startswith("run."):
        shutil.rmtree(path)
    return False


def marked(path: Path, owner: Owner, token: str) -> Path:
    """A folder as a save of ``owner`` leaves it when it is killed while it writes."""
    path.mkdir()
    (path / f"saving-{token}").write_bytes(owner.page())
    (path / "rank-00000.safetensors").write_bytes(b"begun")
    return path


@on_ranks(1, 2)
def test_links_and_folders_that_look_like_leftovers_of_a_save_are_left_alone() -> None:
    """Another checkpoint behind a planted link, another user's folder, a live save's and a folder of the user's own."""
    run = Run(SMALL)
    alive = replace(Owner.here(), pid=1, started_ticks=started_ticks(1) or 0)
    with folder() as path:
        run.save(path / "best", extra={"step": 0})
        if place()[0] == 0:
            for kind in ("tmp", "old"):
                (path / f"run.{kind}-{STRANGE}").symlink_to("best")
            shutil.copytree(path / "best", path / "run.tmp-00000000000000aa")
            shutil.copytree(path / "best", path / "run.old-00000000000000aa")
            marked(path / "run.tmp-00000000000000bb", alive, "00000000000000bb")
            theirs = marked(path / "run.tmp-00000000000000cc", replace(alive, boot="another"), "00000000000000cc")
            given_away(theirs)
            marked(path / "run.tmp-00000000000000dd", replace(alive, boot="another"), "00000000000000dd")
            (path / "run.tmp-00000000000000ee").mkdir()
            os.mkfifo(path / "run.tmp-00000000000000ff")
        from_first(None)
        before = content(path)
        run.save(path / "run", extra={"step": 1})
        run.save(path / "run", extra={"step": 2})
        after = content(path)
        gone = {name for name in before if name not in after}
        assert {name.split("/")[0] for name in gone} == {"run.tmp-00000000000000dd"}
        assert all(after[name] == before[name] for name in before if name not in gone)
        names = set(os.listdir(path))
        assert not names & {"run.tmp-00000000000000dd", "run.tmp-00000000000000ee"} and "run.tmp-00000000000000ff" in names
        assert run.load(path / "best") == {"step": 0} and run.load(path / "run") == {"step": 2}


@on_ranks(1, 2)
def test_links_pipes_and_strangers_in_a_checkpoint_are_neither_followed_nor_lost() -> None:
    run = Run(SMALL)
    with folder() as path:
        run.save(path / "best", extra={"step": 0})
        run.save(path / "run", extra={"step": 1})
        if place()[0] == 0:
            (path / "run" / "rank-00009.safetensors").symlink_to("../best/rank-00000.safetensors")
            os.mkfifo(path / "run" / "notes.pipe")
            (path / "run" / "notes").mkdir()
            (path / "run" / "notes" / "today").write_text("mine")
            os.link(path / "run" / "manifest.json", path / "kept.json")
            (path / "kept").mkdir()
            (path / "kept" / "rank-00000.safetensors").write_text("another tool's")
        from_first(None)
        best, kept = content(path / "best"), (path / "kept.json").read_bytes()
        run.save(path / "run", extra={"step": 2})
        assert content(path / "best") == best and (path / "kept.json").read_bytes() == kept
        assert (path / "run" / "notes" / "today").read_text() == "mine" and (path / "run" / "notes.pipe").is_fifo()
        assert (path / "run" / "rank-00009.safetensors").is_symlink()
        assert run.load(path / "run") == {"step": 2}
        with refused(run, "found a folder with other files"):
            run.save(path / "kept")
        if from_first(given_away(path / "best") if place()[0] == 0 else None):
            with refused(run, r"found a checkpoint of another user \(uid 4711\)"):
                run.save(path / "best")
        assert content(path / "best") == best and sorted(os.listdir(path)) == ["best", "kept", "kept.json", "run"]


class Swaps:
    """An observer that puts a link in place of a folder when the first shard has been written."""

    def __init__(self, swap: Callable[[], None]) -> None:
        self.swap: Callable[[], None] | None = swap

    def on_event(self, event: Event) -> None:
        if (event.kind, event.what) == ("end", "save") and self.swap is not None:
            swap, self.swap = self.swap, None
            swap()


@on_ranks(1, what=("target", "draft", "file"))
def test_a_folder_that_is_swapped_while_a_save_runs_costs_nothing_else(what: str) -> None:
    """Between the check and the rename: by a link to another checkpoint, which must stay whole."""
    run = Run(SMALL)
    with folder() as path:
        run.save(path / "best", extra={"step": 0})
        run.save(path / "run", extra={"step": 1})
        best = content(path / "best")

        def swap() -> None:
            draft = next(path.glob("run.tmp-*"))
            if what == "file":
                (draft / "manifest.json").symlink_to(path / "best" / "manifest.json")
                return
            victim = path / "run" if what == "target" else draft
            victim.rename(path / "aside")
            victim.symlink_to("best")

        with run.attachment.observe(Swaps(swap)), refused(run, "found"):
            run.save(path / "run", extra={"step": 2})
        assert content(path / "best") == best
        moved = path / "aside" if what == "target" else path / "run"
        assert run.load(moved) == {"step": 1} and run.load(path / "best") == {"step": 0}
