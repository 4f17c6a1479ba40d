"""Owns ``zprof bench --profile``: a hardware profile of this machine, whose devices are threads and whose ranks are processes.

`commands.bench` calls `profile`. It puts together what `samples.py` and `shared_memory.py` measure and what `offload.hardware`
fits to that; no figure of any machine is written down here.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from offload.errors import CapabilityError
from offload.hardware import Fit, Hardware, Sample, fit
from offload.text import counted
from zprof.bench.neighbours import neighbours
from zprof.bench.shared_memory import file_nbytes
from zprof.problem import Misuse

__all__ = ["Step", "profile", "steps"]

_COLLECTIVE_NBYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
_TIMEOUT_S = 180

Step = tuple[str, Callable[[], list[Sample]]]


def steps(folder: Path, most: int, ranks: int) -> Generator[Step]:
    """What is measured, by name: what one rank does while the others compute, as they do in a step, then what all do together.

    The others start once, for each imports torch; they end with the last of these, or when this is closed.

    Raises:
        Misuse: a profiler is on, which makes every call slower and takes the hook that counts them.
    """
    # Imported late: torch takes longer to start than everything before it.
    from offload.virtual import active_profiler
    from zprof.bench.samples import measured

    found = active_profiler()
    if found is not None:
        raise Misuse(
            f"--profile: expected no Python profiler in this process, because it slows down what is measured; found {found}. "
            "Run zprof bench --profile without it"
        )
    with neighbours(ranks - 1):
        yield from measured(folder, most)
    yield "collectives", lambda: collectives(ranks, most)


def profile(name: str, folder: Path, samples: list[Sample], most: int) -> Fit:
    """The profile called ``name`` that the samples make of this machine.

    Raises:
        HardwareError: they contradict each other.
    """
    from zprof.bench.samples import host_bandwidth

    cores = len(os.sched_getaffinity(0))
    rates = [s.flops / s.seconds for s in samples if s.what == "matmul" and s.dtype == "fp32"]
    date = datetime.now(UTC).date().isoformat()
    # Ranks may be more than cores: they were measured so.
    devices = max(cores, *(s.ranks for s in samples))
    return fit(_base(name, folder, cores, devices, cores * max(rates), host_bandwidth(cores, most), date), samples)


def _base(name: str, folder: Path, cores: int, devices: int, flops: float, bandwidth: float, date: str) -> Hardware:
    """What the system says of itself, with a figure of 1 wherever a measured one comes."""
    memory = psutil.virtual_memory().total
    source = f"measured here by zprof bench --profile, {date}"
    unmeasured: dict[str, Any] = {"source": source}
    values = {
        "name": name,
        "title": f"{platform.processor() or platform.machine()}, {counted(cores, 'core')}, one thread a device, {date}",
        "kind": "cpu",
        "device": unmeasured | {"count": devices, "memory": memory, "memory_bandwidth": 1.0, "launch": 0.0},
        "peak": unmeasured | {"fp32": 1.0},
        "matmul": unmeasured | {"points": [[1.0, 1.0]]},
        "memory_bound": unmeasured | {"points": [[1.0, 1.0]]},
        "link": unmeasured | {"bandwidth": 1.0, "latency": 0.0, "through": "memory"},
        "host_link": unmeasured | {"bandwidth": 1.0, "latency": 0.0},
        "host": unmeasured
        | {
            "memory": memory,
            "memory_bandwidth": bandwidth,
            "cores": cores,
            "flops": flops,
            "copy_rate": 1.0,
            "dispatch": 0.0,
        },
        "disk": unmeasured
        | {"count": 1, "read": 1.0, "write": 1.0, "latency": 0.0, "capacity": shutil.disk_usage(folder).total},
    }
    return Hardware.of(values)


def collectives(ranks: int, most: int) -> list[Sample]:
    """All-gathers and reduce-scatters of so many processes through shared memory, the slowest rank's time.

    Raises:
        CapabilityError: a process failed.
    """
    sizes = [nbytes for nbytes in _COLLECTIVE_NBYTES if nbytes <= most]
    # In memory where there is such a folder; a file elsewhere is shared through the page cache alike.
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.NamedTemporaryFile(prefix="zprof-bench-", dir=folder) as file:
        os.truncate(file.name, file_nbytes(ranks))
        said = _ran([[file.name, str(rank), str(ranks), *map(str, sizes)] for rank in range(ranks)])
    samples = []
    for kind in said[0]:
        for nbytes in sizes:
            slowest = [max(times) for times in zip(*(each[kind][str(nbytes)] for each in said), strict=True)]
            samples.append(Sample(kind, min(slowest), nbytes, ranks=ranks))
    return samples


def _ran(arguments: list[list[str]]) -> list[dict[str, Any]]:
    """One process a rank, and what each printed; all are gone afterwards, whatever happens."""
    command = [sys.executable, "-m", "zprof.bench.shared_memory"]
    started = [subprocess.Popen([*command, *each], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for each in arguments]
    try:
        outputs = [each.communicate(timeout=_TIMEOUT_S) for each in started]
        failed = next((index for index, each in enumerate(started) if each.returncode), None)
        if failed is not None:
            last = (outputs[failed][1].decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
            raise CapabilityError(f"collectives: expected {len(started)} ranks to meet, found that one failed: {last}")
        return [json.loads(out) for out, _ in outputs]
    except subprocess.TimeoutExpired:
        text = f"collectives: expected them to finish within {_TIMEOUT_S} s, found that they did not; leave the machine idle"
        raise CapabilityError(text) from None
    finally:
        for each in started:
            each.kill()
            each.wait()
