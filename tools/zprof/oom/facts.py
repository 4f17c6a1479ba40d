"""Owns what is known of a failed request for memory: from the error a script ends by, and from the machine beside it.

`running.launch` and the notebook magic ask it before the error leaves, and write the answer into the trace. It never imports
torch, and takes every figure from the error's own words or from the system: what neither says stays unknown.

Note: [Who refuses]
    The kernel refuses to map memory where the process would exceed a limit of its own (RLIMIT_AS, RLIMIT_DATA). Where memory
    itself runs out, in the machine or in a cgroup, it ends a process instead. So where the process has such limits one of them
    refused, however little the machine has left, unless the request was larger than the machine.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from offload.budget import Bound, Machine
from offload.errors import BudgetError, PolicyError
from offload.text import parse_size
from zprof.oom.deaths import death_of
from zprof.oom.to_come import to_come
from zprof.recording.sampler import running_device
from zprof.rows import RowKind

if TYPE_CHECKING:
    from zprof.recording.recorder import Recorder

__all__ = ["LEAST_KEPT", "Failure", "failure_of", "write"]

#: Bytes that malloc keeps below this are nothing to speak of.
LEAST_KEPT = 8 << 20
_MOST_TEXT = 2000
_MOST_CHAIN = 16
#: Of torch, and of shm_open(3) and ftruncate(2) through it.
_SHM_FULL = re.compile(r"unable to allocate shared memory ?\(shm\)[^\n]{0,200}No space left on device[^\n]{0,20}")
#: What a budget is for where an error names no part of it.
_STORED = "what the policy places there"
_SIZE = r"(\d[\d.]* (?:[KMGT]iB|B|bytes))"


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was refused; bytes, None where nobody says.

    Attributes:
        kind: "cuda", "cpu" (torch's allocator), "memory" (Python's), "budget", "kill" (the kernel ended the process, or one
            under it), or "shm" (/dev/shm was full, which ends who writes there by SIGBUS).
        tier: where memory was asked for.
        nbytes: how much was asked for. key: what for, where the error says.
        limit: what bounds the tier. free: what was left of it. short: how much more the request needed.
        bound: the name of what bounds it, e.g. "[budget] host". remedy: what raises a limit of the process.
        given_back: of what counts against that limit, bytes freed while the error was on its way here.
        resident: the most of the process that was ever in memory, where address space is limited.
        idle: freed, and kept by the allocator: torch's on CUDA, else malloc. host_free: what the host could still take then.
        states: states of optimizers that were still to be made, which a budget's error speaks of.
        step_gradients, step_states: what the step, of a script without zhooks, had still to make when it failed.
        exact: the figures are to the byte; else they are as the error rounds them.
        message: the error's own words.
    """

    kind: str
    tier: str
    message: str
    nbytes: int | None = None
    key: str = ""
    limit: int | None = None
    free: int | None = None
    short: int | None = None
    bound: str = ""
    idle: int | None = None
    host_free: int | None = None
    states: int | None = None
    step_gradients: int | None = None
    step_states: int | None = None
    exact: bool = True
    remedy: str = ""
    given_back: int | None = None
    resident: int | None = None


