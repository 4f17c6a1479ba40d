"""Ranges apart in memory are read and written as one run of bytes, from any place to any place.

pytest runs it, without processes.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from zhooks.comm.ranges import SMALL_NBYTES, ScatteredBytes, messages

LENGTHS = (3, 0, 1, 4, 1, 0)


def some() -> list[Tensor]:
    """Ranges of several dtypes, none beside another."""
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.uint8))
    return [torch.rand(length + 2).mul(100).to(dtype)[1:-1] for length, dtype in zip(LENGTHS, dtypes, strict=False)]


def joined(ranges: list[Tensor]) -> Tensor:
    return torch.cat([one.view(torch.uint8) for one in ranges])


def test_any_chunk_is_read_from_and_written_to_the_ranges_it_covers() -> None:
    tensors = some()
    expected, ranges = joined(tensors), ScatteredBytes(tensors)
    assert ranges.nbytes == expected.numel() and ranges.only is None
    for start, stop in itertools.combinations_with_replacement(range(ranges.nbytes + 1), 2):
        out = torch.full((stop - start,), 255, dtype=torch.uint8)
        ranges.read(start, out)
        torch.testing.assert_close(out, expected[start:stop], rtol=0, atol=0)
        data = torch.randint(0, 255, (stop - start,), dtype=torch.uint8)
        ranges.write(start, data)
        expected[start:stop] = data
        torch.testing.assert_close(joined(tensors), expected, rtol=0, atol=0, equal_nan=True)


def test_one_range_is_sent_from_where_it_lies() -> None:
    tensors = some()[:2]
    only = ScatteredBytes(tensors).only
    assert only is not None and only.data_ptr() == tensors[0].data_ptr()
    assert ScatteredBytes([]).nbytes == 0 and ScatteredBytes([]).only is None


def test_small_ranges_travel_with_their_neighbours_and_large_ones_alone() -> None:
    sizes = (5, 0, 7, SMALL_NBYTES, SMALL_NBYTES + 1, 3, 0)
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    assert [one.nbytes for one in messages(tensors)] == [12, SMALL_NBYTES, SMALL_NBYTES + 1, 3]
    assert list(messages(tensors[1:2])) == []
