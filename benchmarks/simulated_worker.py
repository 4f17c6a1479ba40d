"""One model under several policies: measured on the ranks torchrun started, or simulated in this process.

`simulated.py` starts it and compares. It never compares itself: a process knows either what was measured or what was predicted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zhooks
from launch import RECORD_PREFIX, report_failure
from simulated_models import MODELS
from zprof.analysis.ledger import Ledger
from zprof.recording.recorder import Recorder
from zprof.trace.reader import Trace

WARMUP = 3
#: Two paragraphs of a policy: what it is called, and what it says.
POLICIES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "stage 3, prefetch 0": {"stage": 3, "schedule": {"prefetch": 0}},
    "recomputed": {"stage": 3, "activation": {"checkpoint": "unit"}},
    "optimizer on host": {"stage": 3, "optimizer": {"tier": "host"}},
    "optimizer on disk": {"stage": 3, "optimizer": {"tier": "disk"}},
    "all on host": {"stage": 3, **{cell: {"tier": "host"} for cell in ("parameter", "gradient", "optimizer")}},
    "all on disk": {"stage": 3, **{cell: {"tier": "disk"} for cell in ("parameter", "gradient", "optimizer")}},
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as torch has it."""
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)


class Trial:
    """A model attached under one policy, on this rank."""

    def __init__(self, name: str, policy: dict[str, Any], folder: str) -> None:
        torch.manual_seed(0)
        self._model = MODELS[name]
        model = self._model.make()
        self.batch = self._model.batch()
        self.attachment = zhooks.attach(model, policy={**policy, "disk": {"path": folder}})
        self.model, self.optimizer = model, optimizer_of(model)

    def step(self) -> None:
        self._model.loss(self.model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def round(self, steps: int) -> float:
        """The median of some steps' seconds, each as long as on its slowest rank."""
        seconds = []
        for _ in range(steps):
            dist.barrier()
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        median: float = statistics.median(slowest.tolist())
        return median

    def peak(self, folder: str) -> int:
        """Bytes that this rank's storages on the device hold at most in a step, the most of any rank."""
        gc.collect()
        path = Path(folder) / f"{dist.get_rank()}.zprof"
        with Recorder(path, level="alloc", force=True).listen():
            # Buffers on pages of their own are known once they were used: the second step has all.
            for _ in range(2):
                self.step()
        nbytes = torch.tensor([Ledger.of(Trace.open(path)).peak("device").nbytes])
        dist.all_reduce(nbytes, op=dist.ReduceOp.MAX)
        return int(nbytes.item())


def measured(name: str, policies: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Seconds and bytes by policy; of the rounds, in which policies take turns, the least."""
    found: dict[str, dict[str, Any]] = {policy: {"rounds": []} for policy in policies}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(max(rounds, 1)):
            for policy in policies:
                trial = Trial(name, POLICIES[policy], folder)
                for _ in range(WARMUP):
                    trial.step()
                if rounds:
                    found[policy]["rounds"].append(trial.round(steps))
                if turn == 0:
                    found[policy]["nbytes"] = trial.peak(folder)
                trial.attachment.detach()
                del trial
                gc.collect()
    return {policy: {"seconds": min(each["rounds"], default=None), **each} for policy, each in found.items()}


def simulated(name: str, policies: list[str], world: int, hardware: str) -> dict[str, Any]:
    """The same of the virtual device."""
    model = MODELS[name]
    found = {}
    for policy in policies:
        begin = time.perf_counter()
        result = zhooks.simulate(*_program(name), world=world, hardware=hardware, policy=POLICIES[policy], steps=WARMUP)
        took = time.perf_counter() - begin
        found[policy] = {"seconds": result.step_s, "nbytes": result.device.nbytes, "took": took}
    del model
    return found


def _program(name: str) -> tuple[Callable[[], Any], Callable[..., None]]:
    model = MODELS[name]
    batch: list[Any] = []

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = model.make()
        batch[:] = model.batch()
        return made, optimizer_of(made)

    def step(made: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.loss(made, tuple(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return build, step


def keep_priority() -> None:
    """A session that a launcher begins is scheduled as a group of its own, which does not inherit what `nice` gave."""
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(os.nice(0)))


def main() -> None:
    keep_priority()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, choices=list(MODELS))
    parser.add_argument("--policies", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--simulate", metavar="HARDWARE")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    policies = chosen.policies.split(";")
    if chosen.simulate:
        print(RECORD_PREFIX + json.dumps(simulated(chosen.model, policies, chosen.world, chosen.simulate)), flush=True)
        return
    dist.init_process_group("gloo")
    record = measured(chosen.model, policies, chosen.rounds, chosen.steps)
    if int(os.environ["RANK"]) == 0:
        print(RECORD_PREFIX + json.dumps(record), flush=True)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        report_failure(error)
        sys.exit(1)
