"""Pa: what a recomputed unit was given is kept as 1/t on each of t ranks that hold it alike, and gathered for backward.

``activation/saved.py`` hands over what a unit is given, and asks for it again; the stash takes the ranges where activations
have a tier.

Source: ZeRO, arXiv:1910.02054, section 6.1.

Note: [What decides]
    Ranks must start the same gathers in the same order.  So whatever decides about one (which inputs are the same tensor, what
    was asked for, what comes next) is kept in slots of the pass, which live alike on all ranks, and never follows from what
    happens to be alive: Python may free a graph here earlier than there.  A rank that has freed its range sends a header that
    says so, and whoever needs the tensor nevertheless raises.

Note: [Ahead]
    Backward asks for units in the reverse of their order in forward, mostly.  Opening a unit's inputs starts the gathers of
    the units before it, as many as the policy prefetches; those gathered early are read once by everybody who saved them and
    then dropped, or else when backward ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from offload.errors import DivergenceError
from offload.events import HERE, Bus
from offload.stash import Stash
from offload.virtual import NAME as VIRTUAL
from offload.virtual import running
from offload.work import during
from zhooks import tree
from zhooks.activation import DividedInput, Division, Residual, Undivided
from zhooks.comm import DONE, GATHER, Call, Transport, Work
from zhooks.parallel.divided import HEADER, Cut, Form, Slot, cut_layout, form_of, local_of, values_of
from zhooks.parallel.replication import Left, Replication, TakenAlike

__all__ = ["open_partition"]


@dataclass(slots=True, eq=False)
class _Unit:
    """The inputs of one unit, or of one of several calls of it; ``opened``: the backward that asked for them last."""

    slots: list[Slot] = field(default_factory=list)
    opened: int = -1


@dataclass(slots=True, eq=False)
class _Pass:
    """One forward: its units in order, and the slots by what they hold."""

    path: str
    units: list[_Unit] = field(default_factory=list)
    known: dict[tuple[object, ...], Slot] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """An input that autograd keeps, and where in the forward it was saved."""

    cut: Cut
    slot: Slot
    passed: _Pass
    at: int
    form: Form


@dataclass(slots=True, eq=False)
class _Gather:
    """A gather from its start until everybody has read it; ``shard`` is what this rank sends."""

    slot: Slot
    full: Tensor
    shard: Tensor
    work: Work
    landed: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is left whole, and how far backward looks ahead.

    Attributes:
        least_nbytes: smaller tensors are left alone; whole tensors, not ranges.
        ahead: units gathered before they are asked for.
        left: units whose plain inputs are different on every rank.
    """

    least_nbytes: int
    ahead: int
    left: Left


@dataclass(frozen=True, slots=True)
class Owners:
    """Who keeps memory alive whatever becomes of an input on it: storages by address.

    Attributes:
        buffers: those of the model's buffers now.
        holds: whether one is that of gathered parameters.
    """

    buffers: Callable[[], set[int]]
    holds: Callable[[int], bool]


