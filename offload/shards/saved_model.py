"""The model in a folder of shard files, read without the program that saved it: parameters whole, a flat buffer at a time.

``zprof checkpoint`` opens folders with it.  It reads manifests, headers and tensors, verifying what it reads; it never runs
anything a folder holds, needs no other rank, and knows neither modules nor policies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards.file import Entry, ShardReader
from offload.shards.manifest import read_manifest
from offload.shards.saved_layout import Places, SavedFlat, SavedLayout, SavedParam, UnknownPlacesError, read_flats

__all__ = ["SavedModel"]

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
            self.flats = read_flats(self.manifest)
            self._layout, self._unknown = self._placed()
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise self._refused(f"a manifest that contradicts itself ({type(error).__name__}: {error})"[:300]) from error

    def _placed(self) -> tuple[SavedLayout | None, str]:
        """With which file is of which place, or why nobody can know it: headers and checksums can be read without."""
        silent = "an older manifest that does not say which place on the mesh each rank had"
        try:
            layout = SavedLayout.of(self.manifest)
        except UnknownPlacesError:
            return None, f"replicas that differ, and {silent}"
        if not layout.has_replicas(self.manifest):
            raise ValueError("replicas that differ")
        # Checksums of replicas do not tell which part over tp is whose.
        if not layout.told and any(param.dim is not None for flat in self.flats for param in flat.params):
            return None, f"parameters divided over tp, and {silent}"
        return layout, ""

    @property
    def mesh(self) -> dict[str, int]:
        """The size of each axis; nothing where nobody can know it."""
        if self._layout is None:
            return {}
        return dict(zip(("shard", "replicate", "tp"), self._layout.places.sizes, strict=True))

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

    def entries(self) -> list[Entry]:
        """Every tensor of the whole model: parameters, buffers, and parameters that were ignored, as ``tensors`` gives them.

        Raises:
            CheckpointError: not all of it is here, or nobody can say how its parts belong together.
        """
        left = self.document().get("left out")
        if left:
            found = f"{next(iter(left))} and {len(left) - 1} more that are quantised, of which it has checksums alone"
            raise self._refused(found)
        self._places()
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

    def _places(self) -> Places:
        if self._layout is None:
            raise self._refused(self._unknown)
        return self._layout.places

    def _full(self, flat: SavedFlat, tp: int) -> Tensor:
        full = torch.empty(flat.padded, dtype=flat.dtype)
        for shard in range(flat.world):
            with closing(self.reader(self._places().ranks[shard, 0, tp])) as reader:
                entry = reader.entry(flat.tensor)
                if (entry.dtype, entry.shape) != (flat.dtype, (flat.shard_numel,)):
                    raise self._refused(f"{flat.tensor} of {entry.dtype} and shape {list(entry.shape)} in {reader.path.name}")
                _put(flat, full, shard, reader.tensor(flat.tensor))
        return full

    def _buffers(self) -> dict[str, Entry]:
        """By name, without what the file calls them."""
        with closing(self.reader(0)) as reader:
            found = {name.removeprefix(_BUFFER): entry for name, entry in reader.entries.items() if name.startswith(_BUFFER)}
        places = self._places()
        if places.tp > 1:
            for (_, _, tp), rank in places.ranks.items():
                other = next((name for name in found if tp and _BUFFER + name in self.manifest.files[rank].tensors), None)
                if other is not None:
                    raise self._refused(f"buffer {other}, which differs over tp")
        return found

    def _refused(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: expected a checkpoint that attachment.save() wrote, with the whole model, found {found}. Load it "
            "with the program that saved it, and call attachment.save_full()."
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
