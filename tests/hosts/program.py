"""What a rank does on its host: it trains until others are gone or late, and writes down what was raised and when."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks

#: The store of the process group, on the first host.
PORT = 29511
#: Of waits that nothing else bounds: longer than any test lasts.
LIMIT_S = 900.0


def train(
    rank: int,
    world: int,
    store: str,
    folder: Path,
    policy: dict[str, Any],
    recover: bool = False,
    replicas: int = 1,
) -> None:
    """Train until a DivergenceError, and again if the ranks ``recover`` from it; what is raised is in files, see ``run``.

    Args:
        store: the address of the host of rank 0, which has the store.
        replicas: parameters are sharded inside each of so many hosts, and replicated across them.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    with (folder / f"{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    limit = timedelta(seconds=LIMIT_S)
    kept = dist.TCPStore(store, PORT, world, is_master=rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=kept, rank=rank, world_size=world, timeout=limit)
    shape = (replicas, world // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if replicas > 1 else None
    run(folder, policy, recover, mesh)
    # A launcher's store outlives the ranks; this one is in the first of them.
    time.sleep(LIMIT_S)


def run(folder: Path, policy: dict[str, Any], recover: bool, mesh: Any = None) -> None:
    """Steps, each of which is a file ``RANK.step``; ``RANK.said`` has the seconds that a failed step took, and the error.

    ``RANK.recovered`` has the same of ``recover``.  Rank 0 begins no step while there is a file ``pause``.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])
    attachment = zhooks.attach(model, policy={"stage": 3, "units": {"min_numel": 0}, **policy}, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    began = time.monotonic()
    while True:
        try:
            while rank == 0 and (folder / "pause").exists():
                time.sleep(0.02)
                began = time.monotonic()
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            (folder / f"{rank}.step").touch()
            time.sleep(0.02)
            began = time.monotonic()
        except zhooks.DivergenceError as error:
            put(folder / f"{rank}.said", f"{time.monotonic() - began:.1f}\n{error}")
            if not recover:
                return
            (folder / f"{rank}.step").unlink()
            began = time.monotonic()
            try:
                said = str(attachment.recover())
            except zhooks.DivergenceError as failed:
                put(folder / f"{rank}.recovered", f"{time.monotonic() - began:.1f}\n{failed}")
                return
            put(folder / f"{rank}.recovered", f"{time.monotonic() - began:.1f}\n{said}")
            optimizer.zero_grad()
            recover = False
            began = time.monotonic()


def put(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.rename(path)


if __name__ == "__main__":
    # Under torchrun, whose agent on the first host keeps the store; a rank ends by its error.
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    run(Path(sys.argv[1]), {"comm": {"timeout_s": float(sys.argv[2])}}, recover=False)
    os._exit(1)
