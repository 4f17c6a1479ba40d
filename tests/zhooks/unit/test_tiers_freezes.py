"""Freezing, unfreezing and ``apply`` between steps of one and of several backward passes: every tier leaves the same bits.

pytest runs it on one rank and on two, which have the same batches: their mean is the gradient of plain PyTorch, the oracle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.matrix_optimizers import batch, net
from tests.support.on_ranks import on_ranks
from tests.support.slow import slow
from tests.support.tiers import AWAY, TIERS, policy
from tests.support.values import copies, same

#: Beside the policies of other tests: gradients alone are away from the device.
CELLS = {**TIERS, "gradients": ("device", "host", "device")}


def chosen(tier: str, stage: int, **more: Any) -> dict[str, Any]:
    """At stages 1 and 2 parameters stay on the device."""
    wanted = policy("device", stage, **more)
    for cell, where in zip(("parameter", "gradient", "optimizer"), CELLS[tier], strict=True):
        if cell != "parameter" or stage in (0, 3):
            wanted[cell] = {"tier": where}
    return wanted


def trained(under: dict[str, Any] | None, passes: int, clip: float, other: dict[str, Any] | None = None) -> list[Tensor]:
    """Values after every step: part of a unit is frozen after the first and before the update of the third, ``other`` is
    applied after the fourth, everything trains again from the sixth on, and the model is plain for the last."""
    model = net()
    attachment = None if under is None else zhooks.attach(model, policy=under)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    values: list[Tensor] = []
    for step in range(8):
        for number in range(passes):
            (model(batch(passes * step + number)).square().mean() / passes).backward()
        if step == 2:
            model.get_submodule("0").get_parameter("bias").requires_grad_(False)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            model.get_submodule("2").get_parameter("weight").requires_grad_(False)
        if step == 3 and attachment is not None and other is not None:
            attachment.apply(other)
        if step == 4:
            model.requires_grad_(True)
        if step == 6 and attachment is not None:
            attachment.detach()
        values.extend(copies(model.parameters()))
    return values


def check(tiers: tuple[str, ...], stage: int, passes: int, clip: float, **more: Any) -> None:
    """Every tier, and every move between it and the device, leaves the bits of the device tier."""
    device = chosen("device", stage, **more)
    wanted = trained(device, passes, clip)
    if not more:
        plain = trained(None, passes, clip)
        # Where gradients are clipped, the norm is a sum in another order.
        assert same(wanted, plain) if not clip else torch.allclose(wanted[-1], plain[-1], rtol=1e-5, atol=1e-6)
    for tier in tiers:
        one = chosen(tier, stage, **more)
        assert same(trained(one, passes, clip), wanted), tier
        assert same(trained(one, passes, clip, device), wanted), f"{tier}, then device"
        assert same(trained(device, passes, clip, one), wanted), f"device, then {tier}"


@on_ranks(1, 2, stage=(3, *slow(1)))
def test_a_freeze_between_steps_of_several_backward_passes_leaves_the_same_bits_on_every_tier(stage: int) -> None:
    check(("gradients",), stage, passes=2, clip=0.0)


@pytest.mark.slow
@on_ranks(1, 2, limit_s=600, stage=(0, 1, 2, 3), passes=(1, 2, 3), clip=(0.0, 0.1))
def test_every_tier_stage_and_number_of_passes_freezes_with_the_same_bits(stage: int, passes: int, clip: float) -> None:
    check((*AWAY, "gradients"), stage, passes, clip)


@pytest.mark.slow
@on_ranks(1, 2, limit_s=600, stage=(0, 1, 2, 3), passes=(1, 2))
def test_every_tier_freezes_with_the_same_bits_where_parameters_are_bf16(stage: int, passes: int) -> None:
    check(AWAY, stage, passes, 0.1, precision={"param": "bf16", "output": "fp32"})
    check(AWAY, stage, passes, 0.0, precision={"param": "bf16", "reduce": "fp32", "output": "fp32"})


class Gate(nn.Module):
    """Two parameters of one unit, of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Parameter(torch.randn(12, 3))
        self.sometimes = nn.Parameter(torch.randn(12, 3))
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.always + x @ self.sometimes if self.both else x @ self.always


#: Gradients that are not written where they are kept: they rest elsewhere, or are reduced in another dtype or by hooks.
REDUCED: dict[str, dict[str, Any]] = {
    "host": chosen("host", 3),
    "disk": chosen("disk", 3),
    "replicated": chosen("host", 0),
    "partitioned": chosen("host", 2),
    "scaled": chosen("device", 3, precision={"loss_scale": 1024.0}),
}


@on_ranks(1, 2, how=tuple(REDUCED))
def test_what_a_step_does_not_use_gets_no_gradient_after_a_step_of_several_backward_passes(how: str) -> None:
    plain, model = Gate(), Gate()
    attachment = zhooks.attach(model, policy=REDUCED[how])
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for step in range(4):
            each.both = step < 2
            for number in range(2 if step < 2 else 1):
                each(batch(2 * step + number)).square().mean().backward()
            optimizer.step()
            assert (each.sometimes.grad is not None) is each.both, step
            optimizer.zero_grad()
    assert same(copies(model.parameters()), copies(plain.parameters()))
    attachment.detach()
