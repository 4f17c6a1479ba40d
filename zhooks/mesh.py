"""The axes ranks are arranged on: ``shard`` over which state is partitioned, ``replicate`` over which it is copied.

This room turns a DeviceMesh, or the default process group, or no group at all, into two axes; ``attach.py`` builds it
and hands the axes to ``comm.py``.  It never launches a collective and never starts processes: that is torchrun's work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from offload.errors import AttachError

SHARD = "shard"
REPLICATE = "replicate"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh as seen by this rank: the global ranks on it, in order, and this rank's place."""

    name: str
    ranks: tuple[int, ...]
    rank: int

    @property
    def world(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes this rank takes part in; ``world`` counts all ranks, ``rank`` is the global one."""

    shard: Axis
    replicate: Axis

    @property
    def world(self) -> int:
        return self.shard.world * self.replicate.world

    @property
    def rank(self) -> int:
        return self.shard.ranks[self.shard.rank]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.world))


def resolve(mesh: DeviceMesh | None) -> Mesh:
    """The axes to use: those of ``mesh``, else one shard axis over the default group, else a world of one.

    Raises:
        AttachError: the mesh names other axes than shard and replicate, or does not cover the process group.
    """
    if mesh is None:
        if not dist.is_initialized():
            return Mesh(Axis(SHARD, (0,), 0), Axis(REPLICATE, (0,), 0))
        world, rank = dist.get_world_size(), dist.get_rank()
        return Mesh(Axis(SHARD, tuple(range(world)), rank), Axis(REPLICATE, (rank,), 0))
    names = mesh.mesh_dim_names or ((SHARD,) if mesh.ndim == 1 else ())
    if set(names) not in ({SHARD}, {SHARD, REPLICATE}):
        raise AttachError(
            f"mesh: expected axes named 'shard' or 'replicate' and 'shard', found {names or 'no names'}. "
            'Build it with mesh_dim_names=("replicate", "shard").'
        )
    members = sorted(mesh.mesh.flatten().tolist())
    if members != list(range(dist.get_world_size())):
        raise AttachError(
            f"mesh: expected every rank of the process group (0 to {dist.get_world_size() - 1}), found ranks {members}. "
            "Build the mesh over the whole group."
        )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return Mesh(_axis(mesh, names, list(coordinate), SHARD), _axis(mesh, names, list(coordinate), REPLICATE))


def _axis(mesh: DeviceMesh, names: tuple[str, ...], coordinate: list[int], name: str) -> Axis:
    if name not in names:
        return Axis(name, (dist.get_rank(),), 0)
    dim = names.index(name)
    index: list[int | slice] = list(coordinate)
    index[dim] = slice(None)
    return Axis(name, tuple(mesh.mesh[tuple(index)].tolist()), coordinate[dim])
