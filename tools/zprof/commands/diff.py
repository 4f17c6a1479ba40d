"""Owns ``zprof diff``: what changed from one run to another, by measure, category and unit, and whether that is too much.

`zprof.cli` hangs it in. It compares rank with rank and shows the worst; it never averages ranks.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from zprof.analysis.coverage import Unseen
from zprof.analysis.limits import Limit, parse_change, percent, shown, shown_change
from zprof.commands.check import not_seen, printable, values_as_json
from zprof.problem import BudgetProblem, Problem
from zprof.rows import TIERS

if TYPE_CHECKING:
    from rich.table import Table

    from zprof.analysis.measured import Measured
    from zprof.analysis.measures import Value

__all__ = ["as_json", "compared", "diff", "show"]

_MOST_NAMES = 12
#: Why bytes of two recordings are not set against each other.
_APART = "recorded at different levels, so not compared; record both with --level alloc"


@dataclass(frozen=True, slots=True)
class Change:
    """One number before and after, as far as the runs saw it; ``alike`` where both saw the same kind of thing."""

    name: str
    rank: int
    before: Value
    after: Value
    alike: bool = True

    @property
    def change(self) -> tuple[float, float] | None:
        """Both numbers, where they can be compared."""
        if isinstance(self.before, Unseen) or isinstance(self.after, Unseen) or not self.alike:
            return None
        return self.before, self.after

    @property
    def percent(self) -> float:
        return percent(*self.change) if self.change is not None else 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """The same rank of both runs."""

    before: Measured
    after: Measured

    def alike(self, name: str) -> bool:
        """Whether both saw the same kind of thing under a name of a measure, or of a tier."""
        tier = name.partition(".")[0]
        return tier not in TIERS or self.before.covered.scope(tier) == self.after.covered.scope(tier)

    def change(self, name: str) -> Change:
        """Of a measure."""
        return Change(name, self.after.rank, self.before.values[name], self.after.values[name], self.alike(name))


def _expressions(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Limit, ...]:
    return tuple(parse_change(value) for value in values)


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--fail-on",
    "limits",
    multiple=True,
    callback=_expressions,
    metavar="EXPRESSION",
    help="Exit with 3 if it is true, e.g. 'device.peak>+2%'; repeatable.",
)
@click.option("--json", "want_json", is_flag=True, help="Print JSON, for programs.")
def diff(a: str, b: str, limits: tuple[Limit, ...], want_json: bool) -> None:
    """Compare run B with run A: two traces, or two folders with one trace per rank.

    An expression with a sign tests the change from A to B: NAME>+2% or NAME>+100MiB, or NAME<-5% for what must not fall.
    Without a sign it tests B alone: NAME>38GiB. With several ranks, each is compared with itself and the worst is shown.
    A trace of `zprof simulate` is compared only over the steps, and its rank with every rank of the run. What only one of
    the runs recorded is not compared, nor are bytes recorded at different levels; a --fail-on about them fails.

    \b
    zprof diff main.zprof branch.zprof --fail-on 'device.peak>+2%' --fail-on 'step.median_ms>+5%'
    zprof diff plan.zprof run.zprof --fail-on 'device.peak>+3%'
    """
    pairs, apart = compared([a], [b])
    broken = [(pair, limit) for limit in limits for pair in pairs if _broken(pair, limit)]
    damaged = [run for pair in pairs for run in (pair.before, pair.after) if run.damage]
    if want_json:
        click.echo(json.dumps(as_json(pairs, apart, broken), indent=2, allow_nan=False))
    else:
        show(a, b, pairs, apart)
        for pair, limit in broken:
            click.echo(_failure(pair, limit), err=True)
    if broken:
        raise click.exceptions.Exit(BudgetProblem.exit_code)
    if limits and damaged:
        # What cannot be read may hold the very moment that breaks a limit.
        raise click.exceptions.Exit(Problem.exit_code)


def compared(before: Sequence[str], after: Sequence[str]) -> tuple[list[Pair], list[str]]:
    """Each rank of both runs, files or folders, and lines for what only one has.

    Raises:
        Problem: they have no rank in common.  TraceError: a file is no trace.
    """
    from zprof.analysis.measured import measured, simulated

    # What a simulation leaves out, building the model, must not count in the run beside it.
    mixed = len({simulated(run) for run in (*before, *after)}) > 1
    return _pairs(measured(before, steps_only=mixed), measured(after, steps_only=mixed))


def _pairs(before: Sequence[Measured], after: Sequence[Measured]) -> tuple[list[Pair], list[str]]:
    if before[0].simulated or after[0].simulated:
        # One simulated rank stands for all.
        short, long = sorted((before, after), key=len)
        if len(short) == 1 and short[0].simulated:
            pairs = [Pair(run, short[0]) if short is after else Pair(short[0], run) for run in long]
            one, other = pairs[0].before, pairs[0].after
            said = f"{printable(one.path)} is of {one.world} ranks, {printable(other.path)} of {other.world}: not of one job"
            return pairs, [said] if one.world != other.world else []
    if len(before) == len(after) == 1:
        # Two files are compared whatever ranks they are of.
        return [Pair(before[0], after[0])], []
    others = {run.rank: run for run in after}
    pairs = [Pair(run, others[run.rank]) for run in before if run.rank in others]
    if not pairs:
        path = printable(after[0].path)
        raise Problem(f"{path}: expected a rank that the other run has too, found none; compare runs of one job")
    both = {pair.before.rank for pair in pairs}
    lines = [f"rank {run.rank} vanished" for run in before if run.rank not in both]
    return pairs, lines + [f"rank {run.rank} appeared" for run in after if run.rank not in both]


def _broken(pair: Pair, limit: Limit) -> bool:
    """What was not seen, or not by both alike where a change is asked about, fails."""
    change = pair.change(limit.measure.name)
    if limit.kind == "value":
        return isinstance(change.after, Unseen) or limit.broken(change.after)
    return change.change is None or limit.broken(change.change[1], change.change[0])


def _failure(pair: Pair, limit: Limit) -> str:
    measure = limit.measure
    change = pair.change(measure.name)
    for run, value in ((pair.after, change.after), (pair.before, change.before)):
        if isinstance(value, Unseen) and (limit.kind != "value" or run is pair.after):
            return f"{printable(run.path)}: FAILED: {limit.text}: {not_seen(measure.name, value)}"
    assert not isinstance(change.after, Unseen)
    said = f"{printable(pair.after.path)}: FAILED: {limit.text}: {measure.name} is {shown(change.after, measure.unit)}"
    if change.change is None:
        return said if limit.kind == "value" else f"{said}: {_APART}"
    before, after = change.change
    return f"{said}, was {shown(before, measure.unit)} ({shown_change(before, after, measure.unit)}{_percent(before, after)})"


def _percent(before: float, after: float) -> str:
    change = percent(before, after)
    return f", {change:+.3g}%" if math.isfinite(change) else ""


def _changes(pairs: Sequence[Pair]) -> list[Change]:
    """Of every measure that changed the rank where it changed for the worst, in the order of the measures."""
    from zprof.analysis.measures import MEASURES

    found = []
    for measure in MEASURES.values():
        mine = [change for pair in pairs if (change := pair.change(measure.name)).before != change.after]
        # Why a measure is absent may differ; it is absent from both.
        mine = [change for change in mine if not (isinstance(change.before, Unseen) and isinstance(change.after, Unseen))]
        if mine:
            sign = {"more": 1, "less": -1, "": 0}[measure.worse]
            found.append(max(mine, key=lambda change: change.percent * sign if sign else abs(change.percent)))
    return found


def _held(pairs: Sequence[Pair], by: str) -> list[Change]:
    """Categories or units whose bytes at the tier's peak changed, on the rank where they grew most, that growth first.

    Only of tiers on which both runs saw the same kind of bytes: there what one does not name, it did not hold.
    """
    names = {name for pair in pairs for name in (*pair.before.held[by], *pair.after.held[by])}
    found = []
    for name in sorted(names):
        alike = [pair for pair in pairs if pair.alike(name[1])]
        if not alike:
            continue
        mine = [
            Change(f"{name[0]} on {name[1]}", pair.after.rank, _level(pair.before, by, name), _level(pair.after, by, name))
            for pair in alike
        ]
        found.append(max(mine, key=_growth))
    return sorted((change for change in found if _growth(change)), key=_growth, reverse=True)


def _operators(pairs: Sequence[Pair]) -> list[tuple[str, int, tuple[float, float], tuple[float, float]]]:
    """(operator, rank, (ns, calls) before, after) of each whose time of a step changed, on the rank where it grew most, those
    that changed most first; of ranks on which both runs recorded them."""
    found: dict[str, tuple[str, int, tuple[float, float], tuple[float, float]]] = {}
    for pair in pairs:
        before, after = pair.before.ops, pair.after.ops
        for name in {*before, *after} if before and after else ():
            each = (name, pair.after.rank, before.get(name, (0.0, 0.0)), after.get(name, (0.0, 0.0)))
            known = found.get(name)
            if each[2] != each[3] and (known is None or each[3][0] - each[2][0] > known[3][0] - known[2][0]):
                found[name] = each
    return sorted(found.values(), key=lambda each: (-abs(each[3][0] - each[2][0]), each[0]))


def _level(run: Measured, by: str, name: tuple[str, str]) -> Value:
    unseen = run.covered.place(*name) if by == "category" else None
    return unseen or float(run.held[by].get(name, 0))


def _growth(change: Change) -> float:
    return 0.0 if change.change is None else change.change[1] - change.change[0]


def _not_compared(pairs: Sequence[Pair]) -> list[str]:
    """A line where bytes were not compared."""
    tiers = [tier for tier in TIERS if not all(pair.alike(tier) for pair in pairs)]
    return [f"held on {', '.join(tiers)}: {_APART}"] if tiers else []


def _named(pairs: Sequence[Pair]) -> tuple[list[str], list[str]]:
    """Units that only the second, and only the first run has."""
    before = {name for pair in pairs for name in pair.before.names}
    after = {name for pair in pairs for name in pair.after.names}
    return sorted(after - before), sorted(before - after)


def _label(path: str, runs: Sequence[Measured], *, told: bool) -> str:
    """A column's heading: which is predicted, where one is."""
    return f"{path} ({'predicted' if runs[0].simulated else 'measured'})" if told else path


