"""Which parameters an attachment's optimizers update whole, and which rank owns each of them.

Note: [Owner]
    What cannot be updated range by range (``probe.py`` finds out) is updated whole, by one rank of those that shard it.  The
    owner is chosen once, by cost, and is in the states: every rank has an ``OwnedStates`` for the parameter, which says whose
    they are, and holds them on the owner alone.  So owners stay who they are whatever units are laid out anew; where the
    parameter is not sharded (stage 0, a world of one) every rank has all of it, and owns it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.errors import CheckpointError
from zhooks.comm import CONTROL, Call, Comm, ControlPlane, Transport
from zhooks.optim.groups import names_of
from zhooks.optim.probe import Place, Verdict, marks_of, probe
from zhooks.optim.references import beside_params, kept_elsewhere
from zhooks.optim.states import OwnedStates, flags_of, holds_states, tensors_in
from zhooks.tensor import ParamShard, ShardedTensor
from zhooks.unit import Flat

__all__ = ["Owners", "Whole", "assign", "cost_of"]


def cost_of(shape: Sequence[int]) -> int:
    """The work of an update: of a matrix, elements times the smaller of its sides, as a product with its transpose has."""
    numel = math.prod(shape)
    return numel if len(shape) < 2 else numel * max(1, min(shape[0], numel // max(shape[0], 1)))


def assign(shapes: Sequence[Sequence[int]], world: int, taken: Sequence[tuple[int, int]] = ()) -> list[int]:
    """An owner for each: the costliest first, each to the rank that has the least to do by then.

    Args:
        taken: (owner, cost) of what has owners already.
    """
    load, count = [0] * world, [0] * world
    for owner, cost in taken:
        load[owner] += cost
        count[owner] += 1
    owners = [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: (-cost_of(shapes[index]), index)):
        owner = owners[index] = min(range(world), key=lambda rank: (load[rank], count[rank], rank))
        load[owner] += cost_of(shapes[index])
        count[owner] += 1
    return owners


@dataclass(frozen=True, slots=True)
class Whole:
    """A parameter that an optimizer updates whole: where it is, its group and its name there, if any, and its owner."""

    param: nn.Parameter
    flat: Flat
    index: int
    group: int
    owner: int | None
    label: str = ""

    @property
    def spec(self) -> ParamShard:
        return self.flat.specs[self.index]

    def params(self) -> tuple[nn.Parameter, ...]:
        return (self.param,)


@dataclass(frozen=True, slots=True)
class _Judged:
    """What was found of an optimizer with so many groups, and of what its parameters were then."""

    groups: int
    verdict: Verdict
    #: By identity: torch swaps no tensor that is weakly referred to.
    places: dict[int, Place]


class Owners:
    """The parameters of one attachment that are updated whole.

    Args:
        flats: the attachment's flats, now.
        comm: its ``shard``: the ranks that share a sharded parameter.
        admit: raises for an optimizer of whole parameters where nothing could update them.
    """

    def __init__(self, flats: Callable[[], Iterable[Flat]], comm: Comm, admit: Callable[[Optimizer], object]) -> None:
        self.flats, self._comm, self._admit = flats, comm, admit
        self._judged: weakref.WeakKeyDictionary[Optimizer, _Judged] = weakref.WeakKeyDictionary()

    @property
    def rank(self) -> int:
        return self._shard.axis.rank

    @property
    def _shard(self) -> Transport:
        return self._comm.shard

    # What is whole.

    def judge(self, optimizer: Optimizer) -> Verdict:
        """How it updates parameters, tried until it can be stepped; nothing is changed, and nobody is asked."""
        known = self._judged.get(optimizer)
        # What was refused is tried again: its options may have been changed since.
        if known is not None and known.groups == len(optimizer.param_groups) and not known.verdict.problem:
            return known.verdict
        ours = {id(param) for flat in self.flats() for param in flat.params}
        mine = [(number, param) for number, group in enumerate(optimizer.param_groups) for param in group["params"]]
        mine = [(number, param) for number, param in mine if id(param) in ours]
        # A step that notes something itself makes no other parameter of it, on its owner alone.
        before = {} if known is None else known.places
        places = {id(param): before[id(param)] for _, param in mine if id(param) in before}
        for (number, param), marks in zip(mine, marks_of([param for _, param in mine]), strict=True):
            if id(param) not in places:
                flags = flags_of(optimizer.state.get(param))
                said = tuple((key, value) for key, value in flags.items() if isinstance(key, Hashable))
                places[id(param)] = Place(number, param.dtype, param.dim(), said, marks)
        samples: dict[Place, nn.Parameter] = {}
        for _, param in mine:
            samples.setdefault(places[id(param)], param)
        # Parameters of no unit are plain, but what is done to ours may depend on them.
        verdict = probe(optimizer, samples) if samples else Verdict()
        self._judged[optimizer] = _Judged(len(optimizer.param_groups), verdict, places)
        return verdict

    def is_whole(self, optimizer: Optimizer) -> bool:
        """Some of its parameters are updated whole; of one that nobody has met, not as far as is known."""
        known = self._judged.get(optimizer)
        return known is not None and bool(known.verdict.whole)

    def whole(self, optimizer: Optimizer) -> list[Whole]:
        """Those of its parameters that are, in the order of its groups; of an optimizer whose owners are chosen."""
        known = self._judged.get(optimizer)
        if known is None or not known.verdict.whole:
            return []
        where = {id(param): (flat, index) for flat in self.flats() for index, param in enumerate(flat.params)}
        out = []
        for number, group in enumerate(optimizer.param_groups):
            labels = names_of(group)
            for param in group["params"]:
                if id(param) in where and known.places.get(id(param)) in known.verdict.whole:
                    states = optimizer.state.get(param)
                    owner = states.owner if isinstance(states, OwnedStates) else None
                    out.append(Whole(param, *where[id(param)], number, owner, labels.get(id(param), "")))
        return out

    def facts(self, optimizer: Optimizer) -> str:
        """What must be the same on every rank."""
        verdict = self.judge(optimizer)
        if not verdict.whole:
            return "by ranges"
        places = sorted(
            f"group {place.group} of {place.dims} dims in {place.dtype} {place.flags} {place.marks}" for place in verdict.whole
        )
        return f"whole in {', '.join(places)} {verdict.problem}"

    def refusal(self, optimizer: Optimizer) -> str:
        """Why it cannot be stepped here; "" where it can.  The same on every rank."""
        if not self.is_whole(optimizer):
            return ""
        kind, problem, whole = type(optimizer).__name__, self._judged[optimizer].verdict.problem, self.whole(optimizer)
        kept, beside = kept_elsewhere(optimizer, [one.param for one in whole]), beside_params(optimizer)
        if kept:
            return (
                f"{kind} cannot train this model. Expected an optimizer that keeps what it knows of a parameter in groups and "
                "state[param], because ranks step copies of parameters that it updates whole; found parameters in "
                f"{kind}{kept}, which would not know the copies. Step the optimizer that it wraps, if it wraps one; if {kind} "
                "is yours, keep that in state[param]; otherwise use another optimizer."
            )
        if beside:
            return (
                f"{kind} cannot train this model. Expected options that hold for all parameters of a group, because it updates "
                f"them whole, a few at a time; found {beside}, a list as long as params. Make it a tuple if it is one option "
                "for all; otherwise give each parameter its own group, or write it into state[param]."
            )
        if problem:
            return (
                f"{kind} cannot train this model. Expected an optimizer that works element by element, or updates each "
                f"parameter by itself, because ranks hold ranges of them; found that {problem}. Use another optimizer, or "
                "train the plain model."
            )
        divided = next((one.spec.name for one in whole if one.spec.place is not None), "")
        if divided:
            return (
                f"{kind} cannot train this model. Expected parameters that one rank can have whole, because it updates "
                f"{divided} as a whole; found it divided over the tp axis of the mesh. Use an optimizer that works element by "
                "element for it (AdamW)."
            )
        return ""

    # Who owns it.

    def choose(self, optimizer: Optimizer, verb: str) -> None:
        """Give each of them an owner, who keeps what states there are.  Collective; alike on every rank.

        Raises:
            CheckpointError: states were loaded on some ranks alone; nothing has been changed.
            CapabilityError: nothing could update them; nothing has been changed.
        """
        mine = self.whole(optimizer)
        if not mine:
            return
        self._admit(optimizer)
        rank, world = self._shard.axis.rank, self._shard.axis.world
        has = [holds_states(optimizer.state.get(one.param)) for one in mine]
        seen = torch.tensor([has, [rank * one for one in has]], dtype=torch.int64, device="cpu")
        self._shard.all_reduce(Call(CONTROL, f"{verb}: compare owners", "all matrices"), seen, "sum")
        counts, holders = seen.tolist()
        for one, count in zip(mine, counts, strict=True):
            sharded = one.flat.sharded
            if count not in ((0, 1, world) if sharded else (0, world)):
                raise _on_some(optimizer, verb, f"{one.spec.name} has them on {count} of {world} ranks")
        every = [one for one, count in zip(mine, counts, strict=True) if count == world > 1]
        about = "\n".join(f"{one.spec.name} {_about(optimizer.state[one.param])}" for one in every)
        if every and not ControlPlane(self._shard, verb, "the optimizer's state").agree(about):
            raise _on_some(optimizer, verb, "different ones on some ranks")
        known = [
            holder if count == 1 and world > 1 else one.owner
            for one, count, holder in zip(mine, counts, holders, strict=True)
        ]
        for one, owner in zip(mine, self._chosen(mine, known), strict=True):
            self._take(optimizer, one, owner)

    def over(self, optimizer: Optimizer, before: Transport) -> list[tuple[Whole, int | None]]:
        """The owner of each now, where another axis shared them ``before``: the one at the same place among as many ranks,
        else one that is chosen anew; nobody where it is not sharded."""
        mine = self.whole(optimizer)
        same = before.axis.world == self._shard.axis.world
        known = [one.owner if same else None for one in mine]
        return list(zip(mine, self._chosen(mine, known), strict=True))

    def _chosen(self, mine: Sequence[Whole], known: Sequence[int | None]) -> list[int | None]:
        """The owner of each: whoever has the states, else by cost; nobody in particular where it is not sharded."""
        fresh = [number for number, one in enumerate(mine) if one.flat.sharded and known[number] is None]
        taken = [
            (owner, cost_of(one.spec.shape))
            for one, owner in zip(mine, known, strict=True)
            if one.flat.sharded and owner is not None
        ]
        owners = assign([mine[number].spec.shape for number in fresh], self._shard.axis.world, taken)
        chosen = dict(zip(fresh, owners, strict=True))
        return [chosen.get(number, known[number]) if one.flat.sharded else None for number, one in enumerate(mine)]

    def _take(self, optimizer: Optimizer, one: Whole, owner: int | None) -> None:
        states = optimizer.state.get(one.param, {})
        here = owner is None or owner == self.rank
        if isinstance(states, OwnedStates) and states.owner == owner:
            return
        kept: dict[Any, Any] = flags_of(states)
        for key, value in states.items():
            # Ranges were made of states that were there before attach.
            found = value.full_tensor() if isinstance(value, ShardedTensor) else value
            if here:
                kept[key] = found
        optimizer.state[one.param] = OwnedStates(one.spec.name, owner, kept, here=here)


def _about(states: Any) -> str:
    tensors = [f"{value.dtype} {list(value.shape)}" for value in tensors_in(states) if isinstance(value, Tensor)]
    return ", ".join([*tensors, *(f"{key} {value}" for key, value in states.items() if isinstance(value, (int, float)))])


def _on_some(optimizer: Optimizer, verb: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{type(optimizer).__name__}.{verb} expected the same optimizer states on every rank, or those of a parameter that is "
        f"updated whole on its owner, found {found}: load_state_dict was called on only some ranks, or with different files. "
        "Load the same state on all ranks, or rank 0's with attachment.load_state_dict."
    )

