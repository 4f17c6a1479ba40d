"""Gradients: from what autograd hands a unit to the shard's ``.grad`` on every rank.

``Gather`` is the node of the graph that stands for a unit's parameters; its backward runs once all their gradients are
complete and gives them to the ``Reducer``, which reduces unit by unit in one canonical order.  It never decides what is
gathered.

Note: [Canonical order]
    Reductions are launched in one order on all ranks: the reverse of the units' order at first, then the order in which
    rank 0's first backward completed them.  A unit that is ready early waits its turn; what is left when backward ends
    is reduced in the same order, with zeros from a rank that had no gradient.  So every backward outside ``no_sync``
    reduces every unit once, and no rank can wait for one that another has skipped.  Then the ranks exchange one byte a
    parameter: parameters no rank used keep ``grad is None`` as in plain PyTorch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.errors import ShardedOpError
from offload.events import Bus
from zhooks.comm import CONTROL, REDUCE, Alone, Call, Comm, Work, all_reduce_flat
from zhooks.layout import flat_layout
from zhooks.pool import Pool
from zhooks.sharded import ShardedTensor
from zhooks.unit import Flat


class Gather(torch.autograd.Function):
    """Parameters in, full plain tensors out; backward reduces.  One node a unit and forward."""

    @staticmethod
    def forward(ctx: Any, reducer: Reducer, flat: Flat, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.reducer, ctx.flat = reducer, flat
        ctx.set_materialize_grads(False)
        return tuple(flat.fresh_views())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        return (None, None, *ctx.reducer.ready(ctx.flat, grads, _accumulates(ctx)))


def make_node(reducer: Reducer) -> Callable[[Flat], tuple[Tensor, ...]]:
    """What ``Flat.node`` is: the gathered values as a node of the graph."""

    def node(flat: Flat) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = Gather.apply(reducer, flat, *flat.params)  # type: ignore[no-untyped-call]
        return out

    return node


class Gradient:
    """One flat buffer's gradient: the partial sum of this rank, and the reduced range behind the parameters' ``.grad``."""

    def __init__(self, flat: Flat, pool: Pool) -> None:
        self.flat, self._pool = flat, pool
        self.present = [False] * len(flat.params)
        self.partial: Tensor | None = None
        # The shard holds, or is about to receive, values that no parameter claims yet.
        self.reserved = False
        self._shard: Tensor | None = None
        self._tensors: list[ShardedTensor] = []
        self._parts: list[Tensor] = []

    def free(self) -> bool:
        """No parameter has a gradient, and nobody kept an earlier one: the shard may be overwritten."""
        if self.reserved or any(param.grad is not None for param in self.flat.params):
            return False
        if self._shard is None or any(_held(tensor) for tensor in self._tensors):
            self._fresh()
        return True

    def _fresh(self) -> None:
        flat = self.flat
        with torch.inference_mode(False):
            self._shard = torch.zeros(flat.shard_numel, dtype=flat.kind.master, device=flat.kind.device)
            self._tensors = [ShardedTensor(flat.local(i, self._shard), spec) for i, spec in enumerate(flat.specs)]
            self._parts = self._shaped(self._shard) if flat.shard_numel == flat.layout.padded else []

    @property
    def shard(self) -> Tensor:
        assert self._shard is not None
        return self._shard

    @property
    def shard_nbytes(self) -> int:
        return 0 if self._shard is None else self._shard.untyped_storage().nbytes()

    def tensor(self, index: int) -> ShardedTensor:
        return self._tensors[index]

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """One pass over each gradient: copied or added, and cast, into the partial sum."""
        flat = self.flat
        if self.partial is None:
            own = flat.ownership.whole and flat.kind.master == flat.kind.reduce and self.free() and not has_hooks(flat)
            self.reserved = self.reserved or own
            self.partial = self.shard if own else self._pool.take(flat.layout.padded, flat.kind.reduce, flat.kind.device)
        parts = self._parts if self.partial is self._shard else self._shaped(self.partial)
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            if self.present[index]:
                parts[index].add_(grad)
            else:
                parts[index].copy_(grad)
                self.present[index] = True

    def complete(self) -> Tensor:
        """The partial sum with zeros where this rank had no gradient."""
        flat = self.flat
        if self.partial is None:
            self.partial = self._pool.take(flat.layout.padded, flat.kind.reduce, flat.kind.device)
        for start, numel, present in zip(flat.layout.starts, flat.layout.numels, self.present, strict=True):
            if not present:
                self.partial[start : start + numel].zero_()
        return self.partial

    def take_partial(self) -> Tensor:
        """The completed partial sum; what comes next starts a new one."""
        partial = self.complete()
        self.partial, self.present = None, [False] * len(self.flat.params)
        return partial

    def give_back(self, partial: Tensor) -> None:
        if partial is not self._shard:
            self._pool.give(partial)

    def direct(self, grads: Sequence[Tensor | None]) -> None:
        """No other rank takes part: write each gradient where the parameter's ``.grad`` lives."""
        fresh = self.free()
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            param, spec = self.flat.params[index], self.flat.specs[index]
            if spec.hooks or spec.post_hooks:
                landed = ShardedTensor(spec.storage_order(grad).to(self.flat.kind.master, copy=True), spec)
                deliver(self.flat, index, landed)
            elif fresh:
                self._parts[index].copy_(grad)
                param.grad = self._tensors[index]
            else:
                self.land(index, spec.storage_order(grad))

    def land(self, index: int, local: Tensor) -> None:
        """Set or add one parameter's reduced range."""
        param = self.flat.params[index]
        if param.grad is None:
            if not self._tensors or _held(self._tensors[index]):
                landed = torch.empty(local.shape, dtype=self.flat.kind.master, device=local.device).copy_(local)
                param.grad = ShardedTensor(landed, self.flat.specs[index])
                return
            tensor = self._tensors[index]
            tensor._local.copy_(local)
            param.grad = tensor
            return
        if not isinstance(param.grad, ShardedTensor):
            raise ShardedOpError(
                f"{self.flat.specs[index].name}.grad: expected a sharded gradient, found a plain tensor. A custom autograd Function "
                "read the parameter outside its module's forward; read it inside, or set grad to None."
            )
        param.grad._local.add_(local)

    def _shaped(self, buffer: Tensor) -> list[Tensor]:
        return [
            buffer.as_strided(spec.shape, spec.stride, start)
            for start, spec in zip(self.flat.layout.starts, self.flat.specs, strict=True)
        ]


