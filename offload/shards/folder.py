"""A folder that is held open, so that nobody's links and renames lead elsewhere: entries are looked up in it."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import warnings
from pathlib import Path

from offload.errors import CheckpointError
from offload.private_files import create
from offload.regular_files import read_regular
from offload.shards.manifest import Manifest, read_manifest

__all__ = ["EXCHANGE", "RENAME_NOREPLACE", "Folder", "renameat2", "says_nothing"]

RENAME_NOREPLACE, EXCHANGE = 1, 2


def says_nothing(error: BaseException) -> bool:
    """Whether what failed says nothing of a file: this process or its machine lacks what opening one takes."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Folder:
    """A folder that is held open: entries are looked up in it alone, whatever becomes of its path.

    Raises:
        OSError: there is none, or what is there is a link or no folder.
    """

    def __init__(self, name: str | Path, within: Folder | None = None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if within else 0)
        self.fd = -1
        self.fd = os.open(name, flags, dir_fd=within.fd if within else None)
        self.status = os.fstat(self.fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        """As Python's own files: who forgets to close one is told so by a ResourceWarning, and leaks nothing."""
        if self.fd >= 0:
            warnings.warn("a folder was not closed", ResourceWarning, stacklevel=2, source=self)
            self.close()

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def path(self) -> Path:
        """A path to what is open, whatever it is called now."""
        return Path(f"/proc/self/fd/{self.fd}")

    def entry(self, name: str) -> os.stat_result | None:
        """What is called so here, a link itself and not what it leads to; None where nothing is."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """The size of a regular file; None where there is none."""
        status = self.entry(name)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def folder(self, name: str) -> Folder | None:
        """The folder that is called so here; None where there is none, or a link to one."""
        try:
            return Folder(name, self)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise

    def names(self) -> list[str]:
        return os.listdir(self.fd)

    def holds(self, folder: Folder, name: str) -> bool:
        """Whether ``folder`` still is what is called ``name`` here."""
        status = self.entry(name)
        return status is not None and os.path.samestat(status, folder.status)

    def create(self, name: str, data: bytes) -> None:
        """A new file, its owner's alone and durable."""
        with os.fdopen(create(name, dir_fd=self.fd), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def sync(self) -> None:
        try:
            os.fsync(self.fd)
        except OSError as error:
            # Some file systems cannot sync a folder; their renames are as durable as they get.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise

    def read(self, name: str, most: int) -> bytes | None:
        """A regular file of at most so many bytes; None where there is none."""
        if self.size(name) is None:
            return None
        try:
            return read_regular(self.path / name, most)
        except FileNotFoundError:
            return None

    def manifest(self) -> Manifest | None:
        """The manifest that lies here, where it can be read.

        Raises:
            CheckpointError, OSError: nobody knows, for this process or its machine has no descriptors or memory left.
        """
        try:
            return read_manifest(self.path)
        except (CheckpointError, OSError) as error:
            if says_nothing(error):
                raise
            return None

    def token(self) -> str | None:
        """The token of that manifest."""
        manifest = self.manifest()
        return None if manifest is None else manifest.token

    def whole(self, manifest: Manifest) -> bool:
        """Whether every file that the manifest lists lies here, as long as it should be."""
        return all(self.size(record.name) == record.nbytes for record in manifest.files)


def renameat2(old_fd: int, old: str, new_fd: int, new: str, flag: int) -> bool:
    """Linux's rename with a flag; False where this system has it not."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(ctypes.c_int(old_fd), os.fsencode(old), ctypes.c_int(new_fd), os.fsencode(new), ctypes.c_uint(flag)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), new)
