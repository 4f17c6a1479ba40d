"""What a checkpoint of DeepSpeed holds, whatever stage wrote it: parameters by name, and where in the files each value lies."""

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
from offload.shards import Entry, Lazy, WholeModel, state_key
from offload.text import one_line
from offload.torchfiles import PickleError, Stored, TorchFile, plain

__all__ = ["VALUE", "DeepSpeedModel", "SavedRun", "SavedTensor", "Values", "plain_data"]

#: What the fp32 master is called among a parameter's values.
VALUE = "value"


@dataclass(frozen=True, slots=True)
class Values:
    """All elements of a parameter, its master or a state, in row-major order: parts of several files one after the other."""

    parts: tuple[Stored, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype if self.parts else torch.float32

    @property
    def numel(self) -> int:
        return sum(each.numel for each in self.parts)

    def elements(self, start: int, numel: int) -> Tensor:
        """A run of them, new, 1-D on the CPU."""
        out, at = torch.empty(numel, dtype=self.dtype, device="cpu"), 0
        for each in self.parts:
            first, last = max(start, at), min(start + numel, at + each.numel)
            if first < last:
                out[first - start : last - start] = each.elements(first - at, last - first)
            at += each.numel
        assert start + numel <= at, f"{start + numel} of {at} elements"
        return out


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One parameter.

    Attributes:
        group: the number of its group of the optimizer; None where the optimizer has it not (it is frozen).
        values: `VALUE` and states that lie like it, by name.
        numbers: states that are one number (``step``).
    """

    name: str
    shape: tuple[int, ...]
    group: int | None
    values: Mapping[str, Values]
    numbers: Mapping[str, float]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SavedRun:
    """One checkpoint.

    Attributes:
        ranks: that saved it.
        params: each once, by name; ``tied`` says which other names are of one of them.
        groups: the options of each group of the optimizer, and ``names`` its parameters.
        client: what the user gave to ``save_checkpoint``; of what is no plain data a `Made`.
        about: what DeepSpeed says of the run: steps, samples, versions, its learning-rate scheduler.
        files: all that were opened.
    """

    path: Path
    stage: int
    universal: bool
    ranks: int
    params: Mapping[str, SavedTensor]
    buffers: Mapping[str, Stored]
    tied: Mapping[str, str]
    groups: Sequence[Mapping[str, Any]]
    client: Mapping[str, Any]
    about: Mapping[str, Any]
    files: Sequence[TorchFile]

    def names(self, group: int) -> list[str]:
        """The parameters of one group, in its order."""
        return [param.name for param in self.params.values() if param.group == group]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def plain_data(value: Any) -> Any:
    """What a run may be handed: tensors read, each once, and of objects that were not made what they would have been.

    Raises:
        PickleError: it holds more than its file does, as many views of one storage would.
    """
    seen: dict[int, Tensor] = {}
    read = 0

    def tensor(found: Any) -> Any:
        nonlocal read
        if not isinstance(found, Stored):
            return found
        if id(found) not in seen:
            read += found.nbytes
            if read > found.file.nbytes:
                raise PickleError("tensors that are larger than their file")
            seen[id(found)] = found.tensor()
        return seen[id(found)]

    return plain(value, tensor)


class DeepSpeedModel(WholeModel):
    """The model in a checkpoint of DeepSpeed; in memory is one parameter at a time."""

    def __init__(self, saved: SavedRun) -> None:
        self.saved, self.path = saved, saved.path
        self._verified: set[tuple[Path, str]] = set()

    def refused(self, found: str) -> CheckpointError:
        return CheckpointError(f"Cannot read {self.path}. Expected a model, found {found}. Load another checkpoint.")

    @property
    def parameters(self) -> set[str]:
        return set(self.saved.params)

    @property
    def tied(self) -> dict[str, str]:
        return {other: name for other, name in self.saved.tied.items() if name in self.saved.params}

    def model(self) -> Iterator[Lazy]:
        for name, param in self.saved.params.items():
            value = param.values[VALUE]
            yield Entry(name, value.dtype, param.shape), partial(self._whole, value, param.shape)
        for name, buffer in self.saved.buffers.items():
            yield Entry(name, buffer.dtype, buffer.shape), partial(self._whole, Values((buffer,)), buffer.shape)

    def optimizer(self) -> Iterator[Lazy]:
        for name, param in self.saved.params.items():
            for key, values in param.values.items():
                if key != VALUE:
                    yield Entry(state_key(name, key), values.dtype, param.shape), partial(self._whole, values, param.shape)
            for key, number in param.numbers.items():
                scalar = partial(torch.tensor, number, dtype=torch.float32, device="cpu")
                yield Entry(state_key(name, key), torch.float32, ()), scalar

    def groups(self) -> list[dict[str, Any]]:
        return [{**group, "params": self.saved.names(number)} for number, group in enumerate(self.saved.groups)]

    def files(self) -> list[tuple[str, int]]:
        return [(str(file.path.relative_to(self.path)), file.nbytes) for file in self.saved.files]

    def verify(self, number: int, advance: Callable[[int], object]) -> bool:
        file = self.saved.files[number]
        for record in file.records:
            advance(file.verify(record))
        return file.checked

    def facts(self) -> dict[str, Any]:
        """What ``zprof checkpoint show`` says."""
        saved, holds = self.saved, Counter[str]()
        for param in saved.params.values():
            for key, values in param.values.items():
                holds["parameters" if key == VALUE else f"state {key}"] += values.numel * values.dtype.itemsize
        holds["buffers"] = sum(buffer.nbytes for buffer in saved.buffers.values())
        return {
            "folder": str(saved.path),
            "format": f"DeepSpeed {_told(saved.about.get('ds_version'))}, ZeRO-{saved.stage}" + ", universal" * saved.universal,
            "step": _told(saved.about.get("global_steps")),
            "stage": saved.stage,
            "ranks": saved.ranks,
            "parameters": len(saved.params),
            "frozen": sum(param.group is None for param in saved.params.values()),
            "elements": sum(param.numel for param in saved.params.values()),
            "dtypes": sorted({str(param.values[VALUE].dtype).removeprefix("torch.") for param in saved.params.values()}),
            "groups": len(saved.groups),
            "extra": sorted(map(one_line, saved.client)),
            "bytes": saved.nbytes,
            "holds": dict(sorted(holds.items())),
        }

    def _whole(self, values: Values, shape: tuple[int, ...]) -> Tensor:
        """Read after its storages were compared with their checksums, each once."""
        for each in values.parts:
            place = each.file.path, each.record
            if place not in self._verified:
                each.file.verify(each.record)
                self._verified.add(place)
        return values.elements(0, math.prod(shape)).reshape(shape)


def _told(value: Any) -> int | str | None:
    """What a file says of itself, as it may be shown."""
    if type(value) is int and abs(value) < 2**63:
        return value
    return one_line(value)[:80] if isinstance(value, str) else None
