"""Measures how large values get over a few ordinary steps: ``Attachment.calibrate``.

Note: [What is measured]
    Maxima are exact.  On samples of evenly spaced elements, gradients are counted by their power of two, activations are
    compared with themselves rounded to bf16, and updates are the difference of a parameter from one backward to the next.
    Counts are summed over the ranks, maxima are the largest of any rank's, so that all ranks propose the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.errors import ShardedOpError
from offload.text import shown
from zhooks.comm import CONTROL, Call
from zhooks.layout import flats_of, part_of
from zhooks.report.propose_dtypes import BINS, LOWEST, Base, Proposal, Ranges, propose
from zhooks.run import watch
from zhooks.session import Session
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Unit

__all__ = ["Calibration", "Meter", "calibrating"]

_SAMPLE = 1 << 14
_ROWS = 256

#: Columns of ``Meter.sums``, after two histograms, and of ``Meter.maxima``.
_CHANGED, _LOST, _NONFINITE, _BACKWARDS = range(2 * BINS, 2 * BINS + 4)
_GRADIENT, _WEIGHT, _ACTIVATION, _OUTPUT, _NOISE = range(5)


class Meter:
    """What has been seen on this rank.

    Attributes:
        sums: counts, [units, 2 * BINS + 4].
        maxima: largest values, [units, 5].
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.sums = torch.zeros(len(units), 2 * BINS + 4, dtype=torch.float64, device="cpu")
        self.maxima = torch.zeros(len(units), 5, dtype=torch.float64, device="cpu")
        #: Samples of the parameters at the last backward.
        self._before: dict[Flat, Tensor] = {}

    @torch.no_grad()
    def output(self, number: int, value: Tensor, whole: bool) -> None:
        """A module of unit ``number`` has made ``value``; ``whole``: the unit itself has.  Of a DTensor, the local tensor."""
        values = part_of(value).detach().float()
        largest = self._largest(number, values)
        self._raise(number, _ACTIVATION, largest)
        if whole:
            self._raise(number, _OUTPUT, largest)
        if values.dim() and values.shape[-1] > 1:
            rows = _spaced(values.reshape(-1, values.shape[-1]), _ROWS)
            error = (rows - rows.bfloat16().float()).square().mean().sqrt()
            varies = (rows - rows.mean(-1, keepdim=True)).square().mean().sqrt()
            noise = (error / varies).item()
            # Constant values say nothing about rounding, nor do infinite ones, which have been counted.
            self._raise(number, _NOISE, noise if 0 < noise < float("inf") else 0.0)

    @torch.no_grad()
    def gradient(self, number: int, value: Tensor, histogram: int = 1) -> None:
        """A gradient of unit ``number``: histogram 0 is of those of parameters, 1 of those of activations."""
        values = part_of(value).detach().float().reshape(-1)
        self._raise(number, _GRADIENT, self._largest(number, values))
        sample = _spaced(values, _SAMPLE)
        sample = sample[(sample != 0) & sample.isfinite()]
        powers = torch.frexp(sample).exponent.sub_(LOWEST).clamp_(0, BINS - 1)
        share = values.numel() / max(1, min(values.numel(), _SAMPLE))
        counts = self.sums[number, histogram * BINS : (histogram + 1) * BINS]
        counts += torch.bincount(powers.long(), minlength=BINS).cpu().double() * share

    @torch.no_grad()
    def backward_over(self) -> None:
        """A backward has ended: ``.grad`` is complete, and the step before it has been made."""
        with torch._C.DisableTorchFunctionSubclass():
            for number, unit in enumerate(self._units):
                self.sums[number, _BACKWARDS] += 1
                for flat in unit.flats:
                    self._update(number, flat)
                    for param in flat.params:
                        if isinstance(param.grad, ShardedTensor) and param.grad.local_shard.values.numel():
                            self.gradient(number, param.grad.local_shard.values, 0)

    @torch.no_grad()
    def end(self) -> None:
        """The last step has been made."""
        for number, unit in enumerate(self._units):
            for flat in unit.flats:
                self._update(number, flat)
        self._before.clear()

    def _update(self, number: int, flat: Flat) -> None:
        if not flat.layout.padded or not flat.kind.master.is_floating_point:
            return
        shard = flat.shard.detach()
        self._raise(number, _WEIGHT, self._largest(number, shard.float()))
        now, before = _spaced(shard, _SAMPLE).float().clone(), self._before.get(flat)
        self._before[flat] = now
        if before is None or before.shape != now.shape:
            return
        narrow, change = before.bfloat16().float(), now - before
        changed = change != 0
        lost = changed & ((narrow + change).bfloat16().float() == narrow)
        self.sums[number, _CHANGED] += changed.sum().item()
        self.sums[number, _LOST] += lost.sum().item()

    def _largest(self, number: int, values: Tensor) -> float:
        """The largest absolute finite value; infinities and NaN are counted."""
        if not values.numel():
            return 0.0
        largest = values.abs().amax().item()
        if largest < float("inf"):
            return largest
        finite = values.isfinite()
        self.sums[number, _NONFINITE] += values.numel() - int(finite.sum().item())
        return values[finite].abs().amax().item() if bool(finite.any()) else 0.0

    def _raise(self, number: int, column: int, value: float) -> None:
        self.maxima[number, column] = max(self.maxima[number, column].item(), value)

    @property
    def backwards(self) -> int:
        """Backward passes seen."""
        return int(self.sums[:, _BACKWARDS].max().item())

    def ranges(self) -> list[Ranges]:
        """The figures, unit by unit."""
        return [self._ranges(number, unit) for number, unit in enumerate(self._units)]

    def _ranges(self, number: int, unit: Unit) -> Ranges:
        sums, maxima = self.sums[number].tolist(), self.maxima[number].tolist()
        return Ranges(
            unit=unit.name,
            params=tuple(spec.name for flat in unit.flats for spec in flat.specs),
            numel=sum(flat.layout.numel for flat in unit.flats),
            gradients=(tuple(sums[:BINS]), tuple(sums[BINS : 2 * BINS])),
            gradient=maxima[_GRADIENT],
            weight=maxima[_WEIGHT],
            activation=maxima[_ACTIVATION],
            output=maxima[_OUTPUT],
            noise=maxima[_NOISE],
            lost=sums[_LOST] / sums[_CHANGED] if sums[_CHANGED] else None,
            nonfinite=int(sums[_NONFINITE]),
        )


