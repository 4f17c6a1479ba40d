"""One flat buffer's gradient: from what autograd hands over to the shard behind the parameters' ``.grad``.

``reduce.py`` fills it, ``reduction.py`` takes what was added up and brings back this rank's range of the mean.  It never
communicates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offload.errors import ShardedOpError
from offload.memory import Use
from offload.store import Block, BlockRange, Mode
from offload.tier import Tier
from zhooks.comm import chunks_of, even
from zhooks.grad.user_hooks import has_hooks, hooked
from zhooks.layout import Layout
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Pool

__all__ = ["Gradient", "GradientChunk", "Into"]


@dataclass(frozen=True, slots=True)
class GradientChunk:
    """``numel`` elements at ``local`` of every rank's range.

    Attributes:
        layout: of what is sent.
        starts: where those elements lie in the flat buffer, rank after rank; none where the partial sum is sent as it lies.
        sends, lands: elements of the buffers that are taken for it.
    """

    local: int
    numel: int
    layout: Layout
    starts: tuple[int, ...]
    sends: int
    lands: int


def gradient_chunks(flat: Flat, *, in_place: bool) -> Sequence[GradientChunk]:
    """The chunks of a flat buffer, in order; ``in_place``: every rank's range is all of it."""
    layout = flat.layout
    if not flat.long:
        return (GradientChunk(0, flat.shard_numel, layout, (), layout.padded, flat.shard_numel),)
    # Every chunk takes buffers of the same size, the last too: so the pool has them again.
    most = flat.pool.bound // flat.kind.wide
    if in_place:
        run = chunks_of(even(layout.padded, 1), most, layout.align * layout.world)
        return [GradientChunk(one.local, one.numel, even(one.numel, layout.world), one.starts, most, most) for one in run]
    return [
        GradientChunk(one.local, one.numel, one.layout, one.starts, most, most // layout.world)
        for one in chunks_of(layout, most, layout.align)
    ]


class Into(Enum):
    """Where a reduced range goes."""

    #: The shard, which had nothing; parameters claim it when all ranks are known to be done.
    SHARD = "shard"
    #: The shard again, added to what an earlier reduction of the same backward has put there.
    SHARD_AGAIN = "shard again"
    #: The gradients that parameters have.
    GRADS = "grads"
    #: A tensor beside all of these: for the user's hooks, or for autograd to return.
    APART = "apart"


class Gradient:
    """One flat buffer's gradient: the partial sum of this rank, and the reduced range behind the parameters' ``.grad``.

    Args:
        returned: it becomes nobody's ``.grad``: autograd.grad returns it.

    Note: [Handed out once]
        The shard is ours from ``reserve_shard`` until its parts have become parameters' gradients; then it is theirs, and we
        know it by weak references alone.  So it goes with the last of them (``zero_grad``), nobody's is ever overwritten, and
        no count of references says whose it is.  A part that no parameter has claimed yet may be handed out later, as long as
        the others keep the shard alive.
    """

    def __init__(self, flat: Flat, pool: Pool, *, returned: bool = False) -> None:
        self.flat, self._pool, self._returned = flat, pool, returned
        #: The gradient is kept off the device: it is made whole there before it goes.
        self.tiered = flat.kind.tiers.gradient is not Tier.DEVICE and flat.layout.padded > 0
        #: This rank's range is all of the buffer: partial sums become the sum where they lie.
        self.in_place = flat.replicated or flat.layout.world == 1
        #: What is reduced has the dtype of what is kept: it may be received where it belongs.
        self.exact = flat.kind.reduce == flat.kind.master
        self.present = [False] * len(flat.params)
        self.partial: Tensor | None = None
        # Of a long flat: what autograd handed over, until its chunks are sent.
        self._given: list[Tensor] = []
        #: Where the shard lies until it is handed over: a tensor, or a block of the gradient's tier.
        self.at: Tensor | Block | None = None
        # The shard holds, or is about to receive, values that no parameter claims yet.
        self._reserved = False
        # Parts of the shard that are, or were, gradients, and how to find the shard while they live.
        self._claimed: set[int] = set()
        self._find: Callable[[], Tensor | Block | None] = _nothing

    @cached_property
    def chunks(self) -> Sequence[GradientChunk]:
        """What is sent at once, in order; see Note [Chunks] in reduction.py."""
        return gradient_chunks(self.flat, in_place=self.in_place)

    # What this rank adds up.

    def add(self, grads: Sequence[Tensor | None], *, held: bool = False) -> None:
        """Take what autograd hands over, one a parameter, into the partial sum: one pass over each, cast on the way.

        That of a long flat stays autograd's own until its chunks are filled from it, unless the sum is ``held`` back.
        """
        flat = self.flat
        if flat.long and not held:
            self._given.extend(grad for grad in grads if grad is not None)
            self.present[0] = self.present[0] or bool(self._given)
            return
        if self.partial is None:
            own = self.in_place and self.exact and not (self.tiered or self.apart) and self.reserve_shard()
            self.partial = self._clear(self.shard) if own else self._clear(self.buffer(flat.layout.padded))
        partial, present = self.partial, self.present
        for index, (grad, spec, start) in enumerate(zip(grads, flat.specs, flat.layout.starts, strict=True)):
            if grad is None:
                continue
            if present[index]:
                spec.within(partial, start).add_(grad)
            else:
                spec.within(partial, start).copy_(grad)
                present[index] = True

    def take(self) -> list[Tensor]:
        """What was added since the last reduction, to be summed up in this order; what comes next starts anew.

        Of a long flat the parts, none where this rank had no gradient; else the whole partial sum, with zeros there.
        """
        flat, partial, given, present = self.flat, self.partial, self._given, self.present
        self.partial, self._given, self.present = None, [], [False] * len(flat.params)
        if flat.long:
            return ([] if partial is None else [partial]) + given if present[0] else []
        if partial is None:
            partial = self._clear(self.buffer(flat.layout.padded))
        if not all(present):
            for start, numel, there in zip(flat.layout.starts, flat.layout.numels, present, strict=True):
                if not there:
                    partial[start : start + numel].zero_()
        return [partial]

    def resume(self, partial: Tensor | None, present: Sequence[bool]) -> None:
        """Go on from a partial sum [padded] that was saved, instead of what was added up here."""
        if self.partial is not None:
            self.give_back(self.partial)
            self._reserved = False
        self.partial, self.present = partial, list(present)

    def buffer(self, numel: int, what: str = "gradient on device") -> Tensor:
        """An uninitialised buffer, 1-D in the reduce dtype: one of the pool's, which are used under a backward's one stream."""
        flat = self.flat
        if self._returned:
            return torch.empty(numel, dtype=flat.kind.reduce, device=flat.kind.device)
        taken = self._pool.take(numel, flat.kind.reduce, flat.kind.device, Use.SUMS)
        self._hold(taken, what)
        return taken

    def give_back(self, buffer: Tensor) -> None:
        if buffer is not self.at:
            self._pool.give(buffer)

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        """What of the flat buffer is no parameter's."""
        layout = self.flat.layout
        ends = [start + numel for start, numel in zip(layout.starts, layout.numels, strict=True)]
        return [(end, start) for end, start in zip(ends, [*layout.starts[1:], layout.padded], strict=True) if end < start]

    def _clear(self, buffer: Tensor) -> Tensor:
        """What no parameter fills must not look like an overflow."""
        for start, stop in self._gaps:
            buffer[start:stop].zero_()
        return buffer

    def _hold(self, tensor: Tensor, what: str = "gradient on device") -> None:
        bus = self.flat.bus
        if bus.active:
            bus.hold(what, self.flat.name, tensor.untyped_storage())

    # The shard.

    def reserve_shard(self) -> bool:
        """Keep the shard for the next gradient, where no parameter has one and none is to come; allocates it if need be."""
        if self._reserved or any(param.grad is not None for param in self.flat.params):
            return False
        if self._claimed or self.at is None:
            self.at = self._fresh()
        self._reserved = True
        return True

    def _fresh(self) -> Tensor | Block:
        """Another shard; one that somebody keeps lives as long as the gradients in it."""
        flat = self.flat
        self.at, self._claimed = None, set()
        if self.tiered:
            assert flat.store is not None
            block = flat.store.put(f"gradient/{flat.name}", flat.shard_numel, flat.kind.master, flat.kind.tiers.gradient)
            self._find = weakref.ref(block)
            return block
        shard = self._pool.lasting(flat.shard_numel, flat.kind.master, flat.kind.device, Use.GRADIENTS)
        self._find = _while_it_lives(shard)
        self._hold(shard)
        return shard

    def hand_over(self) -> None:
        """The shard belongs to the gradients in it from now on."""
        self._reserved = False
        self.at = None

    @property
    def shard(self) -> Tensor:
        """This rank's range [shard_numel] in the master dtype, in memory."""
        assert self.at is not None
        return self.at.tensor() if isinstance(self.at, Block) else self.at

    def overwritten(self) -> Tensor:
        """The shard for whoever writes all of it: what it held is not read."""
        assert self.at is not None
        return self.at.tensor(Mode.WRITE_ALL) if isinstance(self.at, Block) else self.at

    def tensor(self, index: int) -> ShardedTensor:
        """One parameter's part of the shard, for its ``.grad``."""
        assert self.at is not None
        return self._claim_of(self.at, index)

    def _claim_of(self, at: Tensor | Block, index: int) -> ShardedTensor:
        self._claimed.add(index)
        start, numel = self._spans[index]
        with torch.inference_mode(False):
            part = BlockRange(at, start, numel) if isinstance(at, Block) else at[start : start + numel]
            return ShardedTensor(part, self.flat.specs[index])

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        return [self.flat.span(index) for index in range(len(self.flat.specs))]

    # Where the mean over the ranks lands.

    @property
    def apart(self) -> bool:
        """What is reduced is kept apart until all of it is there: for the user's hooks, or to be returned."""
        return self._returned or has_hooks(self.flat)

    def choose(self) -> Into:
        """Where a range goes that has been reduced now."""
        if self.apart:
            return Into.APART
        if self.reserve_shard():
            return Into.SHARD
        return Into.SHARD_AGAIN if self._reserved else Into.GRADS

    def put(self, into: Into, start: int, reduced: Tensor) -> list[int]:
        """Put ``reduced`` at ``start`` of this rank's range; returns the parameters that it did not reach: they had no gradient
        where others have."""
        if into is Into.GRADS:
            return self._add_to_grads(start, reduced)
        again, whole, store = into is Into.SHARD_AGAIN, reduced.numel() == self.flat.shard_numel, self.flat.store
        if whole and isinstance(self.at, Block) and store is not None:
            store.change(self.at, reduced, add=again)
            return []
        target = self.shard if whole else self.shard[start : start + reduced.numel()]
        target.add_(reduced.to(target.device)) if again else target.copy_(reduced)
        return []

    def _add_to_grads(self, start: int, reduced: Tensor) -> list[int]:
        missing, stop = [], start + reduced.numel()
        for index, (begin, numel) in enumerate(self._spans):
            if self.flat.params[index].grad is None:
                missing.append(index)
                continue
            mine, low, high = self._local_of(index), max(begin, start), min(begin + numel, stop)
            if low < high:
                mine = mine if high - low == numel else mine[low - begin : high - begin]
                mine.add_(reduced[low - start : high - start].to(mine.device))
        return missing

    def claim(self, used: Sequence[int]) -> None:
        """The shard's parts become the gradients of the parameters that some rank has used, and that have none."""
        if self.at is None or self.flat.spent:
            return
        for index, param in enumerate(self.flat.params):
            if used[index] and param.grad is None:
                param.grad = self._claim_of(self.at, index)

    def land(self, index: int, local: Tensor) -> None:
        """Set or add one parameter's reduced range, by way of the user's hooks."""
        spec = self.flat.specs[index]
        if spec.hooks or spec.post_hooks:
            self._deliver(index, ShardedTensor(local.to(self.flat.kind.master, copy=True), spec))
        else:
            self._set(index, local)

    def add_alone(self, grads: Sequence[Tensor | None]) -> None:
        """No other rank takes part: write each gradient where the parameter's ``.grad`` lives."""
        fresh = self.reserve_shard()
        try:
            for index, grad in enumerate(grads):
                if grad is None:
                    continue
                spec = self.flat.specs[index]
                if fresh and not (spec.hooks or spec.post_hooks):
                    spec.within(self.shard, self.flat.layout.starts[index]).copy_(grad)
                    self.flat.params[index].grad = self.tensor(index)
                else:
                    self.land(index, spec.storage_order(grad))
        finally:
            if fresh:
                self.hand_over()

    def _set(self, index: int, local: Tensor) -> None:
        param = self.flat.params[index]
        if param.grad is not None:
            mine = self._local_of(index)
            mine.add_(local.to(mine.device))
            return
        # Others' gradients may keep a shard alive whose part for this one was never anybody's.
        at = None if index in self._claimed else self._find()
        if at is None and self.tiered:
            at = self._fresh()
        if at is None:
            landed = torch.empty(local.shape, dtype=self.flat.kind.master, device=local.device)
            self._hold(landed)
            tensor = ShardedTensor(landed, self.flat.specs[index])
        else:
            tensor = self._claim_of(at, index)
        tensor._local.copy_(local)
        param.grad = tensor

    def _local_of(self, index: int) -> Tensor:
        """This rank's range of the gradient that a parameter has."""
        grad = self.flat.params[index].grad
        if not isinstance(grad, ShardedTensor):
            raise ShardedOpError(
                f"{self.flat.specs[index].name}.grad: expected a sharded gradient, found a plain tensor. A custom "
                "autograd Function "
                "read the parameter outside its module's forward; read it inside, or set grad to None."
            )
        return grad._local

    def _deliver(self, index: int, landed: ShardedTensor) -> None:
        """Hand one reduced gradient to the parameter through the user's hooks."""
        grad, param = hooked(landed), self.flat.params[index]
        if param.grad is not None:
            param.grad.add_(grad)
        elif self.tiered:
            self._set(index, grad._local)
        else:
            param.grad = grad
        for hook in tuple(self.flat.specs[index].post_hooks.values()):
            hook(param)


def _nothing() -> None:
    """No shard."""


def _while_it_lives(shard: Tensor) -> Callable[[], Tensor | None]:
    """The shard again, by its memory, as long as something keeps that."""
    known, dtype, device = StorageWeakRef(shard.untyped_storage()), shard.dtype, shard.device
    offset, numel = int(shard.storage_offset()), shard.numel()

    def find() -> Tensor | None:
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
        if storage is None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, (numel,), (1,))

    return find
