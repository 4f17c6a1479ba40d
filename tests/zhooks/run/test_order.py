"""The order of things in one step: the exact events of a tiny model, beside the compute its module hooks saw.

pytest runs it, on two ranks. What the schedule decides without tensors is test_schedule.py's; bytes at rest are
test_memory.py's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from offload.errors import BudgetError
from offload.events import Event
from tests.support.on_ranks import on_ranks, place
from tests.support.replica_calls import Calls

NUMEL = 8 * 8 + 8
NBYTES = NUMEL * 4


class Block(nn.Module):
    """A block of one layer; its numel is a multiple of the alignment, so nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


#: What the order is about; what is held and waited for has tests of its own.
ORDERED = {"forward", "backward", "gather", "release", "reduce"}


class Log:
    """Events as lines, with bytes on a list of their own."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.moved: dict[str, int] = {"gather": 0, "reduce": 0}

    def on_event(self, event: Event) -> None:
        if event.what in ORDERED and event.kind != "hold":
            self.lines.append(f"{event.kind} {event.what} {event.key}")
        if event.kind == "begin" and event.what in self.moved:
            self.moved[event.what] += event.nbytes

    def clear(self) -> None:
        self.lines.clear()
        self.moved = dict.fromkeys(self.moved, 0)

    def forward_and_backward(self) -> tuple[list[str], list[str]]:
        split = next(place for place, line in enumerate(self.lines) if line.startswith("end forward"))
        return self.lines[: split + 1], self.lines[split + 1 :]


class Run:
    """A model of blocks, attached, observed, with its compute noted; stepped by hand."""

    def __init__(self, blocks: int = 3, **policy: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(blocks)))
        self.attachment = zhooks.attach(self.model, policy={"units": {"min_numel": 0}, **policy})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.log = Log()
        self.attachment.observe(self.log)
        for number, block in enumerate(self.model):
            block.register_forward_pre_hook(lambda *_, n=number: self.log.lines.append(f"begin compute {n}"))
            block.register_forward_hook(lambda *_, n=number: self.log.lines.append(f"end compute {n}"))
            block.register_full_backward_pre_hook(lambda *_, n=number: self.log.lines.append(f"begin back {n}"))
            block.register_full_backward_hook(lambda *_, n=number: self.log.lines.append(f"end back {n}"))

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        self.model(torch.ones(2, 8, requires_grad=True)).sum().backward()

    def warm(self) -> Log:
        """Two steps so that every path is recorded, then the log of one more."""
        self.step()
        self.step()
        self.log.clear()
        self.step()
        return self.log


def before(lines: list[str], first: str, second: str) -> bool:
    return lines.index(first) < lines.index(second)


def outstanding(lines: list[str]) -> int:
    """The most reductions that were under way at once."""
    level = most = 0
    for line in lines:
        level += line.startswith("begin reduce") - line.startswith("end reduce")
        most = max(most, level)
    return most


# ---- the exact order


@on_ranks(2)
def test_the_forward_of_a_sharded_model_gathers_one_ahead_and_releases_behind() -> None:
    forward, _ = Run(schedule={"reshard_after_forward": True}).warm().forward_and_backward()
    assert forward == [
        "begin forward Sequential train",
        "begin gather 0",
        "begin gather 1",
        "end gather 0",
        "begin compute 0",
        "end compute 0",
        "instant release 0",
        "begin gather 2",
        "end gather 1",
        "begin compute 1",
        "end compute 1",
        "instant release 1",
        "end gather 2",
        "begin compute 2",
        "end compute 2",
        "end forward Sequential train",
    ]


@on_ranks(2)
def test_the_backward_of_a_sharded_model_gathers_one_ahead_reduces_and_releases_behind() -> None:
    _, backward = Run(schedule={"reshard_after_forward": True}).warm().forward_and_backward()
    moved = [line for line in backward if not line.startswith(("instant release", "begin back ", "end back "))]
    assert [line for line in moved if "gather" in line or line.startswith("begin reduce")] == [
        "begin gather 2",
        "begin gather 1",
        "end gather 2",
        "begin reduce 2",
        "begin gather 0",
        "end gather 1",
        "begin reduce 1",
        "end gather 0",
        "begin reduce 0",
    ]
    assert backward[-1] == "end backward backward of Sequential train"
    released = [line for line in backward if line.startswith("instant release")]
    assert released[-3:] == ["instant release 2", "instant release 1", "instant release 0"]


@on_ranks(2)
def test_the_next_gather_begins_before_a_compute_ends_forward_and_backward() -> None:
    forward, backward = Run(5).warm().forward_and_backward()
    for number in range(4):
        assert before(forward, f"begin gather {number + 1}", f"end compute {number}")
    again = [number for number in range(4) if f"begin gather {number}" in backward]
    assert len(again) >= 3, "all but what stays from forward"
    for number in again:
        assert before(backward, f"begin gather {number}", f"end back {number + 1}")


@on_ranks(2, prefetch=(0, 1, 2))
def test_no_more_than_the_prefetch_says_is_gathered_at_once(prefetch: int) -> None:
    run = Run(5, schedule={"prefetch": prefetch, "reshard_after_forward": True})
    live = most = 0
    for line in run.warm().lines:
        live += line.startswith("begin gather") - line.startswith("instant release")
        most = max(most, live)
    assert most == prefetch + 1
    assert live == 0


# ---- what stays gathered for backward


def gathers(run: Run) -> tuple[int, int]:
    forward, backward = run.warm().forward_and_backward()
    return tuple(sum(line.startswith("begin gather") for line in lines) for lines in (forward, backward))  # type: ignore[return-value]


@on_ranks(2)
def test_resharding_after_forward_gathers_every_unit_twice() -> None:
    assert gathers(Run(5, schedule={"reshard_after_forward": True})) == (5, 5)


@on_ranks(2)
def test_without_resharding_every_unit_is_gathered_once() -> None:
    assert gathers(Run(5, schedule={"reshard_after_forward": False})) == (5, 0)


# In units: half of five parameters and gradients rest here, two are gathered and three summed at once.
FLOOR = 10


@on_ranks(2, kept=(0, 1, 2, 3, 5))
def test_a_budget_that_admits_exactly_k_units_keeps_the_last_k(kept: int) -> None:
    run = Run(5, schedule={"reshard_after_forward": "auto"}, budget={"device": (FLOOR + kept) * NBYTES})
    assert gathers(run) == (5, 5 - kept)
    _, backward = run.log.forward_and_backward()
    assert [line for line in backward if line.startswith("begin gather")] == [
        f"begin gather {number}" for number in reversed(range(5 - kept))
    ]


@on_ranks(2)
def test_a_budget_below_what_rests_and_flies_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"\[budget\] device is too small. Expected memory"):
        Run(5, budget={"device": FLOOR * NBYTES - 1})


# ---- reductions


@on_ranks(2, most=(1, 2), stage=(0, 1, 3))
def test_outstanding_reductions_are_bounded(most: int, stage: int) -> None:
    run = Run(6, stage=stage, schedule={"max_reductions": most})
    assert 1 <= outstanding(run.warm().lines) <= most


@on_ranks(2, stage=(0, 1))
def test_no_sync_sends_no_reductions_where_gradients_are_partial_sums(stage: int) -> None:
    run = Run(stage=stage)
    run.warm()
    run.log.clear()
    with run.attachment.no_sync():
        run.backward()
    assert run.log.moved["reduce"] == 0
    run.backward()
    assert run.model[0].linear.weight.grad is not None
    assert run.log.moved["reduce"] == 3 * NBYTES * (2 if stage == 0 else 1)


@on_ranks(2, stage=(2, 3))
def test_no_sync_reduces_all_the_same_where_gradients_are_sharded(stage: int) -> None:
    run = Run(stage=stage)
    run.warm()
    run.log.clear()
    with run.attachment.no_sync():
        run.backward()
    assert run.log.moved["reduce"] == 3 * NBYTES


# ---- payload


@on_ranks(2, stage=(0, 1, 2))
def test_a_step_of_a_replicated_model_moves_two_psi(stage: int) -> None:
    log = Run(4, stage=stage).warm()
    gathered, reduced = log.moved["gather"] / 4, log.moved["reduce"] / 4
    assert gathered + reduced == 2 * 4 * NUMEL
    assert gathered == (0 if stage == 0 else 4 * NUMEL)


@on_ranks(2, stage=(0, 1, 2, 3), reshard=(True, False, "auto"))
def test_the_plan_predicts_the_payload_of_a_step_to_the_byte(stage: int, reshard: bool | str) -> None:
    run = Run(4, stage=stage, schedule={"reshard_after_forward": reshard})
    assert run.attachment.payload() is None
    log = run.warm()
    assert sum(log.moved.values()) == run.attachment.payload()


@on_ranks(2, reshard=(True, False, "auto"))
def test_a_step_of_a_sharded_model_moves_at_most_three_psi(reshard: bool | str) -> None:
    log = Run(4, schedule={"reshard_after_forward": reshard}).warm()
    gathered, reduced = log.moved["gather"] / 4, log.moved["reduce"] / 4
    assert reduced == 4 * NUMEL
    assert 4 * NUMEL <= gathered <= 2 * 4 * NUMEL
    if reshard is False:
        assert gathered == 4 * NUMEL


@on_ranks(2)
def test_the_first_step_moves_no_more_than_three_psi_either() -> None:
    run = Run(4, schedule={"reshard_after_forward": True})
    run.step()
    assert sum(run.log.moved.values()) <= 3 * 4 * NBYTES


@on_ranks(2)
def test_two_backwards_in_one_step_reduce_twice_and_evaluation_reduces_nothing() -> None:
    run = Run()
    run.warm()
    run.log.clear()
    run.backward()
    run.backward()
    assert run.log.moved["reduce"] == 2 * 3 * NBYTES
    run.log.clear()
    with torch.no_grad():
        run.model.eval()(torch.ones(2, 8))
    assert run.log.moved == {"gather": 3 * NBYTES, "reduce": 0}


@on_ranks(1)
def test_a_world_of_one_moves_nothing() -> None:
    assert set(Run().warm().moved.values()) == {0}


@on_ranks(2)
def test_ranks_send_the_same_events_in_the_same_order() -> None:
    run = Run(5)
    if place()[0] == 1:
        # The second rank takes its time, and must not change anybody's order.
        run.model[2].register_forward_hook(lambda *_: sum(range(10**6)) and None)
    lines = [line for line in run.warm().lines if line.startswith(("begin gather", "begin reduce"))]
    everybody: list[Any] = [None, None]
    torch.distributed.all_gather_object(everybody, lines)
    assert everybody[0] == everybody[1]


# ---- replicas


@on_ranks(4)
def test_sums_over_replicas_run_beside_the_next_reduction_and_are_bounded() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    grads: dict[int, list[Tensor]] = {}
    for most in (1, 2, 3):
        with pytest.MonkeyPatch.context() as patched:
            torch.manual_seed(0)
            model = nn.Sequential(*(Block() for _ in range(5)))
            policy = {"units": {"min_numel": 0}, "schedule": {"max_reductions": most}, "comm": {"timeout_s": 300}}
            attachment = zhooks.attach(model, policy=policy, mesh=mesh)
            model(torch.full((2, 8), 1.0 + place()[0])).sum().backward()
            calls = Calls(patched)
            model(torch.full((2, 8), 2.0 + place()[0])).sum().backward()
            grads[most] = [param.grad.full_tensor() for param in model.parameters()]
            attachment.detach()
        under_way, overlapped = 0, 0
        for number, (what, key) in enumerate(calls.seen):
            under_way += {"reduce": 1, "reduce replicas": 0, "wait": -1}[what]
            assert under_way <= most
            if what == "reduce replicas":
                between = calls.seen[number + 1 : calls.seen.index(("wait", key))]
                overlapped += any(other == "reduce" for other, _ in between)
        started = [key for what, key in calls.seen if what == "reduce replicas"]
        assert started == [key for what, key in calls.seen if what == "reduce"], "in one order"
        assert overlapped == {1: 0, 2: 4, 3: 3}[most], "all but the last ones, unless one alone may be under way"
    for other in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(grads[1], grads[other], strict=True)), "the same bits"
