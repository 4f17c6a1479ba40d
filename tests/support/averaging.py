"""Averages gradients over ranks as the plain side of a comparison must: what one training step owes to data parallelism.

Tests that train a plain model beside an attached one, on the same ranks, call it between backward and step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module, world: int) -> None:
    """Average over the ranks: zeros where a rank has no gradient, none where no rank has one.

    Two messages for all parameters together: one for each would wait for the other rank a hundred times.
    """
    if world == 1:
        return
    params = list(model.parameters())
    users = torch.tensor([float(p.grad is not None) for p in params])
    dist.all_reduce(users)
    used = [p for p, count in zip(params, users.tolist(), strict=True) if count]
    if not used:
        return
    for p in used:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    total = torch.cat([p.grad.reshape(-1) for p in used])
    dist.all_reduce(total)
    for p, summed in zip(used, total.split([p.numel() for p in used]), strict=True):
        p.grad.copy_(summed.view(p.shape)).div_(world)
