"""The ZeRO paper's tables beside what zhooks holds: a model attached and stepped as one of N ranks of the virtual device.

A person runs it: `python benchmarks/zero_tables.py`, or with the names of tables; `--json FILE` keeps all rows. It needs no
GPU. It counts bytes; times are predicted from a hardware profile.

Note: [Whose figures]
    "paper" is what arXiv:1910.02054 prints; "formula" its formula for the parameters our model has; "held" what the virtual
    device counts between backward and the step, which must be the report's own sum, or the run stops. Models differ from the
    paper's nominal sizes by what `parameters` says. Stage 1 is measured where its gradients are whole, inside `no_sync`; the
    backward that ends an accumulation reduces them to 1/N.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import zhooks
from offload.hardware import Hardware
from offload.virtual import ACCELERATOR
from workload import Shape
from zero_models import attached, build, build_divided, loss_of, shape, step
from zhooks.simulate import Simulation

GB = 1e9
#: Above the largest matrix: what is longer than `[comm] buffer` is moved in chunks.
COMMON: dict[str, Any] = {"activation": {"checkpoint": "unit"}, "comm": {"buffer": "32 GiB"}}
WORLDS = (1, 4, 16, 64, 256, 1024)
#: Layers and width whose parameters come next to the paper's sizes.
MODELS = {"7.5B": (50, 3456), "128B": (101, 10_240), "1T": (127, 25_600)}
#: GB a device by ranks, as the paper's Table 1 prints them: stages 1, 2, 3.
TABLE1: dict[str, tuple[tuple[float, float, float], ...]] = {
    "7.5B": ((120, 120, 120), (52.5, 41.3, 30), (35.6, 21.6, 7.5), (31.4, 16.6, 1.88), (30.4, 15.4, 0.47), (30.1, 15.1, 0.12)),
    "128B": ((2048,) * 3, (896, 704, 512), (608, 368, 128), (536, 284, 32), (518, 263, 8), (513, 257, 2)),
    "1T": ((16000,) * 3, (7000, 5500, 4000), (4750, 2875, 1000), (4187, 2218, 250), (4046, 2054, 62.5), (4011, 2013, 15.6)),
}
#: 10^9 parameters on 64 devices of 32 GB as Table 2 prints them, by stage: theory, and measured where the paper did.
TABLE2: dict[int, tuple[float, float | None]] = {0: (2, 1.3), 1: (7.6, 6.2), 2: (14.4, None), 3: (128, None)}
WIDTHS = {0: 2048, 1: 4096, 2: 4096, 3: 8192}
#: 10^9 parameters on 64 m devices beside a model parallelism of m, as the paper measured them: stages 0 and 1.
MEASURED = {1: (1.3, 6.2), 2: (2.5, 12.5), 4: (5.0, 25.0), 8: (10.0, 50.0), 16: (20.0, 100.0)}


def formula(stage: int, psi: float, ranks: int) -> float:
    """Bytes of a rank's model states, section 3 of the paper."""
    replicated = {0: 16, 1: 4, 2: 2, 3: 0}[stage]
    return psi * (replicated + (16 - replicated) / ranks)


@dataclass(frozen=True, slots=True)
class States:
    """One figure of Table 1 and what was held; bytes but for the paper's GB."""

    model: str
    parameters: int
    ranks: int
    stage: int
    paper_gb: float
    formula: float
    held: int
    seconds: float

    @property
    def padding(self) -> float:
        return self.held - self.formula


def states(name: str, size: Shape, ranks: int, stage: int) -> States:
    begin = time.monotonic()
    with attached(size, ranks, {"stage": stage, **COMMON}, "v100-32") as made:
        step(size)(made.model, made.optimizer)
        if stage == 1:
            with made.attachment.no_sync():
                loss_of(made.model, size).backward()
        else:
            loss_of(made.model, size).backward()
        gc.collect()
        report, held = made.attachment.memory(), made.machine.held[ACCELERATOR]
        activations = sum(row.peak or 0 for row in report.residual if row.tier == "device")  # of the step before, freed by now
        if held != report.by_tier["device"] - activations:
            raise SystemExit(f"{name}, N = {ranks}, stage {stage}: the device holds {held} B, the report {report.by_tier}")
        other = sum(nbytes for what, nbytes in report.transient.items() if what != "partial gradients")
    paper = TABLE1[name][WORLDS.index(ranks)][stage - 1]
    needed = formula(stage, report.psi, ranks)
    return States(name, report.psi, ranks, stage, paper, needed, held - other, time.monotonic() - begin)


