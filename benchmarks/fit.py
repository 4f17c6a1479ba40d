"""A model that does not fit: how much memory it trains in with everything on disk, and how long its bytes take.

A person runs it: `python benchmarks/fit.py --folder /scratch --ranks 1,2`. It starts one process a rank, prints one table
and never needs a GPU. Losses are not compared here: the parity tests hold the tiers to the same bits.

Note: [What is measured]
    peak       the most resident memory of any rank from the first step on, and of attach before it.
    growth     resident memory after the last step less that after the second: zero for what may train for ever.
    update     the optimizer's step over the time its bytes take (masters, gradients and both moments read, masters and moments
               written, all ranks together) at the bandwidth the disk tier reaches alone in the same process, checksums
               counted, measured before and after the steps; the median over the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import launch
import measure

MIB = 1 << 20
PEAK_TARGET_MIB, UPDATE_TARGET = 2048, 1.15


def main(arguments: argparse.Namespace) -> int:
    """Run every number of ranks, print the table; 1 when a run failed."""
    console = Console()
    records: dict[int, dict[str, Any]] = {}
    for ranks in arguments.ranks:
        outcome = launch.torchrun("fit.py", ["--rank-of", str(ranks), *own(arguments)], processes=ranks, timeout_s=3600.0)
        if outcome.record is None:
            console.print(f"{ranks} ranks: {outcome.error}", style="red", markup=False)
            continue
        records[ranks] = outcome.record
    show(console, records)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"command": sys.argv, "runs": records}, indent=1) + "\n")
    return 0 if len(records) == len(arguments.ranks) else 1


def own(arguments: argparse.Namespace) -> list[str]:
    shape = ["--layers", "--dim", "--vocabulary", "--length", "--steps"]
    values = (getattr(arguments, name.removeprefix("--")) for name in shape)
    return ["--folder", str(arguments.folder), "--kernel", arguments.kernel] + [
        word for pair in zip(shape, map(str, values), strict=True) for word in pair
    ]


def show(console: Console, records: dict[int, dict[str, Any]]) -> None:
    """One row a number of ranks."""
    table = Table(title="everything on disk")
    for name in ("ranks", "parameters", "attach peak", f"peak (< {PEAK_TARGET_MIB} MiB)", "growth", "step s", "update s"):
        table.add_column(name, justify="right")
    table.add_column(f"update / its bytes (<= {UPDATE_TARGET})", justify="right")
    for ranks, record in records.items():
        table.add_row(
            str(ranks),
            f"{record['numel'] / 1e6:,.0f} M",
            f"{record['attach_peak'] / MIB:,.0f} MiB",
            f"{record['peak'] / MIB:,.0f} MiB",
            f"{record['growth'] / MIB:+,.0f} MiB",
            f"{record['step_s']:.2f}",
            f"{record['update_s']:.2f}",
            f"{record['ratio']:.2f} ({record['read_gbs']:.1f} GB/s read, {record['write_gbs']:.1f} written)",
        )
    console.print(table)


# ---- one rank


def rank_main(arguments: argparse.Namespace) -> None:
    """Train as one rank and print the record on the first."""
    dist.init_process_group("gloo")
    record = train(arguments)
    sizes = ("peak", "attach_peak", "growth")
    for name, value in zip(sizes, measure.max_over_ranks([float(record[name]) for name in sizes]), strict=True):
        record[name] = int(value)
    if dist.get_rank() == 0:
        print(launch.RECORD_PREFIX + json.dumps(record), flush=True)
    dist.destroy_process_group()


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Attach a GPT built on meta, step it, and measure."""
    sys.path.append(str(launch.HERE.parent / "examples"))
    import zhooks
    from gpt import GPT, GPTConfig

    config = GPTConfig(layers=arguments.layers, dim=arguments.dim, heads=arguments.dim // 64, vocabulary=arguments.vocabulary)
    with torch.device("meta"):
        model = GPT(config)
    numel = sum(param.numel() for param in model.parameters())
    cell = {"tier": "disk"}
    policy = {
        "parameter": cell,
        "gradient": cell,
        "optimizer": {**cell, "kernel": arguments.kernel},
        "disk": {"path": str(arguments.folder)},
        "units": {"names": ["blocks.*"]},
        "schedule": {"reshard_after_forward": True},
    }
    before = bandwidth(arguments.folder)
    measure.restart_peak()
    zhooks.attach(model, policy=policy)
    attach_peak = measure.peak_rss_nbytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    measure.restart_peak()
    steps, updates, resident = [], [], []
    for number in range(arguments.steps):
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(0, arguments.vocabulary, (1, arguments.length + 1), generator=generator)
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        # What backward still owes is settled here, so that the update is timed alone.
        assert next(model.parameters()).grad is not None
        dist.barrier()
        updating = time.perf_counter()
        optimizer.step()
        dist.barrier()
        updates.append(time.perf_counter() - updating)
        optimizer.zero_grad()
        steps.append(time.perf_counter() - began)
        resident.append(measure.rss_nbytes())
    peak = measure.peak_rss_nbytes()
    after = bandwidth(arguments.folder)
    read, write = (max(one, two) for one, two in zip(before, after, strict=True))
    # The first step makes the moments: nothing is read for them.
    update_s = statistics.median(updates[1:])
    floor_s = 4 * numel * (4 / read + 3 / write)
    return {
        "numel": numel,
        "attach_peak": attach_peak,
        "peak": peak,
        "growth": resident[-1] - resident[1],
        "step_s": statistics.median(steps[1:]),
        "update_s": update_s,
        "ratio": update_s / floor_s,
        "read_gbs": read / 1e9,
        "write_gbs": write / 1e9,
    }


def bandwidth(folder: Path, nbytes: int = 256 * MIB, pieces: int = 16) -> tuple[float, float]:
    """Bytes a second that all ranks together read and write through the disk tier, over extents written before."""
    from offload.device import open_device
    from offload.disk import DiskFile
    from offload.memory import HostPool

    pool = HostPool(open_device(torch.device("cpu")))
    file = DiskFile(folder, label=f"bandwidth{dist.get_rank()}")
    each = nbytes // pieces
    buffers = [pool.take(each, "bandwidth").random_(0, 255) for _ in range(pieces)]
    extents = [file.allocate(each, "bandwidth") for _ in range(pieces)]
    seconds: dict[str, list[float]] = {"write": [], "read": []}
    for round_ in range(4):
        for verb, call in (("write", file.write), ("read", file.read)):
            dist.barrier()
            began = time.perf_counter()
            under_way = [call(extent, buffer, 0, "bandwidth") for extent, buffer in zip(extents, buffers, strict=True)]
            for pending in under_way:
                pending.wait()
            dist.barrier()
            if round_:
                seconds[verb].append(time.perf_counter() - began)
    file.close()
    for buffer in buffers:
        pool.give(buffer)
    pool.close()
    total = nbytes * dist.get_world_size()
    return total / statistics.median(seconds["read"]), total / statistics.median(seconds["write"])


def parsed() -> argparse.Namespace:
    """The command line; sizes default to 513 million parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the scratch files go: a disk, not a tmpfs")
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--dim", type=int, default=1280)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--length", type=int, default=32, help="tokens a sequence; one sequence a rank")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kernel", choices=("torch", "numba"), default="numba")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    options = parsed()
    if options.rank_of is None:
        sys.exit(main(options))
    rank_main(options)
