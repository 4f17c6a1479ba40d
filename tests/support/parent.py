"""Lets a helper process end when the process that started it ends, however that ended.

The fork server calls it through ``fork_server.py``, ranks and forked programs at their start; a parent that is killed runs no
``finally``, and a rank in a collective or a program in a sleep would go on without it.  Only Linux has the call: elsewhere
what waits at a pipe ends by itself, and nothing else does.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on the system kills this process when its parent is gone; it ends here where its starter is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    starter = multiprocessing.parent_process()
    if starter is not None and not starter.is_alive():
        os._exit(1)
