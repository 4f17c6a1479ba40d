"""One flat buffer's gradient: from what autograd hands over to the parameters' ``.grad``.

``reduce.py`` fills it, ``reduction.py`` takes what was added up and brings back this rank's range of the mean.  Where that is
kept, on the device or on a tier, is for ``shard.py`` to know.  It never communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from offload.errors import ShardedOpError
from offload.memory import Use
from zhooks.comm import Chunk, chunks_of, in_order, read
from zhooks.grad.shard import hold, shard_of
from zhooks.grad.stacks import in_backward
from zhooks.grad.user_hooks import has_hooks, hooked
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Pool

__all__ = ["Gradient", "Into", "gradient_of"]


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
        reduce: reduces what is held back of all flat buffers.
        returned: it becomes nobody's ``.grad``: autograd.grad returns it.
    Attributes:
        shard: where the reduced range is kept.
        chunks: what is sent at once, in order; see Note [Chunks] in reduction.py.
        moved_nbytes: payload of one reduction.
        partial, present: what was added up and not taken yet, and for which parameters there was something.
    """

    def __init__(self, flat: Flat, pool: Pool, reduce: Callable[[], None], *, returned: bool = False) -> None:
        self.flat, self._pool, self._reduce, self._returned = flat, pool, reduce, returned
        self.shard = shard_of(flat, pool)
        self.chunks: Sequence[Chunk] = (Chunk(0, flat.shard_numel, (), flat.layout),)
        # A replicated gradient is gathered again when its ranges are reduced.
        self.moved_nbytes = flat.sum_nbytes * (1 if flat.sharded else 2 if flat.layout.world > 1 else 0)
        self.present = [False] * len(flat.params)
        self.partial: Tensor | None = None
        self._drops = [0] * len(flat.params)
        # Nothing is copied between the partial sum and the shard: they are one.
        self._sums_in_shard = self.shard.direct and not flat.sharded

    # What this rank adds up.

    def add(self, grads: Sequence[Tensor | None], *, held: bool = False) -> None:
        """Take what autograd hands over, one a parameter, into the partial sum: one pass over each, cast on the way.

        Args:
            held: the sum is held back, and others are to be added.
        """
        flat = self.flat
        if self.partial is None:
            own = self._sums_in_shard and not self.apart and self.shard.reserve()
            self.partial = self._clear(self.shard.values() if own else self.buffer(flat.layout.padded))
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

        Here the whole partial sum, with zeros where this rank had no gradient.
        """
        flat, partial, present = self.flat, self.partial, self.present
        self.partial, self.present = None, [False] * len(flat.params)
        if partial is None:
            partial = self._clear(self.buffer(flat.layout.padded))
        if not all(present):
            for start, numel, there in zip(flat.layout.starts, flat.layout.numels, present, strict=True):
                if not there:
                    partial[start : start + numel].zero_()
        return [partial]

    def sent(self, taken: Sequence[Tensor], chunk: Chunk, own: Tensor | None) -> Tensor:
        """What this rank sends of a chunk of what was ``taken``; ``own`` is where its own range of the sum is to be."""
        return taken[0]

    def landing(self, chunk: Chunk) -> Tensor:
        """A buffer for this rank's range of the sum of a chunk."""
        return self.buffer(chunk.numel, "communication on device")

    def resume(self, partial: Tensor | None, present: Sequence[bool]) -> None:
        """Go on from a partial sum [padded] that was saved, instead of what was added up here."""
        if self.partial is not None:
            self.give_back(self.partial)
            self.shard.reserved = False
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

    def reduce(self) -> None:
        self._reduce()

    def buffer(self, numel: int, what: str = "gradient on device") -> Tensor:
        """An uninitialised buffer, 1-D in the reduce dtype: one of the pool's, which are used under a backward's one stream."""
        flat = self.flat
        if self._returned:
            return torch.empty(numel, dtype=flat.kind.reduce, device=flat.kind.device)
        taken = self._pool.take(numel, flat.kind.reduce, flat.kind.device, Use.SUMS)
        hold(flat, taken, what)
        return taken

    def give_back(self, buffer: Tensor) -> None:
        if buffer is not self.shard.at:
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

    # Where the mean over the ranks lands.

    @property
    def apart(self) -> bool:
        """What is reduced is kept apart until all of it is there: for the user's hooks, or to be returned."""
        return self._returned or has_hooks(self.flat)

    def choose(self) -> Into:
        """Where a range goes that has been reduced now."""
        if self.apart:
            return Into.APART
        if self.shard.reserve():
            return Into.SHARD
        return Into.SHARD_AGAIN if self.shard.reserved else Into.GRADS

    def put(self, into: Into, start: int, reduced: Tensor) -> list[int]:
        """Put ``reduced`` at ``start`` of this rank's range; returns the parameters that it did not reach: they had no gradient
        where others have."""
        if into is Into.GRADS:
            return self._add_to_grads(start, reduced)
        self.shard.put(start, reduced, add=into is Into.SHARD_AGAIN)
        return []

    def _add_to_grads(self, start: int, reduced: Tensor) -> list[int]:
        missing, stop = [], start + reduced.numel()
        for index, (begin, numel) in enumerate(self.shard.spans):
            if self.flat.params[index].grad is None:
                missing.append(index)
                continue
            mine, low, high = self._local_of(index), max(begin, start), min(begin + numel, stop)
            if low < high:
                mine = mine if high - low == numel else mine[low - begin : high - begin]
                mine.add_(reduced[low - start : high - start].to(mine.device))
        return missing

    def claim(self, used: Sequence[int]) -> None:
        """The shard's ranges become the gradients of the parameters that some rank has used, and that have none."""
        if self.shard.at is None or self.flat.spent:
            return
        for index, param in enumerate(self.flat.params):
            if used[index] and param.grad is None:
                param.grad = self.shard.claim(index)

    def land(self, index: int, local: Tensor) -> None:
        """Set or add one parameter's reduced range, by way of the user's hooks."""
        spec, param = self.flat.specs[index], self.flat.params[index]
        if spec.hooks or spec.post_hooks:
            grad = hooked(ShardedTensor(local.to(self.flat.kind.master, copy=True), spec))
            if param.grad is not None:
                param.grad.add_(grad)
            else:
                param.grad = self.shard.adopt(index, grad)
            for hook in tuple(spec.post_hooks.values()):
                hook(param)
        elif param.grad is not None:
            mine = self._local_of(index)
            mine.add_(local.to(mine.device))
        else:
            param.grad = self.shard.keep(index, local)

    def add_alone(self, grads: Sequence[Tensor | None]) -> None:
        """No other rank takes part: write each gradient where the parameter's ``.grad`` lives."""
        specs, shard = self.flat.specs, self.shard
        given = [(index, specs[index].storage_order(grad)) for index, grad in enumerate(grads) if grad is not None]
        fresh = shard.reserve()
        try:
            if fresh and not has_hooks(self.flat):
                for (index, _), grad in zip(given, shard.fill(given), strict=True):
                    self.flat.params[index].grad = grad
            else:
                for index, local in given:
                    self.land(index, local)
        finally:
            if fresh:
                shard.hand_over()

    def _local_of(self, index: int) -> Tensor:
        """This rank's range of the gradient that a parameter has."""
        grad = self.flat.params[index].grad
        if not isinstance(grad, ShardedTensor):
            raise ShardedOpError(
                f"Cannot add to {self.flat.specs[index].name}.grad. Expected a sharded gradient to add to, found a plain "
                "tensor that was assigned. Assign it after backward, or torch.zeros_like(parameter) and add to that, or set "
                "grad to None."
            )
        return grad._local


