"""One flat buffer's gradient: from what autograd hands over to the shard behind the parameters' ``.grad``.

``reduce.py`` fills it, reduces it and lands it; the user's parameter hooks run here.  It never communicates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offload.arena import Use
from offload.block import Block, Part
from offload.errors import ShardedOpError
from offload.tier import Tier
from zhooks.flat import Flat
from zhooks.pool import Pool
from zhooks.sharded import ShardedTensor


class Gradient:
    """One flat buffer's gradient: the partial sum of this rank, and the reduced range behind the parameters' ``.grad``.

    Note: [Handed out once]
        The shard is ours from ``free`` until its parts have become parameters' gradients; then it is theirs, and we know it
        by weak references alone.  So it goes with the last of them (``zero_grad``), nobody's is ever overwritten, and no
        count of references says whose it is.  A part that no parameter has claimed yet may be handed out later, as long as
        the others keep the shard alive.
    """

    def __init__(self, flat: Flat, pool: Pool) -> None:
        self.flat, self._pool = flat, pool
        self.present = [False] * len(flat.params)
        self.partial: Tensor | None = None
        # Of a long flat: what autograd handed over, until its pieces are sent.
        self._handed: list[Tensor] = []
        # The shard holds, or is about to receive, values that no parameter claims yet.
        self.reserved = False
        self._shard: Tensor | None = None
        self._block: Block | None = None
        # Parts of the shard that are, or were, gradients, and how to find the shard while they live.
        self._claimed: set[int] = set()
        self._memory: Callable[[], Tensor | Block | None] = _nothing

    def free(self) -> bool:
        """No parameter has a gradient: there is a shard for the next one, to be reserved or handed out at once."""
        if self.reserved or any(param.grad is not None for param in self.flat.params):
            return False
        if self._claimed or (self._shard is None and self._block is None):
            self._fresh()
        return True

    @property
    def tiered(self) -> bool:
        """The gradient rests off the device: it is made whole there before it goes."""
        return self.flat.kind.tiers.gradient is not Tier.DEVICE and self.flat.layout.padded > 0

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        return [self.flat.span(index) for index in range(len(self.flat.specs))]

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        """What of the flat buffer is no parameter's."""
        layout = self.flat.layout
        ends = [start + numel for start, numel in zip(layout.starts, layout.numels, strict=True)]
        return [(end, start) for end, start in zip(ends, [*layout.starts[1:], layout.padded], strict=True) if end < start]

    def _fresh(self) -> None:
        """Another shard; one that somebody keeps lives as long as the gradients in it."""
        flat = self.flat
        self._shard = self._block = None
        self._claimed = set()
        if self.tiered:
            assert flat.store is not None
            block = flat.store.put(f"gradient/{flat.name}", flat.shard_numel, flat.kind.master, flat.kind.tiers.gradient)
            self._block, self._memory = block, weakref.ref(block)
            return
        self._shard = self._pool.lasting(flat.shard_numel, flat.kind.master, flat.kind.device, Use.GRADIENTS)
        self._memory = _while_it_lives(self._shard)
        self._hold(self._shard)

    def hand_over(self) -> None:
        """The shard belongs to the gradients in it from now on."""
        self.reserved = False
        self._shard = self._block = None

    @property
    def shard(self) -> Tensor:
        if self._block is not None:
            return self._block.tensor()
        assert self._shard is not None
        return self._shard

    @property
    def block(self) -> Block | None:
        """Where the reduced gradients rest, when that is off the device."""
        return self._block

    def overwrite(self, reduced: Tensor) -> None:
        """The whole shard becomes ``reduced``; nothing that was there is read."""
        if self._block is not None and self.flat.store is not None:
            self.flat.store.change(self._block, reduced, add=False)
        else:
            self.shard.copy_(reduced)

    def accumulate(self, reduced: Tensor) -> None:
        """``reduced`` is added to the whole shard."""
        if self._block is not None and self.flat.store is not None:
            self.flat.store.change(self._block, reduced, add=True)
        else:
            self.shard.add_(reduced)

    def tensor(self, index: int) -> ShardedTensor:
        """One parameter's part of the shard, for its ``.grad``."""
        self._claimed.add(index)
        start, numel = self._spans[index]
        with torch.inference_mode(False):
            part = self.shard[start : start + numel] if self._block is None else Part(self._block, start, numel)
            return ShardedTensor(part, self.flat.specs[index])

    def _part(self, index: int) -> ShardedTensor | None:
        """One parameter's part of a shard that others' gradients keep alive, if it was never anybody's."""
        memory = None if index in self._claimed else self._memory()
        if memory is None:
            return None
        ours = self._shard, self._block
        self._shard, self._block = (memory, None) if isinstance(memory, Tensor) else (None, memory)
        tensor = self.tensor(index)
        self._shard, self._block = ours
        return tensor

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """One pass over each gradient: copied or added, and cast, into the partial sum."""
        flat = self.flat
        if self.partial is None:
            own = flat.ownership.whole and flat.kind.master == flat.kind.reduce and not (self.tiered or has_hooks(flat))
            own = own and self.free()
            self.reserved = self.reserved or own
            self.partial = self._clear(self.shard) if own else self._take()
        parts = self._shaped(self.partial)
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            if self.present[index]:
                parts[index].add_(grad)
            else:
                parts[index].copy_(grad)
                self.present[index] = True

    def hand(self, grads: Sequence[Tensor | None]) -> None:
        """A long flat has one parameter: its gradient stays autograd's own until it is sent in pieces."""
        self._handed.extend(grad for grad in grads if grad is not None)
        self.present[0] = self.present[0] or bool(self._handed)

    def take_parts(self) -> list[Tensor]:
        """What ``hand`` and ``add`` were given since the last reduction, to be summed up in this order."""
        parts = [*([] if self.partial is None else [self.partial]), *self._handed] if self.present[0] else []
        self._handed, self.partial, self.present = [], None, [False]
        return parts

    def complete(self) -> Tensor:
        """The partial sum with zeros where this rank had no gradient."""
        flat = self.flat
        if self.partial is None:
            self.partial = self._take()
        for start, numel, present in zip(flat.layout.starts, flat.layout.numels, self.present, strict=True):
            if not present:
                self.partial[start : start + numel].zero_()
        return self.partial

    def _take(self) -> Tensor:
        flat = self.flat
        partial = self._pool.take(flat.layout.padded, flat.kind.reduce, flat.kind.device, Use.SUMS)
        self._clear(partial)
        self._hold(partial)
        return partial

    def _clear(self, buffer: Tensor) -> Tensor:
        """What no parameter fills must not look like an overflow."""
        for start, stop in self._gaps:
            buffer[start:stop].zero_()
        return buffer

    def _hold(self, tensor: Tensor) -> None:
        bus = self.flat.bus
        if bus.active:
            bus.hold("gradient on device", self.flat.name, tensor.untyped_storage())

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
                self.deliver(index, landed)
            elif fresh:
                spec.within(self.shard, self.flat.layout.starts[index]).copy_(grad)
                param.grad = self.tensor(index)
            else:
                self.land(index, spec.storage_order(grad))
        if fresh:
            self.hand_over()

    def land(self, index: int, local: Tensor) -> None:
        """Set or add one parameter's reduced range."""
        param = self.flat.params[index]
        if param.grad is None:
            tensor = self._part(index)
            if tensor is None and self.tiered:
                self._fresh()
                tensor = self.tensor(index)
                self._block = None
            if tensor is None:
                landed = torch.empty(local.shape, dtype=self.flat.kind.master, device=local.device)
                self._hold(landed)
                tensor = ShardedTensor(landed, self.flat.specs[index])
            tensor._local.copy_(local)
            param.grad = tensor
            return
        if not isinstance(param.grad, ShardedTensor):
            raise ShardedOpError(
                f"{self.flat.specs[index].name}.grad: expected a sharded gradient, found a plain tensor. A custom "
                "autograd Function "
                "read the parameter outside its module's forward; read it inside, or set grad to None."
            )
        mine = param.grad._local
        mine.add_(local.to(mine.device))

    def deliver(self, index: int, landed: ShardedTensor) -> None:
        """Hand one reduced gradient to the parameter through the user's hooks."""
        grad, param = hooked(landed), self.flat.params[index]
        if param.grad is not None:
            param.grad.add_(grad)
        elif self.tiered:
            self.land(index, grad._local)
        else:
            param.grad = grad
        for hook in tuple(self.flat.specs[index].post_hooks.values()):
            hook(param)

    def _shaped(self, buffer: Tensor) -> list[Tensor]:
        return [spec.within(buffer, start) for start, spec in zip(self.flat.layout.starts, self.flat.specs, strict=True)]


