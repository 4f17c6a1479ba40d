"""Safetensors files of a rank: their header, and a reader of bounded memory that compares what it reads with checksums.

Source: the safetensors format, https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.autograd.graph import increment_version

from offload.disk import Bytes
from offload.errors import CheckpointError
from offload.regular_files import open_regular
from offload.shards.manifest import Record

__all__ = ["CHUNK", "CODES", "DTYPES", "NAMED", "Entry", "Part", "ShardReader", "blocks", "digest", "file_nbytes", "header"]

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}
#: By torch's own names, as manifests and other formats have them.
NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
#: Bytes of a tensor that are in memory at once; a multiple of every element size.
CHUNK = 8 << 20
#: Bytes that are copied while a core's cache still has them from their checksum.
CACHED = 1 << 20
HEADER_MOST = 256 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def digest(chunks: Iterable[Tensor]) -> str:
    """The checksum of these tensors' bytes, one after the other."""
    state = xxhash.xxh3_64()
    for chunk in chunks:
        for block in blocks(chunk):
            state.update(block.data)
    return state.hexdigest()


def file_nbytes(entries: Sequence[Entry]) -> tuple[int, int]:
    """Bytes of the header of a file with these tensors, and of all of it."""
    front = len(header(entries))
    return front, front + sum(entry.nbytes for entry in entries)


def header(entries: Sequence[Entry]) -> bytes:
    """The beginning of a file that has these tensors in this order."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        assert entry.name not in described, f"two tensors are called {entry.name}"
        if entry.dtype not in CODES:
            raise CheckpointError(
                f"Cannot store {entry.name}. Expected a dtype that safetensors supports, found {entry.dtype}. Convert it, "
                "leave it out, or use state_dict() and torch.save."
            )
        offsets = [offset, offset + entry.nbytes]
        described[entry.name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        offset += entry.nbytes
    raw = json.dumps(described, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def blocks(chunk: Tensor) -> Iterator[Bytes]:
    """The tensor's bytes in storage order of a contiguous copy, at most CHUNK at a time from another device."""
    flat = chunk.detach().resolve_conj().resolve_neg().reshape(-1)
    step = CHUNK // chunk.dtype.itemsize
    for start in range(0, flat.numel(), step):
        whole = flat[start : start + step].to("cpu").contiguous()
        # A tensor of one element counts as contiguous whatever its stride is, and may not be seen as bytes then.
        block = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()
        for at in range(0, block.size, CACHED):
            yield block[at : at + CACHED]


class Part:
    """Ranges of a file of ``nbytes`` bytes, in order and apart, as memory of their own.

    Args:
        digests: of runs of bytes that lie within one range each, by start and stop, in order, what their checksum must be;
            ``write`` compares it as they come.
    Attributes:
        nbytes: of the file, all of it.
        ranges: what is here.
    """

    def __init__(
        self, nbytes: int, ranges: Sequence[tuple[int, int]], digests: Mapping[tuple[int, int], str] | None = None
    ) -> None:
        self.nbytes, self.ranges = nbytes, tuple(ranges)
        self._places: list[int] = []
        held = 0
        for start, stop in ranges:
            # As the file itself has it, so that what is aligned there is here; no dtype is wider.
            held += (start - held) % 64
            self._places.append(held)
            held += stop - start
        # Small pages: it is written once and soon given back, and large ones took longer to be had than to be filled.
        self._memory = torch.empty(held, dtype=torch.uint8, device="cpu")
        self._left = sorted((digests or {}).items(), reverse=True)
        self._state = xxhash.xxh3_64()
        self._wrong = False

    @property
    def wrong(self) -> bool:
        """Some run came with another checksum, or has not come."""
        return self._wrong or bool(self._left)

    def has(self, start: int, stop: int) -> bool:
        """All of these bytes are in it, one after the other."""
        at = self._at(start)
        return at >= 0 and self.ranges[at][1] >= stop

    def bytes(self, start: int, stop: int) -> Tensor:
        """uint8, the memory itself, of bytes that it ``has``."""
        at = self._at(start)
        assert self.has(start, stop), f"bytes {start} to {stop} of {self.ranges}"
        begin = self._places[at] + start - self.ranges[at][0]
        return self._memory[begin : begin + stop - start]

    def write(self, start: int, data: Tensor) -> None:
        """Take the next bytes, which begin at ``start``: 1-D uint8."""
        stop = start + data.numel()
        self.bytes(start, stop).copy_(data)
        while self._left and self._left[-1][0][0] < stop:
            (first, last), digest = self._left[-1]
            self._state.update(data[max(first - start, 0) : last - start].numpy().data)
            if last > stop:
                return
            self._wrong = self._wrong or self._state.hexdigest() != digest
            self._left.pop()
            self._state.reset()

    def _at(self, start: int) -> int:
        return bisect_right(self.ranges, (start, sys.maxsize)) - 1


