"""The ranks that share one flat buffer: who has which range, how ranges are combined over them, and whose gradients overflowed.

Note: [Group and owner]
    A gradient or a state needs its group as long as somebody keeps it, whatever became of the model or its layout.  The group
    therefore knows ranks and sizes alone: from a parameter's ``.grad``, which the garbage collector cannot follow, no way
    shall lead back to the parameter.  What is bound, a parameter or an alias of one, keeps the flat buffer itself alive.

Note: [Hashes]
    A hash is a sum over 64-bit words, each times an odd number of its own and its upper bits mixed into the lower ones, modulo
    2**64.  Each step can be undone, so that one word that differs always shows.  Without the mixing two flipped signs would
    cancel each other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from offload.errors import ShardedOpError
from offload.events import Bus
from zhooks.comm import CONTROL, Alone, Call, Transport
from zhooks.layout import PP, SHARD, Axis, Layout, Piece

if TYPE_CHECKING:
    from zhooks.tensor.shard import ParamShard
    from zhooks.tensor.sharded import ShardedTensor

_WORDS = 1 << 16
_STEP, _ODD = 0x5851F42D4C957F2C, 0x14057B7EF767814F
#: Overflows remembered; a run that has more of them than this is told of the latest.
KEPT = 64

#: A unit and one of its parameters.
Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Overflow:
    """A step whose gradients were not all finite.

    Attributes:
        step: counted from 0 over the steps this process has tried, skipped ones too.
        scale: what the loss was scaled by; 1.0 where a fused optimizer unscales for a GradScaler.
        parameters: (unit, parameter) of every gradient with an inf or a nan in it, on whichever rank.
    """

    step: int
    scale: float
    parameters: tuple[Name, ...]


class Watch(Protocol):
    """Who watches the gradients of a flat buffer (``grad/scaling.py``)."""

    def outside(self, view: Tensor) -> Tensor:
        """A parameter's value as it is to be used now, maybe outside of any forward."""

    def scaler_comes(self) -> None:
        """A GradScaler is about to unscale."""

    def ask_stages(self, found: Tensor) -> None:
        """A GradScaler has unscaled: ``found`` becomes 1 where any pipeline stage's gradients overflowed."""

    def apart(self) -> Sequence[ShardGroup]:
        """Of gradients that some ranks may lack while others have theirs (experts over ep), of all that is attached, in one
        order on all ranks."""

    def unscaled(self, grads: Sequence[ShardedTensor], found: Tensor, inv_scale: Tensor) -> None:
        """A GradScaler has unscaled these; ``found`` is 1 where any rank's overflowed."""


class HeldSums(Protocol):
    """What backward passes inside ``no_sync`` have added up on this rank for the parameters of one flat buffer."""

    def holds(self, index: int) -> bool:
        """There is a sum for parameter ``index``, and no backward runs."""

    def drops(self, index: int) -> int:
        """How often the gradient of parameter ``index`` was set."""

    def drop(self, index: int) -> None:
        """The gradient of parameter ``index`` is set: what was added up for it so far is gone."""

    def zero(self, index: int) -> None:
        """What was added up for parameter ``index`` becomes zero."""

    def reduce(self) -> None:
        """Reduce the sums of all parameters: the values are needed.  Collective."""


class Engine:
    """Who runs the passes that a flat is used in: nobody, where the model is plain; else ``run/runtime.py``."""

    @property
    def outermost(self) -> bool:
        """No forward is running."""
        return True

    def loose_use(self, flat: Any) -> None:
        """A parameter is used outside its module's forward: its flat is gathered."""

    def due(self) -> None:
        """Gradients are needed: an open backward is finished, and what adds up is reduced.  Collective."""

    def relayout(self) -> None:
        """A parameter was frozen or unfrozen: the layout follows at the next entry."""

    def before_use(self) -> None:
        """A parameter is used: outside a forward the layout follows freezes first; it may be bound anew."""


class Owner(Protocol):
    """The flat buffer of a parameter."""

    engine: Engine
    """Hears that parameters are used, or frozen."""
    node_asked: bool
    """Somebody has asked autograd for a parameter's accumulation node."""
    sums: HeldSums | None
    """What ``no_sync`` holds back; None of what has no gradient."""

    def written(self, index: int | None = None) -> None:
        """The shard's values changed, those of one parameter or all: whatever is gathered is stale."""

    def look(self, name: str) -> None:
        """The user reads the gradient of a parameter: an open backward is finished, and it must be there to be read."""

    def view(self, index: int) -> Tensor:
        """The full plain tensor of parameter ``index``, gathered if need be; part of the graph where grad is on."""


