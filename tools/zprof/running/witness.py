"""Owns the answer whether a signal that reached zprof was sent to it alone, or to the whole process group.

`child` asks before it passes a signal on to the script, which shares the group. It sends no signal itself, and starts one small
process, which ends with zprof.

Note: [How it is known]
    The kernel says of a signal who sent it, not to whom. So a second process of the group, started like the script, keeps all
    of them blocked, and says when it is asked which have arrived: what it got too went to the group, or to each process of it
    in turn, as Slurm, systemd and ``pkill -f`` do, for which it is given a moment.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["Witness"]

#: Who sends a signal to one process after the other is done with that by then.
_GRACE_S = 0.1
_ASK_S = 0.01
#: One that does not answer within this is gone; its word is missed from then on.
_ANSWER_S = 5.0
#: Answers each byte that it reads by the numbers of the signals that have arrived, and a 0.
_PROGRAM = """
import os, signal
while os.read(0, 1):
    heard = b""
    while (one := signal.sigtimedwait(signal.sigpending(), 0)) is not None:
        heard += bytes((one.si_signo,))
    os.write(1, heard + b"\\0")
"""


class Witness:
    """A process of this one's group that takes no signal.

    Args:
        blocked: the signals it is asked about.
        arguments: the script's, shown as its own: who looks for the script by them finds it too.
    """

    def __init__(self, blocked: Sequence[signal.Signals], arguments: Sequence[str]) -> None:
        self._to_witness: socket.socket | None = None
        #: What it got and zprof did not (yet): in this look, and in the one before.
        self._new: set[int] = set()
        self._old: set[int] = set()
        here, there = socket.socketpair()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            with there:
                self._pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments],
                    os.environ,
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, there.fileno(), 0),
                        (os.POSIX_SPAWN_DUP2, there.fileno(), 1),
                        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                    ],
                    setsigmask=[*before, *blocked],
                )
            self._to_witness = here
        except OSError:
            # Without it a signal to the group arrives twice; the script runs.
            here.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def got(self, number: int) -> bool:
        """Whether it, too, has got the signal that zprof has just been sent."""
        until = time.monotonic() + _GRACE_S
        while True:
            self._ask()
            if number in self._new | self._old:
                self._new.discard(number)
                self._old.discard(number)
                return True
            if self._to_witness is None or time.monotonic() >= until:
                return False
            time.sleep(_ASK_S)

    def look(self) -> None:
        """Called now and then, so that what it was sent alone is not taken for a signal sent later."""
        self._old, self._new = self._new, set()
        self._ask()

    def close(self) -> None:
        """End it."""
        if self._to_witness is not None:
            self._gone()

    def _ask(self) -> None:
        if self._to_witness is None:
            return
        try:
            self._to_witness.send(b"?")
            answer = b""
            while not answer.endswith(b"\0"):
                ready, _, _ = select.select([self._to_witness], [], [], _ANSWER_S)
                part = self._to_witness.recv(256) if ready else b""
                if not part:
                    self._gone()
                    return
                answer += part
        except OSError:
            self._gone()
            return
        self._new.update(answer[:-1])

    def _gone(self) -> None:
        here, self._to_witness = self._to_witness, None
        if here is not None:
            here.close()
        with suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
