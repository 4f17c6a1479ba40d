"""``describe`` says which transport is used, by axis where axes differ."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from tests.support.on_ranks import on_ranks, place
from zhooks.cpu_transport.shared_memory import SharedMemory


@on_ranks(4)
def test_each_axis_of_a_mesh_is_shown_with_its_transport_where_they_differ() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    real = SharedMemory.open
    with pytest.MonkeyPatch.context() as patched:
        # As where each pair of ranks has a host of its own.
        patched.setattr(
            SharedMemory,
            "open",
            lambda axis, *rest: real(axis, *rest) if axis.name == "shard" else "its ranks run on several hosts",
        )
        attachment = zhooks.attach(nn.Linear(8, 8), mesh=mesh, policy={"stage": 3})
    assert "shard x 2, replicate x 2; transports shm over shard, p2p over replicate." in attachment.describe()
    attachment.detach()


@on_ranks(2, axis=("shard", "replicate"))
def test_one_transport_is_shown_alone(axis: str) -> None:
    mesh = init_device_mesh("cpu", (place()[1],), mesh_dim_names=(axis,))
    attachment = zhooks.attach(nn.Linear(8, 8), mesh=mesh, policy={"stage": 1, "comm": {"transport": "p2p"}})
    assert "; transport p2p." in attachment.describe()
    attachment.detach()
