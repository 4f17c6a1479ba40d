"""The reductions of an attachment: unit by unit, in one canonical order on every rank, a bounded number at a time.

The ``Reducer`` is handed a unit's gradients by its node of the graph (``node.py``) once all of them are complete.
``runtime.py`` says when backward is over.  It never decides what is gathered.

Note: [Canonical order]
    Reductions are launched in one order on all ranks: the reverse of the units' order at first, then the order in which
    rank 0's first backward completed them.  A unit that is ready early waits its turn; what is left when backward ends
    is reduced in the same order, with zeros from a rank that had no gradient.  So every backward outside ``no_sync``
    reduces every unit once, and no rank can wait for one that another has skipped.  Then the ranks exchange one byte a
    parameter: parameters no rank used keep ``grad is None`` as in plain PyTorch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.arena import Use
from offload.device import OneStream, one_stream
from offload.errors import ShardedOpError
from offload.events import Bus
from zhooks.accumulation import Accumulation
from zhooks.agree import Agreement
from zhooks.comm import CONTROL, DONE, REDUCE, Alone, Call, Comm, all_reduce_flat
from zhooks.flat import Flat
from zhooks.grad import Gradient, has_hooks
from zhooks.kind import FLATS
from zhooks.pool import Pool
from zhooks.reduce_now import begin_replicas, selected
from zhooks.reduce_pieces import Landing, Long
from zhooks.scaling import Scaling
from zhooks.sharded import ShardedTensor


class Reducer:
    """All reductions of an attachment, in canonical order, a bounded number at a time."""

    def __init__(self, comm: Comm, pool: Pool, bus: Bus, *, most: int, unreduced: bool) -> None:
        self.comm, self.pool, self.bus = comm, pool, bus
        self.sync = True
        self.accumulation = Accumulation(comm.world.axis.ranks)
        self.open = False
        self.done: Callable[[Flat], None] = lambda flat: None
        self.opened: Callable[[], None] = lambda: None
        # Told of every whole gradient that has landed, where updates may be made in backward.
        self.early: Callable[[Gradient], None] | None = None
        # Waits for those that have a thread of their own: none outlives its backward.
        self.early_over: Callable[[], None] = lambda: None
        self.scaling: Scaling | None = None
        self.finished: Callable[[], None] | None = None  # gradients are in place: calibrate.py measures them
        self.most, self._unreduced = most, unreduced
        self._world = comm.shard.axis.world * comm.replicate.axis.world
        self.gradients: dict[int, Gradient] = {}
        #: What all of a backward's gradients are added up, reduced and landed under.
        self._streams = OneStream(None)
        self._order: list[int] = []
        self._agreed = False
        self._completed: list[int] = []
        self._seen: dict[int, list[bool]] = {}
        self._next = 0
        self._ready: set[int] = set()
        self._under_way: deque[Landing] = deque()
        self._landed: list[tuple[Gradient, Tensor | None]] = []

    def change(self, *, most: int, unreduced: bool) -> None:
        """Another policy, between steps."""
        self.most, self._unreduced = most, unreduced

    def watch(self, flats: Sequence[Flat]) -> None:
        """Take over these flats (all trainable ones of the attachment), in unit order."""
        kept = {flat.number: self.gradients.get(flat.number) for flat in flats}
        self.gradients = {
            flat.number: old if (old := kept[flat.number]) is not None and old.flat is flat else Gradient(flat, self.pool)
            for flat in flats
        }
        self._streams = one_stream(flats[0].kind.device) if flats else self._streams
        self._order = [flat.number for flat in reversed(flats) if flat.layout.padded]
        self._agreed = False
        if self.scaling is not None:
            self.scaling.watch(flats)

    def expect(self, used: Sequence[int]) -> None:
        """Units in the order of a forward that all ranks have agreed on: until a backward has shown better, gradients
        complete the other way round, a unit's at its first use."""
        if self._agreed or self.open:
            return
        place = {number: at for at, number in reversed(list(enumerate(used)))}
        self._order.sort(key=lambda number: -place.get(number // FLATS, -1))

    @property
    def alone(self) -> bool:
        return self._world == 1

    def ready(self, flat: Flat, grads: Sequence[Tensor | None], accumulates: bool) -> list[Any]:
        """Autograd has all gradients of a flat's parameters; returns what their accumulation nodes shall see."""
        if torch.is_grad_enabled():
            raise ShardedOpError(
                f"backward through the parameters of unit {flat.name} with create_graph=True: expected first "
                "derivatives, found a "
                "request for a graph of them. Differentiate twice with respect to inputs, or detach() the model."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return self._ready_plain(flat, grads, accumulates)

    def _ready_plain(self, flat: Flat, grads: Sequence[Tensor | None], accumulates: bool) -> list[Any]:
        self.open = True
        self.opened()
        scaling = self.scaling if self.scaling is not None and self.scaling.on else None
        if scaling is not None:
            scaling.arrived()
        gradient = self.gradients.get(flat.number)
        if gradient is None or gradient.flat is not flat:
            raise ShardedOpError(
                f"backward of unit {flat.name}: expected the layout of its forward, found that parameters were frozen or "
                "unfrozen, or apply() was called, in between. Change requires_grad and the policy between steps."
            )
        if not accumulates:
            out = list(selected(self.comm, flat, grads, lambda out: self._mean(flat, out, self._world)))
        else:
            out = [None] * len(grads)
            with self._streams.work(grads):
                self._accumulate(gradient, grads, scaled=scaling is not None)
        self.bus.instant("ready", flat.name)
        self.done(flat)
        return out

    def _accumulate(self, gradient: Gradient, grads: Sequence[Tensor | None], *, scaled: bool) -> None:
        flat = gradient.flat
        in_place = self.alone and flat.kind.reduce == flat.kind.master and not gradient.tiered and self.early is None
        if flat.layout.padded == 0 or (in_place and not scaled):
            gradient.direct(grads)
            self._tell(gradient, whole=False)
        else:
            gradient.hand(grads) if flat.long and not self._holds_back() else gradient.add(grads)
            self._advance(flat.number)

    def _advance(self, number: int) -> None:
        self._completed.append(number)
        if self._holds_back():
            return
        self._ready.add(number)
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._launch(self.gradients[self._order[self._next]])
            self._next += 1

    def _holds_back(self) -> bool:
        return self.accumulation.on or (self._unreduced and not self.sync)

    def _launch(self, gradient: Gradient) -> None:
        flat = gradient.flat
        self._ready.discard(flat.number)
        self._make_way()
        self._seen[flat.number] = [
            a or b for a, b in zip(gradient.present, self._seen.get(flat.number, gradient.present), strict=True)
        ]
        whole = all(gradient.present)
        if self.bus.active:
            self.bus.begin("reduce", flat.name, self.nbytes(flat))
        if flat.long:
            self._launch_long(Long(gradient, self._prescale(flat)), whole)
            return
        partial = gradient.take_partial()
        if self._prescale(flat) != 1.0:
            partial.mul_(self._prescale(flat))
        call = Call(REDUCE, "reduce", flat.name, flat.number)
        if self.alone:
            # What this rank has is the sum: it lands as it is, at once.
            self._under_way.append(Landing(gradient, DONE, partial, partial, partial is gradient._shard, whole))
            self._land_oldest()
            return
        if flat.ownership.whole:
            into_shard = partial is gradient._shard
            work, out = all_reduce_flat(self.comm.shard, call, partial, flat.layout), partial
        else:
            plain = flat.kind.reduce == flat.kind.master and not (gradient.tiered or has_hooks(flat))
            into_shard = plain and gradient.free()
            gradient.reserved = gradient.reserved or into_shard
            device, reduce = flat.kind.device, flat.kind.reduce
            out = gradient.shard if into_shard else self.pool.take(flat.shard_numel, reduce, device, Use.SUMS)
            if self.bus.active and not into_shard:
                self.bus.hold("communication on device", flat.name, out.untyped_storage())
            work = self.comm.shard.reduce_scatter(call, partial, out, flat.layout)
        self._under_way.append(Landing(gradient, work, partial, out, into_shard, whole))

    def _launch_long(self, long: Long, whole: bool) -> None:
        """Its pieces one after the other: the first waits for the last of the gradient before, and so on."""
        flat = long.flat
        call = Call(REDUCE, "reduce", flat.name, flat.number)
        for piece in long.pieces():
            self._make_way()
            partial, out = long.fill(piece)
            work = long.start(self.comm.shard, call, piece, partial, out)
            self._under_way.append(Landing(long.gradient, work, partial, out, long.direct, whole, long, piece))
        if self.alone:
            self._make_way(0)

    def _make_way(self, most: int | None = None) -> None:
        """Wait for the oldest reductions until one more may be under way."""
        if most == 0:
            self._begin_replicas(0)
        while len(self._under_way) > (self.most - 1 if most is None else most):
            self._land_oldest()
        if most is None:
            self._begin_replicas((self.most - 1) // 2)

    def _begin_replicas(self, but: int) -> None:
        """Start the sums over the replicas of all that is under way but the newest ``but``: they run while the next reductions
        do.  Which ones depends on numbers alone, so that all replicas start them in one order."""
        if isinstance(self.comm.replicate, Alone):
            return
        for place in range(len(self._under_way) - but):
            landing = self._under_way[place]
            if not landing.replicas:
                flat = landing.gradient.flat
                self.bus.begin("wait reduce", flat.name)
                try:
                    landing.work = begin_replicas(self.comm, flat, landing.out, landing.work)
                finally:
                    self.bus.end("wait reduce", flat.name)
                landing.replicas = True

    def _prescale(self, flat: Flat) -> float:
        """fp16 sums would overflow: each rank's part is divided before."""
        return 1.0 / self._world if flat.kind.reduce is torch.float16 else 1.0

    def nbytes(self, flat: Flat) -> int:
        """Payload of one reduction of ``flat``; a replicated gradient is gathered again after it."""
        if self.comm.shard.axis.world == 1:
            return 0
        return flat.layout.padded * flat.kind.reduce.itemsize * (2 if flat.ownership.whole else 1)

    def under_way(self) -> tuple[int, int]:
        """Bytes that reductions land in, and bytes they send, apart from gradients' own memory."""
        landing = sum(one.out.nbytes for one in self._under_way if one.out is not one.partial and not one.into_shard)
        return landing, sum(one.partial.nbytes for one in self._under_way if one.partial is not one.gradient._shard)

    def payload(self) -> int:
        """Payload of one step's reductions."""
        return sum(self.nbytes(gradient.flat) for gradient in self.gradients.values())

    def _land_oldest(self) -> None:
        self._begin_replicas(len(self._under_way) - 1)
        landing = self._under_way.popleft()
        gradient, out = landing.gradient, landing.out
        flat = gradient.flat
        self.bus.begin("wait reduce", flat.name)
        try:
            landing.work.wait()
        finally:
            self.bus.end("wait reduce", flat.name)
            landing.work = DONE  # what it keeps of the buffers would keep them from the pool
        mean = self._mean(flat, out, 1 if flat.kind.reduce is torch.float16 else self._world)
        if mean is not out and out is not landing.partial:
            self.pool.give(out)
        out = mean
        long, piece = landing.long, landing.piece
        if long is not None and piece is not None and not long.land(piece, landing.partial, out):
            return
        if self.bus.active:
            self.bus.end("reduce", flat.name, self.nbytes(flat))
        if long is not None:
            if long.claims or long.apart is not None:
                self._landed.append((gradient, long.apart))
        elif landing.into_shard:
            self._landed.append((gradient, None))
        elif has_hooks(flat):
            self._landed.append((gradient, out.clone() if out is landing.partial else out))
        else:
            self._spread(gradient, out)
            if out is not landing.partial:
                self.pool.give(out)
        if long is None:
            gradient.give_back(landing.partial)
        self._tell(gradient, whole=landing.whole and self._landed[-1:] == [(gradient, None)])

    def _mean(self, flat: Flat, out: Tensor, world: int) -> Tensor:
        """A sum over the ranks as the loop shall see it: divided by ``world`` and by the loss scale."""
        if self.scaling and self.scaling.on:
            return self.scaling.mean(flat, out, world)
        return out.mul_(1.0 / world) if world > 1 else out

    def _tell(self, gradient: Gradient, *, whole: bool) -> None:
        """A reduction has landed; ``whole``: every parameter's gradient, and alone in the shard."""
        gradient.flat.nodes = max(0, gradient.flat.nodes - 1)
        if self.early is not None and (whole or gradient.flat.spent):
            gradient.flat.nodes += 1
            self.early(gradient)
            gradient.flat.nodes -= 1

    def _spread(self, gradient: Gradient, out: Tensor) -> None:
        """Add what arrived to gradients that exist; the rest goes to the shard, claimed when all ranks are known."""
        flat = gradient.flat
        if gradient.reserved:
            gradient.accumulate(out)
        elif gradient.free():
            gradient.reserved = True
            gradient.overwrite(out)
            self._landed.append((gradient, None))
        else:
            missing = [index for index, param in enumerate(flat.params) if param.grad is None]
            for index in range(len(flat.params)):
                if index not in missing:
                    gradient.land(index, flat.local(index, out))
            if missing:
                self._landed.append((gradient, out.clone()))

    def finish(self) -> None:
        """Backward is over: reduce what any rank still owes, wait for all, and set ``.grad``.  Collective when ranks > 1."""
        self._finish_open()
        self.pool.settled()

    def _finish_open(self) -> None:
        if not self.open:
            return
        held = self._holds_back()
        if held:
            self.accumulation.owed |= self.accumulation.on
        self._complete(held=held)

    def _complete(self, *, held: bool) -> None:
        self.open = False
        streams = self._streams.work() if held else self._streams.end(self._gradients)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), streams:
            try:
                if not held:
                    self.accumulation.owed = False
                    if not (self.alone and self._idle()):
                        self._finish()
            finally:
                self.early_over()
            if self.scaling is not None:
                self.scaling.backward_over(landed=not held)
        if self.finished is not None:
            self.finished()

    def _gradients(self) -> Iterator[Tensor]:
        """The memory of gradients on the device."""
        for gradient in self.gradients.values():
            for param in gradient.flat.params:
                at = param.grad._at if isinstance(param.grad, ShardedTensor) else None
                if isinstance(at, Tensor) and at.device == gradient.flat.kind.device:
                    yield at

    def _idle(self) -> bool:
        """Nothing waits for a reduction."""
        waits = self._ready or self._under_way or self._landed
        return not waits and all(gradient.partial is None for gradient in self.gradients.values())

    def flush(self) -> None:
        """Reduce what is still held back: somebody needs it, or the layout it belongs to goes away.  Collective."""
        if self.accumulation.owed or not self._idle():
            self._complete(held=False)
            self.pool.settled()

    def _finish(self) -> None:
        try:
            for number in self._order[self._next :]:
                self._launch(self.gradients[number])
            used, again = self._agree_used()
            if again:
                self.early_over()
            for number in again:
                self._launch(self.gradients[number])
            self._make_way(0)
            self._claim(used)
            self._agree_order()
        finally:
            for gradient in self.gradients.values():
                gradient.hand_over()
            self._next = 0
            self._ready.clear()
            self._under_way.clear()
            self._landed.clear()
            self._completed.clear()
            self._seen.clear()

    def _agree_used(self) -> tuple[dict[int, list[bool]], list[int]]:
        """Which parameters got a gradient on any rank, and the flats some rank completed a second time."""
        local: list[int] = []
        for number, gradient in self.gradients.items():
            seen = self._seen.get(number)
            local.extend(int(flag or (seen is not None and seen[i])) for i, flag in enumerate(gradient.present))
            local.append(int(seen is not None and number in self._ready))
        flags = torch.tensor(local, dtype=torch.uint8)
        self.comm.world.all_reduce(Call(CONTROL, "end of backward", "all units"), flags, "max")
        merged, used, again, at = flags.tolist(), {}, [], 0
        for number, gradient in self.gradients.items():
            count = len(gradient.present)
            used[number] = [bool(flag) for flag in merged[at : at + count]]
            if merged[at + count]:
                again.append(number)
            at += count + 1
        return used, [number for number in self._order if number in again]

    def _claim(self, used: dict[int, list[bool]]) -> None:
        for gradient, out in self._landed:
            flat = gradient.flat
            for index, flag in enumerate(used[flat.number]):
                if not flag:
                    continue
                if out is None:
                    if flat.spent:
                        continue
                    if flat.params[index].grad is None:
                        flat.params[index].grad = gradient.tensor(index)
                elif has_hooks(flat):
                    local = flat.local(index, out).to(flat.kind.master, copy=True)
                    gradient.deliver(index, ShardedTensor(local, flat.specs[index]))
                elif flat.params[index].grad is None:
                    gradient.land(index, flat.local(index, out))

    def _agree_order(self) -> None:
        """After the first whole backward, take rank 0's order of completion as canonical."""
        if self._agreed or self.alone:
            return
        done = list(dict.fromkeys(self._completed))
        order = done + [number for number in self._order if number not in done]
        self._order = Agreement(self.comm.world).sequence("all units", order)
        self._agreed = True
