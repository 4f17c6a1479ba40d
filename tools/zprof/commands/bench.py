"""Owns ``zprof bench``: measures what this machine's memory, buses, disk and collectives can do, and stores the figures.

`zprof.cli` hangs it in; `bench/trials.py` measures and `bench/store.py` keeps. It never compares: reports do, by percentage.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offload.budget import available
from offload.errors import CapabilityError
from offload.text import as_size, counted, parse_size
from offload.tier import Tier
from zprof.bench.store import Figure, bench_path, keep

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.progress import Progress

__all__ = ["bench"]

WHATS = ("h2d", "d2h", "memcpy", "disk", "gather", "all")
#: Bytes of one transfer, unless --size says otherwise; a fraction of what is there on a small machine.
USUAL_NBYTES = 256 << 20
_GATHER_TIMEOUT_S = 300


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        nbytes = parse_size(value)
    except (TypeError, ValueError) as error:
        raise click.BadParameter(f"{value!r}: expected a number of bytes such as 256MiB") from error
    if not 1 << 20 <= nbytes <= 1 << 36:
        raise click.BadParameter(f"{value!r}: expected 1MiB to 64GiB")
    return nbytes


@click.command()
@click.argument("what", nargs=-1, type=click.Choice(WHATS))
@click.option("--path", default=".", type=click.Path(), show_default=True, help="A folder on the disk to measure.")
@click.option(
    "--size", callback=_size, metavar="BYTES", help="Bytes per transfer, larger than any cache; 256MiB unless memory is short."
)
@click.option("--ranks", type=click.IntRange(2, 64), help="Ranks of the gather; by default one per GPU, or two.")
@click.option("--store/--no-store", default=True, help="Store the figures for other commands to compare with.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--profile", "to", type=click.Path(path_type=Path), help="Measure at several sizes, and write a hardware profile here."
)
@click.option("-f", "--force", is_flag=True, help="Overwrite an existing profile.")
def bench(
    what: tuple[str, ...],
    path: str,
    size: int | None,
    ranks: int | None,
    store: bool,
    as_json: bool,
    to: Path | None,
    force: bool,
) -> None:
    """Measure the bandwidth of this machine, and store it for reports to compare with.

    \b
    zprof bench                          everything
    zprof bench disk --path /scratch     the disk of one folder
    zprof bench memcpy gather --json
    zprof bench --profile here.toml      a profile for zprof simulate and plan

    Measure a profile on an idle machine: it describes threads as devices and processes as ranks.
    """
    chosen = [name for name in WHATS[:-1] if not what or "all" in what or name in what]
    nbytes = size or min(USUAL_NBYTES, max(1 << 20, available(Tier.HOST) // 16))
    folder = Path(path).absolute()
    if "disk" in chosen and not folder.is_dir():
        raise click.BadParameter(f"{path}: expected a folder, found none; create it first", param_hint="--path")
    if to is not None:
        if what:
            raise click.UsageError(f"--profile: measures everything a profile holds; leave out {' '.join(what)}")
        _profile(to, folder, size or min(1 << 27, nbytes), ranks or 2, force=force, as_json=as_json)
        return
    figures: list[Figure] = []
    missing: list[str] = []
    with _progress(as_json) as progress:
        for name, trial in _trials(chosen, folder, nbytes, ranks):
            task = progress.add_task(name, total=None)
            try:
                figures.extend(trial())
            except CapabilityError as error:
                if name in what or (name == "GPU copies" and {"h2d", "d2h"} & set(what)):
                    raise
                missing.append(str(error))
            progress.remove_task(task)
    kept = keep(socket.gethostname(), figures) if store and figures else None
    if as_json:
        body = {"version": 1, "nbytes": nbytes, "figures": [_plain(one) for one in figures], "missing": missing}
        click.echo(json.dumps(body | {"stored": str(kept) if kept else None}, indent=2))
        return
    _show(figures, missing, nbytes, kept)


def _profile(to: Path, folder: Path, most: int, ranks: int, *, force: bool, as_json: bool) -> None:
    """Measure, fit, write the file, and say how well the fit predicts what was measured."""
    from zprof.bench.profile import profile, steps
    from zprof.commands.output import check_output, write_output

    check_output(to, [], force=force)
    samples = []
    with _progress(as_json) as progress, closing(steps(folder, most, ranks)) as each:
        for name, measure in each:
            task = progress.add_task(name, total=None)
            samples += measure()
            progress.remove_task(task)
    fitted = profile(to.stem, folder, samples, most)
    residuals = "".join(f"# {line}\n" for line in fitted.text().splitlines())
    write_output(to, f"{fitted.hardware.text()}\n{residuals}".encode())
    if as_json:
        body = {"version": 1, "profile": str(to), "hardware": fitted.hardware.values()}
        body["residuals"] = [_plain(each) for each in fitted.residuals]
        click.echo(json.dumps(body, indent=2))
        return
    click.echo(fitted.text())
    click.echo(f"{to}: written; zprof hardware show {to}")


Trial = Callable[[], list[Figure]]


def _trials(chosen: list[str], folder: Path, nbytes: int, ranks: int | None) -> Iterator[tuple[str, Trial]]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if "memcpy" in chosen:
        yield "memcpy", lambda: _memcpy(nbytes, now)
    if {"h2d", "d2h"} & set(chosen):
        yield "GPU copies", lambda: _gpu(chosen, nbytes, now)
    if "disk" in chosen:
        yield "disk", lambda: _disk(folder, nbytes, now)
    if "gather" in chosen:
        yield "gather", lambda: [_gather(nbytes, ranks, now)]


def _memcpy(nbytes: int, now: str) -> list[Figure]:
    from zprof.bench.trials import memcpy

    return [Figure("memcpy", memcpy(nbytes), now)]


def _disk(folder: Path, nbytes: int, now: str) -> list[Figure]:
    from zprof.bench.trials import disk

    return [Figure(name, rate, now, path=str(folder)) for name, rate in disk(folder, nbytes).items()]


def _gpu(chosen: list[str], nbytes: int, now: str) -> list[Figure]:
    from offload.device import default_device, device_name
    from zprof.bench.trials import copies_to_device

    device = default_device()
    if device.type == "cpu":
        raise CapabilityError("h2d and d2h: expected a GPU that torch can use, found none; install a CUDA build of torch")
    rates = copies_to_device(device, nbytes)
    return [Figure(name, rate, now, device_name(device)) for name, rate in rates.items() if name in chosen]


def _gather(nbytes: int, ranks: int | None, now: str) -> Figure:
    """An all-gather over ranks of its own, started by torchrun."""
    import torch

    from offload.device import default_device, device_name
    from zprof.bench.gather import PREFIX

    device = default_device()
    gpus = 0 if device.type == "cpu" else torch.accelerator.device_count()
    world = ranks or max(2, gpus)
    if 0 < gpus < world:
        found = f"{gpus} for {counted(world, 'rank')}"
        raise CapabilityError(f"gather: expected one GPU per rank, found {found}; set --ranks, or add GPUs")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    try:
        done = subprocess.run(
            [*launcher, "-m", "zprof.bench.gather", str(nbytes)], capture_output=True, text=True, timeout=_GATHER_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        text = f"gather: expected it to finish within {_GATHER_TIMEOUT_S} s, found that it did not; try a smaller --size"
        raise CapabilityError(text) from None
    said = [line.partition(PREFIX)[2] for line in done.stdout.splitlines() if PREFIX in line]
    if done.returncode or not said:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise CapabilityError(f"gather: expected {world} ranks to finish, found exit code {done.returncode}: {last}")
    backend, rate = said[0].split()
    return Figure("gather", float(rate), now, f"{backend} x {world}" if not gpus else device_name(device))


def _plain(figure: DataclassInstance) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(figure)


def _progress(quiet: bool) -> Progress:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("measuring {task.description}"))
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def _show(figures: list[Figure], missing: list[str], nbytes: int, kept: Path | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for heading in ("what", "a second", "on"):
        table.add_column(heading, justify="right" if heading == "a second" else "left")
    for figure in figures:
        table.add_row(figure.name, f"{figure.bytes_per_s / (1 << 30):.2f} GiB", figure.path or figure.device)
    console = Console()
    console.print(table)
    for line in missing:
        console.print(f"not measured: {line}", markup=False, highlight=False, soft_wrap=True)
    if kept is not None:
        console.print(
            f"transfers of {as_size(nbytes)}; stored in {bench_path()}: zprof report compares a run's bandwidths with them",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
