"""How fast the compiled updates are: beside a plain sweep over the same arrays, torch's fused AdamW, DeepSpeed's CPUAdam.

A person runs it: `python benchmarks/kernels.py`. It starts no process and checks no result; the tests do.

Note: [The sweep]
    An update can be no faster than its memory. The sweep reads four fp32 arrays and writes three of them in place, with
    next to no arithmetic: Adam's own pattern of streams, 28 bytes an element. With 16-bit gradients and a 16-bit copy
    AdamW moves 28 bytes too. Every row is given by the bytes it must name; "x sweep" is its bytes a second over those of
    the sweep in the same round, so that for rows of 28 bytes it is the ratio of times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from offload import kernels

ADAMW = kernels.Adam(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, step=10)
LION = kernels.Lion(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.01)
SGD = kernels.Sgd(lr=1e-3, momentum=0.9)
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", None: "-"}
# OpenMP's threads spin for some milliseconds after their work; the next row must not pay for it.
PAUSE_S = 0.02
#: Row -> the least "x sweep" asked of it.
TARGETS = {"adamw fp32 -> -": 0.95, "adamw bf16 -> bf16": 0.9}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing measured, and the bytes an element that it must read and write."""

    name: str
    nbytes: int
    run: Callable[[], object]


class Arrays:
    """The memory that all rows work on."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        self.master, self.first = torch.randn(numel), torch.randn(numel).mul_(1e-3)
        self.second = torch.rand(numel).mul_(1e-6)
        grad = torch.randn(numel).mul_(1e-3)
        self.grads: dict[torch.dtype, Tensor] = {torch.float32: grad}
        self.copies: dict[torch.dtype, Tensor] = {}
        for dtype in (torch.bfloat16, torch.float16):
            self.grads[dtype] = grad.to(dtype)
            self.copies[dtype] = torch.zeros(numel, dtype=dtype)


def sweep_row(arrays: Arrays, threads: int) -> Row:
    """See Note [The sweep]."""
    import numba
    import numpy as np

    def sweep(p: Any, g: Any, m: Any, v: Any, factor: Any) -> None:
        for i in numba.prange(p.size):
            x = factor * g[i]
            p[i] += x
            m[i] += x
            v[i] += x

    numba.set_num_threads(threads)
    compiled: Any = numba.njit(parallel=True, fastmath=True)(sweep)
    streams = [arrays.master, arrays.grads[torch.float32], arrays.first, arrays.second]
    given = [stream.numpy() for stream in streams]
    return Row("sweep", 28, lambda: compiled(*given, np.float32(0)))


def kernel_rows(arrays: Arrays) -> list[Row]:
    """Ours: AdamW in every combination of dtypes, the others in the most usual two."""
    p, m, v = arrays.master, arrays.first, arrays.second
    rows: list[Row] = []
    for dtype, grad in arrays.grads.items():
        for kind in (None, torch.bfloat16, torch.float16):
            copy = None if kind is None else arrays.copies[kind]
            name, nbytes = f"{SHORT[dtype]} -> {SHORT[kind]}", grad.element_size() + (0 if copy is None else 2)

            def adamw(grad: Tensor = grad, copy: Tensor | None = copy) -> None:
                kernels.adam(ADAMW, p, grad, m, v, copy=copy)

            def sgd(grad: Tensor = grad, copy: Tensor | None = copy) -> None:
                kernels.sgd(SGD, p, grad, m, copy=copy)

            def lion(grad: Tensor = grad, copy: Tensor | None = copy) -> None:
                kernels.lion(LION, p, grad, m, copy=copy)

            rows.append(Row(f"adamw {name}", 24 + nbytes, adamw))
            if (dtype, kind) in ((torch.float32, None), (torch.bfloat16, torch.bfloat16)):
                rows.append(Row(f"sgd momentum {name}", 16 + nbytes, sgd))
                rows.append(Row(f"lion {name}", 16 + nbytes, lion))
    return rows


def torch_rows(arrays: Arrays) -> list[Row]:
    """torch's fused AdamW on the same memory: alone, and with the casts that 16-bit gradients and copies need."""
    parameter = torch.nn.Parameter(arrays.master)
    parameter.grad = arrays.grads[torch.float32]
    made = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    made.state[parameter] = {"step": torch.tensor(10.0), "exp_avg": arrays.first, "exp_avg_sq": arrays.second}
    wide, narrow = torch.empty_like(arrays.master), arrays.copies[torch.bfloat16]

    def with_casts() -> None:
        parameter.grad = wide.copy_(arrays.grads[torch.bfloat16])
        made.step()
        narrow.copy_(arrays.master)
        parameter.grad = arrays.grads[torch.float32]

    return [Row("torch fused adamw", 28, made.step), Row("torch fused adamw, casts beside", 28, with_casts)]


