"""The boxes that a range of a tensor is: together exactly its elements, few, and where they lie in memory.

pytest runs it, in this process alone.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from zhooks.tensor.stored import boxes

SHAPES = [(), (7,), (1,), (4, 5), (1, 6), (3, 1), (2, 3, 4), (3, 1, 2), (2, 2, 3, 2), (1, 1, 5), (2, 2, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_boxes_of_every_range_are_its_elements_in_order_and_at_most_2n_minus_1(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    elements = torch.arange(numel).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        found = list(boxes(shape, start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        taken = [elements[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))] for box in found]
        together = torch.cat([one.reshape(-1) for one in taken]) if taken else elements.new_empty(0)
        assert together.tolist() == list(range(start, stop))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 3)])
def test_a_tensor_without_elements_has_no_boxes(shape: tuple[int, ...]) -> None:
    assert list(boxes(shape, 0, 0)) == []
