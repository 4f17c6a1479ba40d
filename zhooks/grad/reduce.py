"""The reductions of an attachment: unit by unit, in one canonical order on every rank, a bounded number at a time.

The ``Reducer`` is handed a unit's gradients by its node of the graph (``node.py``) once all of them are complete.
``run/runtime.py`` says when backward is over.  It never decides what is gathered.

Note: [Canonical order]
    Reductions are launched in one order on all ranks: the reverse of the units' order at first, then the order in which
    rank 0's first backward completed them.  Among replicas that are jobs of their own it stays the first, for one that comes
    later has seen no backward of the others.  A unit that is ready early waits its turn; what is left when backward ends
    is reduced in the same order, with zeros from a rank that had no gradient.  So every backward outside ``no_sync``
    reduces every unit once.  Then the ranks exchange one byte a parameter: parameters no rank used keep ``grad is None`` as
    in plain PyTorch.

Note: [Who waits for the exchange]
    A rank that had a gradient for every parameter knows the answer.  Where the device has streams it starts the exchange and
    goes on, so that in a steady step no host waits for another rank; one that left a parameter unused waits for the others.
    All wait as long as ranks have not agreed on an order, where a rider's answer is needed before the step, and once some rank
    has run a backward inside a backward: what such a one reduces again must be known to all.  What else the exchange says (of
    gathers that differ, from riders) is read where all ranks come by: at the next exchange, or a verb that is collective.

Note: [Who skips a unit]
    A rank that has enough reductions under way stands still inside its backward until the others have started theirs: on a CPU
    the host, else the stream that gradients are added up on.  So
    no rank may wait for anything else of such a rank before it has started all that is behind it in the order: neither for
    a gather further down the backward (``came_to``), nor for any exchange after it (``finish_backward`` comes first).  A unit
    that this rank skips is started with zeros once something behind it is ready, or backward comes to a later unit: autograd
    knows which nodes this backward will run.  Not before all gathers up to that unit are launched, for another rank needs
    those to complete it.  Where a node was not known yet (a checkpoint that runs a backward of its own inside this one),
    what completes after it was given up is reduced a second time at the end, and waited for from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.device import CommContext, calls_of
from offload.errors import DivergenceError, ShardedOpError
from offload.events import HERE, Bus
from zhooks.comm import Comm, Exchange, GatherControl
from zhooks.grad.accumulation import Accumulation
from zhooks.grad.grad_buffer import GradBuffer
from zhooks.grad.reduction import OnAxis, Probe, ReduceHooks, Reduction, ReplicaSums, Sent, Spare
from zhooks.grad.scaling import Scaling
from zhooks.grad.stacks import accumulates
from zhooks.grad.user_hooks import hooked
from zhooks.layout import FLATS
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Pool


class Backward(Protocol):
    """The backward pass that gradients come from (``run/runtime.py``)."""

    def backward_open(self) -> None:
        """Gradients arrive: a backward is running."""

    def backward_done(self, flat: Flat) -> None:
        """All gradients of ``flat`` are complete: nothing later in this backward reads it."""

    def backward_passed(self, unit: int) -> bool:
        """All gathers of this backward up to that unit's last are launched."""

    def reduce_held(self) -> None:
        """Reduce what ``no_sync`` holds back.  Collective."""

    @property
    def nested(self) -> bool:
        """The backward that ends has run another inside one of its nodes."""


class Updates(Protocol):
    """Who updates parameters in backward (``optim/overlap.py``)."""

    def early(self, gradient: GradBuffer) -> None:
        """A whole gradient has landed."""

    def finish(self) -> None:
        """Wait for updates that have a thread of their own: none outlives its backward."""

    def due(self, what: str) -> None:
        """Refuse what comes between updates and their step."""


