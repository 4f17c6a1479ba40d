"""The gradient noise scale, from gradients before and after their reduction: how large a batch is still worth its samples.

``grad/reduce.py`` shows what is sent and what has come back, as long as a handle is open.

Note: [The estimate]
    Let G be the true gradient and S the trace of the covariance of one sample's.  The squared norm of a gradient averaged over
    B samples is |G|^2 + S / B in the mean, so that two batch sizes give unbiased estimates of both.  Each is averaged over many
    reductions before they are divided, for their quotient is not unbiased and that of one reduction is mostly noise.  The
    quotient S / |G|^2 is the simple noise scale, in samples, about the batch at which a run takes twice the fewest steps and
    twice the fewest samples.  A factor that is in all gradients (a scaled loss) is in both, and cancels.
    Source: McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, arXiv:1812.06162, appendix A.1.

Note: [The two batches]
    On several ranks the small one is what one rank has added up when it is reduced, and the large one the mean over all.  A
    world of one has as the small one the first backward pass since gradients were None, and as the large one all passes up to
    the step.  Ranks or passes of other sizes than ``batch_size``, or a reduction that a rank made twice, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.errors import CapabilityError, ShardedOpError
from offload.events import Bus
from offload.text import shown
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.grad import Probe, Reducer, Sent
from zhooks.layout import flats_of
from zhooks.optim import holds, watch_steps
from zhooks.report.grad_norms import square, squares
from zhooks.session import Session
from zhooks.unit import Flat, Unit

__all__ = ["Averages", "NoiseEstimate", "NoiseScale", "Pair", "measure_noise"]

_numbers = count()
#: A trace holds no larger number of a sample.
_MOST = 1 << 50


@dataclass(frozen=True, slots=True)
class Pair:
    """The squared norms of two averages of the same samples' gradients: over few samples, and over more."""

    small_square: float
    small_batch: float
    large_square: float
    large_batch: float

    @property
    def gradient_square(self) -> float:
        """An unbiased estimate of |G|^2; may be negative."""
        difference = self.large_batch * self.large_square - self.small_batch * self.small_square
        return difference / (self.large_batch - self.small_batch)

    @property
    def trace(self) -> float:
        """An unbiased estimate of S; may be negative."""
        return (self.small_square - self.large_square) / (1 / self.small_batch - 1 / self.large_batch)


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """What has been measured so far.

    Attributes:
        noise_scale: S / |G|^2 in samples, the critical batch; None while either average is not positive, which more reductions
            or more samples in each will change.
        gradient_square: |G|^2, in the gradient's unit squared.
        trace: S, the trace of one sample's covariance, in the same unit times samples.
        batch_size: samples of all ranks and passes in the last gradient that was measured.
        measured: reductions (in a world of one: steps) that are in the averages.
        skipped: those that were left out: not finite, all zero, of unequal ranks, or made twice.
    """

    noise_scale: float | None
    gradient_square: float
    trace: float
    batch_size: int
    measured: int
    skipped: int


class Averages:
    """Exponential averages of both estimates; the first ones are corrected for what is not in them yet.

    Args:
        bus: hears what the scale is, under ``name``.
    """

    def __init__(self, decay: float, bus: Bus | None = None, name: str = "") -> None:
        self._decay, self._bus, self._name = decay, bus, name
        self._sums, self._weight = [0.0, 0.0], 0.0
        self._batch, self._measured, self.skipped = 0.0, 0, 0

    def add(self, pair: Pair) -> None:
        """Take one more; one without finite, positive squares is left out."""
        if not all(math.isfinite(value) and value > 0 for value in (pair.small_square, pair.large_square)):
            self.skipped += 1
            return
        # A decay of 1 weighs all alike.
        for place, value in enumerate((pair.gradient_square, pair.trace)):
            self._sums[place] = self._decay * self._sums[place] + value
        self._weight = self._decay * self._weight + 1
        self._batch, self._measured = pair.large_batch, self._measured + 1
        found = self.estimate
        if self._bus is not None and self._bus.active and found is not None and found.noise_scale is not None:
            self._bus.counter("noise scale", self._name, min(max(1, round(found.noise_scale)), _MOST))
            self._bus.counter("noise scale: batch", self._name, found.batch_size)

    @property
    def estimate(self) -> NoiseEstimate | None:
        """None before a first one."""
        if not self._measured:
            return None
        gradient, trace = (value / self._weight for value in self._sums)
        scale = trace / gradient if gradient > 0 and trace > 0 else None
        return NoiseEstimate(scale, gradient, trace, round(self._batch), self._measured, self.skipped)


