"""The stash: what is copied, how often, when memory is free again, and what happens when a tier fails.

pytest runs it on real pools: a host pool, a scratch file in a temporary folder, a CPU device with and without forced copies.
It never uses a model: tests/zhooks/activation/test_activation.py does.
"""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from offload.budget import Budget
from offload.device import Device, open_device
from offload.disk import DiskFile, SystemIo
from offload.errors import BudgetError, TierError
from offload.events import Bus, Recorder
from offload.memory import HostPool
from offload.stash import Limits, Stash
from offload.tier import Tier
from tests.support.waiting import soon

KIB = 1 << 10
ALL = Limits(min_nbytes=0)


@dataclass
class Pools:
    device: Device
    host: HostPool
    disk: DiskFile
    budget: Budget


class Failing(SystemIo):
    """The system's calls, until it is set that the disk is broken or full."""

    def __init__(self) -> None:
        self.error: int | None = None

    def pwritev(self, fd: int, buffers: object, offset: int) -> int:
        self._check()
        return super().pwritev(fd, buffers, offset)  # type: ignore[arg-type]

    def preadv(self, fd: int, buffers: object, offset: int) -> int:
        self._check()
        return super().preadv(fd, buffers, offset)  # type: ignore[arg-type]

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._check()
        super().fallocate(fd, offset, nbytes)

    def _check(self) -> None:
        if self.error is not None:
            raise OSError(self.error, "injected")


Open = Callable[..., tuple[Stash, Pools]]


@pytest.fixture
def io() -> Failing:
    return Failing()


@pytest.fixture
def stash_of(tmp_path: Path, io: Failing) -> Iterator[Open]:
    """``stash_of(tier, copies=..., limits=..., host=..., disk=...)`` is a stash and the pools it stands on."""
    opened: list[Pools] = []

    def make(
        tier: Tier, *, copies: bool = False, limits: Limits = ALL, host: int | None = None, bus: Bus | None = None
    ) -> tuple[Stash, Pools]:
        device = open_device(torch.device("cpu"), addresses_host=not copies)
        pools = Pools(device, HostPool(device), DiskFile(tmp_path, io=io), Budget({Tier.HOST: host}))
        opened.append(pools)
        return Stash(pools, tier, limits, bus or Bus()), pools

    yield make
    io.error = None
    for pools in opened:
        pools.disk.close()
        pools.device.close()
        pools.host.close()


EVERY = pytest.mark.parametrize(
    ("tier", "copies"),
    [(Tier.HOST, False), (Tier.HOST, True), (Tier.DISK, False), (Tier.DISK, True)],
    ids=["host", "host-copied", "disk", "disk-copied"],
)


def taken(stash: Stash, pools: Pools) -> int:
    """Bytes of host and disk that are in use once everything has ended."""
    gc.collect()

    def nothing() -> bool:
        stash.flush()
        return pools.host.used + pools.disk.used == 0

    # A worker may refer to what it has moved for a moment after it said so.
    soon(nothing)
    return pools.host.used + pools.disk.used


@EVERY
def test_what_is_opened_is_what_was_put(stash_of: Open, tier: Tier, copies: bool) -> None:
    stash, pools = stash_of(tier, copies=copies)
    tensors = [
        torch.randn(300, 70),
        torch.randn(64, 96).t(),
        torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last),
        torch.randn(50, 40)[3:17, 5:],
        torch.randn(30).expand(20, 30),
        torch.randint(1000, (77,)),
        torch.randn(33).bfloat16()[1:],
        torch.tensor(3.5),
        torch.randn(9, dtype=torch.complex128),
    ]
    wanted = [tensor.clone() for tensor in tensors]
    saved = [stash.put(tensor) for tensor in tensors]
    geometry = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
    tensors.clear()
    for one, values, form in reversed(list(zip(saved, wanted, geometry, strict=True))):
        assert one is not None
        found = stash.open(one)
        assert (found.shape, found.stride(), found.dtype) == form
        assert torch.equal(found, values)
        del found
    saved.clear()
    del one
    assert taken(stash, pools) == 0


@EVERY
def test_the_originals_memory_is_free_once_the_copy_is_made(stash_of: Open, tier: Tier, copies: bool) -> None:
    stash, _ = stash_of(tier, copies=copies)
    original = torch.randn(1 << 16)
    storage = torch.multiprocessing.reductions.StorageWeakRef(original.untyped_storage())
    saved = stash.put(original)
    del original
    stash.flush()
    # A worker lets go of one copy when it takes up the next.
    other = stash.put(torch.randn(1 << 16))
    stash.flush()
    assert saved is not None
    assert other is not None
    assert storage.expired()