def show(a: str, b: str, pairs: Sequence[Pair], apart: Sequence[str]) -> None:
    """Print what differs, in a table with a column for each."""
    from rich.console import Console

    before, after = [pair.before for pair in pairs], [pair.after for pair in pairs]
    told = bool(before[0].simulated or after[0].simulated)
    a, b = _label(a, before, told=told), _label(b, after, told=told)
    for run in (run for pair in pairs for run in (pair.before, pair.after) if run.damage):
        click.echo(f"{printable(run.path)}: {printable(run.damage)}", err=True)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    changes = _changes(pairs)
    ranks = len(pairs) > 1
    if not changes:
        click.echo("no measure changed")
    else:
        console.print(_table(("measure", a, b), changes, ranks=ranks))
    for by in ("category", "unit"):
        held = _held(pairs, by)
        if held:
            console.print(_table((f"held at the peak, by {by}", a, b), held[:_MOST_NAMES], ranks=ranks))
        if len(held) > _MOST_NAMES:
            click.echo(f"and {len(held) - _MOST_NAMES} more; --json has all")
    ops = _operators(pairs)
    if ops:
        console.print(_operators_table(("time of a step, by operator", a, b), ops[:_MOST_NAMES], ranks=ranks))
    if len(ops) > _MOST_NAMES:
        click.echo(f"and {len(ops) - _MOST_NAMES} more; --json has all")
    for word, names in zip(("appeared", "vanished"), _named(pairs), strict=True):
        if names:
            more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            click.echo(f"units that {word}: {', '.join(map(printable, names[:_MOST_NAMES]))}{more}")
    for line in (*apart, *_not_compared(pairs), *_absent(pairs)):
        click.echo(line)


