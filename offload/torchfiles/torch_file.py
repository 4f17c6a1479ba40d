"""One file of ``torch.save``: what it describes as plain data, and its tensors read from the file run by run, when asked for.

No length that a file claims is believed before it was compared with the file, and what is not read is never in memory.

Note: [Not torch.load]
    ``torch.load(weights_only=True, mmap=True)`` compares no checksums, maps no file of the older kind, which DeepSpeed still
    writes, reads pickles of protocol 2 alone, and refuses a file for one object that nobody asked for.  Where it takes an
    unpickler, it loads archives of TorchScript as programs and unpacks those of tar.

Source: the archive of torch/serialization.py, a zip file that compresses nothing.
"""

from __future__ import annotations

import errno
import math
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.regular_files import open_regular
from offload.text import one_line
from offload.torchfiles.pickled import Call, Named, PickleError, interpret, keyed

__all__ = ["Stored", "TorchFile"]

#: Bytes of what describes a file: names, shapes and options, no values.
_DESCRIBED_MOST = 512 << 20
_CHUNK = 8 << 20
_PLAIN_TENSORS = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
_MAGIC, _STREAM_VERSION = 0x1950A86A20F9469CFC6C, 1001
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16,
    "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
}  # fmt: skip
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (*_STORAGES.values(), torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
}


@dataclass(frozen=True, slots=True)
class _Storage:
    """Bytes of the file that a tensor is a view of."""

    record: str
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the file; nothing of it is in memory.

    Attributes:
        record: the storage it is a view of, by its name in the file, and the ``offset`` in bytes there.
    """

    file: TorchFile
    record: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Its elements lie in the file in row-major order."""
        size, same = 1, True
        for length, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            same = same and (length == 1 or step == size)
            size *= max(1, length)
        return same or self.numel == 0

    def part(self, start: int, numel: int) -> Stored:
        """A run of its elements in row-major order as a tensor of its own.

        Raises:
            CheckpointError: they do not lie one after the other.
        """
        if numel == self.numel:
            return self
        if not self.contiguous:
            raise self.file.refused(f"{numel} elements of {self.numel} that are not one after the other")
        return Stored(self.file, self.record, self.offset + start * self.dtype.itemsize, self.dtype, (numel,), (1,))

    def elements(self, start: int, numel: int) -> Tensor:
        """A run of its elements in row-major order, new, 1-D on the CPU.

        Raises:
            CheckpointError: it has no such elements, or they cannot be read.
        """
        if not 0 <= start <= start + numel <= self.numel:
            raise self.file.refused(f"{self.numel} elements where {start + numel} are asked for")
        if not self.contiguous:
            return self.tensor().reshape(-1)[start : start + numel].clone()
        found = torch.empty(numel, dtype=self.dtype, device="cpu")
        if numel:
            self.file.read(self.record, found.view(torch.uint8).numpy().data, self.offset + start * self.dtype.itemsize)
        return found

    def tensor(self) -> Tensor:
        """All of it, new, on the CPU."""
        if self.contiguous:
            return self.elements(0, self.numel).reshape(self.shape)
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        whole = torch.empty(span, dtype=self.dtype, device="cpu")
        self.file.read(self.record, whole.view(torch.uint8).numpy().data, self.offset)
        return whole.as_strided(self.shape, self.stride).contiguous()


