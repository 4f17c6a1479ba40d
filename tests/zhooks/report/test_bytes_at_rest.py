"""What a rank holds between backward and ``zero_grad()``, to the byte: at any number of ranks, every stage, dtype and tier.

The formula is written out here from docs/explanation/memory.md alone, in integers; what is held is what the virtual device
counts.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zhooks
from offload.tier import Tier
from offload.virtual import ACCELERATOR, HOST
from tests.support.inside import store_of
from tests.support.slow import slow
from tests.support.virtual import machine, on_virtual

WORLDS = (1, 2, 3, 4, 8, 64, 1000, 1024)
TIERS = ("device", "host", "disk")
Numels = Sequence[Sequence[int]]


class Scaled(nn.Module):
    """Parameters of any length."""

    def __init__(self, numels: Iterable[int]) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.empty(numel)) for numel in numels)

    def forward(self, x: Tensor) -> Tensor:
        for value in self.values:
            x = x * value.sum()
        return x


def policy_of(stage: int, tier: str, dtype: str | None) -> dict[str, Any]:
    cells = [] if tier == "device" else ["gradient", "optimizer", *(["parameter"] if stage == 3 else [])]
    precision = {} if dtype is None else {"precision": {"param": dtype}}
    return {"stage": stage, "units": {"names": ["?"], "min_numel": 0}, **precision, **{cell: {"tier": tier} for cell in cells}}


def up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def expected(units: Numels, stage: int, tier: str, dtype: str | None, world: int) -> Counter[tuple[str, str]]:
    """Bytes by what and tier, as docs/explanation/memory.md has them for fp32 parameters and Adam."""
    out: Counter[tuple[str, str]] = Counter()
    narrow = dtype is not None
    align = 16 // (2 if narrow else 4)
    for numels in units:
        starts = [sum(up(numel, align) for numel in numels[:index]) for index in range(len(numels))]
        padded = up(sum(up(numel, align) for numel in numels), world * align)
        mine = padded if stage == 0 else padded // world
        # Of the first rank, whose range begins at 0.
        owned = sum(max(0, min(start + numel, mine) - start) for start, numel in zip(starts, numels, strict=True))
        apart = narrow and (stage < 3 or tier != "device")
        kept = padded if stage < 3 else mine
        out["parameter", tier if stage == 3 else "device"] += kept * (2 if apart else 4)
        out["gradient", tier] += mine * 4
        # Blocks of a tier are whole ranges, padding included; on the device a state is as long as the parameter's own range.
        out["optimizer", tier] += 2 * 4 * (owned if tier == "device" else mine) + (mine * 4 if apart else 0)
    return +out


def check(units: Numels, stage: int, tier: str, dtype: str | None, world: int) -> None:
    with machine(world) as made:
        with torch.device("virtual"):
            model = nn.Sequential(*map(Scaled, units))
            optimizer = torch.optim.AdamW(model.parameters())
        attachment = zhooks.attach(model, optimizer, policy=policy_of(stage, tier, dtype))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.empty(2, device="virtual")).sum().backward()
            optimizer.step()
        gc.collect()
        report = attachment.memory()
        found = {(row.what, row.tier): row.nbytes for row in report.rows if row.nbytes}
        assert found == dict(expected(units, stage, tier, dtype, world))
        assert report.nbytes == report.formula
        # Nothing is held that the report does not have.
        peaks = sum(row.peak or 0 for row in report.residual if row.tier == "device")
        assert made.held[ACCELERATOR] == report.by_tier["device"] - peaks, report.transient
        if tier != "device":
            store = store_of(attachment)
            assert made.held[HOST] == report.by_tier["host"] + store.unused[Tier.HOST] + store.rounded[Tier.HOST]
            ends = {row.tier: row.nbytes for row in report.rest if row.what == "ends of pages"}
            assert ends == {where.value: nbytes for where, nbytes in store.rounded.items() if nbytes}
            # Blocks and their ends are whole pages.
            assert (store.budget.used(Tier(tier)) + store.rounded[Tier(tier)]) % 4096 == 0
            held = sum(nbytes for (_, where), nbytes in found.items() if where == tier)
            assert held <= store.budget.used(Tier(tier)) - (report.transient["staging"] if tier == "host" else 0)
        optimizer.zero_grad()
        attachment.detach()


@contextmanager
def short_collections() -> Iterator[None]:
    """What is there already stays out of each collection, which would take longer than all else here."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


UNITS = ((37 * 41, 41), (5, 1000, 7))


@on_virtual(stage=(3, *slow(0, 1, 2)), tier=(TIERS[0], *slow(*TIERS[1:])))
def test_bytes_are_the_formula_with_its_padding_at_any_number_of_ranks(stage: int, tier: str) -> None:
    """Half of the numbers of ranks, in turn in both dtypes, and the next stage or tier the others."""
    with short_collections():
        for place, world in enumerate(WORLDS[(stage + TIERS.index(tier)) % 2 :: 2], start=TIERS.index(tier)):
            check(UNITS, stage, tier, (None, "bf16")[place % 2], world)


@pytest.mark.slow
@on_virtual(stage=(0, 3, *slow(1, 2)), tier=TIERS)
def test_bytes_are_the_formula_with_its_padding_at_any_number_of_ranks_in_both_dtypes(stage: int, tier: str) -> None:
    with short_collections():
        for world in WORLDS:
            for dtype in (None, "bf16"):
                check(UNITS, stage, tier, dtype, world)


lengths = st.lists(st.integers(1, 3000), min_size=1, max_size=4)


@pytest.mark.slow
@on_virtual()
def test_bytes_are_the_formula_for_parameters_of_any_length() -> None:
    @settings(max_examples=25, deadline=None)
    @example(units=[[1]], stage=3, tier="host", dtype="bf16", world=1024)
    @given(
        units=st.lists(lengths, min_size=1, max_size=3),
        stage=st.integers(0, 3),
        tier=st.sampled_from(TIERS),
        dtype=st.sampled_from((None, "bf16")),
        world=st.one_of(st.sampled_from(WORLDS), st.integers(1, 2000)),
    )
    def holds(units: Numels, stage: int, tier: str, dtype: str | None, world: int) -> None:
        check(units, stage, tier, dtype, world)

    with short_collections():
        holds()
