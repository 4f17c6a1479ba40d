"""Cutting one tensor over ranks and putting it together again: any geometry, any dtype.

pytest runs it, without processes: every rank's range is made here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.errors import PolicyError
from offload.policy import Policy
from zhooks.parallel.divided import HEADER, Cut, Slot, cut_layout, form_of, values_of


def base(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(3 * 5 * 7).reshape(3, 5, 7).to(dtype)


SHAPES: dict[str, Callable[[], Tensor]] = {
    "dense": base,
    "scalar": lambda: torch.tensor(3.5),
    "transposed": lambda: base().permute(2, 0, 1),
    "part": lambda: base()[1:],
    "gaps": lambda: base()[:, 1:4, ::2],
    "gaps transposed": lambda: base()[:, ::2].transpose(0, 2),
    "expanded": lambda: base()[:, None].expand(3, 4, 5, 7),
    "one expanded": lambda: torch.ones(1).expand(64),
    "expanded with gaps": lambda: base()[:, :, None, ::3].expand(3, 5, 6, 3),
    "bool": lambda: base().to(torch.int64) % 3 == 0,
    "int64": lambda: base(torch.int64),
    "bfloat16": lambda: base(torch.bfloat16),
    "complex": lambda: base(torch.complex64) * 1j,
    "odd start": lambda: base(torch.int8).flatten()[3:],
}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_cut_comes_back_with_its_bits_and_its_strides(name: str, world: int) -> None:
    tensor = SHAPES[name]()
    form = form_of(tensor, None)
    assert form is not None
    values = values_of(tensor, form)
    slot = Slot("unit", 7, cut_layout(values.flat.numel(), world), tensor)
    full = torch.empty(slot.layout.padded, dtype=torch.uint8)
    for rank in range(world):
        shard = Cut(values.flat, slot, rank).shard
        assert shard is not None and shard.numel() <= -(-values.flat.numel() // world) + 16 + HEADER
        taken = 0
        for start, stop in slot.layout.ranges(rank):
            full[start:stop] = shard[taken : taken + stop - start]
            taken += stop - start
    made = form.view(full)
    assert torch.equal(made, tensor) and made.dtype == tensor.dtype and made.stride() == tensor.stride()


def test_expanded_dims_and_gaps_are_not_stored() -> None:
    for name, numel in (("expanded", 105), ("gaps", 3 * 3 * 4), ("one expanded", 1)):
        tensor = SHAPES[name]()
        form = form_of(tensor, None)
        assert form is not None and values_of(tensor, form).flat.numel() == 4 * numel


def test_two_views_of_the_same_bytes_are_known_to_be_so_until_they_are_written() -> None:
    tensor = base()
    one, other = tensor.permute(2, 1, 0), tensor.view(15, 7)

    def place(view: Tensor) -> object:
        form = form_of(view, None)
        assert form is not None
        return values_of(view, form).place

    before = place(one)
    assert before == place(other) != place(tensor[1:])
    tensor.add_(1)
    assert place(one) != before


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(10).as_strided((4, 4), (2, 1)),
        torch.empty(0, 3),
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
    ids=["overlapping", "empty", "sparse", "conjugated"],
)
def test_what_cannot_be_cut_is_left_alone(tensor: Tensor) -> None:
    assert form_of(tensor, None) is None


def test_partitioned_inputs_need_units_that_are_recomputed() -> None:
    with pytest.raises(PolicyError, match=r'\[activation\] partition.*found "tp" and checkpoint = "none".*"unit" too'):
        Policy.of({"activation": {"partition": "tp"}})
    with pytest.raises(PolicyError, match=r'expected "none" or "tp"'):
        Policy.of({"activation": {"partition": "shard", "checkpoint": "unit"}})
