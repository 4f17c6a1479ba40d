"""What an attachment will hold on each tier, optimizer states included, against ``[budget]``; and what its arena reserves.

``plan.py`` and ``apply`` ask before anything is built, ``session/steps.py`` at the first steps of optimizers.  Nothing is
allocated or moved here, and no optimizer of the user's is stepped.

Note: [States ahead]
    Only an optimizer knows what it will keep.  So a stand-in steps once (`zhooks.optim.stand_in_of`), and what it then holds in
    the shape of its parameters is what ours will hold of ours.  What cannot be foreseen counts on the device after the first
    step, and on tiers when it is placed there.

Note: [What the arena reserves]
    Shards of parameters and gradients are exact.  For gathered units and sums a forward and a backward are walked through in
    the order of registration, with the arena's own placement, and the end it reaches is the size.  A model whose passes need
    more (another order, units inside units, ranges that the user kept) falls back to the allocator in that step, and between
    steps such a region is reserved anew as that step needed it, unless a budget bounds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.budget import available
from offload.device import Device, can_reserve, computes_on_host, open_device
from offload.errors import BudgetError
from offload.free_ranges import Space
from offload.memory import Use, grain, rounded
from offload.policy import Policy
from offload.text import as_enough, as_size
from offload.tier import Tier
from zhooks.comm import Comm, ControlPlane
from zhooks.layout import FlatPlan, Ignored, UnitPlan, flats_of, inner_units
from zhooks.optim import OwnedStates, StateKind, grad_of, nbytes_of, params_of, stand_in_of, tensors_in, vectors_in
from zhooks.plan.checks import check_compute
from zhooks.plan.layouts import STAGED_NBYTES
from zhooks.run import keep_gathered
from zhooks.tensor import ShardedTensor
from zhooks.unit import Reserve

__all__ = [
    "Admission", "Headroom", "Need", "admit", "check_states", "device_floor", "device_headroom", "gathered_nbytes",
    "headroom_within", "ignored_here", "needs", "rest_reserve", "shards_reserve", "state_nbytes",
]  # fmt: skip

Whole = tuple[nn.Parameter, int]
"""A parameter that stays whole on the device, and the bytes that it takes."""

#: Host memory for what nothing but transfers need there, as errors say it.
_PASSING = "what passes to and from the disk"
#: Arrays of a unit that an update works on (masters, gradient, two moments), for this unit and the next; write-backs of the
#: one before are waited for.
_STAGED = 8


# Tiers off the device: parameters, masters and gradients at attach.


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes a rank will hold off the device, as far as they are known before the optimizer has made its states.

    Attributes:
        largest: of a flat's share of masters, the most.
        passing: the least of host memory that the disk's values pass through: a flat's masters with their copy in the compute
            dtype, or its gradient.
    """

    off_device: Mapping[Tier, int]
    largest: int
    passing: int


