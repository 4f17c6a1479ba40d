"""Checkpoints in the memory of peers: found again by ranks that are started again, at any number, and with a host lost.

pytest runs it on ranks of this machine; each rank's folder on a tmpfs of its own stands for a host. Restarts under torchrun are
in test_elastic.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zhooks
from offload.disk import Owner
from offload.errors import BudgetError
from offload.shards import Entry, Part, ShardReader, ShardWriter, digest, encoded, read_manifest
from offload.shards import host_memory as host_memory_module
from offload.tier import Tier
from tests.support.on_ranks import on_ranks, place
from tests.support.ranks import Pool
from tests.support.resuming import Run
from zhooks.checkpoint import saved_folder as saved_folder_module
from zhooks.resilience import peer_files as peer_files_module

SHM = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="no tmpfs")
Ranks = Callable[[int], Pool]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on a tmpfs for one test."""
    path = SHM / f"zhooks-test-{os.getpid()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def policy(memory: str, hosts: int = 1, **more: Any) -> dict[str, Any]:
    """Ranks of so many hosts, each of which has a folder for its memory."""
    root = Path(memory) / f"host{place()[0] * hosts // place()[1]}"
    root.mkdir(exist_ok=True)
    return {"stage": 3, "units": {"min_numel": 0}, "resilience": {"memory": str(root), "job": "test", **more}}


def killed(run: Run) -> None:
    """Leave as ranks do that end by an error."""
    try:
        raise RuntimeError("lost")
    except RuntimeError:
        run.attachment.detach()


@contextmanager
def one_host_is_left(shrunk: bool = True) -> Iterator[None]:
    """A job that had copies on other hosts is told that it has none any more, whatever its policy leaves out."""
    if not shrunk:
        yield
        return
    with pytest.warns(RuntimeWarning, match="needs 1 other host for copies, found 0"):
        yield


def placed(memory: str, hosts: int, tier: str) -> dict[str, Any]:
    return {**policy(memory, hosts), **{cell: {"tier": tier} for cell in ("parameter", "gradient", "optimizer")}}


def equal(found: list[Any], expected: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def left(memory: Path) -> list[Path]:
    """Files of any job."""
    return [path for path in memory.rglob("*") if path.is_file()]


# --- going on


def save_on(memory: str, hosts: int, kind: str = "adamw", tier: str = "device") -> None:
    run = Run(placed(memory, hosts, tier), kind=kind)
    run.train(range(3))
    run.attachment.save_to_peers(run.optimizer, objects=run.objects, extra={"step": 3})
    killed(run)


def resume_on(memory: str, hosts: int, expect: int | None = 3, folder: str = "", **more: Any) -> None:
    """The run goes on as one that trained these steps on as many ranks."""
    run = Run(policy(memory, hosts, **more), seed=1)
    found = run.attachment.resume([folder] if folder else [], run.optimizer, objects=run.objects)
    assert (found or {}).get("step") == expect
    killed(run)


def go_on(memory: str, hosts: int) -> None:
    whole = Run({"stage": 3, "units": {"min_numel": 0}})
    whole.train(range(6))
    run = Run(policy(memory, hosts), seed=1)
    assert run.attachment.resume((), run.optimizer, objects=run.objects) == {"step": 3}
    run.train(range(3, 6))
    assert run.losses == whole.losses[3:]
    assert equal(run.everything(), whole.everything())
    killed(run)


def job(function: Callable[..., object]) -> str:
    return f"{function.__module__}:{function.__name__}"


@pytest.mark.parametrize(
    ("world", "hosts"), [(1, 1), (2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (3, 3)))]
)
def test_ranks_that_are_started_again_go_on_bit_for_bit(world: int, hosts: int, memory: Path, ranks: Ranks) -> None:
    ranks(world).run(job(save_on), memory=str(memory), hosts=hosts)
    ranks(world).run(job(go_on), memory=str(memory), hosts=hosts)


def state_of(memory: str, hosts: int, into: str, kind: str, tier: str, shrunk: bool) -> None:
    run = Run(placed(memory, hosts, tier), seed=1, kind=kind)
    with one_host_is_left(shrunk):
        assert run.attachment.resume((), run.optimizer, objects=run.objects) == {"step": 3}
    full = run.attachment.state_dict(run.optimizer)
    if run.attachment.rank == 0:
        torch.save(full, into)
    killed(run)


