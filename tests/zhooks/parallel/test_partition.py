"""Partitioned activations: bytes and traffic counted, the bits of plain PyTorch, and what autograd may ask of them.

pytest runs it on pools of ranks that all compute the same; tests/zhooks/activation/test_partition_faults.py gives them other
inputs.
"""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import zhooks
from offload.errors import AttachError
from offload.events import Recorder
from tests.support.inside import runtime_of
from tests.support.on_ranks import on_ranks
from tests.support.partition_nets import (
    BLOCKS,
    INPUT,
    ROWS,
    WIDTH,
    Block,
    Net,
    alive,
    attached,
    batch,
    grads_of,
    mesh_of,
    moved,
    plain,
    policy_of,
    step_of,
)
from tests.support.values import same


def saved_nbytes(policy: dict[str, Any]) -> tuple[int, int]:
    """What a forward leaves alive in storages, and at most of it on the device by the runtime's word."""
    model, attachment = attached(policy)
    step_of(model)
    before = alive()
    loss = model(batch()).square().mean()
    stash = runtime_of(attachment).saved.stash
    if stash is not None:
        stash.flush()
    grown, held = alive() - before, runtime_of(attachment).saved.partition.nbytes
    loss.backward()
    attachment.detach()
    return grown, held


@on_ranks(2, 4)
def test_a_rank_keeps_its_share_of_every_unit_input() -> None:
    world = dist.get_world_size()
    whole, _ = saved_nbytes(policy_of(partition="none"))
    grown, held = saved_nbytes(policy_of())
    assert whole >= BLOCKS * INPUT
    # What both keep beside unit inputs falls out of the difference.
    assert whole - grown == pytest.approx(BLOCKS * INPUT * (1 - 1 / world), rel=0.02)
    assert held == pytest.approx(BLOCKS * INPUT / world, rel=0.02)
    away, held = saved_nbytes(policy_of(tier="host"))
    # Everything else that is saved goes there too.
    assert held == 0 and whole - away >= 0.98 * BLOCKS * INPUT


@on_ranks(2)
def test_each_input_is_gathered_once_and_one_unit_ahead() -> None:
    model, attachment = attached(policy_of())
    recorder = Recorder()
    with attachment.observe(recorder):
        for step in range(2):
            recorder.clear()
            step_of(model, step)
            assert [key for key, _ in moved(recorder)] == [f"blocks.{n}" for n in reversed(range(BLOCKS))]
            assert sum(nbytes for _, nbytes in moved(recorder)) == pytest.approx(BLOCKS * INPUT, rel=0.02)
            assert attachment.payload() == sum(nbytes for _, nbytes in moved(recorder))
            spans = recorder.names("gather activation")
            assert spans[:3] == ["begin gather activation blocks.5", "begin gather activation blocks.4",
                                 "end gather activation blocks.5"]  # fmt: skip
            ahead = [1 if name.startswith("begin") else -1 for name in spans]
            assert max(sum(ahead[: n + 1]) for n in range(len(ahead))) == 2
        assert any(e.kind == "hold" and e.what == "activation on device" for e in recorder.events)
    attachment.detach()


@on_ranks(2)
def test_memory_shows_the_share_beside_the_formula() -> None:
    model, attachment = attached(policy_of())
    attachment.memory()
    step_of(model)
    loss = model(batch()).square().mean()
    levels = runtime_of(attachment).saved.residual.now()
    assert levels.inputs == pytest.approx(BLOCKS * INPUT / 2, rel=0.02)
    assert runtime_of(attachment).saved.residual.terms.partition == "tp"
    loss.backward()
    assert runtime_of(attachment).saved.residual.now().inputs == 0
    attachment.detach()


@on_ranks(2, 4)
def test_the_bits_are_those_of_plain_pytorch_on_every_tier_and_at_every_depth() -> None:
    stage = 3 if dist.get_world_size() == 2 else 0
    net, mask = plain(), torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(3)) > 0.3
    with tempfile.TemporaryDirectory() as folder:
        for tier, prefetch in (("device", 0), ("device", 3), ("host", 1), ("disk", 1)):
            policy = policy_of(stage, tier=tier) | {"schedule": {"prefetch": prefetch}, "disk": {"path": folder}}
            model, attachment = attached(policy)
            for step in range(2):
                assert same(step_of(model, step), step_of(net, step)), (tier, prefetch)
                assert same(step_of(model, step, mask.float()), step_of(net, step, mask.float()))
            cut: Any = runtime_of(attachment).saved.partition
            gc.collect()
            assert cut.nbytes == 0 and not len(cut._cuts)
            attachment.detach()


