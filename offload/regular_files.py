"""Files that somebody else may have put there: opened without waiting, regular ones alone, and read up to a bound.

Policies, manifests, shard files, traces and snapshots are opened here.  A named pipe would wait for a writer and a device may
never end, so what was opened is looked at before a byte is read.  A link is followed: what it leads to is what is judged.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from offload.text import shown_path

__all__ = ["open_regular", "planted_link", "read_regular", "strangers"]

_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))


def strangers(folder: os.stat_result, entry: os.stat_result) -> bool:
    """Whether what lies in a folder where everybody may make files is neither this user's nor the folder's owner's.

    As Linux protects links (fs.protected_symlinks), where it is asked to.
    """
    shared = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
    return bool(shared) and entry.st_uid not in (os.geteuid(), folder.st_uid)


def planted_link(path: Path) -> str | None:
    """The first link on the way to ``path`` that a stranger made, in words; see `strangers`.

    Raises:
        OSError: the way cannot be followed, as where links form a loop.
    """
    for link in [path, *path.absolute().parents]:
        try:
            status = os.lstat(link)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISLNK(status.st_mode) and strangers(os.stat(link.parent), status):
            who = f"another user (uid {status.st_uid})"
            return f"a link at {shown_path(link)} that {who} made in a folder that everybody can write to"
    return None


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """A descriptor to read a regular file; the caller closes it.  Without ``follow`` a link is refused.

    Raises:
        OSError: it cannot be opened, or is none.  ValueError: the path is none.
    """
    # Without O_NONBLOCK a named pipe would wait for a writer; to a regular file it means nothing.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    handle = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    kind = next((name for check, name in _KINDS if check(mode)), "a device")
    raise OSError(errno.EINVAL, f"{kind}, not a regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """All of a regular file of at most ``most`` bytes.

    Raises:
        OSError: it cannot be read, is none, or is larger, also where it grew while it was read.  ValueError: no path.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        raw = file.read(most + 1) if size <= most else b""
    if max(size, len(raw)) > most:
        raise OSError(errno.EFBIG, f"{max(size, len(raw))} bytes, more than {most}", os.fspath(path))
    return raw