def test_views_of_one_storage_share_a_copy(stash_of: Open) -> None:
    stash, pools = stash_of(Tier.HOST)
    qkv = torch.randn(8, 16, 96)
    parts = qkv.chunk(3, dim=-1)
    saved = [stash.put(part.unflatten(-1, (4, 8)).transpose(1, 2)) for part in parts]
    assert len({id(one.copy) for one in saved if one is not None}) == 1
    stash.flush()
    assert pools.budget.used(Tier.HOST) == qkv.nbytes
    for one, part in zip(saved, parts, strict=True):
        assert one is not None
        assert torch.equal(stash.open(one), part.unflatten(-1, (4, 8)).transpose(1, 2))


def test_a_small_view_of_a_large_storage_copies_its_own_extent(stash_of: Open) -> None:
    stash, pools = stash_of(Tier.HOST)
    saved = stash.put(torch.randn(1 << 20)[1000:1064])
    stash.flush()
    assert saved is not None
    assert 64 * 4 <= pools.budget.used(Tier.HOST) < 64 * 4 + 64


def test_the_same_tensor_is_copied_once_and_a_changed_one_again(stash_of: Open) -> None:
    stash, _ = stash_of(Tier.HOST)
    tensor = torch.zeros(100)
    first, again = stash.put(tensor), stash.put(tensor)
    tensor.add_(1)
    changed = stash.put(tensor)
    assert first is not None
    assert again is not None
    assert changed is not None
    assert first.copy is again.copy is not changed.copy
    assert torch.equal(stash.open(changed), torch.ones(100))


def test_a_new_tensor_at_an_old_address_is_not_taken_for_the_old_one(stash_of: Open) -> None:
    stash, _ = stash_of(Tier.HOST)
    kept = []
    for value in range(50):
        tensor = torch.full((1000,), float(value))
        kept.append((value, stash.put(tensor)))
        del tensor
    for value, saved in kept:
        assert saved is not None
        assert torch.equal(stash.open(saved), torch.full((1000,), float(value)))


def test_small_extents_are_not_worth_a_transfer(stash_of: Open) -> None:
    stash, _ = stash_of(Tier.HOST, limits=Limits(min_nbytes=4 * KIB))
    assert stash.put(torch.zeros(KIB - 1)) is None
    assert stash.put(torch.zeros(KIB)) is not None


@EVERY
def test_the_last_bytes_stay_where_they_are(stash_of: Open, tier: Tier, copies: bool) -> None:
    stash, pools = stash_of(tier, copies=copies, limits=Limits(min_nbytes=0, keep_nbytes=8 * KIB))
    tensors = [torch.randn(KIB) for _ in range(5)]
    saved = [stash.put(tensor) for tensor in tensors]
    away = stash.flush()
    assert away == 3 * 4 * KIB
    for one, tensor in zip(saved, tensors, strict=True):
        assert one is not None
        found = stash.open(one)
        assert torch.equal(found, tensor)
        assert (found.data_ptr() == tensor.data_ptr()) == (one in saved[3:])
        del found
    saved.clear()
    del one
    assert taken(stash, pools) == 0


def test_dropped_before_it_left_is_never_copied(stash_of: Open) -> None:
    stash, pools = stash_of(Tier.HOST, limits=Limits(min_nbytes=0, keep_nbytes=8 * KIB))
    for _ in range(20):
        assert stash.put(torch.randn(KIB)) is not None
    assert pools.host.high_water == 0


@EVERY
def test_it_may_be_opened_many_times(stash_of: Open, tier: Tier, copies: bool) -> None:
    stash, pools = stash_of(tier, copies=copies)
    tensor = torch.randn(5000)
    saved = stash.put(tensor)
    assert saved is not None
    for _ in range(3):
        assert torch.equal(stash.open(saved), tensor)
    del saved
    assert taken(stash, pools) == 0


@EVERY
def test_memory_somebody_still_looks_at_is_not_used_again(stash_of: Open, tier: Tier, copies: bool) -> None:
    stash, _ = stash_of(tier, copies=copies)
    tensor = torch.randn(5000)
    saved = stash.put(tensor)
    assert saved is not None
    held = stash.open(saved)
    del saved
    others = [stash.put(torch.full((5000,), float(value))) for value in range(4)]
    opened = [stash.open(other) for other in others if other is not None]
    assert torch.equal(held, tensor)
    assert len(opened) == 4