class ShardGroup:
    """The ranks that share one flat buffer, and this rank's place among them: alone, where each rank has all of it.

    Args:
        layout: how the buffer is divided over the data ranks.
        transport: between those.
        replicated: each of them has all of the buffer.
        buffer_nbytes: bytes that no buffer may exceed.
        pretrained: the model that it is of has ``save_pretrained``, for errors.
    Attributes:
        layout: how the buffer is divided; over this rank alone where it has all of it.
        transport: between the ranks of ``layout``.
        rank: whose range of ``layout`` this is.
        sharded: more than one rank shares the buffer.
        beside: transports of the other axes, by name, for what is summed up over more than the data ranks.
    """

    def __init__(
        self,
        name: str,
        number: int,
        device: torch.device,
        layout: Layout,
        transport: Transport,
        *,
        replicated: bool,
        buffer_nbytes: int,
        beside: Mapping[str, Transport] | None = None,
        watch: Watch | None = None,
        pretrained: bool = False,
    ) -> None:
        self.name, self.number, self.buffer_nbytes, self.pretrained = name, number, buffer_nbytes, pretrained
        axis = transport.axis
        alone = Alone(Axis(axis.name, (axis.ranks[axis.rank],), 0))
        self.layout, self.transport = (layout.undivided(), alone) if replicated else (layout, transport)
        self.rank, self.sharded = self.transport.axis.rank, self.layout.world > 1
        self.beside = beside or {}
        self._device = device
        self._watch = None if watch is None else weakref.ref(watch)

    @property
    def watch(self) -> Watch | None:
        """Who watches the gradients, as long as there is one."""
        return None if self._watch is None else self._watch()

    def pieces(self, index: int) -> tuple[Piece, ...]:
        """What this rank has of parameter ``index``."""
        return self.layout.pieces(index, self.rank)

    def assemble(self, spec: ParamShard, local: Tensor) -> Tensor:
        """The full plain tensor of a parameter of which each rank has a range, this one ``local``.  Collective."""
        layout = self.layout
        self._check(self.transport, spec.name)
        own = torch.zeros(layout.shard_numel, dtype=local.dtype, device=self._device)
        start = spec.pieces[0].local if spec.pieces else 0
        own[start : start + local.numel()].copy_(local)
        full = torch.empty(layout.padded, dtype=local.dtype, device=self._device)
        self.transport.all_gather(Call(CONTROL, "full_tensor", spec.name, self.number), own, full, layout).wait()
        return spec.whole(spec.within(full, layout.starts[spec.index]).clone())

    def all_reduce(self, tensor: Tensor, op: str, axes: tuple[str, ...] = (SHARD,)) -> None:
        """Combine a small tensor over axes of the mesh; "shard" stands for the ranks that share the buffer, if any do."""
        call = Call(CONTROL, f"all-reduce {op}", self.name, self.number)
        for axis in axes:
            if axis == PP:
                # Units of other stages have other names.
                call = Call(CONTROL, f"all-reduce {op}", "all stages")
            transport = self.beside.get(axis) if axis != SHARD else self.transport if self.sharded else None
            if transport is not None:
                self._check(transport, self.name)
                transport.all_reduce(call, tensor, op)

    def _check(self, transport: Transport, name: str) -> None:
        if transport.closed:
            raise ShardedOpError(
                f"Cannot gather the tensor of {name}. Expected an attached model, found that it was detached, so that its "
                "ranks no longer exchange values. Call full_tensor() and read norms (norm.item()) before detach(), or use the "
                "plain model; to_local() still returns this rank's range."
            )

    def ranks(self) -> tuple[int, ...]:
        """What is the same of two groups that one collective combines: the transports it goes through, by identity."""
        return (id(self.transport) if self.sharded else 0, *(id(transport) for transport in self.beside.values()))

    def spans(self, axis: str) -> bool:
        """More than one rank is on ``axis``, tp or pp."""
        return axis in self.beside and self.beside[axis].axis.world > 1

    def first(self, axis: str) -> bool:
        """This is the first rank on ``axis``, shard or tp, or holds the same as the first."""
        if axis == SHARD:
            return self.rank == 0
        return axis not in self.beside or self.beside[axis].axis.rank == 0


class Overflows:
    """The latest overflows of one attachment, and the number of the step that is being made."""

    def __init__(self, bus: Bus) -> None:
        self._bus, self._latest = bus, deque[Overflow](maxlen=KEPT)
        self.step, self._used = 0, False

    @property
    def latest(self) -> tuple[Overflow, ...]:
        """Oldest first."""
        return tuple(self._latest)

    def landed(self) -> None:
        """A backward has left gradients: another step's, where the former ones have been used."""
        if self._used:
            self.step, self._used = self.step + 1, False

    def used(self) -> None:
        """A step was tried with the gradients, or a scaler has judged them."""
        self._used = True

    def note(self, scale: float, names: Iterable[Name]) -> None:
        """These gradients of the present step overflowed."""
        found = tuple(names)
        if not found:
            return
        if self._latest and self._latest[-1].step == self.step:
            known = self._latest.pop()
            merged = replace(known, parameters=tuple(dict.fromkeys((*known.parameters, *found))))
        else:
            merged = Overflow(self.step, scale, found)
        self._latest.append(merged)
        if self._bus.active:
            for unit in dict.fromkeys(unit for unit, _ in found):
                mine = [parameter for owner, parameter in found if owner == unit]
                more = f" and {len(mine) - 1} more" if len(mine) > 1 else ""
                self._bus.instant("overflow", f"{unit}: {mine[0]}{more} at step {self.step}, scale {scale:g}")


def hash_of(tensor: Tensor) -> int:
    """A hash of a plain tensor's values, in row order; see Note [Hashes]."""
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        whole = flat.numel() // 8 * 8
        weights = torch.arange(_WORDS, dtype=torch.int64, device=flat.device).mul_(_STEP).add_(_ODD)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for piece in flat[:whole].view(torch.int64).split(_WORDS):
            mixed = piece * weights[: piece.numel()]
            total = total * _ODD + mixed.bitwise_xor_(mixed >> 29).mul_(_ODD).sum()
        tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        tail[: flat.numel() - whole].copy_(flat[whole:])
        return int((total * _ODD + tail.view(torch.int64)[0]).item())
