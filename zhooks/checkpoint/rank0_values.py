"""Full values of flat buffers: gathered on the ranks that want them, and sharded over all ranks from the first's.

``full_state_dict.py``, ``full_optimizer_state.py``, ``whole_folder.py`` and ``torch_state_dict.py`` call it.  It bounds
what is in memory (one flat, or over tp one parameter) and never says what a state consists of.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from zhooks.comm import CONTROL, Call, Comm
from zhooks.unit import Flat, Ranges, full_copies, spread

__all__ = ["from_first", "is_first", "spread_values", "whole_values"]


def is_first(comm: Comm) -> bool:
    """This rank gives and gets full state: the first of all that attached the model."""
    return comm.stage.axis.rank == 0


def whole_values(flat: Flat, ranges: Ranges, wanted: Collection[int], device: torch.device) -> list[Tensor | None]:
    """New global plain tensors, one a parameter, of those ``wanted`` on this rank, on ``device``.  Collective.

    A parameter that is divided over tp is gathered on every rank of that axis first.
    """
    divided = [index for index, spec in enumerate(flat.specs) if spec.place is not None]
    if not divided:
        return full_copies(flat, ranges, wanted=wanted, device=device)
    copies = full_copies(flat, ranges, wanted={*divided, *wanted})
    whole = [None if copy is None else spec.whole(copy) for spec, copy in zip(flat.specs, copies, strict=True)]
    return [None if value is None or index not in wanted else value.to(device) for index, value in enumerate(whole)]


def from_first(comm: Comm, name: str, given: Any, whole: Tensor) -> Tensor:
    """The first rank's value in ``whole`` on every rank; ``given`` is read there alone.  Collective."""
    if is_first(comm) and isinstance(given, Tensor):
        whole.copy_(given)
    comm.stage.broadcast(Call(CONTROL, "load", name), whole)
    return whole


def spread_values(comm: Comm, flat: Flat, tensors: Sequence[Any], shard: Tensor) -> None:
    """Rank 0's full tensors as every rank's range in ``shard``, in chunks, or over tp one parameter in memory at a time."""
    if comm.tp.axis.world == 1:
        spread(flat, tensors if is_first(comm) else None, shard, comm.world.broadcast)
        return
    shard.zero_()
    for index, (spec, tensor) in enumerate(zip(flat.specs, tensors, strict=True)):
        if spec.numel:
            order = torch.zeros(spec.numel, dtype=shard.dtype, device=flat.kind.device)
            whole = order.as_strided(spec.shape, spec.stride)
            if tensor is not None:
                whole.copy_(tensor)
            from_first(comm, spec.name, None, order)
            flat.local(index, shard).copy_(spec.take(whole))
