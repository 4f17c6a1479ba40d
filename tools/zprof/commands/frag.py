"""Owns ``zprof frag``: its options, and the exit code that says whether an allocation would succeed.

`zprof.cli` hangs it in. It finds out nothing itself, and needs numpy and rich only once it is called.
"""

from __future__ import annotations

import json

import click

from offload.errors import PolicyError
from offload.text import parse_size
from zprof.problem import BudgetProblem, CapabilityProblem

__all__ = ["frag"]

_MOST = 1 << 44


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        nbytes = parse_size(value)
    except (PolicyError, ValueError, TypeError):
        nbytes = 0
    if not 0 < nbytes <= _MOST:
        raise click.BadParameter(f"{value!r}: expected a size such as 512MiB or 40GiB")
    return nbytes


@click.command()
@click.argument("file", metavar="RUN|SNAPSHOT", type=click.Path())
@click.option("--need", callback=_size, metavar="SIZE", help="Whether an allocation of SIZE would succeed, e.g. 512MiB.")
@click.option("--stream", type=click.IntRange(0), default=0, help="The stream that would allocate.")
@click.option("--limit", callback=_size, metavar="SIZE", help="The device memory this process can use, e.g. 40GiB.")
@click.option("--settings", "others", multiple=True, metavar="TEXT", help="Compare with these allocator settings; repeatable.")
@click.option("--device", type=click.IntRange(0, 1 << 10), help="The device of a snapshot; by default its first.")
@click.option(
    "--at",
    type=click.Choice(["worst", "peak", "end"]),
    default="worst",
    show_default=True,
    help="The moment in a RUN without a snapshot.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def frag(
    file: str,
    need: int | None,
    stream: int,
    limit: int | None,
    others: tuple[str, ...],
    device: int | None,
    at: str,
    as_json: bool,
) -> None:
    """Show how fragmented memory is, whether an allocation would succeed, and what other allocator settings would reserve.

    A SNAPSHOT is a file of torch.cuda.memory._dump_snapshot() (or the same as JSON or msgpack). For a RUN without a snapshot,
    such as a CPU run, the recorded allocations are replayed through a model of torch's CUDA allocator: a hypothetical result.
    With --need the exit code is 0 if it would succeed, 3 if it would not, and 4 if --limit is needed to decide.

    \b
    Example:  zprof frag oom.pickle --need 512MiB --limit 40GiB --settings expandable_segments:True
    """
    from offload.allocator import parse_settings
    from zprof.allocator.study import study

    try:
        settings = [parse_settings(text) for text in others]
    except PolicyError as error:
        raise click.UsageError(str(error)) from None
    found = study(file, device=device, limit=limit, others=settings, at=at)
    answer = None if need is None else found.answer(need, stream)

    from zprof.allocator import text as frag_text

    if as_json:
        click.echo(json.dumps(frag_text.as_json(found, answer), indent=2))
    else:
        click.echo(frag_text.as_text(found, answer))
    if answer is not None and not answer.succeeds:
        kind = BudgetProblem if answer.succeeds is False else CapabilityProblem
        raise click.exceptions.Exit(kind.exit_code)
