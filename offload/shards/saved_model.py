"""The model in a folder of shard files, read without the program that saved it: parameters whole, a flat buffer at a time.

``zprof checkpoint`` opens folders with it.  It reads manifests, headers and tensors, verifying what it reads; it never runs
anything a folder holds, needs no other rank, and knows neither modules nor policies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards.file import DTYPES, Entry, ShardReader
from offload.shards.manifest import read_manifest
from offload.shards.saved_layout import SavedFlat, SavedLayout, SavedParam
from offload.text import counted

__all__ = ["SavedModel", "state_key"]

_DOCUMENT, _BUFFER = "document", "buffer/"
#: Bytes of the JSON in a file.
_DOCUMENT_MOST = 512 << 20


class SavedModel:
    """What one folder holds.

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
            raise self._refused(f"a manifest that contradicts itself ({type(error).__name__}: {error})"[:300]) from error
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
                raise self._refused(f"{reader.entry(_DOCUMENT).nbytes} bytes of JSON")
            raw = bytes(reader.tensor(_DOCUMENT).numpy())
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._refused("a document of another kind")
        return found

    def files(self) -> list[tuple[str, int]]:
        """Each file, and its bytes."""
        return [(record.name, record.nbytes) for record in self.manifest.files]

    def verify(self, number: int, advance: Callable[[int], object]) -> bool:
        """Compare one file with its checksums.

        Raises:
            CheckpointError: it is damaged.
        """
        with closing(self.reader(number)) as reader:
            for name, entry in reader.entries.items():
                reader.verify([name])
                advance(entry.nbytes)
        return True

    @property
    def parameters(self) -> set[str]:
        """The names of the parameters among ``entries``."""
        return {param.name for flat in self.flats for param in flat.params}

    @property
    def tied(self) -> dict[str, str]:
        """Further names of tensors that have several, each with the one in ``entries``; older folders do not say.

        Raises:
            CheckpointError: they are no names of tensors here.
        """
        names = {entry.name for entry in self.entries()}
        tied = self.document().get("tied", {})
        known = isinstance(tied, dict) and all(type(one) is str and one in names for one in tied.values())
        if not known or names & tied.keys():
            raise self._refused("names of tied tensors that contradict its tensors")
        return dict(tied)

    def entries(self) -> list[Entry]:
        """Every tensor of the whole model: parameters, buffers, and parameters that were ignored, as ``tensors`` gives them.

        Raises:
            CheckpointError: not all of it is here.
        """
        left = self.document().get("left out")
        if left:
            found = f"{counted(len(left), 'quantised parameter')}, such as {next(iter(left))}, of which it has only checksums"
            raise self._refused(found)
        entries = [Entry(param.name, flat.dtype, param.shape) for flat in self.flats for param in flat.params]
        names = {entry.name for entry in entries}
        for name, entry in self._buffers().items():
            if name in names:
                raise self._refused(f"two tensors called {name}")
            entries.append(Entry(name, entry.dtype, entry.shape))
        return entries

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each of ``entries``, in their order, row-major; in memory is one flat buffer at a time.

        Raises:
            CheckpointError: bytes are not those that were written.
        """
        for flat in self.flats:
            fulls: dict[int, Tensor] = {}
            for param in flat.params:
                places = range(param.count) if param.dim is not None else range(1)
                for place in places:
                    if place not in fulls:
                        fulls[place] = self._full(flat, place)
                yield param.name, _joined(param, [_part(param, fulls[place]) for place in places])
        with closing(self.reader(0)) as reader:
            for name in self._buffers():
                yield name, reader.tensor(_BUFFER + name)

    def state_entries(self) -> list[Entry]:
        """The states of the optimizers by parameter, as ``states`` gives them.

        Raises:
            CheckpointError: one is neither a range nor a number, as of a parameter that is updated whole.
        """
        entries: list[Entry] = []
        with closing(self.reader(0)) as reader:
            for kind in _flat_states(self.document()):
                params = [self.flats[kind.number].params[index] for index in kind.held]
                dtype = reader.entry(kind.tensor).dtype
                entries += [Entry(state_key(param.name, kind.key), dtype, param.shape) for param in params]
        entries += [entry for entry, _ in self._numbers()]
        if len({entry.name for entry in entries}) != len(entries):
            raise self._refused("two optimizers with a state of one parameter")
        return entries

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Each of ``state_entries``, in their order; in memory is one flat buffer at a time."""
        for kind in _flat_states(self.document()):
            flat, fulls = self.flats[kind.number], dict[int, Tensor]()
            for param in (flat.params[index] for index in kind.held):
                places = range(param.count) if param.dim is not None else range(1)
                for place in places:
                    if place not in fulls:
                        fulls[place] = self._full(flat, place, kind.tensor)
                yield state_key(param.name, kind.key), _joined(param, [_part(param, fulls[place]) for place in places])
        for entry, value in self._numbers():
            yield entry.name, torch.tensor(value, dtype=entry.dtype, device="cpu")

    def groups(self) -> list[dict[str, Any]]:
        """The options of the optimizer's groups, "params" by name.

        Raises:
            CheckpointError: several optimizers were saved, or options that are no plain data.
        """
        try:
            return _groups_of(self.document())
        except ValueError as error:
            raise self._refused(f"{error}") from error

    def _numbers(self) -> list[tuple[Entry, float]]:
        try:
            return list(_number_states(self.document()))
        except ValueError as error:
            raise self._refused(f"{error}") from error

    def _full(self, flat: SavedFlat, tp: int, name: str = "") -> Tensor:
        """The flat buffer of one place on tp: its values, or the tensor of states that is called so."""
        name = name or flat.tensor
        with closing(self.reader(self.layout.ranks[0, 0, tp])) as reader:
            dtype = flat.dtype if name == flat.tensor else reader.entry(name).dtype
        full = torch.empty(flat.padded, dtype=dtype, device="cpu")
        for shard in range(flat.world):
            with closing(self.reader(self.layout.ranks[shard, 0, tp])) as reader:
                entry = reader.entry(name)
                if (entry.dtype, entry.shape) != (dtype, (flat.shard_numel,)):
                    raise self._refused(f"{name} of {entry.dtype} and shape {list(entry.shape)} in {reader.path.name}")
                _put(flat, full, shard, reader.tensor(name))
        return full

    def _buffers(self) -> dict[str, Entry]:
        """By name, without what the file calls them."""
        with closing(self.reader(0)) as reader:
            found = {name.removeprefix(_BUFFER): entry for name, entry in reader.entries.items() if name.startswith(_BUFFER)}
        for (_, _, tp), rank in self.layout.ranks.items():
            other = next((name for name in found if tp and _BUFFER + name in self.manifest.files[rank].tensors), None)
            if other is not None:
                raise self._refused(f"buffer {other}, which differs over tp")
        return found

    def _refused(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"Cannot read {self.path}. Expected a checkpoint that attachment.save() wrote, with the whole model, found "
            f"{found}. Load it with the program that saved it, and call attachment.save_full()."
        )


