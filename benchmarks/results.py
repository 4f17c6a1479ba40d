"""Results that are kept: what was measured, by which command, at which commit, on which machine, in `benchmarks/results/`.

Commands with `--save` call it, `tables.py` reads what it wrote. It never measures.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launch import HERE

FOLDER = HERE / "results"
#: Distributions whose versions a result depends on, where they are installed.
DISTRIBUTIONS = ("torch", "numba", "deepspeed", "transformers")


def save(name: str, found: dict[str, Any]) -> Path:
    """Write `results/NAME.json` whole: `found` beside `about()`."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    passing = path.with_suffix(".json.part")
    passing.write_text(json.dumps({"about": about(), **found}, indent=1) + "\n")
    passing.replace(path)
    return path


def load(name: str) -> dict[str, Any]:
    """What `save` wrote."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def about() -> dict[str, Any]:
    """What a reader must know about where the numbers come from."""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "load_average": round(os.getloadavg()[2], 1),
        "python": platform.python_version(),
        "versions": versions(),
    }


def machine() -> dict[str, Any]:
    """Processor, cores and memory; no name of the host, which says nothing to others."""
    model = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal:")]
    return {
        "processor": model[0] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory[0] / 2**20) if memory else None,
    }


def versions() -> dict[str, str]:
    """Of what is installed of `DISTRIBUTIONS`."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checkout's commit; "+" behind it says that tracked files differed from it."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=HERE).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed else "")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
