"""A store on the virtual device, without a model: what tests give to it and take from it is checked for races."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload.budget import Budget
from offload.device import VirtualDevice, open_device
from offload.disk import VirtualDisk
from offload.memory import HostPool
from offload.store import Store
from offload.tier import Tier
from offload.virtual import Races
from tests.support.virtual import machine


@contextmanager
def store_on_virtual(limits: dict[Tier, int | None] | None = None, **costs: Any) -> Iterator[tuple[Store, Races]]:
    """A store over a machine of one rank, shut at the end, and what races in its use."""
    with machine(**costs) as made:
        races = Races()
        made.listeners.append(races)
        device = open_device(torch.device("virtual"))
        assert isinstance(device, VirtualDevice)
        budget = Budget(limits or {})
        host = HostPool(device, limit=budget.limit(Tier.HOST))
        store = Store(device, host, lambda: VirtualDisk(device.machine), budget, staging_nbytes=1 << 20)
        try:
            yield store, races
        finally:
            store.shut()
