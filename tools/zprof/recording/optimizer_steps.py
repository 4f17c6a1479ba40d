"""Owns the spans of optimizer steps, of any optimizer of the process, through torch's own registry of step hooks.

The recorder opens it once torch is loaded. It never looks at what an optimizer computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from offload.events import Kind, state_all

__all__ = ["watch_steps"]


def watch_steps(span: Callable[[Kind, str], None], listening: Callable[[], bool]) -> list[Callable[[], None]]:
    """A span around every step, whose begin and end and the optimizer's class ``span`` gets, until what is returned has been
    called.

    Args:
        listening: says whether anybody still wants to know.
    """
    known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
        span("begin", type(optimizer).__name__)

    def end(optimizer: Any, args: Any, kwargs: Any) -> None:
        span("end", type(optimizer).__name__)
        if listening() and known.get(optimizer) != len(optimizer.state):
            # Its first step, or its first with more parameters, has made states that the runtime did not see.
            known[optimizer] = len(optimizer.state)
            state_all()

    return [register_optimizer_step_pre_hook(begin).remove, register_optimizer_step_post_hook(end).remove]
