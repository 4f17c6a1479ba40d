"""Owns what only grows: running totals of bytes and energy, and the ways NVML says how many bytes crossed PCIe and NVLink.

`sampling` holds one `Meter` a device and bus. A source that blocks or wraps fast is read on a thread of its own; no source
ever delays the caller of `Meter.totals` by more than one quick call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from zprof.clock import now_ns
from zprof.gpu.answers import INT64_MAX, Failure, Nvml, Unbelievable, ask, field_value, within

__all__ = ["Fields", "Gpm", "Meter", "Source", "Throughput", "Total", "nvlink_sources", "pcie_sources"]

_PCIE_TX, _PCIE_RX = 197, 198
_NVLINK_TX, _NVLINK_RX = 138, 139
_GPM_PCIE = (20, 21)
_GPM_NVLINK = (61, 60)
#: As the scope of an NVLink field: the sum over all links. A bare field number would ask for link 0 alone.
_ALL_LINKS = 2**32 - 1
#: More than any device's buses and links together carry; a faster counter is one that jumped.
_MOST_PER_SECOND = 16 << 40
#: GPM means are not stable below this.
_GPM_LEAST_NS = 95_000_000
#: Each call blocks for a window of 20 ms; five windows a second and direction leave the driver alone most of the time.
_THROUGHPUT_PERIOD_S = 0.1
#: Bytes a second and lane of each PCIe generation, from which follows how often a 32-bit counter must be read.
_LANE = {1: 250e6, 2: 500e6, 3: 985e6, 4: 1969e6, 5: 3938e6, 6: 7563e6, 7: 15125e6}
_STRIKES = 3
_JOIN_S = 1.0


class Total:
    """What a counter has grown by since the first reading, over wraps and resets.

    Args:
        scale: units of the total in one unit of the counter.
    """

    def __init__(self, scale: int = 1) -> None:
        self.value = 0
        #: Resets and jumps whose growth is unknown and not in ``value``.
        self.lost = 0
        #: The counter was seen to wrap at 2**32.
        self.wraps_at_32 = False
        self._scale = scale
        self._last: int | None = None

    def advance(self, raw: int, modulus: int = 2**64, most: int | None = None) -> int:
        """Take a reading; returns what the total grew by.

        Args:
            raw: the counter, in its own unit.
            modulus: where its type wraps.
            most: growth that cannot be; raises `Unbelievable` above, and counts on from ``raw``.
        """
        last, self._last = self._last, raw
        if last is None:
            return 0
        grown = raw - last
        if grown < 0:
            # Some drivers answer a 32-bit counter in a 64-bit type: a fall from its upper half is a wrap, not a reset.
            narrow = modulus if modulus < 2**32 else 2**32
            if last < narrow and (modulus <= 2**32 or (last >= 2**31 and raw < 2**31)):
                grown += narrow
                self.wraps_at_32 = True
            else:
                self.lost += 1
                return 0
        grown *= self._scale
        if most is not None and grown > most:
            self.lost += 1
            raise Unbelievable(f"grew by {grown}, expected at most {most}")
        self.value = min(self.value + grown, INT64_MAX)
        return grown


class Source(Protocol):
    """One way to learn the bytes sent and received by a device."""

    #: What a reader sees, e.g. "fields 197/198".
    name: str

    @property
    def period_s(self) -> float | None:
        """How often it wants to be read on a thread of its own; None where it is quick and may be read with the others."""

    def advance(self) -> tuple[int, int]:
        """(sent, received) bytes since the call before; the first call gives (0, 0). Raises what NVML says."""

    def close(self) -> None:
        """Give back what the source holds."""


class Fields:
    """Cumulative counters of `nvmlDeviceGetFieldValues`: exact, a fraction of a millisecond a reading."""

    def __init__(self, nvml: Nvml, handle: Any, fields: tuple[int, int], *, scope: int = 0, scale: int = 1) -> None:
        self.name = f"fields {fields[0]}/{fields[1]}"
        self._nvml, self._handle, self._fields, self._scope, self._scale = nvml, handle, fields, scope, scale
        self._totals = (Total(scale), Total(scale))
        self._narrow = False
        self._at_ns = now_ns()
        self._stamp_us = 0
        self._period_s: float | None = None

    @property
    def period_s(self) -> float | None:
        """A 32-bit counter of bytes wraps within a tenth of a second on a fast bus, so it is read more often than that."""
        if self._scale > 1 or not (self._narrow or any(total.wraps_at_32 for total in self._totals)):
            return None
        if self._period_s is None:
            self._period_s = _wrap_s(self._nvml, self._handle) / 3
        return self._period_s

    def advance(self) -> tuple[int, int]:
        answers = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(field, self._scope) for field in self._fields])
        readings = [field_value(answer) for answer in answers]
        most = int(_MOST_PER_SECOND * self._seconds(answers))
        self._narrow = self._narrow or any(modulus <= 2**32 for _, modulus in readings)
        sent, received = (
            total.advance(raw, modulus, most) for total, (raw, modulus) in zip(self._totals, readings, strict=True)
        )
        return sent, received

    def _seconds(self, answers: Any) -> float:
        """Since the reading before, by the driver's own stamps where they make sense, else by the clock here."""
        now, stamp = now_ns(), int(answers[0].timestamp)
        here = max(0.0, (now - self._at_ns) / 1e9)
        there = (stamp - self._stamp_us) / 1e6 if 0 < self._stamp_us <= stamp else here
        self._at_ns, self._stamp_us = now, stamp
        # The stamps may lag a cache behind; what they claim beyond the clock here is not believed.
        return min(max(here, there), here + 1.0) + 0.01

    def close(self) -> None:
        pass