class NoiseScale:
    """What ``Attachment.noise_scale`` returns: it measures until ``close()`` or the end of its ``with`` block."""

    def __init__(self, probe: RanksProbe | PassesProbe, reducer: Reducer, world: int) -> None:
        self._probe, self._reducer, self._world = probe, reducer, world
        reducer.probe = probe

    @property
    def estimate(self) -> NoiseEstimate | None:
        """What has been measured so far, the same on every rank; None before the first reduction."""
        return self._probe.averages.estimate

    def __str__(self) -> str:
        found, skipped = self.estimate, self._probe.averages.skipped
        if found is None:
            wanted = "a reduction" if self._world > 1 else "a step of several backward passes after gradients were None"
            return f"noise scale: not measured yet; expected {wanted}" + (f"; {skipped} left out" if skipped else "")
        said = "not resolved yet" if found.noise_scale is None else f"about {found.noise_scale:.3g} samples"
        left = f", {found.skipped} left out" if found.skipped else ""
        return f"noise scale: {said}; batch {found.batch_size}; {found.measured} measured{left}"

    def close(self) -> None:
        """Stop measuring; the estimate stays.  Every rank must call it, at the same step; again changes nothing."""
        if self._reducer.probe is self._probe:
            self._reducer.probe = None
        self._probe.close()

    def __enter__(self) -> NoiseScale:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def measure_noise(session: Session, batch_size: int, decay: float) -> NoiseScale:
    """See ``Attachment.noise_scale``: measures from the next backward on.  Collective."""
    session.attached("noise_scale").runtime.finish_backward()
    units, comm, reducer = session.units, session.comm, session.runtime.reducer
    ranks = ControlPlane(comm.stage, "noise_scale")
    with ranks.all_or_none():
        _check(session, batch_size, decay)
    problem = ranks.differ({"noise_scale": {"batch_size": str(batch_size), "decay": repr(decay)}})
    if problem:
        raise ShardedOpError(problem)
    # Levels that several attachments state under one name would be added up.
    name, number = type(session.model).__name__, next(_numbers)
    averages = Averages(float(decay), reducer.bus, f"{name} {number}" if number else name)
    alone = comm.world.axis.world == 1
    made = PassesProbe(units, comm, reducer, batch_size, averages) if alone else RanksProbe(comm, reducer, batch_size, averages)
    return NoiseScale(made, reducer, comm.world.axis.world)


def _check(session: Session, batch_size: int, decay: float) -> None:
    comm, reducer = session.comm, session.runtime.reducer
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size > 0
    share = isinstance(decay, (int, float)) and not isinstance(decay, bool) and 0 < decay <= 1
    if not whole or not share:
        raise ShardedOpError(
            f"noise_scale expected a batch_size of at least 1 and a decay above 0 and at most 1, found "
            f"{shown(batch_size)} and {shown(decay)}. Pass the number of samples in one rank's backward pass."
        )
    if comm.tp.axis.world > 1 or comm.pp.axis.world > 1:
        raise CapabilityError(
            "noise_scale expected ranks that all compute gradients of the whole model, found a mesh with tp or pp. "
            "Measure on a mesh of only data ranks."
        )
    if session.policy.optimizer.overlap and comm.world.axis.world == 1:
        raise CapabilityError(
            "noise_scale expected several ranks, or several backward passes per step, found one rank and [optimizer] "
            "overlap = true, which allows one pass. Set overlap = false."
        )
    if reducer.replicas.jobs:
        raise CapabilityError(
            "noise_scale expected a mean over the ranks of the mesh, found one over replicas that are separate jobs. "
            "Measure without them."
        )
    if reducer.probe is not None:
        raise ShardedOpError(
            "noise_scale expected one measurement at a time, found another handle that is open. Close that one first."
        )


def _held_back(reducer: Reducer) -> bool:
    """Something was added up and not reduced yet."""
    return any(gradient.partial is not None for gradient in reducer.gradients.values())


