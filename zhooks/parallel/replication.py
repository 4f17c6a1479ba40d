"""Verifies that tensors are the same on every rank of an axis, before only a part of each is kept.

``partition.py`` asks once for each input of each unit, in the first passes that have it; what differs is reported when the pass
is over, on all ranks of the attachment.  It never changes a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from offload.errors import DivergenceError
from zhooks import tree
from zhooks.comm import CONTROL, Call, ControlPlane, Transport, text_digest
from zhooks.tensor import hash_of

__all__ = ["Left", "Replication", "TakenAlike"]


@dataclass(frozen=True, slots=True)
class Left:
    """What is meant to differ: globs over names of units and of the modules they are entered through.

    Attributes:
        more: first names of modules that a glob knows by another one.
    """

    globs: tuple[str, ...]
    more: frozenset[str]

    @classmethod
    def of(cls, model: torch.nn.Module, globs: tuple[str, ...]) -> Left:
        first: dict[int, str] = {}
        known: set[str] = set()
        for name, module in tree.named_modules(model, remove_duplicate=False) if globs else ():
            first.setdefault(id(module), name)
            if any(fnmatchcase(name, glob) for glob in globs):
                known.add(first[id(module)])
        return cls(globs, frozenset(known))

    def covers(self, unit: str, where: str) -> bool:
        """Whether ``unit``, entered through the module ``where``, is one of them."""
        return where in self.more or any(fnmatchcase(name, glob) for name in (unit, where) for glob in self.globs)


class Replication:
    """What was verified over ``axis``, and what was found to differ in the pass under way.

    Args:
        axis: the ranks that should hold the same.
        data: the ranks that share this rank's units, and with which a first pass ends together.
    """

    def __init__(self, axis: Transport, data: Transport) -> None:
        self._axis, self._data = axis, data
        self._seen: dict[tuple[str, str], set[int]] = {}
        self._checked: set[str] = set()
        self._found: list[str] = []

    def begin(self) -> None:
        """A pass begins."""
        self._found.clear()

    def compare(self, path: str, unit: str, tensors: dict[int, Tensor], name: Callable[[int], str]) -> set[int]:
        """The numbers of those inputs of ``unit`` that differ; each is compared once a path.  Collective over the axis.

        Args:
            tensors: plain tensors by number, which ``name`` puts in words.
        """
        seen = self._seen.get((path, unit))
        new = {number: tensor for number, tensor in tensors.items() if seen is None or number not in seen}
        if seen is not None and not new:
            return set()
        facts = [(number, tuple(tensor.shape), tensor.dtype) for number, tensor in new.items()]
        shapes = self._exchange(unit, [text_digest(repr(facts))])
        if self._others(shapes, 0):
            self._differs(unit, "its inputs", f"a different number, shapes or dtypes (here {facts})", self._others(shapes, 0))
            return set(tensors)
        hashes = self._exchange(unit, [hash_of(tensor) for tensor in new.values()]) if new else []
        differing = set()
        for place, (number, tensor) in enumerate(new.items()):
            ranks = self._others(hashes, place)
            if ranks:
                what = f"{name(number)}, {tensor.dtype} of shape {list(tensor.shape)}"
                self._differs(unit, what, "different values", ranks)
                differing.add(number)
        self._seen.setdefault((path, unit), set()).update(set(new) - differing)
        return differing

    def _exchange(self, unit: str, own: list[int]) -> list[list[int]]:
        """Each rank's numbers, in the order of the axis."""
        rank, world = self._axis.axis.rank, self._axis.axis.world
        table = torch.zeros(world, len(own), dtype=torch.int64, device="cpu")
        table[rank] = torch.tensor(own, dtype=torch.int64, device="cpu")
        flat = table.view(-1)
        self._axis.all_reduce(Call(CONTROL, "compare inputs of", unit), flat, "sum")
        return [[int(value) for value in row] for row in flat.view(world, -1).tolist()]

    def _others(self, rows: list[list[int]], place: int) -> list[int]:
        """The ranks whose number differs from that of the axis' first rank."""
        ranks = self._axis.axis.ranks
        return [rank for rank, row in zip(ranks, rows, strict=True) if row[place] != rows[0][place]]

    def _differs(self, unit: str, what: str, found: str, ranks: Sequence[int]) -> None:
        axis = self._axis.axis
        some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        self._found.append(
            f"Ranks give other inputs to unit {unit}: {what}. Expected the same on all ranks of axis {axis.name} "
            f"({', '.join(map(str, axis.ranks[:8]))}{', ...' if axis.world > 8 else ''}), found {found} on rank {some} than on "
            f"rank {axis.ranks[0]}"
        )

    def end(self, path: str) -> None:
        """A pass is over; the first of each path ends together with that of the data ranks.

        Raises:
            DivergenceError: inputs differed, here or on the ranks that share these units.
        """
        found, elsewhere = list(self._found), False
        self._found.clear()
        if path not in self._checked:
            elsewhere = any(ControlPlane(self._data, "agree on inputs").any([bool(found)], path))
            if not elsewhere:
                self._checked.add(path)
        if found:
            more = f" ({len(found) - 1} more differ)" if len(found) > 1 else ""
            raise DivergenceError(
                f"{found[0]}{more}. Use the same random seed and the same batch on these ranks; if the inputs of a unit are "
                "meant to differ, as in sequence parallelism, list the unit in [activation] sharded_inputs."
            )
        if elsewhere:
            raise DivergenceError(
                f"Other ranks give other inputs to some units. Expected the same on all ranks of axis {self._axis.axis.name}, "
                "found some that differ on other ranks that share these units. The error on those ranks names them and says "
                f"what to do. ({path})"
            )


class TakenAlike:
    """In place of `Replication` where tensors have no values: on the virtual device all ranks of an axis are what one is."""

    def begin(self) -> None:
        """A pass begins."""

    def compare(self, path: str, unit: str, tensors: dict[int, Tensor], name: Callable[[int], str]) -> set[int]:
        """None differ.  What a first pass exchanges, to find that out, takes no time here."""
        return set()

    def end(self, path: str) -> None:
        """A pass is over."""
