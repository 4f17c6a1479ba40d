"""[optimizer] kernel = "numba" under attach: within the kernels' tolerance of torch, and the same bits on every tier.

pytest runs it on ranks over Gloo; the kernels alone are tested in tests/offload. It never looks at a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.errors import ShardedOpError
from offload.policy import Policy
from offload.tier import Tier
from tests.support.on_ranks import on_ranks, place
from tests.support.slow import slow
from zhooks.layout import kind_of
from zhooks.optim import Rounding, choices_of

STEPS = 5

MAKERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "plainsgd": lambda params: torch.optim.SGD(params, lr=1e-2),
}


class Lion(torch.optim.Optimizer):
    """Lion as its authors published it, for torch to step."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                average, (one, two) = state["exp_avg"], group["betas"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_((average * one + param.grad * (1 - one)).sign_(), alpha=-group["lr"])
                average.mul_(two).add_(param.grad, alpha=1 - two)


MAKERS["lion"] = lambda params: Lion(params, lr=1e-2)


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 48, bias=False), nn.GELU(), nn.Linear(48, 3))


def train(optimizer: str, kernel: str, tier: str, **more: Any) -> dict[str, Tensor]:
    cell = {"tier": tier}
    model = build()
    policy = {"parameter": cell, "gradient": cell, "optimizer": {**cell, "kernel": kernel}, "units": {"min_numel": 0}}
    attachment = zhooks.attach(model, policy=policy | more)
    made = MAKERS[optimizer](model.parameters())
    rank, _ = place()
    for number in range(STEPS):
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * number + rank))
        model(inputs).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        made.step()
        made.zero_grad()
    attachment.detach()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@on_ranks(1, 2, optimizer=("adamw", *slow("adam"), "sgd", *slow("plainsgd"), "lion"))
def test_the_kernels_agree_with_torch(optimizer: str) -> None:
    found, wanted = train(optimizer, "numba", "device"), train(optimizer, "torch", "device")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-4, atol=2e-6)
        assert not torch.equal(found[name], build().state_dict()[name])


@on_ranks(1, 2, optimizer=("adamw", *slow("sgd"), "lion"), precision=("fp32", "bf16"))
def test_every_tier_has_the_same_bits(optimizer: str, precision: str) -> None:
    more = {} if precision == "fp32" else {"precision": {"param": precision}}
    device, host, disk = (train(optimizer, "numba", tier, **more) for tier in ("device", "host", "disk"))
    assert all(torch.equal(device[name], host[name]) and torch.equal(device[name], disk[name]) for name in device)


def refusal(optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> None:
    model = build()
    attachment = zhooks.attach(model, policy={"optimizer": {"kernel": "numba"}})
    made = optimizer(model.parameters())
    model(torch.ones(2, 24)).sum().backward()
    before = attachment.state_dict()
    with pytest.raises(ShardedOpError, match=r'kernel = "numba" needs Adam, AdamW, SGD or Lion'):
        made.step()
    after = attachment.state_dict()
    assert all(torch.equal(after["model"][name], value) for name, value in before.get("model", {}).items())
    assert [len(group["params"]) for group in made.param_groups] == [len(list(model.parameters()))]


@on_ranks(1, 2)
def test_an_optimizer_without_a_kernel_is_refused_by_name() -> None:
    refusal(lambda params: torch.optim.Adagrad(params, lr=0.1))


@on_ranks(1, option=("amsgrad", "capturable", "differentiable"))
def test_an_option_the_kernels_lack_is_refused_by_name(option: str) -> None:
    chosen: dict[str, Any] = {option: True}
    refusal(lambda params: torch.optim.AdamW(params, **chosen))


@on_ranks(1, 2, tier=("device", "disk"))
def test_groups_and_parameters_without_a_gradient_are_told_apart(tier: str) -> None:
    states = []
    for kernel in ("numba", "torch"):
        model = build()
        cell = {"tier": tier}
        policy = {"parameter": cell, "gradient": cell, "optimizer": {**cell, "kernel": kernel}}
        attachment = zhooks.attach(model, policy=policy)
        weights = [param for param in model.parameters() if param.dim() > 1]
        biases = [param for param in model.parameters() if param.dim() == 1]
        made = torch.optim.AdamW([{"params": weights, "lr": 1e-2}, {"params": biases, "lr": 1e-3, "weight_decay": 0.0}])
        for number in range(4):
            hidden = model[:2](torch.ones(2, 24) * number)
            # The last layers get no gradient in the first steps.
            (hidden.square().mean() if number < 2 else model[2:](hidden).square().mean()).backward()
            made.step()
            made.zero_grad()
        attachment.detach()
        states.append(model.state_dict())
    for name, tensor in states[1].items():
        torch.testing.assert_close(states[0][name], tensor, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("kernel", "rounding", "kind"),
    [
        ("torch", "nearest", "TorchKernel"),
        ("torch", "stochastic", "RoundedKernel"),
        ("numba", "nearest", "NumbaKernel"),
        ("numba", "stochastic", "NumbaKernel"),
    ],
)
def test_the_policy_chooses_how_a_flat_is_updated(kernel: str, rounding: str, kind: str) -> None:
    policy = Policy.of({"optimizer": {"kernel": kernel, "rounding": rounding}})
    flat = kind_of(["weight"], nn.Parameter(torch.ones(2)), policy, torch.device("cpu"))
    choice = choices_of(policy, Rounding(0))(flat)
    assert (type(choice.kernel).__name__, choice.place) == (kind, Tier.DEVICE)


@pytest.mark.parametrize(("device", "kernel"), [("cpu", "NumbaKernel"), ("meta", "TorchKernel")])
def test_what_stays_on_the_device_is_updated_there_and_by_torch_on_an_accelerator(device: str, kernel: str) -> None:
    there = {"tier": "host"}
    policy = Policy.of({"parameter": there, "gradient": there, "optimizer": {**there, "kernel": "numba", "compute": "host"}})
    choice_of = choices_of(policy, Rounding(0))
    away = kind_of(["weight"], nn.Parameter(torch.ones(2)), policy, torch.device(device))
    here = replace(away, tiers=replace(away.tiers, optimizer=Tier.DEVICE))
    found = [(type(choice_of(kind).kernel).__name__, choice_of(kind).place) for kind in (away, here)]
    assert found == [("NumbaKernel", Tier.HOST), (kernel, Tier.DEVICE)]
