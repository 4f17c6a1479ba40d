"""What this rank holds, in bytes, from the storages that exist, beside what the table and the paper say.

Source: ZeRO, arXiv:1910.02054, section 3 (16 Psi; 4 Psi + 12 Psi/N; 2 Psi + 14 Psi/N; 16 Psi/N), and section 6.2
(constant-size buffers).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offload.store import Block, BlockRange, owner_of
from offload.text import counted
from offload.tier import Tier
from zhooks.comm import Comm
from zhooks.grad import Reducer
from zhooks.layout import Ignored, Placement, Table, flats_of
from zhooks.optim import plain_parts, sharded_states, vectors_in, with_owners
from zhooks.report.memory_residual import Residue, activations, advice, mib, notes, unaccounted
from zhooks.session import Session
from zhooks.tensor import ShardedTensor, StoredTensor
from zhooks.unit import Flat

#: Columns of the table.
_WIDTH = 100
_MEANINGS = {
    "parameter": "as kept between uses: shards at stage 3, whole at stages 0 to 2",
    "gradient": "in .grad, reduced over the ranks; zero_grad() frees them",
    "optimizer": "states; with 16-bit parameters also the fp32 values it updates",
    "gathered units": "all values of the units (blocks of the model) in use now",
    "partial gradients": "of this rank's batch, not yet reduced over the ranks",
    "reduced ranges": "results of reductions that have not ended",
    "idle buffers": "kept for the next gathers and reductions",
    "message rings": "one for all CPU ranks of this machine; no [budget] counts it",
    "staging": "values on their way between the device, host and disk tiers",
    "staging on device": "values of the host and disk tiers while they are in use",
    "arena, unused": "reserved by [device] arena",
    "frozen subclasses": "quantized parameters and the like, whole on every rank",
    "ignored parameters": "named by [units] ignore, whole on every rank",
    "ignored gradients": "named by [units] ignore, whole on every rank",
    "ignored states": "named by [units] ignore, whole on every rank",
    "activations": "saved by autograd for backward; on host or disk stored there until then",
    "activation inputs": "of the units that backward computes again",
    "recomputed": "saved by the unit that backward computes again now",
    "activations, fetched": "back from their tier for backward",
    "activations in transit": "on their way to their tier or back",
    "other tensors": "the batch, the loss, workspaces of libraries",
    "free in the allocator": "reserved by torch, in no tensor",
    "of which in split blocks": "next to memory in use: only smaller tensors fit",
    "ends of pages": "unused: every block begins on a page of its own",
    "free in host slabs": "reserved for the host tier, unused",
    "free in scratch file": "of the disk tier, unused",
    "rest of the process": "Python, libraries, tensors not listed here",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the table: what it holds now, and what the layout and the policy's dtypes say it holds."""

    what: str
    tier: str
    nbytes: int
    formula: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The bytes of this rank.  ``print`` it for a table; ``dataclasses.asdict`` turns it into plain values.

    Attributes:
        rows: the model states: parameter, gradient, optimizer, one row per tier.
        transient: temporary buffers, in use or idle.
        psi: the number of parameters.
        ranks: the number of ranks they are sharded over.
        paper: the ZeRO paper's figure for them, in bytes.
        bounds: the upper bound of each kind of buffer under this policy.
        residual: activations.
        rest: memory reserved or resident beyond all that.
        notes: the inputs of the formulas, or why there are none, and the key that reduces the largest line.
    """

    rows: tuple[Row, ...]
    transient: dict[str, int]
    psi: int
    ranks: int
    paper: int
    bounds: dict[str, int]
    residual: tuple[Residue, ...]
    rest: tuple[Residue, ...]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the model states, without temporary buffers."""
        return sum(row.nbytes for row in self.rows)

    @property
    def formula(self) -> int:
        return sum(row.formula for row in self.rows)

    @property
    def by_tier(self) -> dict[str, int]:
        """Bytes on each tier: model states and buffers now, activations at their peak (0 if none were counted)."""
        return self._with(lambda residue: max(residue.nbytes or 0, residue.peak or 0))

    def _with(self, activations: Callable[[Residue], int]) -> dict[str, int]:
        sums = dict.fromkeys((tier.value for tier in Tier), 0)
        for row in self.rows:
            sums[row.tier] += row.nbytes
        for name, nbytes in self.transient.items():
            if _where(name) in sums:
                sums[_where(name)] += nbytes
        for residue in self.residual:
            sums[residue.tier] += activations(residue)
        return sums

    @property
    def shared(self) -> int:
        """Bytes of memory that all ranks of this machine share, which are on no tier."""
        return sum(nbytes for name, nbytes in self.transient.items() if _where(name) == "shared")

    @property
    def _counts_activations(self) -> bool:
        return any(row.nbytes is not None or row.peak is not None for row in self.residual)

    def __str__(self) -> str:
        table = [
            _header("model states", "expected"),
            *(_line(row.what, row.tier, row.nbytes, row.formula) for row in self.rows),
            _line("sum", "", self.nbytes, self.formula),
            _header("buffers", "at most"),
            *(_line(name, _where(name), nbytes, self.bounds.get(name)) for name, nbytes in self.transient.items()),
            _header("other memory", "estimate", "peak"),
            *(_line(each.what, each.tier, each.nbytes, each.formula, each.peak) for each in (*self.residual, *self.rest)),
        ]
        tiers = ", ".join(f"{tier} {mib(nbytes)}" for tier, nbytes in self.by_tier.items() if nbytes)
        counts = "with activations at their peak" if self._counts_activations else "without activations"
        beside = f"; shared by the ranks of this machine {mib(self.shared)}" if self.shared else ""
        said = (
            f"total of model states and buffers, {counts}: {tiers or 'nothing'}{beside}",
            f"{self.psi:,} parameters over {counted(self.ranks, 'rank')}; for these, the ZeRO paper counts {mib(self.paper)} "
            "of model states at this stage, in mixed precision with Adam",
            *self.notes,
        )
        states, buffers = [row.what for row in self.rows], list(self.transient)
        other = [each.what for each in (*self.residual, *self.rest)]
        return "\n".join((*table, *_legend([*states, *buffers, *other]), *_wrapped(said)))


