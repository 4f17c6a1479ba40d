"""Owns ``zprof check``: holds the measures of a run against limits, and says so to people, programs and CI.

`zprof.cli` hangs it in. It never calls a limit kept that the recording cannot judge: such a limit fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zprof.analysis.coverage import Unseen
from zprof.analysis.limits import Comparison, Limit, parse_limit, shown
from zprof.commands.naming import named_or_latest
from zprof.problem import BudgetProblem, Problem

if TYPE_CHECKING:
    from zprof.analysis.measured import Measured
    from zprof.analysis.measures import Value

__all__ = ["absent", "check", "junit", "not_seen", "printable", "values_as_json"]

#: What XML 1.0 cannot hold, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One limit and one rank's value; a value that was not seen keeps no limit."""

    run: Measured
    limit: Limit
    value: Value

    @property
    def failed(self) -> bool:
        return isinstance(self.value, Unseen) or self.limit.broken(self.value)

    @property
    def line(self) -> str:
        measure, bound = self.limit.measure, "at most" if self.limit.fails == ">" else "at least"
        kept = "FAILED" if self.failed else "ok"
        limit = shown(self.limit.amount, measure.unit)
        if isinstance(self.value, Unseen):
            return f"{printable(self.run.path)}: {kept}: {not_seen(measure.name, self.value)}; asked for {bound} {limit}"
        found = shown(self.value, measure.unit) + (" (predicted)" if self.run.simulated else "")
        # Rounded they may look alike.
        alike = self.failed and shown(self.value, measure.unit) == limit
        exactly = f" ({self.value:.12g} to {self.limit.amount:.12g})" if alike else ""
        return f"{printable(self.run.path)}: {kept}: {measure.name} is {found}, {bound} {limit}{exactly}"


def _limits(fails: Comparison) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], tuple[Limit, ...]]:
    def parsed(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Limit, ...]:
        return tuple(parse_limit(value, fails) for value in values)

    return parsed


