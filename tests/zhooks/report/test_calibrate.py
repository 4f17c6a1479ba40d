"""attachment.calibrate(): what it measures, the dtypes it proposes, and that the proposal trains.

pytest runs it on ranks over Gloo; judging figures needs none. It never asks how long a calibration takes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from offload.errors import ShardedOpError
from tests.support.on_ranks import hooks_left, on_ranks, place
from tests.support.slow import slow
from tests.support.zoo import GPT, VOCABULARY, next_token
from zhooks.report.propose_dtypes import BINS, LOWEST, Proposal, Ranges, propose

SMALL = {"units": {"names": ["blocks.*", "tokens", "head"], "min_numel": 0}}


class Huge(nn.Module):
    """Its activations end beyond fp16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x * 3e5)) * 1e-6
        return out


class Faint(nn.Module):
    """Its parameters' gradients vanish in fp16 at any loss scale that the rest of the model bears."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x) * 1e-11
        return out


class Shifted(nn.Module):
    """Normalises large values that differ by little."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.shifted, self.norm = nn.Linear(width, width), nn.Identity(), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.shifted(self.inner(x) + 200.0))
        return out


def build() -> GPT:
    torch.manual_seed(0)
    model = GPT(tied=False)
    for at, kind in ((1, Huge), (3, Faint), (4, Shifted)):
        model.blocks.insert(at, kind(16))
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(100 * step + place()[0]))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(model: nn.Module, numbers: range) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in numbers:
        loss = next_token(model(batch(step)[0]).float(), batch(step)[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@on_ranks(1, 2, limit_s=180.0, prefer=("fp16", *slow("bf16")))
def test_units_built_to_need_fp32_are_named_and_the_proposal_trains_near_fp32(prefer: str) -> None:
    attachment = zhooks.attach(build(), policy=SMALL)
    with attachment.calibrate(prefer=prefer) as calibration:  # type: ignore[arg-type]
        train(attachment.model, range(3))
    proposal = calibration.proposal
    assert hooks_left(attachment.detach()) == []
    wide = {advice.unit: advice.reason for advice in proposal.advice if advice.dtype == "fp32"}
    assert proposal.base == prefer
    assert "the variation of its activations" in wide.pop("blocks.4")
    if prefer == "fp16":
        assert "activations up to" in wide.pop("blocks.1")
        assert "of its gradients vanish in fp16" in wide.pop("blocks.3")
    assert wide == {}
    texts: list[Any] = [None] * place()[1]
    if place()[1] > 1:
        dist.all_gather_object(texts, proposal.toml())
        assert set(texts) == {proposal.toml()}
    assert all(word in str(calibration) for word in ("blocks.4", "fp32", "stochastic", "bf16 noise"))

    plain, proposed = build(), build()
    reference, attachment = zhooks.attach(plain, policy=SMALL), zhooks.attach(proposed, policy=SMALL | proposal.values())
    wanted, found = train(plain, range(5)), train(proposed, range(5))
    assert found == pytest.approx(wanted, rel=0.02)
    if prefer == "fp16" and place()[1] == 1:
        attachment.apply(SMALL | {"precision": proposal.values()["precision"]})
        assert not math.isfinite(train(proposed, range(1))[0]), "without the rules activations overflow"
    attachment.detach()
    reference.detach()


@on_ranks(1, 2, stage=(0, 3))
def test_what_it_measures_is_what_plain_pytorch_has(stage: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plain = [param.detach().clone() for param in model.parameters()]
    attachment = zhooks.attach(model, policy={"stage": stage, "units": {"names": ["0", "1"], "min_numel": 0}})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.linspace(-3, 3, 32).view(4, 8)
    with attachment.calibrate() as calibration:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = calibration.proposal.ranges
    leaves = [param.requires_grad_() for param in plain]
    middle = nn.functional.linear(x, leaves[0], leaves[1])
    end = nn.functional.linear(middle, leaves[2], leaves[3])
    middle.retain_grad()
    end.retain_grad()
    end.square().sum().backward()
    grads = [param.grad for param in plain if param.grad is not None]
    assert middle.grad is not None and end.grad is not None
    assert first.gradient == pytest.approx(max(g.abs().max().item() for g in (*grads[:2], middle.grad)))
    assert second.gradient == pytest.approx(max(g.abs().max().item() for g in (*grads[2:], end.grad)))
    assert (first.activation, second.output) == pytest.approx((middle.abs().max().item(), end.abs().max().item()))
    counted = sum((grad.abs() < 1).sum().item() for grad in grads[:2]) / 72
    parameters = first.gradients[0]
    assert sum(parameters[: -LOWEST + 1]) / sum(parameters) == pytest.approx(counted)
    moved, lost = 0, 0
    with torch.no_grad():
        for param, grad in zip(plain[:2], grads[:2], strict=True):
            change = (param - 1e-3 * grad) - param
            narrow = param.bfloat16().float()
            moved += int((change != 0).sum())
            lost += int(((change != 0) & ((narrow + change).bfloat16().float() == narrow)).sum())
    assert first.lost == pytest.approx(lost / moved, abs=0.02) and first.nonfinite == 0
    attachment.detach()


@on_ranks(1)
def test_a_calibration_that_cannot_be_is_refused_and_the_model_trains_on() -> None:
    attachment = zhooks.attach(build(), policy=SMALL)
    with pytest.raises(ShardedOpError, match="expected a backward inside its block, found none"), attachment.calibrate():
        pass
    with pytest.raises(ShardedOpError, match='expected prefer "bf16" or "fp16"'), attachment.calibrate(prefer="fp8"):  # type: ignore[arg-type]
        pass
    with attachment.calibrate() as outer:
        with pytest.raises(ShardedOpError, match="another calibration that is open"), attachment.calibrate():
            pass
        with pytest.raises(ShardedOpError, match="expected its block to have ended"):
            str(outer)
        train(attachment.model, range(1))
    assert outer.proposal.backwards == 1
    with pytest.raises(KeyError), attachment.calibrate() as broken:
        raise KeyError
    with pytest.raises(ShardedOpError, match="expected its block to have ended"):
        _ = broken.proposal
    attachment.apply(SMALL | {"precision": {"param": "bf16"}})
    with pytest.raises(ShardedOpError, match="expected every unit to compute in fp32, found bfloat16"), attachment.calibrate():
        pass
    attachment.apply(SMALL | {"optimizer": {"overlap": True}})
    with pytest.raises(ShardedOpError, match="overlap = true"), attachment.calibrate():
        pass
    attachment.apply(SMALL)
    assert all(math.isfinite(loss) for loss in train(attachment.model, range(2)))
    assert hooks_left(attachment.detach()) == []


# --- judging figures --------------------------------------------------------------------------------------------------


def ranges(unit: str, *params: str, power: int = -6, numel: int = 100, **more: Any) -> Ranges:
    counts = tuple(100.0 if index == power - LOWEST else 0.0 for index in range(BINS))
    figures: dict[str, Any] = {
        "gradient": 2.0**power, "weight": 1.0, "activation": 4.0, "output": 4.0, "noise": 0.002, "lost": None, "nonfinite": 0,
    }  # fmt: skip
    return Ranges(unit, params, numel, (counts, (0.0,) * BINS), **figures | more)


def dtypes(proposal: Proposal) -> list[str]:
    return [advice.dtype for advice in proposal.advice]


def test_fp16_is_judged_at_the_scale_that_the_largest_gradient_allows() -> None:
    found = propose([ranges("a", "a.w", power=-6), ranges("b", "b.w", power=-40, numel=10)], "fp16", None, 1)
    assert found.loss_scale == 2.0**18 and dtypes(found) == ["fp16", "fp32"]
    assert dtypes(propose(found.ranges, "fp16", 2.0**12, 1)) == ["fp16", "fp32"]
    assert dtypes(propose(found.ranges, "bf16", None, 1)) == ["bf16", "bf16"]
    assert dtypes(propose([ranges("a", "a.w", nonfinite=1), ranges("b", "b.w")], "bf16", None, 1)) == ["fp32", "bf16"]


def test_a_proposal_over_a_policy_is_one_whatever_its_scale_may_fall_to() -> None:
    proposal = propose([ranges("a", "a.w", power=-6)], "fp16", 2.0**10, 1)
    policy = zhooks.Policy.of({"stage": 2, "precision": {"min_scale": 4096.0, "initial_scale": 65536.0}})
    found = zhooks.Policy.of(proposal.over(policy))
    assert (found.stage, found.precision.initial_scale, found.precision.min_scale) == (2, 2.0**10, 2.0**10)


def test_fp16_is_no_base_where_units_hand_on_its_end_or_most_cannot() -> None:
    wide = propose([ranges("a", "a.w", numel=1, activation=1e5, output=1e5), ranges("b", "b.w")], "fp16", None, 1)
    assert (wide.base, dtypes(wide)) == ("bf16", ["bf16", "bf16"])
    assert "output values up to 1.0e+05" in wide.advice[1].reason
    most = propose([ranges("a", "a.w", numel=101, activation=1e5), ranges("b", "b.w")], "fp16", None, 1)
    assert most.base == "bf16" and "most of the model" in most.advice[0].reason


def test_the_text_loads_back_to_rules_that_match_the_unit_and_nothing_else(tmp_path: Path) -> None:
    inner, outer = ranges("h.1", "h.1.w", "h.1.b", noise=0.2), ranges("h", "h.out.w", noise=0.3)
    proposal = propose([inner, outer, ranges("[odd]", "[odd].w", noise=0.3), ranges("rest", "w")], "bf16", None, 5)
    path = tmp_path / "proposed.toml"
    path.write_text("stage = 2\n" + proposal.toml(), encoding="utf-8")
    policy = zhooks.Policy.load(path)
    assert policy == zhooks.Policy.of({"stage": 2, **proposal.values()})
    assert [rule.match for rule in policy.rule] == ["h.1.*", "h.out.w", "[[]odd].*"]
    names = ("h.1.w", "h.1.b", "h.out.w", "[odd].w", "w")
    assert [policy.dtypes(name).param for name in names] == ["fp32"] * 4 + ["bf16"]
    assert "# h: rounding to bf16 is 30%" in proposal.toml()
