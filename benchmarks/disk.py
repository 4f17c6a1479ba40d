"""How fast the disk tier writes and reads, checksums included, beside a bare loop of the same calls, fio and DeepSpeed.

A person runs it: `python benchmarks/disk.py --folder /scratch`. All of them move the same number of bytes of direct I/O in
one folder, over blocks that were written before; it measures no page cache, and no first write to fresh blocks.

Note: [Pages]
    zhooks and the loop move memory of the host tier's pool. Direct I/O pins every page of it for each transfer and a
    checksum walks over them, so pages of 2 MiB cost a fraction of the processor's time that pages of 4 KiB do; `--huge`
    asks for them where the pool did not.

Note: [Who is compared]
    zhooks TxB     `DiskFile` with T threads and blocks of B MiB, every byte checksummed on its way out and on its way in.
    loop TxB       T Python threads calling `pwritev` and `preadv` on blocks of B MiB, no checksum: the floor for us.
    fio            1 MiB blocks in queues of 8 and 32, and 8 MiB blocks in a queue of 4, by io_uring with buffers it
                   registered before (fixed) and without, libaio and psync.
    deepspeed      `async_io` handles, 1 MiB blocks, threads x queue as named.
    The best peer is the fio or DeepSpeed line with the highest median, chosen for writing and for reading apart. A ratio
    is taken inside each round; the median over the rounds and its range are printed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from offload.device import open_device
from offload.disk import DiskFile
from offload.errors import ZhooksError
from offload.memory import HostPool

MIB = 1 << 20
WRITE, READ = "write", "read"
TARGET = 0.95
FIO = tuple(
    (engine, queue, block)
    for engine in ("io_uring", "io_uring-fixed", "libaio", "psync")
    for queue, block in ((8, 1), (32, 1), (4, 8))
)
DEEPSPEED = ((1, 8), (1, 32), (2, 32), (8, 32))


@dataclass(frozen=True, slots=True)
class Contender:
    """Somebody who moves all bytes once; each call returns the seconds it took.

    Attributes:
        kind: "zhooks", "loop", "fio" or "deepspeed".
    """

    kind: str
    name: str
    write: Callable[[], float]
    read: Callable[[], float]


Rates = dict[str, dict[str, list[float]]]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def zhooks(folder: Path, source: Tensor, into: Tensor, threads: int, block_mib: int) -> Iterator[Contender]:
    disk = DiskFile(folder, threads=threads, block=block_mib * MIB)
    if not disk.direct:
        sys.exit(f"disk.py: {folder} has no direct I/O, so its memory would be measured; name another --folder")
    try:
        extent = disk.allocate(source.numel(), "benchmark")
        disk.write(extent, source).wait()
        yield Contender(
            "zhooks",
            f"zhooks {threads}x{block_mib}",
            lambda: timed(lambda: disk.write(extent, source).wait()),
            lambda: timed(lambda: disk.read(extent, into).wait()),
        )
    finally:
        disk.close()


@contextmanager
def loop(folder: Path, source: Tensor, into: Tensor, threads: int, block_mib: int) -> Iterator[Contender]:
    path = folder / f"loop-{threads}x{block_mib}.dat"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    step = block_mib * MIB
    starts = range(0, source.numel(), step)
    outgoing, incoming = source.numpy().data, into.numpy().data

    def whole(count: int, start: int) -> None:
        assert count == min(step, source.numel() - start), "the system moved less than it was asked to"

    with ThreadPoolExecutor(threads) as pool:

        def write(start: int) -> None:
            whole(os.pwritev(fd, [outgoing[start : start + step]], start), start)

        def read(start: int) -> None:
            whole(os.preadv(fd, [incoming[start : start + step]], start), start)

        try:
            os.posix_fallocate(fd, 0, source.numel())
            list(pool.map(write, starts))
            yield Contender(
                "loop",
                f"loop {threads}x{block_mib}",
                lambda: timed(lambda: list(pool.map(write, starts))),
                lambda: timed(lambda: list(pool.map(read, starts))),
            )
        finally:
            os.close(fd)
            path.unlink()


@contextmanager
def fio(folder: Path, source: Tensor, engine: str, queue: int, block_mib: int) -> Iterator[Contender | None]:
    path = folder / f"fio-{engine}.dat"
    nbytes = source.numel()

    def seconds(verb: str) -> float:
        parallel = [f"--iodepth={queue}", f"--size={nbytes}"]
        if engine == "psync":
            # It has no queue: as many threads, each with its own part of the file.
            part = nbytes // queue
            parallel = [f"--numjobs={queue}", "--thread", f"--size={part}", f"--offset_increment={part}", "--group_reporting"]
        driver, _, fixed = engine.partition("-")
        command = ["fio", "--name=j", f"--filename={path}", f"--rw={verb}", f"--bs={block_mib}m", "--direct=1"]
        options = [f"--ioengine={driver}", *parallel, "--refill_buffers=0", "--output-format=json"]
        options += ["--fixedbufs=1", "--registerfiles=1"] if fixed else []
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][verb]
        return float(nbytes / job["bw_bytes"])

    try:
        if not path.exists():
            path.write_bytes(source.numpy().data)
            os.sync()
        seconds(WRITE)
    except (subprocess.CalledProcessError, ValueError, KeyError, ZeroDivisionError):
        yield None
    else:
        name = f"fio {engine} {queue}x{block_mib}"
        yield Contender("fio", name, lambda: seconds(WRITE), lambda: seconds(READ))
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def deepspeed(folder: Path, source: Tensor, threads: int, queue: int) -> Iterator[Contender | None]:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(MIB, queue, False, True, threads)
    memory = handle.new_cpu_locked_tensor(source.numel(), torch.empty(0, dtype=torch.uint8))
    memory.copy_(source)
    path = folder / f"deepspeed-{threads}x{queue}.dat"
    try:
        handle.sync_pwrite(memory, str(path), 0)
        yield Contender(
            "deepspeed",
            f"deepspeed {threads}x{queue}",
            lambda: timed(lambda: handle.sync_pwrite(memory, str(path), 0)),
            lambda: timed(lambda: handle.sync_pread(memory, str(path), 0)),
        )
    finally:
        handle.free_cpu_locked_tensor(memory)
        path.unlink(missing_ok=True)


def advise_huge(memory: Tensor) -> None:
    """Ask for large pages where `memory`, not touched yet, covers them."""
    libc = ctypes.CDLL(None, use_errno=True)
    start = memory.data_ptr()
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(memory.nbytes), mmap.MADV_HUGEPAGE):
        sys.exit(f"disk.py: --huge: {os.strerror(ctypes.get_errno())}")


def gather(arguments: argparse.Namespace, stack: ExitStack, console: Console) -> list[Contender]:
    """Everybody this machine has, each with its file written once; who is missing is said."""
    nbytes = arguments.mib * MIB
    pool = HostPool(open_device(torch.device("cpu")))
    source, into = (pool.take(nbytes, key) for key in ("source", "into"))
    if arguments.huge:
        advise_huge(source)
        advise_huge(into)
    source.random_(0, 256)
    into.zero_()
    found: list[Contender | None] = []
    for setting in arguments.settings:
        threads, _, block = setting.partition("x")
        for contender in (zhooks, loop):
            found.append(stack.enter_context(contender(arguments.folder, source, into, int(threads), int(block))))
    if shutil.which("fio") is None:
        console.print("fio: not on PATH")
    else:
        found += [stack.enter_context(fio(arguments.folder, source, *setting)) for setting in FIO]
    try:
        found += [stack.enter_context(deepspeed(arguments.folder, source, *setting)) for setting in DEEPSPEED]
    except Exception as error:
        console.print(f"deepspeed: not here, {type(error).__name__}: {error}", markup=False)
    return [contender for contender in found if contender is not None]


def compare(contenders: list[Contender], rounds: int, nbytes: int, console: Console) -> Rates:
    """GB/s of every contender in every round, the order turned by one place a round."""
    rates: Rates = {verb: {one.name: [] for one in contenders} for verb in (WRITE, READ)}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=rounds * len(contenders))
        for round_ in range(rounds):
            first = round_ % len(contenders)
            for one in contenders[first:] + contenders[:first]:
                progress.update(task, description=f"round {round_ + 1}: {one.name}")
                rates[WRITE][one.name].append(nbytes / one.write() / 1e9)
                rates[READ][one.name].append(nbytes / one.read() / 1e9)
                progress.advance(task)
    return rates


def fastest(rates: dict[str, list[float]], names: list[str]) -> str | None:
    """The name with the highest median."""
    return max(names, key=lambda name: statistics.median(rates[name]), default=None)


def ratios(mine: list[float], theirs: list[float]) -> list[float]:
    """One a round."""
    return [one / other for one, other in zip(mine, theirs, strict=True)]


def table(contenders: list[Contender], rates: Rates, mib: int) -> Table:
    """A row a contender: medians, and the ratio to the best peer."""
    out = Table(title=f"{mib} MiB of direct I/O, GB/s, median of the rounds", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("who", "write", "lowest-highest", "x best peer", "read", "lowest-highest", "x best peer"):
        out.add_column(heading, justify="left" if heading == "who" else "right", no_wrap=True)
    for one in contenders:
        cells = []
        for verb in (WRITE, READ):
            mine, best = rates[verb][one.name], best_peer(contenders, rates[verb])
            ratio = f"{statistics.median(ratios(mine, rates[verb][best])):.2f}" if best is not None else ""
            cells += [f"{statistics.median(mine):.2f}", f"{min(mine):.2f}-{max(mine):.2f}", ratio]
        out.add_row(one.name, *cells)
    return out


def best_peer(contenders: list[Contender], rates: dict[str, list[float]]) -> str | None:
    return fastest(rates, [one.name for one in contenders if one.kind in ("fio", "deepspeed")])


def targets(contenders: list[Contender], rates: Rates) -> list[str]:
    """For every setting of ours, a line a verb against the bare loop, and one against the best peer."""
    lines = []
    for one in (one for one in contenders if one.kind == "zhooks"):
        for verb in (WRITE, READ):
            floor = one.name.replace("zhooks", "loop")
            best = best_peer(contenders, rates[verb])
            lines += [line(one.name, verb, other, rates[verb]) for other in (floor, best) if other is not None]
    return lines


def line(name: str, verb: str, other: str, rates: dict[str, list[float]]) -> str:
    found = ratios(rates[name], rates[other])
    verdict = "reached" if statistics.median(found) >= TARGET else "missed"
    if min(found) < TARGET <= max(found):
        verdict += ", undecided by the range"
    spread = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
    return f"{name} {verb}: {spread} x {other} (at least {TARGET}): {verdict}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the disk tier with a bare loop, fio and DeepSpeed's async_io.")
    parser.add_argument("--folder", type=Path, default=Path("disk-benchmark"), help="where all files lie; removed if created")
    parser.add_argument("--mib", type=int, default=1024, help="size of each file")
    parser.add_argument("--rounds", type=int, default=5, help="times everybody writes and reads")
    parser.add_argument(
        "--settings", type=lambda text: text.split(","), default=["16x4"], help="threads x MiB of a block, several by commas"
    )
    parser.add_argument("--huge", action="store_true", help="ask for 2 MiB pages: see the note at the top of the file")
    parser.add_argument("--json", type=Path, help="file to write every rate to")
    return parser.parse_args()


def main() -> None:
    """Run the comparison, print it, and write it where asked."""
    arguments = parse()
    console = Console()
    created = not arguments.folder.exists()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            contenders = gather(arguments, stack, console)
            rates = compare(contenders, arguments.rounds, arguments.mib * MIB, console)
    except ZhooksError as error:
        sys.exit(f"disk.py: {error}")
    finally:
        if created:
            shutil.rmtree(arguments.folder)
    console.print(table(contenders, rates, arguments.mib), crop=False)
    lines = targets(contenders, rates)
    for text in lines:
        console.print(text, highlight=False, soft_wrap=True)
    if arguments.json is not None:
        document = {"mib": arguments.mib, "gb_per_s": rates, "targets": lines}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
