"""The states of a parameter that is updated whole, on the tier they are placed on: one block a parameter, between its steps.

Note: [Any states]
    States are whatever the optimizer keeps: tensors of any shape, in lists, tuples and dicts, replaced by others in any step.
    All strided tensors on the device but single numbers go to the block, those that share memory as one run of bytes; a
    `StoredTensor` stands where each was.  What a step left where it lay is not copied; where the runs no longer fit the
    block, another takes its place.  What the optimizer holds itself, too (a table that all states share), stays in memory.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.store import Mode, Store
from offload.tier import Tier
from zhooks.optim import OwnedStates, StoredRuns, plain_parts, replaced
from zhooks.tensor import StoredTensor, spanned

__all__ = ["adopt", "bring", "put_away"]

#: New states an optimizer makes with the allocator, before what they leave there is returned.
_MADE_NBYTES = 16 << 20
#: Every run starts where any dtype may.
_ALIGNMENT = 64
Where = tuple[str, Tier]
"""What a block is called, and the tier that stores it."""


def bring(states: OwnedStates, values: Tensor | None) -> None:
    """Plain tensors take the places of stored ones: in ``values``, the open block, where they lie there, else copies."""
    own, known = states.stored, dict[int, Tensor]()

    def plain(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, StoredTensor):
            return tensor
        if id(tensor) not in known:
            here = own is not None and values is not None and tensor.block is own.block
            known[id(tensor)] = tensor.placed_in(values) if here and values is not None else tensor.plain()
        return known[id(tensor)]

    replaced(states, plain)


@torch.no_grad()
def put_away(store: Store, states: OwnedStates, values: Tensor | None, where: Where, shared: Set[int]) -> None:
    """Tensors go to the block, and what stands for them takes their places; ``bring`` was called before.

    Args:
        values: the open block, [uint8, 1-D]; None where there is none yet.
        where: the key of a new block, and its tier.
        shared: memory that the optimizer itself holds, by identity: what lies there stays.
    Raises:
        BudgetError, TierError: they do not fit; the states are in memory.
    """
    own = states.stored
    runs = _laid(_leaves(states, store.compute, shared), own, values)
    try:
        starts = None if own is None else _starts_in(own, runs)
        if starts is None:
            own, starts = _anew(store, where, runs)
        elif own is not None and values is not None:
            for start, run in zip(starts, runs, strict=True):
                if run.start is None:
                    values[start : start + run.nbytes].copy_(run.values)
            own.block.touch()
    except BaseException:
        # Nothing may refer to memory that a block which is given up is open in.
        bare = {id(leaf): leaf.clone() for run in runs if run.start is not None for leaf, _ in run.leaves}
        replaced(states, lambda one: bare.get(id(one), one))
        states.stored = None
        raise
    states.stored = own
    if own is not None:
        stands: dict[int, Tensor] = {}
        for start, run in zip(starts, runs, strict=True):
            for leaf, within in run.leaves:
                key = start + within, leaf.dtype, tuple(leaf.shape), leaf.stride()
                if key not in own.tensors:
                    own.tensors[key] = StoredTensor(own.block, start + within, leaf)
                stands[id(leaf)] = own.tensors[key]
        replaced(states, lambda one: stands.get(id(one), one))


def _starts_in(own: StoredRuns, runs: Sequence[_Run]) -> list[int] | None:
    """Where each run is, or can be, in the block; None where they do not come out even."""
    free = [start for start in own.runs if all(run.start != start for run in runs)]
    starts: list[int] = []
    for run in runs:
        start = run.start if run.start is not None else next((at for at in free if own.runs[at] == run.nbytes), None)
        if start is None:
            return None
        if run.start is None:
            free.remove(start)
        starts.append(start)
    return None if free else starts


def _anew(store: Store, where: Where, runs: Sequence[_Run]) -> tuple[StoredRuns | None, list[int]]:
    """A block for these runs, with their bytes in it, and where each is; none where there are none."""
    starts, end = list[int](), 0
    for run in runs:
        starts.append(end)
        end += -(-run.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not runs:
        return None, []
    block = store.put(where[0], end, torch.uint8, where[1])
    with store.lease(block, Tier.DEVICE, Mode.WRITE_ALL) as values:
        values.zero_()
        for start, run in zip(starts, runs, strict=True):
            values[start : start + run.nbytes].copy_(run.values)
        block.touch()
    store.passed(block.nbytes, _MADE_NBYTES)
    return StoredRuns(block, {start: run.nbytes for start, run in zip(starts, runs, strict=True)}), starts


# What lies where.


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes that one tensor has, or several that share memory.

    Attributes:
        start: where they are in the open block, if there.
        leaves: the tensors that lie in it, each with how many bytes into it.
    """

    values: Tensor
    start: int | None
    leaves: list[tuple[Tensor, int]]

    @property
    def nbytes(self) -> int:
        return self.values.numel()