class Partition(Undivided):
    """The cut activations of one attachment."""

    divides = True

    def __init__(
        self, axis: Transport, data: Transport, stash: Stash | None, bounds: Bounds, bus: Bus, owners: Owners
    ) -> None:
        self._axis, self._stash, self._bounds, self._bus, self._owners = axis, stash, bounds, bus, owners
        self._replication = TakenAlike() if axis.name == VIRTUAL else Replication(axis, data)
        self._pass = _Pass("")
        self._open: str | None = None
        self._unit: _Unit | None = None
        self._key = "model"
        self._mine: dict[int, tuple[Tensor, Form]] = {}
        self._cuts: weakref.WeakSet[Cut] = weakref.WeakSet()
        self._gathers: list[_Gather] = []
        self._headers: list[tuple[Slot, Tensor]] = []
        self._buffers: set[int] | None = None
        self._number = self._backward = self._moved = 0
        # Autograd may run nodes of two devices on two threads.
        self._lock = threading.RLock()

    # Forward.

    def begin(self, path: str) -> None:
        """A forward begins."""
        self.drop_unasked()
        self._pass, self._open, self._buffers = _Pass(path), path, None
        self._replication.begin()

    def end(self) -> None:
        """That forward is over; see ``Replication.end``."""
        path, self._open = self._open, None
        if path is None or not self._pass.units:
            return
        self._moved = sum(slot.layout.padded for slot in self._pass.known.values())
        self._replication.end(path)

    def abandon(self) -> None:
        """It raised."""
        self._open = self._unit = None
        self._mine.clear()

    @contextmanager
    def inputs(self, unit: str, where: str, given: Sequence[Tensor], name: Callable[[int], str]) -> Iterator[None]:
        """What is saved inside are the inputs ``given`` to ``unit``, entered through the module ``where``.  Collective."""
        if not self.active or self._open is None:
            yield
            return
        plain = not self._bounds.left.covers(unit, where)
        self._key = where
        found = {number: mine for number, tensor in enumerate(given) if (mine := self._cuttable(tensor, plain)) is not None}
        differing = self._replication.compare(self._open, where, {n: local for n, (local, _) in found.items()}, name)
        # A pack hook is handed the tensor itself.
        self._mine = {id(given[number]): mine for number, mine in found.items() if number not in differing}
        self._unit = _Unit()
        self._pass.units.append(self._unit)
        try:
            yield
        finally:
            self._unit = None
            self._mine.clear()

    def _cuttable(self, tensor: Tensor, plain: bool) -> tuple[Tensor, Form] | None:
        """The plain tensor to cut, and how it is viewed again; None where this one is left alone."""
        if tensor.requires_grad and tensor.is_leaf:
            return None
        found = local_of(tensor, self._axis.axis.ranks)
        if found is None or (found[1] is None and not plain):
            return None
        local, spec = found
        form = form_of(local, spec)
        if form is None or form.numel * local.element_size() < self._bounds.least_nbytes:
            return None
        return None if self._is_owned(local) else (local, form)

    def _is_owned(self, local: Tensor) -> bool:
        """A part of what its owner keeps whole would be kept beside it."""
        address = torch._C._storage_address(local)  # type: ignore[attr-defined]
        if local.requires_grad:
            return self._owners.holds(address)
        if self._buffers is None:
            self._buffers = self._owners.buffers()
        return address in self._buffers or self._owners.holds(address)

    @torch.no_grad()
    def take(self, tensor: Tensor, count: Residual | None) -> DividedInput | None:
        unit, mine = self._unit, self._mine.get(id(tensor))
        if unit is None or mine is None:
            return None
        local, form = mine
        with torch.inference_mode(False):
            values = values_of(local, form)
            slot = self._pass.known.get(values.place)
            if slot is None:
                self._number += 1
                layout = cut_layout(values.flat.numel(), self._axis.axis.world)
                slot = self._pass.known[values.place] = Slot(self._key, self._number, layout, local)
            cut = slot.cut() if slot.cut is not None else None
            if cut is None:
                cut = Cut(values.flat, slot, self._axis.axis.rank)
                self._keep(cut, slot)
            slot.saves += 1
            if slot not in unit.slots:
                unit.slots.append(slot)
            probe = local.detach()
            probe.data = torch.empty(0, dtype=local.dtype, device=local.device)
        if count is not None and cut.shard is not None:
            cut.counted = count.keep(cut.shard)
        elif count is not None and self._stash is not None:
            count.stashed(self._stash)
        kept = _Kept(cut, slot, self._pass, len(self._pass.units) - 1, form)
        return DividedInput(slot.key, form.shape, partial(self._open_again, kept), probe, local._version)

    def _keep(self, cut: Cut, slot: Slot) -> None:
        slot.cut = weakref.ref(cut)
        assert cut.shard is not None
        if self._stash is not None:
            cut.away = self._stash.put(cut.shard, least=0)
        if cut.away is not None:
            cut.shard = None
        else:
            self._bus.hold("activation on device", slot.key, cut.shard.untyped_storage())
        self._cuts.add(cut)

    # Backward.

    def _open_again(self, part: _Kept) -> Tensor:
        """The input again; what backward is likely to ask for next is set on its way.  Collective.

        Raises:
            DivergenceError: another rank gathers something else, or has freed its shard.
        """
        with self._lock:
            slot = part.slot
            self._start(part)
            gather = slot.under_way
            assert gather is not None
            if not gather.landed:
                self._land(gather)
                self._look(gather)
            slot.reads += 1
            if slot.reads >= slot.saves:
                self._drop(gather)
            return part.form.view(gather.full)

    def _start(self, part: _Kept) -> None:
        """Start what is asked for, with the other inputs of its unit, and those of the units before; see Note [Ahead]."""
        units, at = part.passed.units, part.at
        again = units[at].opened == self._backward
        units[at].opened = self._backward
        wanted = [part.slot] if again else [part.slot, *units[at].slots]
        if not again:
            ahead = (unit for unit in reversed(units[:at]) if unit.slots)
            for unit, _ in zip(ahead, range(self._bounds.ahead), strict=False):
                if unit.opened != self._backward:
                    wanted.extend(unit.slots)
        for slot in wanted:
            if slot.under_way is None:
                self._launch(slot)

    def _launch(self, slot: Slot) -> None:
        cut = slot.cut()
        with torch.inference_mode(False), torch.no_grad():
            if cut is None:
                # Freed here; see Note [What decides].
                shard = torch.zeros(slot.layout.shard_numel, dtype=torch.uint8, device=slot.device)
            else:
                shard = cut.shard if cut.shard is not None else self._bring(cut)
            full = torch.empty(slot.layout.padded, dtype=torch.uint8, device=shard.device)
        self._bus.begin("gather activation", slot.key, full.numel(), at=HERE)
        self._bus.hold("activation on device", slot.key, full.untyped_storage())
        call = Call(GATHER, "gather activation", slot.key, slot.number)
        slot.under_way = gather = _Gather(slot, full, shard, self._axis.all_gather(call, shard, full, slot.layout))
        self._gathers.append(gather)

    def _bring(self, cut: Cut) -> Tensor:
        assert self._stash is not None
        return self._stash.open(cut.away)

    def _land(self, gather: _Gather) -> None:
        """Wait until a gather is over; one that failed is dropped."""
        if gather.landed:
            return
        slot = gather.slot
        self._bus.begin("wait gather activation", slot.key, at=HERE)
        try:
            gather.work.wait()
            gather.landed = True
        finally:
            self._bus.end("wait gather activation", slot.key, at=HERE)
            over = during(gather.work) or HERE
            self._bus.end("gather activation", slot.key, gather.full.numel(), at=over)
            gather.work = DONE
            if not gather.landed:
                self._drop(gather)

    def _look(self, gather: _Gather) -> None:
        """Every rank has sent what was asked for: on a GPU, where looking would wait, that is known when backward ends."""
        slot, world = gather.slot, self._axis.axis.world
        headers = gather.full[slot.layout.padded - world * HEADER :].view(torch.int64).view(world, -1)[:, 0]
        self._headers.append((slot, headers if headers.device.type == "cpu" else headers.clone()))
        if headers.device.type == "cpu":
            self._check()

    def _check(self) -> None:
        headers, self._headers = self._headers, []
        for slot, row in headers:
            found = _numbers(row, slot)
            ranks = self._axis.axis.ranks
            wrong = [(rank, number) for rank, number in zip(ranks, found, strict=True) if number != slot.number]
            if wrong:
                rank, number = wrong[0]
                sent = f"activation {number}" if number else "nothing, because it has already freed its shard"
                raise DivergenceError(
                    f"Rank {rank} does not run the same backward through unit {slot.key}. Expected every rank of axis "
                    f"{self._axis.axis.name} to gather the unit's input again, found that rank {rank} sent {sent}. Let every "
                    f"rank run the same forward and backward. (Input {slot.number}.)"
                )

    def _drop(self, gather: _Gather) -> None:
        slot = gather.slot
        slot.under_way, slot.reads = None, 0
        self._gathers.remove(gather)

    def drop_unasked(self) -> None:
        """Backward is over: what was gathered ahead and never asked for is dropped."""
        with self._lock:
            self._backward += 1
            try:
                for gather in tuple(self._gathers):
                    self._land(gather)
                self._check()
            finally:
                for gather in tuple(self._gathers):
                    self._drop(gather)
                self._headers.clear()

    # What it holds and moves.

    @property
    def nbytes(self) -> int:
        """Bytes on the device: this rank's ranges, and inputs that are gathered."""
        held = sum(cut.shard.numel() for cut in tuple(self._cuts) if cut.shard is not None)
        return held + sum(gather.full.numel() for gather in tuple(self._gathers))

    @property
    def payload(self) -> int:
        """Bytes the last forward's inputs make when backward gathers each once."""
        return self._moved

    def state_held(self) -> None:
        """State what is held on the device."""
        for cut in tuple(self._cuts):
            if cut.shard is not None:
                self._bus.hold("activation on device", cut.key, cut.shard.untyped_storage())
        for gather in tuple(self._gathers):
            self._bus.hold("activation on device", gather.slot.key, gather.full.untyped_storage())


def _numbers(row: Tensor, slot: Slot) -> list[int]:
    """What each rank has sent, once it is known here."""
    if row.device.type != VIRTUAL:
        numbers: list[int] = row.tolist()
        return numbers
    # It has no values; the host waits for it all the same.
    running().current.synchronize()
    return [slot.number] * len(row)


def open_partition(division: Division) -> Undivided:
    """What cuts the inputs of units; where the axis has one rank, nothing."""
    policy, comm = division.policy, division.comm
    if comm.tp.axis.world == 1:
        return Undivided()
    bounds = Bounds(
        policy.activation.min_bytes, policy.schedule.prefetch, Left.of(division.model, policy.activation.sharded_inputs)
    )
    owners = Owners(partial(buffers_of, division.model), division.holds)
    return Partition(comm.tp, comm.world, division.stash, bounds, division.bus, owners)


def buffers_of(model: torch.nn.Module) -> set[int]:
    """Where the buffers of ``model`` lie."""
    return {torch._C._storage_address(buffer) for buffer in tree.buffers(model)}  # type: ignore[attr-defined]
