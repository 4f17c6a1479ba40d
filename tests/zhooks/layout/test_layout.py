"""The flat layout of law 1: every element owned once, ranges aligned, padding bounded, at every world size.

pytest runs it; it is arithmetic and starts no process. It never asks where a tensor lies, only where it would.
"""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import LayoutError
from offload.policy import Policy
from tests.support.paths import ROOT
from zhooks.layout import ALIGN_BYTES, Layout, Piece, find_units, flat_layout

sys.path.append(str(ROOT / "benchmarks"))
from padding import MODELS, dim0_padding, flat_padding, row_aligned_padding

WORLD = 1024
numels_of = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 400)), min_size=1, max_size=12)
worlds = st.integers(1, 9)
itemsizes = st.sampled_from([1, 2, 4, 8])
bounds = st.one_of(st.none(), st.integers(1, 700))


def owned(layout: Layout, index: int) -> list[int]:
    """The elements of a parameter, over the ranks in order; repeated where two ranks hold one."""
    pieces = [piece for rank in range(layout.world) for piece in layout.pieces(index, rank)]
    return [element for piece in pieces for element in range(piece.start, piece.start + piece.numel)]


@given(numels_of, worlds, itemsizes, bounds)
def test_every_element_is_owned_by_exactly_one_rank(numels: list[int], world: int, itemsize: int, bound: int | None) -> None:
    layout = flat_layout(numels, world=world, itemsize=itemsize, max_numel=bound)
    for index, numel in enumerate(numels):
        assert sorted(owned(layout, index)) == list(range(numel))


@given(numels_of, worlds, itemsizes, bounds)
def test_the_pieces_of_a_parameter_are_consecutive_in_the_shard_and_disjoint(
    numels: list[int], world: int, itemsize: int, bound: int | None
) -> None:
    layout = flat_layout(numels, world=world, itemsize=itemsize, max_numel=bound)
    for rank in range(world):
        end = 0
        for index in range(len(numels)):
            pieces = layout.pieces(index, rank)
            for before, after in itertools.pairwise(pieces):
                assert after.local == before.local + before.numel
                assert after.start > before.start
            if pieces:
                assert pieces[0].local >= end
                end = pieces[-1].local + pieces[-1].numel
        assert end <= layout.shard_numel


@given(numels_of, worlds, itemsizes, bounds)
def test_a_piece_lies_where_the_ranges_of_its_rank_say(numels: list[int], world: int, itemsize: int, bound: int | None) -> None:
    layout = flat_layout(numels, world=world, itemsize=itemsize, max_numel=bound)
    for rank in range(world):
        places = [place for start, stop in layout.ranges(rank) for place in range(start, stop)]
        assert len(places) == layout.shard_numel
        for index in range(len(numels)):
            for piece in layout.pieces(index, rank):
                wanted = range(layout.starts[index] + piece.start, layout.starts[index] + piece.start + piece.numel)
                assert places[piece.local : piece.local + piece.numel] == list(wanted)


@given(numels_of, worlds, itemsizes, bounds, st.sampled_from([ALIGN_BYTES, 32, 64]))
def test_parameters_ranges_and_segments_start_on_aligned_bytes(
    numels: list[int], world: int, itemsize: int, bound: int | None, align_bytes: int
) -> None:
    layout = flat_layout(numels, world=world, itemsize=itemsize, align_bytes=align_bytes, max_numel=bound)
    starts = [*layout.starts, *(start for rank in range(world) for start, _ in layout.ranges(rank))]
    assert all(start * itemsize % align_bytes == 0 for start in starts)
    assert layout.shard_numel * itemsize % align_bytes == 0