def test_steps_use_the_same_host_memory_again(stash_of: Open) -> None:
    stash, pools = stash_of(Tier.HOST)
    for _ in range(5):
        saved = [stash.put(torch.randn(10 * KIB)) for _ in range(10)]
        for one in reversed(saved):
            assert one is not None
            stash.open(one)
        saved.clear()
        del one
    assert pools.host.high_water <= 11 * 40 * KIB


def test_what_comes_next_is_fetched_ahead_within_the_window(stash_of: Open) -> None:
    recorder = Recorder()
    bus = Bus()
    bus.attach(recorder)
    stash, _ = stash_of(Tier.DISK, limits=Limits(min_nbytes=0, window_nbytes=3 * 4 * KIB), bus=bus)
    saved = [stash.put(torch.full((KIB,), float(value))) for value in range(8)]
    stash.flush()
    last = saved[-1]
    assert last is not None
    stash.open(last)
    ahead = [one.copy.back is not None for one in saved[:-1] if one is not None]
    assert ahead == [False] * 4 + [True] * 3
    for place in reversed(range(8)):
        one = saved.pop()
        assert one is not None
        assert float(stash.open(one)[0]) == place
    assert len(recorder.spans("stash")) == 8
    assert len(recorder.spans("unstash")) == 9


def test_a_full_budget_names_the_keys_that_help_and_leaves_the_stash_usable(stash_of: Open) -> None:
    stash, pools = stash_of(Tier.HOST, host=12 * KIB)
    held = [stash.put(torch.randn(KIB)) for _ in range(3)]
    with pytest.raises(BudgetError, match=r"host.*\[activation\] keep"):
        stash.put(torch.randn(KIB))
    held.clear()
    assert taken(stash, pools) == 0
    assert stash.put(torch.randn(KIB)) is not None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_while_putting_is_raised_in_the_same_forward(stash_of: Open, io: Failing, code: int) -> None:
    stash, pools = stash_of(Tier.DISK, limits=Limits(min_nbytes=0, window_nbytes=16 * KIB))
    held = [stash.put(torch.randn(KIB))]
    io.error = code
    with pytest.raises((TierError, BudgetError), match="activation"):
        for _ in range(20):
            held.append(stash.put(torch.randn(KIB)))
    io.error = None
    held.clear()
    assert taken(stash, pools) == 0
    tensor = torch.randn(KIB)
    saved = stash.put(tensor)
    assert saved is not None
    assert torch.equal(stash.open(saved), tensor)


def test_a_disk_that_fails_while_opening_names_the_value_and_may_recover(stash_of: Open, io: Failing) -> None:
    stash, pools = stash_of(Tier.DISK)
    tensor = torch.randn(KIB)
    saved = stash.put(tensor)
    stash.flush()
    assert saved is not None
    io.error = errno.EIO
    with pytest.raises(TierError, match="model activation 0"):
        stash.open(saved)
    io.error = None
    assert torch.equal(stash.open(saved), tensor)
    del saved
    assert taken(stash, pools) == 0


def test_altered_bytes_are_never_handed_out(stash_of: Open) -> None:
    stash, pools = stash_of(Tier.DISK)
    saved = stash.put(torch.randn(KIB))
    stash.flush()
    assert saved is not None
    with pools.disk.path.open("r+b") as file:
        content = np.fromfile(file, np.uint8)
        content[4096:] ^= 1
        file.seek(4096)
        file.write(content[4096:].tobytes())
    with pytest.raises(TierError, match="model activation 0"):
        stash.open(saved)


def test_a_copy_does_not_outlive_its_readers(stash_of: Open) -> None:
    stash, _ = stash_of(Tier.HOST)
    saved = stash.put(torch.randn(KIB))
    assert saved is not None
    copy = weakref.ref(saved.copy)
    del saved
    assert copy() is None


def test_the_probe_sees_every_write_and_holds_no_memory(stash_of: Open) -> None:
    stash, _ = stash_of(Tier.HOST)
    tensor: Tensor = torch.randn(KIB)
    saved = stash.put(tensor[10:])
    assert saved is not None
    assert saved.probe._version == saved.version
    tensor.view(2, -1)[0].zero_()
    assert saved.probe._version == saved.version + 1
    assert saved.probe.untyped_storage().nbytes() == 0
