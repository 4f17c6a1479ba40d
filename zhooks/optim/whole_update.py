"""Updates parameters whole, each on its owner: ranges of values and gradients travel there, new values travel back.

``step_hooks.py`` has a step's parameters updated here that ``owners.py`` says are whole.  The arithmetic is the optimizer's own
``step`` on plain stand-ins; it never decides what is whole, nor who owns it.

Note: [Rounds]
    Parameters travel in rounds: in each, every owner gets at most as many as fit the bound of a buffer, and at least one.
    A round is one exchange to the owners, the step of each, and one exchange back; the next round's parameters are on their
    way while a round is computed.  With their new values owners send whether they have any, so that a step that raised on one
    rank raises on all before a value of the round is written.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.errors import DivergenceError, ShardedOpError
from offload.events import Bus
from zhooks.comm import CONTROL, GATHER, Call, Numels, Transport, Work, all_or_none
from zhooks.optim.assign_owners import Matrix, rounds
from zhooks.optim.counters import options_kept
from zhooks.optim.kernel import Arguments, grad_of, narrowed, step_of
from zhooks.optim.owned_states import OwnedStates
from zhooks.optim.owners import Owners, Whole
from zhooks.optim.references import kept_elsewhere
from zhooks.optim.stand_ins import OURS
from zhooks.tensor import ShardedTensor

__all__ = ["WholeUpdater"]


@dataclass(frozen=True, slots=True)
class Round:
    """Parameters that travel together: what each rank has for each owner, and each owner for each rank, in elements."""

    members: tuple[Whole, ...]
    there: Numels
    back: Numels

    def of(self, owner: int) -> tuple[Whole, ...]:
        return tuple(one for one in self.members if one.owner == owner)


@dataclass(slots=True)
class _Travelling:
    """A round on its way to the owners."""

    round: Round
    work: Work
    sends: Tensor
    receives: Tensor


class WholeUpdater:
    """The updates of one attachment's whole parameters.

    Args:
        shard: the ranks that share a sharded parameter.
        most_nbytes: what the parameters and gradients of a round may come to on an owner.
    """

    def __init__(self, owners: Owners, shard: Transport, bus: Bus, most_nbytes: int) -> None:
        self._owners, self._shard, self._bus, self._most = owners, shard, bus, most_nbytes
        self._planned: weakref.WeakKeyDictionary[Optimizer, tuple[Any, list[Round]]] = weakref.WeakKeyDictionary()
        self._stepping = threading.local()

    @property
    def stepping(self) -> bool:
        """This thread is in the step of an owner."""
        return bool(getattr(self._stepping, "now", False))

    def updates(self, optimizer: Optimizer) -> list[Whole]:
        """What a step of the optimizer has to do here."""
        return self._owners.whole(optimizer)

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
        mine = [one for one in updates if one.owner is None and grad_of(one.param) is not None]
        if mine:
            for one, value in self._stepped(optimizer, [(one, *_whole_of(one)) for one in mine], arguments):
                _write(one, one.spec.pick(value))
        shared = [one for one in updates if one.owner is not None]
        if shared:
            self._step_shared(optimizer, self._with_gradients(shared), arguments)

    def _with_gradients(self, shared: Sequence[Whole]) -> list[Whole]:
        here = [grad_of(one.param) is not None for one in shared]
        counts = torch.tensor(here, dtype=torch.int64)
        self._shard.all_reduce(Call(CONTROL, "step: compare gradients", "all matrices"), counts, "sum")
        world = self._shard.axis.world
        for one, count in zip(shared, counts.tolist(), strict=True):
            if count not in (0, world):
                raise DivergenceError(
                    f"step: expected a gradient of {one.spec.name} on every rank or on none, found one on {count} of {world} "
                    "ranks. Set .grad to None on all ranks or on none; nothing has been updated."
                )
        return [one for one, has in zip(shared, here, strict=True) if has]

    # Rounds.

    def _step_shared(self, optimizer: Optimizer, updates: Sequence[Whole], arguments: Arguments) -> None:
        planned = self._rounds(optimizer, updates)
        coming = self._send(planned[0]) if planned else None
        for number, now in enumerate(planned):
            assert coming is not None
            arrived, coming = coming, self._send(planned[number + 1]) if number + 1 < len(planned) else None
            arrived.work.wait()
            problem: Exception | None = None
            values: list[Tensor] = []
            try:
                values = self._update(optimizer, arrived, arguments)
            except Exception as error:
                problem = error
            del arrived
            if self._return(now, values, problem):
                if coming is not None:
                    coming.work.wait()  # it would be taken for what comes next
                self._raise(problem, number, len(planned))

    def _raise(self, problem: Exception | None, done: int, count: int) -> None:
        """On every rank, the step that raised on some."""
        try:
            with all_or_none(self._shard, "step"):
                if problem is not None:
                    raise problem
        except Exception as error:
            error.add_note(
                f"zhooks: {done} of {count} rounds of parameters that are updated whole had been updated in this step. Those "
                "of this round have the values they had; states may have gone on. Load the last checkpoint before going on."
            )
            raise

    def _rounds(self, optimizer: Optimizer, updates: Sequence[Whole]) -> list[Round]:
        key = tuple((one.flat, one.index, one.owner) for one in updates)
        known = self._planned.get(optimizer)
        if known is not None and known[0] == key:
            return known[1]
        matrices = [Matrix(tuple(one.spec.shape), one.flat.kind.master, one.owner or 0) for one in updates]
        found: list[Round] = []
        if matrices:
            widest = max(one.flat.kind.master.itemsize for one in updates)
            found = [self._round([updates[i] for i in some]) for some in rounds(matrices, self._most // (2 * widest))]
        self._planned[optimizer] = (key, found)
        return found

    def _round(self, members: Sequence[Whole]) -> Round:
        ranks = range(self._shard.axis.world)
        held = [[_numel(one, rank) for one in members] for rank in ranks]
        there = [
            [2 * sum(n for one, n in zip(members, held[w], strict=True) if one.owner == r) for r in ranks] for w in ranks
        ]
        # And one element that says whether there are values.
        back = [[1 + there[r][w] // 2 for r in ranks] for w in ranks]
        return Round(tuple(members), there, back)

    def _send(self, now: Round) -> _Travelling:
        """Start sending this rank's ranges of gradients and values to the owners."""
        ranks, flat = range(self._shard.axis.world), now.members[0].flat
        runs = [run for owner in ranks for one in now.of(owner) for run in (_gradient(one), _value(one))]
        sends = torch.cat(runs)
        receives = sends.new_empty(sum(row[self._owners.rank] for row in now.there))
        call = Call(GATHER, "send to owners", flat.name, flat.number)
        return _Travelling(now, self._shard.exchange(call, sends, receives, now.there), sends, receives)

    def _update(self, optimizer: Optimizer, arrived: _Travelling, arguments: Arguments) -> list[Tensor]:
        """New values of those that this rank owns, each 1-D as it lies in memory."""
        rank, mine = self._owners.rank, arrived.round.of(self._owners.rank)
        values = [arrived.receives.new_empty(one.spec.numel) for one in mine]
        grads = [arrived.receives.new_empty(one.spec.numel) for one in mine]
        at = 0
        for writer in range(self._shard.axis.world):
            for one, grad, value in zip(mine, grads, values, strict=True):
                for full in (grad, value):
                    for piece in one.flat.layout.pieces(one.index, writer):
                        full[piece.start : piece.start + piece.numel].copy_(arrived.receives[at : at + piece.numel])
                        at += piece.numel
        assert at == arrived.receives.numel(), f"{at} elements of {arrived.receives.numel()} on rank {rank}"
        whole = [
            (one, one.spec.within(value, 0), one.spec.within(grad, 0))
            for one, value, grad in zip(mine, values, grads, strict=True)
        ]
        return [one.spec.storage_order(value) for one, value in self._stepped(optimizer, whole, arguments)]

    def _return(self, now: Round, values: Sequence[Tensor], problem: Exception | None) -> bool:
        """Send new values back, and write what comes; nothing where an owner has none, which is then said."""
        rank, world, dtype = self._owners.rank, self._shard.axis.world, now.members[0].flat.kind.master
        device = now.members[0].flat.kind.device
        failed = torch.full((1,), float(problem is not None), dtype=dtype, device=device)
        runs = []
        for reader in range(world):
            runs.append(failed)
            if problem is not None:
                runs.append(torch.zeros(now.back[rank][reader] - 1, dtype=dtype, device=device))
                continue
            for one, value in zip(now.of(rank), values, strict=True):
                runs.extend(
                    value[piece.start : piece.start + piece.numel] for piece in one.flat.layout.pieces(one.index, reader)
                )
        sends = torch.cat(runs)
        receives = torch.empty(sum(row[rank] for row in now.back), dtype=dtype, device=device)
        flat = now.members[0].flat
        self._shard.exchange(Call(GATHER, "return from owners", flat.name, flat.number), sends, receives, now.back).wait()
        came = receives.split([row[rank] for row in now.back])
        if any(float(run[0]) for run in came):
            return True
        for owner, run in enumerate(came):
            at = 1
            for one in now.of(owner):
                numel = _numel(one, rank)
                _write(one, run[at : at + numel])
                at += numel
        return False

    # One call of the optimizer's own step.

    def _stepped(
        self, optimizer: Optimizer, whole: Sequence[tuple[Whole, Tensor, Tensor]], arguments: Arguments
    ) -> list[tuple[Whole, Tensor]]:
        """The new values that its step makes of (parameter, value, gradient); states of stand-ins are those of the owner."""
        groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        names: list[list[str]] = [[] for _ in optimizer.param_groups]
        stand_ins: list[tuple[Whole, nn.Parameter]] = []
        for one, value, grad in whole:
            stand_in = nn.Parameter(value, one.param.requires_grad)
            for key, noted in vars(one.param).items():
                if key not in OURS:
                    setattr(stand_in, key, noted)
            stand_in.grad = grad
            groups[one.group].append(stand_in)
            names[one.group].append(one.label)
            stand_ins.append((one, stand_in))
        for one, stand_in in stand_ins:
            optimizer.state[stand_in] = optimizer.state[one.param]
        name, nbytes = (whole[0][0].flat.name if whole else ""), sum(value.nbytes for _, value, _ in whole)
        if whole and self._bus.active:
            self._bus.begin("update", name, nbytes)
        self._stepping.now = True
        try:
            if whole:
                with narrowed(optimizer, groups, names), options_kept(optimizer):
                    step_of(optimizer)(optimizer, *arguments.args, **arguments.kwargs)
                    self._check_kept(optimizer, [stand_in for _, stand_in in stand_ins])
        finally:
            self._stepping.now = False
            for one, stand_in in stand_ins:
                _keep(optimizer.state[one.param], optimizer.state.pop(stand_in))
            if whole and self._bus.active:
                self._bus.end("update", name, nbytes)
        return [(one, stand_in.detach()) for one, stand_in in stand_ins]


    def _check_kept(self, optimizer: Optimizer, stand_ins: Sequence[nn.Parameter]) -> None:
        kept = kept_elsewhere(optimizer, stand_ins)
        if kept:
            kind = type(optimizer).__name__
            raise ShardedOpError(
                f"{kind}.step: expected a step that keeps what it notes of a parameter in state[param], for it updates them "
                f"whole, on parameters of the owner's; found them in {kind}{kept}. Keep that in state[param]."
            )


def _keep(own: Any, found: Any) -> None:
    """The states that a step left: in the same dict, or in another that it put there."""
    assert isinstance(own, OwnedStates)
    if found is not own:
        own.clear()
        own.update(found)


def _numel(one: Whole, rank: int) -> int:
    """Elements of a parameter that a rank has."""
    return sum(piece.numel for piece in one.flat.layout.pieces(one.index, rank))


def _value(one: Whole) -> Tensor:
    param: Any = one.param
    local: Tensor = param._local
    return local


def _gradient(one: Whole) -> Tensor:
    grad = grad_of(one.param)
    assert grad is not None
    local = grad._local if isinstance(grad, ShardedTensor) else one.spec.take(grad)
    return local.to(one.flat.kind.master)


def _whole_of(one: Whole) -> tuple[Tensor, Tensor]:
    """Value and gradient of a parameter that this rank has all of: views where they lie."""
    return one.spec.within(_value(one), 0), one.spec.within(_gradient(one), 0)


def _write(one: Whole, values: Tensor) -> None:
    """New values of this rank's range."""
    param: Any = one.param
    local = _value(one)
    if local.data_ptr() != values.data_ptr():
        local.copy_(values)
    param._written()
    torch.autograd.graph.increment_version(param)