@given(numels_of, worlds, itemsizes)
def test_padding_is_below_a_row_of_aligned_ranges_and_the_alignment_of_each_parameter(
    numels: list[int], world: int, itemsize: int
) -> None:
    align = max(1, ALIGN_BYTES // itemsize)
    layout = flat_layout(numels, world=world, itemsize=itemsize)
    between = sum(-numel % align for numel in numels)
    assert layout.padded - (layout.numel + between) < world * align
    assert layout.padding == layout.padded - layout.numel


@given(numels_of, worlds, itemsizes, st.integers(1, 700))
def test_segments_are_bounded_consecutive_and_cost_no_padding_of_their_own(
    numels: list[int], world: int, itemsize: int, bound: int
) -> None:
    row = world * max(1, ALIGN_BYTES // itemsize)
    cut = flat_layout(numels, world=world, itemsize=itemsize, max_numel=bound)
    whole = flat_layout(numels, world=world, itemsize=itemsize)
    assert all(0 < segment.numel <= max(bound, row) and segment.numel % world == 0 for segment in cut.segments)
    ends = [segment.start + segment.numel for segment in cut.segments]
    assert [segment.start for segment in cut.segments] == [0, *ends[:-1]][: len(ends)]
    assert cut.padded == whole.padded
    assert len(whole.segments) <= 1


def test_scalars_and_empty_parameters_have_their_place() -> None:
    layout = flat_layout([1, 0, 1, 5, 0], world=2, itemsize=4)
    assert layout.starts == (0, 4, 4, 8, 16)
    assert layout.pieces(1, 0) == layout.pieces(1, 1) == ()
    assert (layout.numel, layout.padded, layout.padding) == (7, 16, 9)


def test_a_buffer_of_empty_parameters_alone_is_empty() -> None:
    layout = flat_layout([0, 0], world=4, itemsize=4)
    assert (layout.padded, layout.shard_numel, layout.segments, layout.ranges(3)) == (0, 0, (), ())


@pytest.mark.parametrize("wrong", [{"world": 0}, {"itemsize": 0}, {"max_numel": 0}])
def test_a_layout_over_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="needs world, itemsize and max_numel of at least 1, found"):
        flat_layout([4], **{"world": 2, "itemsize": 4, **wrong})


# ---- real architectures at 1,024 ranks


@pytest.mark.parametrize("name", ["GPT-2 XL", "Llama-8B"])
def test_padding_of_a_large_model_on_a_thousand_ranks_is_below_a_tenth_of_a_per_cent(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    policy = Policy()
    padding = numel = 0
    for group in find_units(model, policy):
        numels = [param.numel() for param in group.params.values()]
        layout = flat_layout(numels, world=WORLD, itemsize=4, max_numel=policy.units.max_numel)
        padding, numel = padding + layout.padding, numel + layout.numel
    assert numel == sum(param.numel() for param in model.parameters())
    print(f"{name}: {padding:,} of {numel:,} elements are padding, {padding / numel:.4%}")
    assert padding / numel < 0.001


def test_padding_of_resnet_50_is_a_fraction_of_what_rows_cost() -> None:
    with torch.device("meta"):
        model = MODELS["ResNet-50"]()
    policy = Policy()
    units = [[param.shape for param in group.params.values()] for group in find_units(model, policy)]
    numel = sum(shape.numel() for unit in units for shape in unit)
    costs = {
        name: sum(padding(unit, WORLD) for unit in units) / numel
        for name, padding in (("flat", flat_padding), ("dim-0", dim0_padding), ("row-aligned", row_aligned_padding))
    }
    print("ResNet-50:", ", ".join(f"{name} {cost:.3%}" for name, cost in costs.items()))
    assert costs["flat"] < 0.01
    assert costs["flat"] < costs["dim-0"] / 10
    assert costs["flat"] < costs["row-aligned"] / 10


def test_of_an_undivided_buffer_one_rank_has_every_element() -> None:
    layout = flat_layout([5, 0, 9], world=4, itemsize=4, max_numel=16)
    alone = layout.undivided()
    assert (alone.padded, alone.shard_numel, alone.starts) == (layout.padded, layout.padded, layout.starts)
    assert alone.ranges(0) == ((0, layout.padded),)
    assert [alone.pieces(index, 0) for index in range(3)] == [
        (Piece(0, layout.starts[0], 5),),
        (),
        (Piece(0, layout.starts[2], 9),),
    ]
    assert flat_layout([0], world=4, itemsize=4).undivided().ranges(0) == ()
