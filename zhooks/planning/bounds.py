"""What a step takes at least on a hardware profile: compute that was observed, and transfers by their bytes.

``simulation/policy_search.py`` prunes by it.  Pure arithmetic over `Needs` and a cost model: it simulates nothing.  Each
resource is taken to be busy without a pause, so that a simulation never finds less.

Note: [Least time]
    Forward and backward take the longest of what the device computes, of gathers, of reductions and of copies, for these may
    all be hidden behind each other; the update comes after them, and takes the longest of its own.  Where the host does
    everything itself (a CPU) they add up.  What the device computes is known once one candidate that recomputes and divides
    the batch alike was simulated; before, it is no less than that of one that recomputes less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.hardware import CostModel, Hardware
from offload.tier import Tier
from zhooks.planning.axes import Batch, Candidate
from zhooks.planning.best_first import Bound, Memory
from zhooks.planning.needs import Need, Needs

__all__ = ["Bounds", "Seconds"]

_Shape = tuple[str, Batch | None]


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


@dataclass(slots=True)
class Bounds:
    """By candidate, from what was observed so far."""

    needs: Needs
    hardware: Hardware
    #: By recomputation and batch: seconds of compute without updates, bytes of activations; the least that was seen.
    _seen: dict[_Shape, tuple[float, int]] = field(default_factory=dict)
    #: What was simulated, and the peak of its passes.
    _peaks: dict[Candidate, int] = field(default_factory=dict)
    _seconds: dict[Candidate, Seconds] = field(default_factory=dict)

    def observe(self, candidate: Candidate, compute_s: float, peak: int) -> None:
        """A simulation found so many seconds of compute in forward and backward, and this peak on the device in them."""
        self._peaks[candidate] = peak
        shape, need = (candidate.checkpoint, candidate.batch), self.needs.of(candidate)
        seen = compute_s, max(0, peak - need.floor - self._kept(candidate, need))
        before = self._seen.get(shape, seen)
        self._seen[shape] = (min(before[0], seen[0]), max(before[1], seen[1]))

    def of(self, candidate: Candidate) -> Bound:
        """At least, for all that is known now."""
        need, seconds = self.needs.of(candidate), self._transfers(candidate)
        _, activations = self._seen.get((candidate.checkpoint, candidate.batch), (0.0, 0))
        compute, accelerated = self._compute(candidate), self.hardware.kind == "gpu"
        passes = [compute, seconds.gather, seconds.reduce]
        least = max(passes) if accelerated else sum(passes)
        least += max(seconds.copies, seconds.disk, seconds.update) if accelerated else max(seconds.disk, seconds.update)
        held = need.least
        memory = Memory(max(held.device + activations, need.stored.device), held.host, held.disk)
        return Bound(least, seconds.total, memory, self._expected(candidate))

    def _expected(self, candidate: Candidate) -> int:
        """The peak of one that recomputes and divides the batch alike, with what the two hold otherwise."""
        mine, shape = self.needs.of(candidate), (candidate.checkpoint, candidate.batch)
        held = mine.least.device + self._kept(candidate, mine)
        found = []
        for other, peak in self._peaks.items():
            if (other.checkpoint, other.batch) == shape:
                theirs = self.needs.of(other)
                more = held - theirs.least.device - self._kept(other, theirs)
                found.append((abs(more), peak + more))
        # By the one that is most like it.
        return max(mine.stored.device, min(found, default=(0, 0))[1])

    def _compute(self, candidate: Candidate) -> float:
        def no_more(shape: _Shape) -> bool:
            checkpoint, batch = shape
            smaller = batch is None or candidate.batch is None or batch.micro_batch >= candidate.batch.micro_batch
            return smaller and (checkpoint == candidate.checkpoint or checkpoint == "none")

        own = self._seen.get((candidate.checkpoint, candidate.batch))
        return own[0] if own else max((seen[0] for shape, seen in self._seen.items() if no_more(shape)), default=0.0)

    def _kept(self, candidate: Candidate, need: Need) -> int:
        """Gathered units that stay beside the floor's, at the most."""
        return sum(flat.transient_nbytes for flat in need.flats) if candidate.kept else _largest(need)

    def _transfers(self, candidate: Candidate) -> Seconds:
        if candidate not in self._seconds:
            self._seconds[candidate] = self._add_up(candidate, self.needs.of(candidate))
        return self._seconds[candidate]

    def _add_up(self, candidate: Candidate, need: Need) -> Seconds:
        times = 1 if candidate.batch is None else candidate.batch.accumulation
        costs, world = CostModel(self.hardware), self.needs.world
        beside = min(world, self.hardware.device.count)
        shard = range(world // candidate.replicate)
        outer = range(0, world, len(shard))

        def collective(kind: str, nbytes: int, ranks: Sequence[int]) -> float:
            if len(ranks) < 2 or not nbytes:
                return 0.0
            group = costs.group(ranks)
            sharing = group.alike(self.hardware.device.count)
            return costs.collective(kind, nbytes, group, sharing=sharing).seconds

        gather = reduce = 0.0
        gathers = [collective("all_gather", flat.moved_nbytes, shard) for flat in need.flats]
        # Of units that are released between forward and backward one may stay.
        for flat, seconds in zip(need.flats, gathers, strict=True):
            gather += seconds * (times * (1 if candidate.kept else 2) if flat.releasable else 1)
        if candidate.stage == 3 and not candidate.kept:
            gather -= times * max(gathers, default=0.0)
        for flat in need.flats:
            if flat.kind.trainable:
                kind = "all_reduce" if flat.replicated else "reduce_scatter"
                reduce += times * collective(kind, flat.sum_nbytes, shard)
                share = flat.sum_nbytes if flat.replicated else flat.sum_nbytes // len(shard)
                reduce += times * collective("all_reduce", share, outer)
        copied, read, written, host, device = self._update(candidate, need)
        copies = costs.copy("h2d", copied, beside) if copied and self.hardware.kind == "gpu" else 0.0
        disk = 0.0
        if read or written:
            disk = costs.disk("read", read, sharing=beside) + costs.disk("write", written, sharing=beside)
        update = max(costs.host_update(host, sharing=beside) if host else 0.0, costs.compute(0, device) if device else 0.0)
        return Seconds(max(0.0, gather), reduce, copies, disk, update)

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
