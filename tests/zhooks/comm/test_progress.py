"""What an error says of how far ranks have come: the step, and who was given other inputs.

pytest runs it: the words by themselves, and an error on real ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zhooks
from tests.support.inside import comm_of, short_waits
from tests.support.on_ranks import on_ranks, place
from zhooks.comm import CONTROL, GATHER, Call, GatherControl, LastInputs, Progress
from zhooks.comm.progress import describe_evaluations, describe_progress
from zhooks.layout import flat_layout


def test_ranks_that_differ_from_most_are_named_with_what_they_were_given() -> None:
    alike, other = ["[8, 128] int64", "[8] float32"], ["[4, 128] int64", "[8] float32"]
    assert describe_progress({rank: Progress(12, alike) for rank in range(3)}) == "Step 12."
    ranks = {0: Progress(12, alike), 1: Progress(12, other), 2: Progress(12, alike)}
    assert describe_progress(ranks) == (
        "Step 12; inputs of the last forward (tensor 0): [4, 128] int64 on rank 1, [8, 128] int64 on the others."
    )
    assert describe_progress({0: Progress(12, alike), 1: Progress(11, other)}) == "Steps: step 12 on rank 0, step 11 on rank 1."
    assert describe_progress({0: Progress(3, []), 1: Progress(3, ["[2] bool"])}) == (
        "Step 3; inputs of the last forward: nothing on rank 0, [2] bool on rank 1."
    )
    assert describe_progress({1: Progress(3, alike)}) == "Step 3 on rank 1."
    assert describe_progress({}) == ""


def test_forwards_without_gradients_that_only_some_ranks_have_run_are_named() -> None:
    one, none = Progress(3, [], evaluations=1, evaluating=True), Progress(3, [])
    assert describe_evaluations({0: one, 1: none, 2: none}, range(3)) == (
        "Forwards without gradients so far: 1 forward on rank 0, 0 forwards on the others."
    )
    # Nothing is known of rank 1, which did not answer.
    assert describe_evaluations({0: one, 2: one}, range(3)) == "In a forward without gradients: ranks 0, 2."
    assert describe_evaluations({0: one, 1: one}, range(2)) == describe_evaluations({0: none}, range(2)) == ""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inputs_of_any_kind_are_noted_without_being_kept() -> None:
    noted = LastInputs()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    noted.note(({"ids": torch.zeros(2, 3, dtype=torch.int64)}, 4, nested), {"mask": torch.ones(2, dtype=torch.bool)})
    assert noted.texts() == ["[2, 3] int64", "nested float32", "[2] bool"]


@on_ranks(2)
def test_ranks_that_do_not_meet_say_the_step_and_whose_inputs_differ() -> None:
    rank, _ = place()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = {"units": {"min_numel": 0, "names": ["0", "1"]}, "comm": {"transport": "shm", "timeout_s": 120}}
    attachment = zhooks.attach(model, policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step(), optimizer.zero_grad()
    loss = model(torch.ones(4 if rank else 2, 8)).sum()
    with short_waits(attachment), pytest.raises(zhooks.DivergenceError) as told:
        if rank:
            comm_of(attachment).world.all_reduce(Call(CONTROL, "other", "call"), torch.zeros(3), "sum")
        else:
            loss.backward()
            model[0].weight.grad.full_tensor()  # type: ignore[operator]
    seen = "Step 1; inputs of the last forward: [2, 8] float32 on rank 0, [4, 8] float32 on rank 1. (Rank "
    assert seen in str(told.value), str(told.value)
    attachment.recover()
    attachment.detach()


@on_ranks(2, 3)
def test_ranks_that_gathered_other_units_say_the_step_and_whose_inputs_differ() -> None:
    rank, world = place()
    model = nn.Linear(8, 8)
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, "comm": {"transport": "stock"}})
    model(torch.ones(4 if rank == 1 else 2, 8)).sum().backward()
    comm, layout = comm_of(attachment), flat_layout([8], world=world, itemsize=4)
    call = Call(GATHER, "gather", "one" if rank == 1 else "other")
    comm.shard.all_gather(call, torch.ones(layout.shard_numel), torch.empty(layout.padded), layout).wait()
    with pytest.raises(zhooks.DivergenceError, match="Expected every rank to gather the same units") as told:
        GatherControl(comm, "end of backward").any([])
    narrow, wide = "[2, 8] float32 on", "[4, 8] float32 on rank 1"
    whose = f"{narrow} rank 0, {wide}" if world == 2 else f"{wide}, {narrow} the others"
    assert str(told.value).endswith(f"Step 0; inputs of the last forward: {whose}. (Axis shard.)"), str(told.value)
    # All have come to the same place: what follows is answered as before.
    model(torch.ones(2, 8)).sum().backward()
    attachment.detach()
