"""This process's place among the ranks of its job, as far as torchrun or a process group has told it.

``user_warnings.py`` warns on the first rank alone, ``attach`` refuses ranks that have no group, and updates on the host take
their share of the cores (``kernels/sharing.py``).  It reads what the launcher set and is no setting; it imports no torch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["job_rank", "launched_among", "launched_here"]

#: Backends of process groups of which one process alone exists, whatever its rank.
_ON_PAPER = ("fake", "virtual")


def launched_among() -> tuple[str, str] | None:
    """(rank, world) as torchrun has told this process; None where another program has started it."""
    told = os.environ.get
    return None if "TORCHELASTIC_RUN_ID" not in os.environ else (told("RANK", "0"), told("WORLD_SIZE", "1"))


def launched_here() -> tuple[int, int] | None:
    """(rank, ranks) among those of this machine, as a launcher has told this process; None where none has."""
    rank, ranks = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if not (rank.isdecimal() and ranks.isdecimal()) or int(rank) >= int(ranks):
        return None
    return int(rank), int(ranks)


def job_rank() -> int:
    """The rank in the process group, before there is one that in torchrun's job; 0 where there is neither."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return 0 if dist.get_backend() in _ON_PAPER else int(dist.get_rank())
    launched = launched_among()
    return 0 if launched is None or not launched[0].isdecimal() else int(launched[0])
