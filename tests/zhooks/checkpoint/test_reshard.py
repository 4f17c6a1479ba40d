"""Checkpoints of a GPT that are loaded in another layout than they were saved in: other ranks, meshes, units, replicas.

pytest runs it: one pool of ranks saves into a folder, another loads from it. What was loaded is whole what was saved, bit for
bit, and the losses after it are those of the run that went on, bit for bit where the arithmetic is done in the same order.
The product of ranks, stages, meshes, tiers and dtypes is test_reshard_product.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Pool

RESHARD = "tests.support.resharding"

Setup = tuple[int, dict[str, Any]]
Ranks = Callable[[int], Pool]


def moved(ranks: Ranks, path: Path, before: Setup, after: Setup, **common: Any) -> tuple[list[float], list[float]]:
    """The losses of the run that went on, and of the one that was loaded elsewhere."""
    (world, setup), (other, other_setup) = before, after
    went_on = ranks(world).run(f"{RESHARD}:save", path=str(path), **common, **setup)[0]
    resumed = ranks(other).run(f"{RESHARD}:load", path=str(path), **common, **other_setup)[0]
    return went_on, resumed


def case(before: Setup, after: Setup, *, slow: bool = False) -> Any:
    """Named by the largest pool that it asks for (tests/selection.py)."""
    named = "-".join(f"{world} ranks {setup}" for world, setup in (before, after))
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(before, after, id=f"world{max(before[0], after[0])}-{named}", marks=marks)


SAME_ARITHMETIC = [
    case((2, {"stage": 3}), (2, {"stage": 0})),
    case((2, {"stage": 0}), (2, {"stage": 2, "tier": "host"}), slow=True),
    case((2, {"stage": 1, "tier": "disk"}), (2, {"stage": 3, "units": 64})),
    case((1, {"stage": 3, "tier": "host"}), (1, {"stage": 0})),
    case((2, {"stage": 0, "kind": "muon"}), (2, {"stage": 3, "kind": "muon"}), slow=True),
]


@pytest.mark.parametrize(("before", "after"), SAME_ARITHMETIC)
def test_another_stage_tier_or_unit_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, before: Setup, after: Setup) -> None:
    went_on, resumed = moved(ranks, tmp_path, before, after)
    assert resumed == went_on


OTHER_RANKS = [
    case((1, {"stage": 3}), (2, {"stage": 3}), slow=True),
    case((2, {"stage": 3, "units": 64}), (1, {"stage": 1, "tier": "host"})),
    case((2, {"stage": 2}), (4, {"stage": 3, "tier": "disk"}), slow=True),
    case((4, {"stage": 3, "replicate": 2}), (2, {"stage": 0}), slow=True),
    case((1, {"stage": 0, "tier": "disk"}), (4, {"stage": 1, "replicate": 2}), slow=True),
    case((2, {"stage": 3, "tp": 2}), (1, {"stage": 3}), slow=True),
    case((1, {"stage": 2}), (4, {"stage": 3, "tp": 2}), slow=True),
    case((4, {"stage": 3, "tp": 2}), (4, {"stage": 2, "tp": 4, "tier": "host"}), slow=True),
    case((4, {"stage": 1, "tp": 2}), (2, {"stage": 3}), slow=True),
    case((4, {"stage": 3}), (4, {"stage": 0, "tp": 2}), slow=True),
    case((3, {"stage": 3, "units": 64, "rows": 6}), (2, {"stage": 1, "rows": 6}), slow=True),
    case((2, {"stage": 2, "rows": 6}), (3, {"stage": 3, "tier": "host", "rows": 6}), slow=True),
]


@pytest.mark.parametrize(("before", "after"), OTHER_RANKS)
def test_another_number_of_ranks_or_mesh_goes_on_as_close_as_sums_in_another_order_are(
    ranks: Ranks, tmp_path: Path, before: Setup, after: Setup
) -> None:
    went_on, resumed = moved(ranks, tmp_path, before, after)
    assert resumed == pytest.approx(went_on, abs=2e-6)
