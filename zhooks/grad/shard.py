"""The memory behind one flat buffer's gradients: this rank's range, on the device or in blocks of the gradient's tier.

``gradient.py`` reserves it, puts reduced ranges there and hands it over; ``reduction.py`` receives into it.  Which of the
classes a flat has is decided once, in ``shard_of``.  It never decides where a gradient goes.

Note: [Handed out once]
    The shard is ours from ``reserve`` until its ranges have become parameters' gradients; then it is theirs, and we know it by
    weak references alone.  So it goes with the last of them (``zero_grad``), nobody's is ever overwritten, and no count of
    references says whose it is.  A range that no parameter has claimed yet may be handed out later, as long as the others
    keep the shard alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from offload.memory import Use
from offload.store import BlockRange, Mode, Store
from offload.tier import Tier
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Pool

__all__ = ["GradientShard", "hold", "shard_of"]


class GradientShard:
    """This rank's range [shard_numel] of a gradient on the device, in the masters' dtype: one shard after another, each
    allocated anew unless the last one was never claimed.

    Attributes:
        direct: what adds up or reduces gradients may write it: it lies on the device and has their dtype.
        at: the memory until it is handed over: a tensor, or a block of the tier.
        reserved: it holds, or is about to receive, values that no parameter claims yet.
    """

    def __init__(self, flat: Flat, pool: Pool) -> None:
        self._flat, self._pool, self._kind = flat, pool, flat.kind
        self.direct = flat.kind.reduces_in_place
        self.at: Any = None
        self.reserved = False
        # Parameters whose ranges of the last shard are, or were, gradients, and how to find it while they live.
        self._claimed: set[int] = set()
        self._find: Callable[[], Any] = lambda: None

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Where every parameter's range lies in it: start and numel."""
        return [self._flat.span(index) for index in range(len(self._flat.specs))]

    def reserve(self) -> bool:
        """Keep the shard for the next gradient, where no parameter has one and none is to come; allocates it if need be."""
        if self.reserved or any(param.grad is not None for param in self._flat.params):
            return False
        if self._claimed or self.at is None:
            self.at = self._fresh()
        self.reserved = True
        return True

    def _fresh(self) -> Any:
        """Another shard, uninitialised; one that somebody keeps lives as long as the gradients in it."""
        self.at, self._claimed = None, set()
        made = self._pool.lasting(self._flat.shard_numel, self._kind.master, self._kind.device, Use.GRADIENTS)
        self._find = _while_it_lives(made)
        hold(self._flat, made)
        return made

    def hand_over(self) -> None:
        """The shard belongs to the gradients in it from now on."""
        self.reserved = False
        self.at = None

    def claim(self, index: int, at: Any = None) -> ShardedTensor:
        """One parameter's range of the shard that is reserved, or is found ``at``, for its ``.grad``."""
        self._claimed.add(index)
        start, numel = self.spans[index]
        with torch.inference_mode(False):
            return ShardedTensor((self.at if at is None else at)[start : start + numel], self._flat.specs[index])

    def fill(self, given: Sequence[tuple[int, Tensor]]) -> list[ShardedTensor]:
        """Set the ranges of these parameters, [1-D] each, and claim them.  All at once: of small ones calls are the cost."""
        if not given:
            return []
        sizes, places = self._runs
        with torch.inference_mode(False):
            runs = self.values().split_with_sizes(sizes)
            ranges = [runs[places[index]] for index, _ in given]
            torch._foreach_copy_(ranges, [local for _, local in given])
            self._claimed.update(index for index, _ in given)
            return [ShardedTensor(mine, self._flat.specs[index]) for (index, _), mine in zip(given, ranges, strict=True)]

    @cached_property
    def _runs(self) -> tuple[list[int], list[int]]:
        """How the shard is divided into parameters' ranges and gaps between them, and which of these runs the former are."""
        sizes, places, at = list[int](), list[int](), 0
        for start, numel in self.spans:
            # A parameter without elements is anywhere.
            gap = start - at if numel else 0
            if gap:
                sizes.append(gap)
            places.append(len(sizes))
            sizes.append(numel)
            at += gap + numel
        return [*sizes, self._flat.shard_numel - at], places

    def keep(self, index: int, local: Tensor) -> ShardedTensor:
        """One parameter's range that comes by itself, as what the parameter keeps."""
        # Others' gradients may keep a shard alive whose range for this one was never anybody's.
        at = None if index in self._claimed else self._find()
        grad = self._apart(index) if at is None else self.claim(index, at)
        grad._local.copy_(local)
        return grad

    def _apart(self, index: int) -> ShardedTensor:
        """Memory for one gradient, where no shard can hold it."""
        made = torch.empty(self.spans[index][1], dtype=self._kind.master, device=self._kind.device)
        hold(self._flat, made)
        return ShardedTensor(made, self._flat.specs[index])

    def adopt(self, index: int, grad: ShardedTensor) -> ShardedTensor:
        """A gradient that was made on the device, as what the parameter keeps."""
        return grad

    def values(self) -> Tensor:
        """The reserved shard in memory; short-lived where it is kept on disk.  Writes reach it."""
        at: Tensor = self.at
        return at

    def overwritten(self) -> Tensor:
        """The reserved shard for whoever writes all of it: what it held is not read."""
        return self.values()

    def put(self, start: int, values: Tensor, *, add: bool) -> None:
        """Set, or add to, a run of the reserved shard; ``values`` [1-D] are on the device."""
        target = self.values()[start : start + values.numel()]
        target.add_(values.to(target.device)) if add else target.copy_(values)


