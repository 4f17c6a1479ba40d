"""The scratch file itself: opened private and direct where the file system allows, grown in steps, removed with its process;
the system's calls that it makes, and whole transfers between it and memory.

``disk_tier.py`` opens one, and with it the stale files of dead processes in the same folder go: never a file of a living
process, of another machine or of a format that is not known.

Note: [Whose file]
    The first page says who owns the file: machine, boot, process id space, process id, and when that process started, for
    ids are used again.  The owner also locks the file.  A file is stale when its machine is this one, its process is
    certainly over (an earlier boot, or the same id space without that process) and nobody holds the lock, which covers
    machines that share a name and a folder.  Whatever is in doubt stays.

Note: [Aligned or bounced]
    Direct I/O wants memory, length and file offset on pages.  What starts on a page goes from where it lies, and only a
    ragged tail, less than a page, passes through a bounce buffer as the second element of the same vectored call.  What
    starts elsewhere passes through the bounce buffer whole.  There are never more buffers than threads, and the system
    commits only the pages of one that were used.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.budget import kept_free
from offload.errors import PolicyError, TierError
from offload.pages import ALIGN, aligned, round_up
from offload.private_files import make_folders
from offload.regular_files import planted_link

__all__ = [
    "BufferedIo", "Bytes", "Mover", "Owner", "ScratchFile", "SystemIo", "open_scratch", "remove_stale", "started_ticks",
    "trouble",
]  # fmt: skip

#: 1-D bytes that somebody else owns.
Bytes = npt.NDArray[np.uint8]

#: A system's call that moves some bytes between a file and buffers.
Call = Callable[[int, Sequence[Bytes], int], int]
#: So often a call may move less than a page before the file counts as ended; it happens at the end of a truncated file.
STALLS = 3


class SystemIo:
    """The system's calls that a disk tier makes; Python repeats those that a signal interrupts.

    All raise OSError, and any transfer may move less than it was asked to; tests put faulty ones in their place.
    """

    def open(self, path: Path, flags: int, dir_fd: int | None = None) -> int:
        """A descriptor; a file that is created is its owner's alone (0600)."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        """Bytes read into ``buffers``; 0 at the end of the file."""
        return os.preadv(fd, [buffer.data for buffer in buffers], offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        """Bytes written from ``buffers``."""
        return os.pwritev(fd, [buffer.data for buffer in buffers], offset)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Make the file hold the range, with space for it on the disk."""
        os.posix_fallocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def free_nbytes(self, fd: int) -> tuple[int, int]:
        """What this process may still write on the file's file system, and the size of all of that."""
        status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


class BufferedIo(SystemIo):
    """The system's calls on a file system that is said not to do direct I/O."""

    def open(self, path: Path, flags: int, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags, dir_fd)


class Mover:
    """Moves whole ranges between memory and one open file; any number of threads at once.

    Args:
        direct: the descriptor wants pages: see Note [Aligned or bounced].
        bounce_nbytes: the longest range that will be asked for.
    """

    def __init__(self, io: SystemIo, fd: int, *, direct: bool, bounce_nbytes: int) -> None:
        self._io, self._fd = io, fd
        self._align = ALIGN if direct else 1
        self._bounce_nbytes = round_up(bounce_nbytes)
        self._idle: list[Bytes] = []

    def write(self, memory: Bytes, offset: int) -> int:
        """Write ``memory`` at ``offset``, a multiple of ALIGN, and whole pages of it; bytes taken before it went no further."""
        return self._move(self._io.pwritev, memory, offset, writes=True)

    def read(self, memory: Bytes, offset: int) -> int:
        """Fill ``memory`` from ``offset``, a multiple of ALIGN; fewer bytes than asked for where the file ends."""
        return self._move(self._io.preadv, memory, offset, writes=False)

    def _move(self, call: Call, memory: Bytes, offset: int, *, writes: bool) -> int:
        """See Note [Aligned or bounced]."""
        lies = memory.ctypes.data % self._align == 0
        here = memory.size // self._align * self._align if lies else 0
        whole, tail = memory[:here], memory[here:]
        if not tail.size:
            return self._whole(call, [whole], offset)
        try:
            bounce = self._idle.pop()
        except IndexError:
            bounce = aligned(self._bounce_nbytes).numpy()
        try:
            padded = bounce[: round_up(tail.size)]
            if writes:
                np.copyto(padded[: tail.size], tail)
                padded[tail.size :] = 0
            moved = self._whole(call, [whole, padded], offset)
            if not writes:
                np.copyto(tail, padded[: tail.size])
            return min(memory.size, moved)
        finally:
            self._idle.append(bounce)

    def _whole(self, call: Call, buffers: list[Bytes], offset: int) -> int:
        """Repeat ``call`` where it moved less than everything; the bytes moved when it moves no more."""
        total = sum(buffer.size for buffer in buffers)
        moved = stalls = 0
        while moved < total and stalls < STALLS:
            try:
                count = call(self._fd, _from(buffers, moved), offset + moved)
            except InterruptedError:
                continue
            if count == 0:
                break
            # Direct I/O cannot go on within a page: what was moved of it is moved again.
            step = count // self._align * self._align
            stalls = 0 if step else stalls + 1
            moved += step
        return moved


def _from(buffers: list[Bytes], skipped: int) -> list[Bytes]:
    """What is left of ``buffers`` after their first ``skipped`` bytes."""
    left = []
    for buffer in buffers:
        if skipped < buffer.size:
            left.append(buffer[skipped:])
        skipped = max(0, skipped - buffer.size)
    return left


# --- the file and its owner ------------------------------------------------------------------------------------------------

MAGIC = "zhooks scratch 1"
PATTERN = "zhooks-*.scratch"

#: What a file system says when it does not do direct I/O; some say so only at the first transfer.
_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_FULL = "free space there or choose another [disk] path"
_LARGE = "the file is as large as ulimit -f (RLIMIT_FSIZE) or its file system allows: raise that or choose another [disk] path"
_GONE = "its file system is no longer mounted: mount it and restart, or choose another [disk] path"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _LARGE,
    errno.EIO: "the device is failing: choose another [disk] path",
    errno.EBADF: _GONE,
    errno.ENODEV: _GONE,
    errno.ENXIO: _GONE,
    errno.ESTALE: _GONE,
}


