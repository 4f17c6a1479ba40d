"""From ranges of a parameter here to ranges of what was saved: against tensors that are cut by torch. No ranks, no files."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zhooks.checkpoint.saved_ranges import Cut, Laid, cuts_of, part_runs
from zhooks.layout import flat_layout


@st.composite
def laid_by(draw: st.DrawFn, shape: tuple[int, ...], order: tuple[int, ...]) -> Laid:
    """Some division over tp that fits the shape, its parts in memory with dims in this order."""
    ways = [(dim, count) for dim, size in enumerate(shape) for count in (2, 3, 4) if size and size % count == 0]
    dim, count = draw(st.sampled_from([(None, 1), *ways]))
    part = Laid((), dim, count).part(shape)
    stride, step = [0] * len(shape), 1
    for at in reversed(order):
        stride[at] = step
        step *= max(1, part[at])
    return Laid(tuple(stride), dim, count)


def parts_of(whole: Tensor, laid: Laid) -> list[Tensor]:
    """Each part, 1-D as it lies in memory."""
    parts = [whole] if laid.dim is None else whole.chunk(laid.count, laid.dim)
    out = []
    for part in parts:
        made = torch.empty_strided(part.shape, laid.stride, dtype=part.dtype)
        made.copy_(part)
        out.append(made.as_strided((part.numel(),), (1,)))
    return out


@given(st.data())
def test_every_range_of_every_part_is_found_in_the_parts_that_were_saved(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from((1, 2, 3, 4, 6, 12)), min_size=1, max_size=4)))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    here, saved = (data.draw(laid_by(shape, order)) for _ in range(2))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    wanted, kept = parts_of(whole, here), parts_of(whole, saved)
    cuts = cuts_of(shape, here, saved)
    assert cuts is not None
    for index, part in enumerate(wanted):
        start = data.draw(st.integers(0, part.numel()))
        stop = data.draw(st.integers(start, part.numel()))
        runs = part_runs(cuts[0], index, start, stop, cuts[1])
        found = [kept[which][first : first + numel] for which, first, numel in runs]
        assert torch.equal(torch.cat([part[:0], *found]), part[start:stop])


def test_parts_in_another_order_of_memory_are_none_of_ours() -> None:
    assert cuts_of((4, 6), Laid((6, 1)), Laid((1, 4))) is None
    assert cuts_of((4, 6), Laid((6, 1)), Laid((1, 2), dim=0, count=2)) is None
    # Of one row there is one order.
    assert cuts_of((2, 6), Laid((6, 1)), Laid((1, 1), dim=0, count=2)) == (Cut(12, 1), Cut(6, 2))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 4), st.sampled_from((None, 8, 24)), st.data())
def test_every_range_of_a_flat_buffer_is_found_with_who_has_it(
    numels: list[int], world: int, most: int | None, data: st.DataObject
) -> None:
    layout = flat_layout(numels, world=world, itemsize=4, max_numel=most)
    full = torch.arange(layout.padded)
    shards = [torch.cat([full[:0], *(full[start:stop] for start, stop in layout.ranges(rank))]) for rank in range(world)]
    start = data.draw(st.integers(0, layout.padded))
    stop = data.draw(st.integers(start, layout.padded))
    found = [shards[rank][at : at + numel] for rank, at, numel in layout.holders(start, stop)]
    assert torch.equal(torch.cat([full[:0], *found]), full[start:stop])
