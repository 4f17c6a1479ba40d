"""Two attachments in one model: experts over an ``ep`` axis, everything else over all ranks, as in one plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zhooks
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.values import copies, same, whole

EXPERTS = 2


class Exchange(torch.autograd.Function):
    """Rows to the ranks of a group and back: each rank gets what the others have for it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return Exchange.apply(grads[0], ctx.group), None


class Moe(nn.Module):
    """The first half of the rows goes to expert 0, the second to expert 1; each rank of an ``ep`` group has one of them."""

    def __init__(self, mine: int | None, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        every = [nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(EXPERTS)]
        self.experts: Any = nn.ModuleList(every if mine is None else [every[mine]])
        self.group, self.mine = group, mine
        #: Experts that are not run, on any rank that has them.
        self.idle: frozenset[int] = frozenset()

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            run = [nn.Identity() if number in self.idle else expert for number, expert in enumerate(self.experts)]
            return torch.cat([expert(rows) for expert, rows in zip(run, x.chunk(EXPERTS), strict=True)])
        here = nn.Identity() if self.mine in self.idle else self.experts[0]
        return Exchange.apply(here(Exchange.apply(x, self.group)), self.group)


class Net(nn.Module):
    def __init__(self, mine: int | None = None, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.moe = Moe(mine, group)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.moe(self.first(x)))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def mesh_of(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world // EXPERTS, EXPERTS), mesh_dim_names=("dp", "ep"))


def attached(inner_first: bool, policy: dict[str, Any]) -> tuple[Net, zhooks.Attachment, zhooks.Attachment, int]:
    mesh = mesh_of(place()[1])
    mine = mesh.get_local_rank("ep")
    model = Net(mine, mesh.get_group("ep"))
    outer: dict[str, Any] = {**policy, "units": {"ignore": ["moe.experts"]}}
    if inner_first:
        experts = zhooks.attach(model.moe.experts, mesh=mesh, policy=policy)
        return model, zhooks.attach(model, policy=outer), experts, mine
    main = zhooks.attach(model, policy=outer)
    return model, main, zhooks.attach(model.moe.experts, mesh=mesh, policy=policy), mine


def step(model: Net, optimizer: torch.optim.Optimizer, number: int, ranks: range) -> Tensor:
    optimizer.zero_grad()
    for rank in ranks:
        model(batch(number, rank)).square().mean().div(len(ranks)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return norm


@on_ranks(2, 4, inner_first=(True, False), stage=(1, 3))
def test_experts_over_their_own_axis_train_and_clip_as_in_one_process(inner_first: bool, stage: int) -> None:
    rank, world = place()
    model, main, experts, mine = attached(inner_first, {"stage": stage})
    plain = Net()
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, plain))
    for number in range(3):
        norm = step(model, ours, number, range(rank, rank + 1))
        torch.testing.assert_close(norm, step(plain, theirs, number, range(world)))
    torch.testing.assert_close(copies(model.first.parameters()), list(plain.first.parameters()))
    torch.testing.assert_close(copies(model.moe.experts[0].parameters()), list(plain.moe.experts[mine].parameters()))
    for one in (main, experts) if inner_first else (experts, main):
        one.detach()
    torch.testing.assert_close(list(model.moe.experts[0].parameters()), list(plain.moe.experts[mine].parameters()))


@on_ranks(2, 4, inner_first=(True, False))
def test_a_clip_counts_experts_of_other_ranks_where_none_has_a_gradient_here(inner_first: bool) -> None:
    rank, world = place()
    model, _, _, mine = attached(inner_first, {"stage": 3, "comm": {"timeout_s": 20}})
    plain = Net()
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, plain))
    for number, idle in enumerate(({1}, {0}, set(), {1})):
        model.moe.idle = plain.moe.idle = frozenset(idle)
        norm = step(model, ours, number, range(rank, rank + 1))
        torch.testing.assert_close(norm, step(plain, theirs, number, range(world)))
    torch.testing.assert_close(copies(model.first.parameters()), list(plain.first.parameters()))
    torch.testing.assert_close(copies(model.moe.experts[0].parameters()), list(plain.moe.experts[mine].parameters()))


@on_ranks(4)
def test_each_attachment_saves_its_part_and_one_optimizer_of_both_goes_on_bit_for_bit() -> None:
    rank, _ = place()
    model, main, experts, mine = attached(False, {"stage": 3})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer, 0, range(rank, rank + 1))
    with folder() as path:
        main.save(path / "main", optimizer)
        experts.save(path / f"experts-{mine}", optimizer)
        step(model, optimizer, 1, range(rank, rank + 1))
        expected = copies(model.parameters())
        other, other_main, other_experts, _ = attached(True, {"stage": 3})
        fresh = torch.optim.Adam(other.parameters(), lr=0.01)
        other_experts.load(path / f"experts-{mine}", fresh)
        other_main.load(path / "main", fresh)
        step(other, fresh, 1, range(rank, rank + 1))
    assert same(copies(other.parameters()), expected)


@on_ranks(2)
def test_experts_of_several_places_are_not_saved_to_one_path_and_describe_says_which_they_are() -> None:
    _, _, experts, mine = attached(False, {"stage": 3})
    assert f"ep x 2 (this is {mine} of ep)" in experts.describe()
    with folder() as path, pytest.raises(zhooks.CheckpointError, match="a separate path for each of the 2 ep ranks"):
        experts.save(path / "experts", ())


@on_ranks(2)
def test_a_full_state_that_would_hold_a_part_is_refused() -> None:
    model, main, experts, _ = attached(False, {"stage": 3})
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(zhooks.CheckpointError, match=r"found moe\.experts\.0\.0\.weight of another, whose"):
        main.state_dict()
    with pytest.raises(zhooks.CheckpointError, match="found Adam with some of another attachment"):
        experts.state_dict(optimizer)
    with folder() as path, pytest.raises(zhooks.CheckpointError, match="of another, whose"):
        main.save_full(path / "model.safetensors")


@on_ranks(2)
def test_an_overflow_in_one_expert_skips_the_step_of_a_scaler_on_every_rank() -> None:
    rank, _ = place()
    model, _, _, mine = attached(False, {"stage": 3})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = copies(model.parameters())
    scaler.scale(model(batch(0, rank)).sum()).backward()
    with torch.no_grad():
        if mine:
            model.moe.experts[0][0].bias.grad.mul_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert same(copies(model.parameters()), before) and scaler.get_scale() == 1.0


@on_ranks(2)
def test_an_attachment_of_a_part_accumulates_by_itself() -> None:
    """What FSDP2 calls gradient sync of one module."""
    rank, _ = place()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    main = zhooks.attach(model, policy={"units": {"ignore": ["1"]}})
    part = zhooks.attach(model[1])
    sums: list[str] = []
    main.register_reduce_hook(before=lambda unit, gradient: sums.append("main"))
    part.register_reduce_hook(before=lambda unit, gradient: sums.append("part"))
    with part.accumulate():
        for number in range(2):
            model(torch.full((1, 4), float(rank + number))).sum().backward()
        assert sums == ["main", "main"]
    assert sums == ["main", "main", "part"]
    assert torch.equal(whole(model[1].bias.grad), torch.full((4,), 2.0))