class Rider(Protocol):
    """Whose bytes travel with the exchange that every reducing backward of several ranks ends with.

    Attributes:
        waited_for: the answer is needed before the step.
    """

    waited_for: bool

    def board(self) -> Sequence[int]:
        """This rank's bytes, 0 to 255; on every rank as many."""

    def arrive(self, largest: Sequence[int]) -> None:
        """The largest of each over the ranks that share this slice of the model."""

    def forget(self) -> None:
        """Ranks have not met: some may have heard what others have not."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """What ranks tell each other at the end of a backward.

    A byte each: whether each parameter had a gradient, whether each flat was completed a second time, whether this rank reads
    the answer later, whether it ran a backward inside this one; then what ``riders`` have to say, as many bytes as are beside
    each.
    """

    exchange: Exchange
    params: int
    flats: int
    riders: list[tuple[Rider, int]]

    def nested(self, largest: Sequence[int]) -> bool:
        """Some rank has run a backward inside its backward."""
        return bool(largest[self.params + self.flats + 1])

    def check(self, largest: Sequence[int]) -> None:
        """What a rank reduces a second time all have to, and some read this later."""
        again, later = largest[self.params : self.params + self.flats], largest[self.params + self.flats]
        if later and any(again):
            raise DivergenceError(
                "The ranks' gradients differ. Expected every rank to run the same checkpoints in its backward, found that some "
                "rank ran a backward inside its backward, which completed gradients of a unit a second time, while others had "
                "gone on. Pass use_reentrant=False to torch's checkpoint, load the last checkpoint and train on."
            )


class Reducer:
    """All reductions of an attachment, in canonical order, a bounded number at a time.

    Args:
        most: reductions under way at once, at most.
        unreduced: gradients add up unreduced outside a boundary of accumulation.
        mean: sums over the ranks are divided by them.
    """

    def __init__(
        self, comm: Comm, pool: Pool, bus: Bus, scaling: Scaling, backward: Backward, *, most: int, unreduced: bool, mean: bool
    ) -> None:
        self.comm, self.pool, self.bus, self.scaling = comm, pool, bus, scaling
        self._control = GatherControl(comm, "end of backward")
        self._backward = backward
        self.sync = True
        #: A block of ``no_sync`` has begun since the last reduction: on every rank alike, whatever a rank holds back.
        self.held = False
        #: This rank has run out of batches: its gradients count as zero.
        self.out_of_batches = False
        self.accumulation = Accumulation(comm.world.axis.ranks)
        self.open = False
        #: A backward ended by an error in its reductions: what gradients hold is of some units only.
        self.torn = False
        self.updates: Updates | None = None
        self._meter: Callable[[], None] | None = None
        self.probe: Probe | None = None
        #: The same kinds, in the same order, on every rank.
        self.riders: list[Rider] = []
        self.most, self._unreduced = most, unreduced
        self._world = comm.shard.axis.world * comm.replicate.axis.world
        self.replicas: ReplicaSums = OnAxis(comm)
        #: What sums over the ranks of the mesh are divided by.
        self._mean_of_all, self._divisor = mean, self.comm.averaged if mean else 1
        self.hooks = ReduceHooks()
        self.gradients: dict[int, GradBuffer] = {}
        self._context, self._spare = CommContext[Reduction](None), Spare(keeps=False)
        # The most bytes that reductions may hold; None until it is asked for.
        self._bound: int | None = None
        self._order: list[int] = []
        self._agreed = False
        #: Some rank has run a backward inside a backward, as all ranks know.
        self._nested = False
        #: What ranks said at the end of the last backward, until all have read it.
        self._ended: _Ended | None = None
        self._completed: list[int] = []
        self._seen: dict[int, list[bool]] = {}
        self._next = 0
        self._ready: set[int] = set()
        #: Completed once after they were given up: they are waited for.
        self._late: set[int] = set()
        self._under_way: deque[Sent] = deque()
        #: What parameters get gradients of, when all ranks are known to be done.
        self._landed: list[Reduction] = []

    def change(self, *, most: int, unreduced: bool, mean: bool) -> None:
        """Another policy, between steps."""
        self.most, self._unreduced, self._bound = most, unreduced, None
        self._mean_of_all, self._divisor = mean, self.comm.averaged if mean else 1

    @property
    def _alone(self) -> bool:
        """No other rank takes part in a reduction."""
        return self._world == 1 and not self.replicas.several

    @property
    def divisor(self) -> int:
        """What sums over the ranks and all replicas are divided by, now."""
        return self._divisor * self.replicas.averaged() if self._mean_of_all else 1

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Gradients that may add up unreduced do so inside."""
        before, self.sync, self.held = self.sync, False, self.held or self._unreduced
        try:
            yield
        finally:
            self.sync = before

    def reduce_over(self, replicas: ReplicaSums | None) -> None:
        """From the next backward on gradients are summed over these copies of the model; None is the axis of the mesh."""
        self.replicas = OnAxis(self.comm) if replicas is None else replicas
        self._agreed, self._bound = False, None
        self._canonical()

    def _canonical(self) -> None:
        """The order before ranks have agreed on one."""
        self._order = [number for number in reversed(self.gradients) if self.gradients[number].flat.layout.padded]

    @property
    def to_kept(self) -> float:
        """What a rank's own gradient is multiplied by to be an estimate of what a reduction over all ranks keeps."""
        return self._world / self._divisor

    def update_early(self, updates: Updates | None) -> None:
        """From the next backward on ``updates`` is handed every whole gradient that has landed; None is nobody."""
        self.updates = updates

    def updates_due(self, what: str) -> None:
        """``what`` comes now, with values that updates made in backward have changed for a step that has not come."""
        if self.updates is not None:
            self.updates.due(what)

    @property
    def measured(self) -> bool:
        """A block of ``measuring`` is open."""
        return self._meter is not None

    @contextmanager
    def measuring(self, meter: Callable[[], None]) -> Iterator[None]:
        """``meter`` is called at the end of every backward inside the block, when its gradients are in place."""
        self._meter = meter
        try:
            yield
        finally:
            self._meter = None

    def watch(self, flats: Sequence[Flat]) -> None:
        """Take over these flats (all trainable ones of the attachment), in unit order."""
        self.read_exchange()
        kept = {gradient.flat: gradient for gradient in self.gradients.values()}
        for flat in kept:
            flat.sums = None  # of one that is not taken over it would keep the memory until the next garbage collection
        if flats:
            self._context = CommContext[Reduction](calls_of(flats[0].kind.device))
            self._spare, self._bound = Spare(keeps=self._context.queues), None
        reduce = self._backward.reduce_held
        self.gradients = {flat.number: kept.get(flat) or GradBuffer(flat, self.pool, self._context, reduce) for flat in flats}
        for gradient in self.gradients.values():
            gradient.context, gradient.flat.sums = self._context, gradient
        self._canonical()
        self._agreed = self._nested = False
        self._late.clear()
        self.scaling.watch(self.gradients.values())

    def expect(self, used: Sequence[int]) -> None:
        """Units in the order of a forward that all ranks have agreed on: until a backward has shown better, gradients
        complete the other way round, a unit's at its first use."""
        if self._agreed or self.open or self.replicas.jobs:
            return
        place = {number: at for at, number in reversed(list(enumerate(used)))}
        self._order.sort(key=lambda number: -place.get(number // FLATS, -1))

    def ready(self, flat: Flat, grads: Sequence[Tensor | None], accumulates: bool) -> list[Any]:
        """Autograd has all gradients of a flat's parameters; returns what their accumulation nodes shall see."""
        self._check_first(flat)
        with torch._C.DisableTorchFunctionSubclass():
            return self._ready_plain(flat, grads, accumulates)

    def ready_directly(self, flat: Flat, index: int, grad: Tensor) -> None:
        """Autograd has the gradient of parameter ``index`` of ``flat`` that came past the flat's node; see ``direct.py``."""
        self._check_first(flat)
        if self.updates is not None:
            raise ShardedOpError(
                f"backward of unit {flat.name} expected parameters to be used in their modules' forward, as [optimizer] "
                f"overlap needs, found a custom autograd Function that was passed {flat.specs[index].name} itself. Set "
                "overlap = false."
            )
        with torch._C.DisableTorchFunctionSubclass():
            grads = [grad if at == index else None for at in range(len(flat.params))]
            self._take_over(self._open(flat), grads)

    def _check_first(self, flat: Flat) -> None:
        if torch.is_grad_enabled():
            raise ShardedOpError(
                f"backward through the parameters of unit {flat.name} with create_graph=True expected first "
                "derivatives, found a request for a graph of them. Differentiate twice with respect to inputs, or detach() the "
                "model."
            )

    def _open(self, flat: Flat) -> GradBuffer:
        """A gradient of ``flat`` arrives."""
        self.open = True
        self._backward.backward_open()
        if self.scaling.on:
            self.scaling.arrived()
        gradient = self.gradients.get(flat.number)
        if gradient is None or gradient.flat is not flat:
            raise ShardedOpError(
                f"backward of unit {flat.name} expected the layout of its forward, found that parameters were frozen or "
                "unfrozen, or apply() was called, in between. Change requires_grad and the policy between steps."
            )
        return gradient

    def _take_over(self, gradient: GradBuffer, grads: Sequence[Tensor | None]) -> None:
        if self.out_of_batches:
            # Whatever a repeated batch came to.
            grads = [None] * len(grads)
        with self._context.adding(grads):
            self._accumulate(gradient, grads, scaled=self.scaling.on)
        self.bus.instant("ready", gradient.flat.name, at=HERE)

    def _ready_plain(self, flat: Flat, grads: Sequence[Tensor | None], accumulates: bool) -> list[Any]:
        gradient = self._open(flat)
        if accumulates:
            out: list[Any] = [None] * len(grads)
            self._take_over(gradient, grads)
        else:
            if self.out_of_batches:
                # autograd.grad returns a gradient for what has one.
                grads = [None if grad is None else torch.zeros_like(grad) for grad in grads]
            out = self._reduce_now(flat, grads)
            self.bus.instant("ready", flat.name, at=HERE)
        self._backward.backward_done(flat)
        return out

    def _accumulate(self, gradient: GradBuffer, grads: Sequence[Tensor | None], *, scaled: bool) -> None:
        flat = gradient.flat
        if self.probe is not None and not self.out_of_batches:
            self.probe.adds()
        changed = scaled or self._divisor != 1 or self.hooks
        written = self._alone and gradient.direct and self.updates is None and not changed
        if flat.layout.padded == 0 or written:
            gradient.add_alone(grads)
            self._update_early(gradient, None)
            return
        held = self._holds_back()
        if gradient.partial is None:
            self._wait_for_bytes(gradient)
        gradient.add(grads, held=held)
        self._completed.append(flat.number)
        if held:
            return
        self._ready.add(flat.number)
        if flat.number in self._seen:
            self._late.add(flat.number)
        self._go_on(skip=False)

    def came_to(self, unit: int) -> None:
        """Backward uses ``unit``, and its gather is launched: before this rank waits for it, it starts what it has skipped."""
        if self._next == len(self._order) or self._order[self._next] // FLATS == unit or self._holds_back():
            return
        if self.open or self._reduces(unit):
            self.open = True
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), self._context.adding():
                self._go_on(skip=True)

    def _reduces(self, unit: int) -> bool:
        """The backward that runs will reduce gradients of ``unit``: it is none of autograd.grad's."""
        flats = [gradient.flat for number, gradient in self.gradients.items() if number // FLATS == unit]
        return any(accumulates(node) for flat in flats for node in flat.nodes_in_backward())

    def _go_on(self, *, skip: bool) -> None:
        """Start what is next in the order, past what this rank skips where something behind that is ready, or ``skip``."""
        while self._next < len(self._order):
            number = self._order[self._next]
            if number not in self._ready and not ((skip or self._ready) and self._skips(number)):
                return
            self._launch(self.gradients[number])
            self._next += 1

    def _skips(self, number: int) -> bool:
        """See Note [Who skips a unit]."""
        if number in self._late or not self._backward.backward_passed(number // FLATS):
            return False
        return not self.gradients[number].flat.nodes_in_backward()

    def _holds_back(self) -> bool:
        return self.accumulation.on or (self._unreduced and not self.sync)

    def _wait_for_bytes(self, gradient: GradBuffer) -> None:
        """A partial sum is to be taken, or sent.  Where the host waits for no reduction, the adding stream waits for the oldest
        that have landed, until what all of them hold, with this one, is no more than ``most`` and one of the largest hold."""
        if not self._context.kept or gradient.held_nbytes == 0:
            return
        if self._bound is None:
            most = 0 if self._alone else self.most
            self._bound = sum(sorted((one.held_nbytes for one in self.gradients.values()), reverse=True)[: 1 + most])
        held = gradient.held_nbytes + sum({id(sent.reduction): sent.reduction.held_nbytes for sent in self._under_way}.values())
        while self._context.kept and held + sum(one.held_nbytes for one in self._context.kept) > self._bound:
            with self._waits(self._context.kept[0]):
                self._context.wait_for_oldest().give_back()

    @contextmanager
    def _waits(self, reduction: Reduction) -> Iterator[None]:
        """Whoever adds up gradients waits inside for a reduction: the host or, where there are streams, that stream."""
        name = reduction.gradient.flat.name
        self.bus.begin("wait reduce", name, at=HERE)
        try:
            yield
        finally:
            self.bus.end("wait reduce", name, at=HERE)

    def _launch(self, gradient: GradBuffer) -> None:
        self._wait_for_bytes(gradient)
        with self._context.reducing():
            self._launch_here(gradient)

    def _launch_here(self, gradient: GradBuffer) -> None:
        flat = gradient.flat
        self._ready.discard(flat.number)
        self._land_down_to()
        self._seen[flat.number] = self._had(gradient)
        if self.bus.active:
            self.bus.begin("reduce", flat.name, gradient.moved_nbytes, at=HERE)
        # fp16 sums would overflow.
        before = flat.kind.reduce is torch.float16
        reduction = Reduction(gradient, self.comm.shard, self.divisor, self.hooks, self._spare, before=before)
        for number, chunk in enumerate(gradient.chunks):
            if number:
                self._land_down_to()
            sent = reduction.start(chunk, self.probe)
            if self.bus.timed:
                reduction.timed(sent.work)
            self._under_way.append(sent)
        if self._alone:
            self._land_down_to(0)

    def _had(self, gradient: GradBuffer) -> list[bool]:
        """Which parameters have had a gradient in this backward."""
        seen, present = self._seen.get(gradient.flat.number), gradient.present
        return present if seen is None else [a or b for a, b in zip(present, seen, strict=True)]

    def _reduce_now(self, flat: Flat, grads: Sequence[Tensor | None]) -> list[Any]:
        """What autograd.grad or backward(inputs=...) gets: this rank's ranges of the means.  Collective, waited for at once."""
        if flat.layout.padded == 0:
            # No rank has an element of it: there is nothing to send.
            return [
                None if grad is None else hooked(ShardedTensor(grad.reshape(-1), spec))
                for grad, spec in zip(grads, flat.specs, strict=True)
            ]
        gradient = GradBuffer(flat, self.pool, CommContext(None), self._backward.reduce_held, returned=True)
        gradient.add(grads)
        spare = Spare(keeps=False)
        reduction = Reduction(gradient, self.comm.shard, self.divisor, self.hooks, spare, what="reduce for autograd.grad")
        for chunk in gradient.chunks:
            sent = reduction.start(chunk)
            sent.begin_replicas(self.replicas)
            sent.wait()
            reduction.land(sent, self._mean(sent))
            taken = sent.taken
            del sent
            for buffer in taken:
                spare.give(gradient, buffer)
        reduction.give_back()
        result = reduction.result
        assert result is not None
        return [
            None if grad is None else hooked(ShardedTensor(flat.local(index, result), flat.specs[index]))
            for index, grad in enumerate(grads)
        ]

    def _land_down_to(self, most: int | None = None) -> None:
        """Land the oldest reductions until ``most`` are under way, by default so many that one more may be."""
        if most == 0:
            self._begin_replicas(0)
        while len(self._under_way) > (self.most - 1 if most is None else most):
            self._land_oldest()
        if most is None:
            self._begin_replicas((self.most - 1) // 2)

    def _begin_replicas(self, but: int) -> None:
        """Start the sums over the replicas of all that is under way but the newest ``but``: they run while the next reductions
        do.  Which ones depends on numbers alone, so that all replicas start them in one order."""
        if not self.replicas.several:
            return
        for place in range(len(self._under_way) - but):
            sent = self._under_way[place]
            if not sent.replicas:
                with nullcontext() if self._context.queues else self._waits(sent.reduction):
                    sent.begin_replicas(self.replicas)
                if self.bus.timed:
                    sent.reduction.timed(sent.work)

    def catch_up(self) -> None:
        """Somebody looks at gradients in a backward: what has landed is there."""
        self._context.catch_up()

    def under_way(self) -> tuple[int, int]:
        """Bytes that reductions land in, and bytes they send, apart from gradients' own memory."""
        kept = sum(one.held_nbytes for one in self._context.kept if not one.gradient.flat.long) + self._spare.nbytes
        return sum(one.landing_nbytes for one in self._under_way), sum(one.sent_nbytes for one in self._under_way) + kept

    def payload(self) -> int:
        """Payload of one step's reductions."""
        return sum(gradient.moved_nbytes for gradient in self.gradients.values())

    def _land_oldest(self) -> None:
        self._begin_replicas(len(self._under_way) - 1)
        sent = self._under_way.popleft()
        reduction, flat = sent.reduction, sent.reduction.gradient.flat
        with nullcontext() if self._context.queues else self._waits(reduction):
            sent.wait()
        mean = self._mean(sent)
        if self.probe is not None:
            self.probe.landed(sent, mean)
        whole, taken = reduction.land(sent, mean), sent.taken
        del sent, mean  # views of buffers, which would keep them from the pool
        for buffer in taken:
            self._spare.give(reduction.gradient, buffer)
        if not whole:
            return
        if self._context.queues:
            self._context.keep(reduction)
        else:
            reduction.give_back()
        if self.bus.active:
            self.bus.end("reduce", flat.name, reduction.gradient.moved_nbytes, at=reduction.during or HERE)
        if reduction.claims:
            self._landed.append(reduction)
        self._update_early(reduction.gradient, reduction)

    def _mean(self, sent: Sent) -> Tensor:
        """A sum over the ranks as the loop shall see it: divided by them and by the loss scale."""
        ranks, out = sent.reduction.ranks, sent.out
        flat = sent.reduction.gradient.flat
        if self.scaling.on:
            out = self.scaling.mean(sent.reduction.gradient, out, ranks)
        elif ranks > 1:
            out = out.mul_(1.0 / ranks)
        self.hooks.received(flat.name, out)
        return out

    def _update_early(self, gradient: GradBuffer, reduction: Reduction | None) -> None:
        """A gradient has landed, by a ``reduction`` or written at once."""
        flat = gradient.flat
        flat.nodes = max(0, flat.nodes - 1)
        if self.updates is not None and (flat.spent or (reduction is not None and reduction.complete)):
            flat.nodes += 1
            self.updates.early(gradient)
            flat.nodes -= 1

    def finish_backward(self) -> None:
        """Backward is over: reduce what any rank still owes, wait for all, and set ``.grad``.  Collective when ranks > 1."""
        if self.open:
            held = self._holds_back()
            if held:
                self.accumulation.owed |= self.accumulation.on
            self._complete(held=held)
        self.pool.step_ended()

    def _complete(self, *, held: bool) -> None:
        self.open = False
        streams = nullcontext() if held else self._context.end(self._gradients)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), streams:
            try:
                if not held:
                    self.accumulation.owed, self.held = False, self._unreduced and not self.sync
                    self._finish()
            finally:
                if self.updates is not None:
                    self.updates.finish()
            self.scaling.backward_over(landed=not held)
        if self._meter is not None:
            self._meter()
        if self.probe is not None:
            self.probe.backward_over(held=held)

    def _gradients(self) -> Iterator[Tensor]:
        """The memory of gradients on the device."""
        for gradient in self.gradients.values():
            for param in gradient.flat.params:
                at = param.grad.local_shard.memory if isinstance(param.grad, ShardedTensor) else None
                if isinstance(at, Tensor) and at.device == gradient.flat.kind.device:
                    yield at

    def _nothing_waits(self) -> bool:
        """Nothing waits for a reduction."""
        waits = self._ready or self._under_way or self._landed
        return not waits and all(gradient.partial is None for gradient in self.gradients.values())

    def reduce_owed(self) -> None:
        """Reduce what is still held back: somebody needs it, or the layout it belongs to goes away.  Collective."""
        if self.accumulation.owed or self.held or not self._nothing_waits():
            self._complete(held=False)
            self.pool.step_ended()

    def _finish(self) -> None:
        try:
            # A rank by itself may have put all there was into the gradients that parameters have.
            if not (self._alone and self._nothing_waits()):
                self._finish_all()
        except BaseException:
            self.torn = True
            raise
        finally:
            self._join()
            self._clear()

    def _join(self) -> None:
        """Whoever adds up goes on after all reductions."""
        with self._waits(self._context.kept[-1]) if self._context.kept else nullcontext():
            for reduction in self._context.join():
                reduction.give_back()
        self._spare.clear()

    def _clear(self) -> None:
        """Nothing is completed, sent or landed."""
        for gradient in self.gradients.values():
            gradient.hand_over()
        self._next = 0
        self._ready.clear()
        self._under_way.clear()
        self._landed.clear()
        self._completed.clear()
        self._seen.clear()

    def abandon(self) -> bool:
        """Forget a backward that failed, without waiting for ranks that may never come; whether there was one."""
        failed = self.torn or self.open or bool(self._under_way or self._ready or self._landed)
        if self.updates is not None:
            self.updates.finish()
        self.open = self.torn = False
        with suppress(RuntimeError):  # of a device that has failed
            self._join()
        self._clear()
        self._ended = None
        for rider in self.riders:
            rider.forget()
        return failed

    @property
    def holds(self) -> bool:
        """Some parameter has a gradient, or a sum is held back."""
        held = any(gradient.partial is not None for gradient in self.gradients.values())
        return held or any(param.grad is not None for one in self.gradients.values() for param in one.flat.params)

    def drop(self) -> None:
        """Parameters have no gradient any more, and nothing is held back of one."""
        self.accumulation.owed = False
        self.scaling.forget()
        for gradient in self.gradients.values():
            gradient.resume(None, [False] * len(gradient.flat.params))
            for param in gradient.flat.params:
                param.grad = None

    def _finish_all(self) -> None:
        self.read_exchange()
        for number in self._order[self._next :]:
            self._launch(self.gradients[number])
        used, again = self._agree_used()
        if again and self.updates is not None:
            self.updates.finish()
        for number in again:
            self._launch(self.gradients[number])
        with self._context.reducing():
            self._land_down_to(0)
        self._join()
        for reduction in self._landed:
            reduction.finish(used[reduction.gradient.flat.number])
        self._agree_order()

    def _agree_used(self) -> tuple[dict[int, list[int]], list[int]]:
        """Which parameters got a gradient on any rank, and the flats some rank completed a second time."""
        present = [self._had(gradient) for gradient in self.gradients.values()]
        own: list[int] = list(chain(*present, (number in self._seen and number in self._ready for number in self.gradients)))
        params, repeats = len(own) - len(present), slice(len(own) - len(present), len(own))
        if self.replicas.jobs:
            # First over replicas that are jobs of their own: what is lost on that way is lost for all ranks of this one alike.
            flags = torch.tensor(own, dtype=torch.uint8, device="cpu")
            self.replicas.merge(flags)
            own = flags.tolist()
        # See Note [Who waits for the exchange].
        all_wait = not self._context.queues or not self._agreed or self._nested or self.replicas.jobs
        all_wait = all_wait or any(rider.waited_for for rider in self.riders)
        reads_later = not all_wait and not self._backward.nested and not any(own[repeats]) and all(own[:params])
        said = [(rider, rider.board()) for rider in self.riders]
        exchange = self._control.begin([*own, reads_later, self._backward.nested, *chain(*(bytes_of for _, bytes_of in said))])
        self._ended = _Ended(exchange, params, len(present), [(rider, len(bytes_of)) for rider, bytes_of in said])
        largest = own if reads_later else exchange.largest()
        if all_wait:
            self.read_exchange()
        elif not reads_later:
            self._ended.check(largest)
        flags_of = iter(largest)
        used = {number: list(islice(flags_of, len(had))) for number, had in zip(self.gradients, present, strict=True)}
        again = {number for number, flag in zip(self.gradients, largest[repeats], strict=True) if flag}
        return used, [number for number in self._order if number in again]

    def read_exchange(self) -> None:
        """Read what ranks said at the end of the last backward, where they have not yet.  Collective.

        Raises:
            DivergenceError: on every rank, where they gathered different units, or one has to reduce again alone.
        """
        if self._ended is None:
            return
        ended, self._ended = self._ended, None
        largest = ended.exchange.largest()
        at = ended.params + ended.flats + 2
        self._control.compare(largest, at + sum(count for _, count in ended.riders))
        ended.check(largest)
        for rider, count in ended.riders:
            rider.arrive(largest[at : at + count])
            at += count
        self._nested = self._nested or ended.nested(largest)

    def _agree_order(self) -> None:
        """After the first whole backward, take rank 0's order of completion as canonical."""
        if self._agreed or self._alone or self.replicas.jobs:
            return
        done = list(dict.fromkeys(self._completed))
        order = done + [number for number in self._order if number not in done]
        self._order = self._control.on_first(lambda: order)
        self._agreed = True
