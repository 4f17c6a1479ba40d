"""The transports of a living attachment over another mesh of the same ranks: what is missing is opened, the rest is kept.

``change.py`` asks for them before anything is moved, and has those closed that nobody uses any more.  It never moves
a value, and never decides which mesh.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from offload.errors import AttachError
from offload.policy import Policy
from offload.text import shown
from zhooks.comm import CHANNELS_OF, Alone, Comm, Transport, meet, open_axes
from zhooks.layout import Axis, Mesh, resolve

__all__ = ["another_mesh", "close_unused", "rearranged"]


def another_mesh(comm: Comm, mesh: object) -> Mesh:
    """The axes of a mesh that an attachment over ``comm`` can be moved to.

    Raises:
        AttachError: it is no DeviceMesh over the whole process group, or divides the model itself otherwise.
    """
    if not isinstance(mesh, DeviceMesh):
        raise AttachError(f"mesh must be a DeviceMesh, found {shown(mesh)}. Build it with init_device_mesh.")
    axes = resolve(mesh)
    for before, after, what, instead in (
        (
            comm.tp.axis, axes.tp, "on its tp axis, because parameters are DTensors over these",
            "To change tp, save, build the model again under parallelize_module, attach and load",
        ),
        (
            comm.pp.axis, axes.pp, "on its pp or ep axis, because each has a part of the model",
            "To divide the model differently, save, build it again, attach and load",
        ),
        (
            comm.world.axis, axes.data, "on its replicate and shard axes together, in this order",
            "Build the mesh with init_device_mesh, or save, attach on this mesh and load",
        ),
    ):  # fmt: skip
        if before.ranks != after.ranks:
            raise AttachError(
                f"The mesh needs ranks {list(before.ranks)} {what}, found {list(after.ranks)}. {instead}."
            )
    if comm.averaged != axes.averaged:
        raise AttachError(
            f"The mesh needs losses of {comm.averaged} ranks to be averaged, as before, found {axes.averaged}: a pp axis "
            "cannot become an ep axis, or the reverse. Name the axes as in the mesh that was passed to attach."
        )
    return axes


def rearranged(comm: Comm, mesh: Mesh, policy: Policy, device: torch.device) -> Comm:
    """The transports over ``mesh``, those of ``comm`` among them wherever the same ranks are on the same axis.  Collective over
    the process group, as ``open_comm``.

    A transport of the same ranks that has every channel of another axis serves that one too, as where both are opened at once.

    Raises:
        DivergenceError: a rank does not come in time.
    """
    # On every rank alike: an axis is the same only where its siblings are.
    kept = {_known(transport.axis): transport for transport in comm.distinct()}
    for axis in (mesh.shard, mesh.replicate):
        for transport in comm.distinct():
            has_channels = CHANNELS_OF[axis.name] <= set(transport.channels)
            if axis.world > 1 and has_channels and _known(transport.axis)[1:] == _known(axis)[1:]:
                kept[_known(axis)] = transport
    missing = [axis for axis in (mesh.shard, mesh.replicate) if axis.world > 1 and _known(axis) not in kept]
    # Where nobody lacks any, nobody meets: it is so on all ranks or on none.
    meeting = meet("apply", policy.comm.timeout_s) if missing else None
    if meeting is not None:
        meeting.agree("change of mesh")
    opened = open_axes([(axis, CHANNELS_OF[axis.name]) for axis in missing], policy, device, meeting, comm.failure)

    def over(axis: Axis) -> Transport:
        return Alone(axis) if axis.world == 1 else kept.get(_known(axis)) or opened[axis.ranks]

    # While values move over both.
    comm.failure.watch([*comm.distinct(), *opened.values()])
    return replace(comm, shard=over(mesh.shard), replicate=over(mesh.replicate), names=mesh.names)


def _known(axis: Axis) -> tuple[str, tuple[int, ...], frozenset[tuple[int, ...]]]:
    return axis.name, axis.ranks, frozenset(axis.siblings)


def close_unused(comm: Comm, used: Comm) -> None:
    """Close the transports of ``comm`` that ``used`` does not have."""
    used.failure.watch(used.distinct())
    ours = {id(transport) for transport in used.distinct()}
    for transport in comm.distinct():
        if id(transport) not in ours:
            transport.close()
