"""The hash by which values are compared, between ranks or before and after.

``unit.py`` asks whether a forward wrote into what was gathered, ``vectors.py``, ``activation`` and ``report`` whether ranks
have the same.  It never changes a tensor.

Note: [Hashes]
    A hash is a sum over 64-bit words, each times an odd number of its own and its upper bits mixed into the lower ones, modulo
    2**64.  Each step can be undone, so that one word that differs always shows.  Without the mixing two flipped signs would
    cancel each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["hash_of"]

_WORDS = 1 << 16
_STEP, _ODD = 0x5851F42D4C957F2C, 0x14057B7EF767814F


def hash_of(tensor: Tensor) -> int:
    """A hash of a plain tensor's values, in row order; see Note [Hashes]."""
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        whole = flat.numel() // 8 * 8
        weights = torch.arange(_WORDS, dtype=torch.int64, device=flat.device).mul_(_STEP).add_(_ODD)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for piece in flat[:whole].view(torch.int64).split(_WORDS):
            mixed = piece * weights[: piece.numel()]
            total = total * _ODD + mixed.bitwise_xor_(mixed >> 29).mul_(_ODD).sum()
        tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        tail[: flat.numel() - whole].copy_(flat[whole:])
        return int((total * _ODD + tail.view(torch.int64)[0]).item())
