"""The accelerator is one: memory the host may not touch, streams that run late, an allocator that reuses, errors that stay.

What these tests show of it is what the tests of zhooks on it rest on. The functions run in processes that have it.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.device import beside
from tests.support.on_ranks import on_accelerators
from tests.support.schedules import SCHEDULES, at, native, schedule
from tests.support.slow import slow


@on_accelerators(1)
def test_a_kernel_has_not_run_until_somebody_waits_for_it() -> None:
    # `pinned` shows the device's value at the moment, which nothing has waited for.
    x = at(4)
    host = torch.zeros(4).pin_memory()
    host.copy_(x.add_(1), non_blocking=True)
    assert host.tolist() == [0.0] * 4
    torch.accelerator.synchronize()
    assert host.tolist() == [2.0] * 4


@on_accelerators(1)
def test_a_copy_from_pageable_memory_is_staged_and_one_from_pinned_memory_reads_late() -> None:
    pageable, pinned = torch.ones(3), torch.ones(3).pin_memory()
    early, late = torch.empty(3, device="accel"), torch.empty(3, device="accel")
    early.copy_(pageable, non_blocking=True)
    late.copy_(pinned, non_blocking=True)
    pageable.fill_(7)
    pinned.fill_(7)
    assert early.tolist() == [1.0] * 3
    assert late.tolist() == [7.0] * 3


@on_accelerators(1)
def test_a_copy_to_pageable_memory_waits_and_one_to_pinned_memory_does_not() -> None:
    native().reset_host_waits()
    pinned = torch.empty(3).pin_memory()
    pinned.copy_(at(3), non_blocking=True)
    assert native().host_waits() == {}
    torch.empty(3).copy_(at(3), non_blocking=True)
    assert native().host_waits() == {"copy d2h": 1}


@on_accelerators(1)
def test_pinned_memory_that_a_queued_copy_reads_is_not_given_to_anybody_else() -> None:
    first = torch.full((1024,), 5.0).pin_memory()
    address = first.data_ptr()
    out = torch.empty(1024, device="accel")
    out.copy_(first, non_blocking=True)
    del first
    others = [torch.full((1024,), 9.0).pin_memory() for _ in range(8)]
    assert all(other.data_ptr() != address for other in others)
    assert out.eq(5).all().item()


def _side_stream_result(*, wait: bool) -> list[float]:
    side = torch.Stream(torch.device("accel"))
    x = torch.zeros(4, device="accel")
    with side:
        if wait:
            side.wait_stream(torch.accelerator.current_stream())
        y = x + 1
    x.add_(10)
    torch.accelerator.current_stream().wait_stream(side)
    found: list[float] = (y + 0).tolist()
    return found


@on_accelerators(1)
def test_a_wait_orders_two_streams_under_every_schedule_and_a_missing_one_shows_under_some() -> None:
    found = {}
    for mode, seed in SCHEDULES:
        with schedule(mode, seed):
            # Without `y` waiting for the zeros, it may read what was there before.
            torch.full((4,), 3.0, device="accel")
            found[mode, seed] = _side_stream_result(wait=True), _side_stream_result(wait=False)
    del found["eager", 0]
    # x.add_(10) may come first in both: nobody said otherwise. But the zeros never come after `y` if it waited.
    assert all(good in ([1.0] * 4, [11.0] * 4) for good, _ in found.values())


@on_accelerators(1)
def test_streams_of_a_device_that_is_named_with_and_without_its_number_are_two() -> None:
    with schedule("lazy"):
        made = [torch.Stream(torch.device(name)) for name in ("accel", "accel:0", "accel", "accel:0")]
    assert len({stream.stream_id for stream in made}) == len(made)


@on_accelerators(1)
def test_a_lane_beside_the_current_stream_is_none_of_the_streams_of_the_next_schedule() -> None:
    def beside_it() -> int:
        with beside(torch.device("accel", 0), "gather"):
            return torch.accelerator.current_stream().stream_id

    for _ in range(2):
        with schedule("lazy"):
            made = [torch.Stream(torch.device("accel", 0)).stream_id for _ in range(2)]
            assert beside_it() not in made


@on_accelerators(1)
def test_the_same_seed_gives_the_same_order() -> None:
    def order() -> list[tuple[int, str]]:
        streams = [torch.Stream(torch.device("accel")) for _ in range(3)]
        native().set_tracing(True)
        for turn in range(12):
            with streams[turn % 3]:
                at(4).mul_(turn)
        torch.accelerator.synchronize()
        native().set_tracing(False)
        return [(stream, name) for _, stream, name, _, _ in native().take_trace()]

    orders = []
    for seed in (1, 1, 2, 3):
        with schedule("random", seed):
            orders.append(order())
    assert orders[0] == orders[1]
    assert len({tuple(found) for found in orders}) > 1


def _read_after_free(*, recorded: bool) -> bool:
    """Whether a side stream's kernel read NaN from memory that was freed on the current one while it was queued."""
    side = torch.Stream(torch.device("accel"))
    x = at(1 << 16)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x.sum()
    if recorded:
        x.record_stream(side)
    del x
    other = at(16)  # the owner's next kernel
    other.sum().item()
    torch.accelerator.synchronize()
    return bool(y.isnan().item())


