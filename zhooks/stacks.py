"""What the stacks of the interpreter and of autograd say: does a forward still run, is this a backward, who called.

``runtime.py`` and ``hooks.py`` ask.  It only looks: it keeps no frame and changes nothing.
"""

from __future__ import annotations

import sys
import traceback
from types import FrameType

import torch

__all__ = ["in_backward", "running"]


def in_backward() -> bool:
    """This thread is inside autograd's engine."""
    return bool(torch._C._current_graph_task_id() >= 0)


def running(frame: FrameType | None) -> bool:
    """That call has not returned, on any thread: on a GPU a backward inside a pass runs on a thread of its own."""
    return any(other is frame for top in sys._current_frames().values() for other, _ in traceback.walk_stack(top))
