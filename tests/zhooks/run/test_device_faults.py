"""What an attachment says and leaves when its device fails: no memory, a kernel that faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from tests.support.on_ranks import folder, hooks_left, on_accelerators, place
from tests.support.schedules import native


def model() -> nn.Module:
    torch.manual_seed(0)
    device = f"accel:{native().current_device()}"
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(device)


def attached(under: nn.Module, **policy: Any) -> Any:
    return zhooks.attach(under, policy={"units": {"classes": ["Linear"], "min_numel": 0}, **policy})


def step(under: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    device = next(under.parameters()).device
    under(torch.ones(2, 16, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def fault(name: str, number: int) -> Iterator[None]:
    getattr(native(), name)(number)
    try:
        yield
    finally:
        getattr(native(), name)(0)


@on_accelerators(1, number=(1, 2, 3, 5))
def test_an_allocation_that_fails_in_attach_leaves_the_model_as_it_was(number: int) -> None:
    under = model()
    values = [param.detach().clone() for param in under.parameters()]
    try:
        with fault("fail_allocation_in", number):
            attachment = attached(under)
    except torch.OutOfMemoryError:
        assert not hooks_left(under)
    else:
        attachment.detach()
    assert all(type(param) is nn.Parameter for param in under.parameters())
    assert all(torch.equal(param, value) for param, value in zip(under.parameters(), values, strict=True))


@on_accelerators(1, number=(1, 2, 4, 8, 12))
def test_an_allocation_that_fails_in_a_step_is_torchs_error_and_the_attachment_can_be_detached(number: int) -> None:
    under = model()
    attachment = attached(under)
    optimizer = torch.optim.AdamW(under.parameters(), lr=1e-3)
    step(under, optimizer)
    with pytest.raises(torch.OutOfMemoryError), fault("fail_allocation_in", number):
        for _ in range(8):
            step(under, optimizer)
    attachment.detach()
    assert not hooks_left(under)
    assert all(type(param) is nn.Parameter for param in under.parameters())
    under(torch.ones(2, 16, device=next(under.parameters()).device)).sum().item()


@on_accelerators(1)
def test_a_kernel_that_faults_is_an_error_where_the_host_next_waits() -> None:
    under = model()
    attached(under)
    optimizer = torch.optim.AdamW(under.parameters(), lr=1e-3)
    step(under, optimizer)
    try:
        with pytest.raises(RuntimeError, match="illegal memory access"), fault("fail_kernel_in", 4):
            step(under, optimizer)
            torch.accelerator.synchronize()
        # Like CUDA's, the fault stays; nothing hangs.
        with pytest.raises(RuntimeError, match="illegal memory access"):
            step(under, optimizer)
    finally:
        native().forget_failure()


def hangs_in(number: int) -> Any:
    """The rank's collective of this number never completes, on rank 0; the other waits for it."""
    return fault("hang_collective_in", number if place()[0] == 0 else 0)


@pytest.mark.slow
@on_accelerators(2, number=(5, 1))
def test_a_collective_that_never_completes_is_an_error_of_training_on_every_rank(number: int) -> None:
    under = model()
    attached(under, comm={"timeout_s": 6})
    optimizer = torch.optim.AdamW(under.parameters(), lr=1e-3)
    step(under, optimizer)
    torch.accelerator.synchronize()
    called = "gather 0" if number == 1 else "reduce 2"
    said = f"{called}, axis shard; the backend said: .* did not end"
    with pytest.raises(zhooks.DivergenceError, match=said), hangs_in(number):
        step(under, optimizer)
        # As with NCCL, the host does not wait for a collective, and learns of it when it makes the next one.
        torch.accelerator.synchronize()
        step(under, optimizer)


@on_accelerators(2)
def test_nothing_is_saved_after_a_collective_that_never_completed() -> None:
    under = model()
    attachment = attached(under, comm={"timeout_s": 6})
    optimizer = torch.optim.AdamW(under.parameters(), lr=1e-3)
    step(under, optimizer)
    torch.accelerator.synchronize()
    with folder() as at:
        with pytest.raises(zhooks.DivergenceError, match="did not complete"), hangs_in(5):
            step(under, optimizer)
            attachment.save(at / "run")
        assert not (at / "run").exists()


# Collectives that have no counterpart end by their limit, one after the other.
@pytest.mark.slow
@on_accelerators(2)
def test_nothing_is_saved_after_ranks_gathered_other_units() -> None:
    rank, _ = place()
    under = model()
    attachment = attached(under, schedule={"prefetch": 0}, comm={"timeout_s": 6})
    optimizer = torch.optim.AdamW(under.parameters(), lr=1e-3)
    for _ in range(2):
        step(under, optimizer)
    x = torch.ones(2, 16, device=next(under.parameters()).device)
    for layer in (0, 1, 2, 0) if rank else (0, 1, 2, 1):
        x = under.get_submodule(str(layer))(x)
    x.square().mean().backward()
    with pytest.raises(zhooks.DivergenceError, match="Expected every rank to gather the same units"):
        attachment.state_dict()