class TorchFile:
    """A file as ``torch.save`` writes it, an archive or, as before torch 1.6, a stream of pickles and storages.

    Args:
        path: a regular file; a link to one is refused.
        span: where in it that lies: (offset, bytes); all of it unless said.
    Attributes:
        root: what was saved: containers, numbers, texts, `Stored` tensors, and of everything else a `Made`.
        archive: what torch.save called the archive, by the file that it wrote; "archive" or "" where it had none.
    Raises:
        CheckpointError: there is none, or it is none that torch.save wrote.
    """

    def __init__(self, path: Path, span: tuple[int, int] | None = None) -> None:
        self.path, self.archive = path, ""
        self._identity: tuple[int, ...] | None = None
        self._calls: dict[str, Call] = {
            "torch._utils._rebuild_tensor_v2": lambda args: self._view(*args[:4]),
            "torch._utils._rebuild_tensor_v3": lambda args: self._view(*args[:4], typed=args[6]),
            "torch._utils._rebuild_parameter": lambda args: args[0],
            "torch._tensor._rebuild_from_type_v2": self._of_type,
            "torch.Size": lambda args: tuple(args[0]),
            "collections.OrderedDict": lambda args: keyed(args[0]) if args else {},
            "_codecs.encode": _encoded,
        }
        #: Of each storage: where it begins, its bytes, and its CRC-32 if there is one.
        self._records: dict[str, tuple[int, int, int]] = {}
        handle = self._opened()
        try:
            size = os.fstat(handle).st_size
            self._base, self.nbytes = span or (0, size)
            if not 0 <= self._base <= self._base + self.nbytes <= size:
                raise self.refused(f"{size} bytes where {self._base + self.nbytes} should be")
            archive = os.pread(handle, 4, self._base) == b"PK\3\4"
            self.root: Any = self._of_archive(handle) if archive else self._of_stream(handle)
        except OSError as error:
            raise self.refused(error.strerror or str(error)) from error
        except (PickleError, EOFError) as error:
            raise self.refused(f"a pickle that describes no tensors ({error})") from error
        finally:
            os.close(handle)

    def _of_archive(self, handle: int) -> Any:
        """What a zip file says, as torch.save writes it since 1.6."""
        try:
            infos = zipfile.ZipFile(BufferedReader(_Raw(handle, self._base, self.nbytes))).infolist()
        except (zipfile.BadZipFile, ValueError, struct.error, OSError, NotImplementedError, OverflowError) as error:
            raise self.refused(f"something else than an archive of torch.save ({error})") from error
        for info in infos:
            # As it is in the directory: zipfile cuts names at a NUL.
            name = info.orig_filename
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
                raise self.refused(f"{name[:80]!r}, which is compressed")
            local = os.pread(handle, 30, self._base + info.header_offset)
            if len(local) < 30 or local[:4] != b"PK\3\4":
                raise self.refused(f"{name[:80]!r}, which is not where the archive says")
            start = info.header_offset + 30 + sum(struct.unpack("<HH", local[26:30]))
            if start + info.file_size > self.nbytes or name in self._records:
                raise self.refused(f"{info.file_size} bytes of {name[:80]!r} in a file of {self.nbytes}")
            self._records[name] = self._base + start, info.file_size, info.CRC
        names = [name for name in self._records if name == "data.pkl" or (name.endswith("/data.pkl") and name.count("/") == 1)]
        if len(names) != 1:
            raise self.refused(f"{len(names)} records called data.pkl")
        prefix = names[0].removesuffix("data.pkl")
        self.archive = prefix.removesuffix("/")
        offset, nbytes, _ = self._records.get(f"{prefix}byteorder", (0, 0, 0))
        order = os.pread(handle, min(nbytes, 16), offset)
        if order not in (b"", b"little"):
            raise self.refused(f"numbers in the order {order!r}")
        offset, nbytes, wanted = self._records[names[0]]
        if nbytes > _DESCRIBED_MOST:
            raise self.refused(f"{nbytes} bytes that describe it")
        raw = os.pread(handle, nbytes, offset)
        # Shapes, learning rates and steps lie here: no loader reads them again to compare.
        if wanted and zlib.crc32(raw) != wanted:
            raise self.refused(f"bytes of {names[0][:80]!r} whose checksum does not match")

        def storage(about: Any) -> _Storage:
            kind, named, key, _, numel = about
            dtype, name = _storage_dtype(kind, named, numel), f"{prefix}data/{key}"
            if not isinstance(key, str) or name not in self._records:
                raise PickleError(f"no {name[:80]!r} in the archive")
            nbytes = self._records[name][1]
            if numel * dtype.itemsize > nbytes:
                raise PickleError(f"a storage of {numel} x {dtype} in {nbytes} bytes")
            return _Storage(name, nbytes, dtype)

        return interpret(raw, self._calls, storage)

    def _of_stream(self, handle: int) -> Any:
        """What pickles one after the other say, with the storages behind them, as torch.save wrote it before 1.6.

        DeepSpeed does so still, unless its configuration says otherwise.
        """
        found: dict[str, _Storage] = {}

        def storage(about: Any) -> _Storage:
            kind, named, key, _, numel, view = about
            dtype = _storage_dtype(kind, named, numel)
            if view is not None or not isinstance(key, str):
                raise PickleError("a view of a storage")
            made = _Storage(key, numel * dtype.itemsize, dtype)
            if found.setdefault(key, made) != made or made.nbytes > self.nbytes:
                raise PickleError(f"a storage of {numel} x {dtype}")
            return made

        with BufferedReader(_Raw(handle, self._base, min(self.nbytes, _DESCRIBED_MOST)), 1 << 16) as part:
            if interpret(part, {}) != _MAGIC or interpret(part, {}) != _STREAM_VERSION:
                raise self.refused("a file of another kind")
            about = interpret(part, {})
            if not isinstance(about, dict) or about.get("little_endian") is not True:
                raise self.refused("numbers in another order")
            root, keys = interpret(part, self._calls, storage), interpret(part, {})
            at = part.tell()
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or set(keys) != found.keys():
            raise self.refused("different storages than its tensors have")
        for key in keys:
            raw = os.pread(handle, 8, self._base + at)
            numel = struct.unpack("<q", raw)[0] if len(raw) == 8 else -1
            if key in self._records or numel * found[key].dtype.itemsize != found[key].nbytes:
                raise self.refused(f"storage {key[:80]!r} of {numel} elements")
            self._records[key] = self._base + at + 8, found[key].nbytes, 0
            at += 8 + found[key].nbytes
        if at > self.nbytes:
            raise self.refused(f"{self.nbytes} bytes where {at} should be")
        return root

    # The file.

    def _opened(self) -> int:
        """A descriptor of the file that was opened first.

        Raises:
            CheckpointError: it is not there, no regular file, or another one by now.
        """
        try:
            handle = open_regular(self.path, follow=False)
        except (OSError, ValueError) as error:
            found = getattr(error, "strerror", None) or str(error)
            raise self.refused(found) from error
        status = os.fstat(handle)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._identity is not None and identity != self._identity:
            os.close(handle)
            raise self.refused("a file that was replaced since it was opened")
        self._identity = identity
        return handle

    def read(self, record: str, into: memoryview, offset: int) -> None:
        """Bytes of a storage.

        Raises:
            CheckpointError: they cannot be read.
        """
        start, nbytes, _ = self._records[record]
        assert 0 <= offset <= offset + len(into) <= nbytes, f"{self.path}: {offset} + {len(into)} of {nbytes} bytes"
        try:
            with os.fdopen(self._opened(), "rb") as file:
                file.seek(start + offset)
                done = file.readinto(into)
        except OSError as error:
            raise self.refused(error.strerror or str(error)) from error
        if done < len(into):
            raise self.refused(f"its end at byte {start + offset + done}")

    @property
    def records(self) -> list[str]:
        """The names of its storages, and of what else is in an archive."""
        return list(self._records)

    @property
    def checked(self) -> bool:
        """Its storages have checksums."""
        return not self._records or any(crc for _, _, crc in self._records.values())

    def verify(self, record: str) -> int:
        """Compare one storage with the checksum in the archive; its bytes.

        Raises:
            CheckpointError: it is damaged.
        """
        _, nbytes, wanted = self._records[record]
        buffer, found = bytearray(min(_CHUNK, nbytes)), 0
        for at in range(0, nbytes, _CHUNK):
            memory = memoryview(buffer)[: min(_CHUNK, nbytes - at)]
            self.read(record, memory, at)
            found = zlib.crc32(memory, found)
        # torch.serialization.set_crc32_options(False) leaves none.
        if wanted and found != wanted:
            raise self.refused(f"bytes of {record[:80]!r} whose checksum does not match")
        return nbytes

    # What the pickle calls.

    def _of_type(self, args: tuple[Any, ...]) -> Stored:
        """A plain tensor or parameter with attributes of its own, which are not looked at."""
        how, kind, inner = args[:3]
        # Texts of names alone: that of rows in rows could be endless.
        if not isinstance(how, Named) or not isinstance(kind, Named):
            raise PickleError("a tensor of a class without a name")
        if str(how) != "torch._utils._rebuild_tensor_v2" or str(kind) not in _PLAIN_TENSORS:
            raise PickleError(f"a tensor of the class {kind}"[:120])
        return self._view(*inner[:4])

    def _view(self, storage: Any, offset: Any, shape: Any, stride: Any, *, typed: Any = None) -> Stored:
        """``typed``: the name of a dtype that is not the storage's."""
        whole = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride) <= 64
        if not isinstance(storage, _Storage) or not whole:
            raise PickleError("a tensor of an unknown kind")
        if not all(type(one) is int and 0 <= one < 2**62 for one in (offset, *shape, *stride)):
            raise PickleError("a tensor of an unknown kind")
        named = isinstance(typed, Named) and typed.module == "torch"
        dtype = storage.dtype if typed is None else _DTYPES.get(typed.name) if named else None
        if dtype is None:
            raise PickleError("a tensor of an unknown dtype")
        numel = math.prod(shape)
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if numel else 0
        room = storage.nbytes // dtype.itemsize
        if numel > room or (numel and last >= room):
            raise PickleError(f"a tensor of shape {shape[:8]} in {storage.nbytes} bytes")
        return Stored(self, storage.record, offset * dtype.itemsize, dtype, shape, stride)

    def refused(self, found: str) -> CheckpointError:
        """Why the file cannot be read."""
        return CheckpointError(
            f"Cannot read {self.path}. Expected a file that torch.save wrote, found {one_line(found)}. Copy it again, or load "
            "another checkpoint."
        )


def _storage_dtype(kind: Any, named: Any, numel: Any) -> torch.dtype:
    known = isinstance(named, Named) and named.module in ("torch", "torch.storage")
    dtype = _STORAGES.get(named.name) if known else None
    if kind != "storage" or dtype is None or type(numel) is not int or not 0 <= numel < 2**62:
        raise PickleError("a storage of an unknown kind")
    return dtype


def _encoded(args: tuple[Any, ...]) -> bytes:
    """Bytes, as old protocols have them."""
    text, encoding = args
    if not isinstance(text, str) or encoding != "latin1":
        raise PickleError("a text in another encoding")
    return text.encode("latin1")


class _Raw(RawIOBase):
    """A part of an open file as a file of its own; closing it leaves the descriptor open."""

    def __init__(self, handle: int, base: int, nbytes: int) -> None:
        super().__init__()
        self._handle, self._base, self._nbytes, self._at = handle, base, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        memory = memoryview(into).cast("B")
        count = max(0, min(len(memory), self._nbytes - self._at))
        done = os.preadv(self._handle, [memory[:count]], self._base + self._at) if count else 0
        self._at += done
        return done

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._nbytes)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "before the start of the file")
        self._at = at
        return at