class LongGradient(Gradient):
    """That of one parameter larger than any buffer may be: it passes through buffers of bounded size, chunk by chunk.

    What autograd hands over stays autograd's own until the chunks are filled from it, unless the sum is held back.
    """

    def __init__(self, flat: Flat, pool: Pool, reduce: Callable[[], None], *, returned: bool = False) -> None:
        super().__init__(flat, pool, reduce, returned=returned)
        # Every chunk takes buffers of the same size, the last too: so the pool has them again.
        self._most = flat.pool.bound // flat.kind.wide
        kept, world = flat.group.layout, flat.layout.world
        self.chunks = tuple(chunks_of(kept, self._most, kept.align * world // kept.world, world=world))
        self._given: list[Tensor] = []

    def add(self, grads: Sequence[Tensor | None], *, held: bool = False) -> None:
        if held:
            super().add(grads, held=held)
            return
        self._given.extend(grad for grad in grads if grad is not None)
        self.present[0] = self.present[0] or bool(self._given)

    def take(self) -> list[Tensor]:
        """The sum that was held back and what was given since; none where this rank had no gradient."""
        partial, given, present = self.partial, self._given, self.present
        self.partial, self._given, self.present = None, [], [False]
        return ([] if partial is None else [partial]) + given if present[0] else []

    def sent(self, taken: Sequence[Tensor], chunk: Chunk, own: Tensor | None) -> Tensor:
        if own is None or len(chunk.starts) > 1:
            own = self.buffer(self._most)[: chunk.layout.padded]
        done = self._fill_runs(taken, chunk, own)
        for start, out in zip(chunk.starts[done:], own.split(chunk.numel)[done:], strict=True):
            self._fill(taken, start, out)
        return own

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

    def landing(self, chunk: Chunk) -> Tensor:
        return self.buffer(self._most // self.flat.layout.world, "communication on device")[: chunk.numel]


def gradient_of(flat: Flat, pool: Pool, reduce: Callable[[], None], *, returned: bool = False) -> Gradient:
    """The gradient of one flat buffer, without memory yet; ``reduce`` reduces what is held back."""
    return (LongGradient if flat.long else Gradient)(flat, pool, reduce, returned=returned)