@pytest.mark.parametrize(
    ("before", "after", "kind", "tier"),
    [
        (2, 1, "adamw", "device"),
        (1, 2, "muon", "host"),
        *(
            pytest.param(before, after, kind, tier, marks=pytest.mark.slow)
            for before, after, kind, tier in [
                (2, 3, "adamw", "disk"), (3, 2, "muon", "device"), (2, 3, "amsgrad", "host"), (3, 2, "sgd", "disk"),
            ]
        ),
    ],
)  # fmt: skip
def test_another_number_of_ranks_loads_the_same_state(
    before: int, after: int, kind: str, tier: str, memory: Path, ranks: Ranks, tmp_path: Path
) -> None:
    ranks(before).run(job(save_on), memory=str(memory), hosts=before, kind=kind, tier=tier)
    for world, name in ((before, "one"), (after, "other")):
        where = str(tmp_path / name)
        how: dict[str, Any] = {"into": where, "kind": kind, "tier": tier, "shrunk": world == 1 < before}
        ranks(world).run(job(state_of), memory=str(memory), hosts=world, **how)
    one, other = (torch.load(tmp_path / name, weights_only=True) for name in ("one", "other"))
    assert list(one["model"]) == list(other["model"])
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    for param, states in one["optimizer"]["state"].items():
        assert all(torch.equal(value, other["optimizer"]["state"][param][key]) for key, value in states.items())


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_host_that_is_lost_is_made_up_for_by_the_copy_on_the_next(lost: int, memory: Path, ranks: Ranks) -> None:
    ranks(2).run(job(save_on), memory=str(memory), hosts=2)
    shutil.rmtree(memory / f"host{lost}")
    ranks(2).run(job(go_on), memory=str(memory), hosts=2)
    (memory / f"host{lost}").mkdir(exist_ok=True)
    ranks(1).run(job(go_on_alone), memory=str(memory), host=1 - lost)


def go_on_alone(memory: str, host: int) -> None:
    run = Run({**policy(memory), "resilience": {"memory": f"{memory}/host{host}", "job": "test"}}, seed=1)
    with one_host_is_left():
        assert run.attachment.resume((), run.optimizer, objects=run.objects) == {"step": 3}
    killed(run)


# --- what is damaged, or missing


def damage(memory: Path, name: str) -> None:
    for path in memory.rglob(name):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)


