"""Owns the marks by which a node of a backward is known to belong to a part of the model, see Note: [Whose backward].

``modules`` sets them where modules begin and end, ``counting`` where units do.  It keeps numbers and names, no node and no
tensor.

Note: [Whose backward]
    Autograd numbers its nodes in the order they are made. The number is noted where a forward begins and ends, so that in a
    backward the number of the running node shows whose forward made it, without a hook on any tensor.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Marks"]

#: Marks kept of where modules began and ended: many steps of a deep model.
MOST_MARKS = 1 << 18

_next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Marks:
    """Who made the nodes of the thread it is made on: autograd numbers those of each thread for themselves."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._numbers: list[int] = []
        self._paths: list[str] = []

    def mark(self, path: str) -> None:
        """Nodes made from now on belong to ``path``; those of other threads are not marked."""
        if threading.get_ident() != self._thread:
            return
        number, numbers = _next_number(), self._numbers
        if numbers and numbers[-1] == number:
            self._paths[-1] = path
            return
        if len(numbers) >= MOST_MARKS:
            del numbers[: MOST_MARKS // 2], self._paths[: MOST_MARKS // 2]
        numbers.append(number)
        self._paths.append(path)

    def of(self, node: Any) -> str | None:
        """Whose forward made that node of autograd's; None from before the first mark."""
        at = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._paths[at] if at >= 0 else None
