"""One driver, one shape, one precision, in the processes torchrun started: measures a trial and prints one JSON line.

`peers.py` starts it; by hand: `torchrun --standalone --nproc_per_node 2 benchmarks/worker.py --driver ddp`. It never
compares: a trial knows of no other driver.

Note: [Leaving a Gloo group]
    A rank that returns from main with its process group alive is aborted now and then by the C++ tear-down ("terminate
    called without an active exception", what a thread still joinable when it is destroyed gives): with torch 2.13 in 6
    of 10 runs of fsdp2 on two ranks. None of 36 runs (ddp, zero1, fsdp2) aborted in this order: drop model, optimizer
    and wrapper, which hold the group and its work handles (the caller's locals are gone, collecting frees those in
    cycles); barrier, so that no rank closes its connections under another's last collective; destroy, while Python is
    whole. The exit code then tells the truth, so none is forced.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import measure
import workload
from drivers import DRIVERS, Setting, Trial
from launch import RECORD_PREFIX, report_failure

WARMUP_STEPS = 3


def main(arguments: argparse.Namespace) -> None:
    """Run the trial and print its record on rank 0."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    driver = DRIVERS[arguments.driver]
    for module in driver.needs:
        importlib.import_module(module)
    if not driver.alone:
        dist.init_process_group("gloo")
    record = measure_trial(arguments, world)
    if int(os.environ.get("RANK", "0")) == 0:
        print(RECORD_PREFIX + json.dumps(record), flush=True)
    leave()


def measure_trial(arguments: argparse.Namespace, world: int) -> dict[str, Any]:
    """Build, warm up, time, then count one more step; the record is the same on every rank."""
    rank = int(os.environ.get("RANK", "0"))
    shape = workload.SHAPES[arguments.config]
    batches = workload.rank_batches(shape, rank=rank, world=world, of=arguments.global_ranks)
    restarted = measure.restart_peak()
    base_nbytes = measure.rss_nbytes()
    model = workload.build(shape)
    psi = sum(parameter.numel() for parameter in model.parameters())
    trial = DRIVERS[arguments.driver].build(model, Setting(shape, arguments.dtype, world))
    build_peak_nbytes = measure.peak_rss_nbytes() - base_nbytes
    measure.restart_peak()
    losses, steps = run_steps(trial, batches, WARMUP_STEPS, arguments.steps)
    peak_nbytes = measure.peak_rss_nbytes() - base_nbytes
    build_peak, peak = measure.max_over_ranks([build_peak_nbytes, peak_nbytes])
    slowest = measure.slowest_rank(steps)
    return {
        "driver": arguments.driver,
        "config": arguments.config,
        "dtype": arguments.dtype,
        "world": world,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "psi_numel": psi,
        "median_s": asdict(measure.median_step(slowest)),
        "step_s": [step.total_s for step in slowest],
        "rss_growth_nbytes": peak,
        "rss_build_growth_nbytes": build_peak,
        "rss_peak_restarted": restarted,
        **count_step(trial, batches, WARMUP_STEPS + arguments.steps, world),
        "losses": [round(loss, 6) for loss in measure.mean_over_ranks(losses).tolist()],
        "load_average": os.getloadavg()[0],
    }


def run_steps(
    trial: Trial, batches: list[tuple[Tensor, Tensor]], warmup: int, timed: int
) -> tuple[Tensor, list[measure.StepTimes]]:
    """Losses of all `warmup + timed` steps, fp32 1-D, and this rank's times of the timed ones."""
    losses, steps = [], []
    for index in range(warmup + timed):
        if index == warmup and dist.is_initialized():
            dist.barrier()
        loss, times = one_step(trial, batches, index)
        losses.append(loss)
        if index >= warmup:
            steps.append(times)
    return torch.stack(losses), steps


def count_step(trial: Trial, batches: list[tuple[Tensor, Tensor]], index: int, world: int) -> dict[str, Any]:
    """One more step, untimed: what it handed to collectives, what zhooks said it moved, and the loopback meanwhile."""
    if not dist.is_initialized():
        return {"wire_nbytes": 0.0, "wire_numel": 0.0, "wire_operators": {}}
    heard = measure.EventBytes(world)
    watch = trial.attachment.observe(heard) if trial.attachment is not None else None
    dist.barrier()
    before = measure.loopback_nbytes()
    with measure.WireCounter(world) as counter:
        one_step(trial, batches, index)
    dist.barrier()
    loopback_nbytes = measure.loopback_nbytes() - before
    nbytes, numel = measure.max_over_ranks([counter.report.nbytes, counter.report.numel])
    found = {
        "wire_nbytes": nbytes,
        "wire_numel": numel,
        "wire_operators": {name: asdict(traffic) for name, traffic in counter.report.by_operator.items()},
        "loopback_nbytes": loopback_nbytes,
    }
    if watch is not None:
        watch.close()
        found["event_wire_nbytes"] = heard.wire_nbytes()
        found["event_nbytes"] = heard.nbytes_by_verb()
    return found


def one_step(trial: Trial, batches: list[tuple[Tensor, Tensor]], index: int) -> tuple[Tensor, measure.StepTimes]:
    """Step number `index` on its batch."""
    tokens, targets = batches[index % len(batches)]
    return measure.timed_step(lambda: trial.forward(tokens, targets), trial.backward, trial.update)


def leave() -> None:
    """End without torch's Gloo tear-down aborting: see Note [Leaving a Gloo group]."""
    if dist.is_initialized():
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure one driver on the benchmark's workload.")
    parser.add_argument("--driver", required=True, choices=list(DRIVERS))
    parser.add_argument("--config", default="tiny", choices=list(workload.SHAPES))
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=8, help=f"timed steps, after {WARMUP_STEPS} to warm up")
    parser.add_argument("--global-ranks", type=int, default=2, help="ranks whose batches make the global batch")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse())
    except Exception as error:
        report_failure(error)
        sys.exit(1)
