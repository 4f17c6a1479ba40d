"""zprof: where every byte and millisecond of a training run went; the command line and what it offers to code.

``record`` and ``Recorder`` are for scripts, ``%load_ext zprof`` for notebooks, ``open`` reads what they recorded. Nothing is
imported before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from zprof.analysis.run import Run
    from zprof.recording.recorder import Children, Level, Recorder

__all__ = ["Recorder", "Run", "load_ipython_extension", "open", "record"]


@contextmanager
def record(
    path: str | Path = "run.{rank}.zprof",
    *,
    level: Level | Literal["auto"] = "events",
    interval_s: float = 0.1,
    nvml: str = "auto",
    force: bool = False,
    children: Children = "memory",
    ops_steps: str | None = None,
    ops_stack: bool = False,
) -> Iterator[Recorder]:
    """Record everything inside the block: all attachments of this process, all optimizer steps, memory and GPUs.

    Arguments and errors are those of ``zprof.Recorder``.
    """
    from zprof.recording.recorder import Recorder

    asked = Recorder(
        path, level=level, interval_s=interval_s, nvml=nvml, force=force, children=children, ops_steps=ops_steps,
        ops_stack=ops_stack,
    )  # fmt: skip
    with asked.listen() as recorder:
        yield recorder


def open(path: str | Path, *, rank: int | None = None) -> Run:
    """Open a recorded run to read it in Python; torch is not needed.

    Args:
        path: a trace, or a folder with the traces of one run.
        rank: the rank to read, if there are several.
    Raises:
        TraceError: the file is missing or not a trace, there are several ranks and none was chosen, or no such rank exists.
    """
    from zprof.analysis.run import Run

    return Run.open(path, rank=rank)


def load_ipython_extension(shell: Any) -> None:
    """Register the magic ``%%zprof``; ``%load_ext zprof`` calls it."""
    from zprof.running.jupyter import load

    load(shell)


def __getattr__(name: str) -> Any:
    if name == "Recorder":
        from zprof.recording.recorder import Recorder

        return Recorder
    if name == "Run":
        from zprof.analysis.run import Run

        return Run
    raise AttributeError(f"module 'zprof' has no attribute {name!r}")
