"""[[rule]] precision: units of their own dtype amid others, against plain PyTorch with the same casts written by hand.

pytest runs it on ranks over Gloo. It never asks which layout makes it so: bits, memory and errors alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from offload.errors import AttachError
from tests.support.on_ranks import hooks_left, on_ranks, place
from tests.support.zoo import GPT, VOCABULARY, next_token

NORMS = [{"match": "*norm*", "precision.param": "fp32"}]
SMALL = {"units": {"min_numel": 0}}


def build() -> GPT:
    torch.manual_seed(3)
    return GPT(tied=False)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(model: nn.Module, parameters: Any, ranks: tuple[int, ...], steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        for rank in ranks:
            loss = next_token(model(batch(step, rank)[0]).float(), batch(step, rank)[1])
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class ByHand(nn.Module):
    """Plain PyTorch: masters in fp32, a working copy in bf16 but for what ``wide`` names, which is cast in and out by hand."""

    def __init__(self, wide: tuple[str, ...]) -> None:
        super().__init__()
        self.masters, self.work = build(), build().bfloat16()
        for name, module in self.work.named_modules():
            if any(name == one or name.endswith(f".{one}") for one in wide):
                module.float()
                plain = module.forward
                module.forward = lambda x, plain=plain: plain(x.float()).bfloat16()

    def forward(self, tokens: Tensor) -> Any:
        with torch.no_grad():
            for mine, theirs in zip(self.work.parameters(), self.masters.parameters(), strict=True):
                mine.grad = None
                mine.copy_(theirs)
        return self.work(tokens)

    def step_gradients(self) -> None:
        for mine, theirs in zip(self.work.parameters(), self.masters.parameters(), strict=True):
            assert mine.grad is not None
            theirs.grad = mine.grad.float()


def train_by_hand(wide: tuple[str, ...]) -> tuple[list[float], dict[str, Tensor]]:
    model = ByHand(wide)
    optimizer = torch.optim.SGD(model.masters.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        loss = next_token(model(batch(step, 0)[0]).float(), batch(step, 0)[1])
        loss.backward()
        model.step_gradients()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.masters.state_dict())


CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "norms": ("*norm*", ("norm", "norm1", "norm2")),
    "block": ("blocks.1.*", ("blocks.1",)),
    "head": ("head.*", ("head",)),
}


CELLS = ("norms-0-none-device", "norms-3-unit-device", "norms-3-none-host", "block-3-unit-host", "head-2-none-device")


@on_ranks(1, cell=CELLS)
def test_one_rank_has_the_bits_of_casts_written_by_hand(cell: str) -> None:
    case, stage, checkpoint, tier = cell.split("-")
    match, wide = CASES[case]
    rule = {"match": match, "precision.param": "fp32", "optimizer.tier": tier}
    policy = {"stage": int(stage), "precision": {"param": "bf16"}, "rule": [rule], "activation": {"checkpoint": checkpoint}}
    model = build()
    attachment = zhooks.attach(model, policy=policy | SMALL)
    losses = train(model, model.parameters(), (0,))
    attachment.detach()
    wanted, masters = train_by_hand(wide)
    assert losses == wanted
    assert all(torch.equal(value, masters[name]) for name, value in model.state_dict().items())
    assert hooks_left(model) == []


@on_ranks(2)
def test_two_ranks_agree_and_are_near_one_that_sees_both_batches() -> None:
    policy = {"precision": {"param": "bf16"}, "rule": [{**NORMS[0], "parameter.tier": "host", "precision.reduce": "bf16"}]}
    model, plain = build(), build()
    attachment = zhooks.attach(model, policy=policy | SMALL)
    train(model, model.parameters(), (place()[0],))
    attachment.detach()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for rank in range(2):
            (next_token(plain(batch(step, rank)[0]), batch(step, rank)[1]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0.0, atol=5e-4)
        other = value.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, value)


@on_ranks(1)
def test_what_a_module_is_given_and_gives_has_the_dtype_of_its_surroundings() -> None:
    model = build()
    attachment = zhooks.attach(model, policy={"precision": {"param": "bf16"}, "rule": NORMS})
    seen: dict[str, tuple[torch.dtype, ...]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = (args[0].dtype, next(module.parameters()).dtype, output.dtype)

        return hook

    handles = [model.get_submodule(name).register_forward_hook(note(name)) for name in ("blocks.0.norm1", "blocks.0.feed.0")]
    model(batch(0, 0)[0])
    # Hooks of the user see the surroundings on the way out; the module itself was given fp32.
    assert seen["blocks.0.norm1"][1:] == (torch.float32, torch.bfloat16)
    assert seen["blocks.0.feed.0"] == (torch.bfloat16,) * 3
    while handles:
        handles.pop().remove()
    attachment.apply({"precision": {"param": "bf16"}})
    assert model(batch(0, 0)[0]).dtype == torch.bfloat16
    assert "fp32 -> fp32" not in attachment.describe()
    attachment.apply({"precision": {"param": "bf16"}, "rule": [{"match": "*", "precision.param": "fp32"}]})
    assert torch.equal(model(batch(0, 0)[0]), build()(batch(0, 0)[0]))
    attachment.detach()
    assert hooks_left(model) == []


@on_ranks(1, 2)
def test_apply_changes_rules_between_steps() -> None:
    def run(*policies: dict[str, Any]) -> dict[str, Tensor]:
        model = build()
        attachment = zhooks.attach(model, policy=policies[0] | SMALL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step, policy in enumerate(policies):
            attachment.apply(policy | SMALL)
            next_token(model(batch(step, place()[0])[0]).float(), batch(step, place()[0])[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        attachment.detach()
        return {name: value.clone() for name, value in model.state_dict().items()}

    ruled = {"precision": {"param": "bf16"}, "rule": [{"match": "blocks.0.*", "precision.param": "fp32"}]}
    everything: dict[str, Any] = {"rule": [{"match": "*", "precision": {"param": "bf16"}}]}
    one, two = run({"precision": {"param": "bf16"}}, ruled), run(everything, ruled)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], value) for name, value in run({}, ruled).items())


@on_ranks(1, 2)
def test_a_rule_that_splits_a_linear_is_refused_and_the_model_stays_as_it_was() -> None:
    split = {"precision": {"param": "bf16"}, "rule": [{"match": "*.bias", "precision.param": "fp32"}]}
    message = r"needs all parameters of .* \(\w+\) to compute in one dtype, found .*bias in float32.*Let match cover"
    model = build()
    with pytest.raises(AttachError, match=message):
        zhooks.attach(model, policy=split)
    wanted = build()(batch(0, 0)[0])
    assert torch.equal(model(batch(0, 0)[0]), wanted) and hooks_left(model) == []
    attachment = zhooks.attach(model)
    with pytest.raises(AttachError, match=message):
        attachment.apply(split)
    assert torch.equal(model(batch(0, 0)[0]), wanted)
    attachment.detach()


class Gated(nn.Module):
    """A module that casts by itself: its own parameter in fp32 beside a projection in the dtype of its surroundings."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.project = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert self.decay.dtype is torch.float32 and x.dtype is self.project.weight.dtype is torch.bfloat16
        gated: Tensor = self.project(x) * torch.exp(-self.decay).to(x.dtype)
        return gated


@on_ranks(1)
def test_a_module_of_ones_own_that_mixes_is_left_to_itself() -> None:
    model = nn.Sequential(Gated(), Gated())
    policy = {"precision": {"param": "bf16"}, "rule": [{"match": "*.decay", "precision.param": "fp32"}]}
    attachment = zhooks.attach(model, policy=policy)
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    attachment.detach()
