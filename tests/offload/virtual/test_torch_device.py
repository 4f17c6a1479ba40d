"""Tensors of the virtual device: shapes, views, memory and autograd as on a GPU, and no data."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload.errors import SimulationError
from offload.virtual import ACCELERATOR, HOST
from tests.support.values import grad_of
from tests.support.virtual import machine, on_virtual


def twin(make: Any, *shapes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """What a function makes of tensors of these shapes on the CPU, and on the virtual device."""
    torch.manual_seed(0)
    here = make(*(torch.ones(shape) for shape in shapes))
    there = make(*(torch.ones(shape, device="virtual") for shape in shapes))
    assert isinstance(here, Tensor) and isinstance(there, Tensor)
    return here, there


@on_virtual()
def test_results_have_the_shapes_strides_and_dtypes_that_the_cpu_gives() -> None:
    with machine():
        for make in (
            lambda a: a.t().reshape(-1)[2:].view(2, -1),
            lambda a: F.gelu(a @ a.t()).to(torch.bfloat16),
            lambda a: F.conv2d(a.view(1, 1, 4, 5), torch.ones(2, 1, 3, 3, device=a.device)),
            lambda a: a.sum(0, keepdim=True).expand(3, 5),
            lambda a: torch.cat([a, a], 1).topk(3).indices,
            lambda a: torch.arange(7, device=a.device),
        ):
            here, there = twin(make, (4, 5))
            assert (there.shape, there.stride(), there.dtype) == (here.shape, here.stride(), here.dtype)
            assert there.device == torch.device("virtual", ACCELERATOR)


@on_virtual(dtype=(torch.bfloat16, torch.float32), masked=(False, True))
def test_attention_is_fused_and_keeps_no_matrix_of_scores(dtype: torch.dtype, masked: bool) -> None:
    with machine() as made:
        query, key, value = (torch.ones(2, 4, 256, 64, dtype=dtype, device="virtual", requires_grad=True) for _ in range(3))
        mask = torch.ones(256, 256, dtype=torch.bool, device="virtual") if masked else None
        before = made.held[ACCELERATOR]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        scores = 2 * 4 * 256 * 256 * dtype.itemsize
        assert out.shape == query.shape
        assert made.held[ACCELERATOR] - before < out.nbytes + scores
        out.sum().backward()
        assert query.grad is not None and query.grad.shape == query.shape


@on_virtual()
def test_a_view_shares_its_base_s_memory_and_version() -> None:
    with machine() as made:
        base = torch.zeros(4, 6, device="virtual")
        held = made.held[ACCELERATOR]
        view = base.view(24)[6:]
        assert view.data_ptr() == base.data_ptr() + 24 and made.held[ACCELERATOR] == held
        before = base._version
        view.add_(1)
        assert base._version == before + 1


@on_virtual()
def test_memory_is_counted_while_a_storage_lives_and_by_place() -> None:
    with machine() as made:
        one = torch.empty(100, device="virtual")
        other = torch.empty(50, dtype=torch.float64, device=torch.device("virtual", HOST))
        assert made.held == [400, 400]
        view = one[:10]
        del one
        assert made.held == [400, 400], "a view keeps its storage"
        del view, other
        gc.collect()
        assert made.held == [0, 0] and made.peak == [400, 400]


@on_virtual()
def test_a_model_trains_with_an_optimizer_of_torch() -> None:
    with machine():
        with torch.device("virtual"):
            model = nn.Sequential(nn.Embedding(10, 8), nn.LSTM(8, 8))
        out, _ = model(torch.zeros(3, 4, dtype=torch.long, device="virtual"))
        out.square().mean().backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        for param in model.parameters():
            assert param.grad is not None and param.grad.shape == param.shape
            assert optimizer.state[param]["exp_avg"].device.type == "virtual"


@on_virtual()
def test_what_asks_for_a_value_is_refused_with_the_line_that_asked() -> None:
    with machine():
        x = torch.ones(3, device="virtual")
        for ask in (lambda: x[0].item(), lambda: x.nonzero(), lambda: x.cpu(), lambda: bool(x.sum() > 1), x.tolist):
            with pytest.raises(SimulationError, match=r"test_torch_device.py:\d+ reads values. Expected code"):
                ask()


@on_virtual()
def test_nothing_is_attached_on_the_device_outside_of_a_simulation() -> None:
    import zhooks

    with machine(), torch.device("virtual"):
        model = nn.Linear(3, 3)
    with pytest.raises(SimulationError, match=r"needs to be used inside a simulation"):
        zhooks.attach(model, policy={"parameter": {"tier": "host"}})


@on_virtual(accelerated=(True, False))
def test_gradients_pass_through_what_gpus_and_cpus_have_other_kernels_for(accelerated: bool) -> None:
    with machine(accelerated=accelerated):
        x = torch.ones(2, 4, 8, 16, device="virtual", requires_grad=True)
        rnn, norm = nn.LSTM(16, 16, device="virtual"), nn.LayerNorm(16, device="virtual")
        attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        made = [F.dropout(x, 0.5), F.silu(x), norm(x), attended, rnn(x.flatten(0, 1))[0], F.group_norm(x, 2)]
        for each in made:
            x.grad = None
            each.sum().backward()
            assert grad_of(x).shape == x.shape
        assert rnn.weight_hh_l0.grad is not None and norm.weight.grad is not None
        # In evaluation, and without a graph, too.
        with torch.no_grad():
            assert F.dropout(x, 0.5, training=False).shape == rnn(x.flatten(0, 1))[0].unflatten(0, (2, 4)).shape == x.shape


@on_virtual()
def test_tensors_share_no_versions_where_a_mode_surrounds_them() -> None:
    with machine(), torch.device("virtual"):
        first, second = torch.empty(4), torch.empty(4)
        first.add_(1)
        assert (first._version, second._version) == (1, 0)
        view = first.view(2, 2)
        view.add_(1)
        assert first._version == 2


@on_virtual()
def test_an_error_of_what_backward_unpacks_is_raised_and_the_process_lives() -> None:
    calls: list[None] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(None)
        if len(calls) > 1:
            x.sum().item()
        return x.sin()

    for _ in range(2):
        calls.clear()
        with pytest.raises(SimulationError, match=r"item\(\) at .*test_torch_device.py:\d+"), machine():
            x = torch.ones(3, device="virtual", requires_grad=True)
            checkpoint(forward, x, use_reentrant=False).sum().backward()
    with pytest.raises(ValueError, match="of the user's"), machine():
        x = torch.ones(3, device="virtual", requires_grad=True)
        y = x.sin()
        y.register_hook(raises)
        y.sum().backward()


def raises(grad: Tensor) -> None:
    raise ValueError("of the user's")


@pytest.mark.slow
def test_a_simulation_after_the_process_s_first_backward_says_so() -> None:
    program = """
import torch, zhooks
torch.ones(1, requires_grad=True).sum().backward()
zhooks.simulate(lambda: torch.nn.Linear(4, 4), lambda model: model(torch.empty(2, 4, device="virtual")).sum().backward())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "SimulationError: simulate expected a process in which no backward has run yet" in done.stderr.splitlines()[-1]
