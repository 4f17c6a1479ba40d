"""zhooks.integrations.torchft: replicas that are jobs of their own, with a real lighthouse and real processes.

What one rank is refused needs neither. `replica_job.py` is what the processes run.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.errors import AttachError, CapabilityError

pytest.importorskip("torchft", reason="pip install '.[torchft]'")

from torchft import ProcessGroupGloo
from torchft.coordination import LighthouseServer

from tests.zhooks.integrations.two_replicas import Two
from zhooks.integrations.torchft import Optimizer, Replicas


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def lose_one(replicas: Two, die: tuple[int, str]) -> list[list[int]]:
    """One replica is killed, starts again and takes the other's state over."""
    first, second = replicas.start(0), replicas.start(1, die)
    assert replicas.ended(second) == [-signal.SIGKILL] * replicas.ranks, replicas.said()
    again = replicas.start(1)
    assert replicas.ended(first + again) == [0] * 2 * replicas.ranks, replicas.said()
    return replicas.check()


@pytest.mark.slow
def test_a_killed_replica_leaves_the_other_training_and_takes_its_state_over_when_it_returns(folder: Path) -> None:
    replicas = Two(folder, 1, {"stage": 3}, together=4, alone=True)
    try:
        groups = lose_one(replicas, (2, "backward"))
    finally:
        replicas.close()
    lengths = [len(each) for each in groups]
    assert lengths[-1] == 2 and 1 in lengths[lengths.index(2) :]


STAGES = {
    "stage0": {"stage": 0},
    "stage1-host": {"stage": 1, "optimizer": {"tier": "host"}},
    "stage2-disk": {"stage": 2, "optimizer": {"tier": "disk"}},
    "stage3-disk": {"stage": 3, "parameter": {"tier": "disk"}, "gradient": {"tier": "host"}, "optimizer": {"tier": "disk"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", STAGES.values(), ids=STAGES)
def test_two_ranks_a_replica_lose_one_and_go_on_at_every_stage_and_tier(folder: Path, policy: dict[str, Any]) -> None:
    replicas = Two(folder, 2, policy, together=4, alone=True)
    try:
        groups = lose_one(replicas, (2, "backward"))
    finally:
        replicas.close()
    assert sum(len(each) == 1 for each in groups)


@pytest.mark.slow
def test_replicas_that_start_from_other_values_are_refused_by_name_on_all_ranks(folder: Path) -> None:
    replicas = Two(folder, 2, {"stage": 3}, together=2, seeds=(0, 1))
    try:
        assert replicas.ended(replicas.start(0) + replicas.start(1)) == [1] * 4
        assert all("expected replicas that start from the same" in path.read_text() for path in folder.glob("err*"))
    finally:
        replicas.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_replicas_that_are_killed_at_random_moments_never_differ(folder: Path, seed: int) -> None:
    """Eight kills each, some of them of a replica that is about to join or takes a state over."""
    random, replicas = Random(seed), Two(folder, 1, {"stage": 3, "optimizer": {"tier": "disk"}}, together=10**9, alone=True)
    living = [replicas.start(0), replicas.start(1)]
    try:
        for kill in range(6):
            at = replicas.steps_together(living)
            victim, joins = random.randrange(2), kill % 3 == 2
            for moment in (random.random() * 0.2, random.uniform(3, 12)) if joins else (random.random() * 0.2,):
                # When it is killed is not what is waited for.
                if moment < 1:
                    replicas.steps_together(living, at)
                time.sleep(moment)
                os.killpg(living[victim][0].pid, signal.SIGKILL)
                replicas.ended(living[victim])
                living[victim] = replicas.start(victim)
        last = replicas.steps_together(living, replicas.steps_together(living))
        replicas.stop_at(last + 1500)
        assert replicas.ended(living[0] + living[1]) == [0, 0], replicas.said()
    finally:
        replicas.close()
    assert {len(each) for each in replicas.check()} == {1, 2}


def joined(policy: dict[str, Any], **options: Any) -> Replicas:
    model = nn.Linear(4, 4)
    attachment = zhooks.attach(model, policy=policy)
    return Replicas(attachment, torch.optim.AdamW(model.parameters()), ProcessGroupGloo(), 1, **options)


@pytest.mark.parametrize(
    ("policy", "options", "error", "named"),
    [
        ({"optimizer": {"overlap": True}}, {}, CapabilityError, "overlap"),
        ({"comm": {"timeout_s": 60}}, {}, AttachError, "timeout_s"),
        ({"comm": {"timeout_s": 300}}, {}, AttachError, "TORCHFT_TIMEOUT_SEC"),
        ({}, {}, AttachError, "TORCHFT_LIGHTHOUSE"),
        ({}, {"use_async_quorum": True}, AttachError, "use_async_quorum"),
        ({}, {"init_sync": True}, AttachError, "init_sync"),
    ],
)
def test_what_replicas_cannot_train_is_refused_before_anything_is_opened(
    policy: dict[str, Any], options: dict[str, Any], error: type[Exception], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named == "TORCHFT_TIMEOUT_SEC":
        monkeypatch.setenv(named, "1000")
    if named == "TORCHFT_LIGHTHOUSE":
        monkeypatch.delenv(named, raising=False)
    else:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:1")
    with pytest.raises(error, match=named):
        joined(policy, **options)


@contextmanager
def alone(attachment: zhooks.Attachment, optimizer: torch.optim.Optimizer) -> Iterator[Replicas]:
    """The one replica, of one rank, of a lighthouse of its own."""
    house = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10, quorum_tick_ms=10)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = Replicas(
        attachment, optimizer, ProcessGroupGloo(), 1, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=house.address(), quorum_timeout=timedelta(seconds=60),
    )  # fmt: skip
    try:
        yield made
    finally:
        made.shutdown()
        house.shutdown()


def test_backward_outside_of_a_step_is_refused_and_shutdown_gives_plain_training_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    attachment = zhooks.attach(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with alone(attachment, optimizer), pytest.raises(zhooks.ShardedOpError, match="zero_grad"):
        model(torch.randn(2, 4)).sum().backward()
    model(torch.randn(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    attachment.detach()


@pytest.mark.parametrize(("restarts", "step", "said"), [("0", 0, False), ("2", 0, True), ("2", 3, False)])
def test_ranks_started_again_that_find_no_state_say_that_training_begins_at_step_0(
    monkeypatch: pytest.MonkeyPatch, restarts: str, step: int, said: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    model = nn.Linear(4, 4)
    attachment = zhooks.attach(model)
    adamw = torch.optim.AdamW(model.parameters())
    with alone(attachment, adamw) as made:
        # What a program does that has loaded a checkpoint.
        made.load_state_dict({"step": step, "batches_committed": step})
        optimizer = Optimizer(made, adamw)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            optimizer.zero_grad()
        assert any("begins at step 0" in str(each.message) for each in heard) == said
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        assert made.current_step() == step + 1
        optimizer.zero_grad()
    attachment.detach()
