"""The ``.metadata`` of a folder of ``torch.distributed.checkpoint``: each tensor's chunks, and where in the files they lie.

``whole.py`` reads values by it.  The file is a pickle, which is interpreted and never unpickled; nothing it says is believed
before chunks were compared with the shape that they should fill.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import CheckpointError
from offload.regular_files import read_regular
from offload.shards import CODES
from offload.text import one_line, shown
from offload.torchfiles import Made, Named, PickleError, interpret

__all__ = ["Chunk", "Metadata", "Span", "Whole", "is_distributed", "read_metadata", "refused"]

_NAME = ".metadata"
_METADATA_MOST = 512 << 20
_MODULE = "torch.distributed.checkpoint.metadata"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
_TORCH_SIZE = {"torch.Size": lambda args: tuple(args[0])}


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file of the folder: one file of ``torch.save``."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor's elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor; ``path`` is where it was in the state dict, and its chunks fill its shape."""

    key: str
    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """What the folder holds.

    Attributes:
        objects: what is no tensor, each a file of ``torch.save`` of its own.
    """

    version: str
    tensors: Sequence[Whole]
    objects: Mapping[str, Span]


def is_distributed(path: Path) -> bool:
    """Whether a folder is one that ``dcp.save`` wrote."""
    return (path / _NAME).exists() and not (path / "manifest.json").exists()


def read_metadata(path: Path) -> Metadata:
    """What the folder holds.

    Raises:
        CheckpointError: it cannot be read, or contradicts itself.
    """
    try:
        root = interpret(read_regular(path / _NAME, _METADATA_MOST), _TORCH_SIZE)
        return _read(root)
    except OSError as error:
        raise refused(path, f"{_NAME}, which cannot be read ({error.strerror or error})") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, PickleError) as error:
        raise refused(path, f"{_NAME} that contradicts itself ({type(error).__name__}: {error})") from error


def _read(root: Any) -> Metadata:
    state = _state(root, "Metadata")
    spans: dict[tuple[str, tuple[int, ...] | None], Span] = {}
    for index, about in state["storage_data"].items():
        at = _state(index, "MetadataIndex")
        offset = at.get("offset")
        place = _text(at["fqn"]), None if offset is None else _sizes(offset)
        if place in spans:
            raise ValueError(f"{shown(place[0])} that lies in two places")
        spans[place] = _span(about)
    _check_apart(spans.values())
    paths = state.get("planner_data")
    tensors: list[Whole] = []
    objects: dict[str, Span] = {}
    for key, about in state["state_dict_metadata"].items():
        if isinstance(about, Made) and about.what == Named(_MODULE, "BytesStorageMetadata"):
            objects[_text(key)] = spans[key, None]
            continue
        path = paths[key] if isinstance(paths, dict) else (key,)
        if not isinstance(path, tuple) or not path or not all(type(word) in (str, int) for word in path):
            raise ValueError(f"the place of {shown(key)} in the state dict")
        tensors.append(_tensor(_text(key), tuple(map(str, path)), _state(about, "TensorStorageMetadata"), spans))
    version = state.get("version")
    return Metadata(one_line(version)[:40] if isinstance(version, str) else "", tensors, objects)


def _tensor(key: str, path: tuple[str, ...], about: Mapping[str, Any], spans: Mapping[Any, Span]) -> Whole:
    properties, shape = about["properties"], _sizes(about["size"])
    kind = properties.state[0]
    dtype = _DTYPES.get(kind.name) if isinstance(kind, Named) and kind.module == "torch" else None
    if dtype is None:
        raise ValueError(f"the dtype of {shown(key)}")
    chunks = []
    for each in about["chunks"]:
        box = _state(each, "ChunkStorageMetadata")
        offsets, sizes = _sizes(box["offsets"]), _sizes(box["sizes"])
        inside = len(offsets) == len(sizes) == len(shape)
        if not inside or any(start + size > most for start, size, most in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {shown(key)} outside its shape {list(shape)}")
        if math.prod(sizes):
            chunks.append(Chunk(offsets, sizes, spans[key, offsets]))
    _check_filled(key, shape, chunks)
    return Whole(key, path, dtype, shape, tuple(chunks))


def _check_filled(key: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
    """Each element of the shape is in one chunk."""
    filled = sum(math.prod(chunk.sizes) for chunk in chunks)
    if filled != math.prod(shape):
        raise ValueError(f"{filled} elements of {shown(key)} of shape {list(shape)}")
    reaching: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda each: each.offsets) if shape else ():
        reaching = [each for each in reaching if each.offsets[0] + each.sizes[0] > chunk.offsets[0]]
        if any(_overlap(each, chunk) for each in reaching):
            raise ValueError(f"chunks of {shown(key)} that overlap")
        reaching.append(chunk)


def _overlap(one: Chunk, other: Chunk) -> bool:
    boxes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(first < start + size and start < first + length for first, length, start, size in boxes)


def _state(made: Any, kind: str) -> dict[str, Any]:
    if not isinstance(made, Made) or made.what != Named(_MODULE, kind) or not isinstance(made.state, dict):
        raise ValueError(f"no {kind} where one should be")
    return made.state


def _span(about: Any) -> Span:
    state = about.state if isinstance(about, Made) and about.what.name == "_StorageInfo" else None
    if not isinstance(state, dict):
        raise ValueError("an invalid place in the files")
    file, start, nbytes = state["relative_path"], state["offset"], state["length"]
    if state.get("transform_descriptors"):
        raise ValueError(f"{shown(file)}, whose bytes were transformed (compressed or encrypted)")
    if not isinstance(file, str) or not file or "/" in file or "\0" in file or file in (".", ".."):
        raise ValueError(f"a file called {shown(file)}")
    if not all(type(each) is int and 0 <= each < 2**62 for each in (start, nbytes)):
        raise ValueError(f"an invalid place in {shown(file)}")
    return Span(file, start, nbytes)


def _check_apart(spans: Iterable[Span]) -> None:
    """No bytes are of two chunks: all tensors together are no larger than the files."""
    ends: dict[str, int] = {}
    for span in sorted(spans, key=lambda each: (each.file, each.start, each.nbytes)):
        if span.start < ends.get(span.file, 0):
            raise ValueError(f"two chunks at byte {span.start} of {shown(span.file)}")
        ends[span.file] = span.start + span.nbytes


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > 64 or not all(type(each) is int and 0 <= each < 2**62 for each in value):
        raise ValueError("invalid sizes")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("an invalid name")
    return value


def refused(path: Path, found: str) -> CheckpointError:
    """Why a folder cannot be read."""
    return CheckpointError(
        f"Cannot read {path}. Expected a folder that torch.distributed.checkpoint wrote, found {one_line(found)[:400]}. Copy "
        "it again, or read it with dcp.load in the program that saved it."
    )
