"""``[precision] cast_inputs = "unit"``: what a forward makes in fp32 by itself is cast where a unit is given it.

pytest runs it over real ranks. The oracle is plain PyTorch: masters in fp32, a working copy in bf16 whose blocks and head cast
what they are given by pre-hooks, which is what FSDP2's ``cast_forward_inputs`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.errors import PolicyError
from tests.support.compiling import breaks, compiling, graphs
from tests.support.on_ranks import hooks_left, on_ranks, place

CAST = {"precision": {"param": "bf16", "cast_inputs": "unit"}, "units": {"min_numel": 0}}


@dataclass
class Where:
    positions: Tensor
    ids: Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, where: Where, *, extra: dict[str, list[Tensor]]) -> Tensor:
        made: Tensor = x + torch.tanh(self.feed(self.norm(x) + where.positions)) * extra["scales"][0]
        return made


class Model(nn.Module):
    """Makes positions in fp32 itself, so that the residual stream is fp32 in front of its first block and of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 16)
        self.stream: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.sin(torch.arange(tokens.shape[-1])[:, None] / torch.arange(1.0, 9.0))
        x = self.embed(tokens) + positions
        if x.requires_grad:
            self.stream = [x]
            x.retain_grad()
        for block in self.blocks:
            x = block(x, Where(positions, tokens), extra={"scales": [positions.cos()]})
        made: Tensor = self.head(x + positions)
        return made


def build() -> Model:
    torch.manual_seed(5)
    return Model()


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    logits = model(batch(step, rank)).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch(step + 50, rank).flatten())


def narrow(module: nn.Module, args: Any, kwargs: Any) -> Any:
    given: list[Any] = [one.bfloat16() if isinstance(one, Tensor) else one for one in args]
    x, *others = given
    more = [replace(one, positions=one.positions.bfloat16()) for one in others]
    return (x, *more), {name: {"scales": [one.bfloat16() for one in given["scales"]]} for name, given in kwargs.items()}