@on_accelerators(1)
def test_memory_that_is_freed_under_a_queued_kernel_is_gone_unless_its_stream_was_recorded() -> None:
    assert _read_after_free(recorded=False)
    assert not _read_after_free(recorded=True)
    with schedule("eager"):
        assert not _read_after_free(recorded=False)


@on_accelerators(1)
def test_events_know_the_time_between_them() -> None:
    first, last = (torch.accel.Event(enable_timing=True) for _ in range(2))  # type: ignore[attr-defined]
    first.record()
    x = at(1 << 20)
    x.mul_(2)
    last.record()
    assert not last.query()
    last.synchronize()
    assert last.query() and first.elapsed_time(last) > 0


@on_accelerators(1)
def test_the_allocator_says_what_it_holds_in_the_form_of_torch() -> None:
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    x = torch.empty(3 << 20, dtype=torch.uint8, device="accel")
    assert torch.accelerator.memory_allocated() - before == 3 << 20
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 3 << 20
    assert torch.accelerator.memory_reserved() >= 20 << 20
    torch.accelerator.empty_cache()
    snapshot = torch.accel.memory_snapshot()  # type: ignore[attr-defined]
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == before
    for segment in snapshot["segments"]:
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])


@on_accelerators(1)
def test_an_allocation_that_does_not_fit_raises_and_the_next_one_that_does_works() -> None:
    native().set_memory_limit(0, 64 << 20)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 128\.00 MiB"):
            torch.empty(128 << 20, dtype=torch.uint8, device="accel")
        torch.empty(8 << 20, dtype=torch.uint8, device="accel")
    finally:
        native().set_memory_limit(0, 1 << 40)
    native().fail_allocation_in(2)
    at(4)
    with pytest.raises(torch.OutOfMemoryError):
        at(4)
    at(4)


@on_accelerators(1)
def test_an_error_of_a_kernel_is_learned_late_and_stays() -> None:
    native().fail_kernel_in(1)
    x = at(4)  # fails, unseen
    try:
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            x.sum().item()
        with pytest.raises(torch.AcceleratorError):
            at(4)
    finally:
        native().forget_failure()


@on_accelerators(1)
def test_random_numbers_follow_from_seed_and_issue_and_not_from_the_schedule() -> None:
    drawn = []
    for mode, seed in SCHEDULES:
        with schedule(mode, seed):
            torch.manual_seed(3)
            x = torch.rand(4, device="accel")
            state = torch.accel.get_rng_state()  # type: ignore[attr-defined]
            y = F.dropout(at(64), 0.5)
            torch.accel.set_rng_state(state)  # type: ignore[attr-defined]
            assert torch.equal(F.dropout(at(64), 0.5), y)
            drawn.append((x.cpu(), y.cpu()))
    assert all(torch.equal(x, drawn[0][0]) and torch.equal(y, drawn[0][1]) for x, y in drawn)
    assert not torch.equal(torch.rand(4, device="accel").cpu(), drawn[0][0])


@on_accelerators(1)
def test_the_host_waits_where_sizes_follow_from_values() -> None:
    x = torch.tensor([0.0, 1.0, 2.0], device="accel")
    native().reset_host_waits()
    assert x[torch.tensor([2, 0], device="accel")].shape == (2,)
    assert native().host_waits() == {}
    assert x[x > 0].tolist() == [1.0, 2.0]
    native().reset_host_waits()
    assert x.nonzero().shape == (2, 1)
    assert native().host_waits() == {"nonzero": 1}


