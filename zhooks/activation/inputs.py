"""Inputs of recomputed units in the arena: the one kind of activation that lives from forward to backward under recomputation.

``saved.py`` hands over what a recomputed unit saves, ``recompute.py`` says when that is.  The copy costs a pass over the
input, and the original dies where the model made it.  It never copies what stays alive anyway: leaves, and what needs no grad.

Source: ZeRO, arXiv:1910.02054, section 6.3 (memory defragmentation).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offload.events import Bus
from offload.memory import Arena, Use

__all__ = ["Input", "Inputs"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Input:
    """A copy, and what tells whether the original was changed since.

    Attributes:
        probe: an empty tensor that shares the original's version counter.
        extent: what counts the copy as long as it is kept.
        origin: the original's storage, weakly: its address is nobody else's as long as this is here.
    """

    copy: Tensor
    origin: StorageWeakRef
    probe: Tensor
    version: int
    extent: object = None


class Inputs:
    """What is kept for one attachment.

    Args:
        units: how many modules recompute: the first input of a first forward is taken to be as large as all of them.
    """

    def __init__(self, arena: Arena, bus: Bus, units: int) -> None:
        self._arena, self._bus, self._units = arena, bus, units
        #: A recomputed unit is saving its inputs.
        self.open = False
        # One copy of what several units are given: by the original's identity, as long as a copy of it lives.
        self._known: weakref.WeakValueDictionary[tuple[object, ...], Input] = weakref.WeakValueDictionary()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A recomputed unit saves its inputs inside."""
        self.open = True
        try:
            yield
        finally:
            self.open = False

    def keep(self, tensor: Tensor, where: str) -> Input | None:
        """A copy of ``tensor`` in the arena; None where it shall be saved as it is.

        Only what a forward made, in one piece, on the arena's device; of a tensor that is saved again the same copy.
        """
        if not self.open or not tensor.requires_grad or tensor.is_leaf or tensor.numel() == 0:
            return None
        if tensor.device != self._arena.device or not tensor.is_contiguous():
            return None
        storage = tensor.untyped_storage()
        identity = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.dtype, tensor._version)
        known = self._known.get(identity)
        if known is None:
            known = self._known[identity] = self._copied(tensor, where)
        return known

    def _copied(self, tensor: Tensor, where: str) -> Input:
        arena = self._arena
        if not arena.reserved(Use.CHECKPOINTS):
            arena.reserve({Use.CHECKPOINTS: self._units * arena.whole(tensor.nbytes)})
        with torch.no_grad(), torch.inference_mode(False):
            copy = arena.take(Use.CHECKPOINTS, tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
            probe = tensor.detach()
            probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if self._bus.active:
            self._bus.hold("activation on device", where, copy.untyped_storage())
        return Input(copy, StorageWeakRef(tensor.untyped_storage()), probe, tensor._version)
