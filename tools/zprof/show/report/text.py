"""Owns the text of `zprof report`: sections for people, drawn from the same values that programs get as JSON.

`zprof.commands.report` calls `show`. It finds out nothing, and treats every name in a trace as data: nothing in one can move a
cursor or change a colour.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offload.text import as_duration, as_moment, as_size, counted, plural
from zprof.analysis.coverage import NOT_MEASURED
from zprof.analysis.outliers import MANY
from zprof.analysis.remainder import WITH_PARTS
from zprof.show.report.children import children_lines, children_rows, recorded_rows
from zprof.show.report.compute import compute_lines
from zprof.show.report.large_batch import advised
from zprof.show.report.loading import loading_line, loading_rows
from zprof.show.report.operators import operators_section
from zprof.show.report.ranks import ranks_lines, ranks_table
from zprof.show.report.summary import foremost, slowest

__all__ = ["doubts", "left_out", "not_recorded", "plain", "show", "sized"]

Run = Mapping[str, Any]

_BAR = 24
_MOST_GROUPS = 24
_MOST_HOLDERS = 8
_MOST_WAITS = 8
_MOST_GROWN = 8
_MOST_CALLERS = 3
_MOST_RECORDED = 16
_MOST_OPERATORS = 12
#: Files that are named for one reason, and reasons why files are left out.
_MOST_FILES = 4
_MOST_UNREADABLE = 8
#: Where a file is damaged, which is a place of its own in each.
_AT_BYTE = re.compile(r" at byte \d+")


def show(report: Mapping[str, Any], *, top: int | None = None) -> None:
    """Print the report; ``top`` is the rows of each table, by default what fits a screen."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, soft_wrap=True, width=120)
    run = foremost(report["runs"])
    for line in _heading(report, run):
        console.print(line)
    _section(console, f"in short{' (predicted)' if run['simulated'] else ''}", list(_short(report["summary"])))
    many = len(report["runs"]) > MANY
    if many:
        _ranks(console, report, run, top)
    mark = "\N{FULL BLOCK}" if console.encoding.startswith("utf") else "#"
    held = _held(report, run, mark, top or _MOST_GROUPS)
    _section(console, f"{_when(report)}{' (predicted)' if run['simulated'] else ''}", held)
    if report["by"] not in ("module", "unit"):
        _section(console, "most held by", _holders(run, top or _MOST_HOLDERS))
    _section(console, "grew from step to step", _grown(run, top or _MOST_GROWN))
    _section(console, "residual states", _residual(run))
    if not run["simulated"]:
        # There is no process that could say more than the ledger.
        _section(console, "reconciliation", _reconciled(run))
        _section(console, "child processes", _children(run))
        _section(console, "children that were recorded", _recorded(run, top or _MOST_RECORDED))
    predicted = " (predicted)" if run["simulated"] else ""
    _section(console, f"time{predicted}", _times(run, top or _MOST_WAITS))
    _section(console, "data loading", _loading(run, top or _MOST_WAITS))
    _section(console, f"bandwidth{predicted}", _rates(run))
    _section(console, "compute", compute_lines(run, top or _MOST_GROWN))
    _section(console, *operators_section(run, top or _MOST_OPERATORS))
    _section(console, "large batch", list(_growing(run)))
    if report["ranks"] and not many:
        _ranks(console, report, run, top)
    if run["oom"]:
        _section(console, "out of memory", [Text(plain(line)) for line in run["oom"]["lines"]])
    _section(console, "not recorded", [Text(plain(line)) for line in not_recorded(report["runs"])])
    _section(console, "the recording", [Text(line) for line in doubts(report)])
    _section(console, "next", [Text(f"{plain(each['do'])}\n    {plain(each['why'])}") for each in report["next"]])


def _ranks(console: Console, report: Mapping[str, Any], run: Run, top: int | None) -> None:
    lines = ranks_lines(report["ranks"], top, simulated=bool(run["simulated"]))
    _section(console, "ranks", [*ranks_table(report, top), *lines])


