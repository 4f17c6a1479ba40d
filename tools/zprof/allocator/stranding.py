"""Owns an example run that strands memory: long-lived tensors between short-lived ones (ZeRO, arXiv:1910.02054, section 3.2).

The tests of `replay` and of long-lived arenas (section 6.3, memory defragmentation) replay it with and without an arena. It
never measures anything.
"""

from __future__ import annotations

from offload.allocator import ALLOC, RELEASE, Events

__all__ = ["stranding"]

MIB = 1 << 20


def stranding(*, arena: bool, layers: int = 24) -> tuple[Events, int]:
    """A forward pass that ends in a request for a third of what is free, and the limit under which that matters; bytes.

    Each layer needs a buffer that is a little larger than the last one's, frees it, and keeps a checkpoint, which the
    allocator cuts out of the freed buffer: what is left is too small for the next buffer, and cannot go back to the device.

    Args:
        arena: checkpoints lie in one block that was reserved ahead, so that no buffer is ever cut.
    """
    buffers = [(30 + layer) * MIB for layer in range(layers)]
    kept = 28 * MIB
    rows = [(ALLOC, 0, layers * kept)] if arena else []
    slot = len(rows)
    for nbytes in buffers:
        rows += [(ALLOC, slot, nbytes), (RELEASE, slot, 0)]
        slot += 1
        if not arena:
            rows.append((ALLOC, slot, kept))
            slot += 1
    limit = -(-sum(buffers) // (2 * MIB)) * 2 * MIB + layers * 2 * MIB
    free = limit - layers * kept
    rows.append((ALLOC, slot, free // 3))
    return Events.of(rows), limit
