"""Owns what is known of a run while it is recorded: levels by tier, step time, bandwidths, and who waits for what.

``zprof top``, ``zprof run --live`` and ``--prometheus`` ask it again and again. It reads what was added to the trace since it
last looked, chunk by chunk, keeps a window of the last seconds, and never writes.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zprof.analysis.compute import last_batch
from zprof.analysis.coverage import Coverage, coverage
from zprof.clock import wall_ns
from zprof.gpu.vendors import quantity_of
from zprof.rows import CATEGORIES, MOVES, PLACES, TIERS, RowKind
from zprof.trace.levels import TIER_OF, Levels, Open, walked
from zprof.trace.reader import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zprof.trace.columns import Rows

    Int64s = NDArray[np.int64]

__all__ = ["GPU_SAMPLES", "RECENT_STEPS", "WINDOW_NS", "RunFollower", "Seen", "Unit"]

WINDOW_NS = 10_000_000_000
#: A recorder writes at least every second; for how long a file may stay as it is before its run is
#: asked for its end, or is silent.
_UNCHANGED_NS = 2_000_000_000
_STILL_NS = 15_000_000_000
#: Step times are the median of so many.
RECENT_STEPS = 20
_MOST_STEPS = RECENT_STEPS + 1
#: Of one wait, so that sums of them fit; a year.
_MOST_NS = 1 << 55
#: Quantities of which the last value is shown.
_SAMPLES = (
    "rss", "cgroup memory", "cuda allocated", "cuda reserved", "pinned", "children count", "children rss", "children pss"
)  # fmt: skip
#: The same of each GPU, whoever made it.
GPU_SAMPLES = ("memory used", "utilisation", "power", "temperature")
_MOST_GPU_ROWS = 1024
_TOP = 5


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit, or block, with bytes it holds on the device, or milliseconds a step it was waited for, and why."""

    name: str
    nbytes: int = 0
    wait_ms: float = 0.0
    what: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """A run as it was when last looked at.

    Attributes:
        state: "recording", "ended", "killed" for one that left no end and whose process is gone, "silent" for one that
            stopped writing and whose process lives, or cannot be seen from this host, "predicted" for a simulation.
        tiers: tier -> bytes held, of what is recorded; None where nothing on it is. peaks: tier in use -> the most it held.
        categories: tier in use -> category -> bytes held.
        samples: "rss", "cgroup memory", "children pss" and the like -> the last value.
        step_ms: median over the last steps; None before the second one ended. steps: ended so far.
        bandwidth: name of a transfer -> bytes a second over the window.
        exposed_ms: waiting a step, over the window; None where no step ended in it, or waits are not seen.
        waited: share of the window somebody stood still; None where waits are not seen.
        unmeasured: why waits, and transfers without a rate, have no times; None where they have.
        holding, waiting: the units that hold most on the device, and that were waited for longest.
        damage: what of the file cannot be read, in one line.
        elapsed_s: from the beginning of the recording to its last row. last_row_s: when that was, in seconds since 1970.
        host: where it runs.
        whole: the tiers all of whose bytes are recorded. known: tier -> the categories whose bytes are.
        category_peaks: tier -> category -> the most it held.
        sample_peaks: as ``samples``, the highest value.
        gpus: GPU -> what was sampled of it last, such as "power" in mW.
        batch: (tokens, samples) of the last step whose operations were counted; None for what is not known.
    """

    path: str
    rank: int
    world: int
    pid: int
    device: str
    state: str
    tiers: dict[str, int | None]
    samples: dict[str, int]
    steps: int
    step_ms: float | None
    bandwidth: dict[str, float]
    exposed_ms: float | None
    unmeasured: str | None
    holding: list[Unit]
    waiting: list[Unit]
    damage: str | None
    peaks: dict[str, int]
    categories: dict[str, dict[str, int]]
    waited: float | None
    elapsed_s: float
    last_row_s: float
    host: str
    whole: tuple[str, ...]
    known: dict[str, tuple[str, ...]]
    category_peaks: dict[str, dict[str, int]]
    sample_peaks: dict[str, int]
    gpus: dict[str, dict[str, int]]
    batch: tuple[float | None, float | None]


