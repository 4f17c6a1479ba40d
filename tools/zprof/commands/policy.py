"""Owns ``zprof policy``: check, show, schema and convert, for a policy file or a DeepSpeed configuration.

`zprof.cli` hangs the group in. It never needs a model, a device or torch.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from offload.errors import ZhooksError
from offload.policy import Cost, IgnoredKeys, Policy, Table, cost, written
from offload.text import Share, counted, format_amount
from zprof.commands.options import count
from zprof.problem import BudgetProblem, Problem, problem_of

__all__ = ["policy"]

FILE = click.argument("file", type=click.Path())
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@click.group()
def policy() -> None:
    """Work on a policy file (TOML, JSON, or a DeepSpeed configuration), without a model and without torch."""


@policy.command()
@FILE
@AS_JSON
def check(file: str, as_json: bool) -> None:
    """Check whether FILE is a valid policy, and list every problem with its line.

    For a DeepSpeed configuration, also list the keys that have no effect, and what to do instead.
    """
    try:
        loaded, ignored = _load(file)
    except Problem as problem:
        if not as_json:
            raise
        click.echo(json.dumps({"file": file, "ok": False, "problems": problem.message.split("\n")}, indent=2))
        raise click.exceptions.Exit(Problem.exit_code) from None
    if as_json:
        click.echo(json.dumps({"file": file, "ok": True, "stage": loaded.stage, "ignored": ignored}, indent=2))
        return
    click.echo(f"{file}: ok, stage {loaded.stage}")
    for line in ignored:
        click.echo(f"{file}: not honoured: {line}")


@policy.command()
@FILE
@click.option("--params", callback=count, metavar="COUNT", help="Calculate the bytes for this many parameters, e.g. 7B.")
@click.option("--ranks", type=click.IntRange(1, 1 << 20), help="The number of ranks that share it; by default 1.")
@AS_JSON
def show(file: str, params: int | None, ranks: int | None, as_json: bool) -> None:
    """Print FILE's effective table and every key as a policy file in TOML: changed keys first, defaults in comments.

    With --params, also print what each rank holds between steps with Adam; exit code 3 if that exceeds a budget.
    """
    if ranks is not None and params is None:
        raise click.UsageError("--ranks: expected --params too, e.g. --params 7B --ranks 8")
    loaded, ignored = _load(file)
    spent = None if params is None else cost(loaded, params, ranks or 1)
    if as_json:
        click.echo(json.dumps(_as_json(file, loaded, ignored, spent), indent=2))
    else:
        click.echo(loaded.describe())
        for line in _commented(loaded, ignored, spent):
            click.echo(f"# {line}".rstrip())
    if spent and any(tier.holds is False for tier in spent.tiers):
        raise click.exceptions.Exit(BudgetProblem.exit_code)


@policy.command()
def schema() -> None:
    """Print the JSON schema of policy files, for editors that complete and check them."""
    click.echo(json.dumps(Policy.json_schema(), indent=2))


@policy.command()
@FILE
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file to write; by default standard output.")
@click.option("-f", "--force", is_flag=True, help="Overwrite the file if it is there.")
def convert(file: str, output: Path | None, force: bool) -> None:
    """Write the DeepSpeed configuration FILE as a policy in TOML, with keys that have no effect in comments."""
    from zprof.commands.output import check_output, write_output

    if output is not None:
        check_output(output, [Path(file)], force=force)
    loaded, ignored = _load(file)
    text = "\n".join([f"# {line}" for line in _heading(file, ignored)] + [""] + list(_written(loaded))) + "\n"
    if output is None:
        click.echo(text, nl=False)
    else:
        write_output(output, text.encode())


def _load(file: str) -> tuple[Policy, list[str]]:
    """The policy, and the lines for what a DeepSpeed configuration asks for in vain."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = Policy.load(file)
    except ZhooksError as error:
        raise problem_of(error) from None
    ignored = [line for warning in caught if isinstance(warning.message, IgnoredKeys) for line in warning.message.ignored]
    return loaded, ignored


