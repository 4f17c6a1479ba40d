"""What a step takes at least on a hardware profile: compute that was observed, and transfers by their bytes.

``simulate/policy_search.py`` prunes by it.  Pure arithmetic over `Needs` and a cost model: it simulates nothing.  Each
resource is taken to be busy without a pause, so that a simulation never finds less.

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

from dataclasses import dataclass, field, replace

from offload.hardware import CostModel, Hardware
from offload.tier import Tier
from zhooks.simulate.axes import Candidate, Dtype, Shape
from zhooks.simulate.best_first import Bound, Memory
from zhooks.simulate.needs import Need, Needs

__all__ = ["Bounds", "Seconds"]

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Passes over the weights in a micro-batch, and bytes of each element.
_PASSES, _WIDE = 3, 4


@dataclass(frozen=True, slots=True)
class Seconds:
    """What each resource is busy for in a step, at least."""

    gather: float
    reduce: float
    copies: float
    disk: float
    update: float

    @property
    def total(self) -> float:
        return self.gather + self.reduce + self.copies + self.disk + self.update


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
    _seconds: dict[Candidate, Seconds] = field(default_factory=dict)
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
        need, seconds = self.needs.of(candidate), self._transfers(candidate)
        _, activations = self._seen.get(candidate.shape, (0.0, 0))
        compute, accelerated = self._compute(candidate), self.hardware.kind == "gpu"
        passes = [compute, seconds.gather, seconds.reduce]
        least = max(passes) if accelerated else sum(passes)
        least += max(seconds.copies, seconds.disk, seconds.update) if accelerated else max(seconds.disk, seconds.update)
        held = need.least
        memory = Memory(max(held.device + activations, need.stored.device), held.host, held.disk)
        return Bound(least, seconds.total, memory, self._expected(candidate))

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
        mine, own = candidate.shape, self._seen.get(candidate.shape)
        if own:
            return own[0]
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
        # Whether fp32 is computed in TF32 is torch's setting: the slower before, the quicker after.
        rates = min(self._peaks_of(before)) / max(self._peaks_of(after))
        return min(1.0, rates, _ITEMSIZE[after] / _ITEMSIZE[before])

    def _peaks_of(self, dtype: Dtype) -> list[float]:
        names = {"fp32": ("fp32", "tf32")}.get(dtype, (dtype,))
        return [float(rate) for name in names if (rate := getattr(self.hardware.peak, name))]

    def _kept(self, candidate: Candidate, need: Need) -> int:
        """Gathered units that stay beside the floor's, at the most."""
        return sum(flat.transient_nbytes for flat in need.flats) if candidate.kept else _largest(need)

    def _transfers(self, candidate: Candidate) -> Seconds:
        if candidate not in self._seconds:
            self._seconds[candidate] = self._add_up(candidate, self.needs.of(candidate))
        return self._seconds[candidate]

    def _add_up(self, candidate: Candidate, need: Need) -> Seconds:
        times = 1 if candidate.batch is None else candidate.batch.accumulation
        once = self._once(candidate, need)
        # Of units that are released between forward and backward one may stay.
        gather = once.resident + times * (once.released if candidate.kept else 2 * once.released)
        if candidate.stage == 3 and not candidate.kept:
            gather -= times * once.longest
        return Seconds(max(0.0, gather), times * once.reduce, once.copies, once.disk, once.update)

    def _once(self, candidate: Candidate, need: Need) -> _Once:
        """What does not follow from the batch, or from what is computed."""
        key = replace(candidate, checkpoint="none", kept=False, batch=None)
        if key not in self._once_known:
            self._once_known[key] = self._of_flats(key, need)
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


def _largest(need: Need) -> int:
    return max((flat.transient_nbytes for flat in need.flats), default=0)
