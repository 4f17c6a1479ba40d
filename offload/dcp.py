"""Folders of ``torch.distributed.checkpoint``, read without unpickling: tensors whole, by the names they were saved under.

``.metadata`` is a pickle, which is interpreted (`offload.torchfiles`); nothing it says is believed before chunks were compared
with the shape that they should fill.

Note: [Not torch's reader]
    torch's ``FileSystemReader`` unpickles ``.metadata``, follows any path in it, and compares no checksums.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.regular_files import read_regular
from offload.shards import NAMED, Entry, Lazy, WholeModel, state_key
from offload.text import one_line, shown
from offload.torchfiles import Made, Named, Stored, TorchFile, interpret

__all__ = ["DistributedModel", "is_distributed"]

_MODEL, _STATE = "model", "state"
_OPTIMIZERS = ("optim", "optimizer", "optimizers")
_NAME = ".metadata"
_METADATA_MOST = 512 << 20
_MODULE = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a file of the folder: one file of ``torch.save``."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A box of a tensor's elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: _Span


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor; ``path`` is where it was in the state dict, and its chunks fill its shape."""

    key: str
    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def is_distributed(path: Path) -> bool:
    """Whether a folder is one that ``dcp.save`` wrote."""
    return (path / _NAME).exists() and not (path / "manifest.json").exists()


class DistributedModel(WholeModel):
    """What one folder holds; in memory are one tensor and one chunk of it at a time.

    Attributes:
        others: what is neither the model's nor an optimizer's, by the key it was saved under.
    Raises:
        CheckpointError: it is none that is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            root = interpret(read_regular(path / _NAME, _METADATA_MOST), {"torch.Size": lambda args: tuple(args[0])})
            self._version, self._tensors, self._objects = _read(root)
        except OSError as error:
            raise self.refused(f"{_NAME}, which cannot be read ({error.strerror or error})") from error
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise self.refused(f"{_NAME} that contradicts itself ({type(error).__name__}: {error})") from error
        flat = all(len(tensor.path) == 1 for tensor in self._tensors)
        named = [(_MODEL, tensor.path[0]) if flat else _named(tensor.path) for tensor in self._tensors]
        of = list(zip(named, self._tensors, strict=True))
        self._model = [(name, tensor) for (kind, name), tensor in of if kind == _MODEL]
        self._states = [(name, tensor) for (kind, name), tensor in of if kind == _STATE]
        self.others = [tensor.key for (kind, _), tensor in of if not kind]

    def refused(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"Cannot read {self.path}. Expected a folder that torch.distributed.checkpoint wrote, found "
            f"{one_line(found)[:400]}. Copy it again, or read it with dcp.load in the program that saved it."
        )

    @property
    def parameters(self) -> set[str]:
        """Never known."""
        raise self.refused("no record of which tensors are parameters and which are buffers, as --dtype needs")

    @property
    def tied(self) -> dict[str, str]:
        """None: such a folder has a tensor under each of its names."""
        return {}

    def model(self) -> Iterator[Lazy]:
        if not self._model:
            tops = sorted({tensor.path[0] for tensor in self._tensors})
            raise self.refused(f"no tensors under the key model (its keys: {', '.join(map(shown, tops[:8]))})")
        for name, tensor in self._model:
            yield Entry(name, tensor.dtype, tensor.shape), partial(self._whole, tensor)

    def optimizer(self) -> Iterator[Lazy]:
        if not self._states:
            raise self.refused(f"no states under one of the keys {', '.join(_OPTIMIZERS)}")
        for name, tensor in self._states:
            yield Entry(name, tensor.dtype, tensor.shape), partial(self._whole, tensor)

    def groups(self) -> list[dict[str, Any]]:
        """Not read."""
        raise self.refused("options of optimizer groups, which are not read for --to torch: use --to safetensors")

    def files(self) -> list[tuple[str, int]]:
        """Each file that is needed, and its bytes that are."""
        sizes = Counter[str]()
        for span in [*(chunk.span for tensor in self._tensors for chunk in tensor.chunks), *self._objects]:
            sizes[span.file] += span.nbytes
        return sorted(sizes.items())

    def verify(self, number: int, advance: Callable[[int], object]) -> bool:
        name, checked = self.files()[number][0], True
        found = [(chunk.span, (tensor, chunk)) for tensor in self._tensors for chunk in tensor.chunks]
        for span, of in [*found, *((span, None) for span in self._objects)]:
            if span.file == name:
                file = self._opened(span) if of is None else self._stored(*of).file
                checked = self._verified(file) and checked
                advance(span.nbytes)
        return checked

    def facts(self) -> dict[str, Any]:
        """What ``zprof checkpoint show`` says; reads no file but ``.metadata``."""
        files = self.files()
        return {
            "folder": str(self.path),
            "format": f"torch.distributed.checkpoint {self._version}",
            # Of __RANK_NUMBER.distcp.
            "ranks": len({name.removeprefix("__").partition("_")[0] for name, _ in files}),
            "files": len(files),
            "model": len(self._model),
            "states": len(self._states),
            "other": sorted(map(one_line, self.others)),
            "objects": len(self._objects),
            "elements": sum(math.prod(each.shape) for _, each in self._model),
            "dtypes": sorted({str(each.dtype).removeprefix("torch.") for _, each in self._model}),
            "bytes": sum(nbytes for _, nbytes in files),
            "holds": {
                "model": sum(each.nbytes for _, each in self._model), "states": sum(each.nbytes for _, each in self._states),
            },
            "tensors": {
                one_line(each.key): f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in self._tensors
            },
        }  # fmt: skip

    def _opened(self, span: _Span) -> TorchFile:
        return TorchFile(self.path / span.file, span=(span.start, span.nbytes))

    def _stored(self, tensor: _Whole, chunk: _Chunk) -> Stored:
        span, found = chunk.span, self._opened(chunk.span).root
        if not isinstance(found, Stored) or (found.dtype, found.shape) != (tensor.dtype, chunk.sizes):
            raise self.refused(f"{span.file} with a tensor other than {shown(tensor.key)} at {span.start}")
        return found

    def _verified(self, file: TorchFile) -> bool:
        for record in file.records:
            file.verify(record)
        return file.checked

    def _whole(self, tensor: _Whole) -> Tensor:
        # All are there before memory is taken for what they should fill.
        opened = [self._stored(tensor, chunk) for chunk in tensor.chunks]
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for chunk, stored in zip(tensor.chunks, opened, strict=True):
            self._verified(stored.file)
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            out[box] = stored.tensor()
        return out


def _named(path: tuple[str, ...]) -> tuple[str, str]:
    """Whose a tensor is, by where it was in the state dict: the model's, an optimizer's, or neither's; and its name there."""
    for place, word in enumerate(path[:2]):
        rest = path[place + 1 :]
        if word == _MODEL and rest:
            return _MODEL, ".".join(rest)
        if word in _OPTIMIZERS and len(rest) >= 3 and rest[0] == _STATE:
            return _STATE, state_key(".".join(rest[1:-1]), rest[-1])
        if word in _OPTIMIZERS and len(rest) == 1 and rest[0].startswith("state."):
            return _STATE, rest[0]
    return "", ""


