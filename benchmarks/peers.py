"""The command that compares: every driver on the same work, interleaved round by round in one run.

A person runs it: `python benchmarks/peers.py --config small,tiny --dtype fp32,bf16 --save`. It never measures
in its own process, and a driver that fails or is not installed is shown, not dropped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import report
import results
import workload
from drivers import DRIVERS
from launch import HERE, torchrun


def main(arguments: argparse.Namespace) -> None:
    """Run all trials, print the tables, write the JSON; an interrupted run still reports what it has."""
    console = Console()
    missing = [name for name in arguments.drivers if not installed(name)]
    trials: list[report.Done] = []
    try:
        run_all(arguments, [name for name in arguments.drivers if name not in missing], trials, console)
    except KeyboardInterrupt:
        console.print("Interrupted; what follows is what had been measured.", style="yellow")
    report.print_run(console, trials, arguments.drivers, missing)
    for name in missing:
        console.print(f"{name}: not installed ({', '.join(DRIVERS[name].needs)})", style="yellow")
    document = report.as_json(trials, missing)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"about": results.about(), **document}, indent=1) + "\n")
        console.print(f"Wrote {arguments.json}.")
    if arguments.save:
        # Without the trials, which are many times as long; every ratio has its range over the rounds.
        del document["trials"]
        console.print(f"Wrote {results.save('peers', document)}; python benchmarks/tables.py makes the tables of it.")


def run_all(arguments: argparse.Namespace, names: list[str], trials: list[report.Done], console: Console) -> None:
    """Append a trial for every (config, dtype, round, driver); progress shows which one is running."""
    plan = list(planned(arguments, names))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(plan))
        for config, dtype, round_, name in plan:
            progress.update(task, description=f"{config} {dtype}, round {round_ + 1}: {name}")
            trial = run_one(arguments, config, dtype, round_, name)
            trials.append(trial)
            progress.advance(task)
            if trial.error is not None:
                where = f"{config} {dtype}, round {round_ + 1}, {name}"
                progress.console.print(f"{where}: {trial.error}", style="red", markup=False, soft_wrap=True)


def planned(arguments: argparse.Namespace, names: list[str]) -> Iterator[tuple[str, str, int, str]]:
    """The order of the trials.

    All drivers run in every round, so a slow spell of the machine hits neighbours alike; the order is turned by one
    place each round, so that no driver always runs after the same one.
    """
    for config in arguments.config:
        for dtype in arguments.dtype:
            for round_ in range(arguments.rounds):
                first = round_ % max(1, len(names))
                for name in names[first:] + names[:first]:
                    yield config, dtype, round_, name


def run_one(arguments: argparse.Namespace, config: str, dtype: str, round_: int, name: str) -> report.Done:
    """One driver in processes of its own, so that no peer inherits another's heap or threads."""
    options = {"driver": name, "config": config, "dtype": dtype, "steps": arguments.steps}
    outcome = torchrun(
        "worker.py",
        [f"--{key}={value}" for key, value in options.items()] + [f"--global-ranks={arguments.ranks}"],
        processes=1 if DRIVERS[name].alone else arguments.ranks,
        timeout_s=arguments.timeout,
    )
    return report.Done(round_, name, config, dtype, outcome.record, outcome.error)


def installed(name: str) -> bool:
    """Whether what a driver needs can be imported; the project itself is found beside this directory."""
    roots = {module.partition(".")[0] for module in DRIVERS[name].needs}
    return all(importlib.util.find_spec(root) is not None or (HERE.parent / root).is_dir() for root in roots)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare zhooks with its peers on one workload.")
    parser.add_argument("--config", type=listed(workload.SHAPES), default=["tiny"], help="comma-separated shapes")
    parser.add_argument("--dtype", type=listed(["fp32", "bf16"]), default=["fp32"], help="fp32, bf16 or both")
    parser.add_argument("--drivers", type=listed(DRIVERS), default=list(DRIVERS), help="comma-separated; default: all")
    parser.add_argument("--rounds", type=positive, default=3, help="times every driver is run")
    parser.add_argument("--steps", type=positive, default=8, help="timed steps of a trial")
    parser.add_argument("--ranks", type=positive, default=2, help="processes of a trial")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a trial is ended")
    parser.add_argument("--json", type=Path, help="file to write every trial and the summary to")
    parser.add_argument("--save", action="store_true", help="keep the summary in benchmarks/results/peers.json")
    return parser.parse_args()


def listed(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated choice out of `known`, without repetitions."""
    choices = list(known)

    def choose(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        unknown = [name for name in names if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(choices)}")
        return names

    return choose


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


if __name__ == "__main__":
    main(parse())
