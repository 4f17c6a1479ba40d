"""How far each rank has come: its step and what its last forward was given, in words where ranks differ.

``run/hooks.py`` notes what a forward is given; ``lost_rank.py`` puts both into its roll call and into the error.  It
keeps no tensor, and calls no collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from offload.text import counted, plural

__all__ = ["LastInputs", "Progress", "by_rank", "describe_evaluations", "describe_progress"]

#: So many ranks are named one by one, and so many tensors of a forward are kept.
_NAMED, _KEPT = 4, 64


class LastInputs:
    """Shapes and dtypes of the tensors that the last forward of the whole model was given."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Any, Any]] = []

    def note(self, args: Any, kwargs: Any) -> None:
        """A forward begins, with these arguments.  It is on the way of every pass: words are made when they are asked for."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._tensors = [("nested" if leaf.is_nested else leaf.shape, leaf.dtype) for leaf in leaves[:_KEPT]]

    def texts(self) -> list[str]:
        """A tensor each, as ``[8, 128] int64``."""
        return [
            f"{shape if isinstance(shape, str) else list(shape)} {str(dtype).removeprefix('torch.')}"
            for shape, dtype in self._tensors
        ]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a rank is.

    Attributes:
        step: the one that is being made, as ``Steps.number`` counts them.
        inputs: what its last forward was given, see ``LastInputs.texts``.
        evaluations: forwards without gradients that it has begun and that wait for other ranks, since ranks last met anew.
        evaluating: it is in one.
    """

    step: int
    inputs: Sequence[str]
    evaluations: int = 0
    evaluating: bool = False


def describe_progress(ranks: Mapping[int, Progress]) -> str:
    """A sentence: the step, and whose steps or inputs differ from the others'; "" where nothing is known."""
    if not ranks:
        return ""
    steps = {rank: f"step {one.step}" for rank, one in ranks.items()}
    if len(set(steps.values())) > 1:
        return f"Steps: {by_rank(steps)}."
    said = next(iter(steps.values())).capitalize()
    if len(ranks) == 1:
        return f"{said} on rank {next(iter(ranks))}."
    for place, column in enumerate(zip_longest(*(one.inputs for one in ranks.values()), fillvalue="nothing")):
        if len(set(column)) > 1:
            which = f" (tensor {place})" if max(len(one.inputs) for one in ranks.values()) > 1 else ""
            return f"{said}; inputs of the last forward{which}: {by_rank(dict(zip(ranks, column, strict=True)))}."
    return f"{said}."


def describe_evaluations(ranks: Mapping[int, Progress], every: Collection[int]) -> str:
    """Which ranks have run forwards without gradients that others have not, of ``every`` rank; "" where none is known to."""
    counts = {rank: counted(one.evaluations, "forward") for rank, one in ranks.items()}
    if len(set(counts.values())) > 1:
        return f"Forwards without gradients so far: {by_rank(counts)}."
    alone = [rank for rank, one in ranks.items() if one.evaluating]
    if not alone or len(alone) == len(every):
        return ""
    return f"In a forward without gradients: {plural(len(alone), 'rank')} {', '.join(map(str, alone))}."


def by_rank(held: Mapping[int, str]) -> str:
    """What each rank has, those first that have something else than most."""
    common, count = Counter(held.values()).most_common(1)[0]
    majority = count > len(held) / 2
    named = [rank for rank in held if not (majority and held[rank] == common)]
    words = [f"{held[rank]} on rank {rank}" for rank in named[:_NAMED]]
    left = len(named) - _NAMED
    words += [f"others on {counted(left, 'more rank')}"] if left > 0 else []
    words += [f"{common} on the {plural(count, 'other')}"] if majority else []
    return ", ".join(words)
