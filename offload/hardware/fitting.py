"""From measured times to a profile: rates, latencies and efficiency curves fitted, and how well they then predict.

``zprof bench --profile`` calls it. Only the figures there are samples of change.

Note: [Fitting]
    A disk's time is modelled as latency + bytes / rate, and the two are found by least squares of the relative error, so that
    short and long requests count alike; neither may be negative. An efficiency curve is the median rate at each size over the
    best one, held to what the tables allow: at most 1, and no steeper than the size. Of a link the latency is found
    so, and a curve holds what one rate does not explain: caches make short copies faster.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from offload.errors import HardwareError
from offload.hardware.costs import CostModel
from offload.hardware.hardware import Hardware
from offload.hardware.tables import Point, fraction_at

__all__ = ["MEASURED", "Fit", "Residual", "Sample", "fit"]

#: What a sample may be of.
MEASURED = (
    "dispatch", "call", "matmul", "memory", "h2d", "d2h", "h2h", "fresh", "disk read", "disk write", "all_gather",
    "reduce_scatter", "all_reduce", "operation",
)  # fmt: skip
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured time.

    Attributes:
        what: one of `MEASURED`; "call" is a function that Python calls, "memory" an operation that only moves bytes, "fresh"
            the first touch of new pages, "operation" one that ``name`` says, with a curve of its own.
        seconds: of one, the host's time to issue it included.
        nbytes: read and written, copied, or as `CostModel.collective` counts them.
        flops: of a matrix product.
        dtype: it computed in.
        size: its smallest dimension.
        ranks: of a collective, all on one node.
        name: torch's, of an "operation".
    """

    what: str
    seconds: float
    nbytes: int = 0
    flops: float = 0.0
    dtype: str = "fp32"
    size: int = 0
    ranks: int = 1
    name: str = ""


@dataclass(frozen=True, slots=True)
class Residual:
    """How far predictions lie from the samples of one kind, as fractions of the measured times."""

    what: str
    count: int
    median: float
    worst: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted profile and what is left over."""

    hardware: Hardware
    residuals: tuple[Residual, ...]

    def text(self) -> str:
        """The residuals as lines of a table."""
        lines = [f"{'measured':<14} {'samples':>7} {'median error':>13} {'worst':>7}"]
        for each in self.residuals:
            lines.append(f"{each.what:<14} {each.count:>7} {each.median:>12.1%} {each.worst:>7.1%}")
        return "\n".join(lines)


def fit(base: Hardware, samples: Sequence[Sample]) -> Fit:
    """``base`` with the figures that ``samples`` measure in the place of its own.

    Raises:
        HardwareError: a sample is none, or the figures found cannot be.
    """
    for sample in samples:
        if sample.what not in MEASURED or not (math.isfinite(sample.seconds) and sample.seconds > 0):
            raise HardwareError(f"fit expected a time above 0 of one of {', '.join(MEASURED)}, found {sample}")
    values = base.values()
    by: dict[str, list[Sample]] = {what: [s for s in samples if s.what == what] for what in MEASURED}
    dispatch = _figure(min((s.seconds for s in by["dispatch"]), default=base.host.dispatch))
    values["host"]["dispatch"] = dispatch
    if by["call"]:
        values["host"]["call"] = _figure(statistics.median(s.seconds for s in by["call"]))
    # What the host takes to issue an operation is counted apart, and adds up only where the device is the host.
    issued = dispatch if base.kind == "cpu" else 0.0
    _fit_products(values, by["matmul"], issued)
    _fit_memory(values, by["memory"], issued)
    _fit_operations(values, by["operation"], issued)
    _fit_copies(values, by)
    _fit_disk(values, by)
    _fit_links(values, base, [s for what in _COLLECTIVES for s in by[what]])
    _hold(values)
    hardware = Hardware.of(values)
    return Fit(hardware, tuple(_residuals(CostModel(hardware), by)))


def _fit_products(values: dict[str, Any], samples: list[Sample], issued: float) -> None:
    """The factor of a small dimension first, from products of as many FLOPs and other shapes; then curves without it."""
    widest: dict[tuple[str, float], Sample] = {}
    for s in samples:
        held = widest.setdefault((s.dtype, s.flops), s)
        widest[s.dtype, s.flops] = max(held, s, key=lambda each: each.size)
    narrow = [(s, widest[s.dtype, s.flops]) for s in samples if s.size < widest[s.dtype, s.flops].size]
    by_dim = None
    if narrow:
        factors = [(float(s.size), _less(wide, issued) / _less(s, issued)) for s, wide in narrow]
        by_dim = values["matmul"]["by_dim"] = _curve([*factors, *{(float(wide.size), 1.0) for _, wide in narrow}], 1.0)
    shape = None if by_dim is None else tuple((size, part) for size, part in by_dim)
    for dtype in sorted({s.dtype for s in samples}):
        own = [s for (name, _), s in widest.items() if name == dtype]
        peak = values["peak"][dtype] = _figure(_best([(s.flops, s) for s in own], issued))
        rates = [(s.flops, s.flops / _less(s, issued) / (fraction_at(shape, s.size) if shape else 1.0)) for s in own]
        values["matmul"][dtype] = values["matmul"]["points"] = _curve(rates, peak)


def _fit_memory(values: dict[str, Any], samples: list[Sample], issued: float) -> None:
    if samples:
        best = _figure(_best([(s.nbytes, s) for s in samples], issued))
        values["device"]["memory_bandwidth"] = best
        values["memory_bound"]["points"] = _curve([(s.nbytes, s.nbytes / _less(s, issued)) for s in samples], best)


def _fit_operations(values: dict[str, Any], samples: list[Sample], issued: float) -> None:
    """A curve for each name: of what has FLOPs by these, of the rest by bytes."""
    rates: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for s in samples:
        table, amount = ("matmul", s.flops) if s.flops else ("memory_bound", s.nbytes)
        rates.setdefault((table, s.name), []).append((amount, amount / _less(s, issued)))
    best = {"matmul": values["peak"].get("fp32", 0.0), "memory_bound": values["device"]["memory_bandwidth"]}
    for (table, name), found in rates.items():
        values[table].setdefault("by_operation", {})[name] = _curve(_octaves(found), best[table])


def _octaves(rates: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Rates of sizes that are alike put at one size."""
    return [(2.0 ** round(math.log2(size)), rate) for size, rate in rates]


