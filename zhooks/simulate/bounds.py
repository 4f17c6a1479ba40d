"""What a policy has one rank hold and move, and what its step takes at least on a hardware profile: no tensor is made.

Layouts are those that ``attach`` would build, and bytes are counted by their one place, ``FlatPlan.footprint``.  Each resource
is taken to be busy without a pause, so that a simulation never finds less.

Note: [Least time]
    Forward and backward take the longest of what the device computes, of gathers, of reductions and of copies, for these may
    all be hidden behind each other; the update comes after them, and takes the longest of its own.  Where the host does
    everything itself (a CPU) they add up.  What the device computes, and what the model's own collectives take of its time,
    is known once one candidate of that `Shape` was simulated.

Note: [Compute of another shape]
    Before, it is no less than that of one that recomputes less and has at least as many samples at once for each rank of
    ``tp``.  Dividing layers further moves no FLOP away from the ranks, only weights to pass over: that much is taken off
    (forward and both products of backward, in fp32).  Another dtype is quicker by its peak or by its size, whichever is more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from offload.hardware import CostModel, Hardware
from offload.policy import Policy
from offload.tier import Tier
from zhooks import tree
from zhooks.layout import FlatPlan, Group, Ignored, UnitPlan, find_units, flats_of
from zhooks.plan import Layouts, device_floor, ignored_here, state_nbytes
from zhooks.simulate.axes import Candidate, Dtype, Shape
from zhooks.simulate.best_first import Bound, Memory

__all__ = ["Bounds", "Built", "Need", "Needs"]

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Passes over the weights in a micro-batch, and bytes of each element.
_PASSES, _WIDE = 3, 4


@dataclass(frozen=True, slots=True)
class Need:
    """What a policy comes to on one rank.

    Attributes:
        stored: parameters, gradients, masters and states, where they lie at the end of backward.
        gradients: of that, the gradients that are on the device.
        floor: on the device at the most without activations: what is stored, gathered units, sums on their way.
        states: bytes of states, wherever they lie.
        flats: of all units.
    """

    stored: Memory
    gradients: int
    floor: int
    states: int
    flats: tuple[FlatPlan, ...]

    @property
    def least(self) -> Memory:
        """Held for all of a step, so that its peak is above this by what activations take: all but gradients."""
        return replace(self.stored, device=self.stored.device - self.gradients)


@dataclass(frozen=True, slots=True)
class Built:
    """A model, its optimizer and what is left as it is."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    ignored: Ignored


@dataclass(slots=True)
class Needs:
    """A model's, by candidate; placements that differ in nothing but time are computed once.

    Attributes:
        world: ranks.
        others: optimizers beside the first.
        divided: the same model as it is divided, by ranks of ``tp``.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    base: Policy
    world: int
    ignored: Ignored
    device: torch.device
    others: Sequence[torch.optim.Optimizer] = ()
    divided: Mapping[int, Built] = field(default_factory=dict)
    numel: int = field(init=False)
    _groups: dict[tuple[int, int | None], list[Group]] = field(init=False, default_factory=dict)
    _known: dict[Candidate, Need] = field(init=False, default_factory=dict)
    _states: dict[tuple[int, int, int], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.numel = sum(param.numel() for param in tree.parameters(self.model))

    def built(self, tp: int) -> Built:
        """The model over so many ranks of ``tp``."""
        return self.divided.get(tp) or Built(self.model, self.optimizer, self.ignored)

    def groups(self, candidate: Candidate) -> Sequence[Group]:
        """What is gathered together."""
        built, key = self.built(candidate.tp), (candidate.tp, candidate.min_numel)
        if key not in self._groups:
            self._groups[key] = find_units(built.model, candidate.policy(self.base), built.ignored)
        return self._groups[key]

    def of(self, candidate: Candidate) -> Need:
        """What it comes to."""
        # Not in bytes, but for those in flight: how far ahead is gathered.
        key = replace(candidate, checkpoint="none", kept=False, batch=None)
        if key not in self._known:
            self._known[key] = self._count(key)
        return self._known[key]

    def _count(self, candidate: Candidate) -> Need:
        units = self._units(candidate, self.base)
        flats = tuple(flats_of(units))
        cells = [cell for flat in flats for cell in flat.footprint()]
        states = self._state_nbytes(candidate)
        # Each flat's share of them lies where its optimizer's cell does.
        trained = [(flat.kind.tiers.optimizer, flat.shard_numel) for flat in flats if flat.kind.trainable]
        updated = sum(numel for _, numel in trained)
        sums = {tier: sum(cell.on(tier) for cell in cells) for tier in Tier}
        if updated:
            shares = {tier: sum(numel for where, numel in trained if where is tier) for tier in Tier}
            sums = {tier: sums[tier] + states * shares[tier] // updated for tier in Tier}
        whole = ignored_here(self.built(candidate.tp).ignored, self.device)
        left = sum(nbytes * (2 if param.requires_grad else 1) for param, nbytes in whole)
        stored = Memory(sums[Tier.DEVICE] + left, sums[Tier.HOST], sums[Tier.DISK])
        gradients = sum(cell.on(Tier.DEVICE) for cell in cells if cell.what == "gradient")
        kept = sum(cell.on(Tier.DEVICE) for cell in cells)
        floor = stored.device + device_floor(candidate.policy(self.base), units) - kept
        return Need(stored, gradients, floor, states, flats)

    def _units(self, candidate: Candidate, base: Policy) -> Sequence[UnitPlan]:
        model, ranks = self.built(candidate.tp).model, self.world // candidate.replicate // candidate.tp
        layouts = Layouts.over(model, candidate.policy(base), ranks, candidate.replicate, self.device)
        return layouts.units(self.groups(candidate))

    def _state_nbytes(self, candidate: Candidate) -> int:
        """Of the optimizer on one rank: as it would be with all of them on the device; 0 where nobody can tell."""
        optimizer = self.built(candidate.tp).optimizer
        if optimizer is None:
            return 0
        key = (min(candidate.stage, 1), candidate.replicate, candidate.tp)
        if key not in self._states:
            # By rules some may lie elsewhere whatever the tables say: they count here, too.
            bare = self.base.model_copy(update={"rule": ()})
            units = self._units(Candidate(candidate.stage, replicate=candidate.replicate, tp=candidate.tp), bare)
            wide = bare.optimizer.rounding == "stochastic"
            self._states[key] = sum(state_nbytes(one, units, 0, wide=wide)[0] for one in (optimizer, *self.others))
        return self._states[key]


@dataclass(frozen=True, slots=True)
class _Once:
    """Seconds of one micro-batch's gathers (of flats that are released, and of others) and reductions, and of an update."""

    released: float
    resident: float
    longest: float
    reduce: float
    copies: float
    disk: float
    update: float