class StoreShard(GradientShard):
    """The range in blocks of a store: a gradient is complete on the device before it goes there."""

    def _fresh(self) -> Any:
        self.at, self._claimed = None, set()
        name, numel, tier = f"gradient/{self._flat.name}", self._flat.shard_numel, self._kind.tiers.gradient
        made = cast(Store, self._flat.store).put(name, numel, self._kind.master, tier)
        self._find = weakref.ref(made)
        return made

    def claim(self, index: int, at: Any = None) -> ShardedTensor:
        self._claimed.add(index)
        with torch.inference_mode(False):
            run = BlockRange(self.at if at is None else at, *self.spans[index])
            return ShardedTensor(run, self._flat.specs[index])

    def fill(self, given: Sequence[tuple[int, Tensor]]) -> list[ShardedTensor]:
        return [self.keep(index, local) for index, local in given]

    def _apart(self, index: int) -> ShardedTensor:
        return self.claim(index, self._fresh())

    def adopt(self, index: int, grad: ShardedTensor) -> ShardedTensor:
        return self.keep(index, grad._local)

    def values(self) -> Tensor:
        return cast(Tensor, self.at.tensor())

    def overwritten(self) -> Tensor:
        return cast(Tensor, self.at.tensor(Mode.WRITE_ALL))

    def put(self, start: int, values: Tensor, *, add: bool) -> None:
        if values.numel() == self._flat.shard_numel:
            cast(Store, self._flat.store).change(self.at, values, add=add)
        else:
            super().put(start, values, add=add)


def shard_of(flat: Flat, pool: Pool) -> GradientShard:
    """The memory of one flat's gradients, without any yet."""
    stored = flat.kind.tiers.gradient is not Tier.DEVICE and flat.layout.padded > 0
    return (StoreShard if stored else GradientShard)(flat, pool)


def hold(flat: Flat, tensor: Tensor, what: str = "gradient on device") -> None:
    """Let observers know what the memory of ``tensor`` is for."""
    if flat.bus.active:
        flat.bus.hold(what, flat.name, tensor.untyped_storage())


def _while_it_lives(shard: Tensor) -> Callable[[], Tensor | None]:
    """The shard again, by its memory, as long as something keeps that."""
    # Not a StorageWeakRef: under torch 2.8 it would keep the storage's Python object, by whose end observers know the memory's.
    known, dtype, device = weakref.ref(shard.untyped_storage()), shard.dtype, shard.device
    offset, numel = int(shard.storage_offset()), shard.numel()

    def find() -> Tensor | None:
        storage = known()
        if storage is None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, (numel,), (1,))

    return find
