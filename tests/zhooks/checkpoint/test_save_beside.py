"""Saves that go on beside training: the state of one moment, whatever trains on; failures on all ranks; kills at any moment.

pytest runs it, on one and two ranks.  Writers are held back by an event, never by time.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zhooks
from offload.budget import ALONE
from offload.shards import Entry, Outcomes, ShardWriter, read_manifest
from offload.shards import folder as shard_folder
from offload.store import BlockRange
from offload.tier import Tier
from tests.support.forked import python
from tests.support.inside import store_of
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.ranks import End, Pool
from tests.support.resuming import Run
from tests.support.waiting import soon
from zhooks import checkpoint
from zhooks.checkpoint.shard import FileTensor

SMALL = {"stage": 3, "units": {"min_numel": 0}}


def placed(tier: str, **more: Any) -> dict[str, Any]:
    return {**SMALL, "parameter": {"tier": tier}, "gradient": {"tier": tier}, "optimizer": {"tier": tier, **more}}


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """No tensor is written before the event is set."""
    gate, real = threading.Event(), ShardWriter.write

    def write(writer: ShardWriter, *arguments: Any) -> None:
        assert gate.wait(300)
        real(writer, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ShardWriter, "write", write)
        try:
            yield gate
        finally:
            gate.set()


@contextmanager
def failing(code: int, *, rank: int) -> Iterator[None]:
    """Writes to files fail on one rank."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patched:
        if place()[0] == rank:
            patched.setattr(os, "pwritev", fail)
        yield


def beside(run: Run, path: Path, **more: Any) -> zhooks.Saving:
    return run.attachment.save(path, run.optimizer, objects=run.objects, wait=False, **more)


def ended(saving: zhooks.Saving) -> bool:
    """Without a word to the other ranks."""
    return soon(lambda: saving.done)


def own_file(path: Path) -> bytes:
    return (path / f"rank-{place()[0]:05d}.safetensors").read_bytes()


# ---- what is saved


def check_equal(policy: dict[str, Any], kind: str = "adamw") -> tuple[int, int]:
    """The file of a save beside training is that of a save which waits; the bytes copied, and those of the file."""
    run, recorder = Run(policy, kind=kind), zhooks.Recorder()
    run.train(range(2))
    run.model(run.model[0].weight.new_ones(4, 6)).sum().backward()  # gradients are held, too
    with folder() as path:
        run.save(path / "waited", extra={"step": 2})
        with held_back() as gate, run.attachment.observe(recorder):
            saving = beside(run, path / "beside", extra={"step": 2})
            run.optimizer.zero_grad()
            run.train(range(2, 5))
            assert (saving.done, saving.progress.written, (path / "beside").exists()) == (False, 0, False)
            gate.set()
            saving.wait()
        assert saving.done and saving.progress.written == saving.progress.total == len(own_file(path / "beside"))
        assert own_file(path / "waited") == own_file(path / "beside")
        assert sorted(os.listdir(path)) == ["beside", "waited"]
        kept = {"manifest.json", *(f"rank-{rank:05d}.safetensors" for rank in range(place()[1]))}
        assert set(os.listdir(path / "beside")) == kept
        losses = run.losses[2:]
        resumed = Run(policy, kind=kind, seed=3)
        assert resumed.load(path / "beside") == {"step": 2}
        resumed.optimizer.zero_grad()
        resumed.train(range(2, 5))
        assert resumed.losses == losses
    copied = [event.nbytes for event in recorder.events if (event.kind, event.what) == ("end", "snapshot")]
    return copied[0], saving.progress.total


@on_ranks(1, 2, tier=("device", "host", "disk"))
def test_what_is_saved_beside_training_is_the_state_of_the_moment(tier: str) -> None:
    copied, total = check_equal(placed(tier))
    # On disk the values stay where they are; RNG states, buffers and the document are copied.
    assert copied > total // 2 if tier != "disk" else 0 < copied < total


@on_ranks(2, policy=({"stage": 1}, {"stage": 3, "precision": {"param": "bf16"}, "optimizer": {"tier": "disk"}}))
def test_replicated_parameters_and_masters_apart_are_those_of_the_moment(policy: dict[str, Any]) -> None:
    check_equal(policy)


@on_ranks(2, tier=("device", "disk"))
def test_states_of_owners_are_those_of_the_moment(tier: str) -> None:
    check_equal(placed(tier), "muon")


@on_ranks(2, tier=("host", "disk"))
def test_updates_in_backward_leave_the_moment_alone(tier: str) -> None:
    run = Run(placed(tier, overlap=True))
    run.train(range(2))
    with folder() as path:
        run.save(path / "waited")
        with held_back() as gate:
            saving = beside(run, path / "beside")
            run.train(range(2, 5))
            gate.set()
            saving.wait()
        assert own_file(path / "waited") == own_file(path / "beside")


