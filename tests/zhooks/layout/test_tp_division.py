"""A parameter that is a DTensor, from its whole to this rank's part and back, and how writes to either are noticed.

pytest runs it over two ranks. That models divided over tp train right is asked where they are attached.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.on_ranks import on_ranks, place
from zhooks.layout import Division, hollow, is_divided, mark_of, part_of, whole_of


def over_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def division_of(tensor: Tensor) -> Division:
    found = Division.of(tensor)
    assert found is not None
    return found


VALUES = torch.arange(24.0).view(4, 6)


@on_ranks(2, dim=(0, 1, -1))
def test_a_part_is_cut_from_the_whole_and_the_whole_made_of_parts(dim: int) -> None:
    rank, _ = place()
    given: Any = distribute_tensor(VALUES, over_two(), [Shard(dim)])
    part, mine = part_of(given), VALUES.chunk(2, dim)[rank]
    assert is_divided(given) and not is_divided(part) and part is given._local_tensor
    assert torch.equal(part, mine) and torch.equal(whole_of(given), VALUES)
    division = division_of(given)
    assert division.place == (dim % 2, rank, 2)
    assert (division.shape, division.stride) == ((4, 6), (6, 1))
    assert torch.equal(division.cut(VALUES), mine)
    assert torch.equal(division.whole(part), VALUES)
    wrapped: Any = division.wrap(part.double())
    assert wrapped.placements == given.placements and wrapped.dtype is torch.float64 and wrapped.shape == (4, 6)
    assert torch.equal(wrapped.full_tensor(), VALUES.double())


@on_ranks(2)
def test_a_dtensor_that_is_placed_otherwise_is_cut_as_this_one_is() -> None:
    rank, _ = place()
    mesh = over_two()
    rows: Any = distribute_tensor(VALUES, mesh, [Shard(0)])
    columns = distribute_tensor(VALUES, mesh, [Shard(1)])
    division = division_of(rows)
    assert torch.equal(division.cut(columns), VALUES.chunk(2)[rank])
    assert division.cut(rows) is rows._local_tensor, "itself, not a copy"


@on_ranks(2)
def test_what_every_rank_has_whole_is_no_part() -> None:
    given: Any = distribute_tensor(VALUES, over_two(), [Replicate()])
    division = division_of(given)
    part = part_of(given)
    assert division.place is None and torch.equal(part, VALUES)
    assert division.cut(VALUES) is VALUES and division.whole(part) is part


@on_ranks(2)
def test_one_rank_alone_on_an_axis_has_the_whole() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    division = division_of(distribute_tensor(VALUES, mesh, [Shard(0)]))
    assert (division.dim, division.count, division.index, division.place) == (0, 1, 0, None)
    assert division.cut(VALUES) is VALUES


@on_ranks(2)
def test_writes_to_a_dtensor_and_to_its_part_are_noticed_and_so_is_other_data() -> None:
    given: Any = distribute_tensor(VALUES.clone(), over_two(), [Shard(0)])
    part = part_of(given)
    marks = [mark_of(given)]
    given.mul_(2)
    marks.append(mark_of(given))
    part.add_(1)
    marks.append(mark_of(given))
    assert len(set(marks)) == 3 and {address for _, address in marks} == {part.data_ptr()}
    other = torch.zeros(2, 6)
    part.data = other
    assert mark_of(given)[1] == other.data_ptr() != marks[0][1]


@on_ranks(2)
def test_a_hollow_dtensor_has_no_values_and_counts_writes_to_the_other() -> None:
    given: Any = distribute_tensor(VALUES.clone(), over_two(), [Shard(0)])
    made: Any = hollow(given)
    assert part_of(made).numel() == 0 and part_of(made).dtype is torch.float32
    before = made._version
    given.add_(1)
    assert made._version == given._version > before
    assert torch.equal(whole_of(given), VALUES + 1)


@on_ranks(2)
def test_a_part_in_a_new_wrapper_is_itself_and_needs_a_gradient_where_it_did() -> None:
    given: Any = distribute_tensor(VALUES, over_two(), [Shard(0)])
    for needs in (True, False):
        part = part_of(given).detach().clone().requires_grad_(needs)
        made = division_of(given).wrap(part)
        assert isinstance(made, DTensor) and part_of(made) is part and made.requires_grad is needs


def test_plain_tensors_are_their_own_part_and_whole_and_have_no_division() -> None:
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2))):
        assert not is_divided(tensor) and part_of(tensor) is tensor and whole_of(tensor) is tensor
        assert Division.of(tensor) is None
        before = mark_of(tensor)
        with torch.no_grad():
            tensor.add_(1)
        assert mark_of(tensor)[0] == before[0] + 1 and mark_of(tensor)[1] == before[1] == tensor.data_ptr()


@pytest.mark.parametrize("other", [None, 3, nn.Linear(1, 1)])
def test_what_is_no_tensor_is_not_divided(other: object) -> None:
    assert not is_divided(other)
