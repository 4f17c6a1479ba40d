"""Owns what recorded operators say: which take the time of a step, what the host does between them, and why a GPU is idle.

Measures, reports, diffs, exports and `zprof.open` take it from an `Analysis`. It reads the notes of windows, see
`zprof.recording.operators`, and checks each, for a file may be forged. It guesses no time: what torch.profiler did not see is
absent.

Note: [A device's steps]
    A host queues what a device does later: what a device did belongs to the step in which it was called for. A window begins
    and ends with the device at rest, so a step of it is the window's time, up to the last that was called for, over its steps.

Note: [Idle, and why]
    A device is idle while none of its streams runs a kernel, a copy or a memset. Each gap ends with the first that runs again.
    If the host called for that only after the gap had begun, the device had nothing to do: the gap is "launch", or "sync" where
    the host stood in a synchronizing call meanwhile, and belongs to the module that called. Otherwise it had been called for
    before, and waited for another stream or a copy: "device".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from zprof.analysis.coverage import Unseen
from zprof.analysis.curves import NO_KEY, module_of
from zprof.analysis.intervals import overlaps, portions
from zprof.rows import TraceError
from zprof.trace.operators import EVENTS, KINDS, PASSES, WINDOW, Events, Track, events_of, tracks_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zprof.analysis.compute import Computed
    from zprof.trace.reader import Trace

    Ints = NDArray[np.int64]

__all__ = [
    "Called", "Idle", "OperatorBy", "Operators", "Window", "by_operator", "columns", "operators", "operators_recorded",
    "pauses", "steps_in", "unfollowed",
]  # fmt: skip

OPERATOR, NODE, ANNOTATION, MODULE, RUNTIME, KERNEL, MEMCPY, MEMSET, MARK = range(len(KINDS))
_BUSY = (KERNEL, MEMCPY, MEMSET)
_MOST = 1 << 62
_MOST_WINDOWS = 64
_MOST_BOUNDS = 1 << 16
#: Calls in which the host waits for a device; and the operators that need its answer.
_SYNCS = ("Synchronize", "cudaMemcpy", "hipMemcpy")
_ASKS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
#: How operators are grouped.
OperatorBy = Literal["op", "kernel", "module", "unit"]
#: Reasons of a gap.
REASONS = ("launch", "sync", "device")


@dataclass(frozen=True, slots=True)
class Window:
    """One run of steps whose operators were recorded.

    Attributes:
        counted: "step", "forward" where no optimizer stepped, "" where neither was seen. first: the number of the first.
        bounds: when the first began and each ended; without a counted one begin and end of the window.
        why: why it ended before all its steps had, "" where it did not.
        left_out: events beyond the bound of a trace, or lost with their note; then only figures of the whole are wrong.
        error_ns: how far the times of operators may be from those of rows.
    """

    number: int
    counted: str
    first: int
    bounds: Ints
    why: str
    stack: bool
    left_out: int
    error_ns: int
    tracks: tuple[Track, ...]
    activities: tuple[str, ...]
    events: Events

    @property
    def count(self) -> int:
        """Steps, or forwards; 1 where the window is all there is."""
        return len(self.bounds) - 1

    @property
    def begin_ns(self) -> int:
        return int(self.bounds[0])

    @property
    def end_ns(self) -> int:
        return int(self.bounds[-1])

    @property
    def title(self) -> str:
        """"steps 3 to 5"."""
        if not self.counted:
            return "the recording"
        last = self.first + self.count - 1
        return f"{self.counted} {self.first}" if self.count == 1 else f"{self.counted}s {self.first} to {last}"

    def has(self, step: int) -> bool:
        """Whether it counts optimizer steps, and this one is among them."""
        return self.counted == "step" and self.first <= step < self.first + self.count

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({track.name for track in self.tracks if track.kind == "stream"}))


@dataclass(frozen=True, slots=True)
class Called:
    """What all calls of one operator, kernel or module took; times of one step.

    Attributes:
        name: of the operator, the kernel, the module up to its first number, or the unit.
        calls: a step. host_ns: in it and nothing it called. device_ns: in kernels and copies that it launched itself.
        flops_per_s: of those whose FLOPs were counted in other steps, while one ran; None where none were.
        mostly: of a kernel the operator and module that launched most of its time; of an operator the module.
        beside: the thread on which most of its time was, where that is not the one that ran the step, nor one that worked
            for it; several may run there at once. "" otherwise.
    """

    name: str
    calls: float
    host_ns: float
    device_ns: float
    flops_per_s: float | None
    mostly: str
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Idle:
    """How long a device did nothing, of one step.

    Attributes:
        device: "cuda:0". idle_ns, step_ns: of a step. reasons: see Note: [Idle, and why].
        modules: module -> the time of gaps that its late calls ended, the most first.
    """

    device: str
    idle_ns: float
    step_ns: float
    reasons: dict[str, float]
    modules: dict[str, float]

    @property
    def share(self) -> float:
        return self.idle_ns / self.step_ns if self.step_ns else 0.0


@dataclass(frozen=True, slots=True)
class Operators:
    """What was recorded of operators.

    Attributes:
        windows: those that hold events, in time.
        shown: the one that figures are of: the first that counts steps, else forwards; see `at`.
        skipped: why others were not recorded, a line each.
        units: of zhooks, by name; none where no model was under it.
    """

    windows: tuple[Window, ...]
    shown: Window
    skipped: tuple[str, ...]
    units: frozenset[str]
    _self_ns: Ints
    _device_ns: Ints
    _asked_ns: Ints

    @classmethod
    def of(
        cls,
        windows: tuple[Window, ...],
        skipped: tuple[str, ...] = (),
        units: frozenset[str] = frozenset(),
        shown: Window | None = None,
    ) -> Operators:
        """Of at least one window."""
        if shown is None:
            shown = min(windows, key=lambda window: (("step", "forward", "").index(window.counted), window.number))
        events = shown.events
        return cls(windows, shown, skipped, units, _self_of(events), _launched_of(events), _asked_of(events))

    def at(self, step: int | None) -> Operators:
        """With figures of the window that has this step, counted from 0, where one has."""
        found = [window for window in self.windows if step is not None and window.has(step)]
        return self.of(self.windows, self.skipped, self.units, found[0]) if found else self

    @property
    def step_ns(self) -> float:
        """How long a step of the window took, see Note: [A device's steps]."""
        return (self._end_ns - self.shown.begin_ns) / self.shown.count

    @property
    def _end_ns(self) -> int:
        events = self.shown.events
        ran = self._inside() & np.isin(events.kind, _BUSY)
        return int(events.end_ns[ran].max(initial=self.shown.end_ns))

    def by(self, what: OperatorBy, did: Computed | None = None) -> list[Called]:
        """What took most, by "op", "kernel", "module" or "unit", the longest first."""
        events, inside = self.shown.events, self._inside()
        grouped = what in ("module", "unit")
        if what == "kernel":
            chosen = inside & np.isin(events.kind, _BUSY)
        else:
            chosen = inside & np.isin(events.kind, (OPERATOR, NODE, ANNOTATION, RUNTIME, *((MODULE,) if grouped else ())))
        which = np.flatnonzero(chosen)
        if not len(which):
            return []
        group, names = (events.name, events.strings) if not grouped else self._units() if what == "unit" else self._modules()
        numbers, member = np.unique(group[which], return_inverse=True)
        host = np.bincount(member, self._self_ns[which]) if what != "kernel" else np.zeros(len(numbers))
        device = np.bincount(member, (events.duration_ns if what == "kernel" else self._device_ns)[which])
        calls = np.bincount(member, (events.kind[which] != MODULE) & ~_repeated(events)[which])
        rates = self._rates(did) if what == "op" else {}
        found = []
        for place, number in enumerate(numbers.tolist()):
            name = names[number] if number >= 0 else NO_KEY
            mine = which[member == place]
            mostly = "" if grouped else self._mostly(mine, kernels=what == "kernel")
            beside = self._beside(mine) if what == "op" else ""
            each = self.shown.count
            figures = (calls[place] / each, host[place] / each, device[place] / each, rates.get(name))
            found.append(Called(name, *figures, mostly, beside))
        return sorted(found, key=lambda called: (-(called.host_ns + called.device_ns), called.name))

    def in_operators_ns(self) -> float:
        """Of a step, on the thread that ran most of them: the time in operators and calls of a runtime."""
        events = self.shown.events
        mine = self._main() & np.isin(events.kind, (OPERATOR, NODE, RUNTIME))
        bounds = np.array([[self.shown.begin_ns, self.shown.end_ns]], np.int64)
        order = np.flatnonzero(mine)
        order = order[np.lexsort((-events.duration_ns[order], events.begin_ns[order]))]
        begin, end = portions(events.begin_ns[order], events.end_ns[order])
        return float(overlaps(begin, end, bounds)[2].sum()) / self.shown.count

    def between(self) -> dict[str, float]:
        """Of a step, on that thread: the time in no operator, by the module whose Python ran, or the annotation; the most
        first."""
        events, (numbers, names) = self.shown.events, self._modules()
        sums: Counter[str] = Counter()
        chosen = self._main() & self._inside() & np.isin(events.kind, (MODULE, ANNOTATION))
        columns = (numbers, events.name, self._self_ns)
        for module, name, took in zip(*(column[chosen].tolist() for column in columns), strict=True):
            sums[names[module] if module >= 0 else events.strings[name]] += took
        left = self.step_ns - self.in_operators_ns() - sum(sums.values()) / self.shown.count
        found = {name: took / self.shown.count for name, took in sums.items()}
        found[NO_KEY] = found.get(NO_KEY, 0.0) + max(left, 0.0)
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def idle(self) -> list[Idle]:
        """Of each device; empty where none was recorded."""
        return [self._idle(device) for device in self.shown.devices]

    def syncs(self) -> list[tuple[str, str, float, float]]:
        """(call, the user's line or else the module, calls, host time) of what waits for a device; the longest first.

        Where there is no device, of what reads a value, which would wait for one that had it; those of optimizers are left out,
        which keep what they read on the CPU.
        """
        events, strings = self.shown.events, self.shown.events.strings
        wanted = np.array([any(word in name for word in _SYNCS) and "Async" not in name for name in strings], bool)
        asks = {at for at, name in enumerate(strings) if name in _ASKS}
        if self.shown.devices:
            called = (events.kind == RUNTIME) & wanted[events.name]
        else:
            outer = ~np.isin(events.name[events.parent], list(asks)) | (events.parent < 0)
            called = (events.kind == OPERATOR) & np.isin(events.name, list(asks)) & outer
            called &= events.doing != PASSES.index("step")
        sums: dict[tuple[str, str], list[float]] = {}
        for event in np.flatnonzero(called & self._inside()).tolist():
            line, call = self._line(event), strings[events.name[event]]
            module, asked = int(events.module[event]), -1
            above = int(events.parent[event])
            while above >= 0:
                asked = above if int(events.name[above]) in asks else asked
                above = int(events.parent[above])
            call = call if asked < 0 else f"{strings[events.name[asked]]} ({call})"
            key = call, line or (strings[module] if module >= 0 else NO_KEY)
            both = sums.setdefault(key, [0.0, 0.0])
            both[0] += 1
            both[1] += int(events.duration_ns[event])
        each = self.shown.count
        found = [(*key, calls / each, took / each) for key, (calls, took) in sums.items()]
        return sorted(found, key=lambda row: (-row[3], row[:2]))

    def _line(self, event: int) -> str:
        events = self.shown.events
        while event >= 0:
            if events.line[event] >= 0:
                return events.strings[int(events.line[event])]
            event = int(events.parent[event])
        return ""

    # What these take from the columns.

    def _inside(self) -> NDArray[np.bool_]:
        """Events of the window's steps."""
        inside: NDArray[np.bool_] = (self._asked_ns >= self.shown.begin_ns) & (self._asked_ns < self.shown.end_ns)
        return inside

    def _main(self) -> NDArray[np.bool_]:
        main: NDArray[np.bool_] = self.shown.events.track == self._main_track()
        return main

    def _main_track(self) -> int:
        """The thread on which most of the time in operators was, but for those that nobody's step called."""
        events = self.shown.events
        host = np.array([track.kind == "thread" for track in self.shown.tracks] or [False], bool)
        ours = (events.kind == OPERATOR) & (events.doing > 0)
        counted = ours if bool(ours.any()) else events.kind == OPERATOR
        spent = np.bincount(events.track, np.where(counted, self._self_ns, 0), minlength=len(host))
        return int(np.where(host, spent[: len(host)], -1).argmax())

    def _beside(self, which: Ints) -> str:
        """The thread that most of these ran on, where they were nothing that the step waited for in its own code."""
        events = self.shown.events
        track, member = np.unique(events.track[which], return_inverse=True)
        most = int(track[np.bincount(member, self._self_ns[which]).argmax()])
        outside = (events.doing[which] == 0) & (events.module[which] < 0)
        if most == self._main_track() or not bool(outside[events.track[which] == most].all()):
            return ""
        return self.shown.tracks[most].name

    def _modules(self) -> tuple[Ints, list[str]]:
        """Of each event the number in the names; -1 outside all."""
        return _grouped(self.shown.events, lambda path: module_of(path) or NO_KEY)

    def _units(self) -> tuple[Ints, list[str]]:
        return _grouped(self.shown.events, unit_namer(self.shown, self.units))

    def _mostly(self, which: Ints, *, kernels: bool) -> str:
        events, strings = self.shown.events, self.shown.events.strings
        if kernels:
            owner = _owner_of(events)[which]
            keys = [(int(name), int(module)) for name, module in zip(events.name[owner], events.module[which], strict=True)]
            weights = events.duration_ns[which].tolist()
            keys = [(name if own >= 0 else -1, module) for (name, module), own in zip(keys, owner.tolist(), strict=True)]
        else:
            keys = [(-1, int(module)) for module in events.module[which]]
            weights = (self._self_ns[which] + self._device_ns[which] + 1).tolist()
        sums: Counter[tuple[int, int]] = Counter()
        for key, weight in zip(keys, weights, strict=True):
            sums[key] += weight
        (name, module), _ = sums.most_common(1)[0]
        words = [strings[name]] if name >= 0 else []
        words += [strings[module]] if module >= 0 else []
        return ", ".join(words)

    def _rates(self, did: Computed | None) -> dict[str, float]:
        """Operator -> FLOPs a second while one ran: those of a call as counted in other steps."""
        if did is None:
            return {}
        calls: Counter[tuple[str, str, str]] = Counter()
        flops: Counter[tuple[str, str, str]] = Counter()
        for row in did.rows:
            if row.flops:
                calls[row.module, row.doing, f"aten::{row.operation}"] += row.calls
                flops[row.module, row.doing, f"aten::{row.operation}"] += row.flops
        events, strings = self.shown.events, self.shown.events.strings
        known = {key[2] for key in flops}
        wanted = np.isin(events.name, [at for at, name in enumerate(strings) if name in known])
        which = np.flatnonzero(self._inside() & (events.kind == OPERATOR) & wanted)
        took = _inclusive(events, self._device_ns) if self.shown.devices else events.duration_ns
        done: Counter[str] = Counter()
        spent: Counter[str] = Counter()
        for event in which.tolist():
            name, module = strings[events.name[event]], int(events.module[event])
            key = strings[module] if module >= 0 else "(outside modules)", PASSES[events.doing[event]], name
            if calls[key] and took[event]:
                done[name] += flops[key] / calls[key]  # type: ignore[assignment]
                spent[name] += int(took[event])
        return {name: 1e9 * done[name] / spent[name] for name in done if spent[name]}

    def _idle(self, device: str) -> Idle:
        events, window = self.shown.events, self.shown
        tracks = [number for number, track in enumerate(window.tracks) if track.kind == "stream" and track.name == device]
        order = np.flatnonzero(np.isin(events.track, tracks) & np.isin(events.kind, _BUSY))
        order = order[np.argsort(events.begin_ns[order], kind="stable")]
        begin, end = events.begin_ns[order], np.maximum.accumulate(events.end_ns[order])
        # A gap lies before each event that begins after all before it have ended, and behind the last.
        starts = np.maximum(np.append(window.begin_ns, end), window.begin_ns)
        last_ns = self._end_ns
        stops = np.minimum(np.append(begin, last_ns), last_ns)
        reasons, modules = dict.fromkeys(REASONS, 0.0), Counter[str]()
        numbers, names = self._modules()
        wanted = [at for at, name in enumerate(events.strings) if any(word in name for word in _SYNCS) and "Async" not in name]
        syncs = np.flatnonzero((events.kind == RUNTIME) & np.isin(events.name, wanted))
        syncs = syncs[np.argsort(events.end_ns[syncs], kind="stable")]
        sync_ends = events.end_ns[syncs]
        total = 0
        for place in np.flatnonzero(stops > starts).tolist():
            start, stop = int(starts[place]), int(stops[place])
            total += stop - start
            event = int(order[place]) if place < len(order) else -1
            call = int(events.cause[event]) if event >= 0 else -1
            called = int(events.begin_ns[call]) if call >= 0 else stop
            if called < start:
                reasons["device"] += stop - start
                continue
            stood = np.searchsorted(sync_ends, called, side="right") - np.searchsorted(sync_ends, start, side="left")
            reasons["sync" if stood > 0 else "launch"] += stop - start
            number = int(numbers[event]) if event >= 0 else -1
            modules[names[number] if number >= 0 else NO_KEY] += stop - start
        each = window.count
        return Idle(
            device,
            total / each,
            self.step_ns,
            {reason: took / each for reason, took in reasons.items()},
            {name: took / each for name, took in modules.most_common()},
        )


def by_operator(found: Operators) -> dict[str, tuple[float, float]]:
    """Operator or kernel -> (time of a step, calls of a step), to compare runs by: on a device where there is one."""
    rows = found.by("kernel") if found.shown.devices else found.by("op")
    return {row.name: (row.device_ns or row.host_ns, row.calls) for row in rows}


def steps_in(window: Window) -> Ints:
    """The step of each event, counted from 0; -1 of those in none."""
    number = np.searchsorted(window.bounds, _asked_of(window.events), side="right") - 1
    counted = (number >= 0) & (number < window.count) & bool(window.counted)
    step: Ints = np.where(counted, number + window.first, -1)
    return step


def columns(found: Operators) -> dict[str, NDArray[Any]]:
    """All events of all windows as columns of one length: names as texts, times in nanoseconds of the trace's clock."""
    parts: list[dict[str, NDArray[Any]]] = []
    first = 0
    for window in found.windows:
        events = window.events
        text = np.array([*events.strings, ""], object)
        track = np.array([*(each.name for each in window.tracks), ""], object)
        lane = np.array([*(each.number if each.kind == "stream" else -1 for each in window.tracks), -1], np.int64)
        unit, units = _grouped(events, unit_namer(window, found.units))
        parts.append(
            {
                "name": text[events.name],
                "kind": np.array(KINDS, object)[events.kind],
                "module": text[events.module],
                "unit": np.array([*units, ""], object)[unit] if found.units else np.full(len(events), "", object),
                "pass": np.array(PASSES, object)[events.doing],
                "step": steps_in(window),
                "window": np.full(len(events), window.number),
                "where": track[events.track],
                "stream": lane[events.track],
                "begin_ns": events.begin_ns,
                "duration_ns": events.duration_ns,
                "self_ns": _self_of(events),
                "device_ns": _launched_of(events),
                "parent": np.where(events.parent < 0, -1, events.parent + first),
                "cause": np.where(events.cause < 0, -1, events.cause + first),
                "line": text[events.line],
            }
        )
        first += len(events)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def unit_namer(window: Window, units: frozenset[str]) -> Callable[[str], str]:
    """From a module's path to the unit that has it; where there are no units, to the path itself.

    What no unit's name begins is the outermost one's, which is named as the model itself is.
    """
    if not units:
        return lambda path: path
    events = window.events
    outermost = (events.kind == MODULE) & (events.parent < 0)
    models = {events.strings[at] for at in np.unique(events.name[outermost]).tolist()} & units

    def name(path: str) -> str:
        whole = path
        while path and path not in units:
            path = path.rpartition(".")[0]
        return path or (next(iter(models)) if len(models) == 1 else whole)

    return name


def _grouped(events: Events, name: Callable[[str], str]) -> tuple[Ints, list[str]]:
    """Of each event the number of its module's group, -1 of none; and the groups."""
    known: dict[str, int] = {}
    used = np.unique(events.module[events.module >= 0])
    groups = np.full(len(events.strings) + 1, -1, np.int64)
    groups[used] = [known.setdefault(name(events.strings[at]), len(known)) for at in used.tolist()]
    return groups[events.module], list(known)


def _asked_of(events: Events) -> Ints:
    """When each began; of what a device did, when it was called for."""
    asked: Ints = np.where(np.isin(events.kind, _BUSY) & (events.cause >= 0), events.begin_ns[events.cause], events.begin_ns)
    return asked


def _self_of(events: Events) -> Ints:
    """What each event takes and nothing inside of it does."""
    inside = events.parent >= 0
    held = np.bincount(events.parent[inside], events.duration_ns[inside], minlength=len(events)).astype(np.int64)
    own: Ints = np.maximum(events.duration_ns - held[: len(events)], 0)
    return own


def _repeated(events: Events) -> NDArray[np.bool_]:
    """Operators that are all that one of their own name did (an overload that calls another): one call, as torch counts."""
    inside = events.parent >= 0
    children = np.bincount(events.parent[inside], minlength=len(events))
    repeated: NDArray[np.bool_] = inside & (events.name == events.name[events.parent]) & (children[events.parent] == 1)
    return repeated


def _owner_of(events: Events) -> Ints:
    """Of what a device did, the operator that launched it, else the call; -1 for all others."""
    cause = np.where(np.isin(events.kind, _BUSY), events.cause, -1)
    call = (cause >= 0) & (events.kind[cause] == RUNTIME) & (events.parent[cause] >= 0)
    owner: Ints = np.where(call, events.parent[cause], cause)
    return owner


def _launched_of(events: Events) -> Ints:
    """The time that devices took over what each operator launched itself."""
    owner = _owner_of(events)
    owned = owner >= 0
    found: Ints = np.bincount(owner[owned], events.duration_ns[owned], minlength=len(events)).astype(np.int64)
    return found


def _inclusive(events: Events, own: Ints) -> Ints:
    """With that of all events inside."""
    total = own.copy()
    # Parents come first, so that backwards each is whole before it is added.
    parents = events.parent.tolist()
    sums = total.tolist()
    for event in range(len(parents) - 1, -1, -1):
        if parents[event] >= 0:
            sums[parents[event]] += sums[event]
    return np.array(sums, np.int64)


# Reading.


def operators(trace: Trace, units: Iterable[str] = ()) -> Operators | Unseen:
    """What ``trace`` has of operators; ``units`` are those of zhooks in it."""
    facts: dict[int, Mapping[str, Any]] = {}
    skipped: list[str] = []
    for note in trace.notes(WINDOW):
        number = note.body.get("window")
        if type(number) is int and 0 <= number < _MOST_WINDOWS:
            facts[number] = note.body
        elif isinstance(note.body.get("why"), str):
            skipped.append(str(note.body["why"])[:200])
    parts: dict[int, list[Mapping[str, Any]]] = {}
    if facts:
        for note in trace.notes(EVENTS):
            number = note.body.get("window")
            if type(number) is int and number in facts:
                parts.setdefault(number, []).append(note.body)
    windows = []
    for number, body in sorted(facts.items()):
        if "end_ns" not in body:
            skipped.append("the run ended while operators were recorded: torch.profiler had them in memory")
            continue
        try:
            window = _window(number, body, parts.get(number, []))
        except ValueError as error:
            skipped.append(f"window {number} cannot be read: {str(error)[:200]}")
            continue
        if len(window.events):
            windows.append(window)
        else:
            skipped.append(window.why or "torch.profiler saw no operator")
    if windows:
        return Operators.of(tuple(windows), tuple(dict.fromkeys(skipped)), frozenset(units))
    lacking = [note.body.get("why") for note in trace.notes("lacking") if "operators" in str(note.body.get("what"))]
    skipped += [str(why)[:200] for why in lacking]
    asked = [note.body["steps"] for note in trace.notes(WINDOW) if isinstance(note.body.get("steps"), str)]
    if asked and not skipped:
        skipped = [f"the recording ended before the first of steps {asked[0][:80]}"]
    return Unseen(f"not recorded: {skipped[-1]}" if skipped else "not recorded: operators are at --level ops")


def operators_recorded(trace: Trace, found: Operators | Unseen, by: str) -> None:
    """Refuse to group what is not there.

    Raises:
        TraceError: no operator was recorded; or no kernel, where these are asked for.
    """
    if isinstance(found, Unseen):
        raise TraceError(f"{trace.path}: --by {by}: expected a run recorded at --level ops; {found}")
    if by == "kernel" and not found.shown.devices:
        raise TraceError(f"{trace.path}: --by kernel: expected a run on a GPU, found one that used none; try --by op")


def _window(number: int, body: Mapping[str, Any], notes: Sequence[Mapping[str, Any]]) -> Window:
    counted, why, bounds = body.get("counted"), body.get("why"), body.get("bounds")
    whole = {name: body.get(name) for name in ("begin_ns", "end_ns", "first", "events", "left_out", "error_ns")}
    if not all(type(value) is int and 0 <= value < _MOST for value in whole.values()):
        raise ValueError("its numbers are invalid")
    if counted not in ("step", "forward", "") or type(why) is not str:
        raise ValueError("it does not say what was counted")
    if not isinstance(bounds, list) or len(bounds) > _MOST_BOUNDS:
        raise ValueError("its bounds are none")
    if not all(type(at) is int and 0 <= at < _MOST for at in bounds):
        raise ValueError("its bounds are none")
    if not counted or len(bounds) < 2:
        counted, bounds = "", [whole["begin_ns"], whole["end_ns"]]
    if any(end <= begin for begin, end in pairwise(bounds)):
        raise ValueError("its steps end before they begin")
    activities = body.get("activities")
    events = events_of(notes)
    tracks = tracks_of(body.get("tracks"))
    if len(events) and int(events.track.max()) >= len(tracks):
        raise ValueError("its events are on no track")
    return Window(
        number,
        counted,
        whole["first"],  # type: ignore[arg-type]
        np.array(bounds, np.int64),
        why[:200],
        body.get("stack") is True,
        whole["left_out"] + max(0, whole["events"] - len(events)),  # type: ignore[operator]
        whole["error_ns"],  # type: ignore[arg-type]
        tracks,
        tuple(str(each)[:40] for each in activities[:8]) if isinstance(activities, list) else (),
        events,
    )


def pauses(trace: Trace) -> list[tuple[int, int]]:
    """When steps were longer for the operators' sake: while they were recorded, and while a session began or was written."""
    found = []
    for note in trace.notes(WINDOW):
        body = note.body
        times = [body.get("begin_ns"), body.get("end_ns")]
        if isinstance(body.get("pauses"), list):
            times += [at for pair in body["pauses"][:4] if isinstance(pair, list) for at in pair[:2]]
        known = [at for at in times if type(at) is int and 0 <= at < _MOST]
        if known:
            found.append((min(known), max(known)))
    return found


def unfollowed(trace: Trace) -> list[tuple[int, int]]:
    """When storages that were made were not followed, because operators were recorded or were to be."""
    last: dict[object, tuple[int, int]] = {}
    for note in trace.notes(WINDOW):
        began = note.body.get("followed_from_ns")
        if type(began) is int and 0 <= began < _MOST:
            last["before"] = (0, began)
        begin, end = note.body.get("begin_ns"), note.body.get("end_ns", _MOST - 1)
        if note.body.get("followed") is True and type(begin) is int and type(end) is int and 0 <= begin <= end < _MOST:
            last[str(note.body.get("window"))] = (begin, end)
    return sorted(last.values())[:_MOST_WINDOWS]
