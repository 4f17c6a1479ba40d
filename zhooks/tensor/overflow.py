"""Which gradients overflowed: named by unit, parameter and step, whoever scales the loss.

``grad/scaling.py`` notes what it finds under the policy's loss scale, and what a torch.amp.GradScaler found.  Names are worked
out when something overflowed and never otherwise.  It decides nothing: whether a step is skipped is the scaler's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from offload.events import Bus
from zhooks.tensor.range_tensor import RangeTensor

if TYPE_CHECKING:
    from zhooks.tensor.group import ShardGroup
    from zhooks.tensor.sharded import ShardedTensor

__all__ = ["Name", "Overflow", "Overflows", "Watch", "overflowed"]

#: Overflows remembered; a run that has more of them than this is told of the latest.
KEPT = 64

#: A unit and one of its parameters.
Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Overflow:
    """A step whose gradients were not all finite.

    Attributes:
        step: counted from 0 over the steps this process has tried, skipped ones too.
        scale: what the loss was scaled by; 1.0 where a fused optimizer unscales for a GradScaler.
        parameters: (unit, parameter) of every gradient with an inf or a nan in it, on whichever rank.
    """

    step: int
    scale: float
    parameters: tuple[Name, ...]


class Watch(Protocol):
    """Who watches the gradients of a flat buffer (``scaling.Scaling``)."""

    def outside(self, view: Tensor) -> Tensor:
        """A parameter's value as it is to be used now, maybe outside of any forward."""

    def scaler_comes(self) -> None:
        """A GradScaler is about to unscale."""

    def ask_stages(self, found: Tensor) -> None:
        """A GradScaler has unscaled: ``found`` becomes 1 where any pipeline stage's gradients overflowed."""

    def apart(self) -> Sequence[ShardGroup]:
        """Of gradients that some ranks may lack while others have theirs (experts over ep), of all that is attached, in one
        order on all ranks."""

    def unscaled(self, grads: Sequence[ShardedTensor], found: Tensor, inv_scale: Tensor) -> None:
        """A GradScaler has unscaled these; ``found`` is 1 where any rank's overflowed."""


class Overflows:
    """The latest overflows of one attachment, and the number of the step that is being made."""

    def __init__(self, bus: Bus) -> None:
        self._bus, self._latest = bus, deque[Overflow](maxlen=KEPT)
        self.step, self._used = 0, False

    @property
    def latest(self) -> tuple[Overflow, ...]:
        """Oldest first."""
        return tuple(self._latest)

    def landed(self) -> None:
        """A backward has left gradients: another step's, where the former ones have been used."""
        if self._used:
            self.step, self._used = self.step + 1, False

    def used(self) -> None:
        """A step was tried with the gradients, or a scaler has judged them."""
        self._used = True

    def note(self, scale: float, names: Iterable[Name]) -> None:
        """These gradients of the present step overflowed."""
        found = tuple(names)
        if not found:
            return
        if self._latest and self._latest[-1].step == self.step:
            known = self._latest.pop()
            merged = replace(known, parameters=tuple(dict.fromkeys((*known.parameters, *found))))
        else:
            merged = Overflow(self.step, scale, found)
        self._latest.append(merged)
        if self._bus.active:
            for unit in dict.fromkeys(unit for unit, _ in found):
                mine = [parameter for owner, parameter in found if owner == unit]
                more = f" and {len(mine) - 1} more" if len(mine) > 1 else ""
                self._bus.instant("overflow", f"{unit}: {mine[0]}{more} at step {self.step}, scale {scale:g}")


def overflowed(grads: Iterable[Tensor | None], device: torch.device | str) -> Tensor:
    """Flags [n] on ``device``: this rank's range of a gradient holds an inf or a nan.  Waits for no GPU."""
    flags = [torch.zeros((), dtype=torch.float32, device=device)]
    for grad in grads:
        local = grad._local if isinstance(grad, RangeTensor) else grad
        flags.append(flags[0] if local is None else (~torch.isfinite(local).all()).to(device, torch.float32))
    return torch.stack(flags)[1:]
