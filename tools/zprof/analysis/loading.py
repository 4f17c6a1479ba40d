"""Owns what a recording says of data loaders: how long the training thread waited for each, and what would shorten that.

Reports ask it, with the stalls that are there already. It promises nothing: the workers that would keep up are those that would
if each went on as fast as now.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.text import as_duration
from zprof.analysis.children import Children
from zprof.analysis.coverage import Unseen
from zprof.recording.children import LOADERS

if TYPE_CHECKING:
    from zprof.analysis.coverage import Coverage
    from zprof.analysis.stalls import Stalls
    from zprof.trace.reader import Trace

__all__ = ["Loader", "Loading", "loading"]

#: Behind a loader's name in a trace.
_FIRST, _STARTING = " (first batch)", " (starting workers)"
#: Below this share of a step there is nothing to gain.
_LITTLE = 0.05
#: A worker that is busy for less than so much of the time waits for something itself.
_WAITS = 0.4
#: One that has no core for so much of the time would not be quicker for more workers.
_STARVED = 0.3
#: More workers than so many times what there are, nobody would start.
_MOST_TIMES = 64
_MOST_TEXT = 120
_MOST_LOADERS = 64


@dataclass(frozen=True, slots=True)
class Loader:
    """One loader, over the steps counted.

    Attributes:
        workers, batch, prefetch: as its arguments are; None where they are not known. persistent, pinned: as well.
        wait_ns: waited for it, per step. first_ns, starting_ns: of that, for the first batch of an epoch, and until workers had
            started.
        epochs: first batches.
    """

    name: str
    wait_ns: float
    first_ns: float
    starting_ns: float
    epochs: int
    workers: int | None = None
    batch: int | None = None
    prefetch: int | None = None
    persistent: bool | None = None
    pinned: bool | None = None

    @property
    def steady_ns(self) -> float:
        """Waited for batches that workers had time to work ahead for."""
        return self.wait_ns - self.first_ns - self.starting_ns


@dataclass(frozen=True, slots=True)
class Loading:
    """What was waited for data loaders.

    Attributes:
        step_ns: a step, on average. wait_ns: of that, for loaders.
        loaders: the one that was waited for longest first.
        busy: of one core, each loader worker; None where that was not sampled. queued: for how much of the time it was ready to
            run and had no core. cores: that this process may use.
        advice: a line each, the likeliest to help first.
    """

    step_ns: float
    wait_ns: float
    loaders: tuple[Loader, ...]
    busy: float | None
    queued: float | None
    cores: int | None
    advice: tuple[str, ...]

    @property
    def share(self) -> float:
        """Of the steps."""
        return self.wait_ns / self.step_ns if self.step_ns else 0.0


def loading(trace: Trace, stalls: Stalls, covered: Coverage, under: Children | Unseen) -> Loading | Unseen:
    """The loaders of a run; ``under`` are the processes under it."""
    unseen = covered.data() or covered.steps() or stalls.steps.unseen
    if unseen is not None:
        return unseen
    count = len(stalls.data_ns)
    if not count or not stalls.steps.count:
        return Unseen("no optimizer step was recorded")
    said = _noted(trace)
    waited = {unit.key: unit for unit in stalls.units if unit.what == "data"}
    found = []
    for name in dict.fromkeys(key.removesuffix(_FIRST).removesuffix(_STARTING) for key in waited):
        parts = [waited.get(name + part) for part in ("", _FIRST, _STARTING)]
        steady, first, starting = (part.exposed_ns / count if part is not None else 0.0 for part in parts)
        epochs = parts[1].count if parts[1] is not None else 0
        loader = Loader(name, steady + first + starting, first, starting, epochs, **_arguments(said.get(name, {})))
        found.append(loader)
    found.sort(key=lambda loader: -loader.wait_ns)
    workers = None if isinstance(under, Unseen) else under.kind(LOADERS)
    cores = trace.notes("loaders")[-1].body.get("cores")
    cores = cores if type(cores) is int and cores > 0 else None
    busy, queued = (None, None) if workers is None else (workers.busy, workers.queued)
    step_ns, wait_ns = stalls.steps.whole_ns / count, float(stalls.data_ns.sum()) / count
    how = _How(step_ns, busy, queued, cores)
    advice = tuple(_advice(found[0], count, how, cuda=covered.cuda)) if found else ()
    return Loading(step_ns, wait_ns, tuple(found), busy, queued, cores, advice)


def _noted(trace: Trace) -> dict[str, Mapping[str, Any]]:
    """Loader -> what the newest note says of it; a note of another program may hold anything."""
    notes = [note.body.get("loaders") for note in trace.notes("loaders")]
    listed = next((each for each in reversed(notes) if isinstance(each, list)), [])
    return {str(each.get("name"))[:_MOST_TEXT]: each for each in listed[:_MOST_LOADERS] if isinstance(each, dict)}


def _arguments(said: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: said.get(name) for name in ("workers", "batch", "prefetch")}
    flags = {name: said.get(name) for name in ("persistent", "pinned")}
    whole = {name: value for name, value in numbers.items() if type(value) is int and 0 <= value < 1 << 30}
    return whole | {name: value for name, value in flags.items() if type(value) is bool}


@dataclass(frozen=True, slots=True)
class _How:
    """How the steps and the workers went; as in `Loading`."""

    step_ns: float
    busy: float | None
    queued: float | None
    cores: int | None


def _advice(loader: Loader, count: int, how: _How, *, cuda: bool) -> Iterator[str]:
    if loader.wait_ns < _LITTLE * how.step_ns or loader.workers is None:
        return
    if not loader.workers:
        yield f"{loader.name}: num_workers=2 or more prepares batches in parallel with training, whose own thread does it now"
        return
    again_ns = loader.first_ns + loader.starting_ns
    if again_ns > loader.steady_ns and loader.epochs > 1 and not loader.persistent:
        each = as_duration(again_ns * count / loader.epochs)
        yield (
            f"{loader.name}: persistent_workers=True keeps its workers: starting them again and waiting for the first batch "
            f"took {each} in each of {loader.epochs} epochs"
        )
    elif loader.steady_ns >= again_ns:
        yield f"{loader.name}: {_bottleneck(loader, loader.workers, how)}"
    if cuda and loader.pinned is False:
        yield f"{loader.name}: pin_memory=True, so that copies to the GPU (non_blocking=True) overlap with its compute"


def _bottleneck(loader: Loader, workers: int, how: _How) -> str:
    """Its workers make batches more slowly than training takes them."""
    step_ns, cores = how.step_ns, how.cores
    one = workers == 1
    who, have, are = ("its worker", "has", "is") if one else (f"its {workers} workers", "have", "are")
    each = "" if how.busy is None else f", {'' if one else 'each '}busy for {how.busy:.0%} of a core"
    if how.queued is not None and how.queued >= _STARVED:
        return (
            f"{who} {have} no core for {how.queued:.0%} of the time{each}: there are too few cores for workers and other "
            "processes; use fewer workers or threads, or more cores (a container's limit counts)"
        )
    if how.busy is not None and how.busy < _WAITS:
        return (
            f"{who} mostly {'waits' if one else 'wait'}{each}: for storage, the network or a lock; more workers and a larger "
            "prefetch_factor help if that can serve more"
        )
    keep_up = math.ceil(workers * step_ns / max(step_ns - loader.wait_ns, step_ns / _MOST_TIMES))
    if cores is not None and keep_up > cores:
        more = f"num_workers={cores} is one for each core there is, and" if workers < cores else f"with {cores} cores"
        return (
            f"{who} {are} the bottleneck{each}: {more} {keep_up} would be needed: make batches "
            "cheaper (decode and augment less, or beforehand)"
        )
    return f"{who} {are} the bottleneck{each}: num_workers={keep_up} would keep up, if each were as fast as now"