def needs(units: Sequence[UnitPlan]) -> Need:
    """What parameters, masters and gradients need."""
    flats = flats_of(units)
    footprints = [flat.footprint() for flat in flats]
    off_device = {tier: sum(cell.on(tier) for each in footprints for cell in each) for tier in (Tier.HOST, Tier.DISK)}
    # A rank's range of a flat is of one parameter, or of at most so many bytes.
    of_one = [-(-max(flat.layout.numels) * flat.kind.master.itemsize // flat.ranks) for flat in flats]
    on_disk = [[cell.on(Tier.DISK) for cell in footprint] for footprint in footprints]
    passing = max((max(parameter + masters, gradient) for parameter, gradient, masters in on_disk), default=0)
    return Need(off_device, max((STAGED_NBYTES, *of_one)) if flats else 0, passing)


@dataclass(frozen=True, slots=True)
class Admission:
    """What the tiers of a rank will hold, and at most may.

    Attributes:
        limits: bytes a tier, the least of any rank; None is no bound.
        on_disk: something will be kept there from the first step on.
    """

    limits: Mapping[Tier, int | None]
    need: Need
    on_disk: bool

    @property
    def staging_nbytes(self) -> int:
        """What may be on its way between tiers at once."""
        return _STAGED * self.need.largest


def admit(
    policy: Policy, device: torch.device, units: Sequence[UnitPlan], comm: Comm, seam: Device | None = None
) -> Admission | None:
    """What the policy's tiers will hold of these parameters; None where it keeps nothing off the device.  Collective.

    Args:
        seam: to the device, where tiers are open already: they stay.
    Raises:
        BudgetError: what is to be kept on a tier exceeds its budget; nothing was allocated.
        CapabilityError: updates cannot be computed where the policy wants them.
    """
    if seam is None and not policy.tiered:
        return None
    # One host may lack what updates on it need.
    with ControlPlane(comm.stage, "check updates").all_or_none():
        check_compute(policy, device, units)
    opened = seam or open_device(device)
    try:
        limits = {tier: _limit_of(policy, tier, opened, comm) for tier in Tier}
    finally:
        if seam is None:
            opened.close()
    need = needs(units)
    for tier, nbytes in need.off_device.items():
        limit, passing = limits[tier], need.passing if tier is Tier.HOST else 0
        if limit is not None and nbytes + passing > limit:
            needed = {"the parameters, masters and gradients to be stored there": nbytes, _PASSING: passing}
            smaller = ", or name smaller units in [units]" if passing else ""
            raise _too_small(
                tier, limit, needed, "", f"at least {as_enough(nbytes + passing)} (states of the optimizer come on top if they "
                "are stored there too), or change the tier of [parameter] or [gradient] (of [optimizer] where [precision] "
                f"param is 16 bit: its masters){smaller}.",
            )  # fmt: skip
    later = any(flat.kind.tiers.optimizer is Tier.DISK for flat in flats_of(units))
    return Admission(limits, need, bool(need.off_device[Tier.DISK]) or later)


def _limit_of(policy: Policy, tier: Tier, seam: Device, comm: Comm) -> int | None:
    """The least that any rank's budget allows; None is no bound.  Collective."""
    folder = policy.disk.folder
    mine = policy.budget.resolve(tier, lambda: available(tier, seam, folder))
    return ControlPlane(comm.stage, "compare budgets").least(mine)


def _too_small(tier: Tier, limit: int, needed: Mapping[str, int], at_least: str, remedy: str) -> BudgetError:
    """The refusal of a tier off the device, with the sum of all that is needed; ``remedy``: what to raise it to, or to do."""
    total = sum(needed.values())
    named = [f"{what}, {as_size(nbytes)}" for what, nbytes in needed.items() if nbytes]
    summed = f"{at_least}{as_size(total)}"
    if len(named) > 1:
        said = f"{', for '.join(named[:-1])}, and for {named[-1]}: {summed} in all per rank"
    else:
        said = f"{next(what for what, nbytes in needed.items() if nbytes)}, {summed} per rank"
    return BudgetError(
        f"[budget] {tier.value} is too small. Expected memory for {said}, found {as_size(limit)}, {as_size(total - limit)} "
        f"short. Raise it to {remedy}"
    )


# What an optimizer keeps, or will keep.


def state_nbytes(
    optimizer: Optimizer,
    units: Sequence[UnitPlan],
    rank: int,
    *,
    wide: bool = False,
    ignored: Sequence[Whole] = (),
) -> tuple[int, bool]:
    """Bytes of states on the device, those it has and those it will make, and whether the latter could be foreseen; see
    Note [States ahead].

    Args:
        rank: among the data ranks.
        wide: bf16 parameters are updated in fp32 and have states in it.
        ignored: parameters that this rank updates whole.
    """
    numels = {
        id(param): flat.owned_numel(index, rank)
        for unit in units
        for flat in unit.flats
        if flat.kind.trainable and flat.kind.tiers.optimizer is Tier.DEVICE
        for index, param in enumerate(unit.params(flat))
    }
    numels.update((id(param), param.numel()) for param, _ in ignored if param.requires_grad)
    held, coming = 0, list[tuple[StateKind, int]]()
    for place, param in _places(optimizer, wide):
        numel = numels.get(id(param), 0)
        states = optimizer.state.get(param) if numel else None
        if isinstance(states, OwnedStates):
            # Its owner will keep them whole, the others nothing.
            held += sum(map(nbytes_of, tensors_in(states)))
            if states.here and next(tensors_in(states), None) is None:
                coming.append((place, param.numel()))
        elif states:
            held += sum(one.to_local().nbytes for one in vectors_in(states)) + numel * _itemsize(states, param.shape)
        elif numel:
            coming.append((place, numel))
    made = _made(optimizer, {place for place, _ in coming})
    return held + sum(made[place] * numel for place, numel in coming if made is not None), made is not None


def _stored_states(optimizer: Optimizer, units: Sequence[UnitPlan], tier: Tier, wide: bool) -> tuple[dict[int, int], bool]:
    """Bytes of states on a tier off the device, by the number of their flat: those that are there, and those that a step now
    would place there; and whether these are all.

    A parameter without a gradient gets none in that step, and one that is updated whole has whatever its owner keeps of it.
    """
    places = {id(param): place for place, param in _places(optimizer, wide)}
    flats = [
        (flat, [param for param in unit.params(flat) if id(param) in places])
        for unit in units
        for flat in unit.flats
        if flat.kind.trainable and flat.kind.tiers.optimizer is tier
    ]
    made = _made(optimizer, {places[id(param)] for _, params in flats for param in params if not optimizer.state.get(param)})
    by_flat, every = dict[int, int](), made is not None
    for flat, params in flats:
        # A state has one block a flat, as long as the flat's range.
        widest = 0
        for param in params:
            states = optimizer.state.get(param)
            if isinstance(states, OwnedStates) or not (states or grad_of(param) is not None):
                every = False
            elif states:
                widest = max(widest, _itemsize(states, param.shape))
            elif made is not None:
                widest = max(widest, made[places[id(param)]])
        by_flat[flat.number] = flat.shard_numel * widest
    return by_flat, every


def _places(optimizer: Optimizer, wide: bool) -> Iterator[tuple[StateKind, nn.Parameter]]:
    """The parameters of an optimizer, each with what its states depend on: its group, the dtype that is updated, its dims."""
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            yield (number, torch.float32 if wide and param.dtype is torch.bfloat16 else param.dtype, param.dim()), param


def _itemsize(states: Any, shape: torch.Size) -> int:
    """Bytes of state for each element of a parameter of ``shape``."""
    values = states.values() if isinstance(states, dict) else ()
    return sum(value.dtype.itemsize for value in values if isinstance(value, Tensor) and value.dim() and value.shape == shape)


def _made(optimizer: Optimizer, places: set[StateKind]) -> dict[StateKind, int] | None:
    """Bytes of state an element that a first step of this optimizer makes for parameters of each kind; None: nobody knows."""
    if not places:
        return {}
    made = stand_in_of(optimizer, places)
    if made is None:
        return None
    states = {place: made[0].state.get(param, {}) for place, param in made[1].items()}
    shapes = {place: param.shape for place, param in made[1].items()}
    if any(one.dim() and one.shape != shapes[place] for place, each in states.items() for one in tensors_in(each)):
        return None  # how large those are for another shape, nobody knows
    return {place: _itemsize(each, shapes[place]) for place, each in states.items()}


# Tiers off the device: an optimizer's states at its first step.


def check_states(
    policy: Policy, plans: Sequence[UnitPlan], comm: Comm, tier: Tier, limit: int, optimizers: set[Optimizer]
) -> None:
    """Hold the bound of a tier off the device against what these optimizers keep, or will keep, there.  Collective.

    Raises:
        BudgetError: it does not fit; on every rank.
    """
    wide, overlap = policy.optimizer.rounding == "stochastic", policy.optimizer.overlap
    found = {optimizer: _stored_states(optimizer, plans, tier, wide) for optimizer in optimizers}
    kept = passing = 0
    for unit in plans:
        for flat in unit.flats:
            # Gradients are certain to be there if there are any, and no update has used them up in backward.
            there = not overlap and any(grad_of(param) is not None for param in unit.params(flat))
            kept += sum(cell.on(tier) for cell in flat.footprint() if there or cell.what != "gradient")
    if tier is Tier.HOST:
        on_disk = {optimizer: _stored_states(optimizer, plans, Tier.DISK, wide)[0] for optimizer in optimizers}
        passing = max((nbytes for one, stored in on_disk.items() for nbytes in _passing(one, stored, policy, plans)), default=0)
    states = sum(sum(by_flat.values()) for by_flat, _ in found.values())
    spare = ControlPlane(comm.stage, "compare budgets").least(limit - kept - passing - states)
    assert spare is not None
    states = limit - kept - passing - spare
    if spare < 0 < states + passing:
        names = {type(optimizer).__name__ for optimizer, (by_flat, _) in found.items() if any(by_flat.values())}
        needed = {
            "the parameters, masters and gradients stored there": kept,
            f"{_PASSING} in the update of one unit": passing,
            f"the states of {', '.join(sorted(names))}": states,
        }
        flats = flats_of(plans)
        disk = any(flat.kind.tiers.optimizer is Tier.DISK or any(c.on(Tier.DISK) for c in flat.footprint()) for flat in flats)
        # Host memory holds more than what is stored there: buffers of the disk's, or activations.
        beside = tier is Tier.HOST and (policy.activation.tier != "device" or disk)
        more = beside or overlap or not all(every for _, every in found.values())
        at_least = "at least " if more else ""
        remedy = 'set [optimizer] tier = "disk"' if tier is Tier.HOST else "run on more ranks"
        raise _too_small(
            tier, limit, needed, at_least,
            f"{at_least}{as_enough(sum(needed.values()))}, or {remedy if states else 'name smaller units in [units]'}. Nothing "
            "has been updated: call attachment.apply(policy), then repeat the optimizer's step.",
        )  # fmt: skip


def _passing(
    optimizer: Optimizer, states: Mapping[int, int], policy: Policy, plans: Iterable[UnitPlan]
) -> Iterator[int]:
    """Of each update that the optimizer's step makes, flat by flat, the least that has to be in host memory of what is on the
    disk; ``states``: bytes of those that are there, by flat."""
    held = {id(param) for param in params_of(optimizer)}
    for unit in plans:
        for flat in unit.flats:
            mine = [param for param in unit.params(flat) if id(param) in held and grad_of(param) is not None]
            if not mine or any(isinstance(optimizer.state.get(param), OwnedStates) for param in mine):
                # Nothing is updated, or whole parameters, in rounds of their own.
                continue
            cells = [cell.on(Tier.DISK) for cell in flat.footprint()]
            moved = policy.optimizer.compute == "host" and flat.kind.tiers.optimizer is not Tier.DEVICE
            if moved or computes_on_host(flat.kind.device):
                yield sum(cells) + states.get(flat.number, 0)
            else:
                # On their way to the device, one after the other.
                yield max(cells)


# The device.


@dataclass(frozen=True, slots=True, eq=False)
class Headroom:
    """What ``[budget] device`` leaves under a policy.

    Attributes:
        limit: the least bound of any rank, in bytes; None is none.
        spare: bytes of gathered units that may stay between forward and backward; None is no bound.
        foreseen: the optimizers whose states are in the count.
    """

    limit: int | None
    spare: int | None
    foreseen: tuple[Optimizer, ...] = ()


def device_headroom(
    policy: Policy,
    device: torch.device,
    units: Sequence[UnitPlan],
    optimizers: Iterable[Optimizer],
    comm: Comm,
    ignored: Sequence[Whole] = (),
    after: str = "",
) -> Headroom:
    """What the bound leaves beside these units, what is ``ignored`` there, and the states of these optimizers.  Collective.

    Args:
        after: ends the refusal.
    Raises:
        BudgetError: it does not hold what is kept on the device and the units in flight; on every rank.
    """
    seam = open_device(device)
    try:
        limit = _limit_of(policy, Tier.DEVICE, seam, comm)
    finally:
        seam.close()
    return Headroom(None, None) if limit is None else headroom_within(limit, policy, units, optimizers, comm, ignored, after)


def ignored_here(ignored: Ignored, device: torch.device) -> list[Whole]:
    """What is left whole on the device; what another attachment has sharded is counted there."""
    return [
        (param, ignored.nbytes(name))
        for name, param in ignored.params.items()
        if param.device == device and not isinstance(param, ShardedTensor)
    ]


def headroom_within(
    limit: int,
    policy: Policy,
    units: Sequence[UnitPlan],
    optimizers: Iterable[Optimizer],
    comm: Comm,
    ignored: Sequence[Whole],
    after: str,
) -> Headroom:
    """As ``device_headroom``, of a bound that is known."""
    wide, rank = policy.optimizer.rounding == "stochastic", comm.shard.axis.rank
    found = {optimizer: state_nbytes(optimizer, units, rank, wide=wide, ignored=ignored) for optimizer in optimizers}
    floor = device_floor(policy, units, whole_sums=comm.pipelined)
    if policy.device.arena != "none":
        # Above what it holds an arena reserves whole grains, and holes that ranges of several sizes leave.
        regions = _regions(policy, units, 0).values()
        floor += max(0, sum(reserved for _, reserved in regions) - sum(held for held, _ in regions))
    floor += sum(nbytes * (2 if param.requires_grad else 1) for param, nbytes in ignored)
    spare = ControlPlane(comm.stage, "compare budgets").least(limit - floor - sum(nbytes for nbytes, _ in found.values()))
    assert spare is not None
    if spare >= 0:
        return Headroom(limit, spare, tuple(optimizer for optimizer, (_, foreseen) in found.items() if foreseen))
    states = limit - spare - floor
    tier, what = "", f"{as_size(floor)} in all"
    if states:
        of = ", ".join(sorted({type(optimizer).__name__ for optimizer in found}))
        tier = "lower [optimizer] device_share, " if policy.optimizer.device_share else 'set [optimizer] tier = "host", '
        what = f"{as_size(floor)}, and for the states of {of}, {as_size(states)}: {as_size(floor + states)} in all"
    # What an optimizer that nobody has met keeps comes on top.
    at_least = "" if found and all(foreseen for _, foreseen in found.values()) else "at least "
    flying = "[schedule] prefetch or [units] max_numel" if policy.schedule.prefetch else "[units] max_numel"
    cells = {"gradient": policy.gradient.tier, "parameter": policy.parameter.tier if policy.stage in (0, 3) else None}
    there = [f"[{cell}]" for cell, where in cells.items() if where == "device"]
    moved = f'set the tier of {" and ".join(there)} to "host" or "disk"' if there else "run on more ranks"
    raise BudgetError(
        f"[budget] device is too small. Expected memory for what is stored there and the units in flight, {what}, found "
        f"{as_size(limit)}. Raise it to {at_least}{as_enough(floor + states)}, {tier}lower {flying}, or {moved}.{after}"
    )


def device_floor(policy: Policy, units: Sequence[UnitPlan], *, whole_sums: bool = False) -> int:
    """Bytes on the device whatever is kept: parameters, masters and gradients kept there, gathered units, sums in flight.

    Args:
        whole_sums: microbatches of a pipeline add up unreduced: every sum is held until the last.
    """
    flats = flats_of(units)
    sums = sorted((flat.sum_nbytes for flat in flats if flat.kind.trainable), reverse=True)
    flying = _reductions(policy, units)
    # What is never sent goes where gradients are kept, unless it is cast, or looked at before.
    direct = not flying and policy.precision.loss_scale is None and all(flat.kind.reduces_in_place for flat in flats)
    under_way = 0 if direct else sum(sums if whole_sums else sums[: 1 + flying])
    kept = sum(cell.on(Tier.DEVICE) for flat in flats for cell in flat.footprint())
    return kept + gathered_nbytes(policy, units) + under_way


def _reductions(policy: Policy, units: Sequence[UnitPlan]) -> int:
    """How many reductions may be under way at once: none of one rank's, which send nothing."""
    return policy.schedule.most_reductions if any(flat.layout.world > 1 for flat in flats_of(units)) else 0


def gathered_nbytes(policy: Policy, units: Sequence[UnitPlan]) -> int:
    """The most bytes of full buffers at once: of the unit in use and those fetched ahead, and of those that stay meanwhile."""
    gathered = {unit.number: unit.full_nbytes for unit in units if unit.releasable}
    if policy.schedule.uneven:
        # Ranks that differ hold all of them until a pass ends.
        return sum(gathered.values())
    # Backward needs a tied parameter from its last use to its first.
    tied = {unit.number for unit in units if unit.trainable and unit.group.aliases}
    inner = inner_units(units)
    # A unit is held while units inside its modules run: the root's own parameters for as long as the pass.
    chains = {frozenset(outer for outer in gathered if number in inner[outer]) for number in gathered}
    most = 0
    for chain in chains:
        held = gathered.keys() & (chain | tied)
        others = sorted((nbytes for number, nbytes in gathered.items() if number not in held), reverse=True)
        most = max(most, sum(gathered[number] for number in held) + sum(others[: 1 + policy.schedule.prefetch]))
    return most


# The arena, and what stays idle where there is none.

Move = tuple[object, int]
"""A range by its key, and its bytes when it is taken; 0 when it is given back."""


def shards_reserve(policy: Policy, device: torch.device, units: Sequence[UnitPlan]) -> Reserve:
    """What is reserved before a model is built of ``units``: its shards alone, for its own parameters are still there."""
    reserved = policy.device.arena != "none" and can_reserve(device)
    regions = {Use.SHARDS: _regions(policy, units, None)[Use.SHARDS][1]} if reserved else {}
    return Reserve(regions, frozenset(), 0, _paged(units))


def rest_reserve(policy: Policy, device: torch.device, units: Sequence[UnitPlan], spare: int | None) -> Reserve:
    """Once it is built: what holds gradients, gathered units and sums.

    Args:
        spare: bytes for units that stay gathered between forward and backward; None where there is no budget.
    """
    reserved = policy.device.arena != "none" and can_reserve(device)
    regions = _regions(policy, units, spare) if reserved else {}
    buffers = sorted((max(flat.full_nbytes, flat.sum_nbytes) for flat in flats_of(units)), reverse=True)
    return Reserve(
        {use: nbytes for use, (_, nbytes) in regions.items() if use is not Use.SHARDS},
        # Activations are nobody's budget, and neither are copies of them.
        frozenset((Use.CHECKPOINTS,) if spare is not None else (Use.GATHERED, Use.SUMS, Use.CHECKPOINTS)),
        # As many buffers as the schedule has under way at once.
        sum(min(size, policy.comm.buffer) for size in buffers[: 2 + policy.schedule.prefetch]),
        _paged(units),
    )


def _paged(units: Sequence[UnitPlan]) -> bool:
    """A disk fills buffers, which start on a page for it."""
    return any(flat.kind.tiers.parameter is Tier.DISK for flat in flats_of(units))


def _regions(policy: Policy, units: Sequence[UnitPlan], spare: int | None) -> dict[Use, tuple[int, int]]:
    """Bytes that each region holds at the most, and those that it takes for them; see Note [What the arena reserves]."""
    flats = [flat for flat in flats_of(units) if flat.layout.padded]
    if not flats:
        return dict.fromkeys(Use, (0, 0))
    to, schedule = grain(units[0].flats[0].kind.device, paged=_paged(units)), policy.schedule

    def lasting(nbytes: Iterable[int]) -> tuple[int, int]:
        sizes = list(nbytes)
        return sum(sizes), sum(rounded(size, to) for size in sizes)

    ranges = {unit.number: [flat.transient_nbytes for flat in unit.flats if flat.transient_nbytes] for unit in units}
    ranges = {number: sizes for number, sizes in ranges.items() if sizes}
    order, whole = list(ranges), {number: sum(rounded(size, to) for size in sizes) for number, sizes in ranges.items()}
    trained = [unit.number for unit in units if unit.number in ranges and unit.trainable]
    kept = keep_gathered(trained, whole, reshard=schedule.reshard_after_forward, budget=spare)
    passed_on = keep_gathered(order, whole, reshard=schedule.reshard_after_forward, budget=spare or 0)
    stay = lasting(flat.resident_nbytes for flat in flats)
    # In a forward and its backward, or in forwards alone.
    passes = [((order, kept), (order[::-1], frozenset[int]())), ((order, passed_on), (order, passed_on))]
    gathered = [_reached(_gathers(policy, ranges, each), to) for each in passes]
    return {
        Use.SHARDS: lasting(flat.shard_nbytes for flat in flats),
        Use.GRADIENTS: lasting(flat.footprint()[1].on(Tier.DEVICE) for flat in flats),
        Use.GATHERED: (stay[0] + max(held for held, _ in gathered), stay[1] + max(end for _, end in gathered)),
        Use.SUMS: _reached(_sums(policy, units), to),
        Use.CHECKPOINTS: (0, 0),
    }


def _gathers(
    policy: Policy, ranges: Mapping[int, Sequence[int]], passes: Sequence[tuple[Sequence[int], frozenset[int]]]
) -> Iterator[Move]:
    """What passes take and give back: each the order of its units, and those that are still gathered after it."""
    here: set[int] = set()
    for number_of_pass, (sequence, staying) in enumerate(passes):
        # In backward what was kept stays until its use.
        until = {number: place for place, number in enumerate(sequence)} if number_of_pass else {}
        for place in range(len(sequence) + 1):
            window = sequence[place : place + 1 + policy.schedule.prefetch]
            gone = [n for n in sorted(here) if n not in window and n not in staying and until.get(n, -1) < place]
            for number in () if policy.schedule.uneven else gone:
                here.discard(number)
                yield from (((number, index), 0) for index in range(len(ranges[number])))
            for number in window:
                if number not in here:
                    here.add(number)
                    yield from (((number, index), size) for index, size in enumerate(ranges[number]))


def _sums(policy: Policy, units: Sequence[UnitPlan]) -> Iterator[Move]:
    """Partial sums under way and one that fills, and what reductions leave where they cannot write the shard at once."""
    # One rank writes gradients where they are kept; a replicated sum is reduced in its shard.
    trained = [flat for flat in flats_of(units) if flat.layout.padded and flat.kind.trainable]
    flats = [flat for flat in reversed(trained) if flat.sharded or not flat.kind.reduces_in_place]
    bound = sum(sorted((flat.sum_nbytes for flat in flats), reverse=True)[: 1 + _reductions(policy, units)])
    under_way: list[FlatPlan] = []
    for flat in flats:
        while sum(each.sum_nbytes for each in under_way) + flat.sum_nbytes > bound:
            done = under_way.pop(0).number
            yield from ((("out", done), 0), (("sum", done), 0))
        under_way.append(flat)
        yield ("sum", flat.number), flat.sum_nbytes
        if flat.sharded and not flat.kind.reduces_in_place:
            yield ("out", flat.number), flat.shard_numel * flat.kind.reduce.itemsize


def _reached(moves: Iterable[Move], to: int) -> tuple[int, int]:
    """The most bytes out at once, and the end that these moves reach where the arena places them in whole grains ``to``."""
    space, out = Space(0), dict[object, tuple[int, int]]()
    held = most = 0
    for key, nbytes in moves:
        if nbytes:
            out[key] = space.place(rounded(nbytes, to)), nbytes
            held += nbytes
            most = max(most, held)
        elif key in out:
            start, size = out.pop(key)
            space.give(start, rounded(size, to))
            held -= size
    return most, space.end
