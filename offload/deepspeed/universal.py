"""Reads DeepSpeed's universal checkpoints: a folder a parameter, with its master and each state whole.

``zero.py`` calls it with the shapes that the model states list.  It opens what these shapes name, and nothing else.

Source: Universal Checkpointing, arXiv:2406.18820; the files as DeepSpeed 0.19 writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.deepspeed.folder import Files, refused
from offload.deepspeed.saved import VALUE, Range, SavedTensor, Values, plain_data, vectors_of
from offload.torchfiles import Made, Stored, TorchFile

__all__ = ["read_universal"]


def read_universal(
    files: Files, shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> tuple[int, dict[str, SavedTensor], list[dict[str, Any]], list[TorchFile]]:
    """The stage that it was converted from, parameters by name, options of the groups, and the files that were opened."""
    about = TorchFile(files.path / "zero" / "optimizer_state.pt")
    opened, root = [about], about.root
    stage = root.get("zero_stage", 1)
    stage = stage.args[0] if isinstance(stage, Made) else stage
    if type(stage) is not int:
        raise ValueError("an invalid stage")
    groups: list[dict[str, Any]] = []
    owner: dict[int, int] = {}
    for number, group in enumerate(root["param_groups"]):
        owner |= dict.fromkeys(vectors_of(group), number)
        options = {str(key): value for key, value in group.items() if key != "params"}
        groups.append(plain_data(options))
    if owner.keys() != set(range(len(shapes))):
        raise ValueError(f"groups of the vectors {sorted(owner)[:8]} where there are {len(shapes)}")
    params: dict[str, SavedTensor] = {}
    for vector, group in enumerate(shapes):
        # Stage 3's conversion leaves the steps where they were.
        kept = root["optimizer_state_dict"]["state"].get(vector, {}) if "optimizer_state_dict" in root else {}
        usual = {"step": _number(kept["step"])} if "step" in kept else {}
        for name, shape in group.items():
            values, numbers = {}, dict(usual)
            for path in _states(files, name):
                file = TorchFile(path)
                opened.append(file)
                found = file.root
                if path.stem == "step":
                    numbers["step"] = _number(found)
                    continue
                unknown = set(found) - {"param", "cat_dim"} if isinstance(found, dict) else set()
                if unknown:
                    raise refused(files.path, f"{min(map(str, unknown))} of {name}, a part over tensor parallel ranks")
                tensor = found["param"] if isinstance(found, dict) else found
                if not isinstance(tensor, Stored) or tensor.shape not in (shape, (math.prod(shape),)):
                    raise refused(files.path, f"{path.parent.name}/{path.name} of a shape other than {list(shape)}")
                values[VALUE if path.stem == "fp32" else path.stem] = Values((Range(tensor, 0, tensor.numel),))
            if VALUE not in values:
                raise refused(files.path, f"{name} without its fp32.pt")
            params[name] = SavedTensor(name, shape, owner[vector], values, numbers)
    return stage, params, groups, opened


def _states(files: Files, name: str) -> list[Path]:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"a parameter called {name!r}")
    folder = files.path / "zero" / name
    if not folder.is_dir() or folder.is_symlink():
        raise refused(files.path, f"no folder zero/{name}")
    return sorted(path for path in folder.iterdir() if path.suffix == ".pt")


def _number(value: Any) -> float:
    if isinstance(value, Stored) and value.numel == 1:
        return float(value.tensor().reshape(()))
    if type(value) in (int, float):
        return float(value)
    raise ValueError("a step that is not a number")
