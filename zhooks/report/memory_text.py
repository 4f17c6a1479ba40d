"""``attachment.memory()`` in words: the lines of the table, and what every row means, for a reader without the documentation.

``memory.py`` and ``memory_residual.py`` print with it.  It knows names and figures only; it measures nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["header", "legend", "line", "mib", "wrapped"]

WIDTH = 100
_MEANINGS = {
    "parameter": "as kept between uses: shards at stage 3, whole at stages 0 to 2",
    "gradient": "in .grad, reduced over the ranks; zero_grad() frees them",
    "optimizer": "states; with 16-bit parameters also the fp32 values it updates",
    "gathered units": "all values of the units (blocks of the model) in use now",
    "partial gradients": "of this rank's batch, not yet reduced over the ranks",
    "reduced ranges": "results of reductions that have not ended",
    "idle buffers": "kept for the next gathers and reductions",
    "message rings": "one for all CPU ranks of this machine; no [budget] counts it",
    "staging": "values on their way between the device, host and disk tiers",
    "staging on device": "values of the host and disk tiers while they are in use",
    "arena, unused": "reserved by [device] arena",
    "frozen subclasses": "quantized parameters and the like, whole on every rank",
    "ignored parameters": "named by [units] ignore, whole on every rank",
    "ignored gradients": "named by [units] ignore, whole on every rank",
    "ignored states": "named by [units] ignore, whole on every rank",
    "activations": "saved by autograd for backward; on host or disk stored there until then",
    "activation inputs": "of the units that backward computes again",
    "recomputed": "saved by the unit that backward computes again now",
    "activations, fetched": "back from their tier for backward",
    "activations in transit": "on their way to their tier or back",
    "other tensors": "the batch, the loss, workspaces of libraries",
    "free in the allocator": "reserved by torch, in no tensor",
    "of which in split blocks": "next to memory in use: only smaller tensors fit",
    "ends of pages": "unused: every block begins on a page of its own",
    "free in host slabs": "reserved for the host tier, unused",
    "free in scratch file": "of the disk tier, unused",
    "rest of the process": "Python, libraries, tensors not listed here",
}


def header(what: str, *columns: str) -> str:
    """The first line of a part of the table."""
    return f"{what:<26}{'tier':<8}{'held':>14}" + "".join(f"{column:>14}" for column in columns)


def line(what: str, tier: str, *figures: int | None) -> str:
    """A row of the table: a name, a tier, and bytes."""
    return f"{what:<26}{tier:<8}" + "".join(f"{mib(figure):>14}" for figure in figures)


def legend(names: Sequence[str]) -> list[str]:
    """What the columns hold, and the rows of these names."""
    rows = [f"{name}: {_MEANINGS[name]}" for name in dict.fromkeys(names)]
    columns = "expected: by stage, shapes and dtypes; at most: the limit under this policy; peak: in the last step"
    return wrapped([columns, *rows])


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, none of them wider than the table may be."""
    return [each for text in lines for each in textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)]


def mib(nbytes: int | None) -> str:
    """For a reader; "-" where it is not known."""
    return "-" if nbytes is None else f"{nbytes / 2**20:,.2f} MiB"
