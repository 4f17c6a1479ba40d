"""Chooses and opens the transport of each axis of the mesh, the only way that collectives go.

``unit/storage.py``, ``grad/reduction.py``, ``tensor/norms.py`` and ``checkpoint/full_state.py`` call what it opens with
flat tensors and a ``Call`` that names what the collective is for.  Which backend wants which way is decided here, in
``open_comm``, and nowhere else.

Note: [Transports]
    stock  the backend's own collectives.  NCCL's are the best there are; Gloo's all-gather and reduce-scatter send as
           much as an all-reduce (measured: 1.0 and 0.8 GB/s where its send/recv does 4.6).
    others of what is in ``OPENERS``, the first that has one for the device and the policy:
           ``cpu_transport/`` has two, ``simulate/`` that of the virtual device.
    "auto" is stock where none of these has one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from offload.budget import ALONE, THIS_MACHINE, Ranks
from offload.errors import CapabilityError, DivergenceError
from offload.policy import Policy
from zhooks.comm.alone import Alone
from zhooks.comm.lost_rank import AgreedFailure
from zhooks.comm.rendezvous import Facts, Meeting, meet, policy_facts
from zhooks.comm.stock import Stock
from zhooks.comm.transport import CONTROL, GATHER, REDUCE, Call, Transport
from zhooks.layout import DATA, PP, REPLICATE, SHARD, STAGE, TP, Axis, Mesh


@dataclass(slots=True, eq=False)
class Comm:
    """The transports of an attachment: over each axis, and over axes together.

    ``shard``, ``replicate`` and ``names`` change when the attachment moves to another mesh (`become`): who works over them
    keeps this, and asks it each time.

    Attributes:
        world: all ranks that hold this shard of the tp axis: shard and replicate together.
        tp: the ranks that divide the same layers between them.
        pp: the ranks that hold other stages, for the few numbers that are the whole model's.
        stage: all ranks of the attached model: world and tp together.
        names: the axes that the mesh has.
        averaged: the ranks whose losses reach the parameters.
        beside: how many ranks of the process group share this rank's machine.
        alike: how many of them hold as much as this one: none of other stages of a pipeline.
        failure: which rank is gone or late, once that is found out.
    """

    shard: Transport
    replicate: Transport
    world: Transport
    tp: Transport
    pp: Transport
    stage: Transport
    failure: AgreedFailure
    names: tuple[str, ...] = ()
    averaged: int = 1
    beside: Ranks = ALONE
    alike: Ranks = ALONE

    @property
    def pipelined(self) -> bool:
        """Ranks of the pp axis are stages of a pipeline, and no experts."""
        return _pipelined(self.pp.axis, self.world.axis, self.averaged)

    @property
    def bulk(self) -> int:
        """The channel on which all ranks of the model send each other many bytes; that of facts where there is no other."""
        return GATHER if GATHER in self.stage.channels else CONTROL

    @property
    def nbytes(self) -> int:
        """Memory of the transports themselves, as long as they are open."""
        return sum(transport.nbytes for transport in self.distinct() if not transport.closed)

    def become(self, other: Comm) -> None:
        """Be over the mesh of another one, which has the same ranks on its other axes."""
        self.shard, self.replicate, self.names = other.shard, other.replicate, other.names
        # Messages name the axis that the transport is used for now: the first of them, as `open_comm` has it.
        for name, transport in reversed(self._over().items()):
            transport.axis = replace(transport.axis, name=name)

    def close(self) -> None:
        """Close every transport once."""
        for transport in self.distinct():
            transport.close()

    def distinct(self) -> list[Transport]:
        """Every transport once."""
        return list({id(transport): transport for transport in self._over().values()}.values())

    def used(self) -> list[tuple[Transport, set[int]]]:
        """Every transport between ranks once, and the channels it is used on; on every rank in one order."""
        found: dict[int, tuple[Transport, set[int]]] = {}
        for name, transport in self._over().items():
            if transport.axis.world > 1:
                found.setdefault(id(transport), (transport, set()))[1].update(CHANNELS_OF[name])
        return list(found.values())

    def _over(self) -> dict[str, Transport]:
        return {
            SHARD: self.shard, REPLICATE: self.replicate, DATA: self.world, TP: self.tp, PP: self.pp, STAGE: self.stage
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Opening:
    """What a transport is opened for: an axis, the channels it is used on, and what the policy says of it.

    Attributes:
        meeting: of all ranks, sibling axes included; None where there is no process group.
    """

    axis: Axis
    channels: Collection[int]
    policy: Policy
    device: torch.device
    meeting: Meeting | None
    failure: AgreedFailure


#: What is asked for a transport before the backend's own collectives are taken: None where this is no case of theirs.
OPENERS: list[Callable[[Opening], Transport | None]] = []


#: The channels each axis is used on: where ranks coincide, axes share a transport with the channels of all of them.
CHANNELS_OF = {
    SHARD: {GATHER, REDUCE, CONTROL},
    REPLICATE: {REDUCE},
    DATA: {CONTROL},
    TP: {GATHER, CONTROL},
    PP: {CONTROL},
    STAGE: {CONTROL},
}


def open_comm(
    mesh: Mesh,
    policy: Policy,
    device: torch.device,
    facts: Mapping[str, Facts] | None = None,
    meeting: Meeting | None = None,
    alike: Mapping[str, Facts] | None = None,
) -> Comm:
    """Compare what ranks were given, then choose and open the transport of each axis.  Collective over the process group.

    Args:
        facts: what else must be the same on the ranks of one model, by subject.
        alike: what else must be the same on all ranks, by subject.
        meeting: that of this attach; None makes one where there are several ranks.
    Raises:
        AttachError: ranks were given other policies, meshes or facts; nothing has been opened.
        CapabilityError: the policy names a transport this machine or backend cannot give.
        DivergenceError: a rank does not come in time: it attaches fewer models, or has died.
        ZhooksError: what another rank was refused with.
    """
    meeting = meeting or meet()
    beside = equal = ALONE
    if meeting is None:
        failure = AgreedFailure.alone({*mesh.stage.ranks, *mesh.pp.ranks}, policy.comm.timeout_s)
    else:
        # Devices that a process sees do not tell: each rank may have been given one alone.
        places = THIS_MACHINE.places()
        slice_of = f" stage {mesh.stage.ranks[0]}" if _pipelined(mesh.pp, mesh.data, mesh.averaged) else ""
        same = [f"{place}{slice_of}" for place in places]
        meeting.arrive({*places, *same})
        shared, own = policy_facts(policy)
        everywhere = {"policy": shared, "mesh": {"axes": mesh.arrangement}, "versions": _versions()}
        everywhere |= {"device": {"type": device.type}, **(alike or {})}
        meeting.compare(everywhere, {"policy": own, **(facts or {})}, mesh.stage.ranks[0], policy.comm.timeout_s)
        beside, equal = (Ranks(*map(meeting.arrived, these)) for these in (places, same))
        failure = meeting.met()
    opened = _open_axes(mesh, policy, device, meeting, failure)
    failure.watch(opened.values())

    def over(axis: Axis) -> Transport:
        return Alone(axis) if axis.world == 1 else opened[axis.ranks]

    shard, replicate, world = over(mesh.shard), over(mesh.replicate), over(mesh.data)
    tp, pp, stage = over(mesh.tp), over(mesh.pp), over(mesh.stage)
    return Comm(shard, replicate, world, tp, pp, stage, failure, mesh.names, mesh.averaged, beside, equal)


def reopen_comm(comm: Comm, policy: Policy, device: torch.device, meeting: Meeting) -> None:
    """Open every transport of ``comm`` anew, in its place: ranks have met again.  Collective over the process group.

    Raises:
        CapabilityError, DivergenceError: one cannot be had any more; nothing can be sent.
    """
    renewed: list[tuple[Transport, Transport]] = []
    try:
        for before, channels in comm.used():
            opened = _open_axis(Opening(before.axis, channels, policy, device, meeting, comm.failure))
            renewed.append((before, opened))
            if type(opened) is not type(before):
                raise CapabilityError(
                    f"recover expected to connect over {before.name} again, found that only {opened.name} is available. Load "
                    "the last checkpoint in new processes."
                )
    except BaseException:
        for _, opened in renewed:
            opened.close()
        raise
    for before, opened in renewed:
        before.renew(opened)


def _open_axes(
    mesh: Mesh, policy: Policy, device: torch.device, meeting: Meeting | None, failure: AgreedFailure
) -> dict[tuple[int, ...], Transport]:
    """A transport for each set of ranks that is an axis, or several."""
    needed: dict[tuple[int, ...], tuple[Axis, set[int]]] = {}
    for axis in (mesh.shard, mesh.replicate, mesh.data, mesh.tp, mesh.pp, mesh.stage):
        # Axes over the same ranks share a transport; on every rank alike, for a mesh is regular.
        if axis.world > 1:
            needed.setdefault(axis.ranks, (axis, set()))[1].update(CHANNELS_OF[axis.name])
    return open_axes(list(needed.values()), policy, device, meeting, failure)


def open_axes(
    needed: Sequence[tuple[Axis, set[int]]],
    policy: Policy,
    device: torch.device,
    meeting: Meeting | None,
    failure: AgreedFailure,
) -> dict[tuple[int, ...], Transport]:
    """A transport for each axis and the channels it is used on, by the axis' ranks; all or none.  Collective over the process
    group, sibling axes included."""
    opened: dict[tuple[int, ...], Transport] = {}
    try:
        for axis, channels in needed:
            opened[axis.ranks] = _open_axis(Opening(axis, channels, policy, device, meeting, failure))
    except BaseException:
        for transport in opened.values():
            transport.close()
        raise
    return opened


def _pipelined(pp: Axis, data: Axis, averaged: int) -> bool:
    return pp.world > 1 and averaged == data.world


def _versions() -> Facts:
    return {"torch": torch.__version__, "zhooks": _own_version()}


@cache
def _own_version() -> str:
    """Read once: a package's metadata are a file, which takes milliseconds to parse."""
    try:
        return metadata.version("zhooks")
    except metadata.PackageNotFoundError:  # run from its folder
        return "of no package"


