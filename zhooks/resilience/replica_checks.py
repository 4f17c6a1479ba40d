"""Whether ranks that hold the same masters and optimizer states still do: checksums, compared every so many steps.

``ReplicaChecks`` is one of ``session.WATCHES``.  What differs (a device that computes or keeps wrongly, values changed on
one rank alone) is named by buffer, parameter and rank.  It never changes or moves a value.

Note: [What is compared]
    At stage 0 every rank holds all masters and states, at the others a rank of ``replicate`` the same ranges as its replicas;
    16-bit copies that are kept beside masters go with them.  Each rank makes one number of all it holds, and those that should
    be equal are compared in one exchange of 32 bytes a rank; only where they differ are buffers, and then parameters, compared
    one by one.  Parameters that are left alone belong to the user, who may train them apart or have other ones on each rank: of
    those that are frozen and were equal at the first comparison, each must stay so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.errors import DivergenceError
from offload.policy import Policy
from offload.shards import digest
from offload.virtual import NAME
from zhooks.comm import CONTROL, Call, Transport, text_digest
from zhooks.layout import flats_of
from zhooks.session import Session
from zhooks.tensor import ShardedTensor, hash_of
from zhooks.unit import Flat

__all__ = ["ReplicaChecks"]

_NONE = torch.iinfo(torch.int64).min
#: Of a parameter that is trained; no digest is negative.
_TRAINED = -1


class ReplicaChecks:
    """[resilience] check_every, for one session."""

    def __init__(self, session: Session) -> None:
        self._session, self._comm, self._ignored = session, session.comm, session.ignored
        #: Frozen ones that were equal on all ranks; None before the first comparison.
        self._frozen: frozenset[str] | None = None
        self._checked, self._equal, self._asked = 0, 0, False

    def begin_anew(self) -> None:
        """A checkpoint was loaded, and steps are counted from there."""
        self._checked, self._equal, self._frozen = 0, 0, None

    def training_begins(self, policy: Policy) -> None:
        """A training pass begins: compare, if it is time.  Collective then.

        Raises:
            DivergenceError: ranks that should hold the same do not; on every rank, and nothing has been changed.
        """
        every, now = policy.resilience.check_every, self._session.steps.number
        if every is None or (now - self._checked < every and not self._asked):
            return
        self._checked, self._asked = now, False
        here = flats_of(self._session.units)
        flats = [flat for flat in here if flat.layout.padded and self._axis(flat).axis.world > 1]
        # Simulated tensors have no values.
        if not (flats or self._ignored.params) or any(flat.kind.device.type == NAME for flat in here):
            return
        if flats:
            optimizers = self._session.optimizers.agreed("compare replicas")
            digests = [_number(values(flat, optimizers)) for flat in flats]
            if not self._alike(flats, digests):
                raise DivergenceError(self._words(flats, digests, optimizers))
        self._compare_ignored()
        self._equal = now
        self._session.bus.instant("replicas compared", f"step {now}")

    def meet_again(self) -> None:
        """Ranks may have compared at different passes: all do at the next one."""
        self._asked = True

    def applied(self) -> None:
        return None

    def close(self) -> None:
        return None

    def _axis(self, flat: Flat) -> Transport:
        """The ranks that hold the same of a flat buffer."""
        return self._comm.world if flat.plan.replicated else self._comm.replicate

    def _place(self, flat: Flat) -> int:
        """Among all ranks that of the first which holds the same."""
        return list(self._comm.stage.axis.ranks).index(self._axis(flat).axis.ranks[0])

    def _alike(self, flats: Sequence[Flat], digests: Sequence[int]) -> bool:
        """One number for all of it, in the place that its holders share; the largest and the smallest are equal."""
        stage = self._comm.stage
        bounds = torch.full((2, 2, stage.axis.world), _NONE, dtype=torch.int64, device="cpu")
        for replicated in (False, True):
            mine = [(flat, number) for flat, number in zip(flats, digests, strict=True) if flat.plan.replicated is replicated]
            if mine:
                whole = _whole(str(number) for _, number in mine)
                place = self._place(mine[0][0])
                bounds[int(replicated), 0, place], bounds[int(replicated), 1, place] = whole, -whole
        bounds = bounds.view(-1)
        stage.all_reduce(Call(CONTROL, "compare replicas", "all units"), bounds, "max")
        largest, smallest = bounds.view(2, 2, -1).unbind(1)
        return bool(((largest == _NONE) | (largest == -smallest)).all())

    def _compare_ignored(self) -> None:
        """See Note [What is compared].  Collective.

        Raises:
            DivergenceError: a frozen parameter that was the same on all ranks is not any more; on every rank.
        """
        names, world, stage = list(self._ignored.params), self._comm.world, self._comm.stage
        if not names or stage.axis.world == 1:
            return
        digests = [self._frozen_number(name) for name in names]
        bounds = torch.tensor([digests, [-one for one in digests]], dtype=torch.int64, device="cpu").view(-1)
        world.all_reduce(Call(CONTROL, "compare replicas", "ignored parameters"), bounds, "max")
        largest, smallest = bounds.view(2, -1).tolist()
        alike = [high == -low for high, low in zip(largest, smallest, strict=True)]
        kept = {name for name, same, number in zip(names, alike, digests, strict=True) if same and number != _TRAINED}
        known = frozenset(kept) if self._frozen is None else self._frozen
        # Once it is trained it may be another on each rank, frozen again or not.
        trained = {name for name, number in zip(names, digests, strict=True) if number == _TRAINED}
        self._frozen = known - trained
        broken = [at for at, name in enumerate(names) if name in known and not alike[at]]
        first = torch.tensor([len(names) - broken[0] if broken else 0], dtype=torch.int64, device="cpu")
        # Other places on tp may have found all well, and raise as well.
        stage.all_reduce(Call(CONTROL, "compare replicas: found", "ignored parameters"), first, "max")
        if int(first.item()):
            at = len(names) - int(first.item())
            rows = self._table("ignored parameters", [list(stage.axis.ranks).index(world.axis.ranks[0]), digests[at]])
            groups = [[rank for rank, row in enumerate(rows) if row[0] == place] for place in sorted({row[0] for row in rows})]
            group = next(group for group in groups if len({rows[rank][1] for rank in group}) > 1)
            what = f"{names[at]}, which is frozen and not sharded,"
            raise DivergenceError(self._told(group, [rows[rank][1] for rank in group], what))

    def _frozen_number(self, name: str) -> int:
        """A number for the bits of a parameter that is left alone; ``_TRAINED`` where it is not frozen."""
        param, packed = self._ignored.params[name], self._ignored.frozen.get(name)
        if param.requires_grad or isinstance(param, ShardedTensor):
            return _TRAINED
        return text_digest(packed.checksum()) if packed is not None else _number([(name, partial(torch.Tensor.detach, param))])

    def _words(self, flats: Sequence[Flat], digests: Sequence[int], optimizers: Sequence[Optimizer]) -> str:
        """What differs first, the same on every rank.  Collective."""
        places = self._table("places", [self._place(flat) for flat in flats])
        table = self._table("buffers", digests)
        differing = [at for at in range(len(flats)) if _groups(places, table, at)]
        flat = flats[differing[0]]
        group = _groups(places, table, differing[0])[0]
        named = list(values(flat, optimizers))
        details = self._table("values", [_number([one]) for one in named])
        columns = [at for at in range(len(named)) if len({details[rank][at] for rank in group}) > 1]
        held = [details[rank][columns[0]] if columns else table[rank][differing[0]] for rank in group]
        more = f" (and {len(differing) - 1} more buffers)" if len(differing) > 1 else ""
        what = f"{named[columns[0]][0]} " if columns else ""
        return self._told(group, held, f"{what}of unit {flat.name}{more}")

    def _told(self, group: Sequence[int], held: Sequence[int], what: str) -> str:
        """``what`` is held by these ranks, of those of the stage, as these numbers say."""
        ranks = self._comm.stage.axis.ranks
        common, count = Counter(held).most_common(1)[0]
        odd = [ranks[rank] for rank, one in zip(group, held, strict=True) if one != common]
        who = f"rank {', '.join(map(str, odd))} only" if count > len(group) / 2 else "them, without a majority"
        found = ", ".join(f"{one:014x} on rank {ranks[rank]}" for rank, one in zip(group, held, strict=True))
        known = f"last equal at step {self._equal}" if self._equal else "not compared since the attach or the last load"
        return (
            f"The replicas' values differ at step {self._session.steps.number}. Expected the same on ranks "
            f"{', '.join(str(ranks[rank]) for rank in group)}, found that {what} differs on {who}; {known}. Suspect that "
            "machine's memory or device, or code that changes values on only some ranks; load a checkpoint of that step or an "
            f"earlier one. (Checksums: {found}.)"
        )

    def _table(self, what: str, mine: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, by rank.  Collective."""
        axis = self._comm.stage.axis
        width = torch.tensor([len(mine)], dtype=torch.int64, device="cpu")
        call = Call(CONTROL, f"compare replicas: {what}", "all units")
        self._comm.stage.all_reduce(call, width, "max")
        rows = torch.zeros(axis.world, int(width.item()), dtype=torch.int64, device="cpu")
        rows[axis.rank, : len(mine)] = torch.tensor(list(mine), dtype=torch.int64, device="cpu")
        flat = rows.view(-1)
        self._comm.stage.all_reduce(call, flat, "sum")
        found: list[list[int]] = flat.view(axis.world, -1).tolist()
        return found


