"""Owns the figures of a run that goes on as Prometheus takes them: which there are, and what they are called.

`zprof.show.live.published` calls `families`. What means the same as in the export of a finished run has the name it has there;
what is of the last seconds, or of now, has one that says so. It never shows a figure of a rank that does not record any more
but for sums and peaks, which stay true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from zprof.analysis.following import RECENT_STEPS, WINDOW_NS, Seen
from zprof.analysis.measures import MEASURES, Measure
from zprof.rows import TIERS
from zprof.show.exports.prometheus import named

if TYPE_CHECKING:
    from prometheus_client.metrics_core import GaugeMetricFamily, Metric

__all__ = ["LIVE", "families"]

_RECENT = f"the last {WINDOW_NS // 1_000_000_000} s"
#: Figures that only a run that goes on has, as measures are told: those without a label of their own.
LIVE = {
    measure.name: measure
    for measure in (
        Measure("step.recent_ms", "ms", "more", f"The median of the last {RECENT_STEPS} optimizer steps."),
        Measure("tokens.recent_per_second", "count", "less", "Tokens of the model's input, a second of that; of this rank."),
        Measure("samples.recent_per_second", "count", "less", "Samples of the model's input, a second of that; of this rank."),
        Measure("exposed.recent_percent", "%", "more", f"Share of {_RECENT} in which the training threads waited."),
        Measure("exposed.recent.ms_per_step", "ms", "more", f"Time they waited per step, over {_RECENT}."),
        Measure("rss", "bytes", "more", "Resident memory of the process."),
        Measure("cgroup", "bytes", "more", "Memory of the process's cgroup."),
        Measure("pinned", "bytes", "more", "Page-locked host memory."),
        Measure("cuda.allocated", "bytes", "more", "Bytes the CUDA allocator has given out."),
        Measure("cuda.reserved", "bytes", "more", "Bytes the CUDA allocator holds."),
        Measure("children.held", "bytes", "more", "Memory of processes under this one; what they share counts once (PSS)."),
    )
}
#: What the sampler calls it -> the live figure, and the measure that is its peak.
_SAMPLED = {
    "rss": ("rss", "rss.peak"),
    "cgroup memory": ("cgroup", "cgroup.peak"),
    "pinned": ("pinned", "pinned.peak"),
    "cuda allocated": ("cuda.allocated", "cuda.allocated.peak"),
    "cuda reserved": ("cuda.reserved", "cuda.reserved.peak"),
    "children pss": ("children.held", None),
}
#: Of each GPU: what the sampler calls it -> name, meaning, and what to multiply by.
_GPU = {
    "memory used": ("zprof_gpu_memory_used_bytes", "Memory of the GPU in use, from its vendor's library.", 1.0),
    "utilisation": ("zprof_gpu_utilisation_ratio", "Share of time in which the GPU ran any kernel, from the same.", 1e-2),
    "power": ("zprof_gpu_power_watts", "Power draw of the GPU, from the same.", 1e-3),
    "temperature": ("zprof_gpu_temperature_celsius", "Temperature of the GPU, from the same.", 1.0),
}


def families(seen: Seen | None, labels: Mapping[str, str]) -> Iterator[Metric]:
    """What one rank shows now.

    Args:
        seen: the rank as it was last looked at; None before its trace is there.
        labels: of `zprof.show.exports.prometheus.labels`.
    """
    lives = seen is not None and seen.state == "recording"
    meaning = "Whether the rank records: 0 before, and once it has ended, was killed or is silent."
    yield _one("zprof_recording", meaning, labels, lives)
    if seen is None:
        return
    meaning = "When its last row was recorded, in seconds since 1970."
    yield _one("zprof_last_row_timestamp_seconds", meaning, labels, seen.last_row_s)
    for measure, value in _values(seen, lives=lives):
        name, scale = named(measure)
        yield _one(name, measure.meaning, labels, value * scale)
    if lives:
        yield from _held(seen, labels)
        yield from _moved(seen, labels)
        yield from _gpus(seen, labels)


def _values(seen: Seen, *, lives: bool) -> Iterator[tuple[Measure, float]]:
    if seen.steps:
        yield MEASURES["step.count"], seen.steps
    for tier in seen.peaks:
        if tier in seen.whole:
            yield MEASURES[f"{tier}.peak"], seen.peaks[tier]
        for category in seen.known.get(tier, ()):
            yield MEASURES[f"{tier}.{category}.peak"], seen.category_peaks[tier][category]
    for what, (now, peak) in _SAMPLED.items():
        if peak is not None and what in seen.sample_peaks:
            yield MEASURES[peak], seen.sample_peaks[what]
        if lives and what in seen.samples:
            yield LIVE[now], seen.samples[what]
    if not lives:
        return
    if seen.step_ms is not None:
        yield LIVE["step.recent_ms"], seen.step_ms
        for name, count in zip(("tokens", "samples"), seen.batch, strict=True):
            if count is not None and seen.step_ms:
                yield LIVE[f"{name}.recent_per_second"], count / (seen.step_ms / 1e3)
    if seen.waited is not None:
        yield LIVE["exposed.recent_percent"], 100 * seen.waited
    if seen.exposed_ms is not None:
        yield LIVE["exposed.recent.ms_per_step"], seen.exposed_ms


def _held(seen: Seen, labels: Mapping[str, str]) -> Iterator[Metric]:
    for tier in TIERS:
        known = seen.known.get(tier, ())
        if known and tier in seen.categories:
            meaning = f"Bytes on the {tier} tier now, by category, of those that are recorded."
            family = _family(f"zprof_{tier}_held_bytes", meaning)
            for category in known:
                family.add_sample(family.name, {**labels, "category": category}, seen.categories[tier].get(category, 0))
            yield family


def _moved(seen: Seen, labels: Mapping[str, str]) -> Iterator[Metric]:
    family = _family("zprof_moved_recent_bytes_per_second", f"Bytes of transfers, a second of {_RECENT}.")
    for what, rate in seen.bandwidth.items():
        family.add_sample(family.name, {**labels, "what": what}, rate)
    if family.samples:
        yield family


def _gpus(seen: Seen, labels: Mapping[str, str]) -> Iterator[Metric]:
    for what, (name, meaning, scale) in _GPU.items():
        family = _family(name, meaning)
        for gpu, sampled in sorted(seen.gpus.items()):
            if what in sampled:
                family.add_sample(name, {**labels, "gpu": gpu}, sampled[what] * scale)
        if family.samples:
            yield family


def _family(name: str, meaning: str) -> GaugeMetricFamily:
    from prometheus_client.metrics_core import GaugeMetricFamily

    return GaugeMetricFamily(name, meaning)


def _one(name: str, meaning: str, labels: Mapping[str, str], value: float) -> Metric:
    family = _family(name, meaning)
    family.add_sample(name, dict(labels), float(value))
    return family
