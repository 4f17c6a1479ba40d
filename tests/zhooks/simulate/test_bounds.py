"""What a step takes at least: never more than a simulation may find, whatever was seen of other dtypes."""

from __future__ import annotations

import torch
from torch import nn

from offload.hardware import Hardware
from offload.policy import Policy
from zhooks.layout import Ignored
from zhooks.simulate.axes import Batch, Candidate
from zhooks.simulate.bounds import Bounds, Needs
from zhooks.tensor import ShardedTensor


def test_another_dtype_may_be_quicker_by_all_that_the_hardware_says() -> None:
    model = nn.Linear(64, 64)
    optimizer, left = torch.optim.AdamW(model.parameters()), Ignored.of(model, (), ShardedTensor)
    needs = Needs(model, optimizer, Policy(), 2, left, torch.device("cpu"))
    hardware = Hardware.of("h100")
    bounds = Bounds(needs, hardware)
    one, other = Batch(8, 1), Batch(4, 2)
    peak = hardware.peak
    assert peak.bf16 and peak.fp32 and peak.tf32
    bounds.observe(Candidate(1, dtype="fp32", batch=one), 100.0, 0)
    # fp32 products are not computed in TF32 unless torch is told to.
    assert 0 < bounds.of(Candidate(1, dtype="bf16", batch=other)).seconds <= 100.01 * peak.fp32 / peak.bf16
    assert bounds.of(Candidate(1, dtype="fp32", batch=other)).seconds >= 100.0
    bounds.observe(Candidate(1, dtype="bf16", batch=one), 100.0, 0)
    assert bounds.of(Candidate(1, dtype="fp32", batch=other)).seconds >= 100.0 * min(1.0, peak.bf16 / peak.tf32)