def resume_saying(memory: str, hosts: int, expect: int | None, folder: str = "") -> list[str]:
    """What this rank warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resume_on(memory, hosts, expect, folder)
    return [str(each.message) for each in caught if str(each.message).startswith("resume")]


def resume_warned(pool: Pool, words: str, **how: Any) -> None:
    """Whoever compares what is damaged says so."""
    said = [text for each in pool.run(job(resume_saying), **how) for text in each]
    assert any(re.search(words, text) for text in said), said


def test_a_file_that_is_damaged_in_memory_is_taken_from_its_copy(memory: Path, ranks: Ranks) -> None:
    ranks(2).run(job(save_on), memory=str(memory), hosts=2)
    damage(memory, "rank-00000.safetensors")
    resume_warned(ranks(2), "checksum does not match.*copy", memory=str(memory), hosts=2, expect=3)


def resume_laid_out_otherwise(memory: str, hosts: int) -> list[str]:
    """All parameters in one unit, of which each rank has ranges of both files."""
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patched:
        warnings.simplefilter("always")
        # In a model as small as this one all of it would be read rather than skipped.
        for module in (peer_files_module, saved_folder_module):
            patched.setattr(module, "GAP", 0)
        run = Run({**policy(memory, hosts), "units": {"min_numel": 10**9}}, seed=1)
        assert run.attachment.resume((), run.optimizer, objects=run.objects) == {"step": 3}
    killed(run)
    return [str(each.message) for each in caught if str(each.message).startswith("resume")]


def damage_values(memory: Path, name: str) -> None:
    """One byte of the first tensor of masters."""
    (path,) = memory.rglob(name)
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    value = next(about for key, about in json.loads(raw[8 : 8 + length]).items() if key.endswith("/value"))
    raw[8 + length + value["data_offsets"][0]] ^= 1
    path.write_bytes(raw)


def test_what_is_damaged_is_found_where_every_rank_gets_a_range_of_it_alone(memory: Path, ranks: Ranks) -> None:
    ranks(2).run(job(save_on), memory=str(memory), hosts=2)
    damage_values(memory / "host1", "rank-00001.safetensors")
    said = [text for each in ranks(2).run(job(resume_laid_out_otherwise), memory=str(memory), hosts=2) for text in each]
    assert [bool(re.search(r"0000/value whose checksum does not match.*copy", text)) for text in said] == [True]


def refused_fetch(memory: str, hosts: int) -> None:
    def refuse(need: Any, **more: Any) -> None:
        if need[Tier.HOST]:
            raise BudgetError("no memory. Take less.")

    run = Run(policy(memory, hosts), seed=1)
    before = run.everything()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(peer_files_module, "preflight", refuse)
        with pytest.raises(zhooks.CheckpointError, match=r"expected .* of host memory per rank for shards of other hosts"):
            run.attachment.resume((), run.optimizer, objects=run.objects)
    assert equal(run.everything(), before)
    assert run.attachment.resume((), run.optimizer, objects=run.objects) == {"step": 3}
    killed(run)


def test_a_host_without_memory_for_what_was_lost_is_refused_and_nothing_has_changed(memory: Path, ranks: Ranks) -> None:
    ranks(2).run(job(save_on), memory=str(memory), hosts=2)
    shutil.rmtree(memory / "host1")
    ranks(2).run(job(refused_fetch), memory=str(memory), hosts=2)


@pytest.mark.parametrize("steps", [[96], [5, 40, 51], [1] * 96])
def test_what_comes_in_any_chunks_is_compared_as_the_whole(steps: list[int]) -> None:
    """Of a file of 128 bytes the first 96, in which two tensors are compared: the second has another byte or not."""
    data = torch.arange(128, dtype=torch.uint8)
    digests = {(8, 40): digest([data[8:40]]), (40, 90): digest([data[40:90]])}
    for changed in (False, True):
        part, sent, start = Part(128, [(0, 96)], digests), data.clone(), 0
        sent[89] += int(changed)
        for step in steps:
            assert part.wrong or start >= 90
            part.write(start, sent[start : start + step])
            start += step
        assert part.wrong == changed
        assert torch.equal(part.bytes(8, 96), sent[8:96])


def save_both(memory: str, hosts: int, folder: str) -> None:
    run = Run(policy(memory, hosts))
    run.train(range(2))
    run.attachment.save(f"{folder}/step-2", run.optimizer, objects=run.objects, extra={"step": 2})
    run.train(range(2, 3))
    run.attachment.save_to_peers(run.optimizer, objects=run.objects, extra={"step": 3})
    killed(run)


def test_what_is_nowhere_whole_gives_way_to_the_folder_and_says_so(memory: Path, ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(job(save_both), memory=str(memory), hosts=2, folder=str(tmp_path))
    ranks(2).run(job(resume_on), memory=str(memory), hosts=2, folder=str(tmp_path))
    damage(memory, "????-00000.safetensors")
    words = "every copy of a file is damaged: the newest older one"
    resume_warned(ranks(2), words, memory=str(memory), hosts=2, expect=2, folder=str(tmp_path))
    shutil.rmtree(memory / "host1")
    for path in memory.rglob("copy-*"):
        path.unlink()
    words = "no host has the file of rank 1"
    resume_warned(ranks(2), words, memory=str(memory), hosts=2, expect=2, folder=str(tmp_path))
    resume_warned(ranks(2), words, memory=str(memory), hosts=2, expect=None)


def save_behind(memory: str, folder: str) -> None:
    """A save beside training of step 2 is committed after one to peers of step 3; and one to the folder is newest."""
    run = Run(policy(memory))
    run.train(range(2))
    saving = run.attachment.save(f"{folder}/step-2", run.optimizer, objects=run.objects, extra={"step": 2}, wait=False)
    run.train(range(2, 3))
    run.attachment.save_to_peers(run.optimizer, objects=run.objects, extra={"step": 3})
    saving.wait()
    assert run.attachment.resume(folder, run.optimizer, objects=run.objects) == {"step": 3}
    run.attachment.save(f"{folder}/step-4", run.optimizer, objects=run.objects, extra={"step": 4})
    killed(run)


def test_the_newest_is_the_one_whose_state_is_wherever_it_is(memory: Path, ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(job(save_behind), memory=str(memory), folder=str(tmp_path))
    ranks(2).run(job(resume_on), memory=str(memory), hosts=1, expect=4, folder=str(tmp_path))
    ranks(2).run(job(resume_on), memory=str(memory), hosts=1, expect=4, folder=str(tmp_path / "step-4"))


def save_with_clocks_apart(memory: str, folder: str) -> None:
    """The folder's clock is an hour ahead of the one by which memory is dated, and the run is begun anew from it."""
    run = Run(policy(memory))
    run.train(range(2))
    path = Path(folder, "step-2")
    run.attachment.save(path, run.optimizer, objects=run.objects, extra={"step": 2})
    said = read_manifest(path)
    about = {**said.about, "saved_ns": said.about["saved_ns"] + 3600 * 10**9}
    (path / "manifest.json").write_bytes(encoded(said.model_copy(update={"about": about})))
    killed(run)
    run = Run(policy(memory), seed=1)
    run.attachment.load(path, run.optimizer, objects=run.objects)
    run.train(range(2, 3))
    run.attachment.save_to_peers(run.optimizer, objects=run.objects, extra={"step": 3})
    killed(run)