def table1(names: list[str], worlds: list[int], show: Console) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        table = _table(
            f"Table 1: model states a device, GB, {name}", "N", "stage", "paper", "formula", "held", "padding, B", "share", "s"
        )
        for ranks in worlds:
            for stage in (1, 2, 3):
                row = states(name, shape(*MODELS[name], length=128), ranks, stage)
                rows.append({**asdict(row), "padding": row.padding})
                figures = f"{row.paper_gb:g}", f"{row.formula / GB:.4g}", f"{row.held / GB:.4g}"
                share = f"{row.padding / row.formula:.4%}"
                table.add_row(f"{ranks:,}", f"{stage}", *figures, f"{row.padding:,.0f}", share, f"{row.seconds:.1f}")
        show.print(table, f"{rows[-1]['parameters']:,} parameters")
    return rows


def simulated(size: Shape, world: int, stage: int, hardware: str, *, degree: int = 1, **given: Any) -> Simulation:
    """A step on ``world`` devices, layers divided over ``degree`` of them."""
    policy = {"stage": stage, **COMMON, **given.pop("policy", {})}
    if degree > 1:
        given["mesh"] = {"shard": world // degree, "tp": degree}
    made = build(size) if degree == 1 else build_divided(size)
    return zhooks.simulate(made, step(size), world=world, hardware=hardware, policy=policy, check_races=False, **given)


def most(fits: Callable[[int], bool], first: int) -> int:
    """The largest number that fits, where all below it do; 0 if 1 does not."""
    low, high = 0, first
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _parameters(layers: int, dim: int) -> int:
    size = shape(layers, dim)
    return layers * (12 * dim * dim + 13 * dim) + 2 * size.vocab * dim + (size.length + 2) * dim


@dataclass(frozen=True, slots=True)
class Largest:
    """The most layers whose whole step stays within a device's memory, activations and buffers included; bytes."""

    layers: int
    parameters: int
    peak: int
    states: float


def largest(stage: int, dim: int, batch: int, ranks: int, memory: int) -> Largest:
    peaks = {0: 0}

    # Without accumulation our stage 1 holds what stage 2 does.
    held = 2 if stage == 1 else stage

    def states_fit(layers: int) -> bool:
        return formula(held, _parameters(layers, dim), ranks) <= memory

    def fits(layers: int) -> bool:
        # What the states alone overfill is not tried.
        if not states_fit(layers):
            return False
        peaks[layers] = simulated(shape(layers, dim, batch), ranks, stage, "v100-32").device.nbytes
        return peaks[layers] <= memory

    layers = most(fits, max(1, most(states_fit, 1) // 2))
    psi = _parameters(layers, dim)
    return Largest(layers, psi, peaks[layers], formula(held, psi, ranks))


def largest_divided(stage: int, dim: int, ranks: int, degree: int, memory: int) -> Largest:
    """As ``largest`` beside a model parallelism of ``degree``: layers add alike to the peak, so few are tried."""
    peaks: dict[int, int] = {}

    def peak(layers: int) -> int:
        if layers not in peaks:
            peaks[layers] = simulated(shape(layers, dim), ranks * degree, stage, "v100-32", degree=degree).device.nbytes
        return peaks[layers]

    few, more = 4, 12
    each = (peak(more) - peak(few)) / (more - few)
    layers = max(1, few + int((memory - peak(few)) / each))
    while peak(layers) > memory:
        layers -= 1
    while peak(layers + 1) <= memory:
        layers += 1
    psi, held = _parameters(layers, dim), 2 if stage == 1 else stage
    return Largest(layers, psi, peak(layers), formula(held, psi / degree, ranks))


def table2_divided(show: Console, degrees: list[int], stages: list[int]) -> list[dict[str, Any]]:
    table = _table(
        "Table 2 by model parallelism (tp), 64 devices of 32 GB each, 10^9 parameters, 1,024 tokens a slice",
        "MP", "devices", "stage", "paper, theory", "formula", "paper, measured", "ours, predicted", "layers x width", "peak",
        "states", "s",
    )  # fmt: skip
    rows = []
    for degree in degrees:
        for stage in stages:
            # Wider by a half of the degree's powers of two, so that layers stay few.
            begin, dim = time.monotonic(), WIDTHS[stage] << (degree.bit_length() - 1) // 2
            found = largest_divided(stage, dim, 64, degree, Hardware.of("v100-32").device.memory)
            theory, by_formula = degree * TABLE2[stage][0], degree * 32 / formula(stage, 1, 64)
            measured = MEASURED[degree][stage] if stage < 2 else None
            cited = {"degree": degree, "stage": stage, "paper_theory": theory, "paper_measured": measured}
            rows.append({**cited, "formula": by_formula, "dim": dim, **asdict(found), "seconds": time.monotonic() - begin})
            table.add_row(
                f"{degree}", f"{64 * degree:,}", f"{stage}", f"{theory:g}", f"{by_formula:.4g}",
                "-" if measured is None else f"{measured:g}", f"{found.parameters / GB:.3g}", f"{found.layers} x {dim:,}",
                f"{found.peak / 2**30:.2f} GiB", f"{found.states / 2**30:.2f} GiB", f"{rows[-1]['seconds']:.0f}",
            )  # fmt: skip
    show.print(table)
    return rows


def table2(show: Console, batch: int) -> list[dict[str, Any]]:
    table = _table(
        f"Table 2: largest model on 64 devices of 32 GB, 10^9 parameters, {batch} x 1,024 tokens a device",
        "stage", "paper, theory", "formula", "paper, measured", "ours, predicted", "layers x width", "peak", "states", "s",
    )  # fmt: skip
    rows = []
    for stage, (theory, measured) in TABLE2.items():
        begin, dim = time.monotonic(), WIDTHS[stage]
        by_formula = 32 / formula(stage, 1, 64)
        found = largest(stage, dim, batch, 64, Hardware.of("v100-32").device.memory)
        seconds = time.monotonic() - begin
        cited = {"stage": stage, "paper_theory": theory, "formula": by_formula, "paper_measured": measured}
        rows.append({**cited, "dim": dim, **asdict(found), "seconds": seconds})
        table.add_row(
            f"{stage}", f"{theory:g}", f"{by_formula:.4g}", "-" if measured is None else f"{measured:g}",
            f"{found.parameters / GB:.3g}", f"{found.layers} x {dim}", f"{found.peak / 2**30:.2f} GiB",
            f"{found.states / 2**30:.2f} GiB", f"{seconds:.0f}",
        )  # fmt: skip
    show.print(table)
    return rows


def largest_batch(layers: int, dim: int, ranks: int, memory: int) -> tuple[int, Simulation]:
    """Sequences a device of the step that fits, and that step; of one sequence, and 0, where nothing does."""
    found: dict[int, Simulation] = {}

    def fits(batch: int) -> bool:
        found[batch] = simulated(shape(layers, dim, batch), ranks, 3, "v100-32")
        return found[batch].device.nbytes <= memory

    batch = most(fits, 4)
    return batch, found[max(1, batch)]


def throughput(show: Console) -> list[dict[str, Any]]:
    """Stage 3 over all devices in place of the paper's stage 2 beside a model parallelism of 16."""
    table = _table(
        "Throughput on v100-32, predicted: stage 3 over all devices, the largest batch that fits",
        "model", "devices", "x", "batch a device", "peak", "step", "exposed", "TFLOP/s a device", "PFLOP/s", "x", "s",
    )  # fmt: skip
    memory = Hardware.of("v100-32").device.memory
    rows: list[dict[str, Any]] = []
    for name, layers, worlds in (("60B", 75, (64, 128, 256, 400)), ("100B", 125, (400,))):
        first = 0.0
        for world in worlds:
            begin = time.monotonic()
            batch, best = largest_batch(layers, 8192, world, memory)
            total, seconds = best.tflops * world / 1e3, time.monotonic() - begin
            first = first or total
            rows.append({
                "model": name, "parameters": _parameters(layers, 8192), "devices": world, "batch": batch,
                "pflops": total, "seconds": seconds, **best.as_dict(),
            })  # fmt: skip
            table.add_row(
                name, f"{world}", f"{world / worlds[0]:.2f}", f"{batch}" if batch else "none fits",
                f"{best.device.nbytes / 2**30:.1f} GiB", f"{best.step_s:.2f} s", f"{best.exposed_s:.2f} s",
                f"{best.tflops:.1f}", f"{total:.2f}", f"{total / first:.2f}", f"{seconds:.0f}",
            )  # fmt: skip
    show.print(table)
    show.print("FLOPs count the forward that is run again. The paper: 100B on 400 V100 at 15 PFLOP/s, over 38 TFLOP/s each;")
    show.print("60B from 64 to 400 devices grows more than in proportion, because larger batches fit.")
    return rows


def ten_trillion(show: Console) -> list[dict[str, Any]]:
    """10^13 parameters over 10,000 devices: nested axes, so that reductions are hierarchical."""
    size, mesh = shape(776, 32_768), {"replicate": 2, "shard": 5000}
    policy = {"activation": {"checkpoint": "unit", "tier": "host"}, "schedule": {"max_reductions": 1}}
    begin = time.monotonic()
    found = simulated(size, 10_000, 3, "b200", mesh=mesh, policy=policy)
    seconds, psi = time.monotonic() - begin, _parameters(776, 32_768)
    memory = Hardware.of("b200").device.memory
    fits = "fits" if found.device.nbytes <= memory else "does not fit"
    show.print(f"10T: {psi:,} parameters, stage 3, {mesh}, recomputed, inputs on the host; {seconds:.0f} s")
    show.print(f"{found}\nit {fits}: a device has {memory / 2**30:.0f} GiB")
    return [{"parameters": psi, "mesh": mesh, "seconds": seconds, **found.as_dict()}]


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def chosen(given: argparse.Namespace, show: Console) -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    yield "table1", lambda: table1(given.models.split(","), given.ranks, show)
    yield "table2", lambda: table2(show, given.batch)
    yield "table2-mp", lambda: table2_divided(show, given.degrees, given.stages)
    yield "throughput", lambda: throughput(show)
    yield "10T", lambda: ten_trillion(show)


def main() -> None:
    parser = argparse.ArgumentParser(description="The ZeRO paper's tables beside what zhooks holds on the virtual device.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="table1, table2, table2-mp, throughput, 10T; none is all")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of table 1: {', '.join(MODELS)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(WORLDS), choices=WORLDS, metavar="N", help="of table 1")
    parser.add_argument("--batch", type=int, default=1, help="sequences of 1,024 tokens a device in table 2")
    parser.add_argument(
        "--degrees", type=int, nargs="+", default=[*MEASURED], choices=[*MEASURED], metavar="M", help="of table2-mp"
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[*TABLE2], choices=[*TABLE2], metavar="S", help="of table2-mp")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    given = parser.parse_args()
    show, written = Console(width=150), dict[str, Any]()
    known = dict(chosen(given, show))
    for wrong in sorted({*given.tables} - {*known}) + sorted({*given.models.split(",")} - {*MODELS}):
        parser.error(f"expected {', '.join(known)}, and models {', '.join(MODELS)}, found {wrong}")
    if given.batch < 1:
        parser.error(f"--batch: expected at least 1, found {given.batch}")
    for name, made in known.items():
        if given.tables and name not in given.tables:
            continue
        begin = time.monotonic()
        with Console(stderr=True).status(f"{name} ..."):
            written[name] = made()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        show.print(f"{name}: {time.monotonic() - begin:.0f} s, at most {peak:.2f} GiB of this process\n")
        if given.json is not None:
            given.json.write_text(json.dumps(written, indent=1, default=str))


if __name__ == "__main__":
    main()
