"""From trials to numbers and tables: medians over rounds, ratios inside a round, and the targets held against them.

`peers.py` calls it with the trials of one run. It never starts a process or reads a clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

MB = 1e6
BASELINE = "fsdp2"


@dataclass(frozen=True, slots=True)
class Done:
    """One trial: where it belongs, and the record or the error it ended with (both after an abort at exit)."""

    round: int
    driver: str
    config: str
    dtype: str
    record: dict[str, Any] | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Target:
    """`driver` must need at most `at_most` times what `against` needs of `quantity`, in the same round."""

    driver: str
    against: str
    quantity: str
    at_most: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median over rounds of a driver's quantity over another's in the same round, and the rounds' range."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was found; `ratio` is None when no round has both drivers."""

    target: Target
    ratio: Ratio | None

    @property
    def reached(self) -> bool | None:
        return None if self.ratio is None else self.ratio.median <= self.target.at_most


QUANTITIES: dict[str, Callable[[dict[str, Any]], float]] = {
    "step time": lambda record: float(record["median_s"]["total_s"]),
    "peak RSS growth": lambda record: float(record["rss_growth_nbytes"]),
}

TARGETS = (
    Target("zhooks-3", "fsdp2", "step time", 0.72),
    Target("zhooks-3-stock", "fsdp2", "step time", 0.78),
    Target("zhooks-2", "fsdp2-noreshard", "step time", 0.75),
    Target("zhooks-1", "zero1", "step time", 1.0),
    Target("zhooks-0", "ddp", "step time", 1.05),
    Target("zhooks-3", "fsdp2", "peak RSS growth", 0.85),
    Target("zhooks-1", "zero1", "peak RSS growth", 1.0),
)


def ratio(trials: Iterable[Done], driver: str, against: str, quantity: str) -> Ratio | None:
    """Compare two drivers round by round; a round in which either has no record is left out."""
    read = QUANTITIES[quantity]
    by_round: dict[int, dict[str, float]] = {}
    for trial in trials:
        if trial.record is not None:
            by_round.setdefault(trial.round, {})[trial.driver] = read(trial.record)
    found = [row[driver] / row[against] for row in by_round.values() if driver in row and against in row]
    return Ratio(statistics.median(found), min(found), max(found)) if found else None


def verdicts(trials: list[Done]) -> list[Verdict]:
    """Every target whose driver took part."""
    present = {trial.driver for trial in trials}
    return [
        Verdict(target, ratio(trials, target.driver, target.against, target.quantity))
        for target in TARGETS
        if target.driver in present
    ]


def summary(trials: list[Done], driver: str) -> dict[str, Any] | None:
    """One row of the table as numbers, medians over the rounds that have a record; None if none has."""
    records = [trial.record for trial in trials if trial.driver == driver and trial.record is not None]
    if not records:
        return None
    parts = {key: statistics.median(r["median_s"][key] for r in records) * 1e3 for key in records[0]["median_s"]}
    step, rss = (ratio(trials, driver, BASELINE, quantity) for quantity in QUANTITIES)
    return {
        "driver": driver,
        "rounds": len(records),
        "step_ms": parts["total_s"],
        "forward_ms": parts["forward_s"],
        "backward_ms": parts["backward_s"],
        "optimizer_ms": parts["update_s"],
        "step_ratio": asdict(step) if step else None,
        "rss_growth_nbytes": statistics.median(r["rss_growth_nbytes"] for r in records),
        "rss_ratio": asdict(rss) if rss else None,
        "wire_nbytes": statistics.median(wire_nbytes(r) for r in records),
        "final_loss": records[-1]["losses"][-1],
    }


def wire_nbytes(record: dict[str, Any]) -> float:
    """Bytes one rank sent in a step: by c10d's operators, or by zhooks' events where it passed them by."""
    return max(float(record["wire_nbytes"]), float(record.get("event_wire_nbytes", 0.0)))


def as_json(trials: list[Done], missing: list[str]) -> dict[str, Any]:
    """The whole run: every trial, and for each config and dtype the rows and the verdicts that were printed."""
    groups = []
    for (config, dtype), group in grouped(trials).items():
        drivers = list(dict.fromkeys(trial.driver for trial in group))
        rows = [row for driver in drivers if (row := summary(group, driver)) is not None]
        targets = [{**asdict(verdict), "reached": verdict.reached} for verdict in verdicts(group)]
        groups.append({"config": config, "dtype": dtype, "rows": rows, "targets": targets})
    return {"summary": groups, "not_installed": missing, "trials": [asdict(trial) for trial in trials]}


def grouped(trials: list[Done]) -> dict[tuple[str, str], list[Done]]:
    """Trials by (config, dtype), in the order they were run."""
    groups: dict[tuple[str, str], list[Done]] = {}
    for trial in trials:
        groups.setdefault((trial.config, trial.dtype), []).append(trial)
    return groups


def print_run(console: Console, trials: list[Done], drivers: list[str], missing: list[str]) -> None:
    """All tables of a run, each followed by its targets and by what failed."""
    for (config, dtype), group in grouped(trials).items():
        console.print(peers_table(f"{config} {dtype}", group, drivers, missing))
        if found := verdicts(group):
            console.print(targets_table(found))
        print_failures(console, group)
    if any(trial.record is not None and not trial.record["rss_peak_restarted"] for trial in trials):
        console.print("The kernel did not restart its peak counter: RSS growth includes building the model.")


def peers_table(title: str, trials: list[Done], drivers: list[str], missing: list[str]) -> Table:
    """One row a driver, those that failed or are not installed included."""
    # Fits 80 columns whole: cells never wrap, headings do where they say so.
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("driver", no_wrap=True)
    times_base = f"x\n{BASELINE}"
    for heading in ("step\nms", times_base, "fwd/bwd/opt\nms", "RSS\nMB", times_base, "wire\nMB", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for driver in drivers:
        row = summary(trials, driver)
        if row is None:
            table.add_row(driver, "not installed" if driver in missing else "[red]failed[/red]")
            continue
        step, rss = row["step_ratio"], row["rss_ratio"]
        table.add_row(
            driver,
            f"{row['step_ms']:.0f}",
            f"{step['median']:.2f}" if step else "",
            f"{row['forward_ms']:.0f}/{row['backward_ms']:.0f}/{row['optimizer_ms']:.0f}",
            f"{row['rss_growth_nbytes'] / MB:.0f}",
            f"{rss['median']:.2f}" if rss else "",
            f"{row['wire_nbytes'] / MB:.1f}",
            f"{row['final_loss']:.6f}",
        )
    return table


def targets_table(found: list[Verdict]) -> Table:
    """One row a target, with the ratio that was measured."""
    table = Table(title="targets", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("driver", "against", "quantity"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ratio", "range", "at most", ""):
        table.add_column(heading, justify="right")
    words = {True: "[green]reached[/green]", False: "[red]missed[/red]", None: "not measured"}
    for verdict in found:
        target, seen = verdict.target, verdict.ratio
        median = f"{seen.median:.3f}" if seen else ""
        spread = f"{seen.lowest:.2f}-{seen.highest:.2f}" if seen else ""
        limit = f"{target.at_most:.2f}"
        table.add_row(target.driver, target.against, target.quantity, median, spread, limit, words[verdict.reached])
    return table


def print_failures(console: Console, trials: list[Done]) -> None:
    """The error line of every trial that has one, aborts after a printed record included."""
    for trial in trials:
        if trial.error is not None:
            line = f"{trial.driver}, round {trial.round + 1}: {trial.error}"
            console.print(line, style="red", markup=False, soft_wrap=True)
