"""Autocast on the virtual device: the dtypes that CUDA's would have, and gradients in those of the parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offload.errors import SimulationError
from tests.support.virtual import machine, on_virtual


@on_virtual(dtype=(torch.bfloat16, torch.float16))
def test_products_are_in_the_lower_dtype_and_norms_losses_and_sums_in_fp32(dtype: torch.dtype) -> None:
    with machine(), torch.autocast("virtual", dtype=dtype):
        x = torch.ones(4, 4, device="virtual")
        half = x @ x
        assert half.dtype is dtype and F.linear(half, x).dtype is dtype and torch.einsum("ij,jk", x, x).dtype is dtype
        assert F.conv2d(x.view(1, 1, 4, 4), x.view(1, 1, 4, 4)).dtype is dtype
        assert F.layer_norm(half, (4,)).dtype is torch.float32 and F.mse_loss(half, half).dtype is torch.float32
        assert half.exp().dtype is torch.float32 and half.softmax(-1).dtype is torch.float32
        assert half.sum().dtype is torch.float32 and half.sum(dtype=dtype).dtype is dtype
        assert half.relu().dtype is dtype and (half + half).dtype is dtype
        assert torch.addcmul(half, half, x).dtype is torch.float32 and torch.addcmul(half, half, half).dtype is dtype
        assert (x.double() @ x.double()).dtype is torch.float64, "fp64 stays what it is"
        with torch.autocast("virtual", enabled=False):
            assert (x @ x).dtype is torch.float32
        with pytest.raises(SimulationError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(x, x)


@on_virtual()
def test_every_operation_that_cuda_has_a_rule_for_has_one_here_and_no_other() -> None:
    def ruled(key: str) -> set[str]:
        has, through = (
            torch._C._dispatch_has_kernel_for_dispatch_key,
            torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough,
        )
        return {name for name in torch._C._dispatch_get_all_op_names() if has(name, key) and not through(name, key)}

    with machine():
        cuda = {name for name in ruled("AutocastCUDA") if name.startswith("aten::")}
        assert len(cuda) > 100 and ruled("AutocastPrivateUse1") == cuda


@on_virtual()
def test_rules_give_the_dtypes_of_cpu_autocast_where_both_devices_have_the_same_rule() -> None:
    shared = {
        "matmul": lambda x: x @ x,
        "linear": lambda x: F.linear(x, x),
        "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 4, 4)] * 3),
        "mse": lambda x: F.mse_loss(x.bfloat16(), x),
        "activation": lambda x: F.gelu(x.bfloat16()),
    }
    for name, make in shared.items():
        made = []
        for device in ("cpu", "virtual"):
            with machine(), torch.autocast(device, dtype=torch.bfloat16):
                try:
                    made.append(make(torch.ones(4, 4, device=device)).dtype)
                except RuntimeError as error:
                    made.append(type(error))
        assert made[0] == made[1], name


@on_virtual()
def test_gradients_have_the_dtype_of_the_parameters() -> None:
    with machine():
        with torch.device("virtual"):
            model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        with torch.autocast("virtual", dtype=torch.bfloat16):
            out = model(torch.ones(2, 4, device="virtual"))
        assert out.dtype is torch.bfloat16
        out.float().sum().backward()
        assert all(param.grad is not None and param.grad.dtype is torch.float32 for param in model.parameters())


@on_virtual()
def test_autocast_for_cuda_is_refused_with_its_line_for_it_would_do_nothing() -> None:
    refused = r"torch.autocast at .*test_autocast.py:\d+ expected autocast for the device of the tensors"
    with pytest.raises(SimulationError, match=refused), machine(), torch.autocast("cuda", dtype=torch.bfloat16):
        pass
    # As where there is CUDA: torch does not warn.
    x = torch.ones(2, device="virtual")
    torch.set_autocast_enabled("cuda", True)
    try:
        with pytest.raises(SimulationError, match=refused), machine():
            x.exp()
    finally:
        torch.set_autocast_enabled("cuda", False)
