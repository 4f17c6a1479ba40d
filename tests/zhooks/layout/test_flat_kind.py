"""What dtypes and tiers of a flat buffer mean for it, and which of them a policy chooses: without a process.

pytest runs it. What is done with the answers is asked where they are used.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offload.policy import Policy
from offload.tier import Tier, Tiers
from zhooks.layout import Kind, kind_of

FP32, BF16 = torch.float32, torch.bfloat16
NEAR = Tiers(Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)


def kind(master: torch.dtype, compute: torch.dtype, reduce: torch.dtype, tiers: Tiers = NEAR) -> Kind:
    return Kind(master, compute, reduce, torch.device("cpu"), True, tiers)


def test_a_buffer_is_counted_in_its_widest_dtype_and_aligned_to_its_narrowest() -> None:
    for dtypes in ((FP32, BF16, BF16), (BF16, FP32, BF16), (BF16, BF16, FP32)):
        assert (kind(*dtypes).wide, kind(*dtypes).narrow) == (4, 2)


@pytest.mark.parametrize("tier", list(Tier))
def test_gradients_are_reduced_in_place_on_the_device_in_the_dtype_they_are_kept_in(tier: Tier) -> None:
    tiers = Tiers(Tier.DEVICE, tier, Tier.DEVICE)
    assert kind(FP32, BF16, FP32, tiers).reduces_in_place is (tier is Tier.DEVICE)
    assert not kind(FP32, BF16, BF16, tiers).reduces_in_place


@pytest.mark.parametrize("tier", list(Tier))
def test_masters_are_apart_where_they_differ_from_what_is_computed_with_and_rest_off_the_device(tier: Tier) -> None:
    for tiers in (Tiers(tier, Tier.DEVICE, Tier.DEVICE), Tiers(Tier.DEVICE, Tier.DEVICE, tier)):
        assert kind(FP32, BF16, FP32, tiers).apart is (tier is not Tier.DEVICE)
        assert not kind(FP32, FP32, FP32, tiers).apart
    assert not kind(FP32, BF16, FP32, Tiers(Tier.DEVICE, tier, Tier.DEVICE)).apart


def held(values: torch.Tensor, policy: dict[str, Any], *, trainable: bool = True, wide: bool = False) -> Kind:
    param = nn.Parameter(values, requires_grad=trainable)
    return kind_of(("weight", "head.weight"), param, Policy.of(policy), torch.device("cpu"), wide=wide)


def test_a_policy_says_what_is_computed_with_and_what_is_reduced() -> None:
    values, policy = torch.zeros(2), {"precision": {"param": "bf16", "reduce": "fp16"}}
    assert held(values, policy) == kind(FP32, BF16, torch.float16)
    assert held(values, policy, wide=True) == kind(FP32, FP32, torch.float16), "in its own dtype"
    assert held(values.bfloat16(), {}) == kind(BF16, BF16, BF16)
    assert held(values, {"rule": [{"match": "head.*", "precision.param": "bf16"}]}).compute is BF16, "by any of its names"


def test_whole_numbers_stay_whole_and_what_is_frozen_has_masters_where_its_values_are() -> None:
    policy = {"precision": {"param": "bf16", "reduce": "fp32"}, "optimizer": {"tier": "host"}}
    whole = held(torch.zeros(2, dtype=torch.int64), policy, trainable=False)
    assert (whole.master, whole.compute, whole.reduce, whole.trainable) == (torch.int64, torch.int64, torch.int64, False)
    assert whole.tiers == NEAR
    assert held(torch.zeros(2), policy).tiers == Tiers(Tier.DEVICE, Tier.DEVICE, Tier.HOST)
    assert held(torch.zeros(2), policy, trainable=False).tiers == NEAR


@pytest.mark.parametrize(("resident", "numel", "bytes_of"), [(False, 12, (4, 4, 0)), (True, 24, (2, 4, 4))])
def test_masters_of_a_copy_that_stays_in_another_dtype_are_kept_beside_it(
    resident: bool, numel: int, bytes_of: tuple[int, int, int]
) -> None:
    cells = kind(FP32, BF16, FP32).footprint(24, 12, resident=resident)
    assert [(cell.numel, cell.itemsize) for cell in cells] == list(zip((numel, 12, 12), bytes_of, strict=True))
