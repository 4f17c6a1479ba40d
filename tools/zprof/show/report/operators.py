"""Owns the "operators" of a report: what a step spent on them, what its host did between them, and why a GPU was idle.

`findings` takes the body, `text` the section. Both only say what `zprof.analysis.operators` found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from offload.text import as_duration
from zprof.analysis.coverage import Unseen

if TYPE_CHECKING:
    from zprof.analysis.compute import Computed
    from zprof.analysis.operators import OperatorBy, Operators

__all__ = ["operators_body", "operators_section"]

_HEADINGS = {"op": "operator", "kernel": "kernel", "module": "module", "unit": "unit"}
_MOST_BESIDE = 4
#: Letters of the names of a row, so that it fits a screen.
_NAME, _MOSTLY = 46, 30
_NOT = ("not recorded: operators are at --level ops",)


def operators_body(ran: Operators, by: OperatorBy, did: Computed | Unseen, most: int) -> dict[str, Any]:
    """The JSON of the operators of a run."""
    shown = ran.shown
    computed = None if isinstance(did, Unseen) else did
    rows = ran.by(by, computed)
    return {
        "title": shown.title,
        "counted": shown.counted,
        "first": shown.first,
        "count": shown.count,
        "step_ns": ran.step_ns,
        "by": by,
        "why": shown.why,
        "left_out": shown.left_out,
        "devices": list(shown.devices),
        "error_ns": shown.error_ns,
        "stack": shown.stack,
        "skipped": list(ran.skipped),
        "also": [window.title for window in ran.windows if window is not shown],
        "in_operators_ns": ran.in_operators_ns(),
        "rows": [asdict(row) for row in rows[:most]],
        "kernels": [asdict(row) for row in ran.by("kernel")[:most]] if shown.devices and by != "kernel" else [],
        "between": dict(list(ran.between().items())[:most]),
        "syncs": [dict(zip(("call", "where", "calls", "ns"), sync, strict=True)) for sync in ran.syncs()[:most]],
        "idle": [asdict(idle) for idle in ran.idle()],
    }


def operators_section(run: Mapping[str, Any], most: int) -> tuple[str, list[Any]]:
    """The heading and what stands below it; nothing where operators were not asked for."""
    ran = run["operators"]
    if ran is None:
        why = run["unseen"]["ops.self_ms"]
        return "operators", [] if why in _NOT else [Text(_plain(why))]
    parts: list[Any] = [_table(ran, ran["rows"][:most], ran["by"])]
    if ran["kernels"]:
        parts += [Text(""), _table(ran, ran["kernels"][:most], "kernel")]
    return f"operators of {ran['title']}, {_each(ran)}", [*parts, *(Text(_plain(line)) for line in _lines(ran))]


def _each(ran: Mapping[str, Any]) -> str:
    return f"per {ran['counted']}" if ran["counted"] else "in all"


def _table(ran: Mapping[str, Any], rows: list[Mapping[str, Any]], by: str) -> Table:
    drawing = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    gpu, kernels, grouped = bool(ran["devices"]), by == "kernel", by in ("module", "unit")
    rates = by == "op" and any(row["flops_per_s"] for row in rows)
    headings = [_HEADINGS[by], "calls"]
    headings += [] if kernels else ["self CPU"]
    headings += ["time"] if kernels else ["self GPU"] if gpu else []
    headings += ["share", *(["FLOP/s"] if rates else [])]
    headings += [] if grouped else ["mostly by" if kernels else "mostly in"]
    for heading in headings:
        name = heading in (*_HEADINGS.values(), "mostly by", "mostly in")
        drawing.add_column(heading, justify="left" if name else "right", no_wrap=not name, overflow="fold")
    for row in rows:
        # On a GPU the host runs ahead: the step is as long as what its device does.
        share = (row["device_ns"] if gpu or kernels else row["host_ns"]) / ran["step_ns"]
        cells = [_fitted(row["name"], _NAME), f"{row['calls']:,.0f}" if row["calls"] >= 10 else f"{row['calls']:.3g}"]
        cells += [] if kernels else [as_duration(row["host_ns"])]
        cells += [as_duration(row["device_ns"]) if row["device_ns"] else "-"] if gpu or kernels else []
        # Several of another thread's may run at once, and none of them takes the step's time.
        cells += ["-" if row["beside"] else f"{share:.1%}"]
        cells += [_rate(row["flops_per_s"])] if rates else []
        mostly = f"(thread {row['beside']})" if row["beside"] else row["mostly"] or "-"
        cells += [] if grouped else [_fitted(mostly, _MOSTLY)]
        drawing.add_row(*(Text(_plain(cell)) for cell in cells))
    return drawing


def _lines(ran: Mapping[str, Any]) -> Iterator[str]:
    step, each = ran["step_ns"], _each(ran)
    took = as_duration(step)
    for idle in ran["idle"]:
        yield f"{idle['device']} was idle {idle['idle_ns'] / step:.0%} of the {took}: {_reasons(idle, step)}"
    inside = ran["in_operators_ns"]
    between = [(name, ns) for name, ns in ran["between"].items() if ns >= 0.005 * step][:_MOST_BESIDE]
    where = ", ".join(f"{name} {ns / step:.0%}" for name, ns in between)
    rest = f"; {1 - inside / step:.0%} was in none (Python, waits, what torch does around them)"
    yield f"the host was in operators {inside / step:.0%} of the {took}{rest}{': ' + where if where else ''}"
    for sync in ran["syncs"][:_MOST_BESIDE]:
        times = f"{sync['call']} {sync['calls']:.3g} times {each}, {as_duration(sync['ns'])}"
        waits = "waits for the device" if ran["devices"] else "reads a value, which makes the host wait if it is on a GPU"
        yield f"{waits}: {times}: {sync['where']}"
    if ran["syncs"] and not ran["stack"]:
        yield "record with --ops-stack to see the lines that wait"
    if ran["why"]:
        yield f"{ran['title']} only: {ran['why']}"
    if ran["also"]:
        yield f"also recorded: {', '.join(ran['also'])} (zprof.open(RUN).ops() has all)"
    if ran["left_out"]:
        yield f"{ran['left_out']:,} events are not in the trace, the last ones: figures are too low"
    for line in ran["skipped"]:
        yield f"not recorded: {line}"


def _reasons(idle: Mapping[str, Any], step: float) -> str:
    said = {
        "launch": "the host had not launched anything yet (launch-bound)",
        "sync": "the host waited for it first",
        "device": "it waited for a stream or a copy",
    }
    parts = [f"{ns / step:.0%} {said[reason]}" for reason, ns in idle["reasons"].items() if ns >= 0.005 * step]
    modules = [f"{name} {ns / step:.0%}" for name, ns in idle["modules"].items() if ns >= 0.005 * step][:_MOST_BESIDE]
    return "; ".join([*parts, *([f"mostly before {', '.join(modules)}"] if modules else [])]) or "too short to say why"


def _fitted(name: str, most: int) -> str:
    """Its beginning and its end, which both tell it from others."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}...{name[-(most - most // 2 - 2) :]}"


def _rate(flops: float | None) -> str:
    if flops is None:
        return "-"
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= scale:
            return f"{flops / scale:.3g} {unit}FLOP/s"
    return f"{flops:.3g} FLOP/s"


def _plain(text: object) -> str:
    from zprof.show.report.text import plain

    return plain(text)
