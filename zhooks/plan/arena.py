"""How much memory the pool keeps, idle or reserved ahead in an arena: from layouts, schedule and budget.

``plan.py`` asks what the shards take, the session what the rest does once a model is built; ``device_budget.py`` asks what an
arena costs beside the bytes it holds.  Sizes only: it never takes a range.

Note: [What is planned]
    Shards of parameters and gradients are exact.  For gathered units and sums a forward and a backward are walked through in
    the order of registration, with the arena's own placement, and the end it reaches is the size.  A model whose passes need
    more (another order, units inside units, ranges that the user kept) falls back to the allocator in that step, and between
    steps such a region is reserved
    anew as that step needed it, unless a budget bounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from offload.device import can_reserve
from offload.free_ranges import Space
from offload.memory import Use, grain, rounded
from offload.policy import Policy
from offload.tier import Tier
from zhooks.layout import UnitPlan, flats_of
from zhooks.run import keep_gathered
from zhooks.unit import Reserve

__all__ = ["beside", "rest_reserve", "shards_reserve", "sizes"]

Move = tuple[object, int]
"""A range by its key, and its bytes when it is taken; 0 when it is given back."""


def shards_reserve(policy: Policy, device: torch.device, units: Sequence[UnitPlan]) -> Reserve:
    """What is reserved before a model is built of ``units``: its shards alone, for its own parameters are still there."""
    wanted = sizes(policy, units, None) if has_arena(policy, device) else {}
    return Reserve({use: nbytes for use, nbytes in wanted.items() if use is Use.SHARDS}, frozenset(), 0, paged(units))


def rest_reserve(policy: Policy, device: torch.device, units: Sequence[UnitPlan], spare: int | None) -> Reserve:
    """Once it is built: what holds gradients, gathered units and sums; ``spare`` as ``keep_gathered`` has it."""
    wanted = sizes(policy, units, spare) if has_arena(policy, device) else {}
    flats = flats_of(units)
    buffers = sorted((max(flat.full_nbytes, flat.sum_nbytes) for flat in flats), reverse=True)
    return Reserve(
        {use: nbytes for use, nbytes in wanted.items() if use is not Use.SHARDS},
        # Activations are nobody's budget, and neither are copies of them.
        frozenset((Use.CHECKPOINTS,) if spare is not None else (Use.GATHERED, Use.SUMS, Use.CHECKPOINTS)),
        # As many buffers as the schedule has under way at once.
        sum(min(size, policy.comm.buffer) for size in buffers[: 2 + policy.schedule.prefetch]),
        paged(units),
    )


def has_arena(policy: Policy, device: torch.device) -> bool:
    """The policy wants memory reserved ahead, and the device is one that has it."""
    return policy.device.arena != "none" and can_reserve(device)


def paged(units: Sequence[UnitPlan]) -> bool:
    """A disk fills buffers, which start on a page for it."""
    return any(flat.kind.tiers.parameter is Tier.DISK for flat in flats_of(units))


def beside(policy: Policy, units: Sequence[UnitPlan]) -> int:
    """Bytes that an arena reserves above what it holds: whole grains, and holes that ranges of several sizes leave."""
    if policy.device.arena == "none":
        return 0
    held = _Sizes(policy, units, 0, 1)
    most = held.shards + held.gradients + held.gathered(_most) + held.sums(_most)
    return max(0, sum(sizes(policy, units, 0).values()) - most)


def sizes(policy: Policy, units: Sequence[UnitPlan], spare: int | None) -> Mapping[Use, int]:
    """Bytes of each region; see Note [What is planned].

    Args:
        spare: bytes for units that stay gathered between forward and backward; None where there is no budget.
    """
    if not any(flat.layout.padded for flat in flats_of(units)):
        return dict.fromkeys(Use, 0)
    device = units[0].flats[0].kind.device
    planned = _Sizes(policy, units, spare, grain(device, paged=paged(units)))
    return {
        Use.SHARDS: planned.shards,
        Use.GRADIENTS: planned.gradients,
        Use.GATHERED: planned.gathered(_reached),
        Use.SUMS: planned.sums(_reached),
        Use.CHECKPOINTS: 0,
    }


def reductions(units: Sequence[UnitPlan], most: int) -> int:
    """How many reductions may be under way at once: none of one rank's, which send nothing."""
    return most if any(flat.layout.world > 1 for flat in flats_of(units)) else 0


