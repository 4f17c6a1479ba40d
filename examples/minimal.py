"""The smallest training loop with ZeRO: plain PyTorch plus one line.

    python examples/minimal.py
    torchrun --nproc-per-node 2 examples/minimal.py
"""

import os

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zhooks


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=100, type=click.IntRange(1), help="Training steps.")
def main(steps: int) -> None:
    """Learn the length of vectors; parameters, gradients and Adam's states are sharded over the ranks."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    zhooks.attach(model)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1 + rank)
    for step in range(steps):
        vectors = torch.randn(64, 64, generator=data)
        loss = F.mse_loss(model(vectors), vectors.norm(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 0 or (step + 1) % 10 == 0):
            print(f"step {step + 1}: loss {loss.item():.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