@pytest.mark.slow
@on_ranks(2, tier=("host", "disk"))
def test_compiled_updates_leave_the_moment_alone(tier: str) -> None:
    check_equal(placed(tier, kernel="numba", compute="host"))


@on_ranks(1)
def test_a_full_scratch_file_makes_steps_wait_and_changes_nothing() -> None:
    """The policy's disk holds the state once: a step that would write beside what is kept waits for the writer."""
    torch.manual_seed(4)
    run = Run(placed("disk"))
    run.train(range(2))
    torch.manual_seed(4)
    full = Run({**placed("disk"), "budget": {"disk": store_of(run.attachment).budget.used(Tier.DISK)}})
    full.train(range(2))
    losses = []
    for each in (run, full):
        with folder() as path:
            each.save(path / "waited")
            with held_back() as gate:
                saving = beside(each, path / "beside")
                opener = threading.Timer(0.1, gate.set)
                opener.start()
                torch.manual_seed(5)
                each.train(range(2, 5))
                opener.join()
                saving.wait()
            assert own_file(path / "waited") == own_file(path / "beside")
            losses.append(each.losses[2:])
    assert losses[0] == losses[1]


# ---- one after the other


@on_ranks(2)
def test_a_second_save_waits_for_the_first_and_so_do_load_and_detach() -> None:
    run = Run(SMALL)
    run.train(range(1))
    with folder() as path:
        for after in ("save", "load", "detach"):
            with held_back() as gate:
                first = beside(run, path / "first", extra={"before": after})
                run.train(range(1, 2))
                opener = threading.Timer(0.05, gate.set)
                opener.start()
                if after == "save":
                    run.save(path / "second")
                elif after == "load":
                    assert run.load(path / "first") == {"before": "load"}
                else:
                    run.attachment.detach()
                opener.join()
            assert first.done and first.concluded
            first.wait()
            assert read_manifest(path / "first").world == 2


@on_ranks(2)
def test_a_policy_may_refuse_a_second_save_and_training_goes_on() -> None:
    run = Run({**SMALL, "save": {"while_saving": "refuse"}})
    with folder() as path, held_back() as gate:
        first = beside(run, path / "first")
        with pytest.raises(zhooks.CheckpointError, match=r"the save to .*first to be finished, found it at 0 of \d+ bytes"):
            beside(run, path / "second")
        run.train(range(1))
        gate.set()
        first.wait()
        beside(run, path / "second").wait()
        assert sorted(os.listdir(path)) == ["first", "second"]


@on_ranks(1)
def test_two_models_of_one_process_leave_each_other_alone() -> None:
    one, other = Run(SMALL), Run(SMALL)
    with folder() as path, held_back() as gate:
        saving = beside(one, path / "run", extra={"of": "one"})
        last = beside(other, path / "run", extra={"of": "other"})
        gate.set()
        saving.wait(), last.wait()
        assert one.load(path / "run")["of"] in ("one", "other")


@on_ranks(1)
def test_events_and_memory_say_what_goes_on() -> None:
    run, recorder = Run(SMALL), zhooks.Recorder()
    run.train(range(1))
    with folder() as path, run.attachment.observe(recorder):
        beside(run, path / "run").wait()
        size = len(own_file(path / "run"))
    assert [key for key, _, _ in recorder.spans("snapshot")] == ["run"]
    assert [event.nbytes for event in recorder.events if (event.kind, event.what) == ("end", "save")][-1] == size
    held = [event.nbytes for event in recorder.events if (event.what, event.key) == ("other on host", "checkpoint snapshot")]
    assert max(held) > size // 2 and held[-1] == 0
    written = [event.nbytes for event in recorder.events if event.what == "saved"]
    assert written == sorted(written) and written


# ---- what fails


@on_ranks(1, 2)
def test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all() -> None:
    run, last = Run(SMALL), place()[1] - 1
    with folder() as path:
        run.save(path / "run", extra={"step": 1})
        named = f"rank {last}: " if last else ""
        match = rf"^{named}Cannot save .*run. Expected space and permission .*found: No space left.*Free space there"
        for _ in range(2):
            with failing(errno.ENOSPC, rank=last):
                saving = beside(run, path / "run", extra={"step": 2})
                assert ended(saving)
            run.train(range(1))
            for _ in range(2):
                with pytest.raises(zhooks.CheckpointError, match=match):
                    saving.wait()
            assert os.listdir(path) == ["run"]
        assert run.load(path / "run") == {"step": 1}


