"""Owns the reconciliation: what the ledger holds against what the allocator or the process says, and what remains.

`Ledger.remainder` calls it, and reports, pages and checks show its lines, each as it is. It never hides a remainder, be it
negative, and never spreads it over the categories.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offload.text import as_moment
from zprof.gpu.vendors import rows_of

if TYPE_CHECKING:
    from zprof.analysis.ledger import Ledger

__all__ = ["WITH_PARTS", "Remainder", "fullest_sample", "peak_sample", "remainders"]

#: What the first line takes off where the lines that follow are parts of the same whole.
WITH_PARTS = "ledger, device + host, and the lines below"


@dataclass(frozen=True, slots=True)
class Remainder:
    """One line of the reconciliation: ``said_nbytes`` less ``ledger_nbytes`` is ``nbytes``.

    Attributes:
        name: what is left, e.g. "unexplained in the process".
        nbytes: may be negative: the ledger knows of more than is there.
        explanation: what it is likely to be.
        said: whose word it is, e.g. "rss since start". said_nbytes: what it said.
        against: what was taken off, e.g. "ledger, device + host". ledger_nbytes: how much that is.
        time_ns: when the sampler answered; the ledger is read at that very time.
    """

    name: str
    nbytes: int
    explanation: str
    said: str
    said_nbytes: int
    against: str
    ledger_nbytes: int
    time_ns: int


def peak_sample(ledger: Ledger, what: str) -> tuple[int, int] | None:
    """(time, value) of the highest sample of a quantity, over its keys; None where it was not sampled."""
    pairs = [pair for pair in ledger.samples(what).values() if len(pair[1])]
    found = [(int(value.max()), int(time_ns[np.argmax(value)])) for time_ns, value in pairs]
    if not found:
        return None
    value, time_ns = max(found)
    return time_ns, value


def fullest_sample(ledger: Ledger, begin_ns: int, end_ns: int) -> int:
    """The sample between two times at which the ledger held most: there a reconciliation says most.

    Memory that was freed stays with malloc and the allocator for a while, so a sample taken after the peak would blame it on
    nobody. The peak's own time where nothing was sampled in between; where the ledger holds nothing, the highest sample.
    """
    accelerated = ledger.trace.accelerated
    what, tiers = ("cuda allocated", ("device",)) if accelerated else ("rss", ("device", "host"))
    pairs = list(ledger.samples(what, points=1 << 17).values())
    nothing = np.zeros(0, np.int64)
    sampled, value = (np.concatenate([nothing, *(pair[column] for pair in pairs)]) for column in (0, 1))
    inside = (sampled >= begin_ns) & (sampled <= end_ns)
    sampled, value = sampled[inside], value[inside]
    if not len(sampled):
        fullest = max((ledger.peak_between(tier, begin_ns, end_ns) for tier in tiers), key=lambda moment: moment.nbytes)
        return fullest.time_ns
    levels = ledger.roughly(sampled, *tiers)
    return int(sampled[np.argmax(levels if levels.any() else value)])


def remainders(ledger: Ledger, time_ns: int) -> list[Remainder]:
    """The lines at the sample nearest to ``time_ns``; none where nothing was sampled.

    On a CPU: growth of the process's resident memory less what the ledger has on device and host; what the
    process is made of besides, as far as it was sampled, has lines of its own, or else what was loaded before anything of size
    was held. All these lines together are what grew beyond the ledger. On CUDA: what the
    allocator gave out less the ledger's device tier, what it reserved less what it gave out, and what NVML saw in use less
    what it reserved.
    """
    if ledger.trace.accelerated:
        return _on_cuda(ledger, time_ns)
    found = _nearest(ledger, "rss", time_ns)
    if found is None:
        return []
    when, rss = found
    start = ledger.trace.header.rss_nbytes
    held = _in_process(ledger, when)
    parts = _parts(ledger, when, held)
    if parts:
        known = held + sum(part.nbytes for part in parts)
        said, against = ("rss since start", rss - start), (WITH_PARTS, known)
        return [_line("unexplained in the process", said, against, when, _AFTER_PARTS), *parts]
    loaded = _loaded(ledger, when)
    if loaded is None:
        said, against = ("rss since start", rss - start), ("ledger, device + host", held)
        return [_line("unexplained in the process", said, against, when, _cpu_reason(ledger))]
    then, rss_then = loaded
    held_then = _in_process(ledger, then)
    why = "python, torch and other libraries, loaded before the first storages of any size"
    after = f"since {as_moment(then - ledger.begin_ns)}"
    said, against = (f"rss {after}", rss - rss_then), (f"ledger {after}, device + host", held - held_then)
    return [
        _line("unexplained in the process", said, against, when, _cpu_reason(ledger)),
        _line("loaded before", ("rss since start", rss_then - start), ("ledger then", held_then), then, why),
    ]


_AFTER_PARTS = "threads' stacks, and pages that malloc counts as used or kept but that are not resident"
#: What a process's memory consists of beside tensors: the sampled quantity, its line, and what it is.
_PARTS = (
    ("resident files", "files mapped", "the code and tables of python, torch and other libraries"),
    ("library data", "data of libraries", "tables of libraries that were written to when they were loaded"),
    ("python objects", "python's objects", "arenas of the interpreter's own allocator"),
    ("malloc kept", "kept by malloc", "memory that was freed and that malloc did not give back"),
)


def _parts(ledger: Ledger, when: int, held: int) -> list[Remainder]:
    """What else the process is made of, where it was sampled (`recording.resident`): each as it grew since the first sample."""
    found = []
    for what, name, why in _PARTS:
        grown = _growth(ledger, what, when)
        if grown is not None:
            found.append(_line(name, (f"{what} since start", grown), ("nothing", 0), when, why))
    used, shared = _growth(ledger, "malloc used", when), _growth(ledger, "resident shared", when)
    if used is not None:
        # Shared memory, such as the rings between ranks, is in the ledger and not in malloc.
        in_malloc = max(0, held - (shared or 0))
        said, against = ("malloc used since start", used), ("ledger, but for shared memory", in_malloc)
        found.append(_line("allocated by libraries", said, against, when, "C++ allocations other than tensors"))
    return found


def _growth(ledger: Ledger, what: str, when: int) -> int | None:
    found = _nearest(ledger, what, when)
    if found is None:
        return None
    _, value = next(iter(ledger.samples(what, points=1 << 17).values()))
    return found[1] - int(value[0])


def _in_process(ledger: Ledger, when: int) -> int:
    levels = ledger.at(when)
    on = np.array([series.tier in ("device", "host") for series in ledger.series], np.bool_)
    return int(levels[on].sum())


def _loaded(ledger: Ledger, until_ns: int) -> tuple[int, int] | None:
    """(time, rss) of the last sample before the ledger held a hundredth of its most; None where there was none."""
    samples = list(ledger.samples("rss", points=1 << 17).values())
    if not samples:
        return None
    time_ns, rss = samples[0]
    levels = ledger.roughly(time_ns, "device", "host")
    most = max(ledger.peak("device").nbytes, ledger.peak("host").nbytes)
    large = np.flatnonzero(levels * 100 > most)
    first = int(large[0]) if len(large) else len(levels)
    # The sample before: between the two anything may have been loaded, and the earlier takes nothing from the ledger.
    if not most or not 0 < first <= len(rss) or first == len(levels) or time_ns[first - 1] >= until_ns:
        return None
    return int(time_ns[first - 1]), int(rss[first - 1])


def _on_cuda(ledger: Ledger, time_ns: int) -> list[Remainder]:
    device = ledger.trace.device
    said = {
        what: _nearest(ledger, what, time_ns, key) for what, key in (("cuda allocated", device), ("cuda reserved", device))
    }
    # The container numbers GPUs as it sees them; with a single one in the trace there is nothing to mistake.
    key = f"gpu{device.partition(':')[2]}"
    of_device = ((what, _nearest(ledger, what, time_ns, key)) for what in rows_of("memory used"))
    measure, used = next(((what, found) for what, found in of_device if found is not None), ("", None))
    allocated, reserved = said["cuda allocated"], said["cuda reserved"]
    lines = []
    if allocated:
        held = ledger.total(allocated[0], "device")
        took, against = ("cuda allocated", allocated[1]), ("ledger, device", held)
        lines.append(_line("unexplained on the device", took, against, allocated[0], _cuda_reason(ledger)))
    if allocated and reserved:
        why = "free blocks the allocator keeps, and its rounding; `zprof frag` says how much of it is stuck"
        took, against = ("cuda reserved", reserved[1]), ("cuda allocated", allocated[1])
        lines.append(_line("reserved, not given out", took, against, reserved[0], why))
    if reserved and used:
        why = "the CUDA context, libraries such as NCCL and cuBLAS, and other processes on this GPU"
        took, against = (measure, used[1]), ("cuda reserved", reserved[1])
        lines.append(_line("on the device, outside torch", took, against, used[0], why))
    return lines


def _line(name: str, said: tuple[str, int], against: tuple[str, int], when: int, why: str) -> Remainder:
    nbytes = said[1] - against[1]
    if nbytes < 0 and name.startswith("unexplained"):
        why = "less than the ledger holds: pages not touched yet, shared, or swapped out; or the sample came a little late"
    return Remainder(name, nbytes, why, *said, *against, when)


def _cpu_reason(ledger: Ledger) -> str:
    others = "memory that malloc keeps after it was freed, libraries loaded since, threads' stacks and python's own objects"
    if ledger.trace.header.level == "events":
        return f"activations and temporaries, which only --level alloc sees; {others}"
    return others


def _cuda_reason(ledger: Ledger) -> str:
    if ledger.trace.header.level == "events":
        return "activations and temporaries, which only --level alloc sees; rounding to 512 bytes"
    return "rounding to 512 bytes, workspaces of libraries, and storages made before the recording began"


def _nearest(ledger: Ledger, what: str, time_ns: int, key: str | None = None) -> tuple[int, int] | None:
    """(time, value) of the sample nearest to ``time_ns``: of ``key``, or of the only key there is."""
    keys = ledger.samples(what, points=1 << 17)
    series = keys.get(key or "") or (next(iter(keys.values())) if len(keys) == 1 else None)
    if series is None or not len(series[0]):
        return None
    at = int(np.argmin(np.abs(series[0] - time_ns)))
    return int(series[0][at]), int(series[1][at])
