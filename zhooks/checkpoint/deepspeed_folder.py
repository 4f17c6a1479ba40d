"""A checkpoint of DeepSpeed as a folder of one file that this run's loader reads: named flats, states, groups, buffers.

From then on it is loaded as any other, by ranges, onto any mesh.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from offload.deepspeed import VALUE, SavedRun, SavedTensor, Values
from offload.errors import CheckpointError
from offload.shards import Entry, Manifest, Record
from offload.text import counted
from offload.torchfiles import Stored
from zhooks.checkpoint.saved_folder import Place, SavedFolder
from zhooks.checkpoint.shard import (
    DOCUMENT,
    SHARDED,
    RunState,
    buffer_name,
    group_names,
    kept_whole,
    state_name,
    tensor_name,
)
from zhooks.checkpoint.state_tree import Packer
from zhooks.checkpoint.whole_values import plain_of
from zhooks.compiled import plain_name


def deepspeed_folder(saved: SavedRun, run: RunState, place: Place) -> SavedFolder:
    """See the module; made on every rank, of what it read of the folder itself.

    Raises:
        CheckpointError: the optimizer here is another than the one that was saved.
    """
    content = _Content(saved, run)
    flats = [
        {
            "name": name, "dtype": str(param.values[VALUE].dtype).removeprefix("torch."),
            "padded": param.numel, "shard_numel": param.numel, "align": 1,
            "segments": [[0, param.numel]] if param.numel else [],
            "params": [{"name": name, "shape": list(param.shape), "stride": _row_major(param.shape), "start": 0}],
        }
        for name, param in content.params.items()
    ]  # fmt: skip
    listed = sorted((file.path.name, file.nbytes) for file in saved.files)
    token = xxhash.xxh3_64_hexdigest(json.dumps([listed, str(saved.about), flats]).encode())
    record = Record(name=saved.path.name, nbytes=saved.nbytes, header="", tensors={})
    manifest = Manifest.of(token, {"flats": flats, "places": [[0, 0, 0]], "stage": saved.stage}, [record])
    # What the user gave to save_checkpoint, and what DeepSpeed says of the run.
    extra = {key: value for key, value in saved.about.items() if value is not None} | dict(saved.client)
    return SavedFolder(saved.path, manifest, place, opened=lambda rank: content, extra=extra)


def _row_major(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape))]


class _Content:
    """What stands for the file of a rank: tensors by the names that ``contents`` would give them, read as by a ShardReader.

    Attributes:
        params: those that lie in flats, by their names here.
    """

    def __init__(self, saved: SavedRun, run: RunState) -> None:
        self.path = saved.path
        self.entries: dict[str, Entry] = {}
        self._sources: dict[str, Values | Stored] = {}
        named = {_name_here(saved, run, param): param for param in saved.params.values()}
        left = plain_of(run.ignored, "load")
        self.params = {name: param for name, param in named.items() if name not in left}
        states: list[Any] = []
        for number, param in enumerate(self.params.values()):
            self._add(tensor_name(number, "value"), param.values[VALUE], (param.numel,))
            for key, values in _states(param).items() if not run.model_only else ():
                name = state_name(number, 0, key, values.dtype)
                self._add(name, values, (param.numel,))
                states.append([number, 0, key, name, [0]])
        whole = kept_whole(run, "load")
        buffers: dict[str, tuple[Values | Stored, tuple[int, ...]]] = {
            plain_name(name): (value, value.shape) for name, value in saved.buffers.items()
        }
        buffers |= {name: (param.values[VALUE], param.shape) for name, param in named.items() if name in left}
        for name, (value, shape) in buffers.items():
            self._add(buffer_name(name), value, shape, _widened(value.dtype, whole.get(name)))
        for name, param in named.items() if not run.model_only else ():
            for key, values in _states(param).items() if name in left else ():
                self._add(_ignored_state(name, key), values, param.shape)
        document = {
            "gradients": [None] * len(self.params), "partials": [None] * len(self.params), "states": states,
            "optimizers": [] if run.model_only else [_optimizer(run, saved, named)],
            "buffers": dict.fromkeys(buffers, True), "modules": {}, "objects": {},
        }  # fmt: skip
        self._document = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)

    def _add(self, name: str, source: Values | Stored, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        self._sources[name] = source
        self.entries[name] = Entry(name, dtype or source.dtype, shape)

    def entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise CheckpointError(f"Cannot load {self.path}. Expected {name}, found no such tensor. Load another checkpoint.")
        return self.entries[name]

    def elements(self, name: str, start: int, numel: int) -> Tensor:
        return self._sources[name].elements(start, numel).to(self.entry(name).dtype)

    def tensor(self, name: str) -> Tensor:
        if name == DOCUMENT:
            return self._document
        entry = self.entry(name)
        return self.elements(name, 0, math.prod(entry.shape)).reshape(entry.shape)

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare storages with the checksums of their archives: those that tensors of these names are the first to use."""
        wanted, seen = set(self.entries if names is None else names), set[tuple[Path, str]]()
        for name, source in self._sources.items():
            for stored in [source] if isinstance(source, Stored) else source.parts:
                place = stored.file.path, stored.record
                if place not in seen:
                    seen.add(place)
                    if name in wanted:
                        stored.file.verify(stored.record)

    def close(self) -> None:
        """Files are open only while they are read."""


def _widened(saved: torch.dtype, here: Tensor | None) -> torch.dtype:
    """A buffer's dtype here, where it holds all that was saved: DeepSpeed converts floating buffers to bf16 or fp16."""
    if here is None or not (saved.is_floating_point and here.dtype.is_floating_point):
        return saved
    one, other = torch.finfo(here.dtype), torch.finfo(saved)
    return here.dtype if one.max >= other.max and one.eps <= other.eps else saved


