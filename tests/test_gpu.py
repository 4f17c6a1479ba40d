"""What only a GPU can show: the same loop on CUDA, alone, through NCCL and over tiers, equals plain training there.

None of it has been run on a GPU yet; here it is collected, and skipped where there is none.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zhooks
from offload.budget import Budget
from offload.device import open_device
from offload.disk import DiskFile
from offload.memory import HostPool
from offload.store import Store
from offload.tier import Tier
from tests.support.inside import block_range_of, has_arrived, store_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; the CPU tests hold the same over Gloo"),
]


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), *(Block(32) for _ in range(3)), nn.Linear(32, 64)).cuda()


def train(under: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 64, (4, 16), generator=generator).cuda()
        loss = F.cross_entropy(under(x).flatten(0, 1).float(), x.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(under.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def nccl() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("nccl", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_training_on_a_gpu_equals_plain_training(stage: int) -> None:
    plain = model()
    attached = copy.deepcopy(plain)
    zhooks.attach(attached, policy={"stage": stage, "units": {"min_numel": 0}})
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert train(attached, torch.optim.AdamW(attached.parameters(), lr=1e-2)) == expected


def test_bf16_units_are_gathered_and_released_on_a_gpu() -> None:
    plain = model()
    attached = copy.deepcopy(plain)
    attachment = zhooks.attach(attached, policy={"precision": {"param": "bf16"}, "units": {"min_numel": 0}})
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    found = train(attached, torch.optim.AdamW(attached.parameters(), lr=1e-3))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert attachment.memory().transient["gathered units"] == 0


def test_an_attachment_over_nccl_trains(nccl: None) -> None:
    plain = model()
    attached = copy.deepcopy(plain)
    attachment = zhooks.attach(attached)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert train(attached, torch.optim.AdamW(attached.parameters(), lr=1e-2)) == expected
    attachment.detach()


# ---- over tiers ---------------------------------------------------------------------------------------------------------

AWAY = ("host", "disk")
STEPS = 5
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


def trained(policy: dict[str, Any], optimizer: str = "foreach", loop: Any = train) -> tuple[list[float], list[Tensor]]:
    """The losses, and the whole parameters afterwards."""
    under = model()
    attachment = zhooks.attach(under, policy=policy)
    losses = loop(under, OPTIMIZERS[optimizer](under), STEPS)
    values = list(attachment.state_dict()["model"].values())
    attachment.detach()
    assert all(type(param) is nn.Parameter and param.is_cuda for param in under.parameters())
    return losses, values


def same(one: tuple[list[float], list[Tensor]], other: tuple[list[float], list[Tensor]]) -> bool:
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def scaled(under: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """fp16 as users train it: a scaler, an overflow in the second step, clipping of unscaled gradients."""
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
    generator = torch.Generator().manual_seed(1)
    seen = []
    for number in range(steps):
        x = torch.randint(0, 64, (4, 16), generator=generator).cuda()
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


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("tier", AWAY)
def test_clipped_training_over_a_tier_has_the_bits_of_the_device(tier: str, optimizer: str, tmp_path: Path) -> None:
    wanted = trained(placed("device", tmp_path), optimizer)
    assert same(trained(placed(tier, tmp_path), optimizer), wanted)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("tier", AWAY)
def test_the_bits_are_the_same_at_every_prefetch_depth(tier: str, prefetch: int, tmp_path: Path) -> None:
    wanted = trained(placed("device", tmp_path))
    assert same(trained(placed(tier, tmp_path, schedule={"prefetch": prefetch})), wanted)


@pytest.mark.parametrize("tier", AWAY)
def test_bf16_copies_of_fp32_masters_train_as_on_the_device(tier: str, tmp_path: Path) -> None:
    precision = {"param": "bf16", "output": "fp32"}
    for optimizer in OPTIMIZERS:
        wanted = trained(placed("device", tmp_path, precision=precision), optimizer)
        assert same(trained(placed(tier, tmp_path, precision=precision), optimizer), wanted)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("tier", AWAY)
def test_a_grad_scaler_scales_unscales_and_skips_as_on_the_device(tier: str, optimizer: str, tmp_path: Path) -> None:
    precision = {"param": "fp16", "output": "fp32"}
    wanted = trained(placed("device", tmp_path, precision=precision), optimizer, scaled)
    assert same(trained(placed(tier, tmp_path, precision=precision), optimizer, scaled), wanted)


@pytest.mark.parametrize("kernel", ["torch", "numba"])
@pytest.mark.parametrize("param", ["fp32", "bf16"])
def test_updates_on_the_host_have_the_same_bits_on_host_and_disk(kernel: str, param: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"optimizer": {"compute": "host", "kernel": kernel}, "precision": {"param": param, "output": "fp32"}}
    for optimizer in OPTIMIZERS:
        host = trained(placed("host", tmp_path, **more), optimizer)
        assert same(trained(placed("disk", tmp_path, **more), optimizer), host)
        near = trained(placed("device", tmp_path, precision=more["precision"]), optimizer)
        torch.testing.assert_close(host[0], near[0], rtol=1e-3, atol=1e-3)


def test_numba_on_the_device_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(zhooks.CapabilityError, match='compute = "device"'):
        zhooks.attach(model(), policy=placed("host", tmp_path, optimizer={"kernel": "numba"}))


@pytest.mark.parametrize("checkpoint", ["none", "unit"])
@pytest.mark.parametrize("tier", AWAY)
def test_activations_that_leave_the_device_come_back_with_the_same_bits(tier: str, checkpoint: str, tmp_path: Path) -> None:
    wanted = trained(placed("device", tmp_path))
    activation = {"tier": tier, "checkpoint": checkpoint, "min_bytes": 64}
    assert same(trained(placed("device", tmp_path, activation=activation)), wanted)
    assert same(trained(placed("host", tmp_path, activation=activation)), wanted)


def evaluated(under: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """A forward between backward and step whose result is read only after the step: its gathers may still be on their way."""
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(steps):
        x = torch.randint(0, 64, (4, 16), generator=generator).cuda()
        F.cross_entropy(under(x).flatten(0, 1).float(), x.flatten()).backward()
        with torch.no_grad():
            # Work enough that the copies of this forward are queued behind it.
            busy = torch.randn(2048, 2048, device="cuda")
            for _ in range(20):
                busy = busy @ busy / 64
            late = under(x).float().square().mean()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(late.item())
    return seen


@pytest.mark.parametrize("kernel", ["torch", "numba"])
def test_an_update_on_the_host_never_overtakes_a_copy_of_the_old_values(kernel: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"optimizer": {"compute": "host", "kernel": kernel}}
    host, disk = (trained(placed(tier, tmp_path, **more), "fused", evaluated) for tier in AWAY)
    wanted = trained(placed("device", tmp_path), "fused", evaluated)
    assert host[0][0] == disk[0][0] == wanted[0][0]
    assert same(host, disk)
    torch.testing.assert_close(host[0], wanted[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tier", AWAY)
def test_parameters_say_cuda_while_their_ranges_lie_in_host_memory(tier: str, tmp_path: Path) -> None:
    under = model()
    attachment = zhooks.attach(under, policy=placed(tier, tmp_path))
    optimizer = OPTIMIZERS["foreach"](under)
    train(under, optimizer, 1)
    x = torch.randint(0, 64, (4, 16)).cuda()
    under(x).float().square().mean().backward()
    store_of(attachment).flush()
    for param in under.parameters():
        states = [state for state in optimizer.state[param].values() if state.dim()]
        for tensor in (param, param.grad, *states):
            assert isinstance(tensor, zhooks.ShardedTensor) and tensor.is_cuda and tensor.full_tensor().is_cuda
            assert tensor.to_local().device.type == "cpu"
    attachment.detach()


def test_what_rests_on_the_host_is_page_locked(tmp_path: Path) -> None:
    under = model()
    attachment = zhooks.attach(under, policy=placed("host", tmp_path))
    for param in under.parameters():
        at = block_range_of(param)
        assert at is not None and isinstance(at.block.stored, Tensor) and at.block.stored.is_pinned()
    attachment.detach()


def test_a_slab_of_the_pool_is_page_locked_until_it_is_closed() -> None:
    seam = open_device(torch.device("cuda"))
    pool = HostPool(seam)
    taken = pool.take(1 << 20, "a block")
    assert taken.is_pinned()
    pool.give(taken)
    pool.close()
    seam.close()
    assert not torch.empty(1 << 20, dtype=torch.uint8).is_pinned()


@pytest.mark.parametrize("tier", AWAY)
def test_device_memory_is_the_same_after_the_third_step_and_after_the_twentieth(tier: str, tmp_path: Path) -> None:
    under = model()
    activation = {"tier": "host", "min_bytes": 64}
    attachment = zhooks.attach(under, policy=placed(tier, tmp_path, activation=activation))
    optimizer = OPTIMIZERS["fused"](under)
    held, most = [], []
    for number in range(20):
        torch.cuda.reset_peak_memory_stats()
        train(under, optimizer, 1)
        store_of(attachment).flush()
        torch.cuda.synchronize()
        if number >= 2:
            held.append(torch.cuda.memory_allocated())
            most.append(torch.cuda.max_memory_allocated())
    assert max(held[1:]) <= held[0] and max(most[1:]) <= 1.05 * most[0]
    attachment.detach()


@pytest.mark.parametrize("tier", AWAY)
def test_training_under_a_stream_of_the_users_has_the_same_bits(tier: str, tmp_path: Path) -> None:
    wanted = trained(placed("device", tmp_path))
    activation = {"tier": tier, "min_bytes": 64}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = trained(placed(tier, tmp_path, activation=activation, schedule={"prefetch": 1}))
    side.synchronize()
    assert same(found, wanted)


def test_a_block_from_disk_reaches_the_device_while_the_stream_is_busy(tmp_path: Path) -> None:
    seam = open_device(torch.device("cuda"))
    host = HostPool(seam)
    store = Store(seam, host, lambda: DiskFile(tmp_path), Budget({}), staging_nbytes=64 << 20)
    block = store.put("layers.3", 1 << 20, torch.float32, Tier.DISK)
    store.change(block, torch.full((1 << 20,), 3.0, device="cuda"), add=False)
    store.flush()
    lease = store.fetch(block, Tier.DEVICE)
    torch.cuda._sleep(1 << 32)
    busy = torch.cuda.Event()
    busy.record()
    deadline = time.monotonic() + 60
    while not has_arrived(lease) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert has_arrived(lease) and not busy.query(), "the copy waited for what was queued after it was asked for"
    assert bool((lease.wait() == 3.0).all())
    store.close(block)
    store.shut()


@pytest.mark.parametrize("tier", AWAY)
def test_an_attachment_over_nccl_trains_over_tiers(tier: str, nccl: None, tmp_path: Path) -> None:
    wanted = trained(placed("device", tmp_path))
    assert same(trained(placed(tier, tmp_path)), wanted)


def test_a_graph_inside_a_forward_runs_on_the_device_thread_and_ends_no_pass(tmp_path: Path) -> None:
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
        under = Force().cuda()
        attachment = None if policy is None else zhooks.attach(under, policy=policy)
        optimizer, seen = OPTIMIZERS["foreach"](under), []
        for number in range(3):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number)).cuda()
            loss = under(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        if attachment is not None:
            attachment.detach()
        return seen

    assert losses(placed("host", tmp_path)) == losses(None)


@pytest.mark.parametrize("buffer", ["32 MiB", "8 KiB"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_branch_on_a_stream_of_its_own_has_the_gradients_of_plain_training(stage: int, buffer: str, nccl: None) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.side = Block(64), Block(64), torch.cuda.Stream()

        def forward(self, x: Tensor) -> Tensor:
            here = torch.cuda.current_stream()
            self.side.wait_stream(here)
            with torch.cuda.stream(self.side):
                torch.cuda._sleep(1 << 22)
                right = self.right(x)
            left = self.left(x)
            here.wait_stream(self.side)
            right.record_stream(here)
            return left + right

    def trained_on(policy: dict[str, Any] | None) -> list[Tensor]:
        torch.manual_seed(0)
        under = Branches().cuda()
        attachment = None if policy is None else zhooks.attach(under, policy=policy)
        optimizer = OPTIMIZERS["foreach"](under)
        for number in range(5):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).cuda()
            under(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if attachment is not None:
            attachment.detach()
        return [param.detach().clone() for param in under.parameters()]

    found = trained_on({"stage": stage, "units": {"min_numel": 0}, "comm": {"buffer": buffer}})
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, trained_on(None), strict=True))
