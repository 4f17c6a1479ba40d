"""Replicas with torchft: when one is killed, the others keep training, and it copies their state when it returns.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000      # once, on a machine that all see
    TORCHFT_LIGHTHOUSE=http://localhost:29510 torchrun --nproc-per-node=2 --master-port=29600 examples/replicas.py
    TORCHFT_LIGHTHOUSE=http://localhost:29510 torchrun --nproc-per-node=2 --master-port=29601 examples/replicas.py --replica 1
"""

from datetime import timedelta

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchft import ProcessGroupGloo

import zhooks
from zhooks.integrations.torchft import Optimizer, Replicas

BATCH = 16  # of a rank


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=2000, type=click.IntRange(1), help="Committed training steps.")
@click.option("--replica", default=0, type=click.IntRange(0), help="Which replica this is.")
def main(steps: int, replica: int) -> None:
    """Learn the length of vectors; kill one replica (kill -9), start it again and look."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same in all replicas
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    attachment = zhooks.attach(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    timeout = timedelta(seconds=20)
    replicas = Replicas(
        attachment, adamw, ProcessGroupGloo(timeout=timeout), min_replica_size=1, timeout=timeout,
        replica_id=f"replica_{replica}_",
    )  # fmt: skip
    optimizer = Optimizer(replicas, adamw)
    while replicas.current_step() < steps:
        optimizer.zero_grad()  # who lives? one that returns is at their step after this
        step = replicas.current_step() + 1
        data = torch.Generator().manual_seed((step * 100 + replica) * world + rank)
        vectors = torch.randn(BATCH, 64, generator=data)
        loss = F.mse_loss(model(vectors), vectors.norm(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}: loss {loss.item():.4f}")
    replicas.shutdown()
    attachment.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
