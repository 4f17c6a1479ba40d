"""One reduction of one gradient: what this rank has added up is sent, and its range of the mean over the ranks comes back.

``reduce.py`` starts and lands it, on every rank at the same place of its canonical order.  The user's hooks see what is sent
and what comes back; ``ReplicaSums`` adds it up over copies of this part of the model: the ``replicate`` axis of the mesh, or
other jobs that an integration knows.

Note: [Chunks]
    A flat buffer is reduced in chunks, each the same stretch of every rank's range: one, which is the partial sum as it lies,
    or several that are filled one after the other where a single parameter is larger than any buffer may be.  A chunk holds
    the same elements of every rank's range as the whole would, cast and added in the same order, and transports that add in
    rank order (shm, p2p) do so element by element: how a gradient is divided does not show in it.  The backend's own
    collectives promise no order of additions, divided or not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from offload.errors import AttachError, ShardedOpError
from offload.events import During, TimeMark
from offload.work import during
from zhooks.comm import DONE, REDUCE, Call, Chunk, Comm, Transport, Work
from zhooks.grad.grad_buffer import GradBuffer, Into
from zhooks.layout import flat_layout
from zhooks.unit import Flat

__all__ = ["OnAxis", "Probe", "ReduceHook", "ReduceHooks", "Reduction", "ReplicaSums", "Sent", "Spare"]


ReduceHook = Callable[[str, Tensor], None]
"""Given the name of a unit's flat buffer and a 1-D tensor of its gradient, which it may change in place."""


class ReduceHooks:
    """The hooks of one attachment, in the order they were registered."""

    def __init__(self) -> None:
        self._before: OrderedDict[int, ReduceHook] = OrderedDict()
        self._after: OrderedDict[int, ReduceHook] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._before or self._after)

    def register(self, before: ReduceHook | None, after: ReduceHook | None) -> RemovableHandle:
        """Call these from now on, until the handle is removed.

        Raises:
            AttachError: neither is a function.
        """
        if (before is None and after is None) or not all(hook is None or callable(hook) for hook in (before, after)):
            raise AttachError(
                f"register_reduce_hook expected before or after to be functions of a unit's name and a tensor, found "
                f"{type(before).__name__} and {type(after).__name__}. Pass at least one."
            )
        handle = RemovableHandle(self._before, extra_dict=self._after)
        if before is not None:
            self._before[handle.id] = before
        if after is not None:
            self._after[handle.id] = after
        return handle

    def sending(self, unit: str, partial: Tensor) -> None:
        """What this rank has added up is about to be sent."""
        _call(self._before, unit, partial)

    def received(self, unit: str, reduced: Tensor) -> None:
        """This rank's range of the reduced gradient is about to be put where it belongs."""
        _call(self._after, unit, reduced)


def _call(hooks: OrderedDict[int, ReduceHook], unit: str, gradient: Tensor) -> None:
    for hook in tuple(hooks.values()):
        # Typed as returning nothing, which is for us to find out.
        returned: object = hook(unit, gradient)
        if returned is not None:
            raise ShardedOpError(
                f"The reduce hook at unit {unit} returned a value. Expected it to return None, found "
                f"{type(returned).__name__}. Change the gradient in place: a return value is not used."
            )


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


