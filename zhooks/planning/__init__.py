"""Policies searched by bounds and simulations: candidates, what they hold and take at least, and the search."""

from __future__ import annotations

from zhooks.planning.automatic import Choice, chosen_for
from zhooks.planning.axes import MOST_DIVIDED, Batch, Candidate, Dtype, batches, candidates, changed, saves
from zhooks.planning.best_first import TIE, Bound, Limits, Memory, Outcome, Ranking, Tried, search
from zhooks.planning.bounds import Bounds, Seconds
from zhooks.planning.needs import Built, Need, Needs
from zhooks.planning.replanning import Replanning

__all__ = [
    "MOST_DIVIDED",
    "TIE",
    "Batch",
    "Bound",
    "Bounds",
    "Built",
    "Candidate",
    "Choice",
    "Dtype",
    "Limits",
    "Memory",
    "Need",
    "Needs",
    "Outcome",
    "Ranking",
    "Replanning",
    "Seconds",
    "Tried",
    "batches",
    "candidates",
    "changed",
    "chosen_for",
    "saves",
    "search",
]
