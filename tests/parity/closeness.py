"""How close to the oracle a run must come: every tolerance of the parity tests is stated here, and nowhere else.

The matrix and the adversities call ``differences``; its lines are the failure message.
It never runs anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tests.parity.cells import Cell
from tests.parity.oracle import Record


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bit-equal when ``exact``; else bounds on losses and on parameters.

    A loss may be off by ``loss`` of itself. A tensor may be off, in the 2-norm, by ``drift`` of the way it went in
    training, plus ``rounding`` per element's root for tensors that hardly moved: a missing average, clip or step is
    an error of the whole way.
    """

    exact: bool
    loss: float = 0.0
    drift: float = 0.0
    rounding: float = 0.0


EXACT = Tolerance(exact=True)
# fp32 arithmetic in another order: four ranks' sums, a norm's partial sums. Seven times what that comes to in any model
# of the zoo at most (test_oracle.py); models with kinks, which no tolerance would fit, are not in it.
REORDERED = Tolerance(exact=False, loss=2e-5, drift=2e-4, rounding=2e-7)
FP16 = Tolerance(exact=False, loss=2e-3, drift=2e-2, rounding=2e-5)
BF16 = Tolerance(exact=False, loss=1e-2, drift=4e-2, rounding=1e-4)
# The reduction itself rounds to 8 bits, in an order of its own.
BF16_REDUCED = Tolerance(exact=False, loss=1e-2, drift=6e-2, rounding=1e-4)


def tolerance_of(cell: Cell) -> Tolerance:
    """The cell's bound: exact where the oracle and zhooks do the same operations in the same order, whatever the
    dtypes.
    """
    # Two gradients have one sum; more are added in rank order by all transports but the backend's own, which promises
    # no order. Averages are exact, for the worlds are powers of two.
    one_order = cell.world <= 2 or cell.transport == "auto"
    # A clip's norm is summed shard by shard. torch's fused AdamW rounds the tail of a tensor otherwise than its
    # vectorised body, and a shard ends elsewhere.
    element_wise = cell.clip == "unclipped" and cell.optimizer != "adamwfused"
    if cell.world == 1 or (one_order and element_wise):
        return EXACT
    return {"fp32": REORDERED, "fp16": FP16, "bf16": BF16, "bf16reduce": BF16_REDUCED}[cell.precision]


def differences(found: Record, expected: Record, tolerance: Tolerance) -> list[str]:
    """Each way in which ``found`` is not within ``tolerance`` of ``expected``; the first wrong loss only, as later
    ones follow it.
    """
    lines = _loss_differences(found.losses, expected.losses, "loss", tolerance)
    lines += _loss_differences([found.norms], [expected.norms], "norm", tolerance)
    return lines + state_differences(found.final, expected.final, expected.start, tolerance)


def _loss_differences(
    found: list[list[float]], expected: list[list[float]], what: str, tolerance: Tolerance
) -> list[str]:
    if [len(row) for row in found] != [len(row) for row in expected]:
        return [f"{what}: expected {expected}, found {found}"]
    for step, (found_row, expected_row) in enumerate(zip(found, expected, strict=True)):
        for rank, (value, wanted) in enumerate(zip(found_row, expected_row, strict=True)):
            if not scalar_close(value, wanted, tolerance):
                return [f"{what}[{step}][{rank}]: expected {wanted!r}, found {value!r} ({value - wanted:+.3e})"]
    return []


def scalar_close(value: float, wanted: float, tolerance: Tolerance) -> bool:
    if tolerance.exact or not math.isfinite(wanted):
        return value == wanted or (math.isnan(value) and math.isnan(wanted))
    return abs(value - wanted) <= tolerance.loss * max(abs(wanted), 1e-3)


def state_differences(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor], tolerance: Tolerance
) -> list[str]:
    """Compare two states name by name, each tensor's error measured against its way from ``start``."""
    if set(found) != set(expected):
        return [f"names: missing {sorted(set(expected) - set(found))}, unexpected {sorted(set(found) - set(expected))}"]
    lines = [tensor_difference(found[name], expected[name], start.get(name), tolerance, name=name) for name in expected]
    return [line for line in lines if line]


def tensor_difference(
    found: Tensor, expected: Tensor, start: Tensor | None, tolerance: Tolerance, *, name: str
) -> str | None:
    """One line when ``found`` is not close to ``expected``, else None; without a ``start`` the way is the tensor
    itself.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{name}: expected {expected.dtype} {list(expected.shape)}, found {found.dtype} {list(found.shape)}"
    if found.equal(expected):
        return None
    found, expected = found.double(), expected.double()
    # NaN and infinities must stand in the same places; what is left is compared as numbers.
    if not found.isfinite().equal(expected.isfinite()):
        return f"{name}: expected {int(expected.isfinite().sum())} finite elements, found {int(found.isfinite().sum())}"
    error = float((found - expected).nan_to_num().norm())
    way = float((expected if start is None else expected - start.double()).nan_to_num().norm())
    bound = tolerance.drift * way + tolerance.rounding * math.sqrt(found.numel())
    if not tolerance.exact and error <= bound:
        return None
    wrong = int((found != expected).sum())
    worst = float((found - expected).nan_to_num().abs().max())
    limit = "must be bit-equal" if tolerance.exact else f"bound {bound:.3e}"
    return (
        f"{name}: error {error:.3e} over a way of {way:.3e} ({limit}); "
        f"{wrong} of {found.numel()} elements differ, by {worst:.3e} at most"
    )


def compare(cell: Cell, found: Record, expected: Record) -> None:
    """Raises:
    AssertionError: the cell did not train as the oracle did.
    """
    lines = state_differences(found.start, expected.start, {}, EXACT)
    assert not lines, "\n".join(["the state after attach is not rank 0's own", *lines])
    lines = differences(found, expected, tolerance_of(cell))
    assert not lines, "\n".join([f"{len(lines)} differences from plain training", *lines])
