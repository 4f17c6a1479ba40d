"""What only streams can show: the same loop on a GPU, alone, through NCCL and over tiers, equals plain training there.

Every test runs on the asynchronous accelerator; on CUDA none of them has been run yet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zhooks
from offload.budget import Budget
from offload.device import open_device
from offload.disk import DiskFile
from offload.memory import HostPool
from offload.store import Store
from offload.tier import Tier
from tests.support.inside import await_arrival, block_range_of, store_of
from tests.support.on_gpus import group_of_one, keep_busy, module, on_gpus
from tests.support.on_ranks import folder
from tests.support.slow import slow


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), *(Block(32) for _ in range(3)), nn.Linear(32, 64)).to(device)


def train(under: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    device = next(under.parameters()).device
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 64, (4, 16), generator=generator).to(device)
        loss = F.cross_entropy(under(x).flatten(0, 1).float(), x.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(under.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_gpus(stage=(*slow(0, 1, 2), 3))
def test_fp32_training_on_a_gpu_equals_plain_training(device: str, stage: int) -> None:
    plain = model(device)
    attached = copy.deepcopy(plain)
    zhooks.attach(attached, policy={"stage": stage, "units": {"min_numel": 0}})
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert train(attached, torch.optim.AdamW(attached.parameters(), lr=1e-2)) == expected


@on_gpus()
def test_bf16_units_are_gathered_and_released_on_a_gpu(device: str) -> None:
    plain = model(device)
    attached = copy.deepcopy(plain)
    attachment = zhooks.attach(attached, policy={"precision": {"param": "bf16"}, "units": {"min_numel": 0}})
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    found = train(attached, torch.optim.AdamW(attached.parameters(), lr=1e-3))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert attachment.memory().transient["gathered units"] == 0


@on_gpus()
def test_an_attachment_over_nccl_trains(device: str) -> None:
    with group_of_one(device):
        plain = model(device)
        attached = copy.deepcopy(plain)
        attachment = zhooks.attach(attached)
        expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
        assert train(attached, torch.optim.AdamW(attached.parameters(), lr=1e-2)) == expected
        attachment.detach()


# ---- over tiers ---------------------------------------------------------------------------------------------------------

TIERS = ("host", "disk")
AWAY = ("host", *slow("disk"))
STEPS = 5
#: The losses, and the whole parameters afterwards.
Trained = tuple[list[float], list[Tensor]]
Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "foreach": lambda under: torch.optim.AdamW(under.parameters(), lr=1e-2, foreach=True),
    "fused": lambda under: torch.optim.AdamW(under.parameters(), lr=1e-2, fused=True),
    "sgd": lambda under: torch.optim.SGD(under.parameters(), lr=1e-2, momentum=0.9),
}


def placed(tier: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Parameters, gradients and optimizer on one tier, every module its own unit."""
    cells: dict[str, Any] = {cell: {"tier": tier} for cell in ("parameter", "gradient", "optimizer")}
    cells["optimizer"] |= more.pop("optimizer", {})
    return {"units": {"min_numel": 0}, "disk": {"path": str(folder)}, **cells, **more}


def trained(device: str, policy: dict[str, Any], optimizer: str = "foreach", loop: Any = train) -> Trained:
    under = model(device)
    attachment = zhooks.attach(under, policy=policy)
    losses = loop(under, OPTIMIZERS[optimizer](under), STEPS)
    values = list(attachment.state_dict()["model"].values())
    attachment.detach()
    assert all(type(param) is nn.Parameter and param.device.type == device for param in under.parameters())
    return losses, values