def _open_axis(opening: Opening) -> Transport:
    for opener in OPENERS:
        if (transport := opener(opening)) is not None:
            return transport
    wanted, device = opening.policy.comm.transport, opening.device
    if wanted not in ("auto", "stock"):
        raise CapabilityError(
            f'[comm] transport needs "auto" or "stock" for parameters on {device.type}, found "{wanted}". '
            'Write transport = "auto".'
        )
    groups = dict[int, dist.ProcessGroup]()
    for together in _sharing(opening):
        groups |= dict.fromkeys(together, open_group(opening, together))
    return Stock(opening.axis, groups, device, opening.failure)


def _sharing(opening: Opening) -> list[set[int]]:
    """Channels by the group that they share.

    A communicator of a device keeps memory there, so an axis has two at most: reductions are launched in one order, all of
    them before ranks agree on anything.
    """
    both = {REDUCE, CONTROL}
    if opening.device.type == "cpu" or not both <= set(opening.channels):
        return [{channel} for channel in sorted(opening.channels)]
    return [*({channel} for channel in sorted(set(opening.channels) - both)), both]


def open_group(opening: Opening, channels: Collection[int]) -> dist.ProcessGroup:
    """A group of our own over ``axis``, connected; every rank makes the groups of all sibling axes, as torch demands.

    The groups have the backend that the process group has for this type of device, or else the one that torch has registered
    for it.  Beside a device's the control channel has a second one: facts of the host travel by Gloo, for on the device's they
    would wait for all compute that is queued there.
    """
    axis, device, meeting, failure = opening.axis, opening.device, opening.meeting, opening.failure
    known = dict(each.split(":", 1) for each in dist.get_backend_config().split(","))
    backend: str | None = None
    # Some calls of the backend wait where they start, those of a device wherever its stream is: by the backend's own clock, no
    # longer than other waits.
    options: dict[str, Any] = {"timeout": timedelta(seconds=failure.patience_s)}
    if device.type == "cpu":
        backend = None if "cpu" in known else "gloo"
    else:
        options["device_id"] = device
        own = known.get(device.type) or dist.Backend.default_device_backend_map.get(device.type)
        if own is None:
            raise CapabilityError(
                f"attach expected the process group to have a backend for parameters on {device.type}, found "
                f"{dist.get_backend_config()}, and none that is registered for {device.type}. Import the package that has one, "
                f'and write init_process_group("cpu:gloo,{device.type}:NAME").'
            )
        if CONTROL in channels and "cpu" not in known:
            backend = f"cpu:gloo,{device.type}:{own}"
        elif device.type not in known:
            backend = f"cpu:{known['cpu']},{device.type}:{own}" if "cpu" in known else f"{device.type}:{own}"

    def make() -> list[object]:
        return [dist.new_group(list(ranks), backend=backend, **options) for ranks in axis.siblings]

    if meeting is not None:
        # The backend's own wait sees no rank that has ended: nobody begins before all are here.
        meeting.agree(f"groups of {axis.name_among}, channel {min(channels)}")
    try:
        # It is for this thread that a device is chosen.
        made = meeting.connect(make) if meeting is not None and device.type == "cpu" else make()
    except DivergenceError:
        raise
    except RuntimeError as error:
        found = f"the backend said: {str(error).splitlines()[0]}"
        raise failure.fail(Call(CONTROL, "attach", "groups"), axis, found) from error
    mine = made[list(axis.siblings).index(axis.ranks)]
    assert isinstance(mine, dist.ProcessGroup)
    return mine
