"""The one way tests look inside packages that they do not test: one function for each thing that users cannot see.

What users can see comes first: ``attachment.memory()``, ``describe()``, ``payload()``, events, ``to_local()``, files. The tests
of a package use what is private to it as they like (`tests/source_rules.py` holds both). Nothing here is changed but by a
function that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import zhooks
from offload import events
from offload.disk import DiskFile
from offload.policy import Policy
from offload.shards import commit as shard_commit
from offload.shards import manifest as shard_manifest
from offload.store import BlockRange, Store
from zhooks.comm import Comm
from zhooks.layout import UnitPlan
from zhooks.optim import Stepper
from zhooks.run import Runtime
from zhooks.unit import Flat, Pool, Unit

# ---- of an attachment


def units_of(attachment: zhooks.Attachment) -> list[Unit]:
    return attachment.session.units


def plans_of(attachment: zhooks.Attachment) -> list[UnitPlan]:
    """How its units are laid out."""
    return attachment.session.plans()


def flats_of(attachment: zhooks.Attachment) -> list[Flat]:
    return [flat for unit in units_of(attachment) for flat in unit.flats]


def runtime_of(attachment: zhooks.Attachment) -> Runtime:
    return attachment.session.runtime


def pool_of(attachment: zhooks.Attachment) -> Pool:
    return attachment.session.pool


def comm_of(attachment: zhooks.Attachment) -> Comm:
    return attachment.session.comm


def store_of(attachment: zhooks.Attachment) -> Store:
    """The store of an attachment whose policy names another tier than the device."""
    store = attachment.session.tiers.store
    assert store is not None, "everything is on the device"
    return store


def has_store(attachment: zhooks.Attachment) -> bool:
    return attachment.session.tiers.store is not None


def stepper_of(attachment: zhooks.Attachment) -> Stepper | None:
    return attachment.session.stepper


def is_heard(attachment: zhooks.Attachment) -> bool:
    """Whether any observer is told of this attachment's events."""
    return attachment.session.bus.active


def tiers_changed(attachment: zhooks.Attachment, policy: Policy, device: torch.device) -> None:
    """What ``apply`` does first, on another device than the one the attachment is on."""
    session = attachment.session
    session.tiers.change(policy, device, session.plans(), session.comm, session.bus)


# ---- of a sharded tensor


def block_range_of(tensor: Tensor) -> BlockRange | None:
    """Where the store keeps the local range; None of a range in plain device memory."""
    assert isinstance(tensor, zhooks.ShardedTensor)
    return tensor.local_shard.memory if isinstance(tensor.local_shard.memory, BlockRange) else None


def tier_of(tensor: Tensor) -> str:
    at = block_range_of(tensor)
    return "device" if at is None else at.block.tier.value


def memory_of(tensor: Tensor) -> Tensor | BlockRange:
    """The memory of the local range, without opening it."""
    assert isinstance(tensor, zhooks.ShardedTensor)
    return tensor.local_shard.memory


def numel_of(tensor: Tensor) -> int:
    """How many elements the layout gives this rank."""
    assert isinstance(tensor, zhooks.ShardedTensor)
    return sum(piece.numel for piece in tensor.local_shard.spec.pieces)


def range_of(tensor: Tensor, full: Tensor) -> Tensor:
    """What the layout gives this rank of ``full``."""
    assert isinstance(tensor, zhooks.ShardedTensor)
    return tensor.local_shard.spec.take(full)


# ---- of the packages below


def await_arrival(lease: Any) -> None:
    """Wait on the host for the copy of what a lease is for."""
    lease._arriving.synchronize()


def disk_of(store: Store) -> DiskFile:
    """The scratch file of a store whose disk is a real one."""
    assert isinstance(store.disk, DiskFile)
    return store.disk


def break_disk(store: Store, io: Any) -> None:
    """From now on every transfer of the store's disk goes through ``io``."""
    disk = disk_of(store)
    disk._file._io = disk._mover._io = io


def transports_of(comm: Comm) -> list[Any]:
    return list(comm.distinct())


@contextmanager
def short_waits(attachment: zhooks.Attachment, seconds: float = 4.0) -> Iterator[None]:
    """Inside, a rank that waits for another gives it up so soon; outside, as the policy says: long, for busy machines."""
    failure = comm_of(attachment).failure
    before, failure.timeout_s = failure.timeout_s, seconds
    try:
        yield
    finally:
        failure.timeout_s = before


def checksum_of(manifest: Any) -> str:
    """What stands beside a manifest in its file."""
    return shard_manifest._checksum(manifest)


#: The call that exchanges a new checkpoint with the earlier one: module and name, as ``setattr`` takes them.
EXCHANGE = (shard_commit, "_exchange")


def hush_earlier() -> None:
    """What is attached already, by other tests of this process, does not tell a new observer what it holds."""
    for bus in tuple(events._buses):
        bus._state = None