@on_ranks(2, verb=("save", "load", "detach"))
def test_what_nobody_waited_for_is_told_once_by_the_next_call(verb: str) -> None:
    run = Run(SMALL)
    with folder() as path:
        run.save(path / "old")
        with failing(errno.ENOSPC, rank=1):
            saving = beside(run, path / "run")
            assert ended(saving)
        detach = run.attachment.detach
        calls = {"save": lambda: run.save(path / "old"), "load": lambda: run.load(path / "old"), "detach": detach}
        with pytest.raises(zhooks.CheckpointError, match=f"^{verb} expected the background save to .*run.*{verb} again"):
            calls[verb]()
        calls[verb]()
        assert os.listdir(path) == ["old"]


@on_ranks(1, 2, limits=({"save": {"snapshot": "1KiB"}}, {"budget": {"host": "1KiB"}}))
def test_a_snapshot_that_does_not_fit_is_refused_on_all_ranks(limits: dict[str, Any]) -> None:
    run = Run({**SMALL, **limits})
    run.train(range(1))
    with folder() as path:
        match = r"of host memory per rank for a snapshot, found .*1(\.0)? KiB.*wait=True"
        with pytest.raises(zhooks.CheckpointError, match=match):
            beside(run, path / "run")
        run.train(range(1, 2))
        assert os.listdir(path) == []
        run.train(range(2, 3))
        run.save(path / "run")


@on_ranks(2)
def test_ranks_that_ask_for_different_saves_are_told_so() -> None:
    run = Run(SMALL)
    with folder() as path:
        with pytest.raises(zhooks.CheckpointError, match="expected the same wait and keep on every rank"):
            run.save(path / "run-1", keep=1 + place()[0])
        with pytest.raises(zhooks.CheckpointError, match="rank 1: save expected wait=True or False"):
            run.save(path / "run-1", wait=place()[0] == 0 or "no")
        assert os.listdir(path) == []


@on_ranks(1)
def test_what_a_snapshot_opens_itself_never_waits_for_memory_that_it_holds() -> None:
    """States on disk that nothing was written to are opened while the copies are already counted."""
    run = Run({**SMALL, "optimizer": {"tier": "disk"}})
    store = store_of(run.attachment)
    blocks = [store.put(f"optimizer/{number}/0", 4096, torch.float32, Tier.DISK) for number in range(4)]
    pieces = [partial(iter, (BlockRange(block, 0, 4096),)) for block in blocks]
    tensors = [FileTensor(Entry(str(at), torch.float32, (4096,)), each) for at, each in enumerate(pieces)]
    limit = store.budget.high_water(Tier.HOST) + 4 * 16384
    store.change_limits({Tier.HOST: limit})
    memory = checkpoint.SnapshotMemory(None, store.budget, ALONE)
    with pytest.raises(zhooks.BudgetError, match="staging of optimizer/0/0"):
        checkpoint.Snapshot(tensors, store, memory)
    store.change_limits({Tier.HOST: limit + 3 * 16384})
    snapshot = checkpoint.Snapshot(tensors, store, memory)
    assert snapshot.copied_nbytes == 4 * 16384 and all(not chunk.any() for each in snapshot.tensors for chunk in each.chunks())
    snapshot.close()


def dies_while_it_writes(path: str) -> None:
    run = Run(SMALL)
    run.save(Path(path), extra={"step": 1})
    if place()[0] == 1:
        ShardWriter.finish = lambda writer: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    saving = beside(run, Path(path), extra={"step": 2})
    assert ended(saving) and place()[0] == 0
    # The other rank is gone, so no collective can tell of it; what this rank knows comes first.
    saving.wait()


def loads_and_saves(path: str) -> dict[str, Any]:
    run = Run(SMALL, seed=4)
    extra = run.load(Path(path))
    run.save(Path(path), extra={"step": 3})
    return extra


def test_a_rank_killed_while_it_writes_leaves_the_earlier_checkpoint(ranks2: Pool, tmp_path: Path) -> None:
    outcomes = ranks2.attempt(f"{__name__}:dies_while_it_writes", path=str(tmp_path / "run"))
    # A process that was killed may take long to be gone where one of its threads waits for a disk.
    assert outcomes[1].end is not End.RETURNED
    assert "Rank 1 is gone: killed" in outcomes[0].text, outcomes
    assert {re.sub("-.*", "", name) for name in os.listdir(tmp_path)} in ({"run"}, {"run", "run.tmp"})
    assert ranks2.run(f"{__name__}:loads_and_saves", path=str(tmp_path / "run")) == [{"step": 1}] * 2
    assert os.listdir(tmp_path) == ["run"]