def by_hand(ranks: Sequence[int], steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of rank 0, and the values at the end."""
    masters, work = build(), build().bfloat16()
    for module in (*work.blocks, work.head):
        module.register_forward_pre_hook(narrow, with_kwargs=True)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        with torch.no_grad():
            for mine, theirs in zip(work.parameters(), masters.parameters(), strict=True):
                mine.copy_(theirs)
        optimizer.zero_grad()
        for rank in ranks:
            work.zero_grad()
            loss = loss_of(work, step, rank)
            loss.backward()
            losses += [loss.item()] * (rank == 0)
            for mine, theirs in zip(work.parameters(), masters.parameters(), strict=True):
                assert mine.grad is not None
                theirs.grad = mine.grad.float() if theirs.grad is None else theirs.grad + mine.grad.float()
        for theirs in masters.parameters():
            assert theirs.grad is not None
            theirs.grad /= len(ranks)
        optimizer.step()
    return losses, dict(masters.state_dict())


def train(model: Model, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, place()[0])
        loss.backward()
        assert model.stream[0].grad is not None and model.stream[0].grad.dtype is torch.float32
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(1, 2, cell=("3-none-device", "3-unit-host", "0-none-device", "2-unit-device"))
def test_units_are_given_their_inputs_in_the_dtype_they_compute_in(cell: str) -> None:
    stage, checkpoint, tier = cell.split("-")
    more = {"stage": int(stage), "activation": {"checkpoint": checkpoint}, "optimizer": {"tier": tier}}
    model = build()
    attachment = zhooks.attach(model, policy=CAST | more)
    losses = train(model)
    attachment.detach()
    wanted, masters = by_hand(range(place()[1]))
    assert losses == wanted or place()[0] > 0
    assert all(torch.equal(value, masters[name]) for name, value in model.state_dict().items())
    assert hooks_left(model) == []


@on_ranks(1)
@compiling()
def test_a_compiled_block_stays_one_graph() -> None:
    model = build()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    attachment = zhooks.attach(model, policy=CAST)
    torch.testing.assert_close(train(model), by_hand([0])[0], rtol=1e-2, atol=0)
    assert graphs() == 1 and breaks() == []
    attachment.detach()


@on_ranks(1, 2)
def test_a_block_that_a_rule_keeps_in_fp32_is_given_fp32_and_what_has_the_dtype_stays_the_same_object() -> None:
    model = build()
    rule = {"match": "blocks.1.*", "precision.param": "fp32"}
    attachment = zhooks.attach(model, policy=CAST | {"rule": [rule]})
    seen: dict[str, tuple[Any, ...]] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen[str(len(seen))] = (args[0].dtype, args[1].positions.dtype, args[1].ids.dtype)

    handles = [block.norm.register_forward_pre_hook(lambda m, a: seen.__setitem__(f"norm {len(seen)}", (a[0].dtype,)))
               for block in model.blocks]  # fmt: skip
    handles += [block.register_forward_hook(note) for block in model.blocks]
    loss_of(model, 0, 0).backward()
    wide, short = torch.float32, torch.bfloat16
    assert [dtypes[0] for name, dtypes in seen.items() if name.startswith("norm")] == [short, wide, short]
    assert [dtypes for name, dtypes in seen.items() if not name.startswith("norm")] == [
        (short, short, torch.int64), (wide, wide, torch.int64), (short, short, torch.int64),
    ]  # fmt: skip
    attachment.detach()


@on_ranks(1, 2)
def test_without_it_the_layer_refuses_as_in_a_plain_bf16_model_and_apply_brings_it() -> None:
    model = build()
    attachment = zhooks.attach(model, policy=CAST | {"precision": {"param": "bf16"}})
    with pytest.raises(RuntimeError, match=r"dtype"):
        loss_of(model, 0, 0)
    attachment.apply(CAST)
    loss_of(model, 0, 0).backward()
    attachment.detach()


@on_ranks(1, 2)
def test_fp16_with_a_loss_scale_leaves_true_gradients_outside() -> None:
    model = build()
    scaled = {"param": "fp16", "cast_inputs": "unit", "loss_scale": 1024.0}
    attachment = zhooks.attach(model, policy=CAST | {"precision": scaled})
    loss_of(model, 0, 0).backward()
    found = model.embed.weight.grad.full_tensor()
    plain = build()
    loss_of(plain, 0, 0).backward()
    torch.testing.assert_close(found, plain.embed.weight.grad, rtol=2e-2, atol=1e-4)
    attachment.detach()


class Collecting(nn.Module):
    """Its blocks write into what they are given."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.blocks, self.write = nn.ModuleList(Writer(write) for _ in range(3)), write
        self.found: list[Tensor] = []

    def forward(self, x: Tensor, into: dict[str, Any] | None = None) -> Tensor:
        losses: list[Tensor] = []
        cache: dict[str, Any] = {"held": Where(torch.ones(8), torch.zeros(2))}
        buffer = torch.zeros(8)
        for block in self.blocks:
            x = block(x, losses, cache, buffer)
        self.found = [*losses, cache["held"].positions, cache["new 2"]]
        if into is not None:
            into["out"] = x
        return x.float() + sum(losses)


class Writer(nn.Module):
    def __init__(self, write: str) -> None:
        super().__init__()
        self.layer, self.write = Block(), write

    def forward(self, x: Tensor, losses: list[Tensor], cache: dict[str, Any], buffer: Tensor) -> Tensor:
        made: Tensor = self.layer(x, cache["held"], extra={"scales": [torch.ones(8, dtype=x.dtype)]})
        losses.append(made.float().square().mean())
        cache[f"new {len(losses) - 1}"] = cache["held"].positions
        cache["held"].positions = cache["held"].positions * 2
        if self.write == "in place":
            buffer.add_(1)
        return made


@on_ranks(1, 2, checkpoint=("none", "unit"))
def test_what_a_unit_writes_into_lists_dicts_and_dataclasses_is_in_its_callers(checkpoint: str) -> None:
    torch.manual_seed(0)
    model = Collecting("containers")
    attachment = zhooks.attach(model, policy=CAST | {"activation": {"checkpoint": checkpoint}})
    into: dict[str, Any] = {"x": torch.ones(2, 3)}
    model(torch.ones(2, 8), into).mean().backward()
    assert [loss.dtype for loss in model.found[:3]] == [torch.float32] * 3
    assert torch.equal(model.found[3].float(), torch.full((8,), 8.0)), "each block doubled it for the next"
    assert torch.equal(model.found[4].float(), torch.full((8,), 4.0))
    assert into["x"].dtype is torch.float32 and into.keys() == {"x", "out"}
    attachment.detach()


@on_ranks(1, 2)
def test_a_unit_that_writes_into_a_tensor_that_was_cast_is_named() -> None:
    torch.manual_seed(0)
    model = Collecting("in place")
    attachment = zhooks.attach(model, policy=CAST)
    with pytest.raises(PolicyError, match=r"blocks.0 to only read its inputs, found a tensor of shape \[8\] that it changed"):
        model(torch.ones(2, 8))
    attachment.detach()


def test_a_policy_without_a_dtype_to_cast_to_is_refused() -> None:
    with pytest.raises(PolicyError, match=r'cast_inputs: found "unit" and no param: .* write param = "bf16" too'):
        zhooks.Policy.of({"precision": {"cast_inputs": "unit"}})
    policy = zhooks.Policy.of({"precision": {"param": "bf16", "cast_inputs": "unit"}})
    assert zhooks.Policy.of(policy.values()) == policy and 'cast_inputs = "unit"' in policy.describe()
