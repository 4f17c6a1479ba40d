"""What tests of torch.compile share: Dynamo started anew, its counts, and its own warnings left aside.

Tests decorate with ``compiling`` or enter it. It compiles nothing itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.utils import counters


@contextmanager
def compiling() -> Iterator[None]:
    """Dynamo starts anew; what it hides from users, and what its own imports warn of, is no warning here."""
    restart()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
        yield


def restart() -> None:
    """Forget what was compiled and counted."""
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    """How many graphs were compiled."""
    return counters["stats"]["unique_graphs"]


def breaks() -> list[str]:
    """Why graphs were broken, once for each break."""
    return [why for why, times in counters["graph_break"].items() for _ in range(times)]
