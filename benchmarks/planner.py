"""The planner's choice beside a measured sweep: 24 policies of one small model trained here, and `zhooks.find_policy`.

    zprof bench --profile here.toml
    python benchmarks/planner.py --hardware here.toml [--ranks 2] [--rounds 3] [--json out.json]
    python benchmarks/planner.py --seven                      # how long the planner takes for 7B on 8 devices

A person runs it, on a machine that does nothing else. Each policy trains on Gloo ranks of one thread each, policies in turn;
its time is the least of the rounds' medians on the slowest rank. The choice comes from a process of its own that knows the
profile of this machine and nothing of the sweep. The target is a choice within 5 % of the best that was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import zhooks
from launch import HERE, RECORD_PREFIX, child_environment, read, report_failure, torchrun
from offload.policy import Policy
from offload.tier import Tier
from zhooks.simulate.axes import Candidate, candidates

POLICIES, TARGET = 24, 1.05
WARMUP, STEPS = 2, 5
TIMEOUT_S = 1800
SMALL = {"width": 256, "layers": 4, "heads": 4, "vocabulary": 2048, "batch": 4, "length": 128}
SEVEN = {"width": 4096, "layers": 32, "heads": 32, "vocabulary": 50304, "batch": 8, "length": 1024}


class Block(nn.Module):
    """One layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # Heads outside, so that a rank of tp has whole ones.
        parts = self.qkv(self.norms[0](x)).view(batch, length, -1, 3, width // self.heads).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class GPT(nn.Module):
    """Tokens to logits."""

    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size["vocabulary"], size["width"])
        self.blocks = nn.ModuleList(Block(size["width"], size["heads"]) for _ in range(size["layers"]))
        self.head = nn.Linear(size["width"], size["vocabulary"], bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Job:
    """What is planned and what is measured: the same model and step."""

    def __init__(self, size: dict[str, int], device: str) -> None:
        self.size, self.device = size, device

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = GPT(self.size)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tokens = torch.zeros(self.size["batch"], self.size["length"], dtype=torch.long, device=self.device)
        logits = model(tokens)
        F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), tokens.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()


class LargeJob(Job):
    """One whose model is divided over a mesh that has a tp axis, and whose batch may be divided."""

    def build(self, mesh: DeviceMesh | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = super().build()
        if mesh is not None:
            for block in model.get_submodule("blocks").children():
                columns: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("qkv", "up")}
                parallelize_module(block, mesh["tp"], columns | {name: RowwiseParallel() for name in ("out", "down")})
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return model, optimizer

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, micro_batch: int = SEVEN["batch"], accumulation: int = 1
    ) -> None:
        for _ in range(accumulation):
            tokens = torch.zeros(micro_batch, self.size["length"], dtype=torch.long, device=self.device)
            logits = model(tokens)
            F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), tokens.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def swept(ranks: int, count: int) -> list[Candidate]:
    """The policies that are measured: of a CPU, whose host tier is its device's memory."""
    return list(candidates(Policy(), ranks, tiers=(Tier.DEVICE, Tier.DISK), host_updates=False))[:count]


def measure(rounds: int, count: int) -> None:
    """On every rank that torchrun started: seconds a step of each policy, the slowest rank's."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    job, found = Job(SMALL, "cpu"), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for candidate in swept(world, count):
                seconds = torch.tensor(trained(job, candidate, folder))
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                found[str(candidate)] = min(found.get(str(candidate), float("inf")), seconds.item())
        dist.barrier()
    if rank == 0:
        sys.stdout.write(RECORD_PREFIX + json.dumps(found) + "\n")
    dist.destroy_process_group()


def trained(job: Job, candidate: Candidate, folder: str) -> float:
    """The median of a few steps under one policy."""
    torch.manual_seed(0)
    model, optimizer = job.build()
    values = candidate.policy(Policy()).values()
    attachment = zhooks.attach(model, optimizer, policy={**values, "disk": {**values["disk"], "path": folder}})
    taken = []
    for number in range(WARMUP + STEPS):
        dist.barrier()
        begin = time.perf_counter()
        job.step(model, optimizer)
        if number >= WARMUP:
            taken.append(time.perf_counter() - begin)
    attachment.detach()
    return statistics.median(taken)


def choose(ranks: int, hardware: str) -> None:
    """In a process of its own: what the planner makes of the profile."""
    job = Job(SMALL, "virtual")
    begin = time.perf_counter()
    found = zhooks.find_policy(job.build, job.step, world=ranks, hardware=hardware)
    record = {
        "seconds": time.perf_counter() - begin,
        "simulations": found.ranking.simulations,
        "best": {str(each.candidate): each.simulation.step_s for each in found.best},
    }
    sys.stdout.write(RECORD_PREFIX + json.dumps(record) + "\n")


def alone(*given: str) -> dict[str, Any]:
    """This script in a process of its own: torch learns of the virtual device for the rest of one."""
    done = subprocess.run(
        [sys.executable, str(HERE / "planner.py"), *given],
        capture_output=True, text=True, env=child_environment(), timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    outcome = read(done.stdout + done.stderr, done.returncode)
    if outcome.record is None:
        raise SystemExit(f"planner: {outcome.error}")
    return outcome.record


def seven() -> None:
    """The planner for 6.9 billion parameters on 8 H100: tp, precision and micro-batches, too."""
    job, begin = LargeJob(SEVEN, "virtual"), time.perf_counter()
    found = zhooks.find_policy(job.build, job.step, world=8, hardware="h100", precision=["bf16", "fp16", "fp32"])
    taken = f"{time.perf_counter() - begin:.1f} s, {time.process_time():.1f} s of one core"
    sys.stdout.write(f"{found}\n{taken}, for {found.ranking.simulations} simulations\n")


def main() -> int:
    chosen = arguments()
    if chosen.seven:
        seven()
        return 0
    if chosen.part is not None:
        (measure(chosen.rounds, chosen.policies) if chosen.part == "measure" else choose(chosen.ranks, chosen.hardware))
        return 0
    given = ["--part", "measure", "--rounds", str(chosen.rounds), "--policies", str(chosen.policies)]
    swept_here = torchrun("planner.py", given, processes=chosen.ranks, timeout_s=TIMEOUT_S)
    if swept_here.record is None:
        raise SystemExit(f"planner: {swept_here.error}")
    planned = alone("--part", "choose", "--ranks", str(chosen.ranks), "--hardware", str(chosen.hardware))
    measured, best = swept_here.record, min(swept_here.record.values())
    first = next(iter(planned["best"]))
    for name, seconds in sorted(measured.items(), key=lambda each: each[1]):
        predicted = f"{planned['best'][name] * 1e3:9.1f}" if name in planned["best"] else f"{'-':>9}"
        sys.stdout.write(f"{seconds * 1e3:9.1f} ms {predicted} {'<- ' if name == first else '   '}{name}\n")
    ratio = measured[first] / best if first in measured else float("nan")
    said = "within" if ratio <= TARGET else "NOT within"
    sys.stdout.write(
        f"choice: {first}, {ratio:.3f} x the best measured of {len(measured)}: {said} {TARGET - 1:.0%}; "
        f"planned in {planned['seconds']:.1f} s\n"
    )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"measured": measured, "planned": planned, "ratio": ratio}, indent=1))
    return 0 if ratio <= TARGET else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="here.toml", help="a profile of this machine")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", type=int, default=POLICIES, help="of the sweep")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seven", action="store_true", help="time the planner for 7B on 8 devices")
    parser.add_argument("--part", choices=("measure", "choose"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        report_failure(error)
        raise
