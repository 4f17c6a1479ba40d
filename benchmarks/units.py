"""What wrapping costs a unit: 100 layers of Linear(16, 16), so small that only overhead is left to time.

A person runs it: `python benchmarks/units.py`; with `--mode` it is its own worker under torchrun. It never times the
peers' collectives as such: at world size 1 nothing is sent, at 2 every unit pays for its messages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import measure
from launch import RECORD_PREFIX, Outcome, report_failure, torchrun
from worker import leave

UNITS = 100
WIDTH = 16
WARMUP_STEPS = 10
WORLDS = (1, 2)
MODES = ("plain", "ddp", "fsdp2", "zhooks", "zhooks-coalesced")
Outcomes = dict[tuple[str, int], list[Outcome]]


def wrap(mode: str, model: nn.Sequential) -> nn.Module:
    """The model under `mode`, every layer a unit of its own, except where zhooks coalesces small neighbours."""
    if mode == "plain":
        return model
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if mode == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in [*model, model]:
            fully_shard(module, mesh=mesh)
        return model
    from zhooks import attach

    attach(model, policy={"units": {"min_numel": 0}} if mode == "zhooks" else None)
    return model


def work(mode: str, steps: int) -> None:
    """Time one mode in this process and print its record: medians of the slowest rank, microseconds a unit."""
    # plain has no collective of its own, but meets the others' barrier, so that both ranks keep step.
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrap(mode, nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = torch.randn(4, WIDTH)

    def forward() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(samples).square().mean()
        return loss

    times = []
    for _ in range(WARMUP_STEPS + steps):
        dist.barrier()
        _, step = measure.timed_step(forward, torch.Tensor.backward, optimizer.step)
        times.append(step)
    median = measure.median_step(measure.slowest_rank(times[WARMUP_STEPS:]))
    if dist.get_rank() == 0:
        micros = {key: seconds / UNITS * 1e6 for key, seconds in asdict(median).items()}
        print(RECORD_PREFIX + json.dumps({"mode": mode, "world": dist.get_world_size(), "us": micros}), flush=True)
    leave()


def compare(rounds: int, steps: int, console: Console) -> Outcomes:
    """Every mode at every world size in every round, interleaved, the order turned by one place a round."""
    found: Outcomes = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=rounds * len(WORLDS) * len(MODES))
        for round_ in range(rounds):
            first = round_ % len(MODES)
            for world in WORLDS:
                for mode in MODES[first:] + MODES[:first]:
                    progress.update(task, description=f"round {round_ + 1}, world {world}: {mode}")
                    arguments = [f"--mode={mode}", f"--steps={steps}"]
                    outcome = torchrun("units.py", arguments, processes=world, timeout_s=300.0)
                    found.setdefault((mode, world), []).append(outcome)
                    progress.advance(task)
    return found


def median_us(outcomes: list[Outcome]) -> dict[str, float] | None:
    """Medians over the rounds that have a record, microseconds a unit."""
    records = [outcome.record["us"] for outcome in outcomes if outcome.record is not None]
    return {key: statistics.median(record[key] for record in records) for key in records[0]} if records else None


def table(found: Outcomes) -> Table:
    """One row a mode and world size; overhead is forward + backward above plain's at the same world size."""
    out = Table(title=f"{UNITS} x Linear({WIDTH}, {WIDTH}), microseconds a unit", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("mode", "world", "forward", "backward", "optimizer", "total", "overhead fwd+bwd"):
        out.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=heading == "mode")
    for world in WORLDS:
        for mode in MODES:
            us = median_us(found[mode, world])
            if us is None:
                out.add_row(mode, str(world), "failed")
                continue
            extra = overhead_us(found, mode, world)
            cells = [f"{us[key]:.1f}" for key in ("forward_s", "backward_s", "update_s", "total_s")]
            out.add_row(mode, str(world), *cells, "" if extra is None else f"{extra:.1f}")
    return out


def forward_backward_us(found: Outcomes, mode: str, world: int) -> float | None:
    """Forward plus backward of a mode, None when no round has a record."""
    us = median_us(found[mode, world])
    return None if us is None else us["forward_s"] + us["backward_s"]


def overhead_us(found: Outcomes, mode: str, world: int) -> float | None:
    """What a mode adds to plain's forward plus backward at the same world size."""
    mine, plain = forward_backward_us(found, mode, world), forward_backward_us(found, "plain", world)
    return None if mine is None or plain is None else mine - plain


def targets(found: Outcomes) -> list[str]:
    """The two targets, a line each, or that they could not be measured."""
    lines = []
    ours, peer = overhead_us(found, "zhooks", 1), overhead_us(found, "fsdp2", 1)
    lines.append(_line("overhead a unit at world 1, coalescing off", ours, peer, "fsdp2", 0.25))
    mine, plain = forward_backward_us(found, "zhooks-coalesced", 1), forward_backward_us(found, "plain", 1)
    lines.append(_line("forward + backward at world 1, default coalescing", mine, plain, "plain", 1.5))
    return lines


def _line(what: str, value: float | None, base: float | None, against: str, at_most: float) -> str:
    if value is None or base is None:
        return f"{what}: not measured"
    verdict = "reached" if value / base <= at_most else "missed"
    return f"{what}: {value / base:.2f} x {against} (at most {at_most:.2f}): {verdict}"


def report(arguments: argparse.Namespace) -> None:
    """Run the comparison, print it, and write it where asked."""
    console = Console()
    found = compare(arguments.rounds, arguments.steps, console)
    console.print(table(found))
    for line in targets(found):
        console.print(line, highlight=False)
    for (mode, world), outcomes in found.items():
        for outcome in outcomes:
            if outcome.error is not None:
                line = f"{mode}, world {world}: {outcome.error}"
                console.print(line, style="red", markup=False, soft_wrap=True)
    if arguments.json is not None:
        runs: list[dict[str, Any]] = [
            {"mode": mode, "world": world, "rounds": [asdict(outcome) for outcome in outcomes]}
            for (mode, world), outcomes in found.items()
        ]
        document = {"units": UNITS, "runs": runs, "targets": targets(found)}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the overhead of one unit under every wrapper.")
    parser.add_argument("--mode", choices=MODES, help="be the worker of this mode (under torchrun)")
    parser.add_argument("--rounds", type=int, default=3, help="times every mode is run")
    parser.add_argument("--steps", type=int, default=25, help="timed steps of a run")
    parser.add_argument("--json", type=Path, help="file to write every run to")
    return parser.parse_args()


def main() -> None:
    """The command, or its worker: `--mode` under torchrun."""
    arguments = parse()
    if arguments.mode is None:
        report(arguments)
        return
    if "RANK" not in os.environ:
        sys.exit("units.py: --mode is for a worker under torchrun; leave it out to run the comparison.")
    try:
        work(arguments.mode, arguments.steps)
    except Exception as error:
        report_failure(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
