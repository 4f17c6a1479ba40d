"""What dtypes and tiers of a flat buffer mean for it: arithmetic, without a process or a tensor.

pytest runs it. What is done with the answers is asked where they are used.
"""

from __future__ import annotations

import pytest
import torch

from offload.tier import Tier, Tiers
from zhooks.layout.flat_kind import Kind

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