def failure_of(error: BaseException | None, kept_back: int = 0) -> Failure | None:
    """What the error, or one that led to it, says of memory; None where it is about something else.

    ``kept_back`` bytes of address space, untouched, were ours when the request failed and have been given back since.
    """
    for each in _chain(error):
        text = str(each)[:_MOST_TEXT]
        if isinstance(each, BudgetError):
            return _budget(text)
        if any(kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch") for kind in type(each).__mro__):
            return _cuda(text)
        if isinstance(each, RuntimeError) and "DefaultCPUAllocator" in text and "memory" in text:
            return _process("cpu", text, _bytes_in(r"tried to allocate (\d+) bytes", text), kept_back)
        if isinstance(each, RuntimeError) and text.startswith("std::bad_alloc"):
            return _process("memory", text, None, kept_back)
        if isinstance(each, MemoryError):
            return _process("memory", text or "MemoryError", _array_nbytes(each), kept_back)
        # A loader's worker hands its whole traceback over in the message.
        full = _SHM_FULL.search(str(each)) if isinstance(each, RuntimeError) else None
        if full is not None:
            worker = re.search(r"in DataLoader worker process (\d+)", text)
            return _shm(full[0], f"loader worker {worker[1]}" if worker else "a shared tensor")
        death = death_of(each)
        if death is not None and death.signal == signal.SIGBUS:
            return _shm(death.message, death.who)
    return None


def write(recorder: Recorder, failure: Failure) -> None:
    """Put it into the trace: the moment, and the facts, to which belongs what was still to come."""
    recorder.row(int(RowKind.INSTANT), "oom", failure.key, failure.nbytes or 0)
    if failure.kind != "budget" and (coming := to_come()) is not None:
        failure = replace(failure, step_gradients=coming[0], step_states=coming[1])
    recorder.note("oom", asdict(failure))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those it was raised from or in the handling of."""
    for _ in range(_MOST_CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _cuda(text: str) -> Failure:
    """torch's message rounds to hundredths of a unit; what is free includes nothing that torch itself keeps."""
    asked = _bytes_in(rf"[Tt]ried to allocate {_SIZE}", text)
    free = _bytes_in(rf"of which {_SIZE} is free", text)
    return Failure(
        "cuda",
        "device",
        text,
        nbytes=asked,
        limit=_bytes_in(rf"total capacity of {_SIZE}", text),
        free=free,
        short=None if asked is None or free is None or asked <= free else asked - free,
        bound="device memory",
        idle=_bytes_in(rf"{_SIZE} is reserved by PyTorch but unallocated", text),
        host_free=max(0, min(bound.free for bound in Machine().memory_bounds())),
        exact=False,
    )


def _process(kind: str, text: str, asked: int | None, kept_back: int) -> Failure:
    """An allocation of this process that the system refused: beside what refused it, see Note: [Who refuses]."""
    machine = Machine()
    worker = re.search(r"in DataLoader worker process (\d+)", text)
    by, free = _refused_by(machine.memory_bounds(), asked, kept_back)
    own = by is not None and by.of_process
    failure = Failure(
        kind,
        _tier(),
        text,
        nbytes=asked,
        limit=None if by is None else by.limit,
        bound="the system" if by is None else by.name.partition(" (")[0],
        remedy=by.remedy if by is not None and own else "",
        exact=asked is not None,
    )
    if worker is not None:
        # It has the same limits, but what it had of them is gone with it.
        return replace(failure, key=f"loader worker {worker[1]}")
    failure = replace(failure, idle=_kept_by_malloc())
    if by is None or free is None:
        return failure
    return replace(
        failure,
        free=max(0, free),
        short=None if asked is None or asked <= free else asked - free,
        given_back=max(0, by.free - kept_back - free) if own else None,
        resident=machine.resident()[1] if by.name.startswith("RLIMIT_AS") else None,
    )


def _refused_by(bounds: Sequence[Bound], asked: int | None, kept_back: int) -> tuple[Bound | None, int | None]:
    """What refused it, and what was left of that then; None where it is not known. See Note: [Who refuses]."""
    now = [(bound, bound.free - kept_back * bound.of_process) for bound in bounds]
    own = [(bound, left) for bound, left in now if bound.of_process]
    if asked is None:
        return min(own or now, key=lambda each: each[1])
    # The error has freed memory on its way here: at its fullest the process may have had less left.
    known = [(bound, bound.limit, bound.most) for bound, _ in own]
    fullest = [(bound, max(0, limit - most)) for bound, limit, most in known if limit is not None and most is not None]
    for exceeded in (*own, *fullest):
        if exceeded[1] < asked:
            return exceeded
    unsure = [bound for bound, _ in own if bound.most is None]
    if unsure:
        return unsure[0], None
    tightest = min((each for each in now if not each[0].of_process), key=lambda each: each[1])
    return tightest if tightest[1] < asked else (None, None)


def _kept_by_malloc() -> int | None:
    from zprof.recording.resident import malloc_account

    return next((nbytes for what, _, nbytes in malloc_account()() if what == "malloc kept"), None)


def _shm(text: str, key: str) -> Failure:
    """What the process had there was given back when it ended: what is free now says nothing of then."""
    limit = None
    with suppress(OSError):
        stat = os.statvfs("/dev/shm")
        limit = stat.f_blocks * stat.f_frsize
    return Failure("shm", _tier(), text, key=key, limit=limit, bound="/dev/shm", exact=False)


def _tier() -> str:
    """A process on a CPU computes in host memory; beside a GPU it is the host tier that ran out."""
    return "device" if running_device() is None else "host"


def _budget(text: str) -> Failure:
    """The words of ``offload.budget`` and of who else refuses."""
    admitted = re.search(rf"\b(device|host|disk) tier cannot admit (.*?) \({_SIZE}\): ", text)
    if admitted:
        limit = re.search(r": [\d.]+ of ([\d.]+ (?:[KMGT]iB|B)) in use", text)
        return Failure(
            "budget",
            admitted[1],
            text,
            nbytes=_parsed(admitted[3]),
            key=admitted[2],
            limit=_parsed(limit[1]) if limit else None,
            short=_bytes_in(rf"{_SIZE} short", text),
            bound=f"[budget] {admitted[1]}" if limit else "",
            exact=False,
        )
    unmapped = re.search(rf"\bhost tier cannot admit (.+?)\. Expected the system to map {_SIZE}", text)
    if unmapped:
        return Failure("budget", "host", text, nbytes=_parsed(unmapped[2]), key=unmapped[1], exact=False)
    planned = re.search(r"\[budget\] (device|host|disk) is too small\. Expected memory for (.+?), (?:in all )?found ", text)
    if planned:
        return _planned(planned[1], text)
    tier = next((tier for tier in ("device", "disk") if f"expected {tier}" in text), "host")
    asked = _bytes_in(rf"preflight expected .*? for {_SIZE}", text)
    return Failure("budget", tier, text, asked, _STORED, short=_bytes_in(rf"{_SIZE} short", text), exact=False)


def _planned(tier: str, text: str) -> Failure:
    """What is to be stored on a tier, in one sum: refused by ``zhooks.plan`` before any of it was placed there."""
    total = re.search(rf"{_SIZE} in all(?: per rank)?, found {_SIZE}", text)
    sizes = [_parsed(size) for size in (total.groups() if total else re.findall(_SIZE, text))]
    asked, limit = (sizes[0], sizes[1]) if len(sizes) > 1 else (None, None)
    short = asked - limit if asked and limit else None
    of = re.search(rf"for the states of ([^:]*?), (?:at least )?{_SIZE}(?:: | per rank)", text)
    states, key = _parsed(of[2]) if of else None, _STORED
    if of is not None and states is not None and short is not None and states >= short:
        # Without them it would have fitted.
        asked, key = states, f"optimizer states of {of[1]}"
    return Failure(
        "budget", tier, text, asked, key, limit, short=short, bound=f"[budget] {tier}", states=states, exact=False
    )


def _array_nbytes(error: MemoryError) -> int | None:
    """numpy's error knows what it could not make."""
    shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
    if not isinstance(shape, tuple) or not isinstance(itemsize := getattr(dtype, "itemsize", None), int):
        return None
    nbytes = itemsize
    for length in shape:
        nbytes *= int(length)
    return nbytes


def _bytes_in(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return _parsed(found[1]) if found else None


def _parsed(text: str) -> int | None:
    try:
        return parse_size(text.removesuffix(" bytes"))
    except PolicyError:
        return None
