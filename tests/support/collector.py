"""The garbage collector, until it finds nothing more.

The pools of ranks, conftest.py and tests call it.  It imports nothing that a process would not have anyway.
"""

from __future__ import annotations

import gc

__all__ = ["collect_all"]


def collect_all() -> None:
    """Collect again as long as something was found: what ends with a finalizer, or by what that frees, goes a pass later."""
    while gc.collect():
        pass
