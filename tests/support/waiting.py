"""Waiting for what other threads are about to do, such as a worker of the disk that lets go of a file it has just written."""

from __future__ import annotations

import time
from collections.abc import Callable


def soon(holds: Callable[[], bool], within_s: float = 120.0) -> bool:
    """Whether ``holds`` has come true before ``within_s`` seconds are over."""
    end = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
