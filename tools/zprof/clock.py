"""Owns the clocks the profiler reads: the monotonic one that events carry, and the wall clock that people and hosts share.

The recorder, the samplers and the live views call it, so that a test can see where time enters. It never sleeps.
"""

from __future__ import annotations

import time

__all__ = ["boot_ns", "now_ns", "wall_ns"]

#: Nanoseconds on the clock of ``offload.events``: monotonic, comparable between processes of one boot of one host.
now_ns = time.perf_counter_ns
#: Nanoseconds since 1970; may jump, comparable between hosts as far as they are set alike.
wall_ns = time.time_ns


def boot_ns() -> int:
    """Nanoseconds since this machine's boot, as the kernel counts when a process began."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
