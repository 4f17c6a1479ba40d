"""What collectives give on tensors of the real host where every rank has said what this one has, or what it is known to have.

``virtual_group.py`` calls it; tensors of the virtual device have no values and need none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import SimulationError
from offload.text import counted

__all__ = ["combined", "gathered", "reduced", "scattered"]

_Op = dist.ReduceOp
_SAME = (_Op.AVG, _Op.MAX, _Op.MIN, _Op.BAND, _Op.BOR)


def reduced(tensors: Sequence[Tensor], ranks: int, options: Any) -> None:
    """Each tensor combined with as many like it, in place.

    Raises:
        SimulationError: by an operation whose result is not known here.
    """
    op = _Op.SUM if options is None else options.reduceOp
    if not any(op == known for known in (_Op.SUM, _Op.PRODUCT, *_SAME)):
        raise SimulationError(f"simulate expected a sum, product, mean, maximum or minimum over ranks, found {op}.")
    for tensor in tensors:
        if op == _Op.SUM:
            tensor.mul_(ranks)
        elif op == _Op.PRODUCT:
            tensor.pow_(ranks)


def combined(tensors: Sequence[Tensor], every: Sequence[Sequence[Tensor]], options: Any) -> None:
    """Each tensor as ``every`` rank's, combined, in place.

    Raises:
        SimulationError: by an operation that is not known here.
    """
    op = _Op.SUM if options is None else options.reduceOp
    combine = next((combine for known, combine in _COMBINE if op == known), None)
    if combine is None:
        raise SimulationError(f"simulate expected a sum, mean, maximum or minimum over stages, found {op}.")
    for number, tensor in enumerate(tensors):
        tensor.copy_(combine(torch.stack([theirs[number] for theirs in every])))


_COMBINE: tuple[tuple[Any, Callable[[Tensor], Tensor]], ...] = (
    (_Op.SUM, lambda rows: rows.sum(0)),
    (_Op.AVG, lambda rows: rows.sum(0) / len(rows)),
    (_Op.MAX, lambda rows: rows.amax(0)),
    (_Op.MIN, lambda rows: rows.amin(0)),
)


def gathered(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    """Of each input one output a rank."""
    for each, given in zip(outputs, inputs, strict=True):
        for output in each:
            output.copy_(given.view_as(output))


def scattered(outputs: Sequence[Tensor], given: Tensor) -> None:
    """What each rank has sent to the first one, which this is: the same from all.

    Raises:
        SimulationError: outputs of other sizes, which ranks that are alike do not send.
    """
    if any(output.numel() != given.numel() for output in outputs):
        sizes, count = [output.numel() for output in outputs], given.numel()
        wanted = counted(count, "element")
        raise SimulationError(f"simulate expected {wanted} from every rank, as all send the same; found {sizes}.")
    gathered([outputs], [given])
