"""The optimizer states of a saved model by parameter: whole, read from flat buffers one at a time.

``saved_model.py`` offers them, ``zprof checkpoint convert --optimizer`` writes them.  It knows the document that a save leaves
in each file, and refuses by name what is no range and no number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.shards.file import DTYPES, Entry

__all__ = ["FlatStates", "flat_states", "groups_of", "number_states", "state_key"]


def state_key(parameter: str, key: str) -> str:
    """What a state is called, as torch.distributed.checkpoint's flattened optimizer states are."""
    return f"state.{parameter}.{key}"


@dataclass(frozen=True, slots=True)
class FlatStates:
    """One kind of state of one flat buffer: the tensor of the files, and which of its parameters have it."""

    number: int
    key: str
    tensor: str
    held: tuple[int, ...]


def flat_states(document: Mapping[str, Any]) -> list[FlatStates]:
    """Every tensor of states in a file's document."""
    return [FlatStates(int(number), str(key), str(name), tuple(held)) for number, _, key, name, held in document["states"]]


def number_states(document: Mapping[str, Any]) -> Iterator[tuple[Entry, float]]:
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


def groups_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
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
