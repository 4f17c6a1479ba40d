"""Owns what the tracker hangs into torch besides its mode: the hook of a gradient, the ear on resizes, the silence in forks.

``zprof.recording.tracker`` hangs them and takes them down. None of them keeps the tracker alive, or acts once it is gone.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zprof.recording.mode import Ear

__all__ = ["Accumulated", "deaf_in_children", "hear_resizes"]


class Accumulated:
    """A parameter's hook: its gradient has been added to. Says nothing in a copied or a stored model.

    Args:
        report: a method; only weakly held.
    """

    def __init__(self, report: Callable[[Tensor], None] | None) -> None:
        self._report = None if report is None else weakref.WeakMethod(report)

    def __call__(self, parameter: Tensor) -> None:
        report = None if self._report is None else self._report()
        if report is not None:
            report(parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accumulated:
        return Accumulated(None)

    def __reduce__(self) -> Any:
        return Accumulated, (None,)


def hear_resizes(report: Callable[[Any], None]) -> Callable[[], None]:
    """Storages are resized past torch's dispatcher (FSDP frees its buffers so): stand in front of the one method for it.

    Returns what undoes it. ``report`` is a method; only weakly held.
    """
    resized = weakref.WeakMethod(report)
    original = torch.UntypedStorage.resize_
    had = "resize_" in torch.UntypedStorage.__dict__

    def resize_(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        hear = resized()
        if hear is not None:
            hear(self)
        return out

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]

    def undo() -> None:
        if torch.UntypedStorage.__dict__.get("resize_") is resize_:
            if had:
                torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
            else:
                del torch.UntypedStorage.resize_

    return undo


def deaf_in_children(ear: Ear) -> None:
    """A forked child (a loader's worker) has the mode on its stack, and nobody who listens."""
    held = weakref.ref(ear)

    def silence() -> None:
        mine = held()
        if mine is not None:
            mine.deaf = True

    os.register_at_fork(after_in_child=silence)
