"""The errors of code that asks the virtual device for values, with the line of the user's that did.

Kernels and operations raise them.  It decides nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

from offload.errors import SimulationError

__all__ = ["no_data", "other_autocast", "user_line"]


def no_data(what: str) -> SimulationError:
    """The error of code that asks for a value, with the line of the user's that did."""
    where = user_line()
    return SimulationError(
        f"{what}{where}: expected code that needs no values, for tensors of the virtual device have shapes and no data; found "
        "one that reads them. Log losses outside of what is simulated, and pass sizes, masks and lengths as Python numbers "
        "or as tensors on the CPU."
    )


def other_autocast(where: str) -> SimulationError:
    """The error of code that turns autocast on for CUDA."""
    return SimulationError(
        f'torch.autocast{where}: expected autocast of the device whose tensors compute, found "cuda" around those of the '
        "virtual device, to which it does nothing. Write torch.autocast(x.device.type, ...), which is right on both."
    )


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "zhooks"))


def user_line(traceback: TracebackType | None = None) -> str:
    """The innermost line that is neither torch's nor ours: of an error's way, or of what is running."""
    if traceback is None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    lines = ((each.tb_frame.f_code.co_filename, each.tb_lineno) for each in _way(traceback))
    theirs = [f" at {file}:{number}" for file, number in lines if not file.startswith((*_OURS, _CONTEXTS))]
    return theirs[-1] if theirs else ""


#: Where context managers are entered and left.
_CONTEXTS = contextlib.__file__


def _way(traceback: TracebackType) -> Iterator[TracebackType]:
    at: TracebackType | None = traceback
    while at is not None:
        yield at
        at = at.tb_next
