"""The doors torch itself offers: which tensor types optimizers may batch, which classes a safe load may build.

``attach.py`` opens them with the first attachment of the process and closes them with the last.  It never patches torch.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import _foreach_supported_types

import zhooks.sharded_functions
import zhooks.sharded_ops  # noqa: F401  (both open a door of the sharded tensor)
from zhooks.layout import Piece
from zhooks.sharded import KINDS, ShardedTensor, rebuild

_open = 0


class Registries:
    """One attachment's claim on the doors."""

    def __init__(self) -> None:
        self._held = False

    def open(self) -> None:
        global _open
        _open += 1
        self._held = True
        # Files of sharded tensors stay loadable after detach: the classes are harmless data.
        torch.serialization.add_safe_globals([rebuild, ShardedTensor, Piece])
        _foreach_supported_types.extend(kind for kind in KINDS if kind not in _foreach_supported_types)

    def close(self) -> None:
        global _open
        if not self._held:
            return
        self._held = False
        _open -= 1
        if _open == 0:
            for kind in KINDS:
                _foreach_supported_types.remove(kind)
