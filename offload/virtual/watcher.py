"""Who is told what happens on the virtual device: operations, copies, memory taken and given back.

`memory.py`, `operations.py` and `kernels.py` tell; a `Machine` is told.  It knows no clock and keeps no ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Operation", "Watcher", "watch", "watcher"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that a kernel would carry out.

    Attributes:
        kind: the same object for all calls whose arguments agree in all but their memory; None of one that is like no other.
        overload: torch's name for it.
        args, kwargs: as it was called.
        made: what it returns.
        reads, writes: the virtual tensors it reads and writes; what it makes is among the latter.
    """

    kind: object | None
    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Any
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]


class Watcher(Protocol):
    """Who is told what happens on the device.

    ``accelerated``: it is a GPU; else a CPU, for which torch has other kernels.
    """

    accelerated: bool

    def ran(self, operation: Operation) -> None:
        """An operation was issued by this thread."""

    def copied(self, out: Tensor, source: Tensor, *, waits: bool) -> None:
        """A copy was, between or within the two memories; a ``source`` of the real host is the user's data.

        ``waits``: one between memories is over when the call returns.
        """

    def allocated(self, address: int, nbytes: int, index: int) -> None:
        """Memory was taken for a new storage."""

    def freed(self, address: int, nbytes: int, index: int) -> None:
        """The storage there has died; any thread, also inside other calls."""


class _Nobody:
    accelerated = True

    def ran(self, operation: Operation) -> None: ...
    def copied(self, out: Tensor, source: Tensor, *, waits: bool) -> None: ...
    def allocated(self, address: int, nbytes: int, index: int) -> None: ...
    def freed(self, address: int, nbytes: int, index: int) -> None: ...


_NOBODY = _Nobody()
_watcher: Watcher = _NOBODY


def watch(watcher: Watcher | None) -> None:
    """Tell ``watcher`` from now on; None is nobody."""
    global _watcher
    _watcher = _NOBODY if watcher is None else watcher


def watcher() -> Watcher:
    """Who is told now."""
    return _watcher
