"""Jobs for ``zprof simulate``: a step of a GPT on hardware you don't have, with any number of ranks.

    zprof simulate examples/simulate_gpt.py:small --hardware h100 --nodes 2 -o plan.zprof
    zprof simulate examples/simulate_gpt.py:billions --hardware h100 --nodes 128 --mesh replicate=16,shard=64
    zprof report plan.zprof

A job is a function that returns two functions: ``build`` creates the model and its optimizer, whose parameters have shapes
but no memory; ``step`` is a training step on inputs that have only shapes, and reads no values (no ``loss.item()``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from gpt import GPT, GPTConfig

Build = Callable[[], tuple[GPT, torch.optim.Optimizer]]
Job = tuple[Build, Callable[..., None]]


def small() -> Job:
    """15 million parameters: quick to try."""
    return job(GPTConfig(layers=8, dim=384, heads=6, context=512), micro_batch=8)


def billions() -> Job:
    """6.86 billion parameters, a vocabulary and sequences of the usual size."""
    return job(GPTConfig(layers=32, dim=4096, heads=32, context=2048, vocabulary=50_304), micro_batch=2)


def job(config: GPTConfig, micro_batch: int) -> Job:
    """The two functions for a GPT of that size."""

    def build() -> tuple[GPT, torch.optim.Optimizer]:
        model = GPT(config)
        return model, torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(model: GPT, optimizer: torch.optim.Optimizer, *, micro_batch: int = micro_batch, accumulation: int = 1) -> None:
        for _ in range(accumulation):
            tokens = torch.empty(micro_batch, config.context + 1, dtype=torch.int64, device="virtual")
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return build, step