class Gpm:
    """Rates of Hopper's performance monitor (MiB/s between two samples), times the time between them."""

    def __init__(self, nvml: Nvml, handle: Any, metrics: tuple[int, int]) -> None:
        self.name = f"GPM {metrics[0]}/{metrics[1]} (rate x time)"
        self._nvml, self._handle, self._metrics = nvml, handle, metrics
        self._samples: list[Any] = []
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise Unbelievable("GPM is not supported by this device")
        for _ in range(2):
            self._samples.append(nvml.nvmlGpmSampleAlloc())
        self._at_ns: int | None = None

    @property
    def period_s(self) -> float | None:
        return None

    def advance(self) -> tuple[int, int]:
        now = now_ns()
        if self._at_ns is not None and now - self._at_ns < _GPM_LEAST_NS:
            return 0, 0
        self._nvml.nvmlGpmSampleGet(self._handle, self._samples[1])
        before, self._at_ns = self._at_ns, now
        self._samples.reverse()
        if before is None:
            return 0, 0
        asked = self._nvml.c_nvmlGpmMetricsGet_t()
        asked.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = 2
        # After the exchange the newer sample comes first.
        asked.sample1, asked.sample2 = self._samples[1], self._samples[0]
        for place, metric in enumerate(self._metrics):
            asked.metrics[place].metricId = metric
        self._nvml.nvmlGpmMetricsGet(asked)
        sent, received = (self._bytes(asked.metrics[place], now - before) for place in range(2))
        return sent, received

    def _bytes(self, metric: Any, elapsed_ns: int) -> int:
        if int(metric.nvmlReturn):
            raise self._nvml.NVMLError(int(metric.nvmlReturn))
        rate = within(float(metric.value) * (1 << 20), 0, _MOST_PER_SECOND, "bytes/s")
        return rate * elapsed_ns // 1_000_000_000

    def close(self) -> None:
        for sample in self._samples:
            ask(lambda sample=sample: self._nvml.nvmlGpmSampleFree(sample))  # type: ignore[misc]
        self._samples.clear()


