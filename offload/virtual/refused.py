"""The errors of code that asks the virtual device for values, with the line of the user's that did."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

from offload.errors import SimulationError

__all__ = ["no_data", "other_autocast", "user_line"]


#: What to do instead, by what asked.
_SHAPES = (
    "a shape that depends on values cannot be known: compute over all elements with a mask or weights (torch.where with three "
    "arguments, masked_fill), or give sizes as Python numbers. Experts of transformers: model.config._experts_implementation = "
    '"grouped_mm" or "batched_mm"'
)
_INSTEAD = {
    "nonzero": _SHAPES,
    "masked_select": _SHAPES,
    "unique": _SHAPES,
    "repeat_interleave": "give output_size=, or repeats as a Python number",
    "bincount": "use torch.zeros(n).scatter_add_(...) or torch.histc",
    "a copy to": "keep on the device what is only computed with, and log outside of the simulated step",
    "()": (
        "log losses outside of the simulated step, and pass sizes, lengths and flags as Python numbers; a mask whose values "
        "are read (attention_mask.all()) can be left out, or passed in its 4-D form, which is used unchanged"
    ),
}


#: transformers reads position ids for packed sequences where it has no cache.
_MASKS = (
    "leave use_cache of the model's config at True (with use_cache = False transformers reads position_ids to find packed "
    "sequences), or pass attention_mask in its 4-D form, which is used unchanged"
)


def no_data(what: str) -> SimulationError:
    """The error of code that asks for a value, with the line that did."""
    line = user_line()
    instead = next((text for name, text in _INSTEAD.items() if name in what), "compute it from shapes, or on the CPU")
    if "masking_utils.py" in line:
        instead = _MASKS
    return SimulationError(
        f"{what}{line} reads values. Expected code that needs no values, because tensors of the virtual device have no data; "
        f"found code that reads them. Instead: {instead}."
    )


def other_autocast(where: str) -> SimulationError:
    """The error of code that turns autocast on for CUDA."""
    return SimulationError(
        f'torch.autocast{where} expected autocast for the device of the tensors, found "cuda" around tensors of the '
        "virtual device, where it has no effect. Write torch.autocast(x.device.type, ...), which is right on both."
    )


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "zhooks"))


def user_line(traceback: TracebackType | None = None) -> str:
    """The innermost line that is neither torch's nor ours, and the user's that called it where it is a library's.

    Of what is running, or of the way of an error.
    """
    if traceback is None:
        lines = [(frame.f_code.co_filename, frame.f_lineno) for frame in _frames()]
    else:
        lines = [(each.tb_frame.f_code.co_filename, each.tb_lineno) for each in _way(traceback)][::-1]
    lines = [line for line in lines if not line[0].startswith((*_OURS, *_PASSING))]
    if not lines:
        return ""
    (file, number), theirs = lines[0], [line for line in lines if _LIBRARIES not in line[0]]
    called = f", called from {theirs[0][0]}:{theirs[0][1]}" if theirs and theirs[0] != lines[0] else ""
    return f" at {file}:{number}{called}"


#: Files that calls only pass through.
_PASSING = (contextlib.__file__, functools.__file__, "<frozen")
_LIBRARIES = "site-packages"


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _way(traceback: TracebackType) -> Iterator[TracebackType]:
    at: TracebackType | None = traceback
    while at is not None:
        yield at
        at = at.tb_next
