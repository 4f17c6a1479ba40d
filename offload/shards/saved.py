"""What a checkpoint holds, read without the program that saved it: the layout that its manifest describes, and full tensors."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards.file import DTYPES, NAMED, Entry, ShardReader
from offload.shards.manifest import Manifest, read_manifest
from offload.text import counted, shown

__all__ = ["Lazy", "SavedFlat", "SavedLayout", "SavedModel", "SavedParam", "WholeModel", "state_key"]

_DOCUMENT, _BUFFER = "document", "buffer/"
#: Bytes of the JSON in a file.
_DOCUMENT_MOST = 512 << 20
#: A tensor of a checkpoint, and how it is read.
Lazy = tuple[Entry, Callable[[], Tensor]]


@dataclass(frozen=True, slots=True)
class SavedParam:
    """One parameter: its global shape and strides, where its part starts in the flat buffer, and how it is divided over tp.

    ``dim`` is None where every place has all of it.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    part_stride: tuple[int, ...]
    dim: int | None = None
    count: int = 1

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(size // self.count if dim == self.dim else size for dim, size in enumerate(self.shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SavedFlat:
    """One flat buffer: the masters of parameters, in ranges over ``world`` files; (start, numel) of each segment.

    ``world`` is 1 where every rank had all of it.
    """

    number: int
    name: str
    dtype: torch.dtype
    padded: int
    world: int
    segments: tuple[tuple[int, int], ...]
    params: tuple[SavedParam, ...]

    @property
    def tensor(self) -> str:
        """What its values are called in the files."""
        return f"{self.number:04d}/value"

    @property
    def shard_numel(self) -> int:
        return self.padded // self.world

    @property
    def sharded(self) -> bool:
        return self.world > 1


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """What a manifest describes: flat buffers, and which file is of which place on the mesh.

    Attributes:
        shard, replicate, tp: the sizes of the axes.
        ranks: the files' ranks by place on shard, replicate and tp.
        data: those of one place on tp, in order.
    """

    flats: tuple[SavedFlat, ...]
    shard: int
    replicate: int
    tp: int
    ranks: Mapping[tuple[int, int, int], int]
    data: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, manifest: Manifest) -> SavedLayout:
        """Read and compared.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, IndexError: it contradicts itself, or is none that a save wrote.
        """
        flats = tuple(_flat(number, described) for number, described in enumerate(manifest.about["flats"]))
        names = [param.name for flat in flats for param in flat.params]
        if len(set(names)) != len(names):
            raise ValueError("two parameters with one name")
        rows = manifest.about["places"]
        ranks = {(_int(shard), _int(replicate), _int(tp)): rank for rank, (shard, replicate, tp) in enumerate(rows)}
        shard, replicate, tp = (1 + max(place[axis] for place in ranks) for axis in range(3))
        if not len(rows) == len(ranks) == manifest.world == shard * replicate * tp:
            raise ValueError(f"places of {len(rows)} ranks that do not form a mesh of {manifest.world}")
        worlds = {flat.world for flat in flats if flat.sharded}
        counts = {param.count for flat in flats for param in flat.params if param.dim is not None}
        if not worlds <= {shard} or not counts <= {tp}:
            mesh = f"{shard} x {replicate} x {tp}"
            raise ValueError(f"buffers over {sorted(worlds)} ranks and parts of {sorted(counts)} on a mesh of {mesh}")
        data = tuple(tuple(rank for place, rank in ranks.items() if place[2] == part) for part in range(tp))
        return cls(flats, shard, replicate, tp, ranks, data)

    def has_replicas(self, manifest: Manifest) -> bool:
        """By checksum, values are the same wherever they are not divided."""
        for (shard, _, part), rank in self.ranks.items():
            for flat in self.flats:
                # What is not divided is the same at all places on shard, too.
                first = self.ranks[shard if flat.sharded else 0, 0, part]
                if manifest.files[rank].tensors.get(flat.tensor) != manifest.files[first].tensors.get(flat.tensor):
                    return False
        return True