def plain(text: object) -> str:
    """A name as it can be shown: what cannot be printed is replaced, for it might steer a terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(text))


def sized(nbytes: int) -> str:
    """Bytes for a reader."""
    return f"-{as_size(-nbytes)}" if nbytes < 0 else as_size(nbytes)


def _section(console: Console, heading: str, parts: Sequence[Any]) -> None:
    if parts:
        console.print()
        console.print(Text(heading, style="bold"))
        for part in parts:
            console.print(part)


def not_recorded(runs: Sequence[Run]) -> list[str]:
    """What no figure above includes; of several ranks each line once."""
    lines: dict[str, list[int]] = {}
    for run in runs:
        for line in run["not_recorded"]:
            lines.setdefault(line, []).append(run["rank"])
    return [
        line if len(ranks) == len(runs) else f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks[:8]))}: {line}"
        for line, ranks in lines.items()
    ]


def _short(findings: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    width = max(len(each["about"]) for each in findings)
    for each in findings:
        yield Text(plain(f"{each['about']:<{width}}  {each['figure']}: {each['what']}"))
        if each["remedy"]:
            yield Text(plain(f"{'':<{width}}  remedy: {each['remedy']}"))


def _heading(report: Mapping[str, Any], run: Run) -> Iterator[Text]:
    many = len(report["runs"]) > 1
    yield Text(plain(" ".join(run["argv"]) or "(no command)"), style="bold")
    where = f"rank {run['rank']} of {run['world']}, {run['host']}, {run['device']}"
    steps = run["steps"]["count"]
    took = f"{as_duration(run['duration_s'] * 1e9)}, {counted(steps, 'step') if steps else 'no optimizer step'}"
    chosen = f" ({run['level_chosen']})" if run["level_chosen"] else ""
    yield Text(plain(f"{where}; level {run['level']}{chosen}; {took}; {run['rows']:,} rows; {run['file']}"))
    if many:
        why = "which ran out of memory" if run["oom"] else "whose device holds most"
        yield Text(f"{len(report['runs'])} ranks; shown in full is rank {run['rank']}, {why}")


def _when(report: Mapping[str, Any]) -> str:
    by = report["by"]
    if report["at"] == "peak":
        return f"held at the peak, by {by}"
    part = " (only its update was seen)" if any(run["steps"]["first_unseen"] for run in report["runs"]) else ""
    return f"held at most in step {report['at'][5:]}{part if report['at'] == 'step:0' else ''}, by {by}"


def _table(*columns: tuple[str, str]) -> Table:
    drawing = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading, justify in columns:
        # Where a line is too long names take several, for half of a figure would read as another one.
        drawing.add_column(heading, justify=justify, no_wrap=justify == "right", overflow="fold")  # type: ignore[arg-type]
    return drawing


# Memory.


def _held(report: Mapping[str, Any], run: Run, mark: str, most: int) -> list[Any]:
    if report["by"] == "rank" and len(report["runs"]) > 1:
        runs = report["runs"]
        rows = {f"rank {each['rank']}": {tier: held["bytes"] for tier, held in each["tiers"].items()} for each in runs}
        tiers = list(dict.fromkeys(tier for row in rows.values() for tier in row))
        return [_bars(rows, tiers, mark, most, total=False)] if tiers else [Text(_NOTHING)]
    tiers = list(run["tiers"])
    if not tiers:
        return [Text(_NOTHING)]
    rows = {}
    for tier in tiers:
        for name, nbytes in run["tiers"][tier]["groups"].items():
            rows.setdefault(name, {})[tier] = nbytes
    whole = not any(run["tiers"][tier]["not_recorded"] for tier in tiers)
    moments = (Text(_moment(tier, run["tiers"][tier])) for tier in tiers)
    return [_bars(rows, tiers, mark, most, total=True, whole=whole), *moments]


_NOTHING = "nothing was held that the recording saw"


def _bars(
    rows: Mapping[str, Mapping[str, int]], tiers: Sequence[str], mark: str, most: int, *, total: bool, whole: bool = True
) -> Table:
    drawing = _table(("", "left"), *((tier, "right") for tier in tiers), (f"of {tiers[0]}", "left"))
    ordered = sorted(rows.items(), key=lambda row: tuple(-row[1].get(tier, 0) for tier in tiers))
    top = sum(row.get(tiers[0], 0) for row in rows.values()) if total else max(row.get(tiers[0], 0) for row in rows.values())
    for name, row in ordered[:most]:
        drawing.add_row(Text(plain(name)), *(_amount(row, tier) for tier in tiers), _bar(row.get(tiers[0], 0), top, mark))
    if len(ordered) > most:
        others = {tier: sum(row.get(tier, 0) for _, row in ordered[most:]) for tier in tiers}
        name = f"{len(ordered) - most} more"
        drawing.add_row(name, *(_amount(others, tier) for tier in tiers), _bar(others.get(tiers[0], 0), top, mark))
    if total:
        drawing.add_section()
        heading = "in all" if whole else "recorded"
        drawing.add_row(heading, *(sized(sum(row.get(tier, 0) for row in rows.values())) for tier in tiers), "")
    return drawing


def _amount(row: Mapping[str, int], tier: str) -> str:
    return sized(row[tier]) if row.get(tier) else "-"


def _bar(nbytes: int, top: int, mark: str) -> Text:
    share = nbytes / top if top > 0 else 0.0
    full = max(0, min(_BAR, round(share * _BAR)))
    return Text(f"{share:4.0%} " + mark * full)


def _moment(tier: str, held: Mapping[str, Any]) -> str:
    step = "" if held["step"] is None else f", in step {held['step']}"
    budget = f"; budget {as_size(held['budget_bytes'])}" if held["budget_bytes"] is not None else ""
    peak = f"; the run's peak is {sized(held['peak_bytes'])}" if held["bytes"] < held["peak_bytes"] else ""
    missing = f"; without {', '.join(held['not_recorded'])}" if held["not_recorded"] else ""
    return f"{tier}: {sized(held['bytes'])} at {as_moment(held['at_s'] * 1e9)}{step}{peak}{budget}{missing}"


def _holders(run: Run, most: int) -> list[Any]:
    drawing = _table(("module", "left"), ("tier", "left"), ("bytes", "right"), ("mostly", "left"))
    found = [
        (holder["bytes"], tier, holder) for tier, held in run["tiers"].items() for holder in held["holders"][:most]
    ]
    for nbytes, tier, holder in sorted(found, key=lambda each: -each[0])[:most]:
        mostly = ", ".join(f"{name} {sized(held)}" for name, held in list(holder["categories"].items())[:2])
        drawing.add_row(Text(plain(holder["name"])), tier, sized(nbytes), mostly)
    return [drawing] if found else []


def _grown(run: Run, most: int) -> list[Any]:
    """Leaks, or what is kept on purpose."""
    if not run["growth"]:
        return []
    lines = run["level"] == "stack"
    headings = (("line" if lines else "module", "left"), ("tier", "left"), ("per step", "right"), ("in all", "right"))
    drawing = _table(*headings, ("mostly", "left"), *([("called from", "left")] if lines else []))
    for grown in run["growth"][:most]:
        called = ", ".join(grown["callers"][:_MOST_CALLERS]) + (", ..." if len(grown["callers"]) > _MOST_CALLERS else "")
        amounts = sized(round(grown["per_step"])), sized(grown["nbytes"])
        mostly = Text(f"{grown['category']}, {plain(grown['module'])}")
        callers = [Text(plain(called))] if lines else []
        drawing.add_row(Text(plain(grown["name"])), grown["tier"], *amounts, mostly, *callers)
    first = run["growth"][0]
    told = f"from the end of step {first['first']} to the end of step {first['last']}: a leak, unless it is kept on purpose"
    return [drawing, Text(told if lines else f"{told}; zprof run --level stack shows the lines")]


def _residual(run: Run) -> list[Any]:
    found = run["residual"]
    rows = [row for row in found["rows"] if row["bytes"] is not None or row["formula_bytes"]]
    if not rows:
        return []
    columns = (("", "left"), ("tier", "left"), ("held", "right"), ("run's peak", "right"), ("estimate", "right"))
    drawing = _table(*columns, ("seen by", "left"))
    for row in rows:
        figures = ["-" if row[key] is None else sized(row[key]) for key in ("bytes", "peak_bytes", "formula_bytes")]
        drawing.add_row(Text(plain(row["name"])), row["tier"], *figures, plain(row["seen_by"] or "not seen"))
    lines: list[Any] = [drawing]
    if found["formula"]:
        lines.append(Text(f"estimate of activations (ZeRO paper): {plain(found['formula']['words'])}"))
        if found["formula"]["korthikanti_bytes"] is not None:
            bound = sized(found["formula"]["korthikanti_bytes"])
            lines.append(Text(f"in 16 bits, with dropout, Korthikanti et al. (arXiv:2205.05198) estimate {bound}"))
    if any(row["bytes"] is None and row["name"] == "activations" for row in rows):
        lines.append(Text("activations were not seen: record with --level alloc"))
    return lines


def _reconciled(run: Run) -> list[Any]:
    lines: list[Any] = []
    found = run["reconciliation"]
    for line in found:
        amount = f"{line['name']}{_remaining(line, found[0])}"
        if not line["against_bytes"] and line is not found[0]:
            lines.append(Text(f"{amount}: {line['likely']}"))
            continue
        said = f"{line['said']} {sized(line['said_bytes'])} - {line['against']} {sized(line['against_bytes'])}"
        lines.append(Text(f"{said} = {amount}, at {as_moment(line['at_s'] * 1e9)}\n    likely: {line['likely']}"))
    if not lines:
        lines.append(Text("the process was not sampled near the peak: the ledger cannot be compared with it"))
    if run["rss"]:
        rss = run["rss"]
        most = f"{sized(rss['peak_bytes'])} at most ({as_moment(rss['at_s'] * 1e9)})"
        lines.append(Text(f"rss {sized(rss['start_bytes'])} at the start, {most}"))
    return lines


def _remaining(line: Run, first: Run) -> str:
    """How much a line of the reconciliation is about, and its share of the whole that the first line begins with."""
    whole = first["said_bytes"] if line is first or first["against"] == WITH_PARTS else 0
    too_much = line is first and line["bytes"] < 0
    nbytes = -line["bytes"] if too_much else line["bytes"]
    amount = f"{sized(nbytes)} ({nbytes / whole:.0%})" if whole > 0 else sized(nbytes)
    return f": none; what is known adds up to {amount} more than there is" if too_much else f" {amount}"


def _children(run: Run) -> list[Any]:
    """Host memory that is no part of the ledger, nor of the process."""
    found = run["children"]
    if not found or not found["most"]:
        return []
    drawing = _table(
        ("", "left"), ("at once", "right"), ("held at most", "right"), ("resident", "right"), ("each busy", "right")
    )
    for row in children_rows(found):
        drawing.add_row(*row)
    return [drawing, *(Text(plain(line)) for line in children_lines(found, run["measures"]["shm.peak"]))]


def _recorded(run: Run, most: int) -> list[Any]:
    rows = list(recorded_rows(run["recorded_children"]))
    if not rows:
        return []
    drawing = _table(("", "left"), ("", "left"), ("recorded from", "left"), ("ended", "left"))
    for row in rows[:most]:
        drawing.add_row(*(Text(plain(cell)) for cell in row))
    return [drawing, *([Text(f"and {len(rows) - most} more")] if len(rows) > most else [])]


# Time.


def _times(run: Run, most: int) -> list[Any]:
    figures = {name: value for name, value in run["measures"].items() if value is not None}
    if "step.median_ms" not in figures:
        why = run["unseen"]["step.median_ms"]
        lines = [Text(plain(why if run["steps"]["count"] else f"{why}: the whole recording counts as one"))]
    else:
        pace = f"step {_took(figures['step.median_ms'])} median, {slowest(run)}"
        why = run["unseen"].get("exposed.ms_per_step", "")
        waiting = f"waiting was {NOT_MEASURED}" if why.startswith(NOT_MEASURED) else "waiting was not seen"
        if "exposed.ms_per_step" in figures:
            waiting = f"waiting {_took(figures['exposed.ms_per_step'])} per step ({figures['exposed.percent']:.1f} %)"
        lines = [Text(f"{pace}; {waiting}")]
    if "energy.joules_per_step" in figures:
        lines.append(Text(f"energy {figures['energy.joules_per_step']:.3g} J per step"))
    if not run["waits"]:
        return lines
    headings = (("waited for", "left"), ("unit", "left"), ("per step", "right"), ("longest", "right"), ("settings", "left"))
    drawing = _table(*headings)
    for wait in run["waits"][:most]:
        settings = ", ".join(wait["settings"][:2])
        row = (_took(wait["ms_per_step"]), _took(wait["longest_ms"]), Text(settings))
        drawing.add_row(plain(wait["what"]), Text(plain(wait["unit"])), *row)
    if len(run["waits"]) > most:
        drawing.add_row(f"and {len(run['waits']) - most} more", "", "", "", "")
        lines += _waits_in_all(figures)
    return [*lines, drawing, *(Text(f"remedy: {plain(line)}") for line in run["remedies"])]


def _loading(run: Run, most: int) -> list[Any]:
    found = run["data"]
    if not found or not found["loaders"]:
        return []
    headings = (("loader", "left"), ("workers", "right"), ("wait per step", "right"), ("for first batches", "right"))
    drawing = _table(*headings, ("for starting workers", "right"))
    for row in list(loading_rows(found))[:most]:
        drawing.add_row(*(Text(plain(cell)) for cell in row))
    advice = (Text(f"remedy: {plain(line)}") for line in found["advice"])
    return [Text(loading_line(found)), drawing, *advice]


def _waits_in_all(figures: dict[str, float]) -> list[Any]:
    """What the rows of the table add up to, kind by kind, the longest first; for a table that does not show all."""
    sums = {}
    for name, value in figures.items():
        first, _, figure = name.partition(".")
        kind, _, unit = figure.partition(".")
        if first == "exposed" and unit == "ms_per_step" and value:
            sums[kind.replace("_", " ")] = value
    terms = ", ".join(f"{kind} {_took(sums[kind])}" for kind in sorted(sums, key=lambda kind: -sums[kind]))
    return [Text(f"waiting per step, by cause: {terms}")] if terms else []


def _took(ms: float) -> str:
    return as_duration(ms * 1e6)


def _rates(run: Run) -> list[Any]:
    if not run["rates"]:
        return []
    headings = (("moved", "left"), ("bytes", "right"), ("achieved", "right"), ("bench", "right"), ("share", "right"))
    drawing = _table(*headings)
    for rate in run["rates"]:
        bench, share, reached = rate["bench_bytes_per_s"], rate["share_of_bench"], rate["reached_bytes_per_s"]
        drawing.add_row(
            plain(rate["verb"]),
            sized(rate["bytes"]),
            f"{as_size(int(reached))}/s" if reached is not None else plain(rate["why"].partition(":")[0]),
            f"{as_size(int(bench))}/s" if bench else "-",
            f"{share:.0%}" if share is not None else "-",
        )
    return [drawing, *([Text(plain(run["bench_problem"]))] if run["bench_problem"] else [])]


def _growing(run: Run) -> Iterator[Any]:
    """What a larger batch would take, where the noise scale was measured."""
    for found in run["large_batch"]:
        yield from (Text(plain(line)) for line in advised(found))
        if found["growth"]:
            headings = ("batch", "x", "lr, SGD", "lr, Adam", "steps", "samples")
            drawing = _table(*((heading, "right") for heading in headings))
            for each in found["growth"]:
                drawing.add_row(
                    f"{each['batch']:,}",
                    str(each["times"]),
                    *(f"x {each[key]:.3g}" for key in ("sgd_lr", "adam_lr", "steps", "samples")),
                )
            yield drawing


def doubts(report: Mapping[str, Any]) -> Iterator[str]:
    """What keeps recordings from being whole; what is said of many, once."""
    found: dict[str, list[tuple[str, str]]] = {}
    for run in report["runs"]:
        for doubt in _doubts(run):
            found.setdefault(_AT_BYTE.sub("", doubt), []).append((plain(run["file"]), doubt))
    for doubt, of in found.items():
        more = f" and {len(of) - _MOST_FILES:,} more" if len(of) > _MOST_FILES else ""
        yield f"{', '.join(file for file, _ in of[:_MOST_FILES])}{more}: {of[0][1] if len(of) == 1 else doubt}"
    yield from left_out(report["unreadable"], ": zprof report --json")


def left_out(unreadable: Sequence[Mapping[str, str]], all_of_them: str = "") -> Iterator[str]:
    """A line for each trace that cannot be read, but for many; ``all_of_them`` says where those are."""
    for each in unreadable[:_MOST_UNREADABLE]:
        yield f"left out: {plain(each['why'])}"
    if len(unreadable) > _MOST_UNREADABLE:
        yield f"left out: {len(unreadable) - _MOST_UNREADABLE:,} more traces that cannot be read{all_of_them}"


def _doubts(run: Run) -> Iterator[str]:
    if run["damage"]:
        yield plain(run["damage"])
    if run["dropped_rows"]:
        yield f"{run['dropped_rows']:,} recorded rows are not in the file: figures away from peaks are less accurate"
    if run["below_zero"]:
        yield f"{run['below_zero']:,} series end below zero: frees were recorded whose allocations were not"
    if run["end"] is None:
        yield "has no end: the run was killed, or is still running"
    elif run["end"]["exit"]:
        reason = f" ({plain(run['end']['reason'])})" if run["end"]["reason"] else ""
        yield f"the run ended with exit code {plain(run['end']['exit'])}{reason}"