class Strange(Block):
    """Takes everything that may be special about an input, some of it twice."""

    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if not more:
            return super().forward(x, mask)
        first, second = more["pair"]
        return super().forward(x * first + second.t()[:, :WIDTH], mask) + more["bias"][:, :1] + more["rows"][0]


class Around(Net):
    """Gives its blocks views, expanded and shared tensors, a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Strange() for _ in range(3))
        self.bias = torch.nn.Parameter(torch.ones(ROWS, WIDTH))
        self.register_buffer("rows", torch.linspace(0, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).clone())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            wide = torch.cat([x, x], 1)
            x = block(x, mask, pair=[wide[:, ::2], wide.t()], bias=self.bias, rows=self.rows)
            x = block(x.t().contiguous().t(), mask.expand(ROWS, WIDTH) if mask is not None else None)
        out: Tensor = self.leave(x)
        return out


@on_ranks(2)
def test_inputs_of_every_kind_come_back_as_they_were() -> None:
    net = plain(Around)
    mask = torch.arange(ROWS)[:, None] % 3
    for least in (0, INPUT):
        model, attachment = attached(policy_of(min_bytes=least), Around)
        recorder = Recorder()
        with attachment.observe(recorder):
            for step in range(2):
                recorder.clear()
                assert same(step_of(model, step, mask), step_of(net, step, mask))
        keys = [key for key, _ in moved(recorder)]
        # Each call's x and the two of the pair; the mask once in all; no parameter and no buffer.
        assert len(keys) == (3 * 4 + 1 if least == 0 else 3 * 4)
        attachment.detach()


@on_ranks(2)
def test_a_mask_that_every_unit_is_given_is_kept_and_gathered_once() -> None:
    model, attachment = attached(policy_of())
    net, mask = plain(), torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    step_of(model, 0, mask)
    step_of(net, 0, mask)
    loss = model(batch(1), mask).square().mean()
    assert runtime_of(attachment).saved.partition.nbytes == pytest.approx((BLOCKS + 1) * INPUT / 2, rel=0.02)
    recorder = Recorder()
    with attachment.observe(recorder):
        loss.backward()
        assert len(moved(recorder)) == BLOCKS + 1
    assert same([loss.detach(), *grads_of(model)], step_of(net, 1, mask))
    attachment.detach()


@on_ranks(2)
def test_dtensors_are_cut_where_they_are_replicated_and_left_where_they_are_sharded() -> None:
    class Between(Net):
        placement: Any = Replicate()

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = block(x, self.divided)
            out: Tensor = self.leave(x)
            return out

    class Divided(Block):
        def forward(self, x: Tensor, mask: Any = None) -> Tensor:
            return super().forward(x) * (mask.full_tensor() if mask is not None else 1)

    mesh, gate = mesh_of()["tp"], torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(9))
    for placement, cuts in ((Replicate(), 3 + 1), (Shard(0), 3)):
        torch.manual_seed(1)
        net = Between()
        net.blocks = torch.nn.ModuleList(Divided() for _ in range(3))
        rank, size = dist.get_rank(), ROWS // dist.get_world_size()
        local = gate.clone() if placement == Replicate() else gate[rank * size : (rank + 1) * size].clone()
        net.divided = DTensor.from_local(local, mesh, [placement], run_check=False)
        expected = step_of(net)
        attachment = zhooks.attach(net, policy=policy_of(), mesh=mesh_of())
        recorder = Recorder()
        with attachment.observe(recorder):
            assert same(step_of(net), expected)
        assert len(moved(recorder)) == cuts
        attachment.detach()


# ---- what autograd may do


@on_ranks(2)
def test_forwards_in_flight_and_graphs_that_are_kept() -> None:
    net = plain()
    for tier in ("device", "host"):
        model, attachment = attached(policy_of(3, tier=tier))
        notes = []
        for each in (net, model):
            first, second, dropped = (each(batch(n)).square().mean() for n in range(3))
            with torch.no_grad():
                each(batch(7))
            first.backward(retain_graph=True)
            del dropped
            second.backward()
            first.backward()
            both = each(batch(4)).square().mean() + each(batch(5)).mean()
            both.backward()
            notes.append([first.detach(), second.detach(), both.detach(), *grads_of(each)])
        assert same(*notes)
        gc.collect()
        cut: Any = runtime_of(attachment).saved.partition
        assert not len(cut._cuts)
        attachment.detach()


@on_ranks(2)
def test_two_heads_and_a_backward_in_parts() -> None:
    net = plain()
    model, attachment = attached(policy_of())
    notes = []
    for each in (net, model):
        x = each.enter(batch()).detach().requires_grad_()
        middle = each.blocks[1](each.blocks[0](x))
        loose = middle.detach().requires_grad_()
        out = each.blocks[3](each.blocks[2](loose)).sum()
        out.backward()
        middle.backward(loose.grad)
        notes.append([x.grad, loose.grad, *(p.grad.clone() for b in each.blocks[:4] for p in b.parameters())])
        each.zero_grad()
    assert same(*notes)
    recorder = Recorder()
    with attachment.observe(recorder):
        step_of(model)
    assert len(moved(recorder)) == BLOCKS
    attachment.detach()


@on_ranks(2)
def test_an_exception_in_forward_or_backward_leaves_a_model_that_trains() -> None:
    net = plain()
    model, attachment = attached(policy_of(3))

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    for where in ("forward", "backward"):
        if where == "forward":
            handle: Any = model.blocks[3].up.register_forward_hook(fail)
            with pytest.raises(ValueError, match="on purpose"):
                model(batch())
        else:
            out = model(batch())
            handle = model.blocks[3].down.register_full_backward_hook(fail)
            loss = model(batch()).square().mean()
            with pytest.raises(ValueError, match="on purpose"):
                loss.backward()
            del out, loss
        handle.remove()
        model.zero_grad()
        for step in range(2):
            assert same(step_of(model, step), step_of(net, step))
    attachment.detach()


@on_ranks(2)
def test_a_write_after_saving_is_plain_pytorchs_error() -> None:
    model, attachment = attached(policy_of())
    x = model.enter(batch())
    y = model.blocks[0](x).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    model.zero_grad()
    assert same(step_of(model), step_of(plain()))
    attachment.detach()


@on_ranks(2)
def test_a_users_checkpoint_around_a_block_keeps_its_inputs_itself() -> None:
    class Own(Net):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            out: Tensor = self.leave(x)
            return out

    model, attachment = attached(policy_of(), Own)
    recorder = Recorder()
    with attachment.observe(recorder):
        assert same(step_of(model), step_of(plain(Own)))
    assert not moved(recorder)
    attachment.detach()


# ---- the policy's life


@on_ranks(2)
def test_apply_begins_and_ends_partitioning_between_two_steps() -> None:
    net = plain()
    model, attachment = attached(policy_of(partition="none"))
    recorder = Recorder()
    with attachment.observe(recorder):
        pending = None
        for step, chosen in enumerate(("none", "tp", "tp", "none")):
            attachment.apply(policy_of(3 if step % 2 else 0, partition=chosen, tier="host" if step == 2 else "device"))
            recorder.clear()
            assert same(step_of(model, step), step_of(net, step))
            assert len(moved(recorder)) == (BLOCKS if chosen == "tp" else 0)
            if step == 1:
                pending = model.blocks[0](model.enter(batch()))
    attachment.detach()
    assert pending is not None
    with pytest.raises(AttachError, match=r"^Cannot run blocks\.0 backward. Expected backward before detach, found inputs"):
        pending.sum().backward()


@on_ranks(2)
def test_a_mesh_without_the_axis_is_refused_and_an_axis_of_one_rank_is_harmless() -> None:
    net = plain()
    model = plain()
    with pytest.raises(AttachError, match=r'partition needs an axis named "tp" in the mesh, found shard\. Attach'):
        zhooks.attach(model, policy=policy_of())
    assert same(step_of(model), step_of(net))
    attachment = zhooks.attach(model, policy=policy_of(partition="none"))
    with pytest.raises(AttachError, match="found shard"):
        attachment.apply(policy_of())
    step_of(model)
    attachment.detach()
    model, attachment = attached(policy_of(), tp=1)
    assert not runtime_of(attachment).saved.partition.divides
    assert same(step_of(model), step_of(net))
    attachment.detach()
