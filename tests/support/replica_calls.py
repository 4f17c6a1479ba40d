"""Notes when the sums over replicas, and the reductions before them, are started and waited for, below every transport's API.

Tests of the order of reductions patch it in; it changes nothing of what is sent.
"""

from __future__ import annotations

from typing import Any

import pytest

from zhooks.comm.ranges import ScatteredBytes
from zhooks.comm.transport import TwoSteps
from zhooks.cpu_transport.shared_memory import SharedMemory


class Calls:
    """When the sums over the replicas and the reductions before them are started, and when each is waited for."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        real_start, real_wait = SharedMemory._launch, TwoSteps.wait

        def start(transport: Any, ring: Any, message: Any) -> Any:
            # What is the same for every reader is a gather's.
            if not isinstance(message.sends, ScatteredBytes):
                self.seen.append((message.call.what, message.call.key))
            return real_start(transport, ring, message)

        def wait(work: Any) -> None:
            self.seen.append(("wait", work._arguments[1].key))
            real_wait(work)

        patched.setattr(SharedMemory, "_launch", start)
        patched.setattr(TwoSteps, "wait", wait)