class RanksProbe(Probe):
    """Compares what each rank sends with the mean of all."""

    def __init__(self, comm: Comm, reducer: Reducer, batch_size: int, averages: Averages) -> None:
        self._comm, self._reducer, self._batch, self.averages = comm, reducer, batch_size, averages
        # Of the round that runs: squares on the device, chunks seen, and passes that were added up since the last one.
        self._sent: list[Tensor] = []
        self._landed: list[Tensor] = []
        self._seen: set[tuple[int, int]] = set()
        # What was added up before is of passes that were not counted.
        self._twice, self._added, self._passes = _held_back(reducer), False, 0

    def adds(self) -> None:
        self._added = True

    @torch.no_grad()
    def sends(self, flat: Flat, start: int, partial: Tensor) -> None:
        self._twice = self._twice or (flat.number, start) in self._seen
        self._seen.add((flat.number, start))
        scaling = self._reducer.scaling
        scale = scaling.scale.value if scaling.on else 1.0
        self._sent.append(square(partial, flat.group.buffer_nbytes) * (self._reducer.to_kept / scale) ** 2)

    @torch.no_grad()
    def landed(self, sent: Sent, mean: Tensor) -> None:
        # Added up over all ranks each element shall count once.
        whole = sent.partial.numel() == sent.chunk.numel
        holders = self._comm.world.axis.world if whole else self._comm.replicate.axis.world
        self._landed.append(square(mean, sent.reduction.gradient.flat.group.buffer_nbytes) / holders)

    def backward_over(self, *, held: bool) -> None:
        self._passes += self._added
        self._added = False
        if held:
            return
        sums = [float(torch.stack(values).sum()) if values else 0.0 for values in (self._sent, self._landed)]
        passes, twice = self._passes, self._twice
        self._sent, self._landed, self._twice, self._passes = [], [], False, 0
        self._seen.clear()
        numbers = torch.tensor([*sums, float(twice), passes, passes**2], dtype=torch.float64, device="cpu")
        self._comm.world.all_reduce(Call(CONTROL, "noise scale", "all units"), numbers, "sum")
        world = self._comm.world.axis.world
        small, large, again, summed, squared = numbers.tolist()
        if not summed:
            return  # autograd.grad's own, or a backward of another model
        if again or world * squared != summed**2:
            self.averages.skipped += 1
            return
        batch = self._batch * summed / world
        self.averages.add(Pair(small / world, batch, large, batch * world))

    def close(self) -> None:
        """Nothing to undo."""


class PassesProbe(Probe):
    """Compares the first backward pass of a step with all of its passes, in a world of one."""

    def __init__(self, units: Sequence[Unit], comm: Comm, reducer: Reducer, batch_size: int, averages: Averages) -> None:
        self._units, self._comm, self._reducer, self._batch, self.averages = units, comm, reducer, batch_size, averages
        self._added, self._passes = False, 0
        self._first = self._last = 0.0
        self._unwatch = watch_steps(self)

    def adds(self) -> None:
        if self._added:
            return
        self._added = True
        if self._fresh():
            self._end()
            self._passes = 1
        elif self._passes:
            self._passes += 1

    def sends(self, flat: Flat, start: int, partial: Tensor) -> None:
        """What one rank sends is what lands."""

    def landed(self, sent: Sent, mean: Tensor) -> None:
        """See ``sends``."""

    def backward_over(self, *, held: bool) -> None:
        added, self._added = self._added, False
        if not (added and self._passes):
            return
        if _held_back(self._reducer):
            # Held back where this does not look: under accumulate() with a loss scale or gradients on a tier.
            self._passes = 0
            self.averages.skipped += 1
            return
        self._last = float(squares(self._units, self._comm).sum())
        if self._passes == 1:
            self._first = self._last

    def before(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Others' hooks may leave a step's groups empty while it lasts."""

    def after(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A step has been made of the gradients that the last backward left."""
        if holds(optimizer, (param for flat in flats_of(self._units) for param in flat.params)):
            self._end()

    def _fresh(self) -> bool:
        """No parameter has a gradient, nor is one to come of earlier passes."""
        if _held_back(self._reducer):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            flats = flats_of(self._units)
            return all(param.grad is None for flat in flats for param in flat.params)

    def _end(self) -> None:
        """The passes that were added up are all that will be."""
        passes, self._passes = self._passes, 0
        if passes > 1:
            self.averages.add(Pair(self._first, self._batch, self._last / passes**2, self._batch * passes))

    def close(self) -> None:
        self._end()
        self._unwatch()
