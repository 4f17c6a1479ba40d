"""Owns what the tracker hangs into torch and Python besides its mode: the hook of a gradient, the ear on resizes, the ear of
threads that start, the end in forks.

``zprof.recording.tracker`` hangs them and takes them down. None of them keeps the tracker alive, or acts once it is gone.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import inference_mode
from torch.nn.modules.module import register_module_forward_pre_hook

from zprof.recording.quiet import Quiet, pop

__all__ = ["Accumulated", "end_in_children", "hear_resizes", "hear_threads", "pop_when_safe", "unchanged_when_left"]


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


def hear_threads(begin: Callable[[], None]) -> Callable[[], None]:
    """Have ``begin`` called on every thread that Python's ``threading`` starts from now on, before it runs what it is for.

    By the hook that profilers use, for a moment: a thread takes it off again as it begins. Returns what undoes it.
    ``begin`` is a method; only weakly held.
    """
    called = weakref.WeakMethod(begin)
    others = threading.getprofile()

    def begun(frame: FrameType, event: Any, argument: Any) -> None:
        sys.setprofile(others)
        if others is not None:
            others(frame, event, argument)
        hear = called()
        if hear is not None:
            # It must not reach what the thread is about to do.
            with suppress(Exception):
                hear()

    threading.setprofile(begun)

    def undo() -> None:
        if threading.getprofile() is begun:
            threading.setprofile(others)

    return undo


def pop_when_safe(ear: Quiet) -> Callable[[], None]:
    """Take ``ear`` off this thread's stack of modes when the next forward begins outside of what would put it back.

    ``inference_mode`` and a backward restore torch's dispatch keys as they were when they began: of a mode that went meanwhile
    the key would come back without the mode, and the next operation would fail. What is returned does it at once.
    """
    thread = threading.get_ident()

    def leave() -> None:
        handle.remove()
        pop(ear)

    def look(*_: Any) -> None:
        if threading.get_ident() == thread and unchanged_when_left():
            leave()

    handle = register_module_forward_pre_hook(look)
    return leave


def unchanged_when_left() -> bool:
    """What this thread is inside of does not restore dispatch keys."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or torch._C._current_graph_task_id() >= 0:
        return False
    return not any(type(each) is inference_mode and "_inference_mode_context" in vars(each) for each in gc.get_objects())


def end_in_children(end: Callable[[], None]) -> None:
    """Have ``end`` called in a forked child (a loader's worker): it has our hooks, and nobody who listens.

    ``end`` is a method; only weakly held.
    """
    held = weakref.WeakMethod(end)

    def leave() -> None:
        mine = held()
        if mine is not None:
            mine()

    os.register_at_fork(after_in_child=leave)
