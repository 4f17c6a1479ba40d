"""What saving costs: snapshots beside a copy of the state, steps beside a save, files beside a plain writer and DCP.

``python benchmarks/saving.py --folder /scratch`` prints ratios and their medians; ``--tier``, ``--hidden`` and ``--layers`` say
what is saved.  It asserts nothing: a busy machine moves every figure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zhooks
from offload.pages import aligned

CHUNK = 8 << 20


def model_of(hidden: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(layers)))


def seconds(job: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    job()
    return time.perf_counter() - begin


def plain_writer(folder: Path, nbytes: int) -> None:
    """As many bytes into ``plain`` past the page cache, one request after the other, synced."""
    source = aligned(CHUNK).fill_(7).numpy()
    fd = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_DIRECT", 0), 0o600)
    try:
        for _ in range(-(-nbytes // CHUNK)):
            os.write(fd, source.data)
        os.fsync(fd)
    finally:
        os.close(fd)


def plain_copier(source: Path, folder: Path) -> None:
    """``source`` into another file past the page cache, synced: a block is read while the one before it is written."""
    direct, target = getattr(os, "O_DIRECT", 0), folder / "copy"
    buffers = [aligned(CHUNK).numpy().data for _ in range(2)]
    reading = os.open(source, os.O_RDONLY | direct)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | direct, 0o600)
    try:
        with ThreadPoolExecutor(1) as reader:
            offsets = range(0, os.fstat(reading).st_size, CHUNK)
            ahead = reader.submit(os.preadv, reading, [buffers[0]], 0)
            for number, offset in enumerate(offsets):
                ahead.result()
                if offset + CHUNK < offsets.stop:
                    ahead = reader.submit(os.preadv, reading, [buffers[1 - number % 2]], offset + CHUNK)
                os.pwrite(writing, buffers[number % 2], offset)
        os.fsync(writing)
    finally:
        os.close(reading)
        os.close(writing)
        target.unlink()


def with_dcp(folder: Path, state: dict[str, Tensor]) -> None:
    target = folder / "dcp"
    shutil.rmtree(target, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=target, no_dist=True)
    for path in target.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def shown(what: str, found: list[float], target: str) -> None:
    least, most = min(found), max(found)
    print(f"{what:<60} {statistics.median(found):8.3f}   (of {len(found)}: {least:.3f} to {most:.3f}; target {target})")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options.add_argument("--tier", choices=("device", "host", "disk"), default="device")
    options.add_argument("--hidden", type=int, default=1024)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as own:
        measure(given, Path(own))


def measure(given: argparse.Namespace, folder: Path) -> None:
    policy: dict[str, Any] = {"stage": 3, "disk": {"path": str(folder)}}
    policy |= {cell: {"tier": given.tier} for cell in ("parameter", "gradient", "optimizer")}
    model = model_of(given.hidden, given.layers)
    attachment = zhooks.attach(model, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(given.batch, given.hidden)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    state = {f"{number}": torch.randn(given.hidden, given.hidden + 1) for number in range(3 * given.layers)}
    nbytes = sum(value.nbytes for value in state.values())
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"state: {nbytes / 2**20:.0f} MiB on the {given.tier} tier; one rank, {machine}")
    print("files beside a plain O_DIRECT writer of ours, 8 MiB at a time, in place of fio")
    found: dict[str, list[float]] = {name: [] for name in ("snapshot", "beside", "waiting", "plain", "copy", "dcp")}
    for _ in range(given.rounds):
        copy = seconds(lambda: [value.clone() for value in state.values()])
        alone = seconds(step)
        begin = time.perf_counter()
        saving = attachment.save(folder / "run", optimizer, wait=False)
        found["snapshot"].append((time.perf_counter() - begin) / copy)
        times = []
        while not saving.done:
            times.append(seconds(step))
        saving.wait()
        alone = (alone + seconds(step)) / 2
        found["beside"].append(statistics.mean(times) / alone if times else 1.0)
        waited = seconds(lambda: attachment.save(folder / "run", optimizer))
        found["waiting"].append(nbytes / waited / 2**20)
        found["plain"].append(seconds(lambda: plain_writer(folder, nbytes)) / waited)
        found["copy"].append(seconds(lambda: plain_copier(folder / "plain", folder)) / waited)
        (folder / "plain").unlink()
        found["dcp"].append(seconds(lambda: with_dcp(folder, state)) / waited)
    shown("save(wait=False) returns after, by one copy of the state", found["snapshot"], "1")
    shown("a step while it goes on, by a step alone", found["beside"], "1.03")
    shown("save(): MiB/s", found["waiting"], "-")
    shown("throughput by a plain writer's", found["plain"], "0.8")
    shown("throughput by a plain copier's, as from the disk tier", found["copy"], "-")
    shown("throughput by torch's DCP of the same bytes, synced", found["dcp"], "1")


if __name__ == "__main__":
    main()
