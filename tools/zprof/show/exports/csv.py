"""Owns the CSV export: every row of every rank, as it was recorded.

`commands.export` calls `write`. It streams, chunk by chunk. A name that a spreadsheet would run as a formula gets an apostrophe
before it, for names come from the recorded program; all else stays as it is.

Source: OWASP, "CSV Injection"; RFC 4180; lines end in CR LF, fields with commas, quotes or line breaks are quoted.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from offload.text import counted
from zprof.rows import RowKind
from zprof.show.exports.exported import Written, lost
from zprof.trace.reader import Trace
from zprof.writing import committing

__all__ = ["COLUMNS", "write"]

#: What a cell begins with that spreadsheets evaluate.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

COLUMNS = ("rank", "kind", "what", "key", "nbytes", "time_ns", "thread", "ident")
_KINDS = {int(kind): kind.name.lower() for kind in RowKind}


def write(traces: Iterable[Trace], path: Path) -> Written:
    """Write UTF-8 CSV with a heading; times are nanoseconds of each rank's monotonic clock."""
    count, missing = 0, list[str]()
    with committing(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        out = csv.writer(lines)
        out.writerow(COLUMNS)
        for trace in traces:
            strings, rank = trace.strings, trace.header.rank
            for rows in trace.chunks():
                count += len(rows)
                columns = (rows.kind, rows.what, rows.key, rows.nbytes, rows.time_ns, rows.thread, rows.ident)
                out.writerows(
                    (rank, _KINDS[kind], _as_text(strings[what]), _as_text(strings[key]), *numbers)
                    for kind, what, key, *numbers in zip(*(column.tolist() for column in columns), strict=True)
                )
            missing += lost(trace, trace.damage)
        lines.detach()
    said = f"{counted(count, 'row')}; read nbytes, time_ns and ident as integers of 64 bits, what and key as text"
    return Written(said, missing)


def _as_text(name: str) -> str:
    return f"'{name}" if name.startswith(_FORMULA) else name