class Spare:
    """Buffers that reductions alone use, from one to the next; ``keeps`` where they have a stream of their own.

    Where they have none, the pool keeps what is not used.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._kept: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffers in self._kept.values() for buffer in buffers)

    def take(self, gradient: GradBuffer, numel: int) -> Tensor:
        """A buffer [numel] in the reduce dtype, for what is sent or lands."""
        kept = self._kept.get((numel, gradient.flat.kind.reduce))
        return kept.pop() if kept else gradient.buffer(numel, "communication on device")

    def give(self, gradient: GradBuffer, buffer: Tensor) -> None:
        """It has landed."""
        if self._keeps:
            self._kept.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)
        else:
            gradient.give_back(buffer)

    def clear(self) -> None:
        """No reduction is under way."""
        self._kept.clear()


class Reduction:
    """One reduction of ``gradient`` over the ranks of ``transport``.

    Args:
        ranks: what the sum is divided by.
        hooks: the user's, who see what is sent.
        spare: has buffers that only reductions use.
        before: what this rank sends is divided first, for the sum would overflow.
        what: the verb it is called by.
    """

    def __init__(
        self,
        gradient: GradBuffer,
        transport: Transport,
        ranks: int,
        hooks: ReduceHooks,
        spare: Spare,
        *,
        before: bool = False,
        what: str = "reduce",
    ) -> None:
        self._hooks, self._spare = hooks, spare
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
        with self.gradient.context.taking():
            self.result = torch.empty(flat.shard_numel, dtype=flat.kind.master, device=flat.kind.device)
        return self.result

    def start(self, chunk: Chunk, probe: Probe | None = None) -> Sent:
        """Start summing a chunk over the ranks; ``probe`` sees what is sent."""
        gradient, whole = self.gradient, self.gradient.chunk_numel
        own = None if self._target is None else chunk.of(self._target)
        taken: list[Tensor] = []
        if not gradient.flat.long:
            partial = self._taken[0]
        else:
            if own is None or len(chunk.starts) > 1:
                taken.append(self._spare.take(gradient, whole))
                partial = taken[0][: chunk.layout.padded]
            else:
                partial = own
            gradient.fill(self._taken, chunk, partial)
        if probe is not None:
            probe.sends(gradient.flat, chunk.local, partial)
        self._hooks.sending(gradient.flat.name, partial)
        if self._before != 1.0:
            partial.mul_(self._before)
        if partial.numel() == chunk.numel:
            # Every rank's range is all of it: the sum is made where the partial sum lies.
            out, work = partial, self._transport.all_reduce_flat(self._call, partial, chunk.layout)
        else:
            if own is None:
                taken.append(self._spare.take(gradient, whole // gradient.flat.layout.world))
            out = own if own is not None else taken[-1]
            out = out if out.numel() == chunk.numel else out[: chunk.numel]
            work = self._transport.reduce_scatter(self._call, partial, out, chunk.layout)
        return Sent(self, chunk, work, partial, out, taken, out is own)

    def give_back(self) -> None:
        """All has landed, and nothing reads what it was sent from: buffers go back to the pool."""
        taken, self._taken = self._taken, []
        for tensor in () if self.gradient.flat.long else taken:
            self.gradient.give_back(tensor)

    @property
    def held_nbytes(self) -> int:
        """Bytes that `give_back` lets go of: a partial sum or, of a long parameter, what autograd has handed over."""
        return sum(tensor.nbytes for tensor in self._taken if tensor is not self.gradient.at)

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
        if not sent.received:
            self._put(sent.chunk, mean)
        self._left -= 1
        return not self._left

    def _put(self, chunk: Chunk, mean: Tensor) -> None:
        """Put a chunk where it belongs, as that is found at the first one."""
        if self.into is None:
            self.into = self.gradient.choose()
        if self.into is Into.APART:
            result = self._apart() if self.result is None else self.result
            chunk.of(result).copy_(mean)
        elif missing := self.gradient.put(self.into, chunk.local, mean):
            with self.gradient.context.taking():
                self.result = torch.empty_like(mean)
            self.result.copy_(mean)
            self.missing = missing

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
    """A chunk under way: ``partial`` is sent, ``out`` is where its sum will be, which ``received`` says is where it belongs.

    Attributes:
        taken: the buffers that these lie in and that nobody needs once it has landed.
    """

    reduction: Reduction
    chunk: Chunk
    work: Work
    partial: Tensor
    out: Tensor
    taken: list[Tensor]
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
        """When the sum of its range is there, start adding it up over the replicas, in place.  Collective over them."""
        self.replicas = True
        if replicas.several:
            flat = self.reduction.gradient.flat
            self.work.wait()
            self.work = replicas.add_up(Call(REDUCE, "reduce replicas", flat.name, flat.number), self.out)

    def wait(self) -> None:
        """Until its sum is there."""
        try:
            self.work.wait()
        finally:
            self.work = DONE  # what it keeps of the buffers would keep them from the pool