def _flat(number: int, about: Mapping[str, Any]) -> SavedFlat:
    padded, shard_numel, align = _int(about["padded"]), _int(about["shard_numel"]), _int(about["align"])
    segments = tuple((_int(start), _int(numel)) for start, numel in about["segments"])
    world, end = padded // shard_numel if shard_numel else 1, 0
    fits = world >= 1 and shard_numel * world == padded
    for start, numel in segments:
        fits = fits and start == end and numel >= 1 and numel % world == 0
        end = start + numel
    if not fits or end != padded:
        raise ValueError(f"buffer {number} of {padded} elements in ranges of {shard_numel} and segments {segments[:3]}")
    params, end = tuple(map(_param, about["params"])), 0
    for param in params:
        # Each begins on the first multiple of ``align`` behind the one before it.
        if not align or param.start != -(-end // align) * align:
            raise ValueError(f"parameters that start at {[param.start for param in params][:3]}")
        end = param.start + math.prod(param.part_shape)
    if not params or end > padded:
        raise ValueError(f"parameters beyond {padded} elements")
    return SavedFlat(number, str(about["name"]), NAMED[about["dtype"]], padded, world, segments, params)


def _param(about: Mapping[str, Any]) -> SavedParam:
    name, shape, stride = about["name"], tuple(map(_int, about["shape"])), tuple(map(_int, about["stride"]))
    dim, count = map(_int, about["tp"]) if "tp" in about else (None, 1)
    if not isinstance(name, str):
        raise ValueError(f"a parameter called {str(name)[:80]}")
    if dim is not None and not (dim < len(shape) and count > 1 and shape[dim] % count == 0):
        raise ValueError(f"parameter {name} of shape {shape} in {count} parts along dim {dim}")
    part_stride = stride if dim is None else tuple(map(_int, about["part_stride"]))
    param = SavedParam(name, shape, stride, _int(about["start"]), part_stride, dim, count)
    if not _dense(shape, stride) or not _dense(param.part_shape, part_stride):
        raise ValueError(f"parameter {name} of shape {shape} and strides {stride}, {part_stride}")
    return param


def _dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Every element of the tensor has one place, without gaps."""
    if len(shape) != len(stride):
        return False
    size = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length > 1 and step != size and 0 not in shape:
            return False
        size *= max(1, length)
    return True


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:80]} in the place of a number")
    return value


# Full tensors.


def state_key(parameter: str, key: str) -> str:
    """What a state is called, as torch.distributed.checkpoint's flattened optimizer states are."""
    return f"state.{parameter}.{key}"


class WholeModel(ABC):
    """The model in a checkpoint and the states of its optimizer, tensors whole, by name; nothing that it holds is run.

    Raises:
        CheckpointError: from any method; it is damaged, or not all that is asked for is there.
    """

    path: Path

    @abstractmethod
    def refused(self, found: str) -> CheckpointError:
        """Why it is not read."""

    @abstractmethod
    def model(self) -> Iterator[Lazy]:
        """Parameters, buffers, and parameters that were ignored; what one reads may be kept until the next is asked for."""

    @abstractmethod
    def optimizer(self) -> Iterator[Lazy]:
        """The states of the optimizer by parameter, called as by `state_key`."""

    @abstractmethod
    def groups(self) -> list[dict[str, Any]]:
        """The options of the optimizer's groups, "params" by name."""

    @property
    @abstractmethod
    def parameters(self) -> set[str]:
        """The names of the parameters among ``entries``."""

    @property
    @abstractmethod
    def tied(self) -> dict[str, str]:
        """Further names of tensors that have several, each with the one in ``entries``; older folders do not say."""

    @abstractmethod
    def files(self) -> list[tuple[str, int]]:
        """Each file, and its bytes."""

    @abstractmethod
    def verify(self, number: int, advance: Callable[[int], object]) -> bool:
        """Compare one file with its checksums; False where some of it has none."""

    def entries(self) -> list[Entry]:
        """Every tensor of the whole model, as ``tensors`` gives them."""
        return self._entries(self.model())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each of ``entries``, in their order, verified, row-major, on the CPU."""
        return ((entry.name, read()) for entry, read in self.model())

    def state_entries(self) -> list[Entry]:
        """The states of the optimizer, as ``states`` gives them."""
        return self._entries(self.optimizer())

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Each of ``state_entries``, in their order."""
        return ((entry.name, read()) for entry, read in self.optimizer())

    def _entries(self, found: Iterator[Lazy]) -> list[Entry]:
        entries: dict[str, Entry] = {}
        for entry, _ in found:
            if entry.name in entries:
                raise self.refused(f"two tensors called {shown(entry.name)}")
            entries[entry.name] = entry
        return list(entries.values())


class SavedModel(WholeModel):
    """What one folder of ours holds; in memory is one flat buffer at a time.

    Raises:
        CheckpointError: there is no manifest, or it is none that a save wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, read_manifest(path)
        try:
            self.layout = SavedLayout.of(self.manifest)
            if not self.layout.has_replicas(self.manifest):
                raise ValueError("replicas that differ")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise self.refused(f"a manifest that contradicts itself ({type(error).__name__}: {error})"[:300]) from error
        self.flats = self.layout.flats

    @property
    def mesh(self) -> dict[str, int]:
        """The size of each axis."""
        return {"shard": self.layout.shard, "replicate": self.layout.replicate, "tp": self.layout.tp}

    def reader(self, rank: int) -> ShardReader:
        """One file, its size and header compared with the manifest.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        return ShardReader(self.path, self.manifest.files[rank])

    def document(self, rank: int = 0) -> dict[str, Any]:
        """What a rank's file says beside tensors: optimizers, objects, extra, what is left out.

        Raises:
            CheckpointError: the file is damaged, or holds none.
        """
        with closing(self.reader(rank)) as reader:
            if reader.entry(_DOCUMENT).nbytes > _DOCUMENT_MOST:
                raise self.refused(f"{reader.entry(_DOCUMENT).nbytes} bytes of JSON")
            raw = bytes(reader.tensor(_DOCUMENT).numpy())
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self.refused("a document of another kind")
        return found

    def files(self) -> list[tuple[str, int]]:
        return [(record.name, record.nbytes) for record in self.manifest.files]

    def verify(self, number: int, advance: Callable[[int], object]) -> bool:
        with closing(self.reader(number)) as reader:
            for name, entry in reader.entries.items():
                reader.verify([name])
                advance(entry.nbytes)
        return True

    @property
    def parameters(self) -> set[str]:
        return {param.name for flat in self.flats for param in flat.params}

    @property
    def tied(self) -> dict[str, str]:
        names = {entry.name for entry in self.entries()}
        tied = self.document().get("tied", {})
        known = isinstance(tied, dict) and all(type(one) is str and one in names for one in tied.values())
        if not known or names & tied.keys():
            raise self.refused("names of tied tensors that contradict its tensors")
        return dict(tied)

    def model(self) -> Iterator[Lazy]:
        left = self.document().get("left out")
        if left:
            found = f"{counted(len(left), 'quantised parameter')}, such as {next(iter(left))}, of which it has only checksums"
            raise self.refused(found)
        for flat in self.flats:
            fulls: dict[int, Tensor] = {}
            for param in flat.params:
                yield Entry(param.name, flat.dtype, param.shape), partial(self._whole, flat, param, flat.tensor, fulls)
        with closing(self.reader(0)) as reader:
            buffers = {name: entry for name, entry in reader.entries.items() if name.startswith(_BUFFER)}
        for (_, _, tp), rank in self.layout.ranks.items():
            other = next((name for name in buffers if tp and name in self.manifest.files[rank].tensors), None)
            if other is not None:
                raise self.refused(f"buffer {other.removeprefix(_BUFFER)}, which differs over tp")
        for name, entry in buffers.items():
            yield Entry(name.removeprefix(_BUFFER), entry.dtype, entry.shape), partial(self._of_first, name)

    def optimizer(self) -> Iterator[Lazy]:
        document = self.document()
        for number, _, key, name, held in document["states"]:
            flat, fulls = self.flats[int(number)], dict[int, Tensor]()
            with closing(self.reader(0)) as reader:
                dtype = reader.entry(str(name)).dtype
            for param in (flat.params[index] for index in held):
                entry = Entry(state_key(param.name, str(key)), dtype, param.shape)
                yield entry, partial(self._whole, flat, param, str(name), fulls)
        for optimizer in document["optimizers"]:
            for group, index, packed in optimizer["entries"]:
                name = optimizer["groups"][group]["params"][index]
                for key, value in packed:
                    if value == {"sharded": True}:
                        continue
                    # One number; a plain one as fp32.
                    scalar = value["scalar"] if isinstance(value, dict) and "scalar" in value else value
                    if type(scalar) not in (int, float):
                        of = name or "a parameter of another model"
                        raise self.refused(f"{key} of {of}, which is not a range or a number")
                    dtype = DTYPES[value["dtype"]] if isinstance(value, dict) else torch.float32
                    entry = Entry(state_key(name, str(key)), dtype, ())
                    yield entry, partial(torch.tensor, scalar, dtype=dtype, device="cpu")

    def groups(self) -> list[dict[str, Any]]:
        optimizers = self.document()["optimizers"]
        if len(optimizers) != 1:
            raise self.refused(f"{len(optimizers)} optimizers, where one is written")
        try:
            return [{**_plain(group["options"]), "params": list(group["params"])} for group in optimizers[0]["groups"]]
        except ValueError as error:
            raise self.refused(f"{error}") from error

    def _of_first(self, name: str) -> Tensor:
        with closing(self.reader(0)) as reader:
            return reader.tensor(name)

    def _whole(self, flat: SavedFlat, param: SavedParam, name: str, fulls: dict[int, Tensor]) -> Tensor:
        """A parameter, or a state of it, of the flat buffers that are called so, each of which is read once."""
        parts: list[Tensor] = []
        for tp in range(param.count if param.dim is not None else 1):
            if tp not in fulls:
                fulls[tp] = self._full(flat, tp, name)
            parts.append(fulls[tp].as_strided(param.part_shape, param.part_stride, param.start))
        return (parts[0] if param.dim is None else torch.cat(parts, param.dim)).contiguous()

    def _full(self, flat: SavedFlat, tp: int, name: str) -> Tensor:
        """The flat buffer of one place on tp, of the ranges of all files."""
        full: Tensor | None = None
        for shard in range(flat.world):
            with closing(self.reader(self.layout.ranks[shard, 0, tp])) as reader:
                entry = reader.entry(name)
                if full is None:
                    dtype = flat.dtype if name == flat.tensor else entry.dtype
                    full = torch.empty(flat.padded, dtype=dtype, device="cpu")
                if (entry.dtype, entry.shape) != (full.dtype, (flat.shard_numel,)):
                    raise self.refused(f"{name} of {entry.dtype} and shape {list(entry.shape)} in {reader.path.name}")
                own, at = reader.tensor(name), 0
            for start, numel in flat.segments:
                step = numel // flat.world
                full[start + shard * step : start + (shard + 1) * step] = own[at : at + step]
                at += step
        assert full is not None, "a buffer has at least one range"
        return full

    def refused(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"Cannot read {self.path}. Expected a checkpoint that attachment.save() wrote, with the whole model, found "
            f"{found}. Load it with the program that saved it, and call attachment.save_full()."
        )


def _plain(packed: Any) -> Any:
    """Options as a save packs them: numbers, texts, rows and dicts."""
    if packed is None or isinstance(packed, (bool, int, float, str)):
        return packed
    if isinstance(packed, list):
        return [_plain(item) for item in packed]
    if isinstance(packed, dict) and packed.keys() == {"tuple"}:
        return tuple(_plain(item) for item in packed["tuple"])
    if isinstance(packed, dict) and packed.keys() == {"dict"}:
        return {_plain(key): _plain(item) for key, item in packed["dict"]}
    if isinstance(packed, dict) and "scalar" in packed:
        return torch.tensor(packed["scalar"], dtype=DTYPES[packed["dtype"]], device="cpu")
    raise ValueError(f"an option of a group that is not plain data ({str(packed)[:40]})")