def values(flat: Flat, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """What replicas of a flat buffer hold alike: masters and states by parameter, in an order all ranks share.

    States of parameters that one rank updates whole are that rank's own, and left out.
    """
    for index, (param, spec) in enumerate(flat.members()):
        yield spec.name, partial(_range, flat, index)
        for optimizer in optimizers:
            state = optimizer.state.get(param, {})
            for key in sorted(state, key=str) if type(state) is dict else ():
                if isinstance(state[key], Tensor):
                    yield f"{key} of {spec.name}", partial(_state, state[key])
        if flat.storage.copy is not None:
            yield f"the copy in {flat.kind.compute} of {spec.name}", partial(_copy, flat, index)


def _range(flat: Flat, index: int) -> Tensor:
    return flat.local(index, flat.shard)


def _copy(flat: Flat, index: int) -> Tensor:
    copied = flat.storage.copied()
    assert copied is not None
    return flat.local(index, copied)


def _state(state: Tensor) -> Tensor:
    return state.local_shard.values if isinstance(state, ShardedTensor) else state


def _number(named: Iterable[tuple[str, Callable[[], Tensor]]]) -> int:
    """A number that stands for these values' bits; one of them is open at a time."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return _whole(_bits(value().detach()) for _, value in named)


def _bits(value: Tensor) -> str:
    return digest([value]) if value.device.type == "cpu" else str(hash_of(value))


def _whole(texts: Iterable[str]) -> int:
    """One number of 56 bits for all of them, in their order."""
    return text_digest("\n".join(texts))


def _groups(places: Sequence[Sequence[int]], table: Sequence[Sequence[int]], at: int) -> list[list[int]]:
    """The ranks that should hold the same of buffer ``at`` and do not, group by group."""
    groups: dict[int, list[int]] = {}
    for rank, row in enumerate(places):
        groups.setdefault(row[at], []).append(rank)
    return [group for group in groups.values() if len({table[rank][at] for rank in group}) > 1]
