"""Complex parameters, as Fourier neural operators have them, beside plain PyTorch: every optimizer, clipping, checkpoints.

pytest runs it, on one and two ranks with the same data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import folder, on_ranks
from tests.support.slow import slow
from tests.support.values import full, grad_of, same


class Spectral(nn.Module):
    """Weights in the frequency domain, one of them turned, beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.cfloat))
        self.turned = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat).t())
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x)
        out: Tensor = torch.fft.irfft(waves * self.weight + waves.tanh() * self.turned, n=6) + self.linear(x)
        return out


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, clip: bool) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def kept_on(tier: str, stage: int) -> dict[str, Any]:
    cells = ("optimizer", "parameter", "gradient")[: 3 if stage == 3 else 1]
    return {} if tier == "device" else {cell: {"tier": tier} for cell in cells}


@on_ranks(1, 2, stage=(*slow(0, 1), 3), tier=(*slow("device"), "host", *slow("disk")))
def test_every_optimizer_updates_complex_parameters_as_in_plain_pytorch(stage: int, tier: str) -> None:
    for name, make in OPTIMIZERS.items():
        for foreach in (False, True):
            model, plain = Spectral(), Spectral()
            attachment = zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}, **kept_on(tier, stage)})
            for net in (model, plain):
                train(net, make(net.parameters(), lr=0.01, foreach=foreach), 2, clip=False)
            assert same(full(model), plain.parameters()), f"{name} foreach={foreach}"
            attachment.detach()


@on_ranks(1, 2, tier=("device", "host", "disk"))
def test_clipped_complex_gradients_and_their_states_go_through_a_checkpoint(tier: str) -> None:
    model, plain = Spectral(), Spectral()
    policy = {"stage": 3, **kept_on(tier, 3)}
    attachment = zhooks.attach(model, policy=policy)
    optimizer, stock = torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(plain.parameters(), lr=0.01)
    train(model, optimizer, 2, clip=True)
    train(plain, stock, 2, clip=True)
    state = attachment.state_dict(optimizer)
    with folder() as path:
        attachment.save(path / "run", optimizer)
        attachment.detach()
        again = Spectral()
        resumed = zhooks.attach(again, policy={"stage": 1})
        other = torch.optim.Adam(again.parameters(), lr=0.01)
        resumed.load(path / "run", other)
    if state:
        assert state["optimizer"]["state"]
    train(again, other, 2, clip=True)
    train(plain, stock, 2, clip=True)
    for ours, theirs in zip(full(again), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach())


@on_ranks(1, 2)
def test_pairs_of_numbers_of_a_complex_gradient_are_those_of_the_whole() -> None:
    model, plain = Spectral(), Spectral()
    zhooks.attach(model)
    for net in (model, plain):
        net(torch.ones(2, 3, 6)).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.is_complex():
            pairs: Any = torch.view_as_real(grad_of(ours))
            assert torch.equal(pairs.full_tensor(), torch.view_as_real(grad_of(theirs)))
            with torch.no_grad():
                assert torch.equal(torch.view_as_real(ours), torch.view_as_real(theirs))
                assert ours.abs().max().item() == theirs.abs().max().item()


@on_ranks(1)
def test_the_compiled_kernel_refuses_complex_parameters_before_anything_is_updated() -> None:
    pytest.importorskip("numba")
    model = Spectral()
    attachment = zhooks.attach(model, policy={"optimizer": {"tier": "host", "kernel": "numba"}})
    before = full(model)
    model(torch.ones(2, 3, 6)).sum().backward()
    with pytest.raises(zhooks.ShardedOpError, match=r'complex64.*kernel = "torch"'):
        torch.optim.AdamW(model.parameters()).step()
    assert same(full(model), before)
    attachment.detach()


class Fails(torch.optim.SGD):
    """Raises when it comes to a vector, with views of other parameters at hand."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        views = []
        for group in self.param_groups:
            for param in group["params"]:
                with torch.no_grad():
                    views.append(torch.view_as_real(param) if param.is_complex() else param)
                if param.dim() == 1:
                    raise RuntimeError("the step failed")
        super().step(closure)


@on_ranks(1, 2, stage=(0, 3), tier=("device", "host", "disk"))
def test_a_model_is_detached_while_the_exception_of_a_failed_step_lives(stage: int, tier: str) -> None:
    model = Spectral()
    attachment = zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}, **kept_on(tier, stage)})
    model(torch.ones(2, 3, 6)).sum().backward()
    optimizer = Fails(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="the step failed") as kept:
        optimizer.step()
    assert attachment.detach() is model
    assert kept.value.__traceback__ is not None
    assert all(type(param) is nn.Parameter for param in model.parameters())
    model(torch.ones(2, 3, 6)).sum().backward()
