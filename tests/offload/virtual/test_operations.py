"""What operations make is found out once for calls alike, and calls that differ are told apart by all that may matter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F

from offload.virtual import Machine, Operation
from tests.support.virtual import Flat, machine, on_virtual


@on_virtual()
def test_calls_that_differ_in_a_number_s_type_or_value_make_what_theirs_makes() -> None:
    with machine():
        whole = torch.ones(4, 6, dtype=torch.int64, device="virtual")
        assert (whole + 1).dtype is torch.int64
        assert (whole + 1.0).dtype is torch.float32
        assert (whole + True).dtype is torch.int64
        assert whole.sum(0).shape == (6,) and whole.sum(1).shape == (4,)
        assert torch.cat([whole, whole]).shape == (8, 6) and torch.cat([whole, whole], 1).shape == (4, 12)
        assert (whole / 2).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (whole / 2).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


@on_virtual()
def test_calls_that_differ_in_strides_make_what_theirs_makes() -> None:
    with machine():
        rows = torch.ones(4, 6, device="virtual")
        columns = torch.ones(6, 4, device="virtual").t()
        for _ in range(2):
            assert (rows * 2).stride() == (6, 1) and (columns * 2).stride() == (1, 4)


@on_virtual()
def test_an_out_argument_takes_the_shape_of_the_result_at_every_call() -> None:
    with machine():
        for _ in range(2):
            out = torch.empty(0, device="virtual")
            torch.add(torch.ones(3, device="virtual"), 1, out=out)
            assert out.shape == (3,)
            kept = out.data_ptr()
            torch.add(torch.ones(3, device="virtual"), 1, out=out)
            assert out.data_ptr() == kept


@on_virtual()
def test_each_call_s_results_have_memory_of_their_own() -> None:
    with machine():
        values = [torch.ones(4, device="virtual") for _ in range(2)]
        one, other = (torch._foreach_add(values, 1.0) for _ in range(2))
        assert len({tensor.data_ptr() for tensor in (*values, *one, *other)}) == 6


def _loss_bytes(device: str) -> list[int]:
    losses: tuple[Callable[..., torch.Tensor], ...] = (
        F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy, F.huber_loss, F.l1_loss, F.kl_div,
    )  # fmt: skip
    found = []
    for loss, reduction in product(losses, ("none", "sum", "mean")):
        value, target = (torch.full((8, 16), 0.5, device=device) for _ in range(2))
        found.append(loss(value, target, reduction="batchmean" if loss is F.kl_div else reduction).untyped_storage().nbytes())
    return found


@on_virtual()
def test_losses_hold_the_memory_that_a_cpu_s_hold() -> None:
    with machine():
        found = _loss_bytes("virtual")
    assert found == _loss_bytes("cpu")


def _convolution_strides(device: str) -> list[tuple[int, ...]]:
    found = []
    formats = (torch.contiguous_format, torch.channels_last)
    for layout, weight_layout, kernel, transposed in product(formats, formats, (1, 3), (False, True)):
        # Of fewer elements torch takes another kernel on one thread.
        value = torch.ones(2, 8, 40, 40, device=device).to(memory_format=layout).requires_grad_()
        weight = torch.ones(8, 8, kernel, kernel, device=device).to(memory_format=weight_layout).requires_grad_()
        out = (F.conv_transpose2d if transposed else F.conv2d)(value, weight)
        made = (out, *torch.autograd.grad(out, (value, weight), torch.ones_like(out)))
        # Where a length is 1 its stride says nothing.
        found += [tuple(step for length, step in zip(each.shape, each.stride(), strict=True) if length > 1) for each in made]
    return found


@on_virtual()
def test_convolutions_make_channels_last_of_channels_last() -> None:
    with machine():
        found = _convolution_strides("virtual")
    assert found == _convolution_strides("cpu")


class Noting(Flat):
    """Costs that keep what they were asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Operation] = []

    def operation(self, operation: Operation, index: int) -> float:
        self.seen.append(operation)
        return 1.0


@on_virtual()
def test_a_number_of_the_real_host_makes_a_call_like_no_other() -> None:
    costs = Noting()
    with Machine(costs).on():
        x = torch.ones(4, device="virtual")
        costs.seen.clear()
        for number in (1.5, 1.5, torch.tensor(1.5)):
            torch.add(x, number)
    first, again, last = (operation.kind for operation in costs.seen)
    assert first is again and first is not None and last is None