def memory_report(session: Session, heads: int | None) -> MemoryReport:
    """See ``Attachment.memory``."""
    optimizers, residual = session.optimizers.here(), session.runtime.saved.residual.ask(heads)
    flats, reducer, comm = flats_of(session.units), session.runtime.reducer, session.comm
    rows = (
        # What the model computes with, between uses: the shard, its copy in the compute dtype, or all of it.
        *_rows("parameter", [(f.kind.tiers.parameter, (f.held_nbytes()[0], f.plan.footprint()[0].nbytes)) for f in flats]),
        *_rows("gradient", [(flat.kind.tiers.gradient, cell) for flat, cell in _gradients(flats, reducer)]),
        *_rows("optimizer", [cell for flat in flats for cell in _optimizer(flat, optimizers)]),
    )
    gathered = sum(flat.full.nbytes for flat in flats if flat.releasable and flat.full is not None)
    held = buffers_of(flats, reducer, comm)
    transient = {"gathered units": gathered} | {name: buffer.now for name, buffer in held.items()}
    transient |= _ignored(session.ignored, optimizers)
    store = flats[0].store
    if store is not None and not store.device.addresses_host:
        transient["staging on device"] = store.staged_on_device
    if reducer.pool.arena is not None:
        transient["arena, unused"] = reducer.pool.arena.report().unused
    bounds = {name: buffer.most for name, buffer in held.items()}
    psi, ranks = sum(flat.layout.numel for flat in flats), flats[0].layout.world
    paper = paper_bytes(psi, ranks, Table.of(session.policy.table()))
    seen = MemoryReport(rows, transient, psi, ranks, paper, bounds, tuple(activations(residual)), (), ())
    # Of a model that is divided over tp, the figures are those of this rank's share.
    tp = comm.tp.axis
    divided = [f"counted for rank {tp.rank} of {tp.world} on the tp axis, and only over its data ranks"] if tp.world > 1 else []
    advised = advice(_on_device(seen), residual.terms) if residual.counted else None
    return replace(
        seen,
        rest=tuple(unaccounted(flats[0].kind.device, seen._with(lambda residue: residue.nbytes or 0), seen.shared, store)),
        notes=(*divided, *notes(residual), *([advised] if advised else [])),
    )