def trouble(error: OSError) -> str:
    """What happened and what to do about it, as the end of an error's line."""
    code = error.errno or 0
    return f"{errno.errorcode.get(code, code)}, {os.strerror(code)}; {_REMEDIES.get(code, 'choose another [disk] path')}"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, distinct from every other of every machine; see Note [Whose file]."""

    host: str
    boot: str
    namespace: str
    pid: int
    started_ticks: int

    @staticmethod
    def here() -> Owner:
        """This process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pid = os.getpid()
        return Owner(socket.gethostname(), boot, os.readlink("/proc/self/ns/pid"), pid, started_ticks(pid) or 0)

    def page(self) -> bytes:
        """The first page of a file that this process owns."""
        return f"{MAGIC}\n{json.dumps(asdict(self))}\n".encode().ljust(ALIGN, b"\0")

    @staticmethod
    def of_page(page: bytes) -> Owner | None:
        """Who owns the file that starts with ``page``; None where it is not one of ours or was truncated."""
        magic, _, facts_line = page.partition(b"\n")
        if magic != MAGIC.encode() or len(page) != ALIGN:
            return None
        try:
            facts: Any = json.loads(facts_line.partition(b"\n")[0])
            owner = Owner(**facts)
        except (ValueError, TypeError, RecursionError):
            return None
        return owner if all(type(value) is type(facts_of) for value, facts_of in _pairs(owner)) else None

    def is_over(self) -> bool:
        """Whether the process certainly does not live any more."""
        here = Owner.here()
        if self.host != here.host:
            return False
        if self.boot != here.boot:
            return True
        return self.namespace == here.namespace and started_ticks(self.pid) != self.started_ticks


def _pairs(owner: Owner) -> list[tuple[object, object]]:
    """Each fact beside one of the type it should have."""
    return list(zip(asdict(owner).values(), ("", "", "", 0, 0), strict=True))


