"""[optimizer] rounding = "stochastic": bf16 parameters trained without fp32 masters, against a loop of plain PyTorch.

pytest runs it on ranks over Gloo; the arithmetic alone needs none. It never looks at a generator of torch's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from offload import kernels
from offload.errors import CapabilityError
from offload.kernels import noise_for, round_to_bf16
from offload.policy import Policy, cost
from tests.support.on_ranks import on_ranks, place

# --- the arithmetic ---------------------------------------------------------------------------------------------------


def rounded(values: Tensor, seed: int = 0, name: str = "p", count: int = 1, start: int = 0) -> Tensor:
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    round_to_bf16(values, out, noise_for(seed, name, count).at(start))
    return out


@pytest.mark.parametrize("value", [1.0 + 1 / 2048, -3.14159265, 1e-30])
def test_the_mean_of_many_roundings_is_the_value(value: float) -> None:
    exact = torch.tensor(value).item()
    places = rounded(torch.full((1 << 18,), value)).double()
    times = torch.stack([rounded(torch.full((8,), value), count=count) for count in range(1000)]).double()
    ulp = places.max().item() - places.min().item()
    assert places.unique().numel() == 2 and ulp > 0
    assert abs(places.mean().item() - exact) < 0.005 * ulp
    assert (times.mean(0) - exact).abs().max().item() < 0.08 * ulp


def test_what_bf16_can_say_stays_and_so_do_infinities_and_nan() -> None:
    exact = torch.randn(5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(rounded(exact.float()), exact)
    special = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0])
    assert torch.equal(rounded(special).view(torch.int16), special.bfloat16().view(torch.int16))
    nan = torch.tensor([0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert rounded(nan).isnan().all()


def test_seed_name_and_count_decide_the_bits_and_the_cut_does_not() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    whole = rounded(values)
    assert torch.equal(whole, rounded(values))
    assert torch.equal(whole, torch.cat([rounded(values[:333]), rounded(values[333:], start=333)]))
    others = [rounded(values, seed=1), rounded(values, name="q"), rounded(values, count=2), rounded(values, start=1)]
    assert all(300 < (whole != other).sum().item() < 600 for other in others), "a third of the elements differ by chance"


@pytest.mark.parametrize("kernel", ["sgd", "lion", "adam"])
def test_the_kernels_round_what_they_compute_with_the_same_noise(kernel: str) -> None:
    draw = torch.Generator().manual_seed(2)
    master, grad, noise = torch.randn(3000, generator=draw).bfloat16(), torch.randn(3000, generator=draw), noise_for(5, "p", 9)

    def run(values: Tensor, **more: Any) -> Tensor:
        one, two = torch.zeros(3000), torch.zeros(3000)
        if kernel == "sgd":
            kernels.sgd(kernels.Sgd(lr=1e-3, momentum=0.9, first=True), values, grad, one, **more)
        elif kernel == "lion":
            kernels.lion(kernels.Lion(1e-3, 0.9, 0.99, 0.1), values, grad, one, **more)
        else:
            kernels.adam(kernels.Adam(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True, step=1), values, grad, one, two, **more)
        return values

    wanted = torch.empty_like(master)
    round_to_bf16(run(master.float()), wanted, noise.at(40))
    assert torch.equal(run(master.clone(), noise=noise.at(40)), wanted)


# --- training ---------------------------------------------------------------------------------------------------------


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    wanted = (x[:, :1] * x[:, 1:2]).tanh() + 1
    loss: Tensor = (model(x.to(next(model.parameters()).dtype)).float() - wanted).square().mean()
    return loss


def policy(rounding: str = "stochastic", kernel: str = "torch", tier: str = "device", stage: int = 3) -> dict[str, Any]:
    cell = {"tier": tier}
    optimizer = {**cell, "kernel": kernel, "rounding": rounding, "seed": 7}
    return {"stage": stage, "parameter": cell, "gradient": cell, "optimizer": optimizer, "units": {"min_numel": 0}}


def adamw(model: nn.Module, lr: float = 3e-5) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> float:
    loss = torch.zeros(())
    for step in numbers:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def by_hand(count: int) -> dict[str, Tensor]:
    """Plain PyTorch: AdamW in fp32 over copies made for the step, rounded into a bf16 model."""
    model = build().bfloat16()
    wide = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(wide, lr=3e-5, weight_decay=0.0)
    for step in range(count):
        loss_of(model, step).backward()
        for (_, param), copy in zip(model.named_parameters(), wide, strict=True):
            assert param.grad is not None
            copy.data, copy.grad, param.grad = param.detach().float(), param.grad.float(), None
        optimizer.step()
        for (name, param), copy in zip(model.named_parameters(), wide, strict=True):
            round_to_bf16(copy.detach().view(-1), param.detach().view(-1), noise_for(7, name, step + 1))
    return dict(model.state_dict())


CELLS = ("torch-device-0", "torch-device-3", "torch-host-3", "numba-device-3", "numba-disk-3")


@on_ranks(1, 2, cell=CELLS)
def test_it_has_the_bits_of_a_loop_by_hand_on_every_tier_and_over_any_ranks(cell: str) -> None:
    kernel, tier, stage = cell.split("-")
    # Every rank has the same batch, so that means of gradients are what one rank has.
    model = build().bfloat16()
    attachment = zhooks.attach(model, policy=policy(kernel=kernel, tier=tier, stage=int(stage)))
    steps(model, adamw(model), range(4))
    attachment.detach()
    close: dict[str, Any] = {"rtol": 0.0, "atol": 0.0} if kernel == "torch" else {"rtol": 2**-7, "atol": 1e-6}
    wanted = by_hand(4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], **close)
    same = [torch.equal(value, wanted[name]) for name, value in model.state_dict().items()]
    assert sum(same) >= len(same) - 2, "a last place of Adam's quotient moves a rounding once in a thousand"


@pytest.mark.slow
@on_ranks(1)
def test_nearest_stalls_where_stochastic_ends_near_fp32() -> None:
    ends = {}
    for dtype, rounding in ((torch.float32, "nearest"), (torch.bfloat16, "nearest"), (torch.bfloat16, "stochastic")):
        model = build().to(dtype)
        start = loss_of(model, 999).item()
        attachment = zhooks.attach(model, policy=policy(rounding))
        steps(model, adamw(model), range(100))
        ends[dtype, rounding] = start - loss_of(model, 999).item()
        attachment.detach()
    wide, stalled, lively = ends.values()
    assert lively == pytest.approx(wide, rel=0.05)
    assert stalled < 0.5 * wide


@on_ranks(1, 2)
def test_parameters_take_two_bytes_and_states_eight_with_no_masters() -> None:
    model = build().bfloat16()
    attachment = zhooks.attach(model, policy=policy())
    optimizer = adamw(model)
    loss_of(model, 0).backward()
    optimizer.step()
    report = attachment.memory()
    rows = {row.what: row for row in report.rows}
    share = report.psi / place()[1]
    assert rows["parameter"].nbytes == pytest.approx(2 * share, rel=0.01)
    assert rows["gradient"].nbytes == pytest.approx(2 * share, rel=0.01)
    assert rows["optimizer"].nbytes == pytest.approx(8 * share, rel=0.01)
    attachment.detach()


@on_ranks(1, 2)
def test_a_run_resumes_bit_for_bit_and_a_full_state_keeps_fp32_states() -> None:
    folder = shared()
    model = build().bfloat16()
    attachment = zhooks.attach(model, policy=policy())
    optimizer = adamw(model)
    steps(model, optimizer, range(3))
    attachment.save(folder, optimizer)
    full = attachment.state_dict(optimizer)
    steps(model, optimizer, range(3, 6))
    wanted = [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]
    attachment.detach()
    model = build().bfloat16()
    attachment = zhooks.attach(model, policy=policy())
    optimizer = adamw(model)
    attachment.load_state_dict(full, optimizer)
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert moments and all(value.dtype is torch.float32 for value in moments)
    attachment.load(folder, optimizer)
    steps(model, optimizer, range(3, 6))
    found = [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    attachment.detach()


def shared() -> Path:
    """One new folder that all ranks know."""
    names = [tempfile.mkdtemp() if place()[0] == 0 else ""]
    if place()[1] > 1:
        dist.broadcast_object_list(names, 0)
    return Path(names[0]) / "saved"


@on_ranks(1, dtype=("float32", "float16"))
def test_a_model_it_is_not_for_is_refused_and_stays_usable(dtype: str) -> None:
    model = build().to(getattr(torch, dtype))
    found = "only fp32" if dtype == "float32" else "0.weight in float16"
    with pytest.raises(CapabilityError, match=rf'rounding = "stochastic" needs .* in bf16 .*found {found}. Make the'):
        zhooks.attach(model, policy=policy())
    assert loss_of(model, 0).isfinite()
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}})
    with pytest.raises(CapabilityError, match="stochastic"):
        attachment.apply(policy())
    assert loss_of(model, 0).isfinite()
    attachment.detach()


def test_the_cost_of_a_policy_knows_that_there_are_no_masters() -> None:
    spent = cost(Policy.of({"optimizer": {"rounding": "stochastic"}}), 1000, 1)
    assert [(cell.what, cell.per_numel) for cell in spent.cells] == [("parameter", 2), ("gradient", 2), ("optimizer", 8)]


@on_ranks(1)
def test_detach_gives_the_optimizer_back_as_the_plain_model_can_use_it() -> None:
    model = nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.ones(2, 8, dtype=torch.bfloat16)
    attachment = zhooks.attach(model, policy={"optimizer": {"rounding": "stochastic"}})
    model(inputs).float().sum().backward()
    optimizer.step()
    attachment.detach()
    model(inputs).float().sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.bfloat16
