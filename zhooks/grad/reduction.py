"""One reduction of one gradient: what this rank has added up is sent, and its range of the mean over the ranks comes back.

``reduce.py`` starts and lands it, on every rank at the same place of its canonical order.  It never waits for other ranks.

Note: [Chunks]
    A flat buffer is reduced in chunks, each the same stretch of every rank's range: one, which is the partial sum as it lies,
    or several that are filled one after the other where a single parameter is larger than any buffer may be.  A chunk holds
    the same elements of every rank's range as the whole would, cast and added in the same order, and transports that add in
    rank order (shm, p2p) do so element by element: how a gradient is divided does not show in it.  The backend's own
    collectives promise no order of additions, divided or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.device import beside
from offload.events import During, TimeMark
from offload.work import during
from zhooks.comm import DONE, REDUCE, Call, Chunk, Transport, Work
from zhooks.grad.grad_buffer import GradBuffer, Into
from zhooks.grad.reduce_hooks import ReduceHooks
from zhooks.grad.replicas import ReplicaSums
from zhooks.unit import Flat

__all__ = ["Probe", "Reduction", "Sent"]


class Probe(Protocol):
    """Who compares gradients before and after their reduction (``report/noise_scale.py``)."""

    def adds(self) -> None:
        """A backward adds something to gradients that become ``.grad``, which is not written yet."""

    def sends(self, flat: Flat, start: int, partial: Tensor) -> None:
        """A chunk of what this rank has added up, from ``start`` of its range on, is about to be reduced."""

    def landed(self, sent: Sent, mean: Tensor) -> None:
        """The mean of that chunk over the ranks has come back."""

    def backward_over(self, *, held: bool) -> None:
        """A backward has ended; ``held``: its gradients are not reduced yet.  Collective where they are."""


class Reduction:
    """One reduction of ``gradient`` over the ranks of ``transport``.

    Args:
        ranks: what the sum is divided by.
        hooks: the user's, who see what is sent.
        before: what this rank sends is divided first, for the sum would overflow.
        what: the verb it is called by.
    """

    def __init__(
        self,
        gradient: GradBuffer,
        transport: Transport,
        ranks: int,
        hooks: ReduceHooks,
        *,
        before: bool = False,
        what: str = "reduce",
    ) -> None:
        self._hooks = hooks
        flat = gradient.flat
        self.gradient, self._transport = gradient, transport
        self.ranks, self._before = (1, 1.0 / ranks) if before else (ranks, 1.0)
        self._call = Call(REDUCE, what, flat.name, flat.number)
        self._every = all(gradient.present)
        self._taken = gradient.take()
        self._left = len(gradient.chunks)
        #: Where the range goes; None until it is known, when the first chunk lands.
        self.into: Into | None = None
        #: The range that is to be landed when all ranks are known to be done, and in the gradients of which parameters.
        self.result: Tensor | None = None
        self.missing: Sequence[int] = ()
        self._begun: TimeMark | None = None
        self._over: During | None = None
        # The range that chunks are received in, where what comes back is what is kept.
        self._target: Tensor | None = None
        if gradient.direct:
            if self._taken and self._taken[0] is gradient.at:
                self.into, self._target = Into.SHARD, self._taken[0]
            elif gradient.apart:
                self._target = self._apart()
            elif (shard := gradient.reserve()) is not None:
                self.into, self._target = Into.SHARD, shard.open()

    def _apart(self) -> Tensor:
        flat = self.gradient.flat
        self.into, self.missing = Into.APART, range(len(flat.params))
        self.result = torch.empty(flat.shard_numel, dtype=flat.kind.master, device=flat.kind.device)
        return self.result

    def start(self, chunk: Chunk, probe: Probe | None = None) -> Sent:
        """Start summing a chunk over the ranks; ``probe`` sees what is sent."""
        gradient = self.gradient
        own = None if self._target is None else chunk.of(self._target)
        partial = gradient.sent(self._taken, chunk, own)
        if probe is not None:
            probe.sends(gradient.flat, chunk.local, partial)
        self._hooks.sending(gradient.flat.name, partial)
        if self._before != 1.0:
            partial.mul_(self._before)
        if partial.numel() == chunk.numel:
            # Every rank's range is all of it: the sum is made where the partial sum lies.
            out, work = partial, self._transport.all_reduce_flat(self._call, partial, chunk.layout)
        else:
            out = gradient.landing(chunk) if own is None else own
            work = self._transport.reduce_scatter(self._call, partial, out, chunk.layout)
        return Sent(self, chunk, work, partial, out, out is own)

    def timed(self, work: Work) -> None:
        """An observer keeps time, and this is the next of its works."""
        found = during(work)
        if self._begun is None and found is not None:
            self._begun = found.begin
        self._over = found

    @property
    def during(self) -> During | None:
        """From the begin of its first work to the end of its last, where a stream says so."""
        return None if self._over is None else During(self._begun, self._over.end)

    def land(self, sent: Sent, mean: Tensor) -> bool:
        """The mean of a chunk over the ranks is here; whether it was the last chunk."""
        gradient, partial, out = self.gradient, sent.partial, sent.out
        if not sent.received:
            self._put(sent.chunk, mean)
            if out is not partial:
                gradient.give_back(out)
        if out is not partial or not sent.received:
            gradient.give_back(partial)
        self._left -= 1
        if self._left:
            return False
        self._taken = []
        return True

    def _put(self, chunk: Chunk, mean: Tensor) -> None:
        """Put a chunk where it belongs, as that is found at the first one."""
        if self.into is None:
            self.into = self.gradient.choose()
        if self.into is Into.APART:
            result = self._apart() if self.result is None else self.result
            chunk.of(result).copy_(mean)
        elif missing := self.gradient.put(self.into, chunk.local, mean):
            self.result, self.missing = mean.clone(), missing

    @property
    def complete(self) -> bool:
        """The shard holds what it has reduced, and this rank had a gradient for every parameter."""
        return self._every and (self.into is Into.SHARD or self.into is Into.SHARD_AGAIN)

    @property
    def claims(self) -> bool:
        """Parameters get gradients of it when all ranks are known to be done."""
        return self.into is Into.SHARD or self.result is not None

    def finish(self, used: Sequence[int]) -> None:
        """Every rank is done, and some rank has used these parameters: they get what they have not got yet."""
        if self.into is Into.SHARD:
            self.gradient.claim_used(used)
        elif self.result is not None:
            for index in self.missing:
                if used[index]:
                    self.gradient.land(index, self.gradient.flat.local(index, self.result))


@dataclass(slots=True)
class Sent:
    """A chunk under way: ``partial`` is sent, ``out`` is where its sum will be, which ``received`` says is where it belongs."""

    reduction: Reduction
    chunk: Chunk
    work: Work
    partial: Tensor
    out: Tensor
    received: bool
    #: The sum over the replicas has been started: ``work`` is that.
    replicas: bool = False

    @property
    def sent_nbytes(self) -> int:
        """Bytes it is sent from, apart from the gradient's own memory."""
        return 0 if self.received and self.out is self.partial else self.partial.nbytes

    @property
    def landing_nbytes(self) -> int:
        """Bytes it lands in, apart from the gradient's own memory and what it is sent from."""
        return 0 if self.received or self.out is self.partial else self.out.nbytes

    def begin_replicas(self, replicas: ReplicaSums) -> None:
        """When the sum of its range is there, start adding it up over the replicas, in place.  Collective over them.

        The caller's stream waits for neither before it waits for ``work``.
        """
        self.replicas = True
        if not replicas.several:
            return
        flat, out = self.reduction.gradient.flat, self.out
        with beside(out.device, "reduce"):
            self.work.wait()
            self.work = replicas.add_up(Call(REDUCE, "reduce replicas", flat.name, flat.number), out)

    def wait(self) -> None:
        """Until its sum is there."""
        try:
            self.work.wait()
        finally:
            self.work = DONE  # what it keeps of the buffers would keep them from the pool