def _absent(pairs: Sequence[Pair]) -> list[str]:
    """Why measures that one of two runs has are absent from the other, a line for each reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name in (change.name for change in _changes(pairs)):
        for pair in pairs:
            for run in (pair.before, pair.after):
                value = run.values[name]
                names = reasons.setdefault((run.path, value.why), []) if isinstance(value, Unseen) else None
                if names is not None and name not in names:
                    names.append(name)
    return [f"absent from {printable(path)}: {', '.join(names)}: {printable(why)}" for (path, why), names in reasons.items()]


def _table(headings: tuple[str, str, str], changes: Sequence[Change], *, ranks: bool) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from zprof.analysis.measures import MEASURES

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(Text(printable(headings[0])), no_wrap=True)
    for heading in (*headings[1:], "change", "percent", *(("worst rank",) if ranks else ())):
        table.add_column(Text(printable(heading)), justify="right")
    for change in changes:
        measure = MEASURES.get(change.name)
        unit, worse = (measure.unit, measure.worse) if measure else ("bytes", "more")
        cells = ["absent" if isinstance(value, Unseen) else shown(value, unit) for value in (change.before, change.after)]
        style = ""
        if change.change is None:
            cells += ["", ""]
        else:
            before, after = change.change
            cells += [shown_change(before, after, unit), _percent(before, after).removeprefix(", ")]
            if worse:
                style = "red" if (after > before) == (worse == "more") else "green"
        texts = [Text(printable(cell), style=style if place >= 2 else "") for place, cell in enumerate(cells)]
        table.add_row(Text(printable(change.name)), *texts, *((str(change.rank),) if ranks else ()))
    return table


def _operators_table(
    headings: tuple[str, str, str],
    found: Sequence[tuple[str, int, tuple[float, float], tuple[float, float]]],
    *,
    ranks: bool,
) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(Text(printable(headings[0])), no_wrap=True)
    for heading in (*headings[1:], "change", "percent", "calls", *(("worst rank",) if ranks else ())):
        table.add_column(Text(printable(heading)), justify="right")
    for name, rank, (before, many), (after, now) in found:
        cells = [shown(before / 1e6, "ms"), shown(after / 1e6, "ms"), shown_change(before / 1e6, after / 1e6, "ms")]
        cells += [_percent(before, after).removeprefix(", "), f"{many:.3g}" + ("" if now == many else f" to {now:.3g}")]
        table.add_row(*(Text(printable(cell)) for cell in (name, *cells, *((str(rank),) if ranks else ()))))
    return table


def as_json(pairs: Sequence[Pair], apart: Sequence[str], broken: Sequence[tuple[Pair, Limit]]) -> dict[str, object]:
    """What `show` prints, for programs."""
    appeared, vanished = _named(pairs)
    return {
        "ok": not broken,
        "ranks": [
            {
                "rank": pair.after.rank,
                "a": _side(pair.before),
                "b": _side(pair.after),
            }
            for pair in pairs
        ],
        "changed": [_change_json(change) for change in _changes(pairs)],
        "held_at_peak": {by: [_change_json(change) for change in _held(pairs, by)] for by in ("category", "unit")},
        "operators": [
            {"name": name, "rank": rank, "a_ns": before[0], "b_ns": after[0], "a_calls": before[1], "b_calls": after[1]}
            for name, rank, before, after in _operators(pairs)
        ],
        "units": {"appeared": appeared, "vanished": vanished},
        "only_in_one": list(apart),
        "not_compared": _not_compared(pairs),
        "failed": [
            {"expression": limit.text, "measure": limit.measure.name, "rank": pair.after.rank, "line": _failure(pair, limit)}
            for pair, limit in broken
        ],
    }


def _side(run: Measured) -> dict[str, object]:
    return {"path": run.path, "simulated": run.simulated or None, "damage": run.damage or None} | values_as_json(run)


def _change_json(change: Change) -> dict[str, object]:
    known = change.change is not None and math.isfinite(change.percent)
    before, after = (None if isinstance(value, Unseen) else value for value in (change.before, change.after))
    return {
        "name": change.name,
        "rank": change.rank,
        "a": before,
        "b": after,
        "percent": change.percent if known else None,
    }
