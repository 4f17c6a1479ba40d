"""Owns how the trace of a child process belongs to that of the script that started it: its name, and the note that says so.

`zprof run` makes the names, and commands that read a run find its children here. It reads headers and notes, never rows, and
removes only what is a child's of the very recording it is asked about.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zprof.rows import TraceError

if TYPE_CHECKING:
    from zprof.trace.header import Header
    from zprof.trace.reader import Trace

__all__ = ["CHILD", "Recorded", "child_path", "recorded_children", "reported_together", "without_children"]

#: The note by which a trace is known as a child's.
CHILD = "child"
_NUMBERED = re.compile(r"(.+)\.child-(\d{1,4})", re.ASCII)
_MOST_FILES = 1000
_MOST_TEXT = 100


@dataclass(frozen=True, slots=True)
class Recorded:
    """A process under a recorded script that has a trace of its own.

    Attributes:
        number: in the order in which they began to train.
        why: what it was recorded from on: "process group", "optimizer" or "forward". how: "fork" or "spawn".
        parent_pid: of the process that started it.
        exit, reason: how it ended; None where that is not in the trace: it was killed, or goes on.
        ran_out: it ran out of memory, as far as its trace says.
    """

    path: Path
    number: int
    header: Header
    why: str
    how: str
    parent_pid: int
    exit: int | None
    reason: str
    ran_out: bool = False

    @property
    def pid(self) -> int:
        return self.header.pid

    @property
    def who(self) -> str:
        """It, in a few words."""
        rank = f"rank {self.header.rank} of {self.header.world}" if self.header.world > 1 else "a process"
        return f"{rank} (pid {self.pid})"


def child_path(output: str | Path, number: int) -> Path:
    """Where the trace of a child is, beside that of the script: "run.0.child-3.zprof"."""
    path = Path(output)
    return path.with_name(f"{path.stem}.child-{number}{path.suffix}")


def without_children(paths: Iterable[Path]) -> list[Path]:
    """Those that are no child's whose script's trace is among them, too."""
    found = list(paths)
    names = {path.name for path in found}
    return [path for path in found if _script(path) not in names]


def _script(path: Path) -> str:
    """The name of the trace of a child's script; "" where it is no child's."""
    numbered = _NUMBERED.fullmatch(path.stem)
    return numbered[1] + path.suffix if numbered else ""


def recorded_children(trace: Trace) -> list[Recorded]:
    """The children of a script that were recorded beside it, by number; those of an earlier run of that name are no part."""
    from zprof.trace.reader import Trace

    found = []
    for path in list(trace.path.parent.glob(f"{_escaped(trace.path.stem)}.child-*{_escaped(trace.path.suffix)}"))[:_MOST_FILES]:
        if _script(path) != trace.path.name:
            continue
        # What is no trace, or another's, is nobody's child.
        with suppress(TraceError):
            child = Trace.open(path)
            try:
                of = _recorded(child, trace.header)
            finally:
                child.close()
            if of is not None:
                found.append(of)
    return sorted(found, key=lambda each: each.number)


def reported_together(children: Sequence[tuple[str, int, int]]) -> str:
    """The first of some children that are the ranks of one run, or the first alone, as a shell takes their names.

    Args:
        children: file, rank and world of each, the first first.
    """
    first, rank, world = children[0]
    together = {rank: first}
    for file, rank, of in children[1:]:
        # A script may start ranks again, once the first are done.
        if of == world > 1 and rank not in together:
            together[rank] = file
    if len(together) == len(children) > 2:
        script = Path(first).with_name(_script(Path(first)))
        return f"{shlex.quote(str(script.with_suffix('')))}.child-*{shlex.quote(script.suffix)}"
    return " ".join(shlex.quote(together[rank]) for rank in sorted(together))


def _recorded(child: Trace, root: Header) -> Recorded | None:
    notes = child.notes(CHILD)
    body = notes[-1].body if notes else {}
    if (body.get("root_pid"), body.get("root_ns")) != (root.pid, root.mono_ns):
        return None
    number, parent = body.get("number"), body.get("parent_pid")
    ends = child.notes("end")
    code = ends[-1].body.get("exit") if ends else None
    return Recorded(
        child.path,
        number if type(number) is int else 0,
        child.header,
        str(body.get("why"))[:_MOST_TEXT],
        str(body.get("how"))[:_MOST_TEXT],
        parent if type(parent) is int else 0,
        code if type(code) is int else None,
        str(ends[-1].body.get("reason", ""))[:_MOST_TEXT] if ends else "",
        bool(child.notes("oom")),
    )


def _escaped(name: str) -> str:
    """``name`` as a pattern that matches it alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)
