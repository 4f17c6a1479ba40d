"""Owns the export to Prometheus' text format: every measure a run saw as a gauge, one sample a rank.

`commands.export` calls `write`, `prometheus_live` takes names and labels from here; prometheus_client writes the format. Names
follow Prometheus' rules: base units, bytes, seconds, joules and ratios, at their end; samples have no time of their own, which
a node exporter's textfile folder would refuse.

Source: https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import CapabilityError
from offload.text import counted
from zprof.analysis.analysis import Analysis
from zprof.analysis.measures import MEASURES, Measure, measures, numbers
from zprof.show.exports.exported import Written, lost, text
from zprof.trace.families import family_of
from zprof.trace.reader import Trace
from zprof.writing import committed

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["client", "exposition", "gauges", "labels", "named", "write"]

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


def write(traces: Iterable[Trace], path: Path) -> Written:
    """Write UTF-8 text; see `labels`.

    Raises:
        CapabilityError: prometheus_client is not installed.
    """
    client()
    found, missing = [], list[str]()
    for trace in traces:
        analysis = Analysis.of(trace)
        found.append((labels(trace.path, trace.header.rank, trace.header.host), numbers(measures(analysis))))
        missing += lost(trace, analysis.ledger.damage)
    families = list(gauges(found))
    # Its reader is another user.
    committed(path, exposition(families), mode=0o644)
    count = sum(len(family.samples) for family in families)
    said = f"{counted(count, 'sample')}; put it into a node exporter's --collector.textfile.directory, named *.prom"
    return Written(said, missing)


def labels(path: Path, rank: int, host: str) -> dict[str, str]:
    """What tells a rank's samples from others. The run is what names of its ranks' traces share, or the file's own name; a
    label "job" is Prometheus' own."""
    return {"rank": str(rank), "host": text(host), "run": text(family_of(path) or path.name)}


def client() -> Any:
    """prometheus_client.

    Raises:
        CapabilityError: it is not installed.
    """
    try:
        import prometheus_client
    except ImportError:
        remedy = "pip install 'zhooks[prometheus]'"
        raise CapabilityError(f"prometheus_client: needed for Prometheus' format, not installed; {remedy}") from None
    return prometheus_client


def gauges(runs: Sequence[tuple[Mapping[str, str], Mapping[str, float]]]) -> Iterator[Metric]:
    """The measures of runs, each as its labels and its measures; a value that is no number is left out."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    for measure in MEASURES.values():
        name, scale = named(measure)
        family = GaugeMetricFamily(name, measure.meaning)
        for labels, found in runs:
            if math.isfinite(value := found.get(measure.name, math.nan)):
                family.add_sample(name, dict(labels), value * scale)
        if family.samples:
            yield family


def exposition(families: Sequence[Metric]) -> bytes:
    """The text of ``families``."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Given:
        def collect(self) -> Sequence[Metric]:
            return families

    registry = CollectorRegistry()
    registry.register(Given())
    return generate_latest(registry)


def named(measure: Measure) -> tuple[str, float]:
    """A measure's name and scale: "zprof_device_peak_bytes" of device.peak, "zprof_step_median_seconds" of step.median_ms."""
    end, scale = _UNITS[measure.unit]
    stem = _COUNTS.get(measure.name) or _UNIT_WORDS.sub("", measure.name)
    return f"zprof_{stem.replace('.', '_')}{end}", scale
