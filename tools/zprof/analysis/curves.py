"""Owns curves: how series are grouped, and which points of a log are kept where there are more than can be drawn.

`Ledger.curves` calls it, and reports group by the same names. It never reads a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from zprof.analysis.samples import highest
from zprof.rows import BEFORE_STACK, TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zprof.analysis.tally import Log
    from zprof.trace.reader import Trace

    Int64s = NDArray[np.int64]

__all__ = ["BYS", "By", "Curves", "drawn", "group_of", "lines_recorded", "module_of"]

By = Literal["category", "module", "tier", "rank", "unit", "line"]
BYS: tuple[By, ...] = get_args(By)

#: What series without a key are called where keys are, and those without a line where lines are.
NO_KEY = "(no module)"
NO_LINE = "(no line of the script)"


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes of each group over time.

    Attributes:
        time_ns: [points], ascending, on the trace's monotonic clock; a level holds until the next point.
        levels: group -> [points] bytes.
    """

    time_ns: Int64s
    levels: dict[str, Int64s]


def group_of(by: By, category: str, tier: str, key: str, rank: int) -> str:
    """The group a series is in."""
    if by == "rank":
        return f"rank {rank}"
    if by in ("category", "tier"):
        return category if by == "category" else tier
    path, *lines = key.split(BEFORE_STACK, 2)
    if by == "line":
        return lines[0] if lines else NO_LINE
    return (path if by == "unit" else module_of(path)) or NO_KEY


@lru_cache(maxsize=1 << 16)
def module_of(key: str) -> str:
    """The module a key is counted under: its path up to the first number, or else its first two names.

    "model.layers.3.attn.q_proj" is part of "model.layers.3", "model.embed.weight" of "model.embed"; what stands before a
    slash, as in "optim/model.layers.3", names a part of the block, not of the model.
    """
    names = key.rpartition("/")[2].split(".")
    for at, name in enumerate(names):
        if name.isdecimal():
            return ".".join(names[: at + 1])
    return ".".join(names[:2])


def lines_recorded(trace: Trace) -> None:
    """Refuse to group by line what has none.

    Raises:
        TraceError: it was not recorded at level "stack".
    """
    level = trace.level
    if level != "stack":
        raise TraceError(f"{trace.path}: --by line: expected a run recorded at --level stack, found {level}; record it again")


def drawn(log: Log, group: Int64s, names: Sequence[str], totals: Sequence[Int64s], points: int) -> Curves:
    """The curves of ``log``.

    Args:
        group: of each series, the number of its group, or -1 to leave it out.
        names: of the groups.
        totals: curves over the pieces whose highest points must stay.
        points: keep about so many.
    """
    kept = _kept(log, totals, points)
    size = len(names)
    if not len(kept) or not size:
        return Curves(log.time_ns[kept], {name: np.zeros(len(kept), np.int64) for name in names})
    in_group = group[log.code >> 1]
    mine = np.flatnonzero(in_group >= 0)
    point = np.searchsorted(log.entries[kept], mine, side="right")
    inside = point < len(kept)
    sums = np.zeros(len(kept) * size, np.int64)
    np.add.at(sums, point[inside] * size + in_group[mine[inside]], log.change[mine[inside]])
    levels = np.cumsum(sums.reshape(len(kept), size), axis=0)
    return Curves(log.time_ns[kept], {name: levels[:, number].copy() for number, name in enumerate(names)})


def _kept(log: Log, totals: Sequence[Int64s], points: int) -> Int64s:
    """The pieces whose ends are drawn: all, or the highest of each total in each stretch, and the stretch's last."""
    count = len(log.rows)
    if count <= points:
        return np.arange(count)
    starts = np.linspace(0, count, max(points // (len(totals) + 1), 1), endpoint=False).astype(np.int64)
    last = np.append(starts[1:], count) - 1
    return np.unique(np.concatenate([last, *(highest(total, starts) for total in totals)]))