def _fit_copies(values: dict[str, Any], by: dict[str, list[Sample]]) -> None:
    both = [*by["h2d"], *by["d2h"]]
    if both:
        values["host_link"] |= _link([(1, s.nbytes, s.seconds) for s in both])
        values["host_link"].pop("node_bandwidth", None)
    for what, key in (("h2h", "copy_rate"), ("fresh", "fresh_rate")):
        if by[what]:
            values["host"][key] = _figure(statistics.median(s.nbytes / s.seconds for s in by[what]))


def _fit_disk(values: dict[str, Any], by: dict[str, list[Sample]]) -> None:
    latencies = []
    for what, key in (("disk read", "read"), ("disk write", "write")):
        if by[what] and "disk" in values:
            latency, rate = _line([(1.0, s.nbytes, s.seconds) for s in by[what]])
            values["disk"][key] = _figure(rate / values["disk"]["count"])
            latencies.append(latency)
    if latencies:
        values["disk"]["latency"] = _figure(min(latencies))


def _fit_links(values: dict[str, Any], base: Hardware, samples: list[Sample]) -> None:
    """Latency of a hop and bandwidth of a link, from the hops and bytes that the model counts in each sample."""
    if not samples:
        return
    # On a profile of one byte a second without latency a collective takes its bytes, and with a second a hop its hops too.
    still = {"efficiency": 1.0, "start": 0.0} | dict.fromkeys(("short_latency", "short_start", "node_bandwidth", "points"))
    unit = base.replaced(link=still | {"bandwidth": 1.0, "latency": 0.0})
    hopping = unit.replaced(link={"latency": 1.0})
    rows = []
    for s in samples:
        group = CostModel(unit).group(range(s.ranks))
        nbytes = CostModel(unit).collective(s.what, s.nbytes, group, algorithm="ring").seconds
        hops = CostModel(hopping).collective(s.what, s.nbytes, group, algorithm="ring").seconds - nbytes
        rows.append((round(hops), nbytes, s.seconds))
    values["link"] |= _link(rows) | {"efficiency": 1.0, "start": 0.0}
    for key in ("short_latency", "short_start", "node_bandwidth"):
        values["link"].pop(key, None)


