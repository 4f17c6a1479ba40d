"""Pipelines that go wrong: a step abandoned in the middle, a backward out of order, ranks that attach what they should not.

pytest runs it over real ranks.  What torch refuses by itself is tried here too: the model must go on as the plain one does.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import zhooks
from offload.errors import AttachError, DivergenceError, PolicyError
from tests.support.on_ranks import on_ranks
from tests.support.pipelines import Pipeline, Run, batch_of, loss_of, mesh_of, mine_of, parts, pipeline, share
from tests.support.slow import slow
from tests.support.torches import not_with_2_8
from tests.support.values import sharded

#: A stage's methods are called one by one here; in newer torches a schedule also gives it the buffers that it receives into.
by_hand = pytest.mark.skipif(
    find_spec("torch.distributed.pipelining._recv_buffers") is not None, reason="this torch's stages need their schedule"
)


class Ill:
    """Raises in the ``number``-th forward of a module, or in the backward through its output."""

    def __init__(self, module: nn.Module, number: int, *, backward: bool) -> None:
        self.number, self.backward, self.count = number, backward, 0
        self.handle = module.register_forward_hook(self.after)

    def after(self, module: nn.Module, args: Any, out: Tensor) -> None:
        if self.backward:
            out.register_hook(self.count_down)
        else:
            self.count_down(out)

    def count_down(self, value: Tensor) -> None:
        self.count += 1
        if self.count == self.number:
            raise ValueError("ill")


def again(run: Run) -> Pipeline:
    """A new schedule over the same stages: torch's own keeps the losses of a step that was abandoned."""
    return pipeline(run.mesh, run.mine, "gpipe", run.stages, 4)


POLICIES: dict[str, dict[str, Any]] = {
    "zero": {"stage": 0},
    "three": {"stage": 3},
    "recomputed": {"stage": 3, "activation": {"checkpoint": "unit", "tier": "host", "min_bytes": 0}},
}


@on_ranks(4, where=("backward", *slow("forward")), named=("recomputed", *slow("zero", "three")))
def test_after_a_step_abandoned_in_the_middle_a_new_one_is_the_plain_models(where: str, named: str) -> None:
    run = Run(2, "gpipe", POLICIES[named])
    run.step(0)
    # The stage before has sent what the one after has received: nothing of the lost step is on its way to the next.
    number = {"forward": (3, 2), "backward": (1, 2)}[where][0 if run.pipe.first else 1]
    (part,) = run.mine.values()
    ill = Ill(part.blocks[0], number, backward=where == "backward")  # type: ignore[index, arg-type]
    with pytest.raises(RuntimeError) as caught:
        run.pipe.step(1)
    assert "ill" in str(caught.value.__cause__)
    ill.handle.remove()
    run.optimizer.zero_grad()
    run.pipe = again(run)
    for step in range(1, 4):
        run.step(step)
    run.close()


@not_with_2_8("a stage runs in a schedule only")
@by_hand
@on_ranks(4)
def test_a_backward_out_of_order_is_torchs_own_error_and_the_next_step_is_right() -> None:
    run = Run(2, "gpipe", {"stage": 3})
    stage = run.pipe.schedule._stage
    held = stage.fwd_cache
    run.step(0)
    inputs, targets = (half.chunk(4)[0] for half in share(run.mesh, batch_of(1)))
    stage.clear_runtime_states()
    with pytest.raises(KeyError, match="2"):
        stage.backward_one_chunk(2)  # its forward has not been
    out = stage.forward_one_chunk(0, (inputs,) if run.pipe.first else ())
    loss = loss_of(out, targets) if run.pipe.last else None
    stage.backward_one_chunk(0, loss=loss)
    with pytest.raises(KeyError, match="0"):
        stage.backward_one_chunk(0, loss=loss)
    with pytest.raises(RuntimeError, match=r"second time|does not require grad"):
        (out.sum() if loss is None else loss).backward()
    run.optimizer.zero_grad()
    for number in range(1, 4):
        run.step(number)
    run.close()
    assert stage.fwd_cache is held and type(held) is dict, "nothing of torch's stage was replaced"


@not_with_2_8("a stage runs in a schedule only")
@by_hand
@on_ranks(4)
def test_a_step_between_forward_and_backward_is_found_as_in_the_plain_model() -> None:
    run = Run(2, "gpipe", {"stage": 3})
    run.step(0)
    stage = run.pipe.schedule._stage
    inputs = share(run.mesh, batch_of(1))[0].chunk(4)[0]
    stage.clear_runtime_states()
    first, second = (stage.forward_one_chunk(chunk, (inputs,) if run.pipe.first else ()) for chunk in range(2))
    before = [sharded(param).full_tensor() for param in run.mine[0 if run.pipe.first else 1].parameters()]
    first.sum().backward()
    run.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()
    run.optimizer.zero_grad()
    with torch.no_grad():
        for param, value in zip(run.mine[0 if run.pipe.first else 1].parameters(), before, strict=True):
            param.copy_(value)
    for attachment in run.attachments:
        attachment.detach()


@on_ranks(2)
def test_a_rank_that_attaches_more_stages_than_another_is_told_so() -> None:
    mesh = mesh_of(2, 1)
    every = parts(4)
    policy = {"stage": 3, "comm": {"timeout_s": 1}}
    one = zhooks.attach(every[0], mesh=mesh, policy={"stage": 3})
    if dist.get_rank() == 0:
        found = r"^Rank 1 did not call attach as often\. Expected every rank to attach model 2 .* \(rank 1: 1\)"
        with pytest.raises(DivergenceError, match=found):
            zhooks.attach(every[2], mesh=mesh, policy=policy)
        assert type(next(every[2].parameters())) is nn.Parameter, "as it was"
    dist.barrier()
    one.detach()


@not_with_2_8("a stage runs in a schedule only")
@on_ranks(2)
def test_a_stage_attached_without_its_mesh_is_refused_before_it_mixes_with_another() -> None:
    mesh, layer = mesh_of(2, 1), nn.Linear(4, 4)
    attachment = zhooks.attach(layer, policy={"stage": 3})
    stage = PipelineStage(layer, 0, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    with pytest.raises(RuntimeError) as caught:
        stage.forward_one_chunk(0, (torch.ones(2, 4),))
    assert isinstance(caught.value.__cause__, AttachError)
    assert "Pipeline stage 0 shares parameters with others. Expected" in str(caught.value.__cause__)
    assert layer(torch.ones(2, 4)).shape == (2, 4)
    attachment.detach()


@not_with_2_8("a stage runs in a schedule only")
@on_ranks(2)
def test_updates_in_backward_are_refused_in_a_pipeline() -> None:
    mesh = mesh_of(2, 1)
    (part,) = mine_of(mesh, parts(2)).values()
    attachment = zhooks.attach(part, mesh=mesh, policy={"stage": 3, "optimizer": {"tier": "host", "overlap": True}})
    stage = PipelineStage(part, 0, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    given = batch_of(0)[0] if dist.get_rank() == 0 else torch.ones(2, 6, 16)
    with pytest.raises(RuntimeError) as caught:
        stage.forward_one_chunk(0, (given,))
    assert isinstance(caught.value.__cause__, PolicyError)
    assert "overlap" in str(caught.value.__cause__)
    attachment.detach()
