"""Ranks that build other models are refused, and every rank says what each of them has."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import zhooks
from tests.support.on_ranks import on_ranks, place


def net(width: int = 8, layers: int = 2, frozen: bool = False) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)], nn.Linear(8, width))
    model[0].weight.requires_grad_(not frozen)
    return model


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "width": (
        {"width": 16},
        r"2\.weight \(8, 8\) torch.float32, trainable, in unit \d on rank 0, 2\.weight \(16, 8\) .* on rank 1; "
        r"2\.bias \(8,\) .* on rank 0, 2\.bias \(16,\) .* on rank 1",
    ),
    "layers": ({"layers": 3}, r"6 parameters on rank 0, 8 parameters on rank 1"),
    "frozen": ({"frozen": True}, r"0\.weight \(8, 8\) .* trainable, .* on rank 0, 0\.weight \(8, 8\) .* frozen, .* on rank 1"),
}


@on_ranks(2, differ=tuple(OTHER))
def test_models_that_differ_are_shown_as_each_rank_has_them(differ: str) -> None:
    how, said = OTHER[differ]
    model = net(**how) if place()[0] else net()
    with pytest.raises(zhooks.AttachError, match=f"expected the same model and policy on every rank, found {said}"):
        zhooks.attach(model, policy={"stage": 3, "units": {"min_numel": 0}})
    assert all(type(param) is nn.Parameter for param in model.parameters())


@on_ranks(2, sync=(True, False))
def test_what_one_rank_refuses_alone_is_an_error_on_every_rank(sync: bool) -> None:
    model = net(layers=1 + place()[0])
    # The first rank has no such module; with sync=False values are not compared before models.
    with pytest.raises(zhooks.AttachError, match=r"\[units\] needs 2 to match a module, found none"):
        zhooks.attach(model, policy={"stage": 3, "units": {"names": ["2"], "min_numel": 0}}, sync=sync)
    with pytest.raises(zhooks.AttachError, match="4 parameters on rank 0, 6 parameters on rank 1"):
        zhooks.attach(model, policy={"stage": 3, "units": {"min_numel": 0}}, sync=sync)
    assert all(type(param) is nn.Parameter for param in model.parameters())
