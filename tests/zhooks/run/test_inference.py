"""Forwards without gradients: what they gather, keep and wait for, and what training makes of it afterwards.

pytest runs it, on one rank and on two. The oracle is the plain model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.slow import slow
from tests.support.values import sharded
from zhooks.run.schedule import LoneWalk, Path

DIM = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks, an encoder beside them that only some calls use, and parameters of the root's own, registered last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.ModuleList(Block() for _ in range(4))
        self.blocks: Any = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.LayerNorm(DIM)
        self.scale = nn.Parameter(torch.rand(DIM))

    def encode(self, x: Tensor) -> Tensor:
        for block in self.encoder:
            x = block(x)
        return x * self.scale

    def head(self, x: Tensor) -> Tensor:
        return x @ self.blocks[0].up.weight.T

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        x = x + (self.encode(x) if encoded is None else encoded)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.scale


UNIT = 2 * (DIM * DIM + DIM) * 4
SMALL: dict[str, Any] = {"units": {"classes": ["Block"], "min_numel": 0}}


def batch(number: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(number))


class Gathers:
    """The units that were gathered, and the most bytes of them at once."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.held = self.most = 0

    def on_event(self, event: Any) -> None:
        if event.what == "gather" and event.kind == "begin":
            self.keys.append(event.key)
            self.held += UNIT
            self.most = max(self.most, self.held)
        elif event.what == "release":
            self.held -= UNIT

    def take(self) -> list[str]:
        taken, self.keys = self.keys, []
        return taken


# ---- the walk of one rank


def test_one_rank_goes_the_way_of_its_last_pass_and_launches_nothing_it_skips() -> None:
    path = Path("eval", [0, 1, 2, 3])
    first = LoneWalk(path, 1)
    assert [first.use(number).launch for number in (0, 2, 2, 0)] == [(0, 1), (2, 3), (2, 3), (0, 3)]
    assert first.finish() == () and path.order == [0, 2, 0]
    second = LoneWalk(path, 1)
    assert [second.use(number).launch for number in (0, 7, 2, 0)] == [(0, 2), (7, 2), (2, 0), (0,)]


# ---- what a pass gathers


@on_ranks(1, 2)
def test_a_first_forward_holds_no_more_than_the_units_in_use_and_the_next() -> None:
    model, plain = Net().eval(), Net().eval()
    attachment = zhooks.attach(model, policy={**SMALL, "parameter": {"tier": "host"}})
    gathers = Gathers()
    with attachment.observe(gathers), torch.no_grad():
        # The root's own unit is registered after the others and used before them.
        assert torch.equal(model(batch(0), batch(1)), plain(batch(0), batch(1)))
        assert torch.equal(model(batch(0)), plain(batch(0)))
    assert gathers.most <= 4 * UNIT


@on_ranks(1)
def test_one_rank_gathers_no_unit_that_its_calls_do_not_use() -> None:
    model, plain = Net().eval(), Net().eval()
    attachment = zhooks.attach(model, policy={**SMALL, "parameter": {"tier": "host"}})
    gathers = Gathers()
    with attachment.observe(gathers), torch.no_grad():
        encoded = model.encode(batch(1))
        assert torch.equal(encoded, plain.encode(batch(1)))
        for number in range(3):
            assert torch.equal(model(batch(number), encoded), plain(batch(number), encoded))
            last = gathers.take()
        assert sorted(last) == sorted(["Net", *(f"blocks.{number}" for number in range(6))])


@on_ranks(1, 2, tier=("host", "disk"))
def test_a_device_budget_keeps_units_gathered_from_one_forward_to_the_next(tier: str) -> None:
    model, plain = Net().eval().requires_grad_(False), Net().eval()
    whole = sum(param.numel() for param in model.parameters()) * 4
    with folder() as path:
        policy = {**SMALL, "parameter": {"tier": tier}, "disk": {"path": str(path)}, "budget": {"device": 6 * UNIT}}
        attachment = zhooks.attach(model, policy=policy)
        gathers = Gathers()
        with attachment.observe(gathers), torch.no_grad():
            for number in range(3):
                gathers.take()
                assert torch.equal(model(batch(number)), plain(batch(number)))
            again = len(gathers.take())
            assert 5 <= again <= 8
            assert UNIT <= attachment.memory().transient["gathered units"] <= 6 * UNIT
            attachment.apply({**policy, "budget": {"device": 2 * whole}})
            for number in range(3):
                gathers.take()
                assert torch.equal(model(batch(number)), plain(batch(number)))
            assert gathers.take() == []
        attachment.detach()


