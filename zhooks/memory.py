"""What this rank holds, in bytes, from the storages that exist, beside what the table and the paper say.

``Attachment.memory`` calls it.  It reads sizes; it never allocates on a device and never communicates.

Source: ZeRO, arXiv:1910.02054, section 3 (16 Psi; 4 Psi + 12 Psi/N; 2 Psi + 14 Psi/N; 16 Psi/N).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from offload.block import Block, Part
from offload.tier import Tier
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
        where = {"staging": "host"}
        lines += [
            f"{'+ ' + name:<22}{where.get(name, 'device'):<8}{_mib(size):>14}" for name, size in self.transient.items()
        ]
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
    rows = [
        *_rows("parameter", [(flat.kind.tiers.parameter, _parameter(flat)) for flat in flats]),
        *_rows("gradient", [(flat.kind.tiers.gradient, cell) for flat, cell in _gradients(flats)]),
        *_rows("optimizer", [(flat.kind.tiers.optimizer, _optimizer(flat, optimizers)) for flat in flats]),
    ]
    transient = {
        "gathered units": sum(_nbytes(flat.full) for flat in flats if flat.releasable and flat.full is not None),
        "partial gradients": _partials(flats, reducer),
        "idle buffers": reducer.pool.nbytes,
        "message rings": comm.nbytes,
    }
    store = next((flat.store for flat in flats if flat.store is not None), None)
    if store is not None:
        transient["staging"] = store.staging.used
    psi = sum(flat.layout.numel for flat in flats)
    ranks = flats[0].layout.world
    return MemoryReport(tuple(rows), transient, psi, ranks, paper_bytes(psi, ranks, table))


Cell = tuple[int, int]
"""Bytes held, and bytes by the layout and the policy's dtypes."""


def _rows(what: str, cells: Sequence[tuple[Tier, Cell]]) -> list[Row]:
    """One row a tier that something rests on; a cell that is empty everywhere is shown where it would be."""
    rows = []
    for tier in Tier:
        mine = [cell for where, cell in cells if where is tier]
        if any(held or formula for held, formula in mine):
            rows.append(Row(what, tier.value, sum(held for held, _ in mine), sum(formula for _, formula in mine)))
    return rows or [Row(what, (cells[0][0] if cells else Tier.DEVICE).value, 0, 0)]


def paper_bytes(psi: int, ranks: int, table: Table) -> int:
    """The paper's bytes a rank for mixed precision with Adam: 2 + 2 + 12 a parameter, each divided where it is sharded."""
    cells = ((table.parameter, 2), (table.gradient, 2), (table.optimizer, 12))
    return sum(psi * size // (ranks if cell is Placement.SHARD else 1) for cell, size in cells)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _parameter(flat: Flat) -> Cell:
    """What the model computes with, at rest: the shard, its copy in the compute dtype, or all of it."""
    if flat.ownership.resident:
        formula = flat.full_nbytes
        return (_nbytes(flat.full) if flat.full is not None else formula if flat.aliased else 0), formula
    if flat.rest is None:
        return _nbytes(flat.shard), flat.shard_numel * flat.kind.master.itemsize
    dtype = flat.kind.compute if flat.kind.apart else flat.kind.master
    return flat.rest.gathered_from.nbytes, flat.shard_numel * dtype.itemsize


def _master(flat: Flat) -> Cell:
    """Masters that rest apart from the parameters: with the optimizer's states."""
    formula = flat.shard_numel * flat.kind.master.itemsize
    if flat.rest is not None:
        return (flat.rest.master.nbytes, formula) if flat.kind.apart else (0, 0)
    return (_nbytes(flat.shard), formula) if flat.ownership.resident and not flat.aliased else (0, 0)


def _optimizer(flat: Flat, optimizers: Sequence[torch.optim.Optimizer]) -> Cell:
    (held, formula), (states, by_layout) = _master(flat), _states(flat, optimizers)
    return held + states, formula + by_layout


def _gradients(flats: Sequence[Flat]) -> Iterator[tuple[Flat, Cell]]:
    """Storages and blocks behind the parameters' ``.grad``, each counted once."""
    seen: set[int] = set()
    for flat in flats:
        with torch._C.DisableTorchFunctionSubclass():
            grads = [param.grad for param in flat.params]
        held = 0
        for grad in grads:
            if isinstance(grad, ShardedTensor):
                owner, nbytes = _owner(grad)
                held += 0 if owner in seen else nbytes
                seen.add(owner)
        some = any(grad is not None for grad in grads)
        yield flat, (held, flat.shard_numel * flat.kind.master.itemsize if some else 0)


def _owner(tensor: ShardedTensor) -> Cell:
    """The identity and the size of the memory behind a range."""
    at = tensor._at
    if isinstance(at, Part):
        return id(at.block), at.block.nbytes
    storage = at.untyped_storage()
    return storage._cdata, storage.nbytes()


def _partials(flats: Sequence[Flat], reducer: Reducer) -> int:
    total = 0
    for flat in flats:
        gradient = reducer.gradients.get(flat.number)
        if gradient is not None and gradient.partial is not None and gradient.partial is not gradient._shard:
            total += _nbytes(gradient.partial)
    return total


def _states(flat: Flat, optimizers: Sequence[torch.optim.Optimizer]) -> Cell:
    """Sharded states the optimizers keep for a flat: ranges on the device, whole blocks elsewhere."""
    held = formula = 0
    blocks: dict[int, Block] = {}
    for optimizer in optimizers:
        for index, param in enumerate(flat.params):
            own = sum(piece.numel for piece in flat.pieces(index))
            for value in optimizer.state.get(param, {}).values():
                if not isinstance(value, ShardedTensor):
                    continue
                if isinstance(value._at, Part):
                    blocks[id(value._at.block)] = value._at.block
                else:
                    held += _nbytes(value._local)
                    formula += own * value.dtype.itemsize
    rest = sum(block.nbytes for block in blocks.values())
    return held + rest, formula + sum(flat.shard_numel * block.dtype.itemsize for block in blocks.values())


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.2f} MiB"
