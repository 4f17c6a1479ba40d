"""What partitioned activations cost: ranks train the same divided GPT with and without, in alternating rounds.

    python benchmarks/partition.py [--ranks 2] [--shape small] [--batch 4] [--length 256] [--rounds 5] [--json out.json]

The blocks are divided by `parallelize_module` as in Megatron-LM (arXiv:1909.08053): each rank has its heads and its part of the
widened layer, two all-reduces a block in forward and two in backward, over Gloo. Every choice recomputes its blocks. A round
runs each for a few steps, in an order that turns by one place; ratios are to `whole` of the same round. It never compares two
runs.

    whole        [activation] checkpoint = "unit": every rank keeps all of each block's input
    tp           the same and partition = "tp"
    tp-late      the same with [schedule] prefetch = 0: gathered when asked for
    whole-host   checkpoint = "unit", tier = "host"
    tp-host      the same and partition = "tp"

`step ms` is the step on its slowest rank. `kept MB` is what the runtime's ranges and the stash hold of unit inputs between
forward and backward on one rank, for `whole` by arithmetic; `moved MB` what its gathers bring to one rank in a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zhooks
from launch import RECORD_PREFIX, report_failure, torchrun
from measure import max_over_ranks
from offload.events import Recorder
from workload import SHAPES, Block, Shape, build

MB = 1e6
WARMUP = 2
PLAIN = {"stage": 0, "units": {"classes": ["Half"]}}
CHOICES: dict[str, dict[str, Any]] = {
    "whole": {"activation": {"checkpoint": "unit"}},
    "tp": {"activation": {"checkpoint": "unit", "partition": "tp"}},
    "tp-late": {"activation": {"checkpoint": "unit", "partition": "tp"}, "schedule": {"prefetch": 0}},
    "whole-host": {"activation": {"checkpoint": "unit", "tier": "host"}},
    "tp-host": {"activation": {"checkpoint": "unit", "partition": "tp", "tier": "host"}},
}


class Half(nn.Module):
    """A block of `workload.py` whose layers `parallelize_module` divides: this rank's heads, columns and rows.

    What q, k and v are made of is each rank's third of its own columns: another order of the same weights.
    """

    def __init__(self, block: Block, world: int) -> None:
        super().__init__()
        self.heads, self.ln1, self.ln2 = block.heads // world, block.ln1, block.ln2
        self.qkv, self.proj, self.fc, self.out = block.qkv, block.proj, block.fc, block.out

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part.reshape(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))
        return out


DIVIDED = {"qkv": ColwiseParallel(), "proj": RowwiseParallel(), "fc": ColwiseParallel(), "out": RowwiseParallel()}


@dataclass(slots=True)
class Runner:
    """One choice and its model."""

    name: str
    model: nn.Module
    attachment: Any
    optimizer: torch.optim.Optimizer
    losses: list[float]
    kept_nbytes: int = 0
    moved_nbytes: int = 0

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        return time.perf_counter() - begin

    def measure_memory(self, batch: tuple[Tensor, Tensor]) -> None:
        saved, recorder = self.attachment.session.runtime.saved, Recorder()
        with self.attachment.observe(recorder):
            loss = self.model(*batch)
            self.kept_nbytes = saved.partition.nbytes if saved.partition is not None else 0
            self.kept_nbytes += saved.stash.flush() if saved.stash is not None else 0
            loss.backward()
        self.optimizer.zero_grad()
        ended = [e.nbytes for e in recorder.events if (e.kind, e.what) == ("end", "gather activation")]
        self.moved_nbytes = sum(ended)


def make(name: str, shape: Shape) -> Runner:
    world = dist.get_world_size()
    model = build(shape)
    blocks: Any = model.blocks
    model.blocks = nn.ModuleList(Half(block, world) for block in blocks)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], DIVIDED)
    attachment = zhooks.attach(model, policy={**PLAIN, **CHOICES[name]}, mesh=mesh)
    return Runner(name, model, attachment, torch.optim.SGD(model.parameters(), lr=1e-3), [])


def work(shape: Shape, rounds: int, steps: int) -> None:
    """Measure every choice in this process, one of the ranks, and print the record."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1), generator=generator)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    runners = [make(name, shape) for name in CHOICES]
    for runner in runners:
        for _ in range(WARMUP):
            runner.step(batch)
        runner.measure_memory(batch)
    seconds: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for turn in range(rounds):
        start = turn % len(runners)
        for runner in runners[start:] + runners[:start]:
            runner.step(batch)
            timed = max_over_ranks([runner.step(batch) for _ in range(steps)])
            seconds[runner.name].append(statistics.median(timed))
    assert all(runner.losses == runners[0].losses for runner in runners), "a choice computes something else"
    whole = shape.layers * shape.batch * shape.length * shape.dim * 4
    found = {
        runner.name: {
            "seconds": seconds[runner.name],
            "kept": whole if runner.name == "whole" else runner.kept_nbytes,
            "moved": runner.moved_nbytes,
        }
        for runner in runners
    }
    if dist.get_rank() == 0:
        print(RECORD_PREFIX + json.dumps(found), flush=True)
    for runner in runners:
        runner.attachment.detach()
    dist.barrier()
    dist.destroy_process_group()


def report(found: dict[str, Any]) -> None:
    columns = ("step ms", "x whole", "range", "kept MB", "moved MB")
    print(f"{'':12}" + "".join(f"{column:>{14 if column == 'range' else 10}}" for column in columns))
    for name, row in found.items():
        base = found["whole-host" if name == "tp-host" else "whole"]["seconds"]
        ratios = sorted(one / other for one, other in zip(row["seconds"], base, strict=True))
        print(
            f"{name:12}{1e3 * statistics.median(row['seconds']):10.1f}{statistics.median(ratios):10.3f}"
            f"{f'{ratios[0]:.3f}-{ratios[-1]:.3f}':>14}{row['kept'] / MB:10.2f}{row['moved'] / MB:10.2f}"
        )
    print("tp-host is compared with whole-host; the target for tp is at most 1.10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        try:
            shape = replace(SHAPES[chosen.shape], batch=chosen.batch, length=chosen.length)
            work(shape, chosen.rounds, chosen.steps)
        except Exception as error:
            report_failure(error)
            raise
        return
    given = [f"--{key}={getattr(chosen, key)}" for key in ("shape", "batch", "length", "rounds", "steps")]
    outcome = torchrun("partition.py", ["--worker", *given], processes=chosen.ranks, timeout_s=1800.0)
    if outcome.record is None:
        raise SystemExit(outcome.error)
    report(outcome.record)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(chosen).items()}, "found": outcome.record}))


if __name__ == "__main__":
    main()
