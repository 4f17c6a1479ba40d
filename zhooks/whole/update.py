"""Updates parameters whole, each on its owner: ranges of values and gradients travel there, new values travel back.

The arithmetic is the optimizer's own ``step`` on plain stand-ins.

Note: [Rounds]
    Parameters travel in rounds: in each, every owner gets at most as many as fit the bound of a buffer, and at least one.
    A round is one exchange to the owners, the step of each, and one exchange back; the next round's parameters are on their
    way while a round is computed.  Before new values go back the ranks agree that all owners have them, so that a step that
    raised on one rank raises on all before a value of the round is written.  Ranges travel from where they lie to where they
    are used: there from the shards into one buffer of an owner's whole parameters, back from these into the shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.errors import DivergenceError, ShardedOpError
from offload.events import HERE, Bus
from offload.store import Store
from zhooks.comm import CONTROL, GATHER, Call, ControlPlane, Transport, Work
from zhooks.optim import (
    Arguments,
    OwnedStates,
    Owners,
    Whole,
    grad_of,
    kept_elsewhere,
    marked,
    memory_beside,
    narrowed,
    options_kept,
    step_of,
    tensors_in,
    with_owners,
)
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat
from zhooks.whole.rounds import Member, Round, by_flat, by_rank, memory_for, planned
from zhooks.whole.stored_states import adopt
from zhooks.whole.tiers import Ahead, Away, Tiers, where_stored

__all__ = ["WholeUpdater"]


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A round on its way to the owners, and what it makes whole on this one: (parameter, value, gradient), 1-D each."""

    work: Work
    whole: list[tuple[Member, Tensor, Tensor]]


