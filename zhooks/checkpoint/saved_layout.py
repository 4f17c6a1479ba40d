"""The layout a checkpoint was saved in, as its manifest holds it, and the first thing in which a run's differs.

``save_load.py`` writes the one and, before anything is loaded, refuses the other.  It looks at no values.
"""

from __future__ import annotations

import json
from typing import Any

from zhooks.checkpoint.shard_contents import RunState
from zhooks.tensor import ParamShard

__all__ = ["describe", "difference"]


def describe(run: RunState) -> list[dict[str, Any]]:
    """What must be the same for a file to fit: every flat buffer's name, dtype, segments and parameters."""
    return [
        {
            "name": flat.name,
            "dtype": str(flat.kind.master).removeprefix("torch."),
            "padded": flat.layout.padded,
            "shard_numel": flat.shard_numel,
            "segments": [[segment.start, segment.numel] for segment in flat.layout.segments],
            "params": [
                {"name": spec.name, "shape": list(spec.shape), "stride": list(spec.stride), "start": start} | _over_tp(spec)
                for spec, start in zip(flat.specs, flat.layout.starts, strict=True)
            ],
        }
        for flat in run.flats
    ]


def _over_tp(spec: ParamShard) -> dict[str, Any]:
    """The dim that is divided over tp and the number of shards; nothing where there is none."""
    return {} if spec.place is None else {"tp": [spec.place[0], spec.place[2]]}


def difference(saved: Any, here: list[dict[str, Any]]) -> str:
    """The first thing in which two descriptions differ, in words; empty when they are the same."""
    if saved == here:
        return ""
    try:
        return _first_difference(saved, here)
    except (TypeError, KeyError, AttributeError, IndexError):
        return "a description of another kind in the checkpoint"


def _first_difference(saved: list[dict[str, Any]], here: list[dict[str, Any]]) -> str:
    for old, new in zip(saved, here, strict=False):
        pairs = list(zip(old["params"], new["params"], strict=False))
        for one, other in pairs:
            if one["name"] != other["name"]:
                return f"parameter {other['name']} where the checkpoint has {one['name']}, in unit {new['name']}"
        if len(old["params"]) != len(new["params"]):
            return f"{len(new['params'])} parameters in unit {new['name']} where the checkpoint has {len(old['params'])}"
        for what in ("shape", "stride"):
            for one, other in pairs:
                if one[what] != other[what]:
                    return f"parameter {other['name']} of {what} {other[what]} where the checkpoint has {one[what]}"
        for one, other in pairs:
            if one.get("tp") != other.get("tp"):
                found, had = other.get("tp", "none"), one.get("tp", "none")
                return f"parameter {other['name']} divided over tp by (dim, chunks) {found} where the checkpoint has {had}"
        for what in ("dtype", "segments", "shard_numel", "padded", "params", "name"):
            if old[what] != new[what]:
                return f"unit {new['name']} of {what} {_brief(new[what])} where the checkpoint has {_brief(old[what])}"
    return f"{len(here)} flat buffers where the checkpoint has {len(saved)}"


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