def started_ticks(pid: int) -> int | None:
    """When the process started, in the kernel's ticks since boot; None when it has ended, reaped or not."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZXx" else int(fields[19])


class ScratchFile:
    """An open scratch file.

    Attributes:
        direct: transfers pass the page cache by.
        size: bytes the file holds, its first page among them; ``grow`` alone changes it.
    """

    def __init__(self, path: Path, io: SystemIo, plain_fd: int, direct_fd: int | None) -> None:
        self.path = path
        self.direct = direct_fd is not None
        self.size = ALIGN
        self.pid = os.getpid()
        self._io = io
        self._plain_fd = plain_fd
        self._fd = plain_fd if direct_fd is None else direct_fd

    def mover(self, bounce_nbytes: int) -> Mover:
        """What moves data to and from this file."""
        return Mover(self._io, self._fd, direct=self.direct, bounce_nbytes=bounce_nbytes)

    def free_nbytes(self) -> tuple[int, int]:
        """What the file system still has for this file, and what of its space is kept for others: see `kept_free`."""
        free, total = self._io.free_nbytes(self._plain_fd)
        kept = min(free, kept_free(total))
        return free - kept, kept

    def grow(self, nbytes: int) -> None:
        """Reserve ``nbytes`` more at the end; after an OSError the file is as long as before."""
        try:
            # Not on the direct descriptor: where the library has to write zeros it writes single bytes.
            self._io.fallocate(self._plain_fd, self.size, nbytes)
        except OSError:
            with suppress(OSError):
                self._io.truncate(self._plain_fd, self.size)
            raise
        self.size += nbytes

    def remove(self) -> None:
        """Delete and close the file; nothing in a forked child, and never a stranger that took its name."""
        if os.getpid() != self.pid:
            return
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._plain_fd), os.lstat(self.path)):
                self.path.unlink()
        for fd in {self._plain_fd, self._fd}:
            with suppress(OSError):
                os.close(fd)


def open_scratch(folder: Path, label: str, io: SystemIo) -> ScratchFile:
    """A new file in ``folder``, which is created where it is missing.

    Raises:
        PolicyError: the folder cannot be used.
        TierError: its file system fails.
    """
    try:
        planted = planted_link(folder)
        if planted:
            raise PolicyError(
                f"Cannot use {folder} as [disk] path. Expected a folder or a link of your own, found {planted}; name the "
                "folder itself"
            )
        make_folders(folder)
        path = folder.absolute() / f"zhooks-{label}-{os.getpid()}-{secrets.token_hex(4)}.scratch"
        plain_fd = io.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except OSError as error:
        found = "a file" if isinstance(error, (FileExistsError, NotADirectoryError)) else os.strerror(error.errno or 0)
        raise PolicyError(
            f"Cannot use {folder} as [disk] path. Expected a folder this process may write, found {found}; choose another "
            "[disk] path"
        ) from error
    direct_fd: int | None = None
    try:
        # A file system without locks has none to test either, and keeps its stale files.
        with suppress(OSError):
            fcntl.flock(plain_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        page = aligned(ALIGN).numpy()
        page[:] = np.frombuffer(Owner.here().page(), np.uint8)
        direct_fd = _open_direct(path, io, plain_fd, page)
        file = ScratchFile(path, io, plain_fd, direct_fd)
        if file.mover(ALIGN).write(page, 0) != ALIGN:
            raise OSError(errno.EIO, "the first page was not written")
        # Whose file it is must outlive the machine's fall, or its space would be lost for good.
        os.fdatasync(plain_fd)
    except BaseException as error:
        ScratchFile(path, io, plain_fd, direct_fd).remove()
        if isinstance(error, OSError):
            raise TierError(f"disk tier cannot open {path}: {trouble(error)}") from error
        raise
    return file


def _open_direct(path: Path, io: SystemIo, plain_fd: int, page: Bytes) -> int | None:
    """A second descriptor past the page cache, tried with the first page; None where the file system does not have that."""
    fd: int | None = None
    try:
        fd = io.open(path, os.O_RDWR | os.O_DIRECT)
        if not os.path.samestat(os.fstat(fd), os.fstat(plain_fd)):
            raise OSError(errno.EEXIST, "another file took its name")
        io.pwritev(fd, [page], 0)
        io.preadv(fd, [aligned(ALIGN).numpy()], 0)
    except OSError as error:
        if fd is not None:
            os.close(fd)
        if error.errno not in _NOT_DIRECT:
            raise
        return None
    return fd


def remove_stale(folder: Path) -> list[tuple[Path, int]]:
    """Remove the files that dead processes of this machine left in ``folder``; the paths and sizes of those removed."""
    try:
        paths = sorted(folder.glob(PATTERN))
    except OSError:
        return []
    return [(path, size) for path in paths if (size := _remove_if_stale(path)) is not None]


def _remove_if_stale(path: Path) -> int | None:
    """The size of the file if it was stale and is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        owner = Owner.of_page(os.read(fd, ALIGN)) if stat.S_ISREG(status.st_mode) else None
        if owner is None or status.st_uid != os.geteuid() or not owner.is_over():
            return None
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(status, os.lstat(path)):
            return None
        path.unlink()
    except OSError:
        return None
    finally:
        os.close(fd)
    return status.st_size
