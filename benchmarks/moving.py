"""What moving a living model to another mesh costs: time beside a save and a load through disk, and the most memory.

``python benchmarks/moving.py --ranks 2 --folder /scratch`` moves a model from shards to replicas and back, in turns with a save
and a load; ``--tier``, ``--hidden`` and ``--layers`` say what is moved.  It asserts nothing: a busy machine moves every figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks


def seconds(job: Callable[[], Any]) -> float:
    """The slowest rank's."""
    dist.barrier()
    begin = time.perf_counter()
    job()
    took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def resident(what: str) -> int:
    """VmRSS: bytes of this process in memory now; VmHWM: the most since ``forget_peak``."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(rank: int, given: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), given.ranks), rank=rank, world_size=given.ranks)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(given.hidden, given.hidden), nn.GELU()) for _ in range(given.layers)))
    policy: dict[str, Any] = {"stage": 3, "disk": {"path": str(folder)}, "units": {"min_numel": 0}}
    policy |= {cell: {"tier": given.tier} for cell in ("parameter", "gradient", "optimizer")}
    attachment = zhooks.attach(model, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(4, given.hidden)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()

    def move(replicas: int) -> None:
        attachment.reshard(meshes[replicas])

    meshes = {
        replicas: init_device_mesh("cpu", (replicas, given.ranks // replicas), mesh_dim_names=("replicate", "shard"))
        for replicas in (1, given.ranks)
    }
    step()
    whole = 3 * sum(param.numel() * param.element_size() for param in model.parameters())
    unit = whole // given.layers
    found: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        found.setdefault(what, []).append(value)

    for _ in range(given.rounds):
        for replicas, way in ((given.ranks, "to replicas"), (1, "to shards")):
            saved = seconds(lambda: attachment.save(folder / "run", optimizer))
            loaded = seconds(lambda: attachment.load(folder / "run", optimizer))
            forget_peak()
            before = resident("VmRSS")
            moved = seconds(partial(move, replicas))
            # Beside what is there before and after, whichever is more.
            most = resident("VmHWM") - max(before, resident("VmRSS"))
            note(f"{way}: seconds", moved)
            note(f"{way}: save and load, seconds", saved + loaded)
            note(f"{way}: by save and load", moved / (saved + loaded))
            note(f"{way}: most memory beside what is held before or after, units whole", most / unit)
            step()
    if rank == 0:
        print(
            f"values and states: {whole / 2**20:.0f} MiB whole, {unit / 2**20:.0f} MiB a unit, {given.tier} tier, "
            f"{given.ranks} ranks; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        )
        for what, values in found.items():
            print(f"{what:<75} {statistics.median(values):8.3f}   (of {len(values)}: {min(values):.3f} to {max(values):.3f})")
    attachment.detach()
    dist.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options.add_argument("--tier", choices=("device", "host", "disk"), default="device")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--hidden", type=int, default=1024)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as own:
        processes.spawn(measure, (given, Path(own)), nprocs=given.ranks)


if __name__ == "__main__":
    main()
