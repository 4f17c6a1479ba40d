"""Owns the terminal a recorded script believes it has while a live view shares the real one.

`live` makes one and hands it to the child. What the script prints appears above the view, whole lines at once; what goes
to a file or a pipe anyway is never touched.
"""

from __future__ import annotations

import codecs
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Screen"]

#: Seconds the last output is waited for; a process the script left behind may hold the terminal open.
_LAST_OUTPUT_S = 1.0


class Screen:
    """A terminal of its own for stdout and stderr, as far as they are terminals.

    Attributes:
        outputs: file descriptor -> what the child gets there.
        unfinished: a line that has not ended yet, such as a progress bar; part of the view until it ends.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._master, self._slave = os.openpty()
        shared = [number for number in (1, 2) if os.isatty(number)]
        self.outputs = dict.fromkeys(shared, self._slave)
        self.unfinished = ""
        self._thread = threading.Thread(target=self._read, name="zprof screen", daemon=True)
        if shared:
            _set_size(self._slave, os.get_terminal_size(shared[-1]))

    def show(self) -> None:
        """Begin; the child has been started, and its end of the terminal is its alone."""
        os.close(self._slave)
        self._thread.start()

    def close(self) -> None:
        """Show what is left."""
        self._thread.join(_LAST_OUTPUT_S)
        if self.unfinished:
            self._print(self.unfinished)
            self.unfinished = ""

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while True:
            try:
                found = os.read(self._master, 1 << 16)
            except OSError:
                # How Linux says that nobody has the other end open any more.
                found = b""
            if not found:
                os.close(self._master)
                return
            self._take(decoder.decode(found))

    def _take(self, text: str) -> None:
        *whole, last = (self.unfinished + text).replace("\r\n", "\n").split("\n")
        self.unfinished = _overwritten(last)
        if whole:
            self._print("\n".join(map(_overwritten, whole)))

    def _print(self, text: str) -> None:
        from rich.text import Text

        try:
            self._console.print(Text.from_ansi(text), soft_wrap=True)
        except (OSError, ValueError):
            sys.stderr.write(text)


def _overwritten(line: str) -> str:
    """What is left of a line that was written over itself; a carriage return at its end may yet become a line's end."""
    shown = line.rstrip("\r")
    return shown.rpartition("\r")[2] + line[len(shown) :]


def _set_size(terminal: int, size: os.terminal_size) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
