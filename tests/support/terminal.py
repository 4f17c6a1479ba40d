"""``python`` in a terminal of its own, as a user sees it.

Tests of what is drawn, and of Ctrl-C, call it.  It never touches the terminal that the tests run in.
"""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.zprof_command import NOT_LAUNCHED


def on_a_terminal(words: Sequence[str], at: Path, wait_for: str = "", send: bytes = b"") -> tuple[int, str]:
    """The exit code, and everything that was shown; ``send`` is typed once ``wait_for`` is shown."""
    pid, master = pty.fork()
    if not pid:
        os.chdir(at)
        os.execve(sys.executable, [sys.executable, *words], {**NOT_LAUNCHED, "TERM": "xterm"})
    shown = b""
    while True:
        try:
            found = os.read(master, 65536)
        except OSError:
            break
        shown += found
        if not found:
            break
        if send and wait_for.encode() in shown:
            os.write(master, send)
            send = b""
    os.close(master)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()