def _link(rows: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
    """Latency of a hop, best rate, and the fraction of it by bytes, of (hops, bytes, seconds)."""
    line, _ = _line(rows)
    latency = _figure(min(line, 0.9 * min(seconds / hops for hops, _, seconds in rows)))
    rates = [(nbytes, nbytes / (seconds - hops * latency)) for hops, nbytes, seconds in rows]
    own = [rate for (_, rate), row in zip(rates, rows, strict=True) if row[2] > 2 * row[0] * latency]
    best = _figure(max(own or [rate for _, rate in rates]))
    return {"latency": latency, "bandwidth": best, "points": _curve(rates, best)}


def _hold(values: dict[str, Any]) -> None:
    """A memory is as fast as the fastest thing measured to go through it."""
    host, link = values["host"], values["link"]
    through = [2 * host["copy_rate"], host.get("fresh_rate", 0.0), values["host_link"]["bandwidth"]]
    through += [link["bandwidth"]] if link["through"] == "memory" else []
    through += [values["disk"]["count"] * values["disk"][key] for key in ("read", "write")] if "disk" in values else []
    host["memory_bandwidth"] = max(host["memory_bandwidth"], *through)
    device = values["device"]
    device_through = max(values["host_link"]["bandwidth"], link["bandwidth"])
    if device_through > device["memory_bandwidth"]:
        # The curve is of the bandwidth: it is scaled down as that goes up, and predicts the same times.
        scale = device["memory_bandwidth"] / device_through
        bound = values["memory_bound"]
        for curves in (bound, bound.get("by_operation", {})):
            for name in curves.keys() - {"by_operation", "source"}:
                curves[name] = [[size, _figure(part * scale)] for size, part in curves[name]]
        device["memory_bandwidth"] = device_through


def _less(sample: Sample, issued: float) -> float:
    """The operation's own time; of one that takes hardly longer than to issue it a tenth is left."""
    return max(sample.seconds - issued, sample.seconds / 10)


def _best(work: Sequence[tuple[float, Sample]], issued: float) -> float:
    """The best rate, of those samples where most of the time is the operation's own, if there are any."""
    own = [(amount, s) for amount, s in work if s.seconds > 2 * issued] or work
    return max(amount / _less(s, issued) for amount, s in own)


def _figure(number: float) -> float:
    """To four digits, downwards: what more there is was not measured."""
    if number <= 0:
        return number
    step = 10.0 ** (math.floor(math.log10(number)) - 3)
    return float(f"{math.floor(number / step * (1 + 1e-12)) * step:.4g}")


def _curve(rates: Iterable[tuple[float, float]], best: float) -> list[list[float]]:
    """The median rate at each size over the best one."""
    sizes: dict[float, list[float]] = {}
    for size, rate in rates:
        sizes.setdefault(float(size), []).append(rate)
    points: list[Point] = []
    for size in sorted(sizes):
        part = min(1.0, statistics.median(sizes[size]) / best)
        if points:
            part = min(part, points[-1][1] * size / points[-1][0])
        points.append((size, _figure(part)))
    return [list(point) for point in points]


def _line(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds of a hop and bytes a second, of (hops, bytes, seconds) whose relative errors squared add up to the least."""
    weighted = [(hops / seconds, nbytes / seconds) for hops, nbytes, seconds in rows]
    hh = sum(h * h for h, _ in weighted)
    hb = sum(h * b for h, b in weighted)
    bb = sum(b * b for _, b in weighted)
    h, b = sum(h for h, _ in weighted), sum(b for _, b in weighted)
    determinant = hh * bb - hb * hb
    hop = (h * bb - b * hb) / determinant if determinant > 1e-12 * hh * bb else 0.0
    byte = (b * hh - h * hb) / determinant if determinant > 1e-12 * hh * bb else b / bb
    if hop < 0:
        hop, byte = 0.0, b / bb
    if byte <= 0:
        # Only latency is seen: the largest transfer bounds the rate from below.
        hop, byte = (h / hh if hh else 0.0), min(seconds / nbytes for _, nbytes, seconds in rows if nbytes)
    return hop, 1 / byte


def _residuals(model: CostModel, by: dict[str, list[Sample]]) -> Iterable[Residual]:
    host, issued = model.hardware.host, model.dispatch if model.hardware.kind == "cpu" else 0.0
    predict: dict[str, Callable[[Sample], float]] = {
        "dispatch": lambda s: host.dispatch,
        "call": lambda s: host.call or 0.0,
        "matmul": lambda s: issued + model.compute(s.flops, s.nbytes, s.dtype, s.size),
        "memory": lambda s: issued + model.compute(0, s.nbytes),
        "operation": lambda s: issued + model.compute(s.flops, s.nbytes, operation=s.name),
        "fresh": lambda s: model.fresh(s.nbytes),
        "h2d": lambda s: model.copy("h2d", s.nbytes),
        "d2h": lambda s: model.copy("d2h", s.nbytes),
        "h2h": lambda s: model.copy("h2h", s.nbytes),
    }
    for what, samples in by.items():
        errors = []
        for s in samples:
            if what in _COLLECTIVES:
                seconds = model.collective(what, s.nbytes, model.group(range(s.ranks))).seconds
            elif what.startswith("disk"):
                seconds = model.disk(what.removeprefix("disk "), s.nbytes)
            else:
                seconds = predict[what](s)
            errors.append(abs(max(seconds, _LEAST_S) / s.seconds - 1))
        if errors:
            yield Residual(what, len(errors), statistics.median(errors), max(errors))