def _heading(file: str, ignored: list[str]) -> list[str]:
    name = Path(file).name
    return [f"From {name}.", *(f"Not honoured: {line}" for line in ignored)]


def _written(loaded: Policy) -> Iterator[str]:
    """The keys that were written, and no default."""
    if "stage" in loaded.model_fields_set:
        yield f"stage = {loaded.stage}"
    for name, table in loaded:
        if isinstance(table, Table) and name in loaded.model_fields_set and table.model_fields_set:
            yield from ("", f"[{name}]")
            for key, value in table:
                if key in table.model_fields_set and value is not None:
                    yield f"{key} = {written(type(table), key, value)}"
    for rule in loaded.rule:
        yield from ("", "[[rule]]", f"match = {written(type(rule), 'match', rule.match)}")
        for table, keys in rule.says().items():
            yield from (f'{table}.{key} = "{value}"' for key, value in keys.items())


def _commented(loaded: Policy, ignored: list[str], spent: Cost | None) -> Iterator[str]:
    """What follows the policy, all of it comments, so that the output stays a policy file."""
    if ignored:
        yield from ("", *(f"not honoured: {line}" for line in ignored))
    if spent is None:
        return
    over = f"{spent.numel:,} parameters over {counted(spent.ranks, 'rank')}"
    yield from ("", f"{over}, Adam, bytes per rank at the end of backward:")
    yield from _table(spent)
    if loaded.rule:
        yield "Rules are not counted: which parameters they match depends on the model."
    yield "Temporary buffers come on top: gathered units, partial gradients, buffers in transit between tiers."
    for tier in spent.tiers:
        if tier.budget is not None or tier.nbytes:
            held = {True: "holds it", False: "does not hold it", None: "of what is free, known only at attach"}[tier.holds]
            allowed = "no bound" if tier.budget is None else f"{_gib(tier.budget)} {held}"
            yield f"[budget] {tier.tier.value}: needs {_gib(tier.nbytes)} per rank; {allowed}"


def _table(spent: Cost) -> list[str]:
    # Imported late: drawing a table costs as much as everything else of a start.
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawing

    drawing = Drawing(box=box.ASCII, show_edge=True)
    for heading in ("what", "tier", "holds"):
        drawing.add_column(heading)
    for heading in ("B/param", "elements", "bytes"):
        drawing.add_column(heading, justify="right")
    for cell in spent.cells:
        size = (str(cell.per_numel), f"{cell.numel:,}", _gib(cell.nbytes))
        drawing.add_row(cell.what, cell.tier.value, cell.holds, *size)
    drawing.add_section()
    drawing.add_row("sum", "", "", "", "", _gib(spent.nbytes))
    console = Console(width=110, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(drawing)
    return [line.rstrip() for line in captured.get().splitlines()]


def _gib(amount: int | Share) -> str:
    return str(amount) if isinstance(amount, Share) else f"{amount / 2**30:,.2f} GiB"


def _as_json(file: str, loaded: Policy, ignored: list[str], spent: Cost | None) -> dict[str, Any]:
    placed = loaded.table()
    cells = {
        cell: {"partition": loaded.partition(cell), "placed": placed[cell], "tier": getattr(loaded, cell).tier}
        for cell in placed
    }
    summary: dict[str, Any] = {"file": file, "table": cells, "policy": loaded.values(), "ignored": ignored}
    if spent:
        summary["cost"] = {
            "params": spent.numel,
            "ranks": spent.ranks,
            "bytes": spent.nbytes,
            "cells": [
                {"what": cell.what, "tier": cell.tier.value, "holds": cell.holds, "bytes": cell.nbytes}
                for cell in spent.cells
            ],
            "tiers": [
                {
                    "tier": tier.tier.value,
                    "bytes": tier.nbytes,
                    "budget": None if tier.budget is None else format_amount(tier.budget),
                    "holds": tier.holds,
                }
                for tier in spent.tiers
            ],
        }
    return summary