def deepspeed_rows(arrays: Arrays) -> list[Row]:
    """DeepSpeed's CPUAdam on the same memory; none where it is not installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return []
    parameter = torch.nn.Parameter(arrays.master)
    parameter.grad = arrays.grads[torch.float32]
    made = DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=0.01, adamw_mode=True)
    made.state[parameter] = {"step": 10, "exp_avg": arrays.first, "exp_avg_sq": arrays.second}
    return [Row("deepspeed cpuadam", 28, made.step)]


def measured(rows: list[Row], rounds: int) -> dict[str, list[float]]:
    """Seconds of every row in every round; the order turns by one each round, the first round is not counted."""
    seconds: dict[str, list[float]] = {row.name: [] for row in rows}
    for turn in range(rounds + 1):
        shift = turn % len(rows)
        for row in rows[shift:] + rows[:shift]:
            time.sleep(PAUSE_S)
            begin = time.perf_counter()
            row.run()
            seconds[row.name].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in seconds.items()}


def compile_seconds() -> dict[str, float]:
    """What the first use costs: numba's import with a first loop, and one more variant."""
    begin = time.perf_counter()
    reason = kernels.available()
    if reason is not None:
        raise SystemExit(reason)
    ready = time.perf_counter()
    few = [torch.ones(8) for _ in range(4)]
    kernels.adam(replace(ADAMW, beta1=0.4), few[0], few[1], few[2], few[3])
    return {"first use": ready - begin, "one more variant": time.perf_counter() - ready}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    starting = compile_seconds()
    arrays = Arrays(options.numel)
    peers = deepspeed_rows(arrays)
    rows = [sweep_row(arrays, options.threads), *kernel_rows(arrays), *torch_rows(arrays), *peers]
    seconds = measured(rows, options.rounds)
    table = Table(
        "row", "bytes", "ms, median", "ms, best", "GB/s", "x sweep, median", "x sweep, of bests", "target", box=SIMPLE_HEAD
    )
    record: dict[str, Any] = {"numel": options.numel, "threads": options.threads, "starting_s": starting, "seconds": seconds}
    sweep = seconds["sweep"]
    for row in rows:
        own, share = seconds[row.name], row.nbytes / 28
        median = statistics.median(s / o * share for s, o in zip(sweep, own, strict=True))
        best = min(sweep) / min(own) * share
        rate = options.numel * row.nbytes / statistics.median(own) / 1e9
        cells = [row.nbytes, statistics.median(own) * 1e3, min(own) * 1e3, rate]
        target = f"{TARGETS[row.name]:.2f}" if row.name in TARGETS else ""
        table.add_row(row.name, *(f"{cell:.4g}" for cell in cells), f"{median:.3f}", f"{best:.3f}", target)
    console.print(f"{options.numel:,} elements, {options.threads} threads, {options.rounds} rounds")
    console.print(", ".join(f"{name}: {value:.2f} s" for name, value in starting.items()))
    console.print(table)
    if not peers:
        console.print("deepspeed is not installed: no row of it")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
