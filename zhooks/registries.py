"""The list torch itself keeps of the tensor types that optimizers may batch.

``attach.py`` puts ours there with the process' first attachment and takes them off with the last.  It never patches torch.
"""

from __future__ import annotations

from torch.optim.optimizer import _foreach_supported_types

import zhooks.sharded_functions
import zhooks.sharded_ops  # noqa: F401  (both complete the sharded tensor)
from zhooks.sharded import KINDS

_open = 0


class Registries:
    """One attachment's claim on the list."""

    def __init__(self) -> None:
        self._held = False

    def open(self) -> None:
        global _open
        _open += 1
        self._held = True
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
