"""What every kind of buffer holds now, and the most the policy lets it hold: one rank's account of constant-size buffers.

``memory.py`` shows it beside the states.  It reads sizes of what exists; it never allocates and never communicates.

Source: ZeRO, arXiv:1910.02054, section 6.2 (constant-size buffers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zhooks.comm import Comm
from zhooks.grad import Reducer
from zhooks.unit import Flat

__all__ = ["BufferUse", "buffers", "largest_buffer"]


@dataclass(frozen=True, slots=True)
class BufferUse:
    """Bytes of one kind of buffer: held ``now``, and the ``most`` the policy allows, however large the model is."""

    now: int
    most: int


def buffers(flats: Sequence[Flat], reducer: Reducer, comm: Comm) -> dict[str, BufferUse]:
    """The buffers of this rank by kind.

    Gathered units, what autograd saved and the sums that ``no_sync`` holds back are no buffers: they are the model's own.
    "partial gradients" are what a backward fills and sends, "reduced ranges" what comes back. Microbatches add up in the
    former: as long as their sum is held back, it is as large as the model.
    """
    pool, world = reducer.pool, comm.shard.axis.world
    # What is frozen has no gradient.
    largest = largest_buffer([flat for flat in flats if flat.kind.trainable], pool.bound)
    landing, sending = reducer.under_way()
    # Chunks of long parameters have buffers of their own.
    sums = 1 + reducer.most * (2 if any(flat.long and flat.kind.trainable for flat in flats) else 1)
    filling, bound = _filling(flats, reducer), sums * largest
    held = {
        "partial gradients": BufferUse(filling + sending, max(bound, filling) if reducer.accumulation.owed else bound),
        "reduced ranges": BufferUse(landing, (1 + reducer.most) * -(-largest // world)),
        "idle buffers": BufferUse(pool.nbytes, pool.idle_nbytes),
        "message rings": BufferUse(comm.nbytes, comm.nbytes),
    }
    store = next((flat.store for flat in flats if flat.store is not None), None)
    if store is not None:
        held["staging"] = BufferUse(store.staged, store.staging_limit)
    return held


def largest_buffer(flats: Sequence[Flat], bound: int) -> int:
    """Bytes of the largest buffer a value passes through: a whole flat buffer, or a chunk of one above the bound."""
    return max((min(flat.layout.padded * flat.kind.wide, bound) for flat in flats), default=0)


def _filling(flats: Sequence[Flat], reducer: Reducer) -> int:
    """Partial sums that wait for the rest of their gradients, or for their turn."""
    total = 0
    for flat in flats:
        gradient = reducer.gradients.get(flat.number)
        if gradient is not None and gradient.partial is not None and gradient.partial is not gradient.at:
            total += gradient.partial.nbytes
    return total
