"""Preemption: signals that reach some ranks end the run on all of them, after one step, in a checkpoint that goes on.

pytest runs it, on real ranks that send signals to themselves, and under torchrun.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from offload.shards import ShardWriter
from tests.support.inside import comm_of
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.resuming import Run, batch
from tests.support.waiting import soon

STEPS = 5


def policy(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "units": {"min_numel": 0}, **more}


def signalled(*signals: int) -> None:
    """This rank receives them, and has handled them."""
    for one in signals:
        os.kill(os.getpid(), one)


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def preempted_at(run: Run, path: Path, told: Callable[[int], bool]) -> int:
    """Train as a script does, told by a signal in the middle of some steps; the step after which it ended."""
    run.attachment.catch_preemption()
    for step in range(STEPS):
        loss = run.model(batch(step)).square().mean()
        if told(step):
            signalled(signal.SIGTERM)
        loss.backward()
        run.optimizer.step(), run.scheduler.step(), run.optimizer.zero_grad()
        try:
            run.attachment.exit_if_preempted(path, run.optimizer, objects=run.objects, extra={"step": step + 1})
        except SystemExit as end:
            assert end.code == 0
            return step
    return STEPS


def undisturbed(stage: int) -> list[Any]:
    run = Run(policy(stage))
    run.train(range(STEPS))
    return [run.everything(), run.losses[-1]]


def goes_on(stage: int, path: Path) -> list[Any]:
    run = Run(policy(stage), seed=5)
    run.train(range(run.load(path)["step"], STEPS))
    return [run.everything(), run.losses[-1]]


def equal(one: list[Any], other: list[Any]) -> bool:
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@on_ranks(1, 2, 3, stage=(0, 3))
def test_a_signal_on_one_rank_ends_all_after_the_same_step_and_the_run_goes_on_bit_for_bit(stage: int) -> None:
    rank, world = place()
    with folder() as path:
        run = Run(policy(stage))
        assert preempted_at(run, path / "run", lambda step: step == 2 and rank == world - 1) == 2
        run.attachment.detach()
        expected = undisturbed(stage)
        assert equal(goes_on(stage, path / "run"), expected)


@on_ranks(2)
def test_ranks_that_are_told_at_different_steps_save_after_the_first_of_them() -> None:
    rank, _ = place()
    with folder() as path:
        run = Run(policy(2))
        assert preempted_at(run, path / "run", lambda step: step == (1 if rank else 3)) == 1
        assert run.attachment.load(path / "run", run.optimizer, objects=run.objects) == {"step": 2}
        run.attachment.detach()


@on_ranks(2)
def test_ranks_that_divide_layers_or_stages_between_them_agree() -> None:
    rank, _ = place()
    for axes in (("tp",), ("pp",)):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", *axes))
        run = Run(policy(3), mesh=mesh)
        run.attachment.catch_preemption()
        run.train(range(1))
        before = run.attachment.preempted
        if rank:
            signalled(signal.SIGTERM)
        run.train(range(1, 2))
        assert (before, run.attachment.preempted) == (False, True)
        run.attachment.detach()


@on_ranks(2)
def test_training_asks_in_the_exchange_that_backward_ends_with() -> None:
    run = Run(policy(3))
    run.attachment.catch_preemption()
    run.train(range(2))
    transport: Any = comm_of(run.attachment).world
    calls: list[str] = []
    real = transport.all_reduce

    def counted(call: Any, *arguments: Any) -> None:
        calls.append(call.what)
        real(call, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transport, "all_reduce", counted)
        run.train(range(2, 3))
        assert not run.attachment.preempted
        assert "end of backward" in calls
        assert "preempted" not in calls
        assert not run.attachment.preempted
        assert calls.count("preempted") == 1
    run.attachment.detach()


@on_ranks(1, 2)
def test_where_no_step_comes_the_question_itself_asks_all_ranks() -> None:
    rank, world = place()
    run = Run(policy(3))
    run.attachment.catch_preemption()
    answers = []
    with torch.no_grad():
        for step in range(3):
            run.model.eval()(batch(step))
            if step == 1 and rank == world - 1:
                signalled(signal.SIGTERM)
            answers.append(run.attachment.preempted)
    assert answers == [False, True, True]
    run.attachment.detach()


@on_ranks(2, stage=(1, 2))
def test_between_the_micro_batches_of_a_step_sums_are_saved_and_the_step_is_completed_later(stage: int) -> None:
    rank, _ = place()

    def micro(run: Run, first: int, number: int) -> None:
        if number < 2:
            with run.attachment.no_sync():
                run.model(batch(first + number)).square().mean().backward()
            return
        run.model(batch(first + number)).square().mean().backward()
        run.optimizer.step(), run.optimizer.zero_grad()

    with folder() as path:
        whole = Run(policy(stage))
        for number in range(3):
            micro(whole, 0, number)
        run = Run(policy(stage))
        run.attachment.catch_preemption()
        micro(run, 0, 0)
        run.attachment.exit_if_preempted(path / "run", run.optimizer)
        if rank == 0:
            signalled(signal.SIGTERM)
        micro(run, 0, 1)
        with pytest.raises(SystemExit):
            run.attachment.exit_if_preempted(path / "run", run.optimizer, extra=lambda: {"micro": 2})
        run.attachment.detach()
        resumed = Run(policy(stage), seed=3)
        for number in range(resumed.attachment.load(path / "run", resumed.optimizer)["micro"], 3):
            micro(resumed, 0, number)
        assert all(torch.equal(a, b) for a, b in zip(resumed.everything(), whole.everything(), strict=True))


@on_ranks(1, 2)
def test_signals_during_the_save_do_not_end_it() -> None:
    real = ShardWriter.write

    def write(writer: ShardWriter, *arguments: Any) -> None:
        signalled(signal.SIGTERM)
        real(writer, *arguments)

    with folder() as path, pytest.MonkeyPatch.context() as patched:
        patched.setattr(ShardWriter, "write", write)
        run = Run(policy(3))
        assert preempted_at(run, path / "run", lambda step: step == 0) == 0
        assert run.load(path / "run") == {"step": 1}
        run.attachment.detach()


@on_ranks(2)
def test_a_save_beside_training_that_failed_is_said_and_does_not_keep_the_last_one_from_being_made() -> None:
    rank, _ = place()
    with folder() as path:
        run = Run(policy(3, save={"while_saving": "refuse"}))
        run.attachment.catch_preemption()
        if rank:
            signalled(signal.SIGTERM)
        run.train(range(1))
        with pytest.MonkeyPatch.context() as patched:
            if rank:
                patched.setattr(os, "pwritev", _disk_full)
            saving = run.attachment.save(path / "beside", run.optimizer, wait=False)
            assert soon(lambda: saving.done)
        words = "rank 1: Cannot save .*No space left"
        said = pytest.warns(RuntimeWarning, match=words) if rank == 0 else nullcontext()  # once a job
        with said, pytest.raises(SystemExit):
            run.attachment.exit_if_preempted(path / "last", run.optimizer)
        assert zhooks.latest(path) == path / "last"
        run.attachment.detach()


def _disk_full(*_: Any) -> Any:
    raise OSError(28, os.strerror(28))


@on_ranks(1, 2)
def test_a_handler_of_the_program_is_called_as_well_and_is_back_after_detach() -> None:
    called: list[int] = []

    def mine(number: int, frame: Any) -> None:
        called.append(number)

    with handled(signal.SIGUSR2, mine), handled(signal.SIGTERM, signal.SIG_DFL):
        run = Run(policy(3))
        run.attachment.catch_preemption((signal.SIGUSR2, signal.SIGTERM))
        run.attachment.catch_preemption((signal.SIGUSR2, signal.SIGTERM))
        signalled(signal.SIGUSR2, signal.SIGTERM)
        assert called == [signal.SIGUSR2]
        assert run.attachment.preempted
        run.attachment.detach()
        assert signal.getsignal(signal.SIGUSR2) is mine
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@on_ranks(2)
def test_a_signal_that_nobody_asked_about_is_a_warning_at_detach() -> None:
    rank, _ = place()
    run = Run(policy(3))
    run.attachment.catch_preemption()
    run.train(range(1))
    assert not run.attachment.preempted
    if rank:
        signalled(signal.SIGTERM)
        with pytest.warns(RuntimeWarning, match="found that it has not, so this process does not stop"):
            run.attachment.detach()
    else:
        run.attachment.detach()


@on_ranks(1)
def test_a_process_that_is_forked_from_this_one_is_ended_by_the_signal() -> None:
    with handled(signal.SIGTERM, signal.SIG_DFL):
        run = Run(policy(3))
        run.attachment.catch_preemption()
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(3)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not run.attachment.preempted
        run.attachment.detach()


@on_ranks(1, 2)
def test_a_handler_that_came_later_stays() -> None:
    def later(number: int, frame: Any) -> None: ...

    with handled(signal.SIGUSR2, signal.SIG_IGN):
        run = Run(policy(3))
        run.attachment.catch_preemption((signal.SIGUSR2,))
        signal.signal(signal.SIGUSR2, later)
        run.attachment.detach()
        assert signal.getsignal(signal.SIGUSR2) is later


@on_ranks(1, 2)
def test_what_cannot_be_caught_is_refused_on_every_rank_and_no_handler_changes() -> None:
    rank, world = place()
    run = Run(policy(3))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(zhooks.AttachError, match="preempted expected signals to catch, found none"):
        run.attachment.exit_if_preempted("nowhere")
    with pytest.raises(zhooks.AttachError, match=r"signals that a process can handle.*SIGKILL"):
        run.attachment.catch_preemption((signal.SIGKILL,) if rank == world - 1 else (signal.SIGTERM,))
    with pytest.raises(zhooks.AttachError, match="found none"):
        run.attachment.catch_preemption(())
    if world > 1:
        with pytest.raises(zhooks.AttachError, match="found signals = SIGTERM on rank 0 and signals = SIGUSR2 on rank 1"):
            run.attachment.catch_preemption((signal.SIGUSR2 if rank else signal.SIGTERM,))
    elsewhere: list[BaseException] = []

    def call() -> None:
        try:
            run.attachment.catch_preemption()
        except zhooks.AttachError as error:
            elsewhere.append(error)

    thread = threading.Thread(target=call, name="loader")
    thread.start(), thread.join()
    assert "expected the main thread" in str(elsewhere[0])
    assert signal.getsignal(signal.SIGTERM) == before
    run.attachment.catch_preemption()
    with pytest.raises(zhooks.AttachError, match="caught already, SIGTERM, found SIGUSR2"):
        run.attachment.catch_preemption((signal.SIGUSR2,))
    run.attachment.detach()


SCRIPT = """
import pathlib, sys, torch, torch.distributed as dist, zhooks

