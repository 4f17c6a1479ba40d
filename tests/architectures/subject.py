"""One architecture under test: how it is built, what it is fed, and the scalar that is trained.

The modules ``of_*`` make subjects of each library's models, ``train.py`` trains them; both sides of a comparison use one.
It never knows how a model is placed or how many ranks there are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

SEED = 11
#: Larger ones say no more, and take the time of many others.
MOST_PARAMETERS = 12_000_000
#: Of one output's elements: beyond, a score is a mask (minus infinity, or the least float), or a model not yet trained.
_BOUND = 8.0

Inputs = Mapping[str, Any]


class Skipped(Exception):
    """This architecture cannot be compared; the text says why, and the report lists it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One model: ``make`` builds it from torch's generator, ``draw`` a batch of its keyword arguments.

    Attributes:
        name: "library/type", as the command line takes it.
        built: the class and how it was made small, for the report.
        searched: finding it took trying; it pickles, so that one rank tries for all.
    """

    name: str
    built: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Inputs]
    searched: bool = False

    def build(self) -> nn.Module:
        """The same weights every time, in training mode."""
        with seeded(SEED):
            model = self.make()
        return model.float().train()

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        """The loss of that rank's batch of that step; whatever the model draws, it draws the same every time."""
        inputs = self.draw(torch.Generator().manual_seed(1000 * step + rank))
        with seeded(SEED + step):
            return score(model(**inputs))


def score(output: Any) -> Tensor:
    """One scalar of whatever a model returns: the mean square of each tensor that depends on parameters, added up.

    Raises:
        Skipped: nothing in it can be trained.
    """
    terms = [
        leaf.float().clamp(-_BOUND, _BOUND).pow(2).mean()
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad and leaf.numel()
    ]
    if not terms:
        raise Skipped("no output depends on a parameter")
    return torch.stack(terms).sum()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Every generator that a model may draw from starts at ``seed`` inside; torch's own goes on after as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        yield