def _part(param: SavedParam, full: Tensor) -> Tensor:
    return full.as_strided(param.part_shape, param.part_stride, param.start)


def _joined(param: SavedParam, parts: Sequence[Tensor]) -> Tensor:
    return (parts[0] if param.dim is None else torch.cat(list(parts), param.dim)).contiguous()


def _put(flat: SavedFlat, full: Tensor, rank: int, own: Tensor) -> None:
    """The range of one rank goes where it belongs in the buffer."""
    at = 0
    for start, numel in flat.segments:
        step = numel // flat.world
        full[start + rank * step : start + (rank + 1) * step] = own[at : at + step]
        at += step


# Optimizer states, by the document that a save leaves in each file.


def state_key(parameter: str, key: str) -> str:
    """What a state is called, as torch.distributed.checkpoint's flattened optimizer states are."""
    return f"state.{parameter}.{key}"


@dataclass(frozen=True, slots=True)
class _FlatStates:
    """One kind of state of one flat buffer: the tensor of the files, and which of its parameters have it."""

    number: int
    key: str
    tensor: str
    held: tuple[int, ...]


def _flat_states(document: Mapping[str, Any]) -> list[_FlatStates]:
    """Every tensor of states in a file's document."""
    return [_FlatStates(int(number), str(key), str(name), tuple(held)) for number, _, key, name, held in document["states"]]


def _number_states(document: Mapping[str, Any]) -> Iterator[tuple[Entry, float]]:
    """The states that are one number, by parameter; a plain one as fp32.

    Raises:
        ValueError: a state is neither a range nor a number.
    """
    for optimizer in document["optimizers"]:
        for group, index, packed in optimizer["entries"]:
            name = optimizer["groups"][group]["params"][index]
            for key, value in packed:
                if value == {"sharded": True}:
                    continue
                scalar = value["scalar"] if isinstance(value, dict) and "scalar" in value else value
                if type(scalar) not in (int, float):
                    raise ValueError(f"{key} of {name or 'a parameter of another model'}, which is not a range or a number")
                dtype = DTYPES[value["dtype"]] if isinstance(value, dict) else torch.float32
                yield Entry(state_key(name, str(key)), dtype, ()), scalar


def _groups_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options of the optimizer's groups, "params" by name.

    Raises:
        ValueError: there are several optimizers, or options that are no plain data.
    """
    if len(document["optimizers"]) != 1:
        raise ValueError(f"{len(document['optimizers'])} optimizers, where one is written")
    groups = document["optimizers"][0]["groups"]
    return [{**_plain(group["options"]), "params": list(group["params"])} for group in groups]


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
