"""The tensors in a folder of ``torch.distributed.checkpoint``, one at a time: what `SavedModel` is for folders of ours.

``zprof checkpoint`` opens folders with it.  It decides which of them are the model's and which the optimizer's, and runs
nothing that a folder holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.dcp.metadata import Span, Whole, read_metadata, refused
from offload.shards import Entry, state_key
from offload.text import one_line, shown
from offload.torchfiles import Stored, TorchFile

__all__ = ["DistributedModel"]

_MODEL, _STATE = "model", "state"
_OPTIMIZERS = ("optim", "optimizer", "optimizers")


class DistributedModel:
    """What one folder holds.

    Raises:
        CheckpointError: it is none that is read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._saved = path, read_metadata(path)
        self._model: dict[str, Whole] = {}
        self._states: dict[str, Whole] = {}
        #: What is neither the model's nor an optimizer's, by the key it was saved under.
        self.others: list[str] = []
        flat = all(len(tensor.path) == 1 for tensor in self._saved.tensors)
        for tensor in self._saved.tensors:
            kind, name = (_MODEL, tensor.path[0]) if flat else _part(tensor.path)
            into = {_MODEL: self._model, _STATE: self._states}.get(kind)
            if into is None:
                self.others.append(tensor.key)
            elif name in into:
                raise refused(path, f"two tensors called {shown(name)}")
            else:
                into[name] = tensor

    @property
    def parameters(self) -> set[str]:
        """Never known.

        Raises:
            CheckpointError: always.
        """
        raise refused(self.path, "no record of which tensors are parameters and which are buffers, as --dtype needs")

    @property
    def tied(self) -> dict[str, str]:
        """None: such a folder has a tensor under each of its names."""
        return {}

    def entries(self) -> list[Entry]:
        """The model's parameters and buffers, as ``tensors`` gives them.

        Raises:
            CheckpointError: there are none.
        """
        if not self._model:
            tops = sorted({tensor.path[0] for tensor in self._saved.tensors})
            raise refused(self.path, f"no tensors under the key model (its keys: {', '.join(map(shown, tops[:8]))})")
        return [Entry(name, tensor.dtype, tensor.shape) for name, tensor in self._model.items()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each of ``entries``, in their order, verified; in memory are one tensor and one chunk of it at a time."""
        for name, tensor in self._model.items():
            yield name, self._whole(tensor)

    def state_entries(self) -> list[Entry]:
        """The tensors of the optimizer's states by parameter, as ``states`` gives them.

        Raises:
            CheckpointError: there are none.
        """
        if not self._states:
            raise refused(self.path, f"no states under one of the keys {', '.join(_OPTIMIZERS)}")
        return [Entry(name, tensor.dtype, tensor.shape) for name, tensor in self._states.items()]

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Each of ``state_entries``, in their order."""
        for name, tensor in self._states.items():
            yield name, self._whole(tensor)

    def groups(self) -> list[dict[str, Any]]:
        """Not read.

        Raises:
            CheckpointError: always.
        """
        raise refused(self.path, "options of optimizer groups, which are not read for --to torch: use --to safetensors")

    def files(self) -> list[tuple[str, int]]:
        """Each file that is needed, and its bytes that are."""
        sizes = Counter[str]()
        for span in self._spans():
            sizes[span.file] += span.nbytes
        return sorted(sizes.items())

    def verify(self, number: int, advance: Callable[[int], object]) -> bool:
        """Compare everything in one file with its description and its checksums; False where some of it has none.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        name, checked = self.files()[number][0], True
        for tensor in self._saved.tensors:
            for chunk in tensor.chunks:
                if chunk.span.file == name:
                    stored = self._stored(tensor, chunk.sizes, chunk.span)
                    checked = self._verified(stored.file) and checked
                    advance(chunk.span.nbytes)
        for span in self._saved.objects.values():
            if span.file == name:
                checked = self._verified(self._opened(span)) and checked
                advance(span.nbytes)
        return checked

    def facts(self) -> dict[str, Any]:
        """What ``zprof checkpoint show`` says; reads no file but ``.metadata``."""
        tensors, holds = self._saved.tensors, Counter[str]()
        for tensors_of, kind in ((self._model, "model"), (self._states, "states")):
            holds[kind] = sum(math.prod(each.shape) * each.dtype.itemsize for each in tensors_of.values())
        files = self.files()
        return {
            "folder": str(self.path),
            "format": f"torch.distributed.checkpoint {self._saved.version}",
            "ranks": len({_rank(name) for name, _ in files}),
            "files": len(files),
            "model": len(self._model),
            "states": len(self._states),
            "other": sorted(map(one_line, self.others)),
            "objects": len(self._saved.objects),
            "elements": sum(math.prod(each.shape) for each in self._model.values()),
            "dtypes": sorted({_dtype(each) for each in self._model.values()}),
            "bytes": sum(nbytes for _, nbytes in files),
            "holds": dict(holds),
            "tensors": {one_line(each.key): f"{_dtype(each)} {list(each.shape)}" for each in tensors},
        }

    def _spans(self) -> Iterator[Span]:
        for tensor in self._saved.tensors:
            yield from (chunk.span for chunk in tensor.chunks)
        yield from self._saved.objects.values()

    def _opened(self, span: Span) -> TorchFile:
        return TorchFile(self.path / span.file, span=(span.start, span.nbytes))

    def _stored(self, tensor: Whole, sizes: Sequence[int], span: Span) -> Stored:
        found = self._opened(span).root
        if not isinstance(found, Stored) or (found.dtype, found.shape) != (tensor.dtype, tuple(sizes)):
            raise refused(self.path, f"{span.file} with a tensor other than {shown(tensor.key)} at {span.start}")
        return found

    def _verified(self, file: TorchFile) -> bool:
        for record in file.records:
            file.verify(record)
        return file.checked

    def _whole(self, tensor: Whole) -> Tensor:
        # All are there before memory is taken for what they should fill.
        opened = [self._stored(tensor, chunk.sizes, chunk.span) for chunk in tensor.chunks]
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for chunk, stored in zip(tensor.chunks, opened, strict=True):
            self._verified(stored.file)
            into = out
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                into = into.narrow(dim, start, size)
            into.copy_(stored.tensor())
        return out


def _part(path: tuple[str, ...]) -> tuple[str, str]:
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


def _rank(file: str) -> str:
    """Of ``__RANK_NUMBER.distcp``."""
    return file.removeprefix("__").partition("_")[0]


def _dtype(tensor: Whole) -> str:
    return str(tensor.dtype).removeprefix("torch.")