def test_what_is_saved_after_a_load_is_newer_than_what_was_loaded_whatever_clocks_say(memory: Path, tmp_path: Path) -> None:
    save_with_clocks_apart(str(memory), str(tmp_path))
    resume_on(str(memory), 1, 3, str(tmp_path))


@on_ranks(1, 2)
def test_a_run_without_anything_to_go_on_from_starts() -> None:
    run = Run({"stage": 3})
    assert run.attachment.resume(["/nowhere/at/all"], run.optimizer) is None
    run.train(range(1))
    run.attachment.detach()


def test_what_was_not_fetched_of_a_file_is_never_read_as_zeros(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "rank-00000.safetensors", [Entry("a", torch.float32, (64,))])
    writer.write("a", [torch.ones(64)])
    record = writer.finish()
    header = record.nbytes - 256
    raw = torch.frombuffer(bytearray((tmp_path / record.name).read_bytes()), dtype=torch.uint8)
    part = Part(record.nbytes, [(0, header), (header + 64, header + 128)])
    for start, stop in part.ranges:
        part.write(start, raw[start:stop])
    with closing(ShardReader(tmp_path, record, part)) as reader:
        assert reader.elements("a", 16, 16).tolist() == [1.0] * 16
        for start, numel in ((0, 4), (15, 2), (31, 2), (40, 1)):
            with pytest.raises(zhooks.CheckpointError, match="in the part that was fetched"):
                reader.elements("a", start, numel)


# --- killed at any moment


def fail_half_way(memory: str, hosts: int, at: int) -> None:
    run = Run(policy(memory, hosts))
    run.train(range(3))
    run.attachment.save_to_peers(run.optimizer, objects=run.objects, extra={"step": 3})
    real, calls = ShardWriter.write, iter(range(10**6))

    def write(writer: ShardWriter, *arguments: Any) -> None:
        if next(calls) == at and place()[0] == place()[1] - 1:
            raise OSError(28, "No space left on device")
        real(writer, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ShardWriter, "write", write)
        with pytest.raises(zhooks.CheckpointError, match="No space left"):
            run.attachment.save_to_peers(run.optimizer, objects=run.objects, extra={"step": 4})
    run.train(range(3, 4))
    killed(run)


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_a_save_that_fails_leaves_the_one_before(at: int, memory: Path, ranks: Ranks) -> None:
    ranks(2).run(job(fail_half_way), memory=str(memory), hosts=2, at=at)
    assert len(list(memory.rglob("gen-*"))) == 2
    ranks(2).run(job(go_on), memory=str(memory), hosts=2)


# --- whose memory


@on_ranks(2)
def test_the_end_of_the_attachment_frees_the_memory() -> None:
    root = SHM / f"zhooks-test-{os.getppid()}-end"
    root.mkdir(exist_ok=True)
    try:
        run = Run(policy(str(root)))
        run.attachment.save_to_peers(run.optimizer)
        assert left(root)
        run.attachment.detach()
        torch.distributed.barrier()
        assert not left(root)
        torch.distributed.barrier()  # no rank removes the folder while another lists it
    finally:
        shutil.rmtree(root, ignore_errors=True)


def test_memory_of_jobs_that_are_over_goes_at_the_next_start_and_that_of_others_stays(memory: Path) -> None:
    """Who started the ranks lives on, until its mark names a process that has ended; a job of the same name finds its own."""
    for name in ("one", "other"):
        run = Run({"stage": 3, "resilience": {"memory": str(memory), "job": name}})
        run.attachment.save_to_peers(run.optimizer)
        killed(run)
    foreign = memory / f"zhooks-{os.geteuid()}" / "job-of-somebody"
    foreign.mkdir()
    jobs = sorted(memory.glob("*/job-????????????????"))
    Run({"stage": 3, "resilience": {"memory": str(memory)}}).attachment.detach()
    assert all(path.exists() for path in jobs)
    ended = replace(Owner.here(), started_ticks=1)
    for mark in memory.glob("*/job-*/launcher-*"):
        mark.write_bytes(ended.page())
    again = Run({"stage": 3, "resilience": {"memory": str(memory), "job": "one"}})
    (mine,) = memory.glob("*/job-????????????????")
    assert mine in jobs and foreign.exists()
    assert again.attachment.resume((), again.optimizer) == {}
    again.attachment.detach()
    assert not mine.exists()