class Throughput:
    """`nvmlDeviceGetPcieThroughput`: KB/s over 20 ms, and blocking that long a direction; taken as the rate in between."""

    name = "nvmlDeviceGetPcieThroughput (20 ms windows x time)"

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._at_ns: int | None = None

    @property
    def period_s(self) -> float | None:
        return _THROUGHPUT_PERIOD_S

    def advance(self) -> tuple[int, int]:
        rates = [
            within(self._nvml.nvmlDeviceGetPcieThroughput(self._handle, direction) * 1000, 0, _MOST_PER_SECOND, "bytes/s")
            for direction in (0, 1)
        ]
        now = now_ns()
        elapsed = 0 if self._at_ns is None else now - self._at_ns
        self._at_ns = now
        sent, received = (rate * elapsed // 1_000_000_000 for rate in rates)
        return sent, received

    def close(self) -> None:
        pass


def pcie_sources(nvml: Nvml, handle: Any) -> list[Callable[[], Source]]:
    """The ways to PCIe bytes, the best first."""
    return [
        lambda: Fields(nvml, handle, (_PCIE_TX, _PCIE_RX)),
        lambda: Gpm(nvml, handle, _GPM_PCIE),
        lambda: Throughput(nvml, handle),
    ]


def nvlink_sources(nvml: Nvml, handle: Any) -> list[Callable[[], Source]]:
    """The ways to NVLink bytes over all links, the best first."""
    return [
        lambda: Fields(nvml, handle, (_NVLINK_TX, _NVLINK_RX), scope=_ALL_LINKS, scale=1024),
        lambda: Gpm(nvml, handle, _GPM_NVLINK),
    ]


def _wrap_s(nvml: Nvml, handle: Any) -> float:
    """Seconds in which the fastest link of this device moves 4 GiB; a wide guess where it does not say."""
    generation = ask(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    width = ask(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    lane = _LANE.get(generation, _LANE[6]) if isinstance(generation, int) else _LANE[6]
    lanes = width if isinstance(width, int) and 1 <= width <= 32 else 16
    return float(min(2**32 / (lane * lanes), 1.0))


class Meter:
    """The bytes one device sent and received over one bus, from the best source that answers.

    A source that fails for good gives way to the next; the totals go on. With none left, `totals` is None and `failures`
    says why.

    Args:
        sources: makers of sources, the best first; they may raise what NVML says.
    """

    def __init__(self, sources: Sequence[Callable[[], Source]]) -> None:
        self.failures: list[str] = []
        self.lost = False
        self._left = list(sources)
        self._source: Source | None = None
        self._totals = (0, 0)
        self._strikes = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        # Held over one reading: the meter's own thread and the caller of `totals` take turns where a source changes.
        self._reading = threading.Lock()
        with self._reading:
            self._next_source()

    @property
    def source(self) -> str | None:
        """The name of the source that answers now."""
        source = self._source
        return None if source is None else source.name

    def totals(self) -> tuple[int, int] | None:
        """(sent, received) bytes so far; None once no source answers."""
        if self._thread is None:
            with self._reading:
                self._advance()
        return None if self._source is None else self._totals

    def close(self) -> bool:
        """Stop; False where a call still blocks in the driver, which then must not be shut down."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                return False
        with self._reading:
            if self._source is not None:
                self._source.close()
            self._source = None
        return True

    def _next_source(self) -> None:
        """Open the next source that answers once."""
        if self._source is not None:
            self._source.close()
        self._source, self._strikes = None, 0
        while self._left and not self.lost:
            made = ask(self._left.pop(0))
            if isinstance(made, Failure):
                self._failed(made)
                continue
            first = ask(made.advance)
            if isinstance(first, Failure):
                made.close()
                self._failed(first, made.name)
                continue
            self._source = made
            self._start_thread()
            return

    def _advance(self) -> None:
        source = self._source
        if source is None:
            return
        moved = ask(source.advance)
        if isinstance(moved, Failure):
            self._strikes += 1
            if moved.final or self._strikes >= _STRIKES:
                self._failed(moved, source.name)
                self._next_source()
            return
        self._strikes = 0
        sent, received = self._totals
        self._totals = (min(sent + moved[0], INT64_MAX), min(received + moved[1], INT64_MAX))
        self._start_thread()

    def _failed(self, failure: Failure, name: str = "") -> None:
        self.lost = self.lost or failure.lost
        self.failures.append(f"{name}: {failure.why}" if name else failure.why)

    def _start_thread(self) -> None:
        if self._source is None or self._source.period_s is None or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="zprof meter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            source = self._source
            # A quick source that followed a slow one is read here too: the thread is there.
            period = None if source is None else source.period_s or _THROUGHPUT_PERIOD_S
            if period is None or self._stop.wait(period):
                return
            with self._reading:
                self._advance()
