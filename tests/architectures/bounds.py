"""What one attempt may take: time of the processor and memory, so that no subject holds up the others or their machine.

``of_transformers.py`` tries sizes and inputs inside ``bounded``.  It bounds the search alone, and nothing that is compared.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

#: Of the processor: a busy machine makes no attempt longer.
ATTEMPT_S = 6.0
SEARCH_S = 100.0
MOST_NBYTES = 3 << 30


class TooMuch(Exception):
    """An attempt took more than it may."""


@contextmanager
def bounded(cpu_s: float = ATTEMPT_S, more_nbytes: int = MOST_NBYTES) -> Iterator[None]:
    """Inside, more seconds of the processor raise ``TooMuch``, more memory torch's own error.  In a main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    handler = signal.signal(signal.SIGPROF, _raise)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (_held() + more_nbytes, before[1]))
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise TooMuch("it takes too long")


def _held() -> int:
    """Bytes of memory that this process has written or may write, as the limit counts them."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) << 10