class WholeUpdater:
    """The updates of one attachment's whole parameters.

    Args:
        shard: the ranks that share a sharded parameter.
        most_nbytes: what the parameters and gradients of a round may come to on an owner.
        store: keeps what is off the device; None where nothing is.
        ahead: rounds fetched from there while one travels, 0 or 1.
        stored_nbytes: as ``most_nbytes``, for parameters that are kept there.
    """

    def __init__(
        self, owners: Owners, shard: Transport, bus: Bus, most_nbytes: int, store: Store | None, ahead: int, stored_nbytes: int
    ) -> None:
        self._owners, self._shard, self._bus, self._most = owners, shard, bus, most_nbytes
        self._tiers, self._most_stored = Tiers(store, ahead), min(most_nbytes, stored_nbytes)
        self._planned: weakref.WeakKeyDictionary[Optimizer, tuple[Any, list[Round]]] = weakref.WeakKeyDictionary()

    @staticmethod
    def adopt(store: Store, optimizer: Optimizer, flat: Flat) -> None:
        """States of a flat's parameters that were moved or loaded go to their tier."""
        shared = memory_beside(optimizer)
        for _, states in with_owners(optimizer, flat.params):
            adopt(store, states, where_stored(flat), shared)

    @torch.no_grad()
    def step(self, optimizer: Optimizer, updates: Sequence[Whole], arguments: Arguments) -> None:
        """Update those that have gradients.  Collective.

        Raises:
            ShardedOpError: this optimizer cannot be stepped under this policy; nothing has been updated.
            DivergenceError: gradients are there on some ranks alone; nothing has been updated.
        """
        problem = self._owners.refusal(optimizer)
        if problem:
            raise ShardedOpError(f"step: {problem}")
        late = _raised(partial(self._tiers.begin_step, updates, self._most_stored))
        shared = [one for one in updates if one.owner is not None]
        if shared:
            shared = self._with_gradients(shared, late)
        elif late is not None:
            raise late
        mine = [one for one in updates if one.owner is None and grad_of(one.param) is not None]
        if mine:
            self._step_alone(optimizer, mine, arguments)
        if shared:
            self._step_shared(optimizer, shared, arguments)
        self._tiers.end_step()

    def _with_gradients(self, shared: Sequence[Whole], late: Exception | None) -> list[Whole]:
        here = [grad_of(one.param) is not None for one in shared]
        exchanged = torch.tensor([*here, late is not None], dtype=torch.int64, device="cpu")
        self._shard.all_reduce(Call(CONTROL, "step: compare gradients", "all matrices"), exchanged, "sum")
        world, (*counts, failed) = self._shard.axis.world, exchanged.tolist()
        if failed:
            self._agree(late, "0")
        for one, count in zip(shared, counts, strict=True):
            if count not in (0, world):
                raise DivergenceError(
                    f"step expected a gradient of {one.spec.name} on every rank or on none, found one on {count} of {world} "
                    "ranks. Set .grad to None on all ranks or on none; nothing has been updated."
                )
        return [one for one, has in zip(shared, here, strict=True) if has]

    # Rounds.

    def _step_alone(self, optimizer: Optimizer, mine: Sequence[Whole], arguments: Arguments) -> None:
        """Those that this rank has all of: where they lie, together; what is fetched, in rounds."""
        here, away = [one for one in mine if not self._tiers.stored(one)], [one for one in mine if self._tiers.stored(one)]
        going = [*filter(None, [here]), *by_flat(away, self._most_stored)]
        with closing(Ahead(self._tiers, optimizer, going)) as ahead:
            for number, members in enumerate(going):
                done = number
                try:
                    now = ahead.next()
                    now.wait()
                    whole = [(one, one.spec.within(_value(one), 0), one.spec.within(_gradient(one), 0)) for one in members]
                    for one, value in self._stepped(optimizer, whole, arguments):
                        local, values = _value(one), one.spec.pick(value)
                        if local.data_ptr() != values.data_ptr():
                            local.copy_(values)
                        _wrote(one)
                    done += 1
                    self._tiers.written(members)
                    now.close()
                except Exception as error:
                    error.add_note(_half_done(f"{done} of {len(going)}", "parameters and states"))
                    raise

    def _step_shared(self, optimizer: Optimizer, updates: Sequence[Whole], arguments: Arguments) -> None:
        going = self._rounds(optimizer, updates)
        count = len(going)
        with closing(Ahead(self._tiers, optimizer, [now.updates for now in going])) as ahead:
            late: Exception | None = None
            coming = self._begin(ahead, going[0], late, f"0 of {count}") if going else None
            for number, now in enumerate(going):
                assert coming is not None
                (held, arrived), coming, done = coming, None, f"{number} of {count}"
                arrived.work.wait()
                late = _raised(held.sent) or late
                if number + 1 < count:
                    coming = self._begin(ahead, going[number + 1], late, done)
                try:
                    with self._on_all(_half_done(done, "states")):
                        values = self._update(optimizer, arrived, arguments)
                except Exception:
                    if coming is not None:
                        coming[1].work.wait()  # it would be taken for what comes next
                    raise
                del arrived
                self._return(now, values)
                del values
                late = _raised(partial(self._tiers.written, now.updates)) or _raised(held.close) or late
            if any(now.stored for now in going):
                self._agree(late, f"{count} of {count}")

    def _begin(self, ahead: Ahead, now: Round, late: Exception | None, done: str) -> tuple[Away, _Arriving]:
        """Start sending a round.  Nothing is sent to anybody before what it needs is there on all ranks."""
        away = ahead.next()
        if now.stored:
            self._agree(late or _raised(away.wait), done)
        return away, self._send(now)

    def _agree(self, problem: Exception | None, done: str) -> None:
        """Go on where all ranks can.  Collective."""
        with self._on_all(f"zhooks: in this step, {done} rounds of parameters that are updated whole were complete."):
            if problem is not None:
                raise problem

    @contextmanager
    def _on_all(self, note: str) -> Iterator[None]:
        """What is raised inside on some rank is raised on all, with a note.  Collective."""
        try:
            with ControlPlane(self._shard, "step").all_or_none():
                yield
        except Exception as error:
            error.add_note(note)
            raise

    def _rounds(self, optimizer: Optimizer, updates: Sequence[Whole]) -> list[Round]:
        key = tuple((one.flat, one.index, one.group, one.owner, one.label) for one in updates)
        known = self._planned.get(optimizer)
        if known is not None and known[0] == key:
            return known[1]
        found = planned(updates, self._shard.axis.world, self._most, self._tiers.stored, self._most_stored)
        self._planned[optimizer] = (key, found)
        return found

    def _send(self, now: Round) -> _Arriving:
        """Start sending this rank's ranges of gradients and values to the owners."""
        rank, world, flat = self._owners.rank, self._shard.axis.world, now.members[0].one.flat
        sends, receives = by_rank(world), by_rank(world)
        for member in now.members:
            for held in (_gradient(member.one), _value(member.one)):
                sends[member.one.owner or 0].extend(member.local(held, rank))
        whole = memory_for(now.of(rank))
        for member, value, grad in whole:
            for full in (grad, value):
                member.add_ranges(full, receives)
        call = Call(GATHER, "send to owners", flat.name, flat.number)
        return _Arriving(self._shard.exchange(call, sends, receives, now.there), whole)

    def _update(self, optimizer: Optimizer, arrived: _Arriving, arguments: Arguments) -> list[list[Tensor]]:
        """New values of those that this rank owns, by the ranks that have them."""
        sends = by_rank(self._shard.axis.world)
        whole = [
            (member.one, member.one.spec.within(value, 0), member.one.spec.within(grad, 0))
            for member, value, grad in arrived.whole
        ]
        updated = self._stepped(optimizer, whole, arguments)
        for (member, before, _), (one, value) in zip(arrived.whole, updated, strict=True):
            # As long and of the dtype it was, whatever the step put in its place: else it is said before anything is sent.
            member.add_ranges(one.spec.storage_order(value).to(before.dtype).contiguous(), sends)
            # States that are views of what travelled (a last gradient) would keep all of a round.
            memory = before.untyped_storage().data_ptr()
            for tensor in tensors_in(optimizer.state[one.param]):
                if type(tensor) is Tensor and tensor.untyped_storage().data_ptr() == memory:
                    tensor.data = tensor.clone()
        return sends

    def _return(self, now: Round, sends: Sequence[Sequence[Tensor]]) -> None:
        """Send new values back, straight into the shards."""
        rank, flat = self._owners.rank, now.members[0].one.flat
        receives = by_rank(self._shard.axis.world)
        for member in now.members:
            receives[member.one.owner or 0].extend(member.local(_value(member.one), rank))
        self._shard.exchange(Call(GATHER, "return from owners", flat.name, flat.number), sends, receives, now.back).wait()
        for member in now.members:
            _wrote(member.one)

    # One call of the optimizer's own step.

    def _stepped(
        self, optimizer: Optimizer, whole: Sequence[tuple[Whole, Tensor, Tensor]], arguments: Arguments
    ) -> list[tuple[Whole, Tensor]]:
        """The new values that its step makes of (parameter, value, gradient); states of stand-ins are those of the owner."""
        with self._tiers.states(optimizer, [one for one, _, _ in whole]):
            if not whole:
                return []
            groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
            names: list[list[str]] = [[] for _ in optimizer.param_groups]
            stand_ins: list[tuple[Whole, nn.Parameter]] = []
            for one, value, grad in whole:
                stand_in = marked(nn.Parameter(value, one.param.requires_grad), one.param)
                stand_in.grad = grad
                groups[one.group].append(stand_in)
                names[one.group].append(one.label)
                stand_ins.append((one, stand_in))
            for one, stand_in in stand_ins:
                optimizer.state[stand_in] = optimizer.state[one.param]
            name, nbytes = whole[0][0].flat.name, sum(value.nbytes for _, value, _ in whole)
            if self._bus.active:
                self._bus.begin("update", name, nbytes, at=HERE)
            try:
                with narrowed(optimizer, groups, names), options_kept(optimizer):
                    step_of(optimizer)(optimizer, *arguments.args, **arguments.kwargs)
                    kept, kind = kept_elsewhere(optimizer, [stand_in for _, stand_in in stand_ins]), type(optimizer).__name__
                    if kept:
                        raise ShardedOpError(
                            f"{kind}.step expected a step that keeps data about a parameter in state[param], because owner "
                            f"ranks update copies of whole parameters; found parameters in {kind}{kept}. Keep that in "
                            "state[param]."
                        )
            finally:
                for one, stand_in in stand_ins:
                    own, found = optimizer.state[one.param], optimizer.state.pop(stand_in)
                    assert isinstance(own, OwnedStates)
                    if found is not own:
                        # The step put another dict there.
                        own.clear()
                        own.update(found)
                if self._bus.active:
                    self._bus.end("update", name, nbytes, at=HERE)
            return [(one, stand_in.detach()) for one, stand_in in stand_ins]


def _raised(action: Callable[[], None]) -> Exception | None:
    """What a tier raises on this rank: raised on all of them when they meet next."""
    try:
        action()
    except Exception as error:
        return error
    return None


def _value(one: Whole) -> Tensor:
    param: Any = one.param
    local: Tensor = param.local_shard.values
    return local


def _gradient(one: Whole) -> Tensor:
    grad = grad_of(one.param)
    assert grad is not None
    local = grad.local_shard.values if isinstance(grad, ShardedTensor) else one.spec.take(grad)
    return local.to(one.flat.kind.master)


def _half_done(done: str, more: str) -> str:
    """What a step that failed leaves behind."""
    return (
        f"zhooks: in this step, {done} rounds of parameters that are updated whole were complete; {more} of one more round may "
        "have been updated, too. Load the last checkpoint before you continue."
    )


def _wrote(one: Whole) -> None:
    """This rank's range has new values."""
    param: Any = one.param
    param.local_shard.written()
    torch.autograd.graph.increment_version(param)