def _states(param: SavedTensor) -> dict[str, Values]:
    return {key: values for key, values in param.values.items() if key != VALUE}


def _ignored_state(name: str, key: str) -> str:
    return f"state/{name}/{key}"


def _name_here(saved: SavedRun, run: RunState, param: SavedTensor) -> str:
    """The name that the run has for it, which may be another one of a tied parameter."""
    here = {spec.name for flat in run.flats for spec in flat.specs} | set(run.ignored.params)
    names = [param.name, *(name for name, of in saved.tied.items() if of == param.name)]
    return next((plain for name in names if (plain := plain_name(name)) in here), plain_name(param.name))


# The optimizer.


def _optimizer(run: RunState, saved: SavedRun, named: Mapping[str, SavedTensor]) -> dict[str, Any]:
    """The optimizer as ``contents`` would describe it."""
    if len(run.optimizers) != 1:
        raise _other(saved, "one optimizer", f"{len(run.optimizers)} here")
    optimizer = run.optimizers[0]
    groups, in_flats = group_names(run, optimizer), {spec.name for flat in run.flats for spec in flat.specs}
    if len(groups) != len(saved.groups):
        raise _other(saved, f"{len(saved.groups)} parameter groups", f"{len(groups)} here")
    like = _state_of(saved, optimizer)
    packer, rows, entries = Packer(), [], []
    for number, (names, kept, here) in enumerate(zip(groups, saved.groups, optimizer.param_groups, strict=True)):
        wanted = {name for name, param in named.items() if param.group == number}
        others = {name for name in names if name not in named or named[name].group not in (number, None)}
        strange = wanted - set(names) or others
        if strange:
            what = f"group {number} with {counted(len(wanted), 'parameter')}"
            raise _other(saved, what, f"{len(names)} here, and {min(strange) or 'one of another model'} in only one of the two")
        rows.append({"params": names, "options": packer.pack(_options(saved, optimizer, number, here, kept), "options")})
        states = [_entry(saved, named[name], kept, like, name not in in_flats) for name in names]
        entries += [[number, index, state] for index, state in enumerate(states) if state]
    return {"type": type(optimizer).__name__, "groups": rows, "entries": entries, "loose": packer.pack({}, "")}


def _state_of(saved: SavedRun, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What this optimizer keeps of a parameter, by name: of what it holds, else of a step on a parameter that is nobody's.

    Raises:
        CheckpointError: it cannot be tried.
    """
    held = next((dict(state) for state in optimizer.state.values() if isinstance(state, dict) and state), None)
    if held is not None:
        return held
    usual = {key: value for key, value in optimizer.defaults.items() if key not in ("differentiable", "fused", "foreach")}
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float32, device="cpu"))
    param.grad = torch.zeros(2, dtype=torch.float32, device="cpu")
    try:
        accepted = {key: value for key, value in usual.items() if key in inspect.signature(type(optimizer)).parameters}
        trial = type(optimizer)([param], **accepted)
        trial.step()
    except Exception as error:
        raise _other(saved, "an optimizer that can be tried on one parameter", f"{type(error).__name__}: {error}") from error
    return dict(trial.state.get(param, {}))


def _entry(saved: SavedRun, param: SavedTensor, group: Mapping[str, Any], like: Mapping[str, Any], ignored: bool) -> list[Any]:
    """One parameter's states, packed."""
    vectors, numbers = _states(param), dict(param.numbers)
    if not vectors and not numbers:
        return []
    if "step" in like and "step" not in numbers and type(group.get("step")) in (int, float):
        numbers["step"] = float(group["step"])
    wanted = {key for key, value in like.items() if isinstance(value, Tensor) and value.dim()}
    plain = like.keys() - wanted
    if vectors.keys() != wanted or numbers.keys() != plain:
        found = sorted(vectors.keys() | numbers.keys())
        raise _other(saved, f"an optimizer with the states {', '.join(found)}", f"{', '.join(sorted(like)) or 'none'} here")
    packer, rows = Packer(), []
    for key, value in like.items():
        if key in vectors:
            rows.append([key, {"tensor": _ignored_state(param.name, key), "device": "cpu"} if ignored else SHARDED])
        else:
            number = numbers[key]
            kind = torch.tensor(number, dtype=value.dtype, device="cpu") if isinstance(value, Tensor) else type(value)(number)
            rows.append([key, packer.pack(kind, key)])
    return rows


def _options(
    saved: SavedRun, optimizer: torch.optim.Optimizer, number: int, here: Mapping[str, Any], kept: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of a group as they were saved; how an update is computed stays as it is here."""
    own = {key: value for key, value in here.items() if key != "params"}
    for key, usual in optimizer.defaults.items():
        matters = usual is not None and not isinstance(usual, bool)
        if matters and key not in kept:
            raise _other(saved, f"an optimizer like the one that was saved, whose group {number} has no {key}", f"{key} here")
    for key, plain in (("decoupled_weight_decay", None), ("bias_correction", True)):
        if key in kept and kept[key] != own.get(key, plain if plain is not None else kept[key]):
            raise _other(saved, f"an optimizer with {key} = {kept[key]}", f"{own.get(key, plain)} here")
    stays = {"foreach", "fused", "capturable", "differentiable"}
    taken = {key: kept[key] for key in own.keys() & kept.keys() if key not in stays}
    if "initial_lr" in kept:
        taken["initial_lr"] = kept["initial_lr"]
    return own | taken


def _other(saved: SavedRun, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot load {saved.path}. Expected {expected}, found {found}. Build the optimizer as it was built for DeepSpeed "
        "before loading, or pass optimizer=() to load only the model."
    )