folder, steps, transport = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
attachment = zhooks.attach(model, policy={"stage": 3, "units": {"min_numel": 0}, "comm": {"transport": transport}})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
attachment.catch_preemption()
first = attachment.load(folder / "run", optimizer)["step"] if (folder / "run").exists() else 0
torch.manual_seed(first)
for step in range(first, steps):
    data = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step(), optimizer.zero_grad()
    (folder / f"reached-{rank}").write_text(str(step + 1))
    try:
        attachment.exit_if_preempted(folder / "run", optimizer, extra={"step": step + 1})
    except SystemExit as end:
        (folder / f"exit-{rank}").write_text(repr(end.code))
        raise
attachment.save_full(folder / "end.safetensors")
dist.destroy_process_group()
"""


def launch(path: Path, steps: int, transport: str = "auto") -> subprocess.Popen[bytes]:
    script = path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (path / "err").open("ab") as errors:
        return subprocess.Popen([*command, str(script), str(path), str(steps), transport], stderr=errors)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "p2p", "stock"])
def test_under_torchrun_a_signal_to_the_agent_saves_on_all_ranks_and_the_job_goes_on_bit_for_bit(
    tmp_path: Path, transport: str
) -> None:
    job = launch(tmp_path, 100_000_000, transport)
    assert soon(lambda: all((tmp_path / f"reached-{rank}").exists() for rank in range(2)), within_s=300)
    job.send_signal(signal.SIGTERM)
    job.wait(120)
    reached = [int((tmp_path / f"reached-{rank}").read_text()) for rank in range(2)]
    assert reached[0] == reached[1]
    assert [(tmp_path / f"exit-{rank}").read_text() for rank in range(2)] == ["0", "0"]
    assert zhooks.latest(tmp_path) == tmp_path / "run"
    assert launch(tmp_path, reached[0] + 3, transport).wait(300) == 0, (tmp_path / "err").read_text()[-4000:]
    whole = tmp_path / "whole"
    whole.mkdir()
    assert launch(whole, reached[0] + 3, transport).wait(300) == 0
    assert (tmp_path / "end.safetensors").read_bytes() == (whole / "end.safetensors").read_bytes()
