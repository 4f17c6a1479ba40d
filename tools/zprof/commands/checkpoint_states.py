"""Owns a converted checkpoint as torch's own tools load it: a file of ``torch.save``, or a folder of its distributed ones.

`zprof.commands.checkpoint` writes with it where `convert --to` asks for either. Both need the whole state in memory, which
safetensors files do not.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.private_files import create

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["write_distributed", "write_torch"]

Groups = Sequence[dict[str, Any]]


def write_torch(
    path: Path, model: dict[str, Tensor], states: Iterator[tuple[str, Tensor]], groups: Groups | None
) -> None:
    """What `attachment.state_dict` gives, as `torch.load(weights_only=True)` reads it.

    Args:
        states: by the names that ``convert`` gives them, state.PARAMETER.KEY.
        groups: of the optimizer, "params" by name; None leaves it out.
    """
    import torch

    state: dict[str, Any] = {"model": model}
    if groups is not None:
        order = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
        kept: dict[int, dict[str, Any]] = {}
        for name, value in states:
            param, _, key = name.removeprefix("state.").rpartition(".")
            kept.setdefault(order[param], {})[key] = value
        packed = [{**group, "params": [order[name] for name in group["params"]]} for group in groups]
        state["optimizer"] = {"state": dict(sorted(kept.items())), "param_groups": packed}
    with os.fdopen(create(path), "wb") as file:
        torch.save(state, file)


def write_distributed(
    path: Path, model: dict[str, Tensor], states: Iterator[tuple[str, Tensor]], groups: Groups | None
) -> None:
    """A folder that `dcp.load` reads into `{"model": ..., "optim": ...}`, the optimizer's state flattened by name."""
    from torch.distributed.checkpoint.state_dict_saver import save

    state: dict[str, Any] = {"model": model}
    if groups is not None:
        optim: dict[str, Any] = dict(states)
        for group in groups:
            for key, value in group.items():
                if key != "params":
                    optim |= {f"param_groups.{name}.{key}": value for name in group["params"]}
        state["optim"] = optim
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=str(path), no_dist=True)
