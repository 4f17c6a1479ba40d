"""The copies of this part of the model that sums of gradients go over, once they are made over the ranks that share it.

``reduce.py`` asks them at every reduction and at the end of a backward: the ``replicate`` axis of the mesh, or other jobs that
an integration knows.  They never decide when something is reduced.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from offload.work import DONE, Work
from zhooks.comm import Call, Comm
from zhooks.layout import flat_layout

__all__ = ["OnAxis", "ReplicaSums"]


class ReplicaSums(Protocol):
    """Copies of this part of the model, this one among them.  Calls come in one order on all of them.

    Attributes:
        several: there may be more than this one.
        jobs: they are jobs of their own, that come and go: no rank of them takes part in what this attachment agrees on.
    """

    jobs: bool

    @property
    def several(self) -> bool: ...

    def averaged(self) -> int:
        """What a mean over the mesh is to be divided by, for it was made over these too."""

    def add_up(self, call: Call, out: Tensor) -> Work:
        """Start summing ``out`` over them, in place.  Collective over them."""

    def merge(self, flags: Tensor) -> None:
        """Each of these bytes becomes the largest that one of them has.  Collective over them."""


class OnAxis:
    """The ranks of the ``replicate`` axis, whose number a mean over the mesh has in it, and which agree with all its ranks."""

    jobs = False

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    @property
    def several(self) -> bool:
        return self._comm.replicate.axis.world > 1

    def averaged(self) -> int:
        return 1

    def add_up(self, call: Call, out: Tensor) -> Work:
        if not self.several:
            return DONE
        replicate = self._comm.replicate
        layout = flat_layout([out.numel()], world=replicate.axis.world, itemsize=out.element_size())
        return replicate.all_reduce_flat(call, out, layout)

    def merge(self, flags: Tensor) -> None:
        return None