def has_hooks(flat: Flat) -> bool:
    """The user watches or changes gradients of these parameters."""
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


class _Later:
    """A hook of autograd's accumulation node, which runs before ranks have reduced anything: it does nothing there.

    It stays in the node's own table, so that the user's handle removes it; the parameter's hooks call it on time.
    """

    def __init__(self, hook: Callable[..., Any], table: weakref.ref[Any], key: int) -> None:
        self._hook, self._table, self.key = hook, table, key

    def __call__(self, *_: Any) -> None:
        """Autograd's call, too early."""

    def landed(self, param: Tensor) -> None:
        """The gradient is there."""
        table = self._table()
        if table is not None and table.get(self.key) is self:
            with torch._C.DisableTorchFunctionSubclass():
                grad = param.grad
            self._hook((), (grad,))

    def lands(self, grad: Tensor) -> Any:
        """The gradient is reduced and about to be put in place; what the hook puts there instead, None for nothing."""
        table = self._table()
        if table is None or table.get(self.key) is not self:
            return None
        replaced = self._hook((grad,))
        return replaced[0] if isinstance(replaced, tuple) else replaced


def put_off_hooks(node: Any, flat: Flat) -> None:
    """Let hooks that the user has put on accumulation nodes run when the gradient is reduced and in place.

    Somebody has asked for the node of a parameter of ``flat`` (``p.view_as(p)``), as torch's optimizers in backward do.
    """
    for (edge, _), spec in zip(node.next_functions, flat.specs, strict=True):
        if edge is None:
            continue
        for later in _put_off(edge.register_prehook):
            spec.hooks[-1 - later.key] = later.lands
        for later in _put_off(edge.register_hook):
            spec.post_hooks[-1 - later.key] = later.landed


def _put_off(register: Callable[[Any], Any]) -> Iterator[_Later]:
    """What takes the place of a node's hooks of one kind, where nothing has yet."""
    # torch shows the table of a node's hooks only to who registers one.
    mine = register(_Later.__call__)
    table = mine.hooks_dict_ref()
    mine.remove()
    for key, hook in list(table.items()):
        if not isinstance(hook, _Later):
            table[key] = later = _Later(hook, mine.hooks_dict_ref, key)
            yield later


def accumulates(node: Any) -> bool:
    """All parameters behind ``node`` shall accumulate: backward().  Else autograd.grad or backward(inputs=...) chose some."""
    try:
        return all(torch._C._will_engine_execute_node(edge) for edge, _ in node.next_functions if edge is not None)
    except RuntimeError:
        # torch refuses to answer for a leaf that autograd.grad captures.
        return False