# .metadata


def _read(root: Any) -> tuple[str, list[_Whole], list[_Span]]:
    """The version that wrote it, the tensors, and what is no tensor: each a file of ``torch.save`` of its own."""
    state = _state(root, "Metadata")
    spans: dict[tuple[str, tuple[int, ...] | None], _Span] = {}
    for index, about in state["storage_data"].items():
        at = _state(index, "MetadataIndex")
        offset = at.get("offset")
        place = _text(at["fqn"]), None if offset is None else _sizes(offset)
        if place in spans:
            raise ValueError(f"{shown(place[0])} that lies in two places")
        spans[place] = _span(about)
    # No bytes are of two chunks: all tensors together are no larger than the files.
    ends = Counter[str]()
    for span in sorted(spans.values(), key=lambda each: (each.file, each.start, each.nbytes)):
        if span.start < ends[span.file]:
            raise ValueError(f"two chunks at byte {span.start} of {shown(span.file)}")
        ends[span.file] = span.start + span.nbytes
    paths = state.get("planner_data")
    tensors: list[_Whole] = []
    objects: list[_Span] = []
    for key, about in state["state_dict_metadata"].items():
        if isinstance(about, Made) and about.what == Named(_MODULE, "BytesStorageMetadata"):
            objects.append(spans[_text(key), None])
            continue
        path = paths[key] if isinstance(paths, dict) else (key,)
        if not isinstance(path, tuple) or not path or not all(type(word) in (str, int) for word in path):
            raise ValueError(f"the place of {shown(key)} in the state dict")
        tensors.append(_tensor(_text(key), tuple(map(str, path)), _state(about, "TensorStorageMetadata"), spans))
    version = state.get("version")
    return one_line(version)[:40] if isinstance(version, str) else "", tensors, objects


def _tensor(key: str, path: tuple[str, ...], about: Mapping[str, Any], spans: Mapping[Any, _Span]) -> _Whole:
    properties, shape = about["properties"], _sizes(about["size"])
    kind = properties.state[0]
    dtype = NAMED.get(kind.name) if isinstance(kind, Named) and kind.module == "torch" else None
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
            chunks.append(_Chunk(offsets, sizes, spans[key, offsets]))
    _check_filled(key, shape, chunks)
    return _Whole(key, path, dtype, shape, tuple(chunks))


def _check_filled(key: str, shape: tuple[int, ...], chunks: Sequence[_Chunk]) -> None:
    """Each element of the shape is in one chunk."""
    filled = sum(math.prod(chunk.sizes) for chunk in chunks)
    if filled != math.prod(shape):
        raise ValueError(f"{filled} elements of {shown(key)} of shape {list(shape)}")
    reaching: list[_Chunk] = []
    for chunk in sorted(chunks, key=lambda each: each.offsets) if shape else ():
        reaching = [each for each in reaching if each.offsets[0] + each.sizes[0] > chunk.offsets[0]]
        for each in reaching:
            boxes = zip(each.offsets, each.sizes, chunk.offsets, chunk.sizes, strict=True)
            if all(one < other + size and other < one + length for one, length, other, size in boxes):
                raise ValueError(f"chunks of {shown(key)} that overlap")
        reaching.append(chunk)


def _state(made: Any, kind: str) -> dict[str, Any]:
    if not isinstance(made, Made) or made.what != Named(_MODULE, kind) or not isinstance(made.state, dict):
        raise ValueError(f"no {kind} where one should be")
    return made.state


def _span(about: Any) -> _Span:
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
    return _Span(file, start, nbytes)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > 64 or not all(type(each) is int and 0 <= each < 2**62 for each in value):
        raise ValueError("invalid sizes")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("an invalid name")
    return value
