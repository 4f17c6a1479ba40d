"""One flat buffer's gradient: from what autograd hands over to the parameters' ``.grad``.

``reduce.py`` fills it; ``reduction.py`` takes what was added up and brings back this rank's range of the mean, which lies in
a ``Storage`` as values do, in memory on the device or in a block of the gradient's tier.

Note: [Handed out once]
    The storage is ours from ``reserve`` until its ranges have become parameters' gradients; then it is theirs, and we know it
    by weak references alone.  So it goes with the last of them (``zero_grad``), nobody's is ever overwritten, and no count of
    references says whose it is.  A range that no parameter has claimed yet may be handed out later, as long as the others
    keep the storage alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from offload.device import CommContext
from offload.errors import ShardedOpError
from offload.memory import Use
from offload.store import Block
from offload.tier import Tier
from zhooks.comm import Chunk, chunks_of, in_order, read
from zhooks.grad.stacks import in_backward
from zhooks.grad.user_hooks import has_hooks, hooked
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Pool, Storage

__all__ = ["GradBuffer", "Into"]


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


class GradBuffer:
    """One flat buffer's gradient: the partial sum of this rank, and the reduced range behind the parameters' ``.grad``.

    A parameter that is larger than any buffer may be passes through buffers of bounded size, chunk by chunk: what autograd
    hands over stays autograd's own until chunks are filled from it, unless the sum is held back.

    Args:
        context: whose adding stream takes the memory.
        reduce: reduces what is held back of all flat buffers.
        returned: it becomes nobody's ``.grad``: autograd.grad returns it.
    Attributes:
        chunks: what is sent at once, in order; see Note [Chunks] in reduction.py.
        chunk_numel: elements of the buffer that a chunk is sent from.
        moved_nbytes: payload of one reduction.
        partial, present: what was added up and not taken yet, and for which parameters there was something.
        direct: what adds up or reduces gradients may write where they are kept: on the device, in their dtype.
        storage: holds the reduced range, or is about to receive it, until it is handed over to the parameters.
    """

    def __init__(
        self, flat: Flat, pool: Pool, context: CommContext[Any], reduce: Callable[[], None], *, returned: bool = False
    ) -> None:
        self.flat, self._pool, self.context, self.reduce, self._returned = flat, pool, context, reduce, returned
        kept, world = flat.group.layout, flat.layout.world
        self.chunks: Sequence[Chunk] = (Chunk(0, flat.shard_numel, (), flat.layout),)
        # Every chunk takes buffers of the same size, the last too: so the next one has them again.
        self.chunk_numel = flat.pool.bound // flat.kind.wide if flat.long else flat.layout.padded
        if flat.long:
            self.chunks = tuple(chunks_of(kept, self.chunk_numel, kept.align * world // kept.world, world=world))
        # A replicated gradient is gathered again when its ranges are reduced.
        self.moved_nbytes = flat.plan.sum_nbytes * (1 if flat.sharded else 2 if world > 1 else 0)
        self.present = [False] * len(flat.params)
        self.partial: Tensor | None = None
        # Of a long parameter, what autograd has handed over.
        self._given: list[Tensor] = []
        self._drops = [0] * len(flat.params)
        self.direct = flat.kind.reduces_in_place
        self.storage: Storage | None = None
        # Parameters whose ranges of the last storage are, or were, gradients, and how to find it while they live.
        self._claimed: set[int] = set()
        self._find: Callable[[], Tensor | Block | None] = lambda: None

    # What this rank adds up.

    def add(self, grads: Sequence[Tensor | None], *, held: bool = False) -> None:
        """Take what autograd hands over, one a parameter, into the partial sum: one pass over each, cast on the way.

        Args:
            held: the sum is held back, and others are to be added.
        """
        flat, present = self.flat, self.present
        if flat.long and not held:
            self._given.extend(grad for grad in grads if grad is not None)
            present[0] = present[0] or bool(self._given)
            return
        if self.partial is None:
            # Where nothing is copied between the partial sum and the storage, they are one.
            own = self.reserve() if self.direct and not flat.sharded and not self.apart else None
            self.partial = self._clear(self.buffer(flat.layout.padded) if own is None else own.open())
        for index, (grad, spec, start) in enumerate(zip(grads, flat.specs, flat.layout.starts, strict=True)):
            if grad is None:
                continue
            if present[index]:
                spec.within(self.partial, start).add_(grad)
            else:
                spec.within(self.partial, start).copy_(grad)
                present[index] = True

    def take(self) -> list[Tensor]:
        """What was added since the last reduction, to be summed up in this order; what comes next starts anew.

        The whole partial sum, with zeros where this rank had no gradient; of a long parameter what was held back and what was
        given since, none where this rank had no gradient.
        """
        flat, partial, present, given = self.flat, self.partial, self.present, self._given
        self.partial, self.present, self._given = None, [False] * len(flat.params), []
        if flat.long:
            return ([] if partial is None else [partial]) + given if present[0] else []
        if partial is None:
            partial = self._clear(self.buffer(flat.layout.padded))
        if not all(present):
            for start, numel, there in zip(flat.layout.starts, flat.layout.numels, present, strict=True):
                if not there:
                    partial[start : start + numel].zero_()
        return [partial]

    def fill(self, taken: Sequence[Tensor], chunk: Chunk, out: Tensor) -> None:
        """Write what this rank sends of a chunk of what was ``taken`` into ``out``, rank after rank; of a long parameter."""
        done = self._fill_runs(taken, chunk, out)
        for start, part in zip(chunk.starts[done:], out.split(chunk.numel)[done:], strict=True):
            self._fill(taken, start, part)

    def _fill_runs(self, taken: Sequence[Tensor], chunk: Chunk, own: Tensor) -> int:
        """The ranks' runs that lie inside the parameter, by one copy instead of one each; how many these are."""
        inside = sum(start + chunk.numel <= self.flat.layout.numels[0] for start in chunk.starts)
        spec, out = self.flat.specs[0], own[: inside * chunk.numel].view(inside, chunk.numel)
        sources = [in_order(tensor, spec.part_stride) if tensor.shape == spec.part_shape else tensor for tensor in taken]
        if inside < 2 or not sources or not all(source.is_contiguous() for source in sources):
            return 0
        step = chunk.starts[1] - chunk.starts[0]
        for number, source in enumerate(sources):
            runs = source.view(-1)[chunk.starts[0] :].as_strided(out.shape, (step, 1))
            out.add_(runs) if number else out.copy_(runs)
        return inside

    def _fill(self, taken: Sequence[Tensor], start: int, out: Tensor) -> None:
        """Elements of the flat buffer from ``start`` on: the first tensor copied, others added, zeros past their end."""
        spec = self.flat.specs[0]
        known = min(max(self.flat.layout.numels[0] - start, 0), out.numel()) if taken else 0
        for number, tensor in enumerate(taken):
            if number == 0 and tensor.data_ptr() + start * tensor.element_size() == out.data_ptr():
                continue  # what no_sync summed up lies where it is to be reduced
            values = in_order(tensor, spec.part_stride) if tensor.shape == spec.part_shape else tensor
            read(values, start, out[:known], add=number > 0)
        if known < out.numel():
            out[known:].zero_()

    def resume(self, partial: Tensor | None, present: Sequence[bool]) -> None:
        """Go on from a partial sum [padded] that was saved, instead of what was added up here."""
        if self.partial is not None:
            self.give_back(self.partial)
            self.hand_over()
        self.partial, self.present = partial, list(present)

    # What the user does to a sum that is held back (tensor.group.HeldSums).

    def holds(self, index: int) -> bool:
        return self.partial is not None and self.present[index] and not in_backward()

    def drops(self, index: int) -> int:
        return self._drops[index]

    def drop(self, index: int) -> None:
        self._drops[index] += 1
        if self.holds(index):
            self.present[index] = False
            if not any(self.present):
                self.resume(None, self.present)

    def zero(self, index: int) -> None:
        assert self.partial is not None
        self.flat.specs[index].within(self.partial, self.flat.layout.starts[index]).zero_()

    @property
    def held_nbytes(self) -> int:
        """Bytes that the adding stream takes for its reduction, or autograd for a long parameter; 0 where it is sent from where
        it is kept."""
        in_place = self.direct and not self.flat.sharded and not self.apart
        return 0 if in_place and not self.flat.long else self.flat.plan.sum_nbytes

    def buffer(self, numel: int, what: str = "gradient on device") -> Tensor:
        """An uninitialised buffer, 1-D in the reduce dtype: one of the pool's, on the stream that gradients are added up on."""
        kind = self.flat.kind
        if self._returned:
            return torch.empty(numel, dtype=kind.reduce, device=kind.device)
        with self.context.taking():
            return self._held(self._pool.take(numel, kind.reduce, kind.device, Use.SUMS), what)

    def _held(self, memory: Tensor, what: str = "gradient on device") -> Tensor:
        """Let observers know what the memory is for."""
        if self.flat.bus.active:
            self.flat.bus.hold(what, self.flat.name, memory.untyped_storage())
        return memory

    def give_back(self, buffer: Tensor) -> None:
        if buffer is not self.at:
            self._pool.give(buffer)

    def _clear(self, buffer: Tensor) -> Tensor:
        """What no parameter fills must not look like an overflow."""
        for start, stop in self._gaps:
            buffer[start:stop].zero_()
        return buffer

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        """What of the flat buffer is no parameter's."""
        layout = self.flat.layout
        ends = [start + numel for start, numel in zip(layout.starts, layout.numels, strict=True)]
        return [(end, start) for end, start in zip(ends, [*layout.starts[1:], layout.padded], strict=True) if end < start]

    # Where the mean over the ranks is kept; see Note [Handed out once].

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Where every parameter's range lies in the storage: start and numel."""
        return [self.flat.span(index) for index in range(len(self.flat.specs))]

    @cached_property
    def _stored(self) -> bool:
        """It is kept in blocks: complete on the device before it goes there."""
        return self.flat.kind.tiers.gradient is not Tier.DEVICE and self.flat.layout.padded > 0

    @property
    def at(self) -> Tensor | Block | None:
        """The storage's memory."""
        return None if self.storage is None else self.storage.at

    def reserve(self) -> Storage | None:
        """Another storage for the next gradient; None where a parameter has one, or one is to come."""
        if self.storage is not None or any(param.grad is not None for param in self.flat.params):
            return None
        self.storage = self._fresh()
        return self.storage

    def _fresh(self) -> Storage:
        """Uninitialised; the last one, where somebody keeps it, lives as long as the gradients in it."""
        self._claimed = set()
        flat, kind = self.flat, self.flat.kind
        if self._stored:
            assert flat.store is not None
            block = flat.store.put(f"gradient/{flat.name}", flat.shard_numel, kind.master, kind.tiers.gradient)
            self._find = weakref.ref(block)
            return Storage(block, flat.store)
        with self.context.taking():
            made = self._held(self._pool.lasting(flat.shard_numel, kind.master, kind.device, Use.GRADIENTS))
        self._find = _while_it_lives(made)
        return Storage(made, None)

    def hand_over(self) -> None:
        """The storage belongs to the gradients in it from now on."""
        self.storage = None

    def claim(self, index: int, storage: Storage | None = None) -> ShardedTensor:
        """One parameter's range of the storage, the reserved one or another, for its ``.grad``."""
        storage = self.storage if storage is None else storage
        assert storage is not None
        self._claimed.add(index)
        with torch.inference_mode(False):
            return ShardedTensor(storage.slice(*self._spans[index]), self.flat.specs[index])

    def keep(self, index: int, local: Tensor) -> ShardedTensor:
        """One parameter's range that comes by itself, as what the parameter keeps."""
        # Others' gradients may keep a storage alive whose range for this one was never anybody's.
        at, flat = None if index in self._claimed else self._find(), self.flat
        if at is not None or self._stored:
            grad = self.claim(index, self._fresh() if at is None else Storage(at, flat.store))
        else:
            memory = torch.empty(self._spans[index][1], dtype=flat.kind.master, device=flat.kind.device)
            grad = ShardedTensor(self._held(memory), flat.specs[index])
        grad.local_shard.values.copy_(local)
        return grad

    def add_alone(self, grads: Sequence[Tensor | None]) -> None:
        """No other rank takes part: write each gradient where the parameter's ``.grad`` lives."""
        flat = self.flat
        given = [(index, flat.specs[index].storage_order(grad)) for index, grad in enumerate(grads) if grad is not None]
        fresh = self.reserve()
        try:
            if fresh is not None and given and not (self._stored or has_hooks(flat)):
                self._fill_all(fresh.open(), given)
            else:
                for index, local in given:
                    self.land(index, local)
        finally:
            if fresh is not None:
                self.hand_over()

    def _fill_all(self, shard: Tensor, given: Sequence[tuple[int, Tensor]]) -> None:
        """Set the ranges of these parameters, and claim them.  All at once: of small ones calls are the cost."""
        sizes, places = self._runs
        with torch.inference_mode(False):
            runs = shard.split_with_sizes(sizes)
            ranges = [runs[places[index]] for index, _ in given]
            torch._foreach_copy_(ranges, [local for _, local in given])
            self._claimed.update(index for index, _ in given)
            for (index, _), mine in zip(given, ranges, strict=True):
                self.flat.params[index].grad = ShardedTensor(mine, self.flat.specs[index])

    @cached_property
    def _runs(self) -> tuple[list[int], list[int]]:
        """How the storage is divided into parameters' ranges and gaps between them, and which of these runs the former are."""
        sizes, places, at = list[int](), list[int](), 0
        for start, numel in self._spans:
            # A parameter without elements is anywhere.
            gap = start - at if numel else 0
            if gap:
                sizes.append(gap)
            places.append(len(sizes))
            sizes.append(numel)
            at += gap + numel
        return [*sizes, self.flat.shard_numel - at], places

    # Where the mean over the ranks lands.

    @property
    def apart(self) -> bool:
        """What is reduced is kept apart until all of it is there: for the user's hooks, or to be returned."""
        return self._returned or has_hooks(self.flat)

    def choose(self) -> Into:
        """Where a range goes that has been reduced now."""
        if self.apart:
            return Into.APART
        if self.reserve() is not None:
            return Into.SHARD
        return Into.GRADS if self.storage is None else Into.SHARD_AGAIN

    def put(self, into: Into, start: int, reduced: Tensor) -> list[int]:
        """Put ``reduced`` at ``start`` of this rank's range; returns the parameters that it did not reach: they had no gradient
        where others have."""
        if into is not Into.GRADS:
            assert self.storage is not None
            self.storage.put(start, reduced, add=into is Into.SHARD_AGAIN)
            return []
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

    def claim_used(self, used: Sequence[int]) -> None:
        """The storage's ranges become the gradients of the parameters that some rank has used, and that have none."""
        if self.storage is None or self.flat.spent:
            return
        for index, param in enumerate(self.flat.params):
            if used[index] and param.grad is None:
                param.grad = self.claim(index)

    def land(self, index: int, local: Tensor) -> None:
        """Set or add one parameter's reduced range, by way of the user's hooks."""
        spec, param = self.flat.specs[index], self.flat.params[index]
        if spec.hooks or spec.post_hooks:
            grad = hooked(ShardedTensor(local.to(self.flat.kind.master, copy=True), spec))
            if param.grad is not None:
                param.grad.add_(grad)
            else:
                # Made on the device, it moves to the gradient's tier.
                param.grad = self.keep(index, grad.local_shard.values) if self._stored else grad
            for hook in tuple(spec.post_hooks.values()):
                hook(param)
        elif param.grad is not None:
            mine = self._local_of(index)
            mine.add_(local.to(mine.device))
        else:
            param.grad = self.keep(index, local)

    def _local_of(self, index: int) -> Tensor:
        """This rank's range of the gradient that a parameter has."""
        grad = self.flat.params[index].grad
        if not isinstance(grad, ShardedTensor):
            raise ShardedOpError(
                f"Cannot add to {self.flat.specs[index].name}.grad. Expected a sharded gradient to add to, found a plain "
                "tensor that was assigned. Assign it after backward, or torch.zeros_like(parameter) and add to that, or set "
                "grad to None."
            )
        return grad.local_shard.values


def _while_it_lives(memory: Tensor) -> Callable[[], Tensor | None]:
    """The tensor again, by its memory, as long as something keeps that."""
    # Not a StorageWeakRef: under torch 2.8 it would keep the storage's Python object, by whose end observers know the memory's.
    known, dtype, device = weakref.ref(memory.untyped_storage()), memory.dtype, memory.device
    offset, numel = int(memory.storage_offset()), memory.numel()

    def find() -> Tensor | None:
        storage = known()
        if storage is None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, (numel,), (1,))

    return find