def _listed(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from zprof.analysis.measures import MEASURES

        for measure in MEASURES.values():
            click.echo(f"{measure.name:32} {measure.unit:8} {measure.meaning}")
        ctx.exit()


@click.command()
@named_or_latest("runs")
@click.option("--max", "most", multiple=True, callback=_limits(">"), metavar="NAME=VALUE", help="Fail above it; repeatable.")
@click.option("--min", "least", multiple=True, callback=_limits("<"), metavar="NAME=VALUE", help="Fail below it; repeatable.")
@click.option("--junit", "report", type=click.Path(), metavar="FILE", help="Also write the verdicts as JUnit XML.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--measures", is_flag=True, is_eager=True, expose_value=False, callback=_listed, help="List all measures."
)
def check(runs: tuple[str, ...], most: tuple[Limit, ...], least: tuple[Limit, ...], report: str | None, as_json: bool) -> None:
    """Compare RUN... with limits; exit code 3 if one is exceeded.

    A RUN is a trace, or a folder with one trace per rank; by default the newest run in this folder. Every rank must keep
    every limit. A limit on something that was not recorded fails, and says what would record it, usually --level alloc.
    Without limits, the measures are printed. Values take units: 38GiB, 512MB, 1.5s, 40%, 3GiB/s. If all limits hold but part
    of a trace cannot be read, the exit code is 1.

    \b
    zprof check run.zprof --max device.peak=38GiB --max step.p95_ms=250ms --junit zprof.xml

    \b
    JSON: runs[] path rank simulated damage measures{} unseen{}; limits[] path rank measure
    unit bound limit value why ok. What was not recorded is null; unseen has
    the reason, by measure.
    """
    from zprof.analysis.measured import measured

    found = measured(runs)
    verdicts = [Verdict(run, limit, run.values[limit.measure.name]) for run in found for limit in (*most, *least)]
    if report is not None:
        _write(Path(report), junit(found, verdicts), found)
    if as_json:
        click.echo(json.dumps(_as_json(found, verdicts), indent=2, allow_nan=False))
    else:
        _show(found, verdicts)
    if any(verdict.failed for verdict in verdicts):
        raise click.exceptions.Exit(BudgetProblem.exit_code)
    if verdicts and any(run.damage for run in found):
        # What cannot be read may hold the very moment that breaks a limit.
        raise click.exceptions.Exit(Problem.exit_code)


def not_seen(name: str, unseen: Unseen) -> str:
    """What is said of a measure that a recording does not hold."""
    return f"{name} is absent: {printable(unseen.why)}"


def printable(text: str) -> str:
    """Text of others without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def absent(values: Mapping[str, Value]) -> dict[str, list[str]]:
    """Why measures were not seen -> their names."""
    found: dict[str, list[str]] = {}
    for name, value in values.items():
        if isinstance(value, Unseen):
            found.setdefault(value.why, []).append(name)
    return found


def values_as_json(run: Measured) -> dict[str, object]:
    """The measures of a run, null where they were not seen, and why they were not."""
    unseen = {name: value.why for name, value in run.values.items() if isinstance(value, Unseen)}
    return {"measures": {name: None if name in unseen else value for name, value in run.values.items()}, "unseen": unseen}


def _show(found: Sequence[Measured], verdicts: Sequence[Verdict]) -> None:
    from zprof.analysis.measures import MEASURES, numbers

    for run in found:
        if run.damage:
            click.echo(f"{printable(run.path)}: {printable(run.damage)}", err=True)
    if verdicts:
        for verdict in sorted(verdicts, key=lambda verdict: not verdict.failed):
            click.echo(verdict.line)
        return
    for run in found:
        predicted = f", predicted for {printable(run.simulated)} x {run.world}" if run.simulated else ""
        click.echo(f"{printable(run.path)}, rank {run.rank}{predicted}:")
        for name, value in numbers(run.values).items():
            click.echo(f"  {name:32} {shown(value, MEASURES[name].unit)}")
        for why, names in absent(run.values).items():
            click.echo(f"  absent: {', '.join(names)}: {printable(why)}")


def _as_json(found: Sequence[Measured], verdicts: Sequence[Verdict]) -> dict[str, object]:
    return {
        "ok": not any(verdict.failed for verdict in verdicts) and not (verdicts and any(run.damage for run in found)),
        "runs": [
            {"path": run.path, "rank": run.rank, "simulated": run.simulated or None, "damage": run.damage or None}
            | values_as_json(run)
            for run in found
        ],
        "limits": [
            {
                "path": verdict.run.path,
                "rank": verdict.run.rank,
                "measure": verdict.limit.measure.name,
                "unit": verdict.limit.measure.unit,
                "bound": "max" if verdict.limit.fails == ">" else "min",
                "limit": verdict.limit.amount,
                "value": None if isinstance(verdict.value, Unseen) else verdict.value,
                "why": verdict.value.why if isinstance(verdict.value, Unseen) else None,
                "ok": not verdict.failed,
            }
            for verdict in verdicts
        ],
    }


def junit(found: Sequence[Measured], verdicts: Sequence[Verdict]) -> bytes:
    """The verdicts as JUnit XML: a test case for each limit and rank, and an error for each trace that is not whole."""
    from xml.etree import ElementTree

    damaged = [run for run in found if run.damage]
    failures = sum(verdict.failed for verdict in verdicts)
    counts = {"tests": len(verdicts) + len(damaged), "failures": failures, "errors": len(damaged), "skipped": 0, "time": 0}
    texts = {name: str(count) for name, count in counts.items()}
    suites = ElementTree.Element("testsuites", texts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "zprof check", **texts})

    def case(run: Measured, name: str, outcome: str, line: str) -> None:
        names = {"classname": _allowed(run.path), "name": _allowed(f"{name} on rank {run.rank}"), "time": "0"}
        element = ElementTree.SubElement(suite, "testcase", names)
        if outcome:
            ElementTree.SubElement(element, outcome, {"message": _allowed(line), "type": "zprof"}).text = _allowed(line)

    for verdict in verdicts:
        bound = "max" if verdict.limit.fails == ">" else "min"
        case(verdict.run, f"{bound} {verdict.limit.text}", "failure" if verdict.failed else "", verdict.line)
    for run in damaged:
        case(run, "recording is complete", "error", run.damage)
    text: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return text


def _allowed(text: str) -> str:
    return _FORBIDDEN.sub("", text)


def _write(path: Path, body: bytes, found: Sequence[Measured]) -> None:
    import os

    from zprof.commands.output import write_output

    if any(os.path.realpath(path) == os.path.realpath(run.path) for run in found):
        raise Problem(f"{path}: is the run to check; name another file with --junit")
    write_output(path, body)
