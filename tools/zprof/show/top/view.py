"""Owns how ``zprof top`` looks: the tables of one look, as aligned text or as rich draws them.

`zprof.commands.top` prints what it makes. It never asks the machine anything, and imports rich only where rich is to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.text import as_duration, as_size
from zprof.gpu.answers import one_line
from zprof.show.top.watch import Look

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zprof.analysis.following import Seen

__all__ = ["Sheet", "as_text", "drawn", "sheets"]

_DASH = "-"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A titled table; without columns its rows are lines."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sheets(look: Look) -> list[Sheet]:
    """What is to be said of one look, every text on one line and without control characters."""
    made = [_devices(look), _host(look)]
    if look.runs:
        made += [_runs(look.runs), _units(look.runs)]
    lines = [(one_line(problem, 300),) for problem in look.problems]
    if not look.runs:
        lines.append(("no run records in this folder; start one with: zprof run train.py",))
    made.append(Sheet("", (), tuple(lines)))
    return [sheet for sheet in made if sheet.rows]


def _devices(look: Look) -> Sheet:
    state, why = look.gpus["state"], one_line(str(look.gpus["why"]))
    if not look.devices:
        return Sheet("", (), ((f"no GPU: {look.vendor.library} is {state} ({why})",),))
    columns = ("gpu", "name", "util", "memory", "power", "temp", "clock", "pcie tx/s", "pcie rx/s", "nvlink tx/s", "held by")
    rows = tuple(_device(device) for device in look.devices)
    notes = look.gpus["notes"]
    said = [state, *(one_line(str(note)) for note in notes)] if isinstance(notes, list) else [state]
    title = f"devices ({look.vendor.library} {'; '.join(str(part) for part in said)})"
    return Sheet(title, columns, rows)


def _device(device: dict[str, Any]) -> tuple[str, ...]:
    def level(name: str, form: str = "{}") -> str:
        value = device.get(name)
        return _DASH if value is None else form.format(value)

    def rate(name: str) -> str:
        return as_size(round(device[name])) if name in device else _DASH

    used, total = device.get("memory_used_nbytes"), device.get("memory_nbytes")
    memory = _DASH if used is None else as_size(used) if not total else f"{as_size(used)} / {as_size(total)}"
    power = f"{device['power_mw'] / 1000:.0f} W" if "power_mw" in device else _DASH
    return (
        device["key"].removeprefix("gpu"),
        one_line(device["name"], 32) or _DASH,
        level("utilisation_percent", "{} %"),
        memory,
        power,
        level("temperature_c", "{} C"),
        level("sm_clock_mhz" if "sm_clock_mhz" in device else "core_clock_mhz", "{} MHz"),
        rate("pcie_tx_bytes_per_s"),
        rate("pcie_rx_bytes_per_s"),
        rate("nvlink_tx_bytes_per_s"),
        device.get("lost") or ", ".join(device.get("throttles", ())) or _DASH,
    )


def _host(look: Look) -> Sheet:
    total = look.host["total_nbytes"]
    title = "host memory" + (f" ({as_size(total)} in all)" if total else "")
    rows = tuple((one_line(bound["name"]), as_size(bound["free_nbytes"])) for bound in look.host["bounds"])
    return Sheet(title, ("bounded by", "free"), rows)


def _runs(runs: Sequence[Seen]) -> Sheet:
    moves = sorted({name for run in runs for name in run.bandwidth})
    under = any(run.samples.get("children count") for run in runs)
    held_by = ("rss", "children") if under else ("rss",)
    columns = ("run", "rank", "state", "device", "host", "disk", *held_by, "steps", "step", "exposed")
    rows = []
    for run in runs:
        held = (run.tiers.get(tier) for tier in ("device", "host", "disk"))
        tiers = (_DASH if nbytes is None else as_size(nbytes) for nbytes in held)
        rss = as_size(run.samples["rss"]) if "rss" in run.samples else _DASH
        exposed = _took(run.exposed_ms) if run.unmeasured is None else one_line(run.unmeasured.partition(":")[0])
        times = (_took(run.step_ms), exposed)
        rates = (as_size(round(run.bandwidth[name])) if name in run.bandwidth else _DASH for name in moves)
        state = f"{run.state} ({one_line(run.damage)})" if run.damage else run.state
        first = (one_line(run.path, 60), f"{run.rank}/{run.world}", state)
        rows.append((*first, *tiers, rss, *([_children(run)] if under else []), str(run.steps), *times, *rates))
    return Sheet("runs", (*columns, *(f"{name}/s" for name in moves)), tuple(rows))


def _children(run: Seen) -> str:
    """How many processes are under it, and what they hold: what they share once, where that was read already."""
    count = run.samples.get("children count", 0)
    nbytes = run.samples.get("children pss") or run.samples.get("children rss", 0)
    return f"{count}: {as_size(nbytes)}" if count else _DASH


def _units(runs: Sequence[Seen]) -> Sheet:
    rows = []
    for run in runs:
        for place in range(3):
            holding = run.holding[place] if place < len(run.holding) else None
            waiting = run.waiting[place] if place < len(run.waiting) else None
            if holding is None and waiting is None:
                break
            rows.append(
                (
                    str(run.rank),
                    one_line(holding.name, 48) if holding else _DASH,
                    as_size(holding.nbytes) if holding else _DASH,
                    one_line(waiting.name, 48) if waiting else _DASH,
                    one_line(waiting.what, 24) if waiting else _DASH,
                    _took(waiting.wait_ms) if waiting else _DASH,
                )
            )
    return Sheet("units", ("rank", "holds most", "on device", "waited for", "why", "per step"), tuple(rows))


def _took(ms: float | None) -> str:
    return _DASH if ms is None else as_duration(ms * 1e6)


def as_text(made: Sequence[Sheet]) -> str:
    """Aligned columns, a blank line between tables; nothing that a file or a dumb terminal could not hold."""
    blocks = []
    for sheet in made:
        lines = [sheet.title] if sheet.title else []
        table = [sheet.columns, *sheet.rows] if sheet.columns else list(sheet.rows)
        widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
        for row in table:
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def drawn(made: Sequence[Sheet]) -> RenderableType:
    """The same, for a terminal; names are data, never markup."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for sheet in made:
        if not sheet.columns:
            parts += [Text(row[0]) for row in sheet.rows]
            continue
        table = Table(title=Text(sheet.title), title_justify="left", box=box.SIMPLE_HEAD)
        for name in sheet.columns:
            table.add_column(Text(name))
        for row in sheet.rows:
            table.add_row(*(Text(cell) for cell in row))
        parts.append(table)
    return Group(*parts)