@dataclass(slots=True)
class Landing:
    """A reduction under way."""

    gradient: Gradient
    work: Work
    partial: Tensor
    out: Tensor
    into_shard: bool


class Reducer:
    """All reductions of an attachment, in canonical order, a bounded number at a time."""

    def __init__(self, comm: Comm, pool: Pool, bus: Bus, *, most: int, unreduced: bool) -> None:
        self.comm, self.pool, self.bus = comm, pool, bus
        self.sync = True
        self.open = False
        self.done: Callable[[Flat], None] = lambda flat: None
        self.opened: Callable[[], None] = lambda: None
        self._most, self._unreduced = most, unreduced
        self._world = comm.shard.axis.world * comm.replicate.axis.world
        self.gradients: dict[int, Gradient] = {}
        self._order: list[int] = []
        self._agreed = False
        self._completed: list[int] = []
        self._seen: dict[int, list[bool]] = {}
        self._next = 0
        self._ready: set[int] = set()
        self._under_way: deque[Landing] = deque()
        self._landed: list[tuple[Gradient, Tensor, bool]] = []

    def watch(self, flats: Sequence[Flat]) -> None:
        """Take over these flats (all trainable ones of the attachment), in unit order."""
        kept = {flat.number: self.gradients.get(flat.number) for flat in flats}
        self.gradients = {
            flat.number: old if (old := kept[flat.number]) is not None and old.flat is flat else Gradient(flat, self.pool)
            for flat in flats
        }
        self._order = [flat.number for flat in reversed(flats)]
        self._agreed = False

    @property
    def alone(self) -> bool:
        return self._world == 1

    def ready(self, flat: Flat, grads: Sequence[Tensor | None], accumulates: bool) -> list[Any]:
        """Autograd has all gradients of a flat's parameters; returns what their accumulation nodes shall see."""
        if torch.is_grad_enabled():
            raise ShardedOpError(
                f"backward through the parameters of unit {flat.name} with create_graph=True: expected first derivatives, found a "
                "request for a graph of them. Differentiate twice with respect to inputs, or detach() the model."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return self._ready_plain(flat, grads, accumulates)

    def _ready_plain(self, flat: Flat, grads: Sequence[Tensor | None], accumulates: bool) -> list[Any]:
        self.open = True
        self.opened()
        gradient = self.gradients.get(flat.number)
        if gradient is None or gradient.flat is not flat:
            raise ShardedOpError(
                f"backward of unit {flat.name}: expected the layout of its forward, found that parameters were frozen or unfrozen in "
                "between. Change requires_grad between steps."
            )
        if not accumulates:
            out = self._selected(gradient, grads)
        else:
            out = [None] * len(grads)
            if self.alone and flat.kind.reduce == flat.kind.master:
                gradient.direct(grads)
            else:
                gradient.add(grads)
                self._advance(flat.number)
        self.done(flat)
        return out

    def _advance(self, number: int) -> None:
        if self._holds_back():
            return
        self._completed.append(number)
        self._ready.add(number)
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._launch(self.gradients[self._order[self._next]])
            self._next += 1

    def _holds_back(self) -> bool:
        return self._unreduced and not self.sync

    def _launch(self, gradient: Gradient) -> None:
        flat = gradient.flat
        self._ready.discard(flat.number)
        while len(self._under_way) >= self._most:
            self._land_oldest()
        self._seen[flat.number] = [a or b for a, b in zip(gradient.present, self._seen.get(flat.number, gradient.present), strict=True)]
        partial = gradient.take_partial()
        if flat.kind.reduce is torch.float16:
            partial.mul_(1.0 / self._world)
        if self.bus.active:
            self.bus.begin("reduce", flat.name, self._nbytes(flat))
        call = Call(REDUCE, "reduce", flat.name, flat.number)
        if flat.ownership.whole:
            into_shard = partial is gradient._shard
            work, out = all_reduce_flat(self.comm.shard, call, partial, flat.layout), partial
        else:
            into_shard = flat.kind.reduce == flat.kind.master and not has_hooks(flat) and gradient.free()
            gradient.reserved = gradient.reserved or into_shard
            out = gradient.shard if into_shard else self.pool.take(flat.shard_numel, flat.kind.reduce, flat.kind.device)
            work = self.comm.shard.reduce_scatter(call, partial, out, flat.layout)
        self._under_way.append(Landing(gradient, work, partial, out, into_shard))

    def _nbytes(self, flat: Flat) -> int:
        if self.comm.shard.axis.world == 1:
            return 0
        return flat.layout.padded * flat.kind.reduce.itemsize * (2 if flat.ownership.whole else 1)

    def _land_oldest(self) -> None:
        landing = self._under_way.popleft()
        gradient, out = landing.gradient, landing.out
        flat = gradient.flat
        landing.work.wait()
        if not isinstance(self.comm.replicate, Alone):
            call = Call(REDUCE, "reduce replicas", flat.name, flat.number)
            layout = flat_layout([out.numel()], world=self.comm.replicate.axis.world, itemsize=out.element_size())
            all_reduce_flat(self.comm.replicate, call, out, layout).wait()
        if self._world > 1 and flat.kind.reduce is not torch.float16:
            out.mul_(1.0 / self._world)
        if self.bus.active:
            self.bus.end("reduce", flat.name, self._nbytes(flat))
        if landing.into_shard:
            self._landed.append((gradient, gradient.shard, True))
        elif has_hooks(flat):
            self._landed.append((gradient, out.clone() if out is landing.partial else out, False))
        else:
            self._spread(gradient, out)
            if out is not landing.partial:
                self.pool.give(out)
        gradient.give_back(landing.partial)

    def _spread(self, gradient: Gradient, out: Tensor) -> None:
        """Add what arrived to gradients that exist; the rest goes to the shard, claimed when all ranks are known."""
        flat = gradient.flat
        if gradient.reserved:
            gradient.shard.add_(out)
        elif gradient.free():
            gradient.reserved = True
            gradient.shard.copy_(out)
            self._landed.append((gradient, gradient.shard, True))
        else:
            missing = [index for index, param in enumerate(flat.params) if param.grad is None]
            for index in range(len(flat.params)):
                if index not in missing:
                    gradient.land(index, flat.local(index, out))
            if missing:
                self._landed.append((gradient, out.clone(), False))

    def finish(self) -> None:
        """Backward is over: reduce what any rank still owes, wait for all, and set ``.grad``.  Collective when ranks > 1."""
        if not self.open:
            return
        self.open = False
        if self.alone and not self._ready and not self._under_way and not self._landed:
            return
        if self._holds_back():
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._finish()

    def _finish(self) -> None:
        try:
            for number in self._order[self._next :]:
                self._launch(self.gradients[number])
            used, again = self._agree_used()
            for number in again:
                self._launch(self.gradients[number])
            while self._under_way:
                self._land_oldest()
            self._claim(used)
            self._agree_order()
        finally:
            for gradient in self.gradients.values():
                gradient.reserved = False
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
        for gradient, out, in_shard in self._landed:
            flat = gradient.flat
            for index, flag in enumerate(used[flat.number]):
                if not flag:
                    continue
                if has_hooks(flat):
                    deliver(flat, index, ShardedTensor(flat.local(index, out).to(flat.kind.master, copy=True), flat.specs[index]))
                elif flat.params[index].grad is None:
                    if in_shard:
                        flat.params[index].grad = gradient.tensor(index)
                    else:
                        gradient.land(index, flat.local(index, out))

    def _agree_order(self) -> None:
        """After the first whole backward, take rank 0's order of completion as canonical."""
        if self._agreed or self.alone:
            return
        done = list(dict.fromkeys(self._completed))
        order = done + [number for number in self._order if number not in done]
        numbers = torch.tensor(order, dtype=torch.int64)
        self.comm.world.broadcast(Call(CONTROL, "agree on order", "all units"), numbers)
        self._order = [int(number) for number in numbers.tolist()]
        self._agreed = True

    def _selected(self, gradient: Gradient, grads: Sequence[Tensor | None]) -> list[ShardedTensor | None]:
        """autograd.grad or backward(inputs=...): reduce now, and hand the ranges to autograd."""
        flat = gradient.flat
        once = Gradient(flat, self.pool)
        once.partial = torch.zeros(flat.layout.padded, dtype=flat.kind.reduce, device=flat.kind.device)
        once.add(grads)
        out = torch.empty(flat.shard_numel, dtype=flat.kind.reduce, device=flat.kind.device)
        call = Call(REDUCE, "reduce for autograd.grad", flat.name, flat.number)
        if flat.ownership.whole:
            all_reduce_flat(self.comm.shard, call, once.partial, flat.layout).wait()
            out = once.partial
        else:
            self.comm.shard.reduce_scatter(call, once.partial, out, flat.layout).wait()
        if not isinstance(self.comm.replicate, Alone):
            layout = flat_layout([out.numel()], world=self.comm.replicate.axis.world, itemsize=out.element_size())
            all_reduce_flat(self.comm.replicate, call, out, layout).wait()
        out = out.mul_(1.0 / self._world).to(flat.kind.master)
        made = [ShardedTensor(flat.local(index, out), spec) for index, spec in enumerate(flat.specs)]
        return [None if grad is None else hooked(tensor) for grad, tensor in zip(grads, made, strict=True)]


def has_hooks(flat: Flat) -> bool:
    return any(spec.hooks or spec.post_hooks for spec in flat.specs)


def hooked(grad: ShardedTensor) -> ShardedTensor:
    """Pass a reduced gradient through the user's hooks, as autograd would before accumulating it."""
    for hook in tuple(grad._spec.hooks.values()):
        replaced = hook(grad)
        if isinstance(replaced, ShardedTensor):
            grad = replaced
        elif replaced is not None:
            grad = ShardedTensor(grad._spec.take(replaced).clone(), grad._spec)
    return grad


def deliver(flat: Flat, index: int, landed: ShardedTensor) -> None:
    """Hand one reduced gradient to the parameter through its hooks."""
    grad = hooked(landed)
    param = flat.params[index]
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)
    for hook in tuple(flat.specs[index].post_hooks.values()):
        hook(param)


def _held(tensor: ShardedTensor) -> bool:
    """Someone besides our list keeps this gradient (refcounts of the list, the loop and the call are three)."""
    return sys.getrefcount(tensor) > 4 or tensor._use_count() > 1 or sys.getrefcount(tensor._local) > 2  # type: ignore[attr-defined]


def _accumulates(node: Any) -> bool:
    """All parameters behind ``node`` shall accumulate: backward().  Else autograd.grad or backward(inputs=...) chose some."""
    try:
        return all(
            torch._C._will_engine_execute_node(edge)  # type: ignore[attr-defined]
            for edge, _ in node.next_functions
            if edge is not None
        )
    except RuntimeError:
        # torch refuses to answer for a leaf that autograd.grad captures.
        return False