def _leaves(states: OwnedStates, device: torch.device, shared: Set[int]) -> list[Tensor]:
    """The tensors that go to a tier, each once, in the order they are kept in."""
    found: dict[int, Tensor] = {}
    for value in states.values():
        for tensor in plain_parts(value):
            moves = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device == device
            if moves and tensor.dim() and tensor.numel() and tensor.untyped_storage()._cdata not in shared:
                found[id(tensor)] = tensor
    return list(found.values())


def _laid(leaves: Sequence[Tensor], own: StoredRuns | None, values: Tensor | None) -> list[_Run]:
    """The runs that tensors lie in: those of the block, else what their own memory covers, overlaps as one."""
    inside: dict[int, _Run] = {}
    elsewhere: dict[int, list[tuple[int, int, Tensor]]] = {}
    for leaf in leaves:
        low, memory = int(leaf.storage_offset()) * leaf.dtype.itemsize, leaf.untyped_storage()._cdata
        if own is not None and values is not None and memory == values.untyped_storage()._cdata:
            byte = low - int(values.storage_offset())
            start = next((at for at, nbytes in own.runs.items() if at <= byte < at + nbytes), None)
            if start is not None:
                run = inside.setdefault(start, _Run(values[start : start + own.runs[start]], start, []))
                run.leaves.append((leaf, byte - start))
                continue
        elsewhere.setdefault(memory, []).append((low, low + spanned(leaf), leaf))
    runs = list(inside.values())
    for covered in elsewhere.values():
        covered.sort(key=lambda one: one[:2])
        while covered:
            (low, high, first), together = covered[0], list[tuple[Tensor, int]]()
            while covered and covered[0][0] < high:
                begin, end, leaf = covered.pop(0)
                high = max(high, end)
                together.append((leaf, begin - low))
            empty = torch.empty(0, dtype=torch.uint8, device=first.device)
            runs.append(_Run(empty.set_(first.untyped_storage(), low, (high - low,), (1,)), None, together))
    return runs


def adopt(store: Store, states: OwnedStates, where: Where, shared: Set[int]) -> None:
    """States that lie elsewhere (they were loaded, or the policy changed) move to their tier.

    Raises:
        BudgetError, TierError: they do not fit.
    """
    own, tier = states.stored, where[1]
    if not states.here:
        return
    if tier is Tier.DEVICE:
        bring(states, None)
        states.stored = None
        return
    if own is not None and own.block.tier is not tier:
        store.move(own.block, tier)
    stands = [one for value in states.values() for one in plain_parts(value) if isinstance(one, StoredTensor)]
    if not _leaves(states, store.compute, shared) and all(own is not None and one.block is own.block for one in stands):
        return
    if own is None:
        bring(states, None)
        put_away(store, states, None, where, shared)
        return
    with store.lease(own.block, Tier.DEVICE, Mode.UPDATE) as values:
        bring(states, values)
        put_away(store, states, values, where, shared)
