"""Where an example runs: its rank among how many, on which device, as torchrun or a plain start of Python has it.

The examples open `launched` around their training. It never picks a policy and never attaches anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Place:
    """This process's place among the others."""

    rank: int
    world: int
    device: torch.device

    def show(self, step: int, steps: int, loss: float) -> None:
        """Print some of the steps, on the first rank alone."""
        if self.rank == 0 and (step in (0, steps - 1) or (step + 1) % 10 == 0):
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)


@contextmanager
def launched() -> Iterator[Place]:
    """Join the other ranks, if torchrun has started any; on GPUs where there are some."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    many = "RANK" in os.environ
    if many:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Place(dist.get_rank() if many else 0, dist.get_world_size() if many else 1, device)
    finally:
        if many:
            dist.destroy_process_group()
