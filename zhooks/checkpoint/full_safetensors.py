"""Full parameters and buffers as one safetensors file, written unit by unit from rank 0.

``attach.py`` calls it for ``Attachment.save_full``.  The safetensors library writes whole dicts, which would need the full
copy this exists to avoid; the format is its own (a length, a JSON header, the bytes).  A file is complete or absent.

Source: the safetensors format, https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.text import shown, shown_path
from zhooks.checkpoint.ignored_values import check_alike
from zhooks.checkpoint.rank0_values import SAFETENSORS, flats_of, is_first, whole_values
from zhooks.comm import AllRanks, Comm, one_stage_a_path
from zhooks.compiled import plain_name
from zhooks.layout import Ignored, whole_of
from zhooks.tensor import ParamShard
from zhooks.unit import Flat, Unit, passing


class _File:
    """Rank 0's file under a temporary name; the first failure is kept, so that all ranks can go on and then raise."""

    def __init__(self, path: Path, header: bytes) -> None:
        self._path, self.problem = path, ""
        self._made = ""
        self._file: IO[bytes] | None = None
        try:
            handle, self._made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            self._file = os.fdopen(handle, "wb")
            self._file.write(header)
        except OSError as error:
            self._failed(error)
        self._base = len(header)

    def write(self, offset: int, value: Tensor) -> None:
        if self._file is None:
            return
        raw = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        try:
            self._file.seek(self._base + offset)
            self._file.write(raw.numpy().data)
        except OSError as error:
            self._failed(error)

    def commit(self) -> None:
        """Flush, sync and rename; nothing is left behind when anything failed."""
        try:
            if self._file is not None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._made, self._path)
        except OSError as error:
            self._failed(error)
        if self.problem and self._made:
            Path(self._made).unlink(missing_ok=True)

    def _failed(self, error: OSError) -> None:
        self._file = None
        self.problem = self.problem or (
            f"save_full {shown_path(self._path)}: expected a writable folder with space for the model, found: {error.strerror}."
            " Choose another path."
        )


@torch.no_grad()
def save_full(
    model: nn.Module, units: Sequence[Unit], comm: Comm, target: str | os.PathLike[str], ignored: Ignored
) -> None:
    """See ``Attachment.save_full``.  Tied parameters are written under each name: a strict load succeeds."""
    ranks = AllRanks(comm.stage, "save_full", shown_path(target))
    path = ranks.run(lambda: _destination(target, ranks.first))
    ranks.run(lambda: _check_plain(ignored))
    check_alike(model, ignored, comm, "save_full")
    held = model.state_dict(keep_vars=True)
    named = [(plain_name(name), tensor) for name, tensor in held.items() if isinstance(tensor, Tensor)]
    header, places = _header(named)
    one_stage_a_path(comm, "save_full", str(path.absolute()))
    file = _File(path, header) if is_first(comm) else None
    ranks = AllRanks(comm.stage, "save_full", str(path))
    ranks.run(lambda: _problem(file))
    sharded: set[int] = set()
    for flat in flats_of(units):
        sharded.update(id(param) for param in flat.params)
        _write(flat, file, places)
    for tensor in [tensor for _, tensor in named if id(tensor) not in sharded]:
        whole = whole_of(tensor)
        if file is not None:
            for offset in places[id(tensor)]:
                file.write(offset, whole)
    if file is not None:
        file.commit()
    ranks.run(lambda: _problem(file))


def _check_plain(ignored: Ignored) -> None:
    """A file that a plain model loads has all of it.

    Raises:
        CheckpointError: the model has frozen tensor subclasses, whose values their library alone can write.
    """
    for name, one in ignored.frozen.items():
        raise CheckpointError(
            f"save_full: expected plain parameters, found {len(ignored.frozen)} frozen of tensor subclasses ({name} is a "
            f"{one.kind}), which safetensors cannot hold. Use save(), or state_dict(), which leaves them out and says so, "
            "or save only the adapters."
        )


def _problem(file: _File | None) -> None:
    """Rank 0's problem is everybody's."""
    if file is not None and file.problem:
        raise CheckpointError(file.problem)


def _destination(target: str | os.PathLike[str], first: bool) -> Path:
    """The path that is meant; on the first rank, where the file is made, one that a file may take the place of."""
    text = os.fspath(target) if isinstance(target, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(
            f"save_full: expected the path of a file, found {shown(target)}. Name one, e.g. model.safetensors."
        )
    path = Path(text)
    try:
        mode = os.lstat(path).st_mode if first else None
    except FileNotFoundError:
        mode = None
    if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        found = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise CheckpointError(
            f"save_full {shown_path(text)}: expected a file or no such path, found {found}. Choose another path."
        )
    return path


def _write(flat: Flat, file: _File | None, places: dict[int, list[int]]) -> None:
    """The parameters of one flat buffer; one that is larger than any buffer may be goes to the file as it arrives."""
    if not (flat.long and _row_major(flat.specs[0])):
        every = range(len(flat.params) if file is not None else 0)
        for param, value in zip(flat.params, whole_values(flat, flat.shard, every, flat.kind.device), strict=True):
            if file is not None and value is not None:
                for offset in places.get(id(param), ()):
                    file.write(offset, value)
        return
    numel = flat.layout.numels[0]
    for start, values in passing(flat, flat.shard):
        known = values[: max(0, numel - start)]
        if file is not None and known.numel():
            for offset in places.get(id(flat.params[0]), ()):
                file.write(offset + start * known.element_size(), known)


def _row_major(spec: ParamShard) -> bool:
    """The flat buffer holds all of the parameter, in the order that a file has it."""
    return spec.place is None and torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta").is_contiguous()


def _header(named: Sequence[tuple[str, Tensor]]) -> tuple[bytes, dict[int, list[int]]]:
    """The encoded header, and where each tensor's bytes go, counted from its end."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[int, list[int]] = {}
    offset = 0
    for name, tensor in named:
        if tensor.dtype not in SAFETENSORS:
            raise CheckpointError(
                f"save_full: expected dtypes that safetensors supports, found {tensor.dtype} in {name}. Use state_dict() "
                "and torch.save."
            )
        nbytes = tensor.numel() * tensor.element_size()
        code = SAFETENSORS[tensor.dtype]
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, offset + nbytes]}
        places.setdefault(id(tensor), []).append(offset)
        offset += nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw, places
