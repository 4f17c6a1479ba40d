"""Norms of the gradients that parameters have: of each unit, and of all of them, by one small all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.errors import ShardedOpError, ZhooksError
from offload.text import counted
from zhooks.comm import CONTROL, Call, Comm, norms_of_runs
from zhooks.layout import TP
from zhooks.session import Session
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Unit

__all__ = ["GradNorms", "gradient_norms", "square", "squares"]


@dataclass(frozen=True, slots=True)
class GradNorms:
    """The 2-norms of gradients.

    Attributes:
        total: over all units: what ``clip_grad_norm_(model.parameters(), inf)`` returns.
        units: of each unit by its name, in the order of the units; 0.0 if none of its parameters has a gradient.
    """

    total: float
    units: dict[str, float]


def gradient_norms(session: Session) -> GradNorms:
    """See ``Attachment.grad_norms``.  Collective."""
    units, comm = session.attached("grad_norms").units, session.comm
    if session.policy.optimizer.overlap:
        raise ShardedOpError(
            "grad_norms expected gradients that stay until the step, found [optimizer] overlap = true, which updates in "
            "backward and drops them. apply() a policy without overlap."
        )
    session.runtime.due()
    problem: Exception | None = None
    try:
        summed = squares(units, comm)
    except ZhooksError as error:
        problem, summed = error, torch.zeros(len(units), dtype=torch.float64, device="cpu")
    # One exchange for both: what fails on one rank fails on all.
    exchanged = torch.cat([summed, torch.tensor([float(problem is not None)], dtype=torch.float64, device="cpu")])
    comm.stage.all_reduce(Call(CONTROL, "grad_norms", "all units"), exchanged, "sum")
    if problem is not None:
        raise problem
    if exchanged[-1]:
        raise ShardedOpError(
            f"grad_norms expected gradients that every rank can read, found {counted(int(exchanged[-1]), 'rank')} "
            "without. Their own errors say why."
        )
    summed = exchanged[:-1]
    roots = summed.sqrt().tolist()
    return GradNorms(float(summed.sum().sqrt()), {unit.name: root for unit, root in zip(units, roots, strict=True)})


@torch.no_grad()
def squares(units: Sequence[Unit], comm: Comm) -> Tensor:
    """This rank's part of each unit's sum of squared gradients, fp64 [units] on the CPU: over the ranks they add up to it.

    What several ranks hold alike counts on the first of them.
    """
    # Replicas hold the same ranges.
    if not units or comm.replicate.axis.rank:
        return torch.zeros(len(units), dtype=torch.float64, device="cpu")
    with torch._C.DisableTorchFunctionSubclass():
        sums = [sum((_of_flat(flat, comm) for flat in unit.flats), start=_nothing(unit)) for unit in units]
        return torch.stack(sums).cpu()


def _nothing(unit: Unit) -> Tensor:
    device = unit.flats[0].kind.device if unit.flats else torch.device("cpu")
    return torch.zeros((), dtype=torch.float64, device=device)


def _of_flat(flat: Flat, comm: Comm) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=flat.kind.device)
    if not flat.kind.trainable or (comm.shard.axis.rank and not flat.group.sharded):
        return total
    for param, spec in flat.members():
        grad = param.grad
        if grad is None or (spec.place is None and not flat.group.first(TP)):
            continue
        if not isinstance(grad, ShardedTensor):
            raise ShardedOpError(
                f"grad_norms expected {spec.name}.grad as backward has made it, found a plain tensor in its place. Change "
                "gradients in place, or set grad to None."
            )
        total += square(grad.local_shard.values, flat.group.buffer_nbytes).to(total.device)
    return total


def square(values: Tensor, buffer_nbytes: int) -> Tensor:
    """The sum of the squares of ``values`` [1-D], fp64 []; 16-bit ones pass through fp32 buffers of ``buffer_nbytes``."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    if values.dtype in (torch.float16, torch.bfloat16):
        norms = norms_of_runs(values, 2, buffer_nbytes)
    else:
        norms = [torch.linalg.vector_norm(values)]
    return torch.stack(norms).double().square().sum()
