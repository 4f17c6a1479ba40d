"""The errors of code that asks the virtual device for values, with the line of the user's that did.

Kernels and operations raise them.  It decides nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from offload.errors import SimulationError

__all__ = ["no_data"]


def no_data(what: str) -> SimulationError:
    """The error of code that asks for a value, with the line of the user's that did."""
    where = _line()
    return SimulationError(
        f"{what}{where}: expected code that needs no values, for tensors of the virtual device have shapes and no data; found "
        "one that reads them. Log losses outside of what is simulated, and pass sizes, masks and lengths as Python numbers "
        "or as tensors on the CPU."
    )


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "zhooks"))


def _line() -> str:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
