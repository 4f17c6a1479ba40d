"""The ZeRO paper's tables: its printed figures by its own formula, and ours beside them for a small model."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.paths import ROOT
from tests.support.slow import slow
from tests.support.virtual import on_virtual

FOLDER = str(ROOT / "benchmarks")


def tables() -> Any:
    sys.path.insert(0, FOLDER)
    try:
        import zero_tables
    finally:
        sys.path.remove(FOLDER)
    return zero_tables


def digit(printed: float) -> float:
    """One unit of the last digit that is printed."""
    places = len(f"{printed:g}".partition(".")[2])
    return float(10.0**-places)


@on_virtual()
def test_every_printed_figure_of_the_paper_is_its_formula_to_the_last_digit() -> None:
    made = tables()
    for name, psi in (("7.5B", 7.5), ("128B", 128.0), ("1T", 1000.0)):
        for ranks, row in zip(made.WORLDS, made.TABLE1[name], strict=True):
            for stage, printed in zip((1, 2, 3), row, strict=True):
                assert abs(made.formula(stage, psi, ranks) - printed) < digit(printed), (name, ranks, stage)
    for stage, (theory, _) in made.TABLE2.items():
        assert abs(32 / made.formula(stage, 1, 64) - theory) < digit(theory)


@on_virtual(stage=(1, *slow(2), 3))
def test_what_a_model_in_the_papers_precision_holds_is_the_formula_and_less_padding_than_a_row_a_flat(stage: int) -> None:
    made = tables()
    size = made.shape(2, 128, length=16)
    for ranks in (1, 4, 1024):
        row = made.states("7.5B", size, ranks, stage)
        # Two blocks and what is around them: at most three flats a gather; a row is 8 elements of 16 bits a rank.
        flats = 8
        most = flats * 8 * ranks * row.formula / row.parameters
        assert 0 <= row.padding <= most, (ranks, row)
        assert ranks > 1 or row.padding == 0


@on_virtual()
def test_a_device_computes_and_moves_its_part_of_layers_that_are_divided() -> None:
    made = tables()
    size = made.shape(2, 256, length=64)
    whole, half = (made.simulated(size, 4 * degree, 1, "v100-32", degree=degree) for degree in (1, 2))
    assert half.flops == pytest.approx(whole.flops / 2, rel=1e-6)
    assert half.device.nbytes < whole.device.nbytes


@pytest.mark.slow
@on_virtual()
def test_the_most_divided_layers_fit_and_one_more_does_not() -> None:
    made = tables()
    memory = 676 << 20
    found = made.largest_divided(1, 256, 4, 2, memory)
    peaks = [
        made.simulated(made.shape(layers, 256), 8, 1, "v100-32", degree=2).device.nbytes
        for layers in (found.layers, found.layers + 1)
    ]
    assert found.peak == peaks[0] <= memory < peaks[1]


@on_virtual()
def test_the_largest_number_that_fits_is_found_from_any_first_guess() -> None:
    made = tables()
    for bound in range(40):
        for first in (1, 2, 7, 64):
            assert made.most(lambda number, bound=bound: number <= bound, first) == bound


@on_virtual(wrong=("tabel1", "table1 --models 8B", "table2 --batch 0", "table1 --ranks 5", "table2-mp --degrees 3"))
def test_wrong_usage_ends_with_two_before_anything_is_built(wrong: str) -> None:
    made = tables()
    with patch.object(sys, "argv", ["zero_tables.py", *wrong.split()]), pytest.raises(SystemExit) as ended:
        made.main()
    assert ended.value.code == 2