def test_a_folder_of_somebody_else_is_refused(memory: Path) -> None:
    home = memory / f"zhooks-{os.geteuid()}"
    for make in (lambda: home.symlink_to("/tmp"), lambda: home.touch(), lambda: home.mkdir(0o777)):
        make()
        home.chmod(0o777) if not home.is_symlink() else None
        run = Run({"stage": 3, "resilience": {"memory": str(memory), "job": "test"}})
        with pytest.raises(zhooks.CheckpointError, match="needs a private folder of this user"):
            run.attachment.save_to_peers(run.optimizer)
        run.attachment.detach()
        home.rmdir() if home.is_dir() and not home.is_symlink() else home.unlink()


def test_another_living_job_of_the_same_run_id_is_refused(memory: Path) -> None:
    one, other = (Run(policy(str(memory))) for _ in range(2))
    one.attachment.save_to_peers(one.optimizer)
    with pytest.raises(zhooks.CheckpointError, match=r"another job with the same run id.*\[resilience\] job"):
        other.attachment.save_to_peers(other.optimizer)
    one.attachment.detach()
    other.attachment.save_to_peers(other.optimizer)
    other.attachment.detach()


# --- refused


@pytest.mark.parametrize(
    ("resilience", "words"),
    [
        ({"memory": "/nowhere"}, "needs a folder in memory .tmpfs., found no such folder"),
        ({"memory": str(Path(__file__).parent)}, "needs a folder in memory .tmpfs., found a folder on a disk"),
        ({"job": None}, "no TORCHELASTIC_RUN_ID"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(resilience: dict[str, Any], words: str, memory: Path) -> None:
    run = Run({"stage": 3, "resilience": {"memory": str(memory), "job": "test", **resilience}})
    with pytest.raises(zhooks.CheckpointError, match=words):
        run.attachment.save_to_peers(run.optimizer)
    run.attachment.detach()


def refused_for_room(memory: str, what: str) -> None:
    more = {"budget": {"host": 1000}} if what == "budget" else {}
    run = Run({**policy(memory), **more})
    with pytest.MonkeyPatch.context() as patched:
        if what == "space":
            patched.setattr(host_memory_module.HostMemory, "free", lambda memory: 1000)
        with pytest.raises(zhooks.CheckpointError, match=r"expected .* of host memory per rank on top of the previous save"):
            run.attachment.save_to_peers(run.optimizer)
    assert [path for path in left(Path(memory)) if not path.parent.name.startswith("job-")] == []
    run.train(range(1))
    killed(run)


@pytest.mark.parametrize("what", ["budget", "space"])
def test_a_save_without_room_is_refused_and_training_goes_on(what: str, memory: Path, ranks: Ranks) -> None:
    ranks(2).run(job(refused_for_room), memory=str(memory), what=what)


def fewer_hosts(memory: str) -> None:
    run = Run(policy(memory, 1, copies=2))
    with pytest.warns(RuntimeWarning, match="needs 2 other host") if place()[0] == 0 else warnings.catch_warnings():
        run.attachment.save_to_peers(run.optimizer)
    killed(run)


def test_fewer_hosts_than_copies_are_said(memory: Path, ranks: Ranks) -> None:
    ranks(2).run(job(fewer_hosts), memory=str(memory))
    assert not list(memory.rglob("copy-*"))


def lose_folder(memory: str) -> None:
    """One host loses what it keeps, and a policy asks for more, while the run goes on."""
    run = Run(policy(memory, 2))
    run.train(range(2))
    run.attachment.save_to_peers(run.optimizer, objects=run.objects, extra={"step": 2})
    torch.distributed.barrier()
    if place()[0] == 1:
        shutil.rmtree(next(Path(memory, "host1").iterdir()))
    torch.distributed.barrier()
    run.train(range(2, 3))
    run.attachment.save_to_peers(run.optimizer, objects=run.objects, extra={"step": 3})
    run.attachment.apply(policy(memory, 2, copies=0))
    run.attachment.save_to_peers(run.optimizer, objects=run.objects, extra={"step": 3})
    assert not list(Path(memory).rglob("copy-*"))
    killed(run)


def test_a_host_that_loses_its_folder_in_mid_run_and_another_policy_are_followed(memory: Path, ranks: Ranks) -> None:
    ranks(2).run(job(lose_folder), memory=str(memory))
    assert len(list(memory.rglob("gen-*"))) == 2
    ranks(2).run(job(go_on), memory=str(memory), hosts=2)
