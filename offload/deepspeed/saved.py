"""What a checkpoint of DeepSpeed holds, whatever stage wrote it: parameters by name, and where in the files each value lies.

``zero.py`` makes it, loaders and ``zprof`` read it.  It knows no file names, and reads values only when
it is asked for a range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.torchfiles import PickleError, Stored, TorchFile, plain

__all__ = ["VALUE", "Range", "SavedRun", "SavedTensor", "Values", "plain_data", "vectors_of"]

#: What the fp32 master is called among a parameter's values.
VALUE = "value"


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive elements of a tensor of a file."""

    tensor: Stored
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Values:
    """All elements of a parameter, its master or a state, in row-major order: ranges of several files one after the other."""

    ranges: tuple[Range, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.ranges[0].tensor.dtype if self.ranges else torch.float32

    @property
    def numel(self) -> int:
        return sum(each.numel for each in self.ranges)

    def elements(self, start: int, numel: int) -> Tensor:
        """A run of them, new, 1-D on the CPU."""
        out, at = torch.empty(numel, dtype=self.dtype, device="cpu"), 0
        for each in self.ranges:
            first, last = max(start, at), min(start + numel, at + each.numel)
            if first < last:
                out[first - start : last - start] = each.tensor.elements(each.start + first - at, last - first)
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


def vectors_of(group: Mapping[str, Any]) -> list[int]:
    """The numbers of a group's flat vectors."""
    found = group["params"]
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise ValueError("a group of the optimizer whose vectors are not numbers")
    return found
