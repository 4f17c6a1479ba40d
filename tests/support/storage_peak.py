"""What a real rank's storages hold at most, as zprof's recorder counts them, and hardware to predict the same on.

Tests that set a simulation beside real ranks call it.  It asserts nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload.hardware import Hardware
from tests.support.on_ranks import place
from zprof.analysis.ledger import Ledger
from zprof.recording.recorder import Recorder
from zprof.trace.reader import Trace


def peak(path: Path, work: Callable[[], object]) -> int:
    """The most bytes that this rank's storages hold meanwhile."""
    gc.collect()
    path = path.with_stem(f"{path.stem}.{place()[0]}")
    with Recorder(path, level="alloc").listen():
        work()
    return Ledger.of(Trace.open(path)).peak("device").nbytes


def a_cpu() -> dict[str, Any]:
    """Hardware whose devices are threads; of its figures none is looked at by tests of bytes."""
    values = Hardware.of("h100").values() | {"kind": "cpu"}
    return values | {"link": values["link"] | {"through": "memory", "bandwidth": "10 GB/s"}}
