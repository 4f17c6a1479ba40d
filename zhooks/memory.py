"""What this rank holds, in bytes, from the storages that exist, beside what the table and the paper say.

``Attachment.memory`` calls it.  It reads sizes; it never allocates on a device and never communicates.

Source: ZeRO, arXiv:1910.02054, section 3 (16 Psi; 4 Psi + 12 Psi/N; 2 Psi + 14 Psi/N; 16 Psi/N).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zhooks.comm import Comm
from zhooks.flat import Flat
from zhooks.placement import Placement, Table
from zhooks.reduce import Reducer
from zhooks.sharded import ShardedTensor
from zhooks.unit import Unit


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the table: what it holds now, and what the layout and the policy's dtypes say it holds."""

    what: str
    tier: str
    nbytes: int
    formula: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of this rank.  ``rows``: parameter, gradient, optimizer; ``transient``: buffers that come and go."""

    rows: tuple[Row, ...]
    transient: dict[str, int]
    psi: int
    ranks: int
    paper: int

    @property
    def nbytes(self) -> int:
        """Bytes of the table's cells, transient buffers apart."""
        return sum(row.nbytes for row in self.rows)

    @property
    def formula(self) -> int:
        return sum(row.formula for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'what':<22}{'tier':<8}{'held':>14}{'by the table':>16}"]
        lines += [f"{row.what:<22}{row.tier:<8}{_mib(row.nbytes):>14}{_mib(row.formula):>16}" for row in self.rows]
        lines.append(f"{'sum':<30}{_mib(self.nbytes):>14}{_mib(self.formula):>16}")
        lines += [f"{'+ ' + name:<22}{'device':<8}{_mib(size):>14}" for name, size in self.transient.items()]
        lines.append(
            f"{self.psi:,} parameters over {self.ranks} rank(s); the ZeRO paper's figure for mixed precision with "
            f"Adam: {_mib(self.paper)}"
        )
        return "\n".join(lines)


def report(
    units: Sequence[Unit], reducer: Reducer, comm: Comm, table: Table, optimizers: Sequence[torch.optim.Optimizer]
) -> MemoryReport:
    """Measure now; see ``MemoryReport``."""
    flats = [flat for unit in units for flat in unit.flats]
    master = sum(_nbytes(flat.shard) for flat in flats if not flat.aliased and flat.ownership.resident)
    parameter = sum(_resting(flat) for flat in flats)
    gradient, states = _gradients(flats, reducer), _states(flats, optimizers)
    adam = sum(_state_formula(flat, optimizers) for flat in flats)
    rows = (
        Row("parameter", "device", parameter, sum(_parameter_formula(flat) for flat in flats)),
        Row("gradient", "device", gradient, sum(_gradient_formula(flat, reducer) for flat in flats)),
        Row("optimizer", "device", states + master, adam + sum(_master_formula(flat) for flat in flats)),
    )
    transient = {
        "gathered units": sum(_nbytes(flat.full) for flat in flats if flat.releasable and flat.full is not None),
        "partial gradients": _partials(flats, reducer),
        "idle buffers": reducer.pool.nbytes,
        "message rings": comm.nbytes,
    }
    psi = sum(flat.layout.numel for flat in flats)
    ranks = flats[0].layout.world
    return MemoryReport(rows, transient, psi, ranks, paper_bytes(psi, ranks, table))


def paper_bytes(psi: int, ranks: int, table: Table) -> int:
    """The paper's bytes a rank for mixed precision with Adam: 2 + 2 + 12 a parameter, each divided where it is sharded."""
    cells = ((table.parameter, 2), (table.gradient, 2), (table.optimizer, 12))
    return sum(psi * size // (ranks if cell is Placement.SHARD else 1) for cell, size in cells)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _resting(flat: Flat) -> int:
    if not flat.ownership.resident:
        return _nbytes(flat.shard)
    return _nbytes(flat.full) if flat.full is not None else flat.full_nbytes if flat.aliased else 0


def _parameter_formula(flat: Flat) -> int:
    if flat.ownership.resident:
        return flat.layout.padded * flat.kind.compute.itemsize
    return flat.shard_numel * flat.kind.master.itemsize


def _master_formula(flat: Flat) -> int:
    apart = flat.ownership.resident and not flat.aliased
    return flat.shard_numel * flat.kind.master.itemsize if apart else 0


def _gradients(flats: Sequence[Flat], reducer: Reducer) -> int:
    """Storages behind the parameters' ``.grad``, each counted once, and partial sums that wait for a boundary."""
    seen: dict[int, int] = {}
    for flat in flats:
        for param in flat.params:
            with torch._C.DisableTorchFunctionSubclass():
                grad = param.grad
            if isinstance(grad, ShardedTensor):
                storage = grad._local.untyped_storage()
                seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def _gradient_formula(flat: Flat, reducer: Reducer) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        held = any(param.grad is not None for param in flat.params)
    return flat.shard_numel * flat.kind.master.itemsize if held else 0


def _partials(flats: Sequence[Flat], reducer: Reducer) -> int:
    total = 0
    for flat in flats:
        gradient = reducer.gradients.get(flat.number)
        if gradient is not None and gradient.partial is not None and gradient.partial is not gradient._shard:
            total += _nbytes(gradient.partial)
    return total


def _states(flats: Sequence[Flat], optimizers: Sequence[torch.optim.Optimizer]) -> int:
    total = 0
    for optimizer in optimizers:
        for flat in flats:
            for param in flat.params:
                for value in optimizer.state.get(param, {}).values():
                    if isinstance(value, ShardedTensor):
                        total += _nbytes(value._local)
    return total


def _state_formula(flat: Flat, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Sharded states the optimizers keep, times this rank's elements of each parameter."""
    total = 0
    for optimizer in optimizers:
        for index, param in enumerate(flat.params):
            own = sum(piece.numel for piece in flat.pieces(index))
            kept = [value for value in optimizer.state.get(param, {}).values() if isinstance(value, ShardedTensor)]
            total += sum(own * value.dtype.itemsize for value in kept)
    return total


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.2f} MiB"