class _Window:
    """Facts of the last seconds: a time, a place among the trace's strings, another one, and a number."""

    def __init__(self) -> None:
        self.facts: Int64s = np.zeros((0, 4), np.int64)

    def add(self, time_ns: Int64s, what: Int64s, key: Int64s, value: Int64s) -> None:
        if len(time_ns):
            self.facts = np.concatenate((self.facts, np.stack((time_ns, what, key, value), axis=1)))

    def since(self, time_ns: int) -> None:
        if len(self.facts) and self.facts[:, 0].min() < time_ns:
            self.facts = self.facts[self.facts[:, 0] >= time_ns]


class RunFollower:
    """A trace that may still grow.

    Raises:
        TraceError: ``path`` is no trace.
    """

    def __init__(self, path: Path) -> None:
        self._trace = Trace.open(path)
        self._levels = Levels(self._trace.strings)
        self._held: Int64s = np.zeros(0, np.int64)
        self._totals: Int64s = np.zeros(len(TIERS), np.int64)
        self._peaks: Int64s = np.zeros(len(TIERS), np.int64)
        self._by_place: Int64s = np.zeros(len(PLACES), np.int64)
        self._place_peaks: Int64s = np.zeros(len(PLACES), np.int64)
        self._samples: dict[str, int] = {}
        self._sample_peaks: dict[str, int] = {}
        self._gpus: dict[str, dict[str, int]] = {}
        self._moved, self._waited, self._stepped = _Window(), _Window(), _Window()
        self._waits = _Waits()
        self._step_ends: dict[int, list[int]] = {}
        self._steps: dict[int, int] = {}
        self._known = 0
        self._is: dict[str, NDArray[np.bool_]] = {}
        self._last_ns = self._trace.header.mono_ns

    @property
    def began_ns(self) -> int:
        """When the recording began, on the monotonic clock."""
        return self._trace.header.mono_ns

    def look(self) -> Seen:
        """Read what was added, and say how the run stands.

        Raises:
            TraceError: another run's file lies at the path now.
        """
        for rows in self._trace.more():
            if len(rows):
                self._take(rows)
        return self._seen()

    def close(self) -> None:
        """Let the file go."""
        self._trace.close()

    def _take(self, rows: Rows) -> None:
        self._learn()
        changes = self._levels.take(rows)
        self._held = np.append(self._held, np.zeros(len(self._levels) - len(self._held), np.int64))
        np.add.at(self._held, changes.series, changes.change)
        by_tier = walked(TIER_OF[changes.place], changes.change, self._totals)
        self._peaks[by_tier.group] = np.maximum(self._peaks[by_tier.group], by_tier.top)
        by_place = walked(changes.place, changes.change, self._by_place)
        self._place_peaks[by_place.group] = np.maximum(self._place_peaks[by_place.group], by_place.top)
        whole = rows.kind == RowKind.SPAN
        # A device's span says when it began, and how long it was.
        time_ns = np.where(whole, rows.time_ns + rows.ident, rows.time_ns)
        self._last_ns = max(self._last_ns, int(time_ns.max()))
        since = self._last_ns - WINDOW_NS
        ends, recent = whole | (rows.kind == RowKind.END), time_ns >= since
        moved = np.flatnonzero(self._is["transfer"][rows.what] & ends & recent)
        what, key = rows.what.astype(np.int64), rows.key.astype(np.int64)
        self._moved.add(time_ns[moved], what[moved], key[moved], rows.nbytes[moved])
        waits = self._is["wait"][rows.what]
        self._waited.add(*self._waits.take(rows, waits))
        lanes = np.flatnonzero(waits & whole)
        self._waited.add(time_ns[lanes], what[lanes], key[lanes], np.minimum(rows.ident[lanes], _MOST_NS))
        at = np.flatnonzero(self._is["step"][rows.what] & ends)
        self._take_steps(rows.key[at].astype(np.int64), time_ns[at])
        self._take_samples(rows)
        for window in (self._moved, self._waited, self._stepped):
            window.since(since)

    def _take_samples(self, rows: Rows) -> None:
        counted, strings = rows.kind == RowKind.COUNTER, self._trace.strings
        sampled = np.flatnonzero(self._is["sample"][rows.what] & counted)
        for at in sampled[-64:].tolist():
            name, of = strings[int(rows.what[at])], strings[int(rows.key[at])]
            # Of children the sum, which has no key.
            if not (of and name.startswith("children")):
                self._samples[name] = int(rows.nbytes[at])
        for what in np.unique(rows.what[sampled]).tolist():
            highest = int(rows.nbytes[sampled][rows.what[sampled] == what].max())
            self._sample_peaks[strings[what]] = max(self._sample_peaks.get(strings[what], 0), highest)
        for at in np.flatnonzero(self._is["gpu"][rows.what] & counted)[-_MOST_GPU_ROWS:].tolist():
            quantity = quantity_of(strings[int(rows.what[at])])
            self._gpus.setdefault(strings[int(rows.key[at])], {})[quantity] = int(rows.nbytes[at])

    def _learn(self) -> None:
        """Which of the trace's strings name what; they only grow."""
        strings = self._trace.strings
        if self._known == len(strings) and self._is:
            return
        fresh = strings[self._known :]
        for kind, test in (
            ("transfer", lambda name: name in MOVES),
            ("wait", lambda name: name.startswith("wait ")),
            ("step", lambda name: name == "step"),
            ("sample", lambda name: name in _SAMPLES),
            ("gpu", lambda name: quantity_of(name) in GPU_SAMPLES),
        ):
            known = self._is.get(kind, np.zeros(0, np.bool_))
            self._is[kind] = np.append(known, np.array([test(name) for name in fresh], np.bool_))
        self._known = len(strings)

    def _take_steps(self, keys: Int64s, times: Int64s) -> None:
        for key in np.unique(keys).tolist():
            mine = np.sort(times[keys == key])
            self._steps[key] = self._steps.get(key, 0) + len(mine)
            self._step_ends[key] = [*self._step_ends.get(key, []), *mine[-_MOST_STEPS:].tolist()][-_MOST_STEPS:]
        self._stepped.add(times, keys, keys, np.zeros(len(times), np.int64))

    def _seen(self) -> Seen:
        header = self._trace.header
        covered = self._covered()
        key = max(self._steps, key=lambda key: self._steps[key], default=None)
        ends = [] if key is None else self._step_ends[key]
        elapsed = self._last_ns - header.mono_ns
        span = max(1, min(WINDOW_NS, elapsed))
        stepped = int((self._stepped.facts[:, 1] == key).sum()) if key is not None else 0
        waited = int(self._waited.facts[:, 3].sum())
        return Seen(
            path=str(self._trace.path),
            rank=header.rank,
            world=header.world,
            pid=header.pid,
            device=self._trace.device,
            state=self._state(),
            tiers=self._tiers(covered),
            samples=dict(self._samples),
            steps=0 if key is None else self._steps[key],
            step_ms=float(np.median(np.diff(ends))) / 1e6 if len(ends) > 1 else None,
            bandwidth={name: rate for name, rate in self._bandwidth(span).items() if covered.queued(name) is None},
            exposed_ms=waited / 1e6 / stepped if stepped and covered.waits() is None else None,
            unmeasured=None if (queued := covered.queued("wait")) is None else queued.why,
            holding=self._holding(),
            waiting=self._waiting(max(1, stepped)) if covered.queued("wait") is None else [],
            damage=self._damage(),
            peaks={tier: int(self._peaks[number]) for number, tier in enumerate(TIERS) if self._peaks[number]},
            categories=self._categories(),
            waited=min(1.0, waited / span) if covered.waits() is None else None,
            elapsed_s=elapsed / 1e9,
            last_row_s=(header.wall_ns + elapsed) / 1e9,
            host=header.host,
            whole=tuple(tier for tier in TIERS if covered.tier(tier) is None),
            known={tier: tuple(each for each in CATEGORIES if covered.place(each, tier) is None) for tier in covered.used},
            category_peaks=self._category_peaks(),
            sample_peaks=dict(self._sample_peaks),
            gpus={gpu: dict(found) for gpu, found in self._gpus.items()},
            batch=last_batch(self._trace),
        )

    def _damage(self) -> str | None:
        """What cannot be read; the end of a file that is being written is always half a chunk."""
        damage = self._trace.damage
        return None if damage is not None and damage.startswith("ends inside") else damage

    def _state(self) -> str:
        header = self._trace.header
        if header.simulated:
            return "predicted"
        try:
            changed = wall_ns() - self._trace.path.stat().st_mtime_ns
        except OSError:
            changed = _STILL_NS
        here = header.host == socket.gethostname()
        gone = here and not _alive(header.pid)
        # Notes are read only where the file does not change: a snapshot among them is large.
        if (gone or changed > _UNCHANGED_NS) and self._trace.notes("end"):
            return "ended"
        if gone:
            return "killed"
        return "recording" if changed < _STILL_NS else "silent"

    def _covered(self) -> Coverage:
        used = {TIERS[tier] for tier in TIER_OF[self._levels.place].tolist()}
        return coverage(self._trace, tuple(tier for tier in TIERS if tier in used))

    def _tiers(self, covered: Coverage) -> dict[str, int | None]:
        held = zip(TIERS, self._totals.tolist(), strict=True)
        return {name: nbytes if covered.anything(name) else None for name, nbytes in held}

    def _categories(self) -> dict[str, dict[str, int]]:
        held = np.zeros(len(PLACES), np.int64)
        np.add.at(held, self._levels.place, self._held)
        found: dict[str, dict[str, int]] = {TIERS[tier]: {} for tier in np.unique(TIER_OF[self._levels.place]).tolist()}
        for (category, tier), nbytes in zip(PLACES, held.tolist(), strict=True):
            if nbytes:
                found[tier][category] = nbytes
        return found

    def _category_peaks(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {tier: {} for tier in TIERS}
        for (category, tier), nbytes in zip(PLACES, self._place_peaks.tolist(), strict=True):
            found[tier][category] = nbytes
        return found

    def _bandwidth(self, span: int) -> dict[str, float]:
        facts = self._moved.facts
        names = {what: self._trace.strings[what] for what in np.unique(facts[:, 1]).tolist()}
        return {name: float(facts[facts[:, 1] == what, 3].sum()) * 1e9 / span for what, name in sorted(names.items())}

    def _holding(self) -> list[Unit]:
        on_device = TIER_OF[self._levels.place] == TIERS.index("device")
        keys, place = np.unique(self._levels.key[on_device], return_inverse=True)
        held = np.zeros(len(keys), np.int64)
        np.add.at(held, place, self._held[on_device])
        order = np.argsort(-held, kind="stable")[:_TOP].tolist()
        return [Unit(self._trace.strings[int(keys[at])], nbytes=int(held[at])) for at in order if held[at] > 0]

    def _waiting(self, steps: int) -> list[Unit]:
        facts = self._waited.facts
        pairs, place = np.unique(facts[:, 1:3], axis=0, return_inverse=True)
        spent = np.zeros(len(pairs), np.int64)
        np.add.at(spent, place.reshape(-1), facts[:, 3])
        order = np.argsort(-spent, kind="stable")[:_TOP].tolist()
        strings = self._trace.strings
        return [
            Unit(strings[int(pairs[at][1])], wait_ms=float(spent[at]) / 1e6 / steps, what=strings[int(pairs[at][0])])
            for at in order
            if spent[at] > 0
        ]


class _Waits:
    """Pairs the begins and ends of waits over chunks."""

    def __init__(self) -> None:
        self._open = Open()
        self._next = 0
        self._numbers: Int64s = np.zeros(0, np.int64)
        self._times: Int64s = np.zeros(0, np.int64)

    def take(self, rows: Rows, waits: NDArray[np.bool_]) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """(end, what, key, nanoseconds) of every wait that ended in ``rows``."""
        at = np.flatnonzero(waits & (rows.kind <= RowKind.END))
        what, key, times = rows.what[at].astype(np.int64), rows.key[at].astype(np.int64), rows.time_ns[at]
        number = np.arange(self._next, self._next + len(at))
        first, self._next = self._next, self._next + len(at)
        opened, closed = self._open.match(what << 32 | key, number, rows.kind[at] == RowKind.BEGIN)
        numbers, begun = np.append(self._numbers, number), np.append(self._times, times)
        begin = begun[np.searchsorted(numbers, opened)]
        # Those still open go on; their number is how they are found again.
        self._numbers = np.sort(self._open.row)
        self._times = begun[np.searchsorted(numbers, self._numbers)]
        ended = closed - first
        return times[ended], what[ended], key[ended], np.maximum(times[ended] - begin, 0)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
