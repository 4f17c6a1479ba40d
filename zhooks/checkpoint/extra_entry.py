"""One entry of a checkpoint's ``extra``, and how many ranks saved it, without loading anything.

The integrations ask before a load, where their libraries count by ranks.  It compares nothing with a run, and reads no tensor.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards import SavedModel, destination, find
from zhooks.checkpoint.state_tree import Unpacker

__all__ = ["saved_extra"]


def saved_extra(folder: str | os.PathLike[str], key: str) -> tuple[int, Any]:
    """The number of ranks that saved, and the plain data at ``key`` of ``extra``; None where there is none.

    Raises:
        CheckpointError: there is no checkpoint, or none that ``save`` wrote.
    """
    saved = SavedModel(find(destination(folder, "load")))

    def refuse(name: str) -> Tensor:
        raise CheckpointError(
            f"Cannot load {saved.path}. Expected plain data at {key}, found a tensor ({name}). It is damaged."
        )

    packed = saved.document().get("extra")
    rows = packed.get("dict") if isinstance(packed, dict) else None
    found = [row[1] for row in rows if row[0] == key] if isinstance(rows, list) else []
    return saved.manifest.world, Unpacker(refuse, torch.device("cpu")).unpack(found[0]) if found else None