KILLED = '''
import os, sys
from pathlib import Path
import zhooks
from tests.support.killed import ends_unless_killed_at
from tests.support.resuming import Run

path, every = Path(sys.argv[1]), int(sys.argv[2])
run = Run({"stage": 3})
run.train(range(1))

def save_killed_at(number, target, **more):
    """Save beside training, and die before the call of that number; True when the save came to its end."""
    def work():
        saving = run.attachment.save(target, run.optimizer, objects=run.objects, extra={"saved": number}, wait=False, **more)
        run.train(range(2))
        saving.wait()
    return ends_unless_killed_at(number, ("fsync", "rename", "unlink", "mkdir", "rmdir"), work)

number, found, ended = 1 - every, [], False
while not ended:
    number += every
    folder = path / str(number)
    folder.mkdir()
    run.save(folder / "run", extra={"saved": 0})
    ended = save_killed_at(number, folder / "run")
    found.append(run.load(folder / "run")["saved"])
    assert found[-1] in (0, number), (number, found)
    assert str(zhooks.latest(folder)) == str(folder / "run")
    run.save(folder / "run", extra={"saved": -1})
    assert os.listdir(folder) == ["run"] and run.load(folder / "run")["saved"] == -1, (number, os.listdir(folder))
new = [saved != 0 for saved in found]
assert new == sorted(new) and new[-1] and not new[0] and number > 15, found

# One of a series: the next, which has another name, leaves nothing of it.
number, ended = 0, False
while not ended:
    number += every
    folder = path / f"series-{number}"
    folder.mkdir()
    run.save(folder / "step-1", keep=1, extra={"saved": 0})
    ended = save_killed_at(number, folder / "step-2", keep=1)
    found = run.load(zhooks.latest(folder))["saved"]
    assert found in (0, number), (number, found)
    run.save(folder / "step-3", keep=1)
    assert os.listdir(folder) == ["step-3"], (number, os.listdir(folder))
assert number > 15
'''


# Every other call by default, of the one save or of the next of a series.
@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_save_killed_at_any_call_leaves_one_checkpoint_that_loads(tmp_path: Path, every: int) -> None:
    done = python("-c", KILLED, str(tmp_path), str(every))
    assert done.returncode == 0, done.stderr


ENDS = '''
import errno, os, sys
from pathlib import Path
from tests.support.resuming import Run

run = Run({"stage": 3, "parameter": {"tier": "disk"}, "optimizer": {"tier": "disk"}})
run.train(range(1))
if sys.argv[2] == "full":
    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.truncate = os.ftruncate = fail
run.attachment.save(Path(sys.argv[1]), run.optimizer, objects=run.objects, extra={"step": 1}, wait=False)
'''


@pytest.mark.parametrize("disk", ["free", "full"])
def test_the_end_of_the_program_waits_and_says_what_failed(tmp_path: Path, disk: str) -> None:
    done = python("-c", ENDS, str(tmp_path / "run"), disk)
    assert done.returncode == 0, done.stderr
    if disk == "free":
        assert Run({"stage": 3}).attachment.load(tmp_path / "run", (), objects={}) == {"step": 1} and not done.stderr
    else:
        assert "nothing was committed: Cannot save " in done.stderr and os.listdir(tmp_path) == []


# ---- ranks that agree by files


def test_a_rank_that_never_writes_is_named_when_patience_is_over(tmp_path: Path) -> None:
    with shard_folder.Folder(tmp_path) as held:
        held.create(f"saving-{'a' * 16}", b"")
        first = Outcomes(held, "a" * 16, 0, 2, "run", patience_s=0.05)
        first.failed("a reason")
        with pytest.raises(zhooks.CheckpointError, match="Expected rank 1 to write its file, found that nothing has"):
            first.collect()
        second = Outcomes(held, "a" * 16, 1, 2, "run", patience_s=0.05)
        second.failed("another")
        with pytest.raises(zhooks.CheckpointError, match="rank 0: a reason"):
            first.collect()
        os.unlink(tmp_path / f"saving-{'a' * 16}")
        with pytest.raises(zhooks.CheckpointError, match="found that the first rank gave up"):
            second.committed()
        with pytest.raises(zhooks.CheckpointError, match="found that it was removed"):
            first.collect()


@on_ranks(1, 2)
def test_a_folder_that_somebody_removed_fails_the_save_on_all() -> None:
    run = Run(SMALL)
    with folder() as path, held_back() as gate:
        saving = beside(run, path / "run")
        run.train(range(1))
        for begun in path.glob("run.tmp-*") if place()[0] == 0 else ():
            shutil.rmtree(begun)
        run.train(range(1, 2))
        gate.set()
        with pytest.raises(zhooks.CheckpointError, match="found that it was removed"):
            saving.wait()
        run.train(range(2, 3))
        assert os.listdir(path) == []
