"""Owns what torch's allocator of a device remembers during a recording: switches its history on, and notes its snapshot at
the end.

The recorder starts it at the levels that see every storage. It does nothing where no device runs whose allocator has a
history (CUDA, XPU), and never starts a device itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zprof.recording.sampler import running_device

if TYPE_CHECKING:
    from zprof.recording.recorder import Recorder
    from zprof.recording.sampler import Reading

__all__ = ["AllocatorHistory", "open_part"]

#: Allocations the allocator remembers, the latest; what a note can hold is less.
MOST_ENTRIES = 100_000


class AllocatorHistory:
    """The allocator's own record of one recording; a sampler, too, that begins it once a device runs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._began = self._asked = self._closed = False

    def start(self) -> None:
        """Have the allocator remember from now on, without stacks; where somebody records already, theirs is read."""
        memory = _allocator()
        if memory is None or self._asked:
            return
        self._asked = True
        if _recording(memory):
            return
        memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_ENTRIES)
        self._began = True

    def sample(self) -> Sequence[Reading]:
        """No level: a device may have been started since."""
        if not self._asked:
            self.start()
        return ()

    def close(self) -> None:
        """Note the snapshot, and leave the allocator as it was found."""
        # As a sampler it may be asked once more.
        self._asked = True
        memory = _allocator()
        if memory is None or self._closed:
            return
        self._closed = True
        from zprof.allocator.snapshot import reduced
        from zprof.rows import TraceError

        try:
            self._recorder.note("snapshot", reduced(memory._snapshot()))
        except (TraceError, RuntimeError) as error:
            self._recorder.note("snapshot failed", {"why": str(error)[:400]})
        if self._began:
            memory._record_memory_history(None)


def _allocator() -> Any:
    """``torch.cuda.memory``, or what another type has of it, of a device that runs already: to ask earlier would fix what the
    script may still choose."""
    found = running_device()
    memory = getattr(found[1], "memory", None) if found is not None else None
    return memory if hasattr(memory, "_record_memory_history") and hasattr(memory, "_snapshot") else None


def _recording(memory: Any) -> bool:
    """The user has switched the history on: it must not be ended."""
    asked = getattr(sys.modules["torch"]._C, "_cuda_isHistoryEnabled", None) if memory.__name__ == "torch.cuda.memory" else None
    # Who does not say it shows what has happened since.
    return bool(asked()) if asked is not None else any(memory._snapshot()["device_traces"])


def open_part(recorder: Recorder) -> AllocatorHistory:
    """What the recorder starts and closes, and samples."""
    history = AllocatorHistory(recorder)
    recorder.add_sampler(history)
    return history
