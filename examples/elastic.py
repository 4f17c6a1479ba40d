"""A job that continues when ranks or hosts are lost or added, under torchrun's elastic agent.

    python examples/elastic.py
    torchrun --nnodes=1:4 --nproc-per-node=2 --max-restarts=10 --rdzv-backend=c10d --rdzv-id=job7 \
        --rdzv-endpoint=host0:29400 examples/elastic.py --folder /shared/runs
"""

import os

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zhooks

BATCH = 48  # of all ranks: the same vectors whatever their number is


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=100, type=click.IntRange(1), help="Training steps.")
@click.option("--every", default=5, type=click.IntRange(1), help="Steps between saves to peers' memory.")
@click.option("--folder", default="runs", help="Where every tenth of those saves is also written as a checkpoint.")
def main(steps: int, every: int, folder: str) -> None:
    """Learn the length of vectors; kill a rank (kill -9) and look."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if launched:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if launched else (0, 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    attachment = zhooks.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begun = (attachment.resume(folder, optimizer) or {"step": 0})["step"]
    for step in range(begun + 1, steps + 1):
        data = torch.Generator().manual_seed(step)
        vectors = torch.randn(BATCH, 64, generator=data)[rank::world]
        loss = F.mse_loss(model(vectors), vectors.norm(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if launched and step % every == 0:
            attachment.save_to_peers(optimizer, extra={"step": step})
        if step % (10 * every) == 0:
            attachment.save(f"{folder}/step-{step}", optimizer, extra={"step": step}, wait=False, keep=2)
        if rank == 0 and (step == begun + 1 or step % 10 == 0):
            print(f"step {step}: loss {loss.item():.4f}")
    attachment.detach()
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
