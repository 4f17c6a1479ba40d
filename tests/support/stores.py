"""A tiered store on real memory and a real file, and blocks in it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from offload.budget import Budget
from offload.device import open_device
from offload.disk import Bytes, DiskFile, SystemIo
from offload.memory import HostPool
from offload.store import Block, Store
from offload.tier import Tier


class Gated(SystemIo):
    """Writes wait until the gate opens; ``written`` counts those that were asked for after the file's first page."""

    def __init__(self) -> None:
        self.gate, self.written = threading.Event(), 0
        self.gate.set()

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        assert self.gate.wait(60)
        self.written += offset > 0
        return super().pwritev(fd, buffers, offset)


def open_store(
    folder: Path, addresses: bool | None = None, *, io: SystemIo | None = None, staging: int = 1 << 20, **limits: int
) -> Store:
    """A store of the CPU, whose file is in ``folder``; ``limits`` are its budget, by the tiers' names."""
    device = open_device(torch.device("cpu"), addresses_host=addresses)
    budget = Budget({Tier(name): limit for name, limit in limits.items()})
    return Store(device, HostPool(device), lambda: DiskFile(folder, io=io), budget, staging_nbytes=staging)


def filled(store: Store, key: str, numel: int, tier: Tier, value: float = 1.0) -> Block:
    """A block of fp32 numbers that all are ``value``, where it belongs and nothing under way."""
    block = store.put(key, numel, torch.float32, tier)
    store.change(block, torch.full((numel,), value), add=False)
    store.flush()
    return block
