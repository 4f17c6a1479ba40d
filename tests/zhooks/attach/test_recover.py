"""Ranks that did not meet: all name the same one, the model is at rest, and after ``recover`` the step gives the same bits.

pytest runs it on pools of ranks; faults in processes of their own are in ``tests/faults/``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from tests.support.inside import flats_of, runtime_of, short_waits
from tests.support.moving import arranged
from tests.support.on_ranks import folder, on_ranks
from tests.support.slow import slow
from tests.support.values import full, same

#: Long: nobody is given up but inside ``short_waits``.
TIMEOUT_S = 120.0


class Late(nn.Module):
    """Waits in its forward where it is told to, for longer than ranks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.before_second: Callable[[], None] = lambda: None
        self.in_backward: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if x.requires_grad:
            x.register_hook(lambda grad: self.in_backward())
        self.before_second()
        out: Tensor = self.second(x)
        return out


def attached(transport: str, stage: int, **more: Any) -> tuple[Late, zhooks.Attachment, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Late()
    policy = {"stage": stage, "units": {"min_numel": 0}, "comm": {"transport": transport, "timeout_s": TIMEOUT_S}, **more}
    attachment = zhooks.attach(model, policy=policy)
    return model, attachment, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(transport: str, stage: int) -> list[Tensor]:
    model, attachment, optimizer = attached(transport, stage)
    for number in range(3):
        step(model, optimizer, number)
    values = full(model)
    attachment.detach()
    return values


def sleeps(rank: int, store: Any, key: str) -> Callable[[], None]:
    """That rank stays away until the others have given it up."""

    def wait() -> None:
        if dist.get_rank() == rank:
            while not store.check([key]):
                time.sleep(0.01)

    return wait


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


@on_ranks(2, transport=("shm", *slow("p2p", "stock")), stage=(3,))
def test_a_late_rank_is_named_by_all_and_the_step_repeated_with_equal_bits(transport: str, stage: int) -> None:
    late_rank_recovers(transport, stage)


@pytest.mark.slow
@on_ranks(4, transport=("shm", "p2p", "stock"), stage=(0, 1, 2))
def test_four_ranks_name_one_late_rank_at_every_stage(transport: str, stage: int) -> None:
    late_rank_recovers(transport, stage)


def late_rank_recovers(transport: str, stage: int) -> None:
    expected = trained(transport, stage)
    model, attachment, optimizer = attached(transport, stage)
    store, key = _store(), f"given up {transport} {stage}"
    step(model, optimizer, 0)
    model.before_second = sleeps(1, store, key)
    within = r"^Rank 1 is late\. .* within 4.0 s, .*attachment.recover\(\)"
    with short_waits(attachment), pytest.raises(zhooks.DivergenceError, match=within):
        try:
            step(model, optimizer, 1)
        finally:
            store.set(key, "yes")
    model.before_second = lambda: None
    with pytest.raises(zhooks.DivergenceError, match="Rank 1 is late"):
        attachment.state_dict()
    recovered = attachment.recover()
    assert recovered.steps == 1
    assert all(param.grad is None for param in model.parameters())
    assert not runtime_of(attachment).reducer.open
    assert all(flat.full is None for flat in flats_of(attachment) if flat.releasable)
    for number in (1, 2):
        step(model, optimizer, number)
    assert same(full(model), expected)
    attachment.detach()


@on_ranks(2)
def test_a_save_that_only_rank_0_calls_says_that_every_rank_must() -> None:
    model, attachment, optimizer = attached("shm", 3)
    step(model, optimizer, 0)
    rank, named = dist.get_rank(), r"not under `if rank == 0:`"
    with folder() as where:
        with short_waits(attachment), pytest.raises(zhooks.DivergenceError, match=rf"{named}.*Rank {rank}: ") as caught:
            if rank == 0:
                attachment.save(where / "step-1", optimizer)
            step(model, optimizer, 1)
        assert str(caught.value).startswith("The ranks wait for each other in different calls: \"save\" on rank 0, ")
        assert not list(where.iterdir())


@on_ranks(2)
def test_a_step_with_the_gradients_that_recover_dropped_is_refused() -> None:
    model, attachment, optimizer = attached("shm", 3)
    store, key = _store(), "given up between backward and step"
    model(torch.ones(2, 8)).sum().backward()
    sleeps(1, store, key)()
    with short_waits(attachment), pytest.raises(zhooks.DivergenceError, match="Rank 1 is late"):
        try:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        finally:
            store.set(key, "yes")
    assert attachment.recover().dropped
    with pytest.raises(zhooks.DivergenceError, match=r"AdamW.step expected a backward after recover\(\)"):
        optimizer.step()
    step(model, optimizer, 0)
    attachment.detach()


@pytest.mark.slow
@on_ranks(2)
def test_ranks_at_different_steps_may_only_load() -> None:
    model, attachment, optimizer = attached("shm", 3)
    with folder() as path:
        step(model, optimizer, 0)
        attachment.save(path / "run", optimizer)
        expected = full(model)
        model(torch.ones(2, 8)).sum().backward()
        store, key = _store(), "given up after a step of one rank"
        if dist.get_rank() == 0:
            optimizer.step()
        with short_waits(attachment), pytest.raises(zhooks.DivergenceError, match="Rank 1 is late"):
            sleeps(1, store, key)()
            try:
                full(model)
            finally:
                store.set(key, "yes")
        for _ in range(2):
            with pytest.raises(zhooks.DivergenceError, match=r"rank 1 has taken 1 and rank 0 2\. Load a checkpoint"):
                attachment.recover()
        with pytest.raises(zhooks.DivergenceError, match=r"save expected all ranks to be at the same step"):
            attachment.save(path / "run", optimizer)
        with pytest.raises(zhooks.DivergenceError, match="forward expected all ranks to be at the same step"):
            model(torch.ones(2, 8))
        with pytest.raises(zhooks.DivergenceError, match="load expected all optimizers that have stepped"):
            attachment.load(path / "run", ())
        attachment.load(path / "run", optimizer)
        assert same(full(model), expected)
        optimizer.zero_grad()
        step(model, optimizer, 1)
        # Ranks count from the load: what compares them later does not find the steps that were lost.  The first pass after
        # a recovery compares.
        assert attachment.recover().steps == 1
        comm = {"transport": "shm", "timeout_s": TIMEOUT_S}
        attachment.apply({"stage": 0, "units": {"min_numel": 0}, "comm": comm, "resilience": {"check_every": 2}})
        recorder = zhooks.Recorder()
        with closing(attachment.observe(recorder)):
            for number in range(2, 6):
                step(model, optimizer, number)
        assert [one.key for one in recorder.events if one.what == "replicas compared"] == ["step 1", "step 3"]
        attachment.detach()


@pytest.mark.slow
@on_ranks(2)
def test_a_backward_that_had_begun_to_update_may_only_be_followed_by_a_load() -> None:
    model, attachment, optimizer = attached("shm", 3, optimizer={"overlap": True}, schedule={"max_reductions": 1})
    store, key = _store(), "given up in a backward that updates"
    with folder() as path:
        step(model, optimizer, 0)
        attachment.save(path / "run", optimizer)
        expected = full(model)
        model.in_backward = sleeps(1, store, key)
        with short_waits(attachment), pytest.raises(zhooks.DivergenceError, match="Rank 1 is late"):
            try:
                step(model, optimizer, 1)
            finally:
                store.set(key, "yes")
        model.in_backward = lambda: None
        with pytest.raises(zhooks.DivergenceError, match=r"found rank \d inside a backward that updates: some units"):
            attachment.recover()
        attachment.load(path / "run", optimizer)
        assert same(full(model), expected)
        optimizer.zero_grad()
        step(model, optimizer, 1)
        attachment.detach()


@on_ranks(2)
def test_a_rank_with_an_error_of_its_own_recovers_with_those_that_wait_for_it() -> None:
    expected = trained("shm", 3)
    model, attachment, optimizer = attached("shm", 3)
    step(model, optimizer, 0)

    def fails() -> None:
        if dist.get_rank() == 1:
            raise ValueError("a bad record")

    model.before_second = fails
    match = "a bad record" if dist.get_rank() == 1 else r"^Rank 1 is late\. .*recover\(\)"
    expects = ValueError if dist.get_rank() == 1 else zhooks.DivergenceError
    with short_waits(attachment), pytest.raises(expects, match=match):
        step(model, optimizer, 1)
    model.before_second = lambda: None
    assert attachment.recover().steps == 1
    optimizer.zero_grad()
    for number in (1, 2):
        step(model, optimizer, number)
    assert same(full(model), expected)
    attachment.detach()


@pytest.mark.slow
@on_ranks(4)
def test_recover_after_a_reshard_reconnects_every_axis() -> None:
    recovered_after_reshards("shm")


@pytest.mark.slow
@on_ranks(4, transport=("p2p", "stock"))
def test_recover_after_a_reshard_reconnects_groups_of_gloo(transport: str) -> None:
    recovered_after_reshards(transport)


def recovered_after_reshards(transport: str) -> None:
    values = []
    for late in (False, True):
        model, attachment, optimizer = attached(transport, 3)
        step(model, optimizer, 0)
        for number, replicate in ((1, 2), (2, 4), (3, 1)):
            attachment.reshard(arranged(replicate))
            if late:
                attachment.recover()
            step(model, optimizer, number)
            if late:
                attachment.recover()
        values.append(full(model))
        attachment.detach()
    assert same(values[0], values[1])


@pytest.mark.slow
@on_ranks(2)
def test_what_ranks_had_agreed_on_for_later_is_forgotten_by_recover() -> None:
    resilience = {"check_every": 1, "nonfinite": "name"}
    model, attachment, optimizer = attached("shm", 0, resilience=resilience)
    attachment.catch_preemption(signal.SIGUSR1)
    step(model, optimizer, 0)
    assert not attachment.preempted
    # Rank 0 has heard the end of a backward, and of an inf in it; the other rank of neither.
    caught, = [one for one in runtime_of(attachment).reducer.riders if hasattr(one, "everywhere")]
    watching, = [one for one in runtime_of(attachment).reducer.riders if not hasattr(one, "everywhere")]
    if dist.get_rank() == 0:
        caught.arrive([0])
        watching.arrive([1])
        with short_waits(attachment), pytest.raises(zhooks.DivergenceError, match="Rank 1 is late"):
            model(torch.ones(1, 8))
    attachment.recover()
    assert not attachment.preempted
    step(model, optimizer, 1)
    attachment.detach()


@on_ranks(2)
def test_after_a_load_ranks_count_steps_alike_again() -> None:
    model, attachment, optimizer = attached("shm", 3)
    with folder() as path:
        step(model, optimizer, 0)
        attachment.save(path / "run", optimizer)
        if dist.get_rank() == 0:
            optimizer.step()
        with pytest.raises(zhooks.DivergenceError, match="rank 1 has taken 1 and rank 0 2"):
            attachment.recover()
        attachment.load(path / "run", optimizer)
        attachment.recover()
        step(model, optimizer, 1)
        attachment.detach()
