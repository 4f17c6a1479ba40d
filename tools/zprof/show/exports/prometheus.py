"""Owns the export to Prometheus' text format: every measure a run saw as a gauge, one sample a rank.

`commands.export` calls `write`. Names follow Prometheus' rules: base units, bytes, seconds, joules and ratios, at their end;
samples have no time of their own, which a node exporter's textfile folder would refuse.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ and https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from zprof.analysis.analysis import Analysis
from zprof.analysis.measures import MEASURES, Measure, measures, numbers
from zprof.show.exports.exported import Written, counted, text
from zprof.trace.reader import Trace
from zprof.writing import committed

__all__ = ["exposition", "named", "write"]

#: Unit of a measure -> (end of the name, what to multiply by).
_UNITS = {
    "bytes": ("_bytes", 1.0),
    "ms": ("_seconds", 1e-3),
    "bytes/s": ("_bytes_per_second", 1.0),
    "%": ("_ratio", 1e-2),
    "J": ("_joules", 1.0),
    "count": ("", 1.0),
}
#: A gauge's name must not end in _count, which is a histogram's.
_COUNTS = {"children.count": "children", "step.count": "steps", "oom.count": "failed_requests", "rows.dropped": "dropped_rows"}
#: What names of measures say of their units.
_UNIT_WORDS = re.compile(r"[._](ms|percent|bytes_per_s)$|(?<=\.)(ms|bytes|joules)_(?=per_step$)")


def write(traces: Sequence[Trace], path: Path) -> Written:
    """Write UTF-8 text; labels are rank, host and the run's file."""
    found, damages = [], []
    for trace in traces:
        analysis = Analysis.of(trace)
        found.append((_labels(trace), numbers(measures(analysis))))
        damages.append(analysis.ledger.damage)
    written = exposition(found)
    # Its reader is another user.
    committed(path, written.encode(), mode=0o644)
    count = sum(line[:1] not in ("", "#") for line in written.split("\n"))
    said = f"{counted(count, 'sample')}; put it into a node exporter's --collector.textfile.directory, its name ending in .prom"
    return Written(said, damages)


def exposition(runs: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """The text for runs, each as its labels and its measures; a value that is no number is left out."""
    lines: list[str] = []
    for measure in MEASURES.values():
        name, scale = named(measure)
        samples = [
            f"{name}{labels} {found[measure.name] * scale:.17g}"
            for labels, found in runs
            if math.isfinite(found.get(measure.name, math.nan))
        ]
        if samples:
            lines += [f"# HELP {name} {_escaped(measure.meaning)}", f"# TYPE {name} gauge", *samples]
    return "".join(f"{line}\n" for line in lines)


def named(measure: Measure) -> tuple[str, float]:
    """A measure's name and scale: "zprof_device_peak_bytes" of device.peak, "zprof_step_median_seconds" of step.median_ms."""
    end, scale = _UNITS[measure.unit]
    stem = _COUNTS.get(measure.name) or _UNIT_WORDS.sub("", measure.name)
    return f"zprof_{stem.replace('.', '_')}{end}", scale


def _labels(trace: Trace) -> str:
    header = trace.header
    pairs = {"rank": str(header.rank), "host": header.host, "run": trace.path.name}
    return "{" + ",".join(f'{name}="{_escaped(value, quote=True)}"' for name, value in pairs.items()) + "}"


def _escaped(value: str, *, quote: bool = False) -> str:
    escaped = text(value).replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quote else escaped
