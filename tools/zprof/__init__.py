"""zprof: where every byte and millisecond of a training run went; the command line and what it offers to code.

``record`` and ``Recorder`` are for scripts, ``%load_ext zprof`` for notebooks. Nothing is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from zprof.recording.recorder import Level, Recorder

__all__ = ["Recorder", "load_ipython_extension", "record"]


@contextmanager
def record(
    path: str | Path = "run.{rank}.zprof",
    *,
    level: Level | Literal["auto"] = "events",
    interval_s: float = 0.1,
    nvml: str = "auto",
    force: bool = False,
) -> Iterator[Recorder]:
    """Record what runs inside the block: every attachment of this process, every optimizer step, memory and GPUs.

    Arguments and errors are those of ``zprof.Recorder``.
    """
    from zprof.recording.recorder import Recorder

    with Recorder(path, level=level, interval_s=interval_s, nvml=nvml, force=force).listen() as recorder:
        yield recorder


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext zprof`` calls."""
    from zprof.running.jupyter import load

    load(shell)


def __getattr__(name: str) -> Any:
    if name == "Recorder":
        from zprof.recording.recorder import Recorder

        return Recorder
    raise AttributeError(f"module 'zprof' has no attribute {name!r}")
