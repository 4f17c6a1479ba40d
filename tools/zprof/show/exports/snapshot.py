"""Owns the export to torch's memory snapshot, which pytorch.org/memory_viz and ``torch.cuda._memory_viz`` open.

`commands.export` calls `write`. A run on a GPU that noted its allocator's snapshot gives that; any other run's recorded
allocations are laid out by the allocator's model, which it says.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

from offload.text import counted
from zprof.allocator.recordings import snapshot_of
from zprof.allocator.snapshot import plain
from zprof.show.exports.exported import Written, lost
from zprof.trace.reader import Trace
from zprof.writing import committed

__all__ = ["write"]


def write(traces: Sequence[Trace], path: Path) -> Written:
    """Write one rank's snapshot as a pickle of protocol 4, the last the public viewer reads, of plain containers only.

    Raises:
        TraceError: the trace holds neither a snapshot nor allocations.
    """
    (trace,) = traces
    snapshot = snapshot_of(trace)
    committed(path, pickle.dumps(plain(snapshot), protocol=4))
    how = "as the allocator said it" if trace.notes("snapshot") else "addresses by a model of torch's CUDA allocator"
    said = f"{counted(len(snapshot.segments), 'segment')}, {how}; open it at https://pytorch.org/memory_viz"
    return Written(said, lost(trace, trace.damage))