@on_accelerators(1)
def test_operands_of_two_devices_are_refused_at_the_call() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        at(3) + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        at(3) + torch.ones(3, device="accel:1")
    with pytest.raises(RuntimeError):
        at(3) @ at(4)
    assert (at(3) + torch.tensor(2.0)).tolist() == [3.0] * 3


class Recurrent(nn.Module):
    def __init__(self, cell: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = cell(6, 6, num_layers=2, batch_first=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


def models() -> dict[str, nn.Module]:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True, activation="gelu")
    conv = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv1d(8, 4, 3, padding=1))
    return {
        "mlp": nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 6)),
        "transformer": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        "convolutions": conv,
        "batch norm": nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)),
        "lstm": Recurrent(nn.LSTM),
        "gru": Recurrent(nn.GRU),
    }


def trained(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], lowered: torch.dtype | None) -> list[Tensor]:
    device = next(model.parameters()).device
    stepping = optimizer(model.parameters())
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(5)).to(device)
    for _ in range(3):
        with torch.autocast(device.type, dtype=lowered or torch.bfloat16, enabled=lowered is not None):
            loss = model(x).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepping.step()
        stepping.zero_grad()
    return [value.detach().cpu() for value in model.state_dict().values()]


# The epsilon is large so that a gradient of rounding noise (a key's bias under softmax) is not blown up to a whole step.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
}


@on_accelerators(1, name=tuple(models()), optimizer=("foreach", *slow("sgd", "fused")))
def test_training_gives_the_same_bits_under_every_schedule_and_the_cpus_numbers(name: str, optimizer: str) -> None:
    torch.manual_seed(1)
    model = models()[name]
    expected = trained(copy.deepcopy(model), OPTIMIZERS[optimizer], None)
    on_device = [trained_under(mode, seed, model, optimizer, None) for mode, seed in SCHEDULES]
    for found in on_device:
        assert all(torch.equal(a, b) for a, b in zip(found, on_device[0], strict=True))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert native().synchronous_operators().get("addmm") is None


def trained_under(mode: str, seed: int, model: nn.Module, optimizer: str, lowered: torch.dtype | None) -> list[Tensor]:
    with schedule(mode, seed):
        return trained(copy.deepcopy(model).to("accel"), OPTIMIZERS[optimizer], lowered)


@on_accelerators(1, name=("mlp", "transformer", "convolutions"))
def test_autocast_lowers_what_it_lowers_elsewhere(name: str) -> None:
    torch.manual_seed(1)
    model = models()[name]
    expected = trained(copy.deepcopy(model), OPTIMIZERS["sgd"], torch.bfloat16)
    found = trained_under("random", 2, model, "sgd", torch.bfloat16)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


@on_accelerators(1, dtype=(torch.bfloat16, torch.float16))
def test_models_in_half_types_train(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = models()["transformer"].to(dtype).to("accel")
    x = torch.randn(3, 4, 6).to("accel", dtype)
    loss = model(x).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())


def program(lines: str) -> subprocess.CompletedProcess[str]:
    text = f"from tests.accelerator.accel import load\nimport torch\naccel = load()\n{lines}"
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)


def test_a_host_that_touches_device_memory_is_told_so_and_ends(accelerators: object) -> None:
    done = program("import ctypes\nctypes.memset(torch.ones(4, device='accel').data_ptr(), 0, 4)")
    assert done.returncode < 0
    assert "accel: the host touched device memory at 0x" in done.stderr


@pytest.mark.slow
def test_a_process_that_has_another_backend_of_that_kind_says_so(accelerators: object) -> None:
    text = "import torch\ntorch.utils.rename_privateuse1_backend('other')\nfrom tests.accelerator.accel import load\nload()"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.stderr.splitlines()[-1].endswith(
        'this process has another PrivateUse1 backend, "other": give the accelerator a process of its own'
    )


def test_a_machine_without_a_compiler_says_what_is_missing(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.accelerator.build import CannotBuild, built

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CannotBuild, match=r"needs a C\+\+ compiler .* install g\+\+, or set CXX"):
        built()
