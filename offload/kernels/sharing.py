"""The threads that share one pass over memory: each takes the next chunk of elements until none is left.

The compiled loop claims its chunks by an atomic counter, without the interpreter's lock.  The threads are plain ones, because
numba's own layers either refuse two callers at once or bring a second OpenMP beside torch's.

Note: [Cores of a rank]
    torchrun gives every rank one thread (OMP_NUM_THREADS=1) where the user has set no number, and an update of a billion
    elements would run on one core of a machine of many.  So a rank that a launcher has started with others, and whose
    number of threads is one, updates on its share of the cores: the process' own divided by the ranks of this machine.  The
    threads are bound to them, or all ranks' threads would begin on the same ones.  A number that the user has chosen stands,
    and its threads run on any core."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache

import torch

from offload.job_rank import launched_here

__all__ = ["cores_of_rank", "flushes_denormals", "share", "update_threads"]

#: Below this many elements another thread costs more than it takes over.
LEAST_NUMEL = 1 << 17
#: Chunks are taken in turn, so that a thread whose core is wanted elsewhere holds up no other for long.
CHUNK_NUMEL = 1 << 18

_TINY = 5e-324


def cores_of_rank() -> tuple[int, ...]:
    """The numbers of the cores that updates of this rank are bound to; none where they are not: Note [Cores of a rank]."""
    launched = launched_here()
    # Only Linux says which cores a process may use.
    if torch.get_num_threads() > 1 or launched is None or launched[1] == 1 or not hasattr(os, "sched_getaffinity"):
        return ()
    (rank, ranks), cores = launched, sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    start = rank * each % len(cores)
    return tuple(cores[start : start + each])


def update_threads() -> int:
    """How many threads an update on the host runs on; see Note [Cores of a rank]."""
    return len(cores_of_rank()) or torch.get_num_threads()


def share(loop: Callable[[int, int], None], numel: int, *, threads: int, multiple: int) -> None:
    """Have up to ``threads`` threads call ``loop(counter, chunk)``, this one among them, and wait for all.

    ``counter`` is the address of an int64 that holds the first element nobody has claimed; the loop claims ``chunk``
    elements at a time (a multiple of ``multiple``) until all ``numel`` are done, so another call of it does no harm.
    An interrupt is raised only when all is done, for half an update cannot be taken back.
    """
    counter = array("q", [0])
    place, _ = counter.buffer_info()
    threads = min(threads, numel // LEAST_NUMEL)
    if threads <= 1:
        # One call into compiled code: no interrupt falls within it.
        loop(place, -(-numel // multiple) * multiple)
        return
    chunk = min(CHUNK_NUMEL, numel // (2 * threads)) // multiple * multiple
    flush = flushes_denormals()

    def join(claimed: array[int] = counter) -> None:
        # The pool may keep a job that it had no thread for, and do it much later: the counter lives as long as that.
        # A thread of the pool has the mode of whoever started it; the bits must be those of the caller's mode.
        torch.set_flush_denormal(flush)
        loop(place, chunk)

    joined: list[Future[None]] = []
    try:
        # No further thread can be started at the interpreter's end, for one: those there are do it all.
        with suppress(RuntimeError):
            pool = _pool(os.getpid(), cores_of_rank())
            joined.extend(pool.submit(join) for _ in range(threads - 1))
        loop(place, chunk)
        _wait_for(joined)
    except BaseException:
        loop(place, chunk)
        _wait_for(joined)
        raise


def _wait_for(joined: list[Future[None]]) -> None:
    """Wait for whoever has begun; who has not would find nothing left."""
    wait([future for future in joined if not future.cancel()])
    for future in joined:
        if not future.cancelled():
            future.result()


@cache
def _pool(pid: int, cores: tuple[int, ...]) -> ThreadPoolExecutor:
    # By process: a fork copies the object and none of its threads.
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="kernel", initializer=_bind, initargs=(cores,))


def _bind(cores: tuple[int, ...]) -> None:
    """Keep this thread to these cores, if any; where the system does not allow that it runs on any."""
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)


def flushes_denormals() -> bool:
    """Whether this thread takes denormals for zero (torch.set_flush_denormal; torch has no question for it)."""
    return _TINY * float(1) == 0.0
