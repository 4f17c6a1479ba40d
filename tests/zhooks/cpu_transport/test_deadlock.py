"""Ranks that wait for each other in different calls over shared memory: known to all of them long before any timeout.

pytest runs it: the proof in this process on memory of its own, its use on pools of ranks.
"""

from __future__ import annotations

import mmap

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.ranks import LIMIT_S
from tests.support.slow import slow
from tests.support.values import full
from zhooks.comm import CONTROL, GATHER, Call
from zhooks.cpu_transport.wait_board import WaitBoard
from zhooks.layout import Axis

HERE, THERE = Call(CONTROL, "save: agree", "all ranks"), Call(GATHER, "gather", "head")


def boards(world: int) -> list[WaitBoard]:
    """That of each rank, over the same memory."""
    memory = mmap.mmap(-1, WaitBoard.nbytes(world))
    return [WaitBoard(memory, 0, Axis("shard", tuple(range(world)), rank)) for rank in range(world)]


class TestBoard:
    def test_ranks_that_all_wait_and_look_in_vain_are_stuck_and_each_call_is_named(self) -> None:
        first, second, third = boards(3)
        found = [board.look(HERE if board is first else THERE) for _ in range(4) for board in (first, second, third)]
        assert found == [False] * 6 + [False, False, True] + [True] * 3
        assert first.describe() == '"save" on rank 0, "gather head" on the others'

    def test_a_rank_that_is_stopped_or_busy_elsewhere_is_waited_for(self) -> None:
        waits, stopped, busy = boards(3)
        stopped.look(THERE)
        assert not any(waits.look(HERE) for _ in range(10))
        busy.look(THERE)
        assert not any(waits.look(HERE) for _ in range(10))

    def test_a_rank_that_moved_something_is_looked_at_anew(self) -> None:
        one, two = boards(2)
        for board in (one, two, one, two):
            assert not board.look(HERE)
        two.moved()
        assert not any(board.look(HERE) for board in (one, two, one, two, one))
        assert two.look(HERE)

    def test_looks_that_began_before_all_waited_prove_nothing(self) -> None:
        # The second rank moves and waits again while the first is still reading: its looks until then are of before.
        one, two = boards(2)
        two.look(THERE)
        read = one._column

        def slowly(place: int) -> list[int]:
            if place == 0:
                two.moved()
                two.look(THERE)
                two.look(THERE)
            return read(place)

        one._column = slowly  # type: ignore[method-assign]
        one.look(HERE)
        one._column = read  # type: ignore[method-assign]
        assert not one.look(HERE)
        two.look(THERE)
        two.look(THERE)
        assert one.look(HERE)

    @given(st.data())
    def test_no_order_of_messages_and_looks_makes_ranks_that_go_on_appear_stuck(self, data: st.DataObject) -> None:
        # Each rank waits for the messages of its list, and sends one to a rank whenever it has received one.
        world = data.draw(st.integers(2, 4))
        rows, inbox = boards(world), [0] * world
        inbox[data.draw(st.integers(0, world - 1))] += 1
        for _ in range(data.draw(st.integers(1, 60))):
            rank = data.draw(st.integers(0, world - 1))
            if inbox[rank]:
                inbox[rank] -= 1
                rows[rank].moved()
                inbox[data.draw(st.integers(0, world - 1))] += 1
            else:
                assert not rows[rank].look(HERE)


def attached(transport: str, timeout_s: float) -> tuple[nn.Module, zhooks.Attachment, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    policy = {"units": {"min_numel": 0}, "comm": {"transport": transport, "timeout_s": timeout_s}}
    return model, zhooks.attach(model, policy=policy), torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2, *slow(3))
def test_a_rank_that_saves_alone_is_named_with_what_the_others_do_and_all_go_on_after_recover() -> None:
    rank, world = place()
    # Too long for the test to wait: what ends the wait is what the ranks know of each other.
    model, attachment, optimizer = attached("shm", 4 * LIMIT_S)
    step(model, optimizer)
    with folder() as path:
        with pytest.raises(zhooks.DivergenceError) as caught:
            if rank == 0:
                attachment.save(path / "checkpoint")
            else:
                model(torch.ones(2, 8))
        others = "rank 1" if world == 2 else "the others"
        assert f'"save" on rank 0, "gather 0" on {others}. Expected every rank to make the same calls' in str(caught.value)
        assert "attachment.recover() on every rank" in str(caught.value)
        assert not (path / "checkpoint").exists()
    dist.barrier()
    attachment.recover()
    step(model, optimizer)
    # A mean over three ranks rounds.
    torch.testing.assert_close(full(model), _twice_trained())


@on_ranks(2, instead=(*slow("a step"), "a save"))
def test_a_forward_without_gradients_on_one_rank_is_named_and_the_advice_is_to_evaluate_on_all(instead: str) -> None:
    rank, _ = place()
    model, attachment, optimizer = attached("shm", 4 * LIMIT_S)
    for _ in range(2):
        # Counted on each rank: recover() lets all of them begin anew.
        with folder() as path, pytest.raises(zhooks.DivergenceError) as caught:
            if rank == 0:
                with torch.no_grad():
                    model(torch.ones(2, 8))
            if rank or instead == "a step":
                attachment.save(path / "checkpoint") if instead == "a save" else step(model, optimizer)
            # What one rank gathered for itself the others took for a step; now one of them is ahead.
            step(model, optimizer)
        said = str(caught.value)
        assert "evaluate and generate on all ranks, not under `if rank == 0:`" in said and "attachment.resident()" in said
        assert "Forwards without gradients so far: 1 forward on rank 0, 0 forwards on rank 1." in said
        assert ("call save, load, detach and the like on all ranks, too;" in said) == (instead == "a save"), said
        dist.barrier()
        attachment.recover()
    step(model, optimizer)
    with attachment.resident(), torch.no_grad():
        if rank == 0:
            model(torch.ones(2, 8))
    step(model, optimizer)


@on_ranks(4)
def test_ranks_that_wait_over_different_axes_are_found_out_too() -> None:
    rank, _ = place()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = {"comm": {"transport": "shm", "timeout_s": 4 * LIMIT_S}}
    attachment = zhooks.attach(model, policy=policy, mesh=mesh)
    others = '"gather .*" on rank 2, "save" on the others'
    with folder() as path, pytest.raises(zhooks.DivergenceError, match=others):
        if rank == 2:
            model(torch.ones(2, 8))
        else:
            attachment.save(path / "checkpoint")


def _twice_trained() -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        step(model, optimizer)
    return list(model.state_dict().values())
