"""Predicted beside measured: `zhooks.simulate` and real training of the same models under the same policies, on this machine.

    zprof bench --profile here.toml
    python benchmarks/simulated.py --hardware here.toml [--models GPT,MoE] [--ranks 2] [--rounds 2] [--json out.json]
    python benchmarks/simulated.py --hardware here.toml --ranks 4 --rounds 0      # memory alone

Each model of `simulated_models.py` trains under several policies on Gloo ranks of one thread each, policies in turn, and is
simulated in a process of its own with the profile of this machine. Printed are step time (the least of the rounds' medians, on
the slowest rank; of the simulation its last step) and the peak of what storages on the device hold, as zprof's recorder counts
them; then errors, and how far the order of policies agrees. The ranks' malloc keeps what it has freed (`KEPT`). Nothing is
fitted here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

from launch import HERE, child_environment, read, torchrun

TIMEOUT_S = 900
#: What glibc takes from the system it keeps: the simulator knows of no page faults, and how many there are from step to step is
#: a matter of where blocks happen to lie.
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
#: Tiers and recomputation vary from model to model; the first has the six policies whose order is compared.
CASES = {
    "GPT": (
        "stage 0", "stage 1", "stage 3", "recomputed", "optimizer on disk", "all on disk", "all on host", "stage 3, prefetch 0",
    ),
    "conv net": ("stage 0", "stage 3", "recomputed", "optimizer on host"),
    "MoE": ("stage 1", "stage 3", "optimizer on disk", "all on host"),
    "encoder-decoder": ("stage 0", "stage 3", "recomputed", "all on host"),
    "LoRA": ("stage 1", "stage 3", "recomputed", "all on disk"),
    "recurrent": ("stage 0", "stage 3", "optimizer on host", "all on disk"),
}  # fmt: skip
ORDERED = ("GPT", 6)

Row = dict[str, Any]


def main() -> None:
    chosen = arguments()
    os.environ.update(KEPT)
    rows: list[Row] = []
    for name in chosen.models:
        rows += compared(name, chosen)
    print(table(rows))
    print(summary(rows))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"ranks": chosen.ranks, "rows": rows}, indent=1))


def compared(name: str, chosen: argparse.Namespace) -> list[Row]:
    """One row a policy; a policy of which one side failed is said and left out."""
    policies = CASES[name]
    common = ["--model", name, "--policies", ";".join(policies)]
    real = torchrun(
        "simulated_worker.py", [*common, "--rounds", str(chosen.rounds)], processes=chosen.ranks, timeout_s=TIMEOUT_S
    )
    predicted = alone([*common, "--world", str(chosen.ranks), "--simulate", str(chosen.hardware)])
    if real.record is None or predicted.record is None:
        print(f"{name}: {real.error or predicted.error}", file=sys.stderr)
        return []
    return [
        {
            "model": name,
            "policy": policy,
            "seconds": predicted.record[policy]["seconds"],
            "measured_s": real.record[policy]["seconds"],
            "nbytes": predicted.record[policy]["nbytes"],
            "measured_nbytes": real.record[policy]["nbytes"],
        }
        for policy in policies
    ]


def alone(given: list[str]) -> Any:
    """One process: torch learns of the virtual device once, and for the rest of it."""
    done = subprocess.run(
        [sys.executable, str(HERE / "simulated_worker.py"), *given],
        capture_output=True, text=True, env=child_environment(), timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    return read(done.stdout + done.stderr, done.returncode)


def table(rows: list[Row]) -> str:
    """Predicted, measured and the error of both."""
    columns = [f"{what:>8} {'measured':>9} {'error':>7}" for what in ("step ms", "peak MB")]
    lines = [f"{'model':<16} {'policy':<20} {' '.join(columns)}"]
    for row in rows:
        step, took, peak, held = row["seconds"] * 1e3, row["measured_s"], row["nbytes"] / 1e6, row["measured_nbytes"] / 1e6
        timed = f"{'-':>9} {'-':>7}" if took is None else f"{took * 1e3:>9.1f} {error(row, 'seconds', 'measured_s'):>7.1%}"
        counted = f"{peak:>8.2f} {held:>9.2f} {error(row, 'nbytes', 'measured_nbytes'):>7.1%}"
        lines.append(f"{row['model']:<16} {row['policy']:<20} {step:>8.1f} {timed} {counted}")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """Medians and worst cases, and Kendall's tau of the policies of one model."""
    lines = []
    for what, key, other in (("peak", "nbytes", "measured_nbytes"), ("step time", "seconds", "measured_s")):
        errors = [abs(error(row, key, other)) for row in rows if row[other] is not None]
        if errors:
            median = statistics.median(errors)
            lines.append(f"{what}: median error {median:.1%}, worst {max(errors):.1%}, of {len(errors)} runs")
    name, count = ORDERED
    ordered = [row for row in rows if row["model"] == name and row["measured_s"] is not None][:count]
    if len(ordered) == count:
        tau = kendall([row["seconds"] for row in ordered], [row["measured_s"] for row in ordered])
        lines.append(f"order of {count} policies of {name}: Kendall's tau {tau:.2f}")
    return "\n".join(lines)


def error(row: Row, predicted: str, measured: str) -> float:
    """Above 0 where too much was predicted."""
    return float(row[predicted] / row[measured] - 1)


def kendall(xs: list[float], ys: list[float]) -> float:
    """Pairs in the same order less those in the other, of all; without ties."""
    pairs = list(combinations(range(len(xs)), 2))
    return sum(1 if (xs[i] - xs[j]) * (ys[i] - ys[j]) > 0 else -1 for i, j in pairs) / len(pairs)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare simulated training with measured training.")
    parser.add_argument("--hardware", required=True, type=lambda text: Path(text).resolve(), help="of zprof bench --profile")
    parser.add_argument("--models", default=list(CASES), type=lambda text: text.split(","))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="timed rounds; 0 measures memory alone")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
