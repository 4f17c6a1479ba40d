"""The policies that are searched: one value a candidate, all of them in the order of preference, and each as a policy.

Note: [Axes]
    Stage, the tiers of parameters, gradients and optimizer states, where updates are computed, recomputation, whether units
    stay gathered between forward and backward, micro-batches, nested replicas, ``tp`` where the user's code divides the model
    over a mesh, and dtypes where the user allows several.  Of the best one alone: units gathered ahead, a share of the
    optimizer's states that stays on the device, larger units.  A state never lies nearer to the compute than one that is
    used more often: parameters, then gradients, then optimizer states.  Everything else is the user's policy's.  ``pp``
    is not searched: it would be one more size in `Candidate`, with an axis in `Candidate.mesh`.

Note: [As many samples]
    A step trains on the same samples whatever the candidate.  The ranks of one ``tp`` axis share theirs, so that over t of
    them each has t times the samples that the step says, in micro-batches as they fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any, Literal

from offload.errors import PolicyError
from offload.policy import Policy
from offload.tier import Tier, Tiers

__all__ = ["MOST_DIVIDED", "ON_DEVICE", "Batch", "Candidate", "Dtype", "Shape", "batches", "candidates", "changed", "saves"]

ON_DEVICE = Tiers(Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
#: Micro-batches that a step is divided into at the most: simulating a step takes as long as there are micro-batches in it.
MOST_DIVIDED = 64
_CELLS = ("parameter", "gradient", "optimizer")

#: Axes on which neither side only saves memory beside the other.
_NO_SAVING = ("stage", "replicate", "prefetch", "kept", "device_share", "tp", "dtype", "min_numel")

Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Batch:
    """How a step's samples of a rank are divided: ``micro_batch`` at once, ``accumulation`` times."""

    micro_batch: int
    accumulation: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides what a rank computes and what its activations take, wherever states lie."""

    checkpoint: Literal["none", "unit"]
    batch: Batch | None
    tp: int
    dtype: Dtype | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is searched of a policy.

    Attributes:
        compute: where updates are computed.
        kept: units stay gathered between forward and backward (at stage 3).
        batch: None where the step does not let it be chosen.
        replicate: ranks of the outer axis, over which shards are replicated; 1 is no such axis.
        device_share: of the states that a tier holds, what stays on the device; 0 is what the user's policy says.
        tp: ranks that each layer is divided over, the innermost axis; 1 is no such axis.
        dtype: that parameters are computed with; None is what the user's policy says.
        min_numel: units of fewer elements are joined; None is what the user's policy says.
    """

    stage: int
    tiers: Tiers = ON_DEVICE
    compute: Literal["device", "host"] = "device"
    checkpoint: Literal["none", "unit"] = "none"
    kept: bool = False
    prefetch: int = 1
    batch: Batch | None = None
    replicate: int = 1
    device_share: float = 0.0
    tp: int = 1
    dtype: Dtype | None = None
    min_numel: int | None = None

    @property
    def shape(self) -> Shape:
        return Shape(self.checkpoint, self.batch, self.tp, self.dtype)

    def policy(self, base: Policy) -> Policy:
        """``base`` with the keys of this candidate.

        Raises:
            PolicyError: ``base`` rules it out.
        """
        values = base.values()
        for cell in _CELLS:
            values[cell].pop("partition", None)
            values[cell]["tier"] = getattr(self.tiers, cell).value
        values["stage"] = self.stage
        values["optimizer"]["compute"] = self.compute
        # Where all states are on the device there is nothing to share.
        share = self.device_share or base.optimizer.device_share
        values["optimizer"]["device_share"] = 0.0 if self.tiers.optimizer is Tier.DEVICE else share
        values["activation"]["checkpoint"] = self.checkpoint
        values["schedule"]["prefetch"] = self.prefetch
        values["schedule"]["reshard_after_forward"] = False if self.kept else "auto"
        if self.dtype is not None:
            values["precision"]["param"] = self.dtype
            if self.dtype == "fp16" and base.precision.loss_scale is None:
                values["precision"]["loss_scale"] = "dynamic"
        if self.min_numel is not None:
            values["units"]["min_numel"] = self.min_numel
        return Policy.of(changed(Policy(), Policy.of(values)))

    def simulated(self, base: Policy) -> Policy:
        """`policy` without its loss scale, which reads values that no simulation has."""
        policy = self.policy(base)
        if policy.precision.loss_scale is None:
            return policy
        values = policy.values()
        values["precision"]["loss_scale"] = None
        return Policy.of(values)

    def mesh(self, world: int) -> dict[str, int] | None:
        """Sizes of the axes of this many ranks, for ``simulate``; None is one axis."""
        sizes = {"replicate": self.replicate, "shard": world // self.replicate // self.tp, "tp": self.tp}
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        return None if len(sizes) == 1 else sizes

    def __str__(self) -> str:
        said = [f"stage {self.stage}"] + ([self.dtype] if self.dtype else []) + ([f"tp {self.tp}"] if self.tp > 1 else [])
        off = {cell: getattr(self.tiers, cell) for cell in _CELLS if getattr(self.tiers, cell) is not Tier.DEVICE}
        for tier in (Tier.HOST, Tier.DISK):
            cells = [cell for cell, where in off.items() if where is tier]
            said += [f"{' and '.join(cells)} on {tier.value}"] if cells else []
        said += [f"device_share {self.device_share:g}"] if self.device_share else []
        said += ["updated on the host"] if self.compute == "host" else []
        said += ["activations recomputed"] if self.checkpoint == "unit" else []
        said += ["parameters kept gathered"] if self.kept else []
        said += [f"prefetch {self.prefetch}"] if self.prefetch != 1 else []
        said += [f"units of {self.min_numel} elements"] if self.min_numel is not None else []
        said += [f"{self.replicate} replicas"] if self.replicate > 1 else []
        if self.batch is not None:
            said.append(f"micro-batch {self.batch.micro_batch} x {self.batch.accumulation}")
        return ", ".join(said)


def changed(old: Policy, new: Policy) -> dict[str, Any]:
    """The keys in which ``new`` differs from ``old``, and its stage: plain values that `Policy.of` takes."""
    before, after = old.values(), new.values()
    out: dict[str, Any] = {"stage": new.stage}
    for name, table in after.items():
        if isinstance(table, Mapping):
            keys = {key: value for key, value in table.items() if before[name].get(key) != value}
            out |= {name: keys} if keys else {}
    return out | ({"rule": after["rule"]} if after["rule"] else {})


def batches(micro_batch: int, accumulation: int) -> tuple[Batch, ...]:
    """As many samples a step in smaller and smaller micro-batches, the given one first; not in more than `MOST_DIVIDED`."""
    out = [Batch(micro_batch, accumulation)]
    while out[-1].micro_batch % 2 == 0 and 2 * out[-1].accumulation <= MOST_DIVIDED:
        out.append(Batch(out[-1].micro_batch // 2, out[-1].accumulation * 2))
    return tuple(out)


def candidates(
    base: Policy,
    world: int,
    *,
    tiers: Sequence[Tier] = tuple(Tier),
    host_updates: bool = True,
    batched: Sequence[Batch | None] = (None,),
    replicas: Sequence[int] = (1,),
    divided: Sequence[int] = (1,),
    dtypes: Sequence[Dtype | None] = (None,),
) -> Iterator[Candidate]:
    """Every candidate that ``base`` allows, what changes plain training least first.

    Args:
        tiers: that the hardware has.
        host_updates: the host is another place to compute updates in.
        batched: the batch of a rank, and how it may be divided; see Note [As many samples].
        replicas: sizes of the outer axis that may be tried.
        divided: sizes of the ``tp`` axis; above 1 where ``batched`` says how large a batch is.
        dtypes: that parameters may be computed with, the preferred one first.
    """
    possible: dict[Candidate, bool] = {}
    for tp in divided:
        first = batched[0]
        assert tp == 1 or first is not None, "a batch of unknown size cannot be made larger"
        # Ranks that share a batch have a larger one: see Note [As many samples].
        shared = batched if tp == 1 or first is None else batches(first.micro_batch * tp, first.accumulation)
        placed = list(_placed(world // tp, tiers, host_updates, [each for each in replicas if each == 1 or world > each * tp]))
        for dtype in dtypes:
            for batch in shared:
                for checkpoint in ("none", "unit"):
                    for bare in placed:
                        each = replace(bare, checkpoint=checkpoint, dtype=dtype, prefetch=max(1, base.schedule.prefetch))
                        key = replace(each, replicate=1)
                        if key not in possible:
                            possible[key] = _possible(key, base)
                        if possible[key]:
                            yield replace(each, batch=batch, tp=tp)


def _placed(world: int, tiers: Sequence[Tier], host_updates: bool, replicas: Sequence[int]) -> Iterator[Candidate]:
    """By stage, tiers and mesh, of so many ranks that divide the data."""
    if world > 1:
        yield Candidate(0)
    depth = [tier for tier in Tier if tier in tiers]
    # Tiers from the device down: no state lies nearer than one before it.
    rows = [Tiers(*row) for row in combinations_with_replacement(depth, 3)]
    for stage in (1, 2, 3) if world > 1 else (3,):
        for row in rows:
            if stage < 3 and row.parameter is not Tier.DEVICE:
                continue
            for replicate in replicas:
                bare = Candidate(stage, row, replicate=replicate)
                yield bare
                if stage == 3 and row.parameter is Tier.DEVICE and world > 1:
                    yield replace(bare, kept=True)
                if host_updates and Tier.DEVICE not in (row.gradient, row.optimizer):
                    yield replace(bare, compute="host")


def _possible(candidate: Candidate, base: Policy) -> bool:
    try:
        candidate.policy(base)
    except PolicyError:
        return False
    return True


def saves(candidate: Candidate, beside: Candidate, *, one_memory: bool) -> bool:
    """``candidate`` differs from the other only by what saves memory and makes no step quicker: states farther from the
    compute, recomputation, smaller micro-batches.

    Args:
        one_memory: the device's memory is the host's, so that the host tier costs nothing.
    """
    # Keeping units gathered is an axis of its own: the best of both is worth knowing.
    same = all(getattr(candidate, key) == getattr(beside, key) for key in _NO_SAVING)
    if not same or candidate == beside or (candidate.checkpoint == "none" and beside.checkpoint == "unit"):
        return False
    if candidate.batch is not None and beside.batch is not None and candidate.batch.micro_batch > beside.batch.micro_batch:
        return False
    if one_memory or (candidate.compute != beside.compute and beside.tiers.optimizer is not Tier.DEVICE):
        return (candidate.tiers, candidate.compute) == (beside.tiers, beside.compute)
    order = list(Tier)
    pairs = [(getattr(candidate.tiers, cell), getattr(beside.tiers, cell)) for cell in _CELLS]
    return all(order.index(mine) >= order.index(theirs) for mine, theirs in pairs)
