"""zhooks.integrations.torchft: two replicas as two threads of one process, with a real lighthouse and real sums between them.

What one replica does must show in the other at the next step, or be refused there. It kills nothing: `test_torchft.py` does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.errors import AttachError, CapabilityError, CheckpointError, DivergenceError, NonFiniteError

pytest.importorskip("torchft", reason="pip install '.[torchft]'")

import torchft
from torchft import ProcessGroupGloo
from torchft.coordination import LighthouseServer

from zhooks.integrations.torchft import Optimizer, Replicas

LIMIT = timedelta(seconds=120)


class Replica:
    """A model of one rank under torchft."""

    def __init__(self, number: int, lighthouse: str, policy: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.number = number
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.attachment = zhooks.attach(self.model, policy=policy)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.replicas = Replicas(
            self.attachment, self.adamw, ProcessGroupGloo(timeout=LIMIT), 1, timeout=LIMIT, quorum_timeout=LIMIT,
            replica_id=f"replica_{number}_", rank=0, world_size=1, store_addr="127.0.0.1", store_port=self.store.port,
            lighthouse_addr=lighthouse,
        )  # fmt: skip
        self.optimizer = Optimizer(self.replicas, self.adamw)

    def step(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        (self.model(torch.full((2, 4), float(self.number))).square().mean() * factor).backward()
        self.optimizer.step()

    def values(self) -> torch.Tensor:
        return torch.cat([param.to_local().reshape(-1) for param in self.model.parameters()])  # type: ignore[attr-defined]


@contextlib.contextmanager
def two(policy: dict[str, Any] | None = None) -> Iterator[list[Replica]]:
    house = LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=60_000, quorum_tick_ms=10, heartbeat_timeout_ms=60_000
    )  # fmt: skip
    both: list[Replica] = []
    try:
        for number in (0, 1):
            both.append(Replica(number, house.address(), {"comm": {"timeout_s": 300}, **(policy or {})}))
        yield both
    finally:
        for each in both:
            each.replicas.shutdown(wait=False)
        house.shutdown()


def together(*steps: Callable[[], None]) -> list[BaseException | None]:
    """A thread for each; what each raised."""
    raised: list[BaseException | None] = [None] * len(steps)

    def run(at: int) -> None:
        try:
            steps[at]()
        except BaseException as error:
            raised[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(steps))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(240)
        assert not each.is_alive()
    return raised


def test_a_nan_of_one_replica_is_refused_in_all_of_them_and_updates_none() -> None:
    with two({"resilience": {"nonfinite": "name"}}) as (first, second):
        assert together(first.step, second.step) == [None, None]
        before = first.values().clone()
        raised = together(first.step, lambda: second.step(float("nan")))
        assert all(isinstance(error, NonFiniteError) for error in raised), raised
        assert "another replica" in str(raised[0]) and "another replica" not in str(raised[1])
        assert torch.equal(first.values(), before) and torch.equal(second.values(), before)
        assert together(first.step, second.step) == [None, None]
        assert torch.equal(first.values(), second.values()) and not torch.equal(first.values(), before)


def alone(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that counts, in a quorum of this replica only, as a lighthouse may find that sees nobody else."""
    made = replica.replicas
    with monkeypatch.context() as patched:
        patched.setattr(torchft.Manager, "start_quorum", lambda *_: None)
        patched.setattr(torchft.Manager, "num_participants", lambda _: 1)
        patched.setattr(torchft.Manager, "errored", lambda _: None)
        patched.setattr(torchft.Manager, "allreduce", lambda _, tensor, **__: torchft.work._DummyWork(tensor))
        patched.setattr(torchft.Manager, "should_commit", lambda *_: True)
        replica.step()
    torchft.Manager.load_state_dict(made, {name: number + 1 for name, number in made.state_dict().items()})


