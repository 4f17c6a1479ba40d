"""The model in a checkpoint of DeepSpeed, a parameter at a time: what `offload.shards.SavedModel` is for folders of ours.

``zprof checkpoint`` opens folders with it.  It runs nothing that a folder holds, and needs neither DeepSpeed nor a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.deepspeed.saved import VALUE, SavedTensor, Values
from offload.deepspeed.zero import read
from offload.shards import Entry, state_key
from offload.text import one_line
from offload.torchfiles import Stored

__all__ = ["DeepSpeedModel"]


class DeepSpeedModel:
    """What one folder holds.

    Raises:
        CheckpointError: it is none that is read.
    """

    def __init__(self, path: Path) -> None:
        self.saved = read(path)
        self.path = self.saved.path
        self._seen: set[tuple[Path, str]] = set()

    @property
    def parameters(self) -> set[str]:
        """The names of the parameters among ``entries``."""
        return set(self.saved.params)

    @property
    def tied(self) -> dict[str, str]:
        """Further names of parameters that have several, each with the one in ``entries``."""
        return {other: name for other, name in self.saved.tied.items() if name in self.saved.params}

    def entries(self) -> list[Entry]:
        """Every parameter once, and the buffers, as ``tensors`` gives them."""
        found = [Entry(name, param.values[VALUE].dtype, param.shape) for name, param in self.saved.params.items()]
        return found + [Entry(name, buffer.dtype, buffer.shape) for name, buffer in self.saved.buffers.items()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each of ``entries``, in their order; in memory is one parameter at a time."""
        for name, param in self.saved.params.items():
            yield name, self._whole(param, param.values[VALUE])
        for name, buffer in self.saved.buffers.items():
            self._verified(buffer)
            yield name, buffer.tensor()

    def state_entries(self) -> list[Entry]:
        """The states of the optimizer by parameter, as ``states`` gives them."""
        found: list[Entry] = []
        for name, param in self.saved.params.items():
            vectors = [(key, values) for key, values in param.values.items() if key != VALUE]
            found += [Entry(state_key(name, key), values.dtype, param.shape) for key, values in vectors]
            found += [Entry(state_key(name, key), torch.float32, ()) for key in param.numbers]
        return found

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Each of ``state_entries``, in their order."""
        for name, param in self.saved.params.items():
            for key, values in param.values.items():
                if key != VALUE:
                    yield state_key(name, key), self._whole(param, values)
            for key, number in param.numbers.items():
                yield state_key(name, key), torch.tensor(number, dtype=torch.float32, device="cpu")

    def groups(self) -> list[dict[str, Any]]:
        """The options of the optimizer's groups, "params" by name."""
        return [{**group, "params": self.saved.names(number)} for number, group in enumerate(self.saved.groups)]

    def files(self) -> list[tuple[str, int]]:
        """Each file that was opened, and its bytes."""
        return [(str(file.path.relative_to(self.path)), file.nbytes) for file in self.saved.files]

    def verify(self, number: int, advance: Callable[[int], object]) -> bool:
        """Compare one file with its checksums; False where it has none.

        Raises:
            CheckpointError: it is damaged.
        """
        file = self.saved.files[number]
        for record in file.records:
            advance(file.verify(record))
        return file.checked

    def facts(self) -> dict[str, Any]:
        """What ``zprof checkpoint show`` says."""
        saved, holds = self.saved, Counter[str]()
        for param in saved.params.values():
            for key, values in param.values.items():
                kind = "parameters" if key == VALUE else f"state {key}"
                holds[kind] += values.numel * values.dtype.itemsize
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

    def _whole(self, param: SavedTensor, values: Values) -> Tensor:
        for each in values.ranges:
            self._verified(each.tensor)
        return values.elements(0, param.numel).reshape(param.shape)

    def _verified(self, stored: Stored) -> None:
        """Compare a storage with its checksum, once."""
        place = stored.file.path, stored.record
        if place not in self._seen:
            stored.file.verify(stored.record)
            self._seen.add(place)


def _told(value: Any) -> int | str | None:
    """What a file says of itself, as it may be shown."""
    if type(value) is int and abs(value) < 2**63:
        return value
    return one_line(value)[:80] if isinstance(value, str) else None