def same(one: Trained, other: Trained) -> bool:
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def scaled(under: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """fp16 as users train it: a scaler, an overflow in the second step, clipping of unscaled gradients."""
    device = next(under.parameters()).device
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12)
    generator = torch.Generator().manual_seed(1)
    seen = []
    for number in range(steps):
        x = torch.randint(0, 64, (4, 16), generator=generator).to(device)
        loss = F.cross_entropy(under(x).flatten(0, 1).float(), x.flatten())
        scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
        if number != 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(under.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [loss.item(), scaler.get_scale()]
    return seen


@on_gpus(optimizer=("foreach", *slow("fused", "sgd")), tier=AWAY)
def test_clipped_training_over_a_tier_has_the_bits_of_the_device(device: str, tier: str, optimizer: str) -> None:
    with folder() as path:
        wanted = trained(device, placed("device", path), optimizer)
        assert same(trained(device, placed(tier, path), optimizer), wanted)


@on_gpus(prefetch=(1, *slow(0, 4)), tier=AWAY)
def test_the_bits_are_the_same_at_every_prefetch_depth(device: str, tier: str, prefetch: int) -> None:
    with folder() as path:
        wanted = trained(device, placed("device", path))
        assert same(trained(device, placed(tier, path, schedule={"prefetch": prefetch})), wanted)


@on_gpus(optimizer=(*slow("foreach"), "fused", *slow("sgd")), tier=AWAY)
def test_bf16_copies_of_fp32_masters_train_as_on_the_device(device: str, tier: str, optimizer: str) -> None:
    with folder() as path:
        precision = {"param": "bf16", "output": "fp32"}
        wanted = trained(device, placed("device", path, precision=precision), optimizer)
        assert same(trained(device, placed(tier, path, precision=precision), optimizer), wanted)


@on_gpus(optimizer=("foreach", *slow("fused", "sgd")), tier=AWAY)
def test_a_grad_scaler_scales_unscales_and_skips_as_on_the_device(device: str, tier: str, optimizer: str) -> None:
    with folder() as path:
        precision = {"param": "fp16", "output": "fp32"}
        wanted = trained(device, placed("device", path, precision=precision), optimizer, scaled)
        assert same(trained(device, placed(tier, path, precision=precision), optimizer, scaled), wanted)


@on_gpus(kernel=(*slow("torch"), "numba"), param=("fp32", *slow("bf16")), optimizer=(*slow("foreach", "fused"), "sgd"))
def test_updates_on_the_host_have_the_same_bits_on_host_and_disk(
    device: str, kernel: str, param: str, optimizer: str
) -> None:
    with folder() as path:
        precision = {"param": param, "output": "fp32"}
        more: dict[str, Any] = {"optimizer": {"compute": "host", "kernel": kernel}, "precision": precision}
        host = trained(device, placed("host", path, **more), optimizer)
        assert same(trained(device, placed("disk", path, **more), optimizer), host)
        near = trained(device, placed("device", path, precision=precision), optimizer)
        torch.testing.assert_close(host[0], near[0], rtol=1e-3, atol=1e-3)


@on_gpus()
def test_numba_on_the_device_is_refused_by_name(device: str) -> None:
    with folder() as path, pytest.raises(zhooks.CapabilityError, match='compute = "device"'):
        zhooks.attach(model(device), policy=placed("host", path, optimizer={"kernel": "numba"}))


@on_gpus(checkpoint=("unit", *slow("none")), tier=AWAY)
def test_activations_that_leave_the_device_come_back_with_the_same_bits(device: str, tier: str, checkpoint: str) -> None:
    with folder() as path:
        wanted = trained(device, placed("device", path))
        activation = {"tier": tier, "checkpoint": checkpoint, "min_bytes": 64}
        assert same(trained(device, placed("device", path, activation=activation)), wanted)
        assert same(trained(device, placed("host", path, activation=activation)), wanted)


def evaluated(under: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """A forward between backward and step whose result is read only after the step: its gathers may still be on their way."""
    device = next(under.parameters()).device
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(steps):
        x = torch.randint(0, 64, (4, 16), generator=generator).to(device)
        F.cross_entropy(under(x).flatten(0, 1).float(), x.flatten()).backward()
        with torch.no_grad():
            # The copies of this forward are queued behind it.
            keep_busy(device.type, cycles=1 << 27)
            late = under(x).float().square().mean()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(late.item())
    return seen


@on_gpus(kernel=(*slow("torch"), "numba"))
def test_an_update_on_the_host_never_overtakes_a_copy_of_the_old_values(device: str, kernel: str) -> None:
    with folder() as path:
        more: dict[str, Any] = {"optimizer": {"compute": "host", "kernel": kernel}}
        host, disk = (trained(device, placed(tier, path, **more), "fused", evaluated) for tier in TIERS)
        wanted = trained(device, placed("device", path), "fused", evaluated)
        assert host[0][0] == disk[0][0] == wanted[0][0]
        assert same(host, disk)
        torch.testing.assert_close(host[0], wanted[0], rtol=1e-3, atol=1e-3)


@on_gpus(tier=AWAY)
def test_parameters_say_the_device_while_their_ranges_lie_in_host_memory(device: str, tier: str) -> None:
    with folder() as path:
        under = model(device)
        attachment = zhooks.attach(under, policy=placed(tier, path))
        optimizer = OPTIMIZERS["foreach"](under)
        train(under, optimizer, 1)
        x = torch.randint(0, 64, (4, 16)).to(device)
        under(x).float().square().mean().backward()
        store_of(attachment).flush()
        for param in under.parameters():
            states = [state for state in optimizer.state[param].values() if state.dim()]
            for tensor in (param, param.grad, *states):
                assert isinstance(tensor, zhooks.ShardedTensor)
                assert tensor.device.type == tensor.full_tensor().device.type == device
                assert tensor.to_local().device.type == "cpu"
        attachment.detach()


@on_gpus()
def test_what_rests_on_the_host_is_page_locked(device: str) -> None:
    with folder() as path:
        under = model(device)
        attachment = zhooks.attach(under, policy=placed("host", path))
        for param in under.parameters():
            at = block_range_of(param)
            assert at is not None and isinstance(at.block.stored, Tensor) and at.block.stored.is_pinned()
        attachment.detach()


@on_gpus()
def test_a_slab_of_the_pool_is_page_locked_until_it_is_closed(device: str) -> None:
    seam = open_device(torch.device(device))
    pool = HostPool(seam)
    taken = pool.take(1 << 20, "a block")
    assert taken.is_pinned()
    pool.give(taken)
    pool.close()
    seam.close()
    assert not torch.empty(1 << 20, dtype=torch.uint8).is_pinned()


@on_gpus(tier=AWAY)
def test_device_memory_is_the_same_after_the_third_step_and_after_the_twentieth(device: str, tier: str) -> None:
    with folder() as path:
        under = model(device)
        activation = {"tier": "host", "min_bytes": 64}
        attachment = zhooks.attach(under, policy=placed(tier, path, activation=activation))
        optimizer = OPTIMIZERS["fused"](under)
        held, most = [], []
        for number in range(20):
            module(device).reset_peak_memory_stats()
            train(under, optimizer, 1)
            store_of(attachment).flush()
            module(device).synchronize()
            if number >= 2:
                held.append(module(device).memory_allocated())
                most.append(module(device).max_memory_allocated())
        if device == "cuda":
            assert max(held[1:]) <= held[0] and max(most[1:]) <= 1.05 * most[0]
        else:
            # What is noticed as copied, and so freed, depends on when a late accelerator is waited for: only growth shows.
            assert min(held[-6:]) <= min(held[:6]) and min(most[-6:]) <= 1.05 * max(most[:6])
        attachment.detach()


@on_gpus(tier=AWAY)
def test_training_under_a_stream_of_the_users_has_the_same_bits(device: str, tier: str) -> None:
    with folder() as path:
        wanted = trained(device, placed("device", path))
        activation = {"tier": tier, "min_bytes": 64}
        side = module(device).Stream()
        side.wait_stream(module(device).current_stream())
        with module(device).stream(side):
            found = trained(device, placed(tier, path, activation=activation, schedule={"prefetch": 1}))
        side.synchronize()
        assert same(found, wanted)


@on_gpus()
def test_a_block_from_disk_reaches_the_device_while_the_stream_is_busy(device: str) -> None:
    with folder() as path:
        seam = open_device(torch.device(device))
        host = HostPool(seam)
        store = Store(seam, host, lambda: DiskFile(path), Budget({}), staging_nbytes=64 << 20)
        block = store.put("layers.3", 1 << 20, torch.float32, Tier.DISK)
        store.change(block, torch.full((1 << 20,), 3.0, device=device), add=False)
        store.flush()
        lease = store.fetch(block, Tier.DEVICE)
        keep_busy(device, cycles=1 << 32)
        busy = module(device).Event()
        busy.record()
        await_arrival(lease)
        assert not busy.query(), "the copy waited for what was queued after it was asked for"
        assert bool((lease.wait() == 3.0).all())
        store.close(block)
        store.shut()


@on_gpus(tier=AWAY)
def test_an_attachment_over_nccl_trains_over_tiers(device: str, tier: str) -> None:
    with folder() as path, group_of_one(device):
        wanted = trained(device, placed("device", path))
        assert same(trained(device, placed(tier, path)), wanted)


@on_gpus()
def test_a_graph_inside_a_forward_runs_on_the_device_thread_and_ends_no_pass(device: str) -> None:
    with folder() as path:
        class Force(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.out = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 32)), nn.Linear(32, 1)

            def forward(self, x: Tensor) -> Tensor:
                x = x.detach().requires_grad_(True)
                (force,) = torch.autograd.grad(self.out(self.inner(x)).sum(), x)
                return self.out(self.inner(x)).square().mean() + force.square().mean()

        def losses(policy: dict[str, Any] | None) -> list[float]:
            torch.manual_seed(0)
            under = Force().to(device)
            attachment = None if policy is None else zhooks.attach(under, policy=policy)
            optimizer, seen = OPTIMIZERS["foreach"](under), []
            for number in range(3):
                x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number)).to(device)
                loss = under(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            if attachment is not None:
                attachment.detach()
            return seen

        assert losses(placed("host", path)) == losses(None)


@on_gpus(buffer=(*slow("32 MiB"), "8 KiB"), stage=(*slow(0), 3))
def test_a_branch_on_a_stream_of_its_own_has_the_gradients_of_plain_training(device: str, stage: int, buffer: str) -> None:
    with group_of_one(device):
        class Branches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.left, self.right, self.side = Block(64), Block(64), module(device).Stream()

            def forward(self, x: Tensor) -> Tensor:
                here = module(device).current_stream()
                self.side.wait_stream(here)
                with module(device).stream(self.side):
                    keep_busy(device, cycles=1 << 22)
                    right = self.right(x)
                left = self.left(x)
                here.wait_stream(self.side)
                right.record_stream(here)
                return left + right

        def trained_on(policy: dict[str, Any] | None) -> list[Tensor]:
            torch.manual_seed(0)
            under = Branches().to(device)
            attachment = None if policy is None else zhooks.attach(under, policy=policy)
            optimizer = OPTIMIZERS["foreach"](under)
            for number in range(5):
                x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).to(device)
                under(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if attachment is not None:
                attachment.detach()
            return [param.detach().clone() for param in under.parameters()]

        found = trained_on({"stage": stage, "units": {"min_numel": 0}, "comm": {"buffer": buffer}})
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, trained_on(None), strict=True))
