"""The data of the example: the Python standard library's own source as bytes, some of its files held out.

`train_gpt.py` reads the corpus once and asks for batches by step number. This file never keeps a position or a random
state: a batch is a pure function of its arguments, so that any number of ranks see the same data in the same order.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Installed packages differ between machines, and tests are a third of the library and mostly tables of cases.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
MAX_FILE_NBYTES = 1 << 20
HELD_OUT_ONE_IN = 16


class CorpusError(ValueError):
    """There is not enough text to train on."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two 1-D uint8 tensors on the CPU, whole files one after the other, and the number of files in each."""

    train: Tensor
    held_out: Tensor
    train_files: int
    held_out_files: int


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def find_sources(root: Path) -> list[str]:
    """The `*.py` files under `root`, as sorted relative paths; folders that cannot be listed are passed over."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        found.extend(Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py"))
    return sorted(found)


def is_held_out(relative: str) -> bool:
    """Whether a file is held out: decided by its path alone, so that a file that comes or goes moves no other."""
    return zlib.crc32(relative.encode("utf-8", "surrogateescape")) % HELD_OUT_ONE_IN == 0


def read_corpus(root: Path, *, max_nbytes: int, min_nbytes: int) -> Corpus:
    """Read at most `max_nbytes` of the sources under `root`, in sorted order.

    Files that cannot be read are passed over.

    Raises:
        CorpusError: either part has fewer than `min_nbytes`.
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for relative, content in _contents(root, max_nbytes=max_nbytes):
        parts[is_held_out(relative)].append(content)
    train, held_out = (b"".join(parts[key]) for key in (False, True))
    if min(len(train), len(held_out)) < min_nbytes:
        raise CorpusError(
            f"{root}: expected *.py files with at least {min_nbytes:,} bytes to train on and to hold out, "
            f"found {len(train):,} and {len(held_out):,}; name another folder with --source"
        )
    return Corpus(_as_tensor(train), _as_tensor(held_out), len(parts[False]), len(parts[True]))


def _contents(root: Path, *, max_nbytes: int) -> Iterator[tuple[str, bytes]]:
    left = max_nbytes
    for relative in find_sources(root):
        path = root / relative
        try:
            if not path.is_file():  # a pipe would be opened and waited for
                continue
            with path.open("rb") as file:
                content = file.read(min(left, MAX_FILE_NBYTES))
        except OSError:
            continue
        if content:
            yield relative, content
        left -= len(content)
        if left <= 0:
            return


def _as_tensor(content: bytes) -> Tensor:
    # A bytearray because frombuffer warns of memory that cannot be written; it refuses an empty one.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def train_batch(data: Tensor, *, seed: int, step: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
    """The whole batch of `step`: inputs and next bytes, int64 [rows, context], windows drawn uniformly from `data`."""
    # Two small integers spread into one seed: Generator takes a single 64-bit number.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 63))
    starts = torch.randint(data.numel() - context, (rows,), generator=generator)
    return _windows(data, starts, context=context)


def held_out_batch(data: Tensor, *, rows: int, context: int) -> tuple[Tensor, Tensor]:
    """`rows` windows at equal distances over `data`: inputs and next bytes, int64 [rows, context]."""
    starts = torch.linspace(0, data.numel() - context - 1, rows, dtype=torch.float64).long()
    return _windows(data, starts, context=context)


def _windows(data: Tensor, starts: Tensor, *, context: int) -> tuple[Tensor, Tensor]:
    windows = data[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def share(batch: tuple[Tensor, Tensor], *, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's equal part of a batch; equal parts make the mean of the ranks' losses the loss of the whole batch."""
    inputs, targets = batch
    return inputs.chunk(world)[rank], targets.chunk(world)[rank]


def readable(content: bytes) -> str:
    """Sampled bytes as text that cannot upset a terminal."""
    text = content.decode("utf-8", "replace")
    return "".join(char if char.isprintable() or char == "\n" else "·" for char in text)
