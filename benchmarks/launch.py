"""Starts a benchmark script under torchrun, waits for it, and reads the one record (or the one error) it printed.

`peers.py` and `units.py` call it; their workers use its two line prefixes. It never measures, and never lets a failed
or hanging child end the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD_PREFIX = "BENCH-RECORD "
FAILURE_PREFIX = "BENCH-FAILURE "
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a child left: a record, or an error in one line; both when it aborted after printing its record."""

    record: dict[str, Any] | None
    error: str | None


def torchrun(script: str, arguments: list[str], *, processes: int, timeout_s: float) -> Outcome:
    """Run `benchmarks/<script>` in `processes` ranks of one thread each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    child = subprocess.Popen(
        [*launcher, str(HERE / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(),
        start_new_session=True,  # so that a hanging trial is ended with all its ranks
    )
    try:
        output, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_session(child)
        return Outcome(None, f"no end after {timeout_s:.0f} s; its processes were killed")
    except BaseException:
        end_session(child)
        raise
    return read(output, child.returncode)


def child_environment() -> dict[str, str]:
    """This environment with one thread a rank, and the project importable although it may not be installed."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def end_session(child: subprocess.Popen[str]) -> None:
    """Kill torchrun and its ranks; they were started in a session of their own."""
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def read(output: str, returncode: int) -> Outcome:
    """The record and the error in a child's output; the worker's own error line wins over torchrun's."""
    records = _after(output, RECORD_PREFIX)
    failures = _after(output, FAILURE_PREFIX)
    record = json.loads(records[0]) if records else None
    if returncode == 0 and record is not None:
        return Outcome(record, None)
    if failures:
        return Outcome(record, failures[0])
    if record is not None:
        return Outcome(record, f"exit code {returncode} after its record was printed")
    return Outcome(None, f"exit code {returncode}: {_last_line(output)}")


def report_failure(error: Exception) -> None:
    """Print a worker's exception in full, then in the one line the table shows."""
    traceback.print_exception(error)
    first_line = (str(error).splitlines() or [""])[0]
    print(f"{FAILURE_PREFIX}{type(error).__name__}: {first_line}", flush=True)


def _after(output: str, prefix: str) -> list[str]:
    # torchrun may put other text before a rank's line, and two ranks may share one; the prefix marks the beginning.
    return [line.partition(prefix)[2] for line in output.splitlines() if prefix in line]


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip(" =-")]
    return lines[-1] if lines else "no output"