def test_replicas_that_made_a_step_without_each_other_are_refused_though_they_are_at_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with two() as (first, second):
        assert together(first.step, second.step) == [None, None]
        alone(first, monkeypatch)
        alone(second, monkeypatch)
        assert first.replicas.current_step() == second.replicas.current_step() == 2
        raised = together(first.step, second.step)
        assert all(isinstance(error, AttachError) and "made the same steps" in str(error) for error in raised), raised


def test_an_update_that_one_replica_left_out_is_found_at_the_next_step() -> None:
    with two() as (first, second):
        assert together(first.step, second.step) == [None, None]
        handle = first.adamw.register_step_pre_hook(fail)
        assert [type(error) for error in together(first.step, second.step)] == [RuntimeError, type(None)]
        handle.remove()
        raised = together(first.step, second.step)
        assert all(isinstance(error, AttachError) and "skipped an update" in str(error) for error in raised), raised


def fail(*_: Any) -> None:
    raise RuntimeError("a hook of the user's")


def test_another_policy_in_one_replica_alone_ends_both_by_name_and_another_in_both_goes_on() -> None:
    with two() as (first, second):
        assert together(first.step, second.step) == [None, None]
        for each in (first, second):
            each.attachment.apply({"stage": 2, "comm": {"timeout_s": 300}})
        assert together(first.step, second.step) == [None, None]
        assert torch.equal(first.values(), second.values())
        first.attachment.apply({"stage": 3, "comm": {"timeout_s": 300}})
        raised = together(first.step, second.step)
        assert all(isinstance(error, AttachError) and "apply() in all" in str(error) for error in raised), raised


def test_a_loss_scale_is_what_it_was_after_a_step_that_did_not_count() -> None:
    policy = {"precision": {"param": "fp16", "loss_scale": "dynamic"}}
    with two(policy) as (first, second):
        assert together(first.step, second.step) == [None, None]
        before, state = first.values().clone(), first.attachment.loss_scale_state()

        def lost(replica: Replica) -> None:
            replica.optimizer.zero_grad()
            (replica.model(torch.ones(2, 4)).float().square().mean() * float("inf")).backward()
            replica.replicas.report_error(RuntimeError("a connection"))
            replica.optimizer.step()

        assert together(lambda: lost(first), lambda: lost(second)) == [None, None]
        assert first.attachment.loss_scale_state() == second.attachment.loss_scale_state() == state
        assert torch.equal(first.values(), before)
        scale = first.attachment.loss_scale
        assert scale is not None
        assert together(lambda: first.step(float("inf")), second.step) == [None, None]
        assert first.attachment.loss_scale == second.attachment.loss_scale == scale / 2
        assert torch.equal(first.values(), before)
        assert together(first.step, second.step) == [None, None]
        assert torch.equal(first.values(), second.values()) and not torch.equal(first.values(), before)


def test_a_replica_whose_own_peer_died_half_way_hands_its_state_to_nobody() -> None:
    with two() as (first, second):
        assert together(first.step, second.step) == [None, None]
        second.replicas._torn = True
        torchft.Manager.load_state_dict(first.replicas, {"step": 0, "batches_committed": 0})
        raised = together(first.step, second.step)
        assert all(isinstance(error, CheckpointError) for error in raised), raised
        assert "own peer died" in str(raised[0]) and "Restart this replica" in str(raised[1])


def test_a_replica_keeps_its_mesh() -> None:
    with two() as (first, _), pytest.raises(CapabilityError, match="expected a model that only this job trains"):
        first.attachment.apply(mesh=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("asks", ["start_quorum", "should_commit"])
def test_a_manager_that_does_not_answer_any_more_is_named(asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with two() as (first, second):
        assert together(first.step, second.step) == [None, None]

        def gone(*_: Any) -> None:
            raise RuntimeError('status: Unknown, message: "transport error"')

        with monkeypatch.context() as patched:
            patched.setattr(torchft.Manager, asks, gone)
            raised = together(first.step, second.step)
        assert all(isinstance(error, DivergenceError) and "and from the lighthouse" in str(error) for error in raised)
