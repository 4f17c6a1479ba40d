"""Tensors without data are printed, copied and refused in Python as users expect."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from offload.errors import SimulationError
from tests.support.virtual import machine, on_virtual


@on_virtual()
def test_a_tensor_prints_its_shape_dtype_and_device_and_that_it_has_no_data() -> None:
    with machine():
        x = torch.ones(3, 4, device="virtual", requires_grad=True)
        assert repr(x) == "tensor(no data, size=(3, 4), device='virtual:0', requires_grad=True)"
        assert "dtype=torch.bfloat16" in str(x.bfloat16()) and "no data, size=()" in f"{x.sum()}"
        assert "no data" in repr(nn.Parameter(x.detach())) and "no data" in str({"loss": x.mean()})
        assert len(x) == 3
        assert repr(torch.ones(2)) == "tensor([1., 1.])", "of other devices nothing changes"


@on_virtual()
def test_a_deep_copy_has_memory_of_its_own_and_the_same_grad_and_flags() -> None:
    class Twice(nn.BatchNorm1d):
        extra: Tensor | None

    with machine():
        module = Twice(4, device="virtual")
        module(torch.ones(2, 4, device="virtual")).sum().backward()
        module.extra = module.running_mean
        made = copy.deepcopy(module)
        assert isinstance(made.weight, nn.Parameter) and made.weight.requires_grad
        assert made.running_mean is not None and module.running_mean is not None
        assert made.running_mean.data_ptr() != module.running_mean.data_ptr()
        assert made.extra is made.running_mean, "what is one tensor stays one"
        x = torch.ones(2, device="virtual", requires_grad=True)
        x.sum().backward()
        twin = copy.deepcopy(x)
        assert twin.requires_grad and twin.grad is not None and twin.grad.shape == (2,)
        with pytest.raises(RuntimeError, match="created explicitly by the user"):
            copy.deepcopy(x * 2)


def refused(ask: Callable[[], object], instead: str) -> None:
    with pytest.raises(SimulationError, match=rf"test_python_functions.py:\d+ reads values. Expected code .*{instead}"):
        ask()


@on_virtual()
def test_a_shape_that_depends_on_values_is_refused_with_what_to_write_instead() -> None:
    with machine():
        x = torch.ones(3, 4, device="virtual")
        repeats = torch.ones(3, dtype=torch.long, device="virtual")
        for ask in (lambda: x[x > 0], lambda: torch.where(x > 0), lambda: x.unique(), lambda: x.masked_select(x > 0)):
            refused(ask, "grouped_mm")
        refused(lambda: x.repeat_interleave(repeats, 0), "output_size")
        refused(lambda: torch.bincount(repeats), "scatter_add_")
        refused(lambda: f"{x.sum():.3f}", "log losses outside")
        refused(x.numpy, "log losses outside")
        assert torch.where(x > 0, x, -x).shape == x.shape and x.masked_fill(x > 0, 0).shape == x.shape


@on_virtual()
def test_the_line_of_a_library_is_named_together_with_the_one_that_called_it() -> None:
    import pytest as library  # lies where libraries are installed

    with machine():
        x = torch.ones(3, device="virtual")
        called = r"numpy\(\) at .*site-packages.*:\d+, called from .*test_python_functions.py:\d+ reads values"
        with pytest.raises(SimulationError, match=called):
            assert library.approx(1.0) == x.sum()


@on_virtual()
def test_tensors_of_the_cpu_are_refused_beside_those_of_the_device_but_for_numbers_and_indices() -> None:
    with machine():
        x, here = torch.ones(3, 4, device="virtual"), torch.ones(3, 4)
        with pytest.raises((SimulationError, RuntimeError), match=r"same device|all tensors on device"):
            torch.add(x, here)
        with pytest.raises((SimulationError, RuntimeError), match=r"same device|all tensors on device"):
            torch.cat([x, here])
        assert (x + torch.tensor(2.0)).shape == x.shape and x[torch.tensor([0, 2])].shape == (2, 4)


@on_virtual()
def test_initial_values_that_are_drawn_again_until_they_fit_need_no_data() -> None:
    with machine():
        weight = torch.empty(16, 16, device="virtual")
        assert nn.init.trunc_normal_(weight) is weight


@on_virtual()
def test_kernels_that_torch_has_no_shape_function_for_make_what_theirs_make() -> None:
    with machine():
        with torch.device("virtual"):
            cell = nn.GRU(8, 16, 2)
        out, state = cell(torch.ones(5, 3, 8, device="virtual"))
        out.sum().backward()
        assert out.shape == (5, 3, 16) and state.shape == (2, 3, 16)
        assert all(param.grad is not None and param.grad.shape == param.shape for param in cell.parameters())
        offsets = torch.zeros(4, dtype=torch.int32, device="virtual")
        rows = torch.ones(10, 8, device="virtual", requires_grad=True)
        made = torch._grouped_mm(rows, torch.ones(4, 8, 16, device="virtual"), offsets)
        assert made.shape == (10, 16) and made.dtype is torch.float32
