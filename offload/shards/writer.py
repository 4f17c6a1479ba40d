"""Safetensors files being written: a rank's shard, streamed past the page cache with checksums, and one of a whole model.

Source: the safetensors format, https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from torch import Tensor

from offload.disk import Bytes, Mover, SystemIo
from offload.pages import aligned
from offload.private_files import create
from offload.shards.file import Entry, blocks, header
from offload.shards.manifest import Record
from offload.threads import Task, Workers

__all__ = ["ShardWriter", "WholeFile"]

#: Buffers, and the bytes of each: one is filled, one is written, one waits, or the disk would stand still whenever whoever
#: fills them waits for a core.
BUFFERS, BUFFER = 3, 8 << 20


class Stream:
    """Bytes in order into a new file, its owner's alone, past the page cache where the file system has that.

    A checkpoint as large as memory would push everything else out of the page cache, and wait for all of it at the end.

    Args:
        path: its name, for errors too.
        dir_fd: the folder that it is made in, looked up by its last name alone; it stays open longer than the stream.
    Raises:
        OSError: from any call; what failed in the background surfaces at the next.
        CapabilityError: the system allows no thread to write with; there is no file.
    """

    def __init__(self, path: Path, dir_fd: int | None = None) -> None:
        self.path, self._io = path, SystemIo()
        self._dir_fd, self._name = dir_fd, path if dir_fd is None else Path(path.name)
        self._buffer, self._idle = aligned(BUFFER).numpy(), BUFFERS - 1
        self._filled = self._written = 0
        #: What is being written, or waits for that, and its memory; the first is over first.
        self._under_way: deque[tuple[Task, Bytes]] = deque()
        self._direct_fd = -1
        self._thread = Workers("zhooks-save")
        self._thread.start()
        try:
            self._fd = self._io.open(self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd)
        except BaseException:
            self._thread.stop()
            raise
        self._plain = Mover(self._io, self._fd, direct=False, bounce_nbytes=BUFFER)
        self._direct = self._open_direct()

    def _open_direct(self) -> Mover | None:
        try:
            self._direct_fd = self._io.open(self._name, os.O_WRONLY | os.O_DIRECT, self._dir_fd)
            if not os.path.samestat(os.fstat(self._direct_fd), os.fstat(self._fd)):
                raise FileExistsError(errno.EEXIST, "another file took its name", str(self.path))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                return None
            self.abort()
            raise
        return Mover(self._io, self._direct_fd, direct=True, bounce_nbytes=BUFFER)

    def write(self, data: Bytes) -> None:
        """Append ``data``; it may be changed once this returns."""
        done = 0
        while done < data.size:
            count = min(data.size - done, BUFFER - self._filled)
            self._buffer[self._filled : self._filled + count] = data[done : done + count]
            self._filled, done = self._filled + count, done + count
            if self._filled == BUFFER:
                self._push()

    def _push(self) -> None:
        """Have the buffer that was filled written after those before it; fill another one."""
        memory, offset = self._buffer, self._written
        task = Task(partial(self._put, memory[: self._filled], offset))
        self._under_way.append((task, memory))
        self._thread.submit(task.run)
        self._written, self._filled = self._written + self._filled, 0
        if self._idle and not self._under_way[0][0].done():
            self._idle -= 1
            self._buffer = aligned(BUFFER).numpy()
        else:
            self._buffer = self._wait()

    def _wait(self) -> Bytes:
        """The memory of the first that is under way, once it is written."""
        task, memory = self._under_way.popleft()
        task.wait()
        return memory

    def _put(self, memory: Bytes, offset: int) -> None:
        if self._direct is not None:
            try:
                self._complete(self._direct.write(memory, offset), memory.size)
                return
            except OSError as error:
                # Some file systems open a file for direct I/O and refuse it at the first write.
                if error.errno != errno.EINVAL or offset:
                    raise
                self._direct = None
        self._complete(self._plain.write(memory, offset), memory.size)

    def _complete(self, moved: int, nbytes: int) -> None:
        if moved < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def finish(self) -> None:
        """Everything is in the file, and the file on the disk."""
        if self._filled:
            self._push()
        while self._under_way:
            self._wait()
        # Direct writes end on a page.
        self._io.truncate(self._fd, self._written)
        os.fsync(self._fd)
        self._close()

    def abort(self) -> None:
        """Close and remove the file; idempotent, and raises nothing."""
        for task, _ in self._under_way:
            task.join()
        self._under_way.clear()
        with suppress(OSError):
            there = os.stat(self._name, dir_fd=self._dir_fd, follow_symlinks=False)
            if self._fd >= 0 and os.path.samestat(os.fstat(self._fd), there):
                os.unlink(self._name, dir_fd=self._dir_fd)
        with suppress(OSError):
            self._close()

    def _close(self) -> None:
        self._thread.stop()
        self._direct = None
        for fd in (self._direct_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._direct_fd = self._fd = -1


class ShardWriter:
    """A new shard file.  Tensors come in the order of ``entries``; ``finish`` makes them durable, ``abort`` removes all.

    Raises:
        OSError: from any call; the caller decides what to do about it.
        CheckpointError: a dtype or name the format does not know.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], dir_fd: int | None = None) -> None:
        self.path = path
        self._entries = iter(entries)
        self._digests: dict[str, str] = {}
        raw = header(entries)
        self._header = xxhash.xxh3_64_hexdigest(raw)
        self.nbytes = len(raw) + sum(entry.nbytes for entry in entries)
        self._stream = Stream(path, dir_fd)
        try:
            self._stream.write(np.frombuffer(raw, np.uint8))
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, chunks: Iterable[Tensor]) -> None:
        """The next tensor's elements, in any number of 1-D or shaped chunks, on any device."""
        entry = next(self._entries)
        assert entry.name == name, f"Cannot read {self.path}. Expected {entry.name} next, found {name}"
        state, written = xxhash.xxh3_64(), 0
        for chunk in chunks:
            assert chunk.dtype == entry.dtype, f"{name}: announced as {entry.dtype}, found {chunk.dtype}"
            for block in blocks(chunk):
                state.update(block.data)
                self._stream.write(block)
                written += block.size
        assert written == entry.nbytes, f"{name}: announced {entry.nbytes} bytes, found {written}"
        self._digests[name] = state.hexdigest()

    def finish(self) -> Record:
        """Flush, sync and close."""
        assert next(self._entries, None) is None, f"{self.path}: a tensor that was announced is missing"
        self._stream.finish()
        return Record(name=self.path.name, nbytes=self.nbytes, header=self._header, tensors=self._digests)

    def abort(self) -> None:
        """Close and remove what was written; what cannot be removed is left to the next save."""
        self._stream.abort()


