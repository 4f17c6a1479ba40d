"""Owns the rules for the one file that a command writes for its user: never over what it reads, over another only by ``-f``.

``zprof timeline``, ``flamegraph``, ``check --junit`` and ``policy convert`` call it. It writes through `zprof.writing`, so
that a pipe, a link or a device is refused, and whatever fails leaves what was there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from zprof.problem import Problem
from zprof.writing import committed, replaceable

__all__ = ["check_output", "write_output"]


def check_output(path: Path, inputs: Sequence[Path], *, force: bool) -> None:
    """Refuse before the work starts what `write_output` could not or must not write.

    Raises:
        Problem: something is there already and ``force`` was not said, its folder is not there, or it is no plain file,
            or is one of the inputs.
    """
    if path.is_dir():
        raise Problem(f"{path}: expected a file to write, found a directory; name a file with -o")
    if any(os.path.realpath(path) == os.path.realpath(each) for each in inputs):
        raise Problem(f"{path}: is the input; name another file with -o")
    if os.path.lexists(path) and not force:
        raise Problem(f"{path}: exists already; overwrite it with -f, or name another with -o")
    if not path.parent.exists():
        raise Problem(f"{path}: cannot be written: {os.strerror(errno.ENOENT)}")
    try:
        replaceable(path)
    except (OSError, ValueError) as error:
        raise Problem(f"{path}: {getattr(error, 'strerror', None) or error}; name another with -o") from None


def write_output(path: Path, body: bytes) -> None:
    """Write the file whole or not at all, its user's alone.

    Raises:
        Problem: it cannot be written; what was there is untouched.
    """
    try:
        committed(path, body)
    except (OSError, ValueError) as error:
        raise Problem(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
