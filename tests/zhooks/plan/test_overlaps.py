"""Two tensors over one memory: refused by both names where a step would have to reach both, and only there.

pytest runs it. Tied weights, one object in several places, are test_attach.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zhooks


class Pair(nn.Module):
    """A layer, and a second tensor, called other."""

    def __init__(self, second: Callable[[nn.Linear], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        other = second(self.linear)
        if isinstance(other, nn.Parameter):
            self.other = other
        else:
            self.register_buffer("other", other)


@pytest.mark.parametrize(
    "second",
    [
        lambda linear: nn.Parameter(linear.weight.data),
        lambda linear: nn.Parameter(linear.weight.data[2:4, 1:]),
        lambda linear: nn.Parameter(linear.weight.data.view(torch.int32), requires_grad=False),
        lambda linear: linear.weight.data,
        lambda linear: linear.bias.data[7:].expand(3),
    ],
    ids=["all of it", "a block", "other dtype, frozen", "a buffer", "one element"],
)
def test_a_second_tensor_over_a_trained_parameters_memory_is_refused(second: Callable[[nn.Linear], Tensor]) -> None:
    model = Pair(second)
    with pytest.raises(zhooks.AttachError, match=r"attach .*(linear\.\w+.* with other|other .* with linear\.\w+)"):
        zhooks.attach(model)
    assert type(model.linear.weight) is nn.Parameter


def interleaved(linear: nn.Linear) -> Tensor:
    both = torch.randn(8, 16)
    linear.weight = nn.Parameter(both[:, ::2])
    return nn.Parameter(both[:, 1::2])


@pytest.mark.parametrize(
    "second",
    [
        interleaved,
        lambda linear: linear.weight.requires_grad_(False).data,
        lambda linear: nn.Parameter(linear.weight.data[:0]),
        lambda linear: linear.weight,
    ],
    ids=["columns of one matrix", "frozen", "empty", "tied"],
)
def test_what_no_step_would_write_twice_is_attached(second: Callable[[nn.Linear], Tensor]) -> None:
    model = Pair(second)
    attachment = zhooks.attach(model)
    assert type(model.linear.weight) is not nn.Parameter
    attachment.detach()