def _ignored(ignored: Ignored, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, int]:
    """What is left whole on this rank, and what optimizers that are known keep for it."""
    named = {name: param for name, param in ignored.params.items() if not isinstance(param, ShardedTensor)}
    params = list(named.values())
    states = [state for param in params for one in optimizers for state in one.state.get(param, {}).values()]
    held = {
        "frozen subclasses": sum(ignored.nbytes(name) for name in ignored.unnamed),
        "ignored parameters": sum(ignored.nbytes(name) for name in named if name not in ignored.unnamed),
        "ignored gradients": sum(param.grad.nbytes for param in params if param.grad is not None),
        "ignored states": sum(state.nbytes for state in states if isinstance(state, Tensor)),
    }
    return {name: nbytes for name, nbytes in held.items() if nbytes}


_MANY = {"parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer states"}


def _where(name: str) -> str:
    """The tier of a buffer; "shared" is none."""
    return {"staging": "host", "message rings": "shared"}.get(name, "device")


def _on_device(seen: MemoryReport) -> dict[str, int]:
    """What holds how much of the device."""
    held = {name: nbytes for name, nbytes in seen.transient.items() if _where(name) == "device"}
    held |= {_MANY[row.what]: row.nbytes for row in seen.rows if row.tier == "device"}
    most = sum(max(row.nbytes or 0, row.peak or 0) for row in seen.residual if row.tier == "device")
    return held | {"activations": most}


Cell = tuple[int, int]
"""Bytes held, and bytes by the layout and the policy's dtypes."""


def _rows(what: str, cells: Sequence[tuple[Tier, Cell]]) -> list[Row]:
    """One row per tier that holds something; a cell that is empty everywhere is shown where it would be."""
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


def _optimizer(flat: Flat, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[Tier, Cell]]:
    """Masters that are apart from the parameters, and the states, by tier."""
    masters, (states, by_layout) = flat.plan.footprint()[2].nbytes, _states(flat, optimizers)
    blocks, in_memory = _whole_states(flat, optimizers)
    held, formula = states + blocks + (flat.held_nbytes()[1] if masters else 0), by_layout + blocks + masters
    return [(flat.kind.tiers.optimizer, (held, formula)), (Tier.DEVICE, (in_memory, in_memory))]


def _whole_states(flat: Flat, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[int, int]:
    """States of parameters that are updated whole, all on the rank that owns them: bytes of blocks, and of memory."""
    every = [states for optimizer in optimizers for _, states in with_owners(optimizer, flat.params)]
    tensors = [tensor for states in every for value in states.values() for tensor in plain_parts(value)]
    blocks = {tensor.block for tensor in tensors if isinstance(tensor, StoredTensor)}
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors if not isinstance(tensor, StoredTensor))
    return sum(block.nbytes for block in blocks), held


def _gradients(flats: Sequence[Flat], reducer: Reducer) -> Iterator[tuple[Flat, Cell]]:
    """Storages and blocks behind the parameters' ``.grad``, and those that a backward is filling; each counted once."""
    seen: set[int] = set()
    for flat in flats:
        with torch._C.DisableTorchFunctionSubclass():
            grads = [param.grad for param in flat.params if param.grad is not None]
        sharded = [grad for grad in grads if isinstance(grad, ShardedTensor)]
        values: list[Tensor | Block | BlockRange] = [grad.local_shard.memory for grad in sharded]
        gradient = reducer.gradients.get(flat.number)
        if gradient is not None and gradient.at is not None:
            values.append(gradient.at)
        owners = dict(map(owner_of, values))
        held = sum(nbytes for owner, nbytes in owners.items() if owner not in seen)
        seen.update(owners)
        yield flat, (held, flat.plan.footprint()[1].nbytes if grads else 0)