class _Sizes:
    """Sizes of ranges in whole grains ``to``, and the order they are wanted in."""

    def __init__(self, policy: Policy, units: Sequence[UnitPlan], spare: int | None, to: int) -> None:
        self._schedule, self._spare, self._to = policy.schedule, spare, to
        self._units = units
        self._flats = [flat for flat in flats_of(units) if flat.layout.padded]

    @property
    def shards(self) -> int:
        return sum(rounded(flat.shard_nbytes, self._to) for flat in self._flats)

    @property
    def gradients(self) -> int:
        return sum(rounded(flat.footprint()[1].on(Tier.DEVICE), self._to) for flat in self._flats)

    def gathered(self, measure: Callable[[Sequence[Move]], int]) -> int:
        """Full buffers that stay, and those that come and go: in a forward and its backward, or in forwards alone."""
        stay = sum(rounded(flat.resident_nbytes, self._to) for flat in self._flats)
        every = {
            unit.number: [rounded(flat.transient_nbytes, self._to) for flat in unit.flats if flat.transient_nbytes]
            for unit in self._units
        }
        ranges = {number: sizes for number, sizes in every.items() if sizes}
        order = list(ranges)
        trained = [unit.number for unit in self._units if unit.number in ranges and unit.trainable]
        kept, passed_on = self._kept(trained, ranges, self._spare), self._kept(order, ranges, self._spare or 0)
        training = self._moves(ranges, ((order, kept), (order[::-1], frozenset())))
        return stay + max(measure(training), measure(self._moves(ranges, ((order, passed_on), (order, passed_on)))))

    def _kept(self, order: Sequence[int], ranges: Mapping[int, Sequence[int]], budget: int | None) -> frozenset[int]:
        nbytes = {number: sum(sizes) for number, sizes in ranges.items()}
        return keep_gathered(order, nbytes, reshard=self._schedule.reshard_after_forward, budget=budget)

    def _moves(
        self, ranges: Mapping[int, Sequence[int]], passes: Sequence[tuple[Sequence[int], frozenset[int]]]
    ) -> list[Move]:
        """What passes take and give back: each the order of its units, and those that are still gathered after it."""
        moves: list[Move] = []
        here: set[int] = set()
        for number_of_pass, (sequence, staying) in enumerate(passes):
            # In backward what was kept stays until its use.
            until = {number: place for place, number in enumerate(sequence)} if number_of_pass else {}
            for place in range(len(sequence) + 1):
                window = sequence[place : place + 1 + self._schedule.prefetch]
                gone = [n for n in sorted(here) if n not in window and n not in staying and until.get(n, -1) < place]
                gone = [] if self._schedule.uneven else gone
                moves += [(("unit", number, index), 0) for number in gone for index in range(len(ranges[number]))]
                fresh = [number for number in window if number not in here]
                moves += [(("unit", n, index), size) for n in fresh for index, size in enumerate(ranges[n])]
                here = here.difference(gone) | set(fresh)
        return moves

    def sums(self, measure: Callable[[Sequence[Move]], int]) -> int:
        """Partial sums under way and one that fills, and what reductions leave where they cannot write the shard at once."""
        flats = [flat for flat in self._flats if flat.kind.trainable]
        most = reductions(self._units, self._schedule.most_reductions)
        # One rank writes gradients where they are kept; a replicated sum is reduced in its shard.
        taken: list[tuple[int, int, int]] = []
        for index, flat in reversed(list(enumerate(flats))):
            apart = not flat.kind.reduces_in_place
            if apart or flat.sharded:
                out = rounded(flat.shard_numel * flat.kind.reduce.itemsize, self._to) if apart and flat.sharded else 0
                taken.append((index, rounded(flat.sum_nbytes, self._to), out))
        bound = sum(sorted((total for _, total, _ in taken), reverse=True)[: 1 + most])
        under_way: list[tuple[int, int]] = []
        moves: list[Move] = []
        for index, total, out in taken:
            while sum(nbytes for _, nbytes in under_way) + total > bound:
                done, _ = under_way.pop(0)
                moves += [(("out", done), 0), (("sum", done), 0)]
            under_way.append((index, total))
            moves.append((("sum", index), total))
            if out:
                moves.append((("out", index), out))
        return measure(moves)


def _most(moves: Sequence[Move]) -> int:
    """The most bytes out at once."""
    out: dict[object, int] = {}
    most = 0
    for key, nbytes in moves:
        out[key] = nbytes
        most = max(most, sum(out.values()))
    return most


def _reached(moves: Sequence[Move]) -> int:
    """The end that these moves reach where the arena places them."""
    space = Space(0)
    out: dict[object, tuple[int, int]] = {}
    for key, nbytes in moves:
        if nbytes:
            out[key] = (space.place(nbytes), nbytes)
        elif key in out:
            space.give(*out.pop(key))
    return space.end
