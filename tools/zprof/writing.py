"""Owns how a finished file takes the place of an older one: whole, or not at all.

The store of bench figures, the JUnit report and the exports call it. It never makes folders, and leaves nothing behind when it
fails.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from offload.private_files import create

__all__ = ["committed", "committing", "replaceable"]


def replaceable(path: Path) -> None:
    """Refuse to take the place of what is no plain file: a link, a pipe or a device such as /dev/null.

    Raises:
        OSError: there is one at ``path``.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise OSError(errno.EINVAL, f"expected a plain file or none, found {kind}")


def committed(path: Path, body: bytes, *, mode: int = 0o600) -> None:
    """Write ``body`` to ``path``; whoever reads meanwhile sees the old file or the new one, also after a crash.

    Args:
        mode: permissions of the new file, less the umask.
    Raises:
        OSError: as it came from the system; the old file is untouched.
    """
    with committing(path, mode=mode) as file:
        file.write(body)


@contextmanager
def committing(path: Path, *, mode: int = 0o600) -> Iterator[BinaryIO]:
    """As `committed`, for a body that is written piece by piece: it counts once the block has ended without an error."""
    replaceable(path)
    passing = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with open(passing, "wb", opener=lambda name, _: create(name, mode=mode)) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(passing, path)
        except BaseException:
            passing.unlink(missing_ok=True)
            raise