class ShardReader:
    """A shard file that agrees with its record in size and header; ``verify`` says whether its tensors do.

    Args:
        part: what is here of a file that lies elsewhere; None: it lies in ``folder``.
    Raises:
        CheckpointError: the file is missing, unreadable, or differs from its record.
    """

    def __init__(self, folder: Path, record: Record, part: Part | None = None) -> None:
        self.path, self._record, self._part = folder / record.name, record, part
        self._handle = -1
        try:
            if part is None:
                self._handle = open_regular(self.path)
            self._open()
        except OSError as error:
            self.close()
            raise self._damaged(error.strerror or str(error)) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        nbytes = os.fstat(self._handle).st_size if self._part is None else self._part.nbytes
        if nbytes != self._record.nbytes:
            raise self._damaged(f"{nbytes} bytes, not {self._record.nbytes}")
        start = bytearray(8)
        self._read(memoryview(start)[: min(8, nbytes)], 0)
        length = struct.unpack("<Q", start)[0] if nbytes >= 8 else HEADER_MOST
        if length > min(HEADER_MOST, nbytes - 8):
            raise self._damaged(f"a header of {length} bytes")
        raw = bytearray(length)
        self._read(memoryview(raw), 8)
        if xxhash.xxh3_64_hexdigest(start + raw) != self._record.header:
            raise self._damaged("a header whose checksum does not match")
        self._entries, self._offsets = self._parse(raw, 8 + length)

    def _parse(self, raw: bytearray, base: int) -> tuple[dict[str, Entry], dict[str, int]]:
        entries: dict[str, Entry] = {}
        offsets: dict[str, int] = {}
        end = 0
        try:
            described = json.loads(raw)
            described.pop("__metadata__", None)
            for name, about in described.items():
                entry = Entry(name, DTYPES[about["dtype"]], tuple(int(size) for size in about["shape"]))
                start, stop = about["data_offsets"]
                if min(entry.shape, default=0) < 0 or (start, stop) != (end, end + entry.nbytes):
                    raise ValueError(name)
                entries[name], offsets[name], end = entry, base + start, stop
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged("a header that contradicts itself") from error
        if base + end != self._record.nbytes or entries.keys() != self._record.tensors.keys():
            raise self._damaged("different tensors than its manifest lists")
        return entries, offsets

    @property
    def entries(self) -> dict[str, Entry]:
        return self._entries

    def entry(self, name: str) -> Entry:
        """The tensor of that name.

        Raises:
            CheckpointError: there is none.
        """
        if name not in self._entries:
            raise self._damaged(f"no tensor {name}")
        return self._entries[name]

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read these tensors (all by default) once, in bounded memory.

        Raises:
            CheckpointError: bytes are not those that were written, or cannot be read.
        """
        scratch = memoryview(bytearray(CACHED))
        for name in self._entries if names is None else names:
            self._checked(name, self.entry(name).nbytes, scratch)

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, new, on the CPU.

        Raises:
            CheckpointError: its bytes are not those that were written, or cannot be read.
        """
        entry = self.entry(name)
        whole = torch.empty(math.prod(entry.shape), dtype=entry.dtype, device="cpu")
        self._checked(name, entry.nbytes, whole.view(torch.uint8).numpy().data)
        return whole.reshape(entry.shape)

    def _checked(self, name: str, nbytes: int, memory: memoryview) -> None:
        """Read a tensor into memory for all of it, or over and over into what is less, and compare its checksum."""
        state = xxhash.xxh3_64()
        # So little at once that a core's cache has it still when its checksum is taken.
        for offset in range(0, nbytes, CACHED):
            count, at = min(CACHED, nbytes - offset), offset if len(memory) >= nbytes else 0
            self._read(memory[at : at + count], self._offsets[name] + offset)
            state.update(memory[at : at + count])
        if state.hexdigest() != self._record.tensors[name]:
            raise self._damaged(f"bytes of {name} whose checksum does not match")

    def elements(self, name: str, start: int, numel: int) -> Tensor:
        """A run of the tensor's elements, 1-D on the CPU, not to be written to; nobody compares it with a checksum (`verify`
        does, the whole).

        Raises:
            CheckpointError: it has no such elements, or they cannot be read.
        """
        entry = self._run(name, start, numel)
        low, high = self.span(name, start, start + numel)
        if self._part is not None and self._part.has(low, high) and low % entry.dtype.itemsize == 0:
            return self._part.bytes(low, high).view(entry.dtype)
        found = torch.empty(numel, dtype=entry.dtype, device="cpu")
        self.read(name, start, found)
        return found

    def read(self, name: str, start: int, out: Tensor) -> None:
        """A run of the tensor's elements into ``out``: 1-D, contiguous, on the CPU, of the tensor's dtype.

        Raises:
            CheckpointError: it has no such elements, or they cannot be read.
        """
        assert out.dtype == self._run(name, start, out.numel()).dtype, f"{name}: asked for as {out.dtype}"
        if out.numel():
            self._read(out.detach().view(torch.uint8).numpy().data, self.span(name, start, start)[0])
            # A tier sees by the version of a buffer whether it was written, and torch sees no write through a view of numpy's.
            increment_version(out)

    def _run(self, name: str, start: int, numel: int) -> Entry:
        entry = self.entry(name)
        if not 0 <= start <= start + numel <= math.prod(entry.shape):
            raise self._damaged(f"{math.prod(entry.shape)} elements of {name}, not {start + numel}")
        return entry

    def close(self) -> None:
        """Idempotent."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def span(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """Which bytes of the file these elements of a tensor are."""
        itemsize = self.entry(name).dtype.itemsize
        return self._offsets[name] + start * itemsize, self._offsets[name] + stop * itemsize

    def _read(self, into: memoryview, offset: int) -> None:
        if self._part is not None:
            if not self._part.has(offset, offset + len(into)) and len(into):
                raise self._damaged(f"no bytes {offset} to {offset + len(into)} in the part that was fetched of it")
            if len(into):
                into[:] = self._part.bytes(offset, offset + len(into)).numpy().data
            return
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._handle, [into[done:]], offset + done)
            except OSError as error:
                raise self._damaged(error.strerror or str(error)) from error
            if count == 0:
                raise self._damaged(f"its end at byte {offset + done}")
            done += count

    def _damaged(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"Cannot read {self.path}. Expected the shard file its manifest describes, found {found}. Load another checkpoint, "
            "or copy this one again."
        )