@on_ranks(1, 2, reshard=(*slow(True, False), "auto"))
def test_forwards_without_gradients_between_a_forward_and_its_backward_change_no_gradient(reshard: bool | str) -> None:
    model, plain = Net(), Net()
    budget = {"device": "1 MiB"} if reshard == "auto" else {}
    attachment = zhooks.attach(model, policy={**SMALL, "schedule": {"reshard_after_forward": reshard}, "budget": budget})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for number in range(4):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            loss = each(batch(number)).square().mean()
            with torch.no_grad():
                each.encode(batch(number))
                each.eval()(batch(9))
            each.train()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode():
                each(batch(8))
        for param, value in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(sharded(param).full_tensor(), value.detach(), rtol=1e-6, atol=1e-7)
    kept = attachment.memory().transient["gathered units"]
    # The only rank shows its shards as they are.
    assert (kept == 0) == (reshard is True or place()[1] == 1)


# ---- what a pass waits for


@on_ranks(2)
def test_inside_resident_ranks_run_as_many_forwards_as_they_like() -> None:
    model, plain = Net().eval(), Net().eval()
    attachment = zhooks.attach(model, policy=SMALL)
    with attachment.resident(), torch.no_grad():
        for number in range(3 * place()[0]):
            assert torch.equal(model(batch(number)), plain(batch(number)))
        dist.barrier()
        if place()[0] == 0:
            assert torch.equal(model.encode(batch(1)), plain.encode(batch(1)))
    loss = model(batch(0)).sum()
    loss.backward()
    assert attachment.memory().transient["gathered units"] == 0


@on_ranks(2)
def test_at_stage_0_one_rank_alone_may_evaluate() -> None:
    model, plain = Net(), Net()
    zhooks.attach(model, policy={**SMALL, "stage": 0})
    if place()[0] == 0:
        with torch.inference_mode():
            assert torch.equal(model.eval()(batch(0)), plain.eval()(batch(0)))
    model.train()(batch(0)).sum().backward()


# ---- methods that are no forward


@on_ranks(1, 2, frozen=(True, False), mode=("no_grad", "inference_mode"))
def test_methods_that_read_parameters_outside_any_forward_see_them_whole(frozen: bool, mode: str) -> None:
    model, plain = Net().eval().requires_grad_(not frozen), Net().eval()
    zhooks.attach(model, policy=SMALL)
    with getattr(torch, mode)():
        for _ in range(2):
            assert torch.equal(model.encode(batch(1)), plain.encode(batch(1)))
            assert torch.equal(model.head(batch(1)), plain.head(batch(1)))
            assert torch.equal(model.blocks[1](batch(1)), plain.blocks[1](batch(1)))
        for read in (lambda net: net.scale.detach()[1:3], lambda net: net.scale.data.sum(), lambda net: net.norm.weight * 2):
            found = read(model)
            found = found.full_tensor() if isinstance(found, zhooks.ShardedTensor) else found
            assert torch.equal(found, read(plain))
        assert model.scale.tolist() == plain.scale.tolist()


# ---- a model that is only used


@on_ranks(1, 2, tier=("device", "host", "disk"))
def test_a_frozen_16_bit_model_has_no_copy_in_another_dtype_and_neither_gradients_nor_states(tier: str) -> None:
    model, plain = Net().eval().bfloat16().requires_grad_(False), Net().eval().bfloat16()
    with folder() as path:
        attachment = zhooks.attach(model, policy={**SMALL, "parameter": {"tier": tier}, "disk": {"path": str(path)}})
        with torch.no_grad():
            assert torch.equal(model(batch(0).bfloat16()), plain(batch(0).bfloat16()))
        report = attachment.memory()
        share = sum(param.numel() for param in plain.parameters()) * 2 / place()[1]
        assert {row.what: row.tier for row in report.rows}["parameter"] == tier
        assert share <= report.nbytes <= 1.05 * share and report.formula == report.nbytes
        assert not {"partial gradients", "reduced ranges"} & {name for name, most in report.bounds.items() if most}
        before = copy.deepcopy(plain.state_dict())
        attachment.detach()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
