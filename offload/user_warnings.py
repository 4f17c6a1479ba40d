"""Owns where a warning points, at the user's own line, however many of our calls lie between it and the problem; and which rank
of a job warns: the first.

`offload` and `zhooks` warn through it of what a user's call or policy comes to. It never decides what is worth a warning.
"""

from __future__ import annotations

import sys
import warnings

from offload.job_rank import job_rank

__all__ = ["warn_user"]

#: Packages whose frames are on the way from the user's line to ours: our own, and what calls our hooks and contexts.
_BETWEEN = ("offload", "zhooks", "torch", "contextlib")


def warn_user(message: str | Warning, category: type[Warning] = UserWarning, *, this_rank: bool = False) -> None:
    """Warn once a job, at the innermost line on the stack that is neither ours nor torch's; at the outermost if all are.

    Args:
        this_rank: other ranks may have nothing to say, or something else; by default all would say the same, and rank 0 does.
    """
    if not this_rank and job_rank():
        return
    # Level 1 is this function's own frame, for `warnings.warn`.
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
