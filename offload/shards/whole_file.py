"""One safetensors file for other tools, its tensors written in any order.

``zhooks/checkpoint/whole_folder.py`` writes models with it.  It knows names of tensors and bytes, and never what they mean.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from offload.private_files import create
from offload.shards.file import Entry, blocks, header

__all__ = ["WholeFile"]


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
            with _where_supported():
                os.posix_fallocate(self._fd, 0, self.nbytes)
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


@contextmanager
def _where_supported() -> Iterator[None]:
    """Some file systems cannot do it, which changes nothing but when a full disk is found."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
