"""What peers' memory costs: a save to it, and going on from it, beside one all-gather of the state.

``torchrun --nproc-per-node 2 benchmarks/resume.py`` prints medians and ratios; each rank stands for a host, with a folder on
/dev/shm of its own.  It asserts nothing: a busy machine moves every figure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zhooks
from zhooks.comm import GATHER, Call, even


def seconds(job: Callable[[], Any]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    job()
    found = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())


def attached(given: argparse.Namespace, memory: Path, copies: int) -> tuple[zhooks.Attachment, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(given.hidden, given.hidden), nn.GELU()) for _ in range(given.layers)))
    policy = {"stage": 3, "resilience": {"memory": str(memory), "job": "benchmark", "copies": copies}}
    attachment = zhooks.attach(model, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, given.hidden)).square().mean().backward()
    optimizer.step(), optimizer.zero_grad()
    return attachment, optimizer


def leave(attachment: zhooks.Attachment) -> None:
    """As ranks do that end by an error: what they kept stays."""
    try:
        raise RuntimeError("lost")
    except RuntimeError:
        attachment.detach()


def gathering(given: argparse.Namespace, attachment: zhooks.Attachment) -> Callable[[], None]:
    """Values and both states of every layer into memory that is there, by the transport of the run."""
    world, transport = dist.get_world_size(), attachment.session.comm.shard
    numel = given.hidden * (given.hidden + 1)
    layout = even(numel + -numel % world, world)
    shard = torch.ones(layout.shard_numel)
    full = [torch.ones(layout.padded) for _ in range(3 * given.layers)]

    def gather() -> None:
        for number, each in enumerate(full):
            transport.all_gather(Call(GATHER, "all-gather", f"{number}"), shard, each, layout).wait()

    return gather


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--hidden", type=int, default=2048)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    root = Path("/dev/shm") / f"zhooks-benchmark-{os.getppid()}"
    memory = root / f"host{rank}"
    found: dict[str, list[float]] = {}

    def take(what: str, job: Callable[..., Any], *arguments: Any) -> None:
        found.setdefault(what, []).append(seconds(partial(job, *arguments)))

    try:
        for _ in range(given.rounds):
            for copies in (0, 1):
                memory.mkdir(parents=True, exist_ok=True)
                attachment, optimizer = attached(given, memory, copies)
                attachment.save_to_peers(optimizer)
                if copies:
                    take("one all-gather of the state", gathering(given, attachment))
                take(f"save_to_peers, copies = {copies}", attachment.save_to_peers, optimizer)
                leave(attachment)
            for what in ("each rank beside its own file", "a host lost, from the copy on the other"):
                if "lost" in what and rank == 1:
                    shutil.rmtree(memory)
                    memory.mkdir()
                attachment, optimizer = attached(given, memory, 1)
                take(f"resume, {what}", attachment.resume, (), optimizer)
                if "lost" in what:
                    attachment.detach()
                else:
                    leave(attachment)
        if rank == 0:
            nbytes = 3 * given.layers * given.hidden * (given.hidden + 1) * 4
            print(f"state: {nbytes / 2**20:.0f} MiB over {dist.get_world_size()} ranks; {os.cpu_count()} cores, ", end="")
            print(f"load {os.getloadavg()[0]:.1f}")
            gather = statistics.median(found["one all-gather of the state"])
            for what, times in found.items():
                middle = statistics.median(times)
                spread = f"(of {len(times)}: {min(times):.3f} to {max(times):.3f})"
                print(f"{what:<60} {middle:7.3f} s  {middle / gather:6.2f} times {spread}")
    finally:
        dist.barrier()
        shutil.rmtree(root, ignore_errors=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