class WholeFile:
    """A new safetensors file whose tensors are written in any order, and a tensor's elements in any runs.

    Raises:
        OSError: from any call.
        CheckpointError: a dtype the format does not know.
    """

    def __init__(self, folder: Path, name: str, entries: Sequence[Entry]) -> None:
        self.name = name
        raw = header(entries)
        self._starts: dict[str, int] = {}
        self._left = {entry.name: entry.nbytes for entry in entries}
        self.nbytes = len(raw)
        for entry in entries:
            self._starts[entry.name] = self.nbytes
            self.nbytes += entry.nbytes
        self._fd = create(folder / name)
        try:
            # All of the space now, or none: a full disk is found before the model was gathered once.
            try:
                os.posix_fallocate(self._fd, 0, self.nbytes)
            except OSError as error:
                # Some file systems cannot, which changes nothing but when a full disk is found.
                if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                    raise
            self._put(memoryview(raw), 0)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Elements of ``values``, in order, from element ``start`` of the tensor on."""
        offset = self._starts[name] + start * values.element_size()
        for block in blocks(values):
            self._put(block.data, offset)
            offset += block.size
            self._left[name] -= block.size

    def finish(self) -> None:
        """Everything is on the disk."""
        left = [name for name, nbytes in self._left.items() if nbytes]
        assert not left, f"{self.name}: announced and not written: {left[:3]}"
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _put(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)
