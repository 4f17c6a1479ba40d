"""What activations over tiers cost: one process trains the same GPT under every choice, in alternating rounds.

    python benchmarks/activations.py [--shape small] [--batch 4] [--length 256] [--rounds 5] [--json out.json]

Each round runs every choice for a few steps, in an order that turns by one place; a choice's ratio is taken to `plain` of
the same round, and the table shows the median and the range over the rounds. It never compares two runs.

    plain        zhooks, activations on the device
    hooks        the saved-tensor hooks alone: tier = "host", but nothing is as large as min_bytes
    host, disk   [activation] tier, with the policy's own min_bytes
    host-keep    tier = "host", where the last quarter of what a forward saves stays
    unit         [activation] checkpoint = "unit"
    unit-host    the same, unit inputs on the host
    torch        torch.utils.checkpoint around every block, under plain zhooks

`x plain` and `x torch` are by the clock, `x CPU` counts the seconds of all threads: on a machine that others use the second
is the steadier, and an upper bound where copies overlap with compute. `saved MB` is the growth of resident memory over a
forward, once every copy is where it belongs; the host tier's slabs, made in the warm-up and used again, are no growth.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zhooks
from measure import rss_nbytes
from workload import SHAPES, Shape, build

MB = 1e6
WARMUP = 2


class Checkpointed(nn.Module):
    """A block under torch's own checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


@dataclass(slots=True)
class Runner:
    """One choice and its model."""

    name: str
    model: nn.Module
    attachment: Any
    optimizer: torch.optim.Optimizer
    saved_nbytes: int = 0

    def step(self, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
        """Train on a batch; seconds by the clock, and of all threads of this process."""
        begin, used = time.perf_counter(), time.process_time()
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin, time.process_time() - used

    def measure_saved(self, batch: tuple[Tensor, Tensor]) -> None:
        """Resident memory that one forward adds, once every copy is where it belongs."""
        gc.collect()
        before = rss_nbytes()
        loss = self.model(*batch)
        stash = self.attachment.session.runtime.saved.stash
        if stash is not None:
            stash.flush()
        self.saved_nbytes = rss_nbytes() - before
        loss.backward()
        self.optimizer.zero_grad()


def choices(shape: Shape, folder: Path) -> dict[str, dict[str, Any]]:
    """The policies; the one of `torch` is `plain`'s."""
    # Roughly what a block saves: inputs of its layers, q, k, v, the attention's output and the widened halves.
    saved = shape.layers * 16 * shape.batch * shape.length * shape.dim * 4
    disk = {"disk": {"path": str(folder)}}
    activation: dict[str, dict[str, Any]] = {
        "plain": {},
        "hooks": {"tier": "host", "min_bytes": 1 << 50},
        "host": {"tier": "host"},
        "host-keep": {"tier": "host", "keep": saved // 4},
        "disk": {"tier": "disk"},
        "unit": {"checkpoint": "unit"},
        "unit-host": {"checkpoint": "unit", "tier": "host"},
        "torch": {},
    }
    return {name: {"activation": chosen, **(disk if name == "disk" else {})} for name, chosen in activation.items()}


def make(name: str, shape: Shape, policy: dict[str, Any]) -> Runner:
    model = build(shape)
    if name == "torch":
        model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
        policy = {**policy, "units": {"classes": ["Block"]}}
    attachment = zhooks.attach(model, policy=policy)
    return Runner(name, model, attachment, torch.optim.SGD(model.parameters(), lr=1e-3))


Seconds = dict[str, list[tuple[float, float]]]


def measure(runners: list[Runner], batch: tuple[Tensor, Tensor], rounds: int, steps: int) -> Seconds:
    """The median step of each round, by the clock and in CPU time, for every choice."""
    for runner in runners:
        for _ in range(WARMUP):
            runner.step(batch)
        runner.measure_saved(batch)
    seconds: Seconds = {runner.name: [] for runner in runners}
    for turn in range(rounds):
        start = turn % len(runners)
        for runner in runners[start:] + runners[:start]:
            runner.step(batch)
            timed = [runner.step(batch) for _ in range(steps)]
            clock, cpu = (statistics.median(part) for part in zip(*timed, strict=True))
            seconds[runner.name].append((clock, cpu))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="names of choices beside plain, separated by commas")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    shape = replace(SHAPES[chosen.shape], batch=chosen.batch, length=chosen.length)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1), generator=generator)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    with tempfile.TemporaryDirectory() as folder:
        policies = choices(shape, Path(folder))
        names = [name for name in policies if name == "plain" or not chosen.only or name in chosen.only.split(",")]
        runners = [make(name, shape, policies[name]) for name in names]
        seconds = measure(runners, batch, chosen.rounds, chosen.steps)
        report(runners, seconds)
        for runner in runners:
            runner.attachment.detach()
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(chosen).items()}, "seconds": seconds}))


def report(runners: list[Runner], seconds: Seconds) -> None:
    columns = ("step ms", "x plain", "range", "x CPU", "range", "x torch", "saved MB")
    print(f"{'':10}" + "".join(f"{column:>{14 if column == 'range' else 10}}" for column in columns))
    for runner in runners:
        mine = seconds[runner.name]
        parts = [f"{1e3 * statistics.median(clock for clock, _ in mine):10.1f}"]
        for kind in (0, 1):
            ratios = sorted(one[kind] / base[kind] for one, base in zip(mine, seconds["plain"], strict=True))
            parts.append(f"{statistics.median(ratios):10.3f}{f'{ratios[0]:.3f}-{ratios[-1]:.3f}':>14}")
        to_torch = [one[0] / base[0] for one, base in zip(mine, seconds.get("torch", []), strict=False)]
        parts.append(f"{statistics.median(to_torch):10.3f}" if to_torch else f"{'-':>10}")
        print(f"{runner.name:10}" + "".join(parts) + f"{runner.saved_nbytes / MB:10.0f}")


if __name__ == "__main__":
    main()