@dataclass(slots=True)
class Bounds:
    """By candidate, from what was observed so far."""

    needs: Needs
    hardware: Hardware
    #: Seconds of forward and backward, bytes of activations; the least that was seen.
    _seen: dict[Shape, tuple[float, int]] = field(default_factory=dict)
    #: What was simulated, and the peak of its passes.
    _peaks: dict[Candidate, int] = field(default_factory=dict)
    _once_known: dict[Candidate, _Once] = field(default_factory=dict)
    _collectives: dict[tuple[str, int, range], float] = field(default_factory=dict)
    _costs: CostModel = field(init=False)

    def __post_init__(self) -> None:
        self._costs = CostModel(self.hardware)

    def observe(self, candidate: Candidate, compute_s: float, peak: int) -> None:
        """A simulation found so many seconds of forward and backward, and this peak on the device in them."""
        self._peaks[candidate] = peak
        shape, need = candidate.shape, self.needs.of(candidate)
        seen = compute_s, max(0, peak - need.floor - self._kept(candidate, need))
        before = self._seen.get(shape, seen)
        self._seen[shape] = (min(before[0], seen[0]), max(before[1], seen[1]))

    def of(self, candidate: Candidate) -> Bound:
        """At least, for all that is known now."""
        need, once = self.needs.of(candidate), self._once(candidate)
        times = 1 if candidate.batch is None else candidate.batch.accumulation
        reduce = times * once.reduce
        gather = once.resident + times * (once.released if candidate.kept else 2 * once.released)
        if candidate.stage == 3 and not candidate.kept:
            # Of units that are released between forward and backward one may stay.
            gather = max(0.0, gather - times * once.longest)
        _, activations = self._seen.get(candidate.shape, (0.0, 0))
        passes = (self._compute(candidate), gather, reduce)
        if self.hardware.kind == "gpu":
            least = max(passes) + max(once.copies, once.disk, once.update)
        else:
            least = sum(passes) + max(once.disk, once.update)
        held = need.least
        memory = Memory(max(held.device + activations, need.stored.device), held.host, held.disk)
        traffic = gather + reduce + once.copies + once.disk + once.update
        return Bound(least, traffic, memory, self._expected(candidate))

    def _expected(self, candidate: Candidate) -> int:
        """The peak of one that recomputes and divides the batch alike, with what the two hold otherwise."""
        mine = self.needs.of(candidate)
        held = mine.least.device + self._kept(candidate, mine)
        found = []
        for other, peak in self._peaks.items():
            if other.shape == candidate.shape:
                theirs = self.needs.of(other)
                more = held - theirs.least.device - self._kept(other, theirs)
                found.append((abs(more), peak + more))
        # By the one that is most like it.
        return max(mine.stored.device, min(found, default=(0, 0))[1])

    def _compute(self, candidate: Candidate) -> float:
        mine = candidate.shape
        if mine in self._seen:
            return self._seen[mine][0]
        return max((self._beside(mine, shape, seen[0]) for shape, seen in self._seen.items()), default=0.0)

    def _beside(self, mine: Shape, other: Shape, seconds: float) -> float:
        """See Note [Compute of another shape]; 0 where the other says nothing."""
        more_at_once = (
            mine.batch is None or other.batch is None or other.batch.micro_batch * mine.tp >= mine.batch.micro_batch * other.tp
        )
        if not more_at_once or other.tp > mine.tp or other.checkpoint not in (mine.checkpoint, "none"):
            return 0.0
        times = 1 if other.batch is None else other.batch.accumulation
        weights = times * _PASSES * _WIDE * self.needs.numel / self.hardware.device.memory_bandwidth
        return max(0.0, seconds - weights * (1 / other.tp - 1 / mine.tp)) * self._quicker(other.dtype, mine.dtype)

    def _quicker(self, before: Dtype | None, after: Dtype | None) -> float:
        """What is left at least of the time of an operation in another dtype."""
        if before == after or before is None or after is None:
            return 1.0

        def peaks(dtype: Dtype) -> list[float]:
            # Whether fp32 is computed in TF32 is torch's setting: the slower before, the quicker after.
            names = ("fp32", "tf32") if dtype == "fp32" else (dtype,)
            return [float(rate) for name in names if (rate := getattr(self.hardware.peak, name))]

        return min(1.0, min(peaks(before)) / max(peaks(after)), _ITEMSIZE[after] / _ITEMSIZE[before])

    def _kept(self, candidate: Candidate, need: Need) -> int:
        """Gathered units that stay beside the floor's, at the most."""
        sizes = [flat.transient_nbytes for flat in need.flats]
        return sum(sizes) if candidate.kept else max(sizes, default=0)

    def _once(self, candidate: Candidate) -> _Once:
        """What does not follow from the batch, or from what is computed."""
        key = replace(candidate, checkpoint="none", kept=False, batch=None)
        if key not in self._once_known:
            self._once_known[key] = self._of_flats(key, self.needs.of(candidate))
        return self._once_known[key]

    def _of_flats(self, candidate: Candidate, need: Need) -> _Once:
        costs, world = self._costs, self.needs.world
        beside = min(world, self.hardware.device.count)
        shard = range(0, world // candidate.replicate, candidate.tp)
        outer = range(0, world, world // candidate.replicate)
        released = resident = longest = reduce = 0.0
        for flat in need.flats:
            seconds = self._collective("all_gather", flat.moved_nbytes, shard)
            longest = max(longest, seconds)
            if flat.releasable:
                released += seconds
            else:
                resident += seconds
            if flat.kind.trainable:
                kind = "all_reduce" if flat.replicated else "reduce_scatter"
                reduce += self._collective(kind, flat.sum_nbytes, shard)
                share = flat.sum_nbytes if flat.replicated else flat.sum_nbytes // len(shard)
                reduce += self._collective("all_reduce", share, outer)
        copied, read, written, host, device = self._update(candidate, need)
        copies = costs.copy("h2d", copied, beside) if copied and self.hardware.kind == "gpu" else 0.0
        disk = 0.0
        if read or written:
            disk = costs.disk("read", read, sharing=beside) + costs.disk("write", written, sharing=beside)
        update = max(costs.host_update(host, sharing=beside) if host else 0.0, costs.compute(0, device) if device else 0.0)
        return _Once(released, resident, longest, reduce, copies, disk, update)

    def _collective(self, kind: str, nbytes: int, ranks: range) -> float:
        if len(ranks) < 2 or not nbytes:
            return 0.0
        key = (kind, nbytes, ranks)
        if key not in self._collectives:
            group = self._costs.group(ranks)
            sharing = group.alike(self.hardware.device.count)
            self._collectives[key] = self._costs.collective(kind, nbytes, group, sharing=sharing).seconds
        return self._collectives[key]

    def _update(self, candidate: Candidate, need: Need) -> tuple[int, int, int, int, int]:
        """Bytes of the update alone: copied one way, read from disk, written there, passed over on the host or the device."""
        states = need.states + sum(cell.nbytes for flat in need.flats for cell in flat.footprint() if cell.what == "optimizer")
        gradients = sum(cell.nbytes for flat in need.flats for cell in flat.footprint() if cell.what == "gradient")
        passed = 2 * states + gradients
        # A share of them, or what rules say, may lie elsewhere than the table says.
        trained = [flat for flat in need.flats if flat.kind.trainable]
        total = sum(flat.shard_numel for flat in trained)
        away = sum(flat.shard_numel for flat in trained if flat.kind.tiers.optimizer is not Tier.DEVICE)
        on_disk = sum(flat.shard_numel for flat in trained if flat.kind.tiers.optimizer is Tier.DISK)
        stored = states * on_disk // total if total else 0
        copied = states * away // total if total and candidate.compute == "device" else 0
        on_host = passed * away // total if total and candidate.compute == "host" else 0
        return copied, stored, stored, on_host, passed - on_host
