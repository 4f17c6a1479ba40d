"""Owns what a recorded script leaves of a hang: where no row has been recorded for long, every thread's stack, once.

``zprof run --hang-after`` starts it in the script's process. It needs no right to look into processes; the note it writes into
the trace is read by `zprof hang`, and it never ends or disturbs the script.

Note: [What it cannot see]
    It is a thread of Python's: where C code hangs and keeps the interpreter's lock, nothing is noted, and `zprof hang` has to
    look from outside. Between two rows a script may also be at work: at level "events" it is not seen what a plain script does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from offload.text import as_duration, counted, one_line
from zprof.clock import now_ns
from zprof.living.stacks import OWN_THREADS

if TYPE_CHECKING:
    from zprof.living.recorded import Doing
    from zprof.recording.recorder import Recorder

__all__ = ["Silence", "stacks_here"]

_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0
_MOST_FRAMES, _MOST_THREADS = 128, 64
#: On stderr; all of them are in the trace.
_MOST_SHOWN = 24
_NOBODYS = ("<frozen importlib", os.path.dirname(__file__))
#: Silences that are reported, and those of them on stderr: a script that rests often shall not fill its log.
_MOST_NOTES, _MOST_PRINTED = 20, 3


class Silence:
    """Watches one recorder: notes the stacks of all threads where ``seconds`` go by without a row.

    Args:
        say: takes the lines for whoever reads the script's log.
        elsewhere: whether processes under this one do its work now, which are watched themselves: then it is no silence.
    """

    def __init__(
        self,
        recorder: Recorder,
        seconds: float,
        say: Callable[[str], None],
        elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        self._recorder, self._seconds, self._say, self._elsewhere = recorder, seconds, say, elsewhere
        self._ended = threading.Event()
        self._notes = 0
        self._thread = threading.Thread(target=self._run, name="zprof-silence", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._ended.set()

    def _run(self) -> None:
        pause_s = min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, self._seconds / 10))
        seen, since_ns, noted = -1, now_ns(), False
        while not self._ended.wait(pause_s):
            if not self._recorder.open:
                return
            rows = self._recorder.rows_of_script
            if rows != seen:
                seen, since_ns, noted = rows, now_ns(), False
            elif not noted and now_ns() - since_ns >= self._seconds * 1e9:
                # Whatever it was: a report that fails must not end the script.
                with suppress(Exception):
                    if self._elsewhere():
                        since_ns = now_ns()
                        continue
                noted = True
                with suppress(Exception):
                    self._report(now_ns() - since_ns)
                if self._notes >= _MOST_NOTES:
                    return

    def _report(self, silent_ns: int) -> None:
        self._notes += 1
        threads = stacks_here({self._thread.ident})
        self._recorder.note("hang", {"time_ns": now_ns(), "silent_ns": silent_ns, "threads": threads})
        self._recorder.flush()
        if self._notes <= _MOST_PRINTED:
            self._say("\n".join(self._lines(silent_ns, threads)))

    def _lines(self, silent_ns: int, threads: list[dict[str, Any]]) -> list[str]:
        rank = f"rank {self._recorder.rank}: " if self._recorder.world > 1 else ""
        first = f"{rank}nothing has been recorded for {as_duration(silent_ns)}"
        if (where := self._where()) is not None:
            first += f": {where}"
        lines = [first]
        for thread in threads:
            lines.append(f"thread {one_line(thread['name']) or thread['number']}")
            shown = [each for each in thread["frames"] if not each[0].startswith(_NOBODYS)][:_MOST_SHOWN]
            lines += [f"  {one_line(file)}:{line} {one_line(function)}" for file, function, line in shown]
        lines.append(f"noted in {self._recorder.path}; zprof hang shows the ranks together")
        return [f"zprof: {line}" for line in lines]

    def _where(self) -> str | None:
        """The step, the unit, and what it waits for, by its own trace."""
        from zprof.living.recorded import Following

        following = Following(self._recorder.path, growing=True)
        try:
            return _in_words(following.look())
        finally:
            following.close()


def _in_words(doing: Doing) -> str:
    said = [f"{counted(doing.steps, 'step')} done"]
    if doing.unit is not None:
        said.append(f"in unit {one_line(doing.unit)}")
    if doing.waits:
        said.append(f"waits in {one_line(doing.waits[0].name)} for {as_duration(now_ns() - doing.waits[0].begin_ns)}")
    return ", ".join(said)


def stacks_here(without: set[int | None]) -> list[dict[str, Any]]:
    """Every thread of this process, the main one first, as the trace's note has them; not the recorder's own."""
    known: Mapping[int | None, threading.Thread] = {each.ident: each for each in threading.enumerate()}
    main = threading.main_thread().ident
    found: list[dict[str, Any]] = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda pair: pair[0] != main)[:_MOST_THREADS]:
        thread = known.get(ident)
        if ident in without or (thread is not None and thread.name in OWN_THREADS):
            continue
        name, number = (thread.name, thread.native_id or 0) if thread is not None else ("", 0)
        found.append({"name": name[:200], "number": number, "frames": _frames(frame)})
    return found


def _frames(frame: FrameType | None) -> list[list[object]]:
    frames: list[list[object]] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        frames.append([code.co_filename[-400:], code.co_qualname[-400:], frame.f_lineno])
        frame = frame.f_back
    return frames