def _states(flat: Flat, optimizers: Sequence[torch.optim.Optimizer]) -> Cell:
    """Sharded states the optimizers keep for a flat: ranges in memory of their own, whole blocks of a store."""
    held = formula = 0
    blocks: set[Block] = set()
    for optimizer in optimizers:
        for index, _, state in sharded_states(flat, optimizer):
            if state.local_shard.block is not None:
                blocks.add(state.local_shard.block)
            else:
                held += state.local_shard.values.nbytes
                formula += flat.span(index)[1] * state.dtype.itemsize
        vectors = sum(one.to_local().nbytes for param in flat.params for one in vectors_in(optimizer.state.get(param)))
        held, formula = held + vectors, formula + vectors
    stored = sum(block.nbytes for block in blocks)
    return held + stored, formula + stored


# Buffers.


@dataclass(frozen=True, slots=True)
class BufferUse:
    """Bytes of one kind of buffer: held ``now``, and the ``most`` the policy allows, however large the model is."""

    now: int
    most: int


def buffers_of(flats: Sequence[Flat], reducer: Reducer, comm: Comm) -> dict[str, BufferUse]:
    """The buffers of this rank by kind.

    Gathered units, what autograd saved and the sums that ``no_sync`` holds back are no buffers: they are the model's own.
    "partial gradients" are what a backward fills and sends, "reduced ranges" what comes back. Microbatches add up in the
    former: as long as their sum is held back, it is as large as the model.
    """
    pool, world = reducer.pool, comm.shard.axis.world
    # A value passes through a whole flat buffer, or a chunk of one above the bound; what is frozen has no gradient.
    trained = [flat for flat in flats if flat.kind.trainable]
    largest = max((min(flat.layout.padded * flat.kind.wide, pool.bound) for flat in trained), default=0)
    landing, sending = reducer.under_way()
    # Partial sums that wait for the rest of their gradients, or for their turn.
    gradients = [gradient for flat in flats if (gradient := reducer.gradients.get(flat.number)) is not None]
    partial = [one.partial for one in gradients if one.partial is not None and one.partial is not one.at]
    # Chunks of long parameters have buffers of their own.
    sums = 1 + reducer.most * (2 if any(flat.long for flat in trained) else 1)
    filling, bound = sum(each.nbytes for each in partial), sums * largest
    held = {
        "partial gradients": BufferUse(filling + sending, max(bound, filling) if reducer.accumulation.owed else bound),
        "reduced ranges": BufferUse(landing, (1 + reducer.most) * -(-largest // world)),
        "idle buffers": BufferUse(pool.nbytes, pool.idle_nbytes),
        "message rings": BufferUse(comm.nbytes, comm.nbytes),
    }
    store = next((flat.store for flat in flats if flat.store is not None), None)
    if store is not None:
        held["staging"] = BufferUse(store.staged, store.staging_limit)
    return held


# Text.


def _header(what: str, *columns: str) -> str:
    """The first line of a part of the table."""
    return f"{what:<26}{'tier':<8}{'held':>14}" + "".join(f"{column:>14}" for column in columns)


def _line(what: str, tier: str, *figures: int | None) -> str:
    """A row of the table: a name, a tier, and bytes."""
    return f"{what:<26}{tier:<8}" + "".join(f"{mib(figure):>14}" for figure in figures)


def _legend(names: Sequence[str]) -> list[str]:
    """What the columns hold, and the rows of these names."""
    rows = [f"{name}: {_MEANINGS[name]}" for name in dict.fromkeys(names)]
    columns = "expected: by stage, shapes and dtypes; at most: the limit under this policy; peak: in the last step"
    return _wrapped([columns, *rows])


def _wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, none of them wider than the table may be."""
    return [each for text in lines for each in textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)]