class Calibration:
    """What ``Attachment.calibrate`` yields; it has a proposal once the block has ended."""

    def __init__(self) -> None:
        self._proposal: Proposal | None = None

    @property
    def proposal(self) -> Proposal:
        """The proposal.

        Raises:
            ShardedOpError: the block is still open, or ended by an error.
        """
        if self._proposal is None:
            raise ShardedOpError("calibrate expected its block to have ended, found it open. Read the proposal after it.")
        return self._proposal

    def end(self, proposal: Proposal) -> None:
        """The block has ended."""
        self._proposal = proposal

    def __str__(self) -> str:
        return str(self.proposal)


def _spaced(values: Tensor, most: int) -> Tensor:
    """At most ``most`` rows of ``values``, or a few more, evenly spaced."""
    return values[:: max(1, values.shape[0] // most)]


@contextmanager
def calibrating(session: Session, prefer: Base, loss_scale: float | None) -> Iterator[Calibration]:
    """See ``Attachment.calibrate``: measures inside the block, and proposes at its end.  Collective."""
    runtime, ranks = session.attached("calibrate").runtime, session.comm.stage
    runtime.finish_backward()
    _check(session, prefer, loss_scale)
    meter, calibration = Meter(session.units), Calibration()
    handles = watch(session.model, session.units, meter.output, meter.gradient)
    try:
        # Compiled code was made without the hooks inside units, and does not look for new ones.
        with torch.compiler.set_stance("force_eager"), runtime.reducer.measuring(meter.backward_over):
            yield calibration
            runtime.finish_backward()
    finally:
        while handles:
            handles.pop().remove()
    meter.end()
    ranks.all_reduce(Call(CONTROL, "calibrate: counts", "all units"), meter.sums, "sum")
    ranks.all_reduce(Call(CONTROL, "calibrate: largest", "all units"), meter.maxima, "max")
    backwards = meter.backwards // ranks.axis.world
    if not backwards:
        raise ShardedOpError(
            "calibrate expected a backward inside its block, found none. Run a few ordinary training steps inside."
        )
    calibration.end(propose(meter.ranges(), prefer, loss_scale, backwards))


def _check(session: Session, prefer: str, loss_scale: float | None) -> None:
    scaled = isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool) and 0 < loss_scale < float("inf")
    if not isinstance(prefer, str) or prefer not in ("bf16", "fp16") or not (loss_scale is None or scaled):
        raise ShardedOpError(
            f'calibrate expected prefer "bf16" or "fp16" and a positive loss_scale or None, found {shown(prefer)} and '
            f"{shown(loss_scale)}. Name one of the two, and leave the scale out if in doubt."
        )
    overlap = session.policy.optimizer.overlap
    if overlap or session.runtime.reducer.measured:
        found = "[optimizer] overlap = true" if overlap else "another calibration that is open"
        raise ShardedOpError(
            f"calibrate expected gradients that stay until the step, and one calibration at a time, found {found}. apply() a "
            "policy without overlap, or end the other block first."
        )
    for flat in [flat for flat in flats_of(session.units) if flat.kind.compute.is_floating_point]:
        if flat.kind.compute is not torch.float32:
            found = str(flat.kind.compute).removeprefix("torch.")
            raise ShardedOpError(
                f"calibrate expected every unit to compute in fp32, found {found} in {flat.name}: what rounding has lost "
                "cannot be measured. Attach without [precision] param, calibrate, then apply the proposed policy."
            )
