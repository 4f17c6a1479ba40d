"""New files and folders that their user alone can read: everything this project writes is made here or by `offload.disk`.

What shall be readable by others says so where it is written (a Prometheus text file).  It never changes what is there already.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["create", "make_folders"]


def create(path: str | os.PathLike[str], flags: int = os.O_WRONLY, *, dir_fd: int | None = None, mode: int = 0o600) -> int:
    """A descriptor of a new file; the caller closes it.

    Raises:
        OSError: something is there already, a link too, or none can be made there.
    """
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=dir_fd)


def make_folders(folder: Path) -> None:
    """The folder and those it lies in, as far as they are not there; ``mkdir(parents=True)`` would let others into the latter.

    Raises:
        OSError: one cannot be made, or is something else.
    """
    if not folder.parent.exists():
        make_folders(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
