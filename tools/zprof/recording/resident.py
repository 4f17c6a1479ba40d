"""Owns what a process's resident memory consists of beside tensors: files mapped, malloc's own account, Python's arenas.

The recorder samples it at the levels that see every storage, so that a report can name what would else be one large
remainder. It reads counters that the kernel, glibc and CPython keep; it allocates nothing and never imports torch.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from zprof.clock import now_ns
from zprof.recording import kernel_files
from zprof.recording.sampler import Reading

__all__ = ["ResidentSampler", "malloc_account"]

#: The counters of the kernel are read at each sample, malloc's and Python's this often, each mapping far less often.
MALLOC_NS = 1_000_000_000
MAPPINGS_NS = 10_000_000_000
_FIELDS = {b"RssFile": "resident files", b"RssShmem": "resident shared", b"RssAnon": "resident anonymous"}
_ARENAS = re.compile(rb"(\d+) arenas \* (\d+) bytes/arena")


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


class ResidentSampler:
    """"resident files", "resident shared" and "resident anonymous" of the kernel, "malloc used" and "malloc kept" of glibc,
    "python objects" of CPython, and "library data": pages of files that were written to, such as relocated tables.

    Args:
        root: where /proc is; "/" outside tests.
    """

    #: All that it ever says.
    WHATS = frozenset({*_FIELDS.values(), "malloc used", "malloc kept", "python objects", "library data"})

    def __init__(self, root: Path = Path("/")) -> None:
        self._status, self._smaps = root / "proc/self/status", root / "proc/self/smaps"
        self._malloc = malloc_account()
        self._arenas = _arena_account()
        self._malloc_ns = self._mappings_ns = -MAPPINGS_NS

    def sample(self) -> Sequence[Reading]:
        readings: list[Reading] = []
        for line in kernel_files.read(self._status).splitlines():
            name, _, value = line.partition(b":")
            if name in _FIELDS and value.split()[:1] and value.split()[0].isdigit():
                readings.append((_FIELDS[name], "", int(value.split()[0]) << 10))
        now = now_ns()
        if now - self._malloc_ns >= MALLOC_NS:
            self._malloc_ns = now
            readings.extend(self._malloc())
            readings.extend(self._arenas())
        if now - self._mappings_ns >= MAPPINGS_NS:
            self._mappings_ns = now
            readings.append(("library data", "", _written_pages(kernel_files.read(self._smaps))))
        return readings

    def close(self) -> None:
        pass


def _written_pages(smaps: bytes) -> int:
    """Bytes of private pages that files are mapped to and that no longer are the file's."""
    total, of_file = 0, False
    for line in smaps.splitlines():
        if line[:1] in b"0123456789abcdef" and line[:1]:
            of_file = b" /" in line and b" /dev/" not in line
        elif of_file and line.startswith(b"Anonymous:"):
            total += int(line.split()[1]) << 10
    return total


def malloc_account() -> Callable[[], list[Reading]]:
    """Reads glibc's account of all arenas; answers nothing where malloc is another's."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return list
    mallinfo.restype = _MallInfo

    def read() -> list[Reading]:
        info = mallinfo()
        if not info.arena and not info.hblkhd:
            return []  # another malloc was loaded before glibc's
        return [("malloc used", "", info.uordblks + info.hblkhd), ("malloc kept", "", info.fordblks)]

    return read


def _arena_account() -> Callable[[], list[Reading]]:
    """Reads how many arenas CPython's object allocator holds, from the statistics it can write to a C stream."""
    try:
        libc = ctypes.CDLL(None)
        open_stream, close_stream, free = libc.open_memstream, libc.fclose, libc.free
        write = ctypes.pythonapi._PyObject_DebugMallocStats
    except (OSError, AttributeError):
        return list
    open_stream.restype = ctypes.c_void_p
    close_stream.argtypes = write.argtypes = free.argtypes = (ctypes.c_void_p,)

    def read() -> list[Reading]:
        text, size = ctypes.c_char_p(), ctypes.c_size_t()
        stream = open_stream(ctypes.byref(text), ctypes.byref(size))
        if not stream:
            return []
        write(stream)
        close_stream(stream)
        found = _ARENAS.search(text.value or b"")
        free(ctypes.cast(text, ctypes.c_void_p))
        return [("python objects", "", int(found[1]) * int(found[2]))] if found else []

    return read

