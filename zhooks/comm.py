"""The only room that calls collectives: gather, reduce, settle, over one axis of the mesh and one transport.

``unit.py``, ``grad.py``, ``norms.py`` and ``checkpoint.py`` call it with flat tensors and a ``Call`` that names what the
collective is for.  Which backend wants which way is decided here, in ``open_comm``, and nowhere else; this room never
decides *when* anything is moved.

Note: [Transports]
    stock  the backend's own collectives.  NCCL's are the best there are; Gloo's all-gather and reduce-scatter send as
           much as an all-reduce (measured: 1.0 and 0.8 GB/s where its send/recv does 4.6).
    p2p    Gloo send/recv, tagged with the call, each rank sending every peer its range directly: (N-1)/N of the payload.
    shm    ranks of one host over shared memory (``comm_shm.py``): one copy in, one copy out, every message labelled.
    "auto" is stock on CUDA; on CPU shm where all ranks of the axis share a host with ordered stores, else p2p.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import CapabilityError, DivergenceError
from offload.policy import Policy
from zhooks.comm_meet import Facts, Meeting, meet, policy_facts
from zhooks.layout import Layout
from zhooks.mesh import DATA, PP, REPLICATE, SHARD, STAGE, TP, Axis, Mesh

GATHER, REDUCE, CONTROL = 0, 1, 2
CHANNELS = (GATHER, REDUCE, CONTROL)


#: A tensor of the host up to this size goes by the host's network, one of a GPU's model above it by the GPU's.
HOST_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Call:
    """What a collective is for: the channel it is ordered in, the verb and the unit, and the unit's number."""

    channel: int
    what: str
    key: str
    number: int = 0


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result may be used; raises DivergenceError when the ranks do not meet in time."""


class Transport(Protocol):
    """Collectives over the ranks of one axis.  Every tensor is 1-D and contiguous, on the mesh's device."""

    axis: Axis
    name: str
    nbytes: int
    """Memory of its own that messages pass through, mapped by this rank; constant, whatever the model."""
    closed: bool
    """Nothing can be sent any more: the ranks have parted."""

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        """Start filling ``full`` [layout.padded] from every rank's ``shard`` [layout.shard_numel], same dtype.

        ``shard`` may alias this rank's ranges of ``full``.  Both are kept alive until the work is done.
        """

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        """Start summing ``full`` over the ranks; this rank's ranges land in ``out``, which must not alias ``full``."""

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        """Combine a small tensor over the ranks in place: op is "sum", "max" or "min"."""

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with that of the axis' first rank."""

    def close(self) -> None:
        """Give back groups and memory; the transport is not used again."""


class Done:
    """A work that is complete when it is made."""

    __slots__ = ()

    def wait(self) -> None:
        return None


DONE = Done()


@dataclass(frozen=True, slots=True)
class Comm:
    """The transports of an attachment: over each axis, and over axes together.

    Attributes:
        world: all ranks that hold this part of the model: shard and replicate together.
        tp: the ranks that hold the other parts of the same layers.
        pp: the ranks that hold other stages, for the few numbers that are the whole model's.
        stage: all ranks of the attached model: world and tp together.
        names: the axes that the mesh has.
    """

    shard: Transport
    replicate: Transport
    world: Transport
    tp: Transport
    pp: Transport
    stage: Transport
    names: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory of the transports themselves, as long as they are open."""
        return sum(transport.nbytes for transport in self._distinct() if not transport.closed)

    def close(self) -> None:
        """Close every transport once."""
        for transport in self._distinct():
            transport.close()

    def _distinct(self) -> list[Transport]:
        every = (self.shard, self.replicate, self.world, self.tp, self.pp, self.stage)
        return list({id(transport): transport for transport in every}.values())


#: The channels each axis is used on: where ranks coincide, axes share a transport with the channels of all of them.
_CHANNELS_OF = {
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
) -> Comm:
    """Compare what ranks were given, then choose and open the transport of each axis.  Collective over the process group.

    Args:
        facts: what else must be the same on the ranks of one model, by subject.
        meeting: that of this attach; None makes one where there are several ranks.
    Raises:
        AttachError: ranks were given other policies, meshes or facts; nothing has been opened.
        CapabilityError: the policy names a transport this machine or backend cannot give.
        DivergenceError: a rank does not come in time: it attaches fewer models, or has died.
        ZhooksError: what another rank was refused with.
    """
    from zhooks.comm_shm import serve_together

    meeting = meeting or meet()
    if meeting is not None:
        shared, own = policy_facts(policy)
        everywhere = {"policy": shared, "mesh": {"axes": mesh.arrangement}, "versions": _versions()}
        everywhere["device"] = {"type": device.type}
        meeting.compare(everywhere, {"policy": own, **(facts or {})}, mesh.stage.ranks[0], policy.comm.timeout_s)
    needed: dict[tuple[int, ...], tuple[Axis, set[int]]] = {}
    for axis in (mesh.shard, mesh.replicate, mesh.data, mesh.tp, mesh.pp, mesh.stage):
        # Axes over the same ranks share a transport; on every rank alike, for a mesh is regular.
        if axis.world > 1:
            needed.setdefault(axis.ranks, (axis, set()))[1].update(_CHANNELS_OF[axis.name])
    opened: dict[tuple[int, ...], Transport] = {}
    try:
        for axis, channels in needed.values():
            opened[axis.ranks] = _open_axis(axis, channels, policy, device, meeting)
    except BaseException:
        for transport in opened.values():
            transport.close()
        raise
    serve_together(opened.values())

    def over(axis: Axis) -> Transport:
        return Alone(axis) if axis.world == 1 else opened[axis.ranks]

    shard, replicate, world = over(mesh.shard), over(mesh.replicate), over(mesh.data)
    return Comm(shard, replicate, world, over(mesh.tp), over(mesh.pp), over(mesh.stage), mesh.names)


def _versions() -> Facts:
    try:
        own = metadata.version("zhooks")
    except metadata.PackageNotFoundError:  # run from its folder
        own = "of no package"
    return {"torch": torch.__version__, "zhooks": own}


def _open_axis(axis: Axis, channels: set[int], policy: Policy, device: torch.device, meeting: Meeting | None) -> Transport:
    from zhooks.comm_p2p import PeerToPeer
    from zhooks.comm_shm import SharedMemory

    wanted, timeout = policy.comm.transport, policy.comm.timeout_s
    if device.type != "cpu" and wanted in ("p2p", "shm"):
        raise CapabilityError(
            f'[comm] transport: expected "auto" or "stock" for parameters on {device.type}, found "{wanted}". '
            'Write transport = "auto".'
        )
    if device.type == "cpu" and wanted in ("auto", "shm"):
        shared = SharedMemory.open(axis, meeting, timeout, policy.comm.bucket)
        if isinstance(shared, SharedMemory):
            return shared
        if wanted == "shm":
            raise CapabilityError(
                f'[comm] transport: "shm" needs all ranks of axis {axis.name} on one x86-64 Linux host that has the memory, '
                f'found that {shared}. Write transport = "auto", or lower [comm] bucket.'
            )
    if device.type == "cpu" and wanted in ("auto", "p2p"):
        return PeerToPeer(axis, _group(axis, CONTROL, device, timeout), timeout)
    groups = {channel: _group(axis, channel, device, timeout) for channel in sorted(channels)}
    return Stock(axis, groups, timeout, device)


def _group(axis: Axis, channel: int, device: torch.device, timeout_s: float) -> dist.ProcessGroup:
    """A group of our own over ``axis``, connected; every rank makes the groups of all sibling axes, as torch demands.

    On a GPU the control channel has two backends: facts of the host travel by Gloo, for on the device's they would wait for
    all compute that is queued there.
    """
    known = dict(part.split(":", 1) for part in dist.get_backend_config().split(","))
    backend: str | None = None
    options: dict[str, Any] = {}
    if device.type == "cpu":
        backend = None if "cpu" in known else "gloo"
        options["timeout"] = timedelta(seconds=timeout_s)
    elif device.type in known:
        options["device_id"] = device
        if channel == CONTROL and "cpu" not in known:
            backend = f"cpu:gloo,{device.type}:{known[device.type]}"
    mine = None
    try:
        for ranks in axis.siblings:
            group = dist.new_group(list(ranks), backend=backend, **options)
            mine = group if axis.ranks == ranks else mine
    except RuntimeError as error:
        raise DivergenceError(
            f"rank {axis.ranks[axis.rank]} in attach: expected all ranks {list(axis.ranks)} of axis {axis.name} to connect, "
            f"found: {str(error).splitlines()[0]} Look at the other ranks' own errors first."
        ) from error
    assert isinstance(mine, dist.ProcessGroup)
    return mine


# torch 2.13 renamed these; the old names warn there and are the only ones before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Alone:
    """One rank: every collective is a copy, or nothing where source and destination are the same memory."""

    name = "alone"
    nbytes = 0
    closed = False

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        if shard.data_ptr() != full.data_ptr():
            full.copy_(shard)
        return DONE

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        if out.data_ptr() != full.data_ptr():
            out.copy_(full)
        return DONE

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        return None

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        return None

    def close(self) -> None:
        return None


class Stock:
    """The backend's own collectives, with a group a channel so that gathers and reductions need no common order.

    Args:
        groups: one a channel that is used on this axis; that of CONTROL takes tensors of the host, too.
    """

    name = "stock"
    nbytes = 0
    closed = False

    def __init__(
        self,
        axis: Axis,
        groups: dict[int, dist.ProcessGroup],
        timeout_s: float,
        device: torch.device,
    ) -> None:
        self.axis = axis
        self._groups = groups
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        group = self._groups[call.channel]
        pairs = self._pairs(full, shard, layout)
        return self._track(call, full, [_all_gather(whole, part, group=group, async_op=True) for whole, part in pairs])

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        group = self._groups[call.channel]
        pairs = self._pairs(full, out, layout)
        return self._track(call, full, [_reduce_scatter(part, whole, group=group, async_op=True) for whole, part in pairs])

    def _pairs(self, full: Tensor, shard: Tensor, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
        """Each segment of the full buffer with this rank's part of it in the shard."""
        step = 0
        for segment in layout.segments:
            numel = segment.numel // self.axis.world
            yield full[segment.start : segment.start + segment.numel], shard[step : step + numel]
            step += numel

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        moved = self._sent(tensor)
        work = dist.all_reduce(moved, op=OPS[op], group=self._groups[CONTROL], async_op=True)
        self._track(call, moved, [work]).wait()
        if moved is not tensor:
            tensor.copy_(moved)

    def all_reduce_start(self, call: Call, full: Tensor) -> Work:
        """Start summing ``full`` in place with the backend's own all-reduce."""
        return self._track(call, full, [dist.all_reduce(full, group=self._groups[call.channel], async_op=True)])

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        moved = self._sent(tensor).contiguous()
        work = dist.broadcast(moved, src=self.axis.ranks[0], group=self._groups[CONTROL], async_op=True)
        self._track(call, moved, [work]).wait()
        if moved is not tensor:
            tensor.copy_(moved)

    def _sent(self, tensor: Tensor) -> Tensor:
        """Where a tensor is sent from: facts of the host from there, whole parameters of it by the device's faster links."""
        return tensor if tensor.device == self._device or tensor.nbytes <= HOST_NBYTES else tensor.to(self._device)

    def close(self) -> None:
        self.closed = True
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups = {}

    def _track(self, call: Call, moved: Tensor, works: list[dist.Work]) -> Work:
        return Pending(call, works, [], self.axis, self._timeout if moved.device.type == "cpu" else None)


class Pending:
    """Works of a torch backend; a wait that fails or runs out of time says which rank, unit and call."""

    __slots__ = ("_axis", "_call", "_keep", "_timeout", "_works")

    def __init__(self, call: Call, works: list[dist.Work], keep: list[Tensor], axis: Axis, timeout: timedelta | None) -> None:
        self._call, self._works, self._keep, self._axis, self._timeout = call, works, keep, axis, timeout

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            try:
                if self._timeout is None:
                    work.wait()
                else:
                    work.wait(self._timeout)
            except RuntimeError as error:
                raise stuck(self._call, self._axis, self._timeout, f"the backend said: {error}") from error
        self._keep = []


def stuck(call: Call, axis: Axis, timeout: timedelta | float | None, found: str) -> DivergenceError:
    """The error of a rank that waits for others in vain."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return DivergenceError(
        f"rank {axis.ranks[axis.rank]} in {call.what} {call.key}: expected every rank of axis {axis.name} to make the same "
        f"call within {seconds} s; {found}. Let every rank run the same model code, or raise [comm] timeout_s."
    )


def all_reduce_flat(transport: Transport, call: Call, full: Tensor, layout: Layout) -> Work:
    """Start summing ``full`` [layout.padded] over the axis, in place, on every rank."""
    if isinstance(transport, Alone):
        return DONE
    if isinstance(transport, Stock):
        return transport.all_reduce_start(call, full)
    part = torch.empty(layout.shard_numel, dtype=full.dtype, device=full.device)
    return _Twice(transport, call, full, part, layout)


class _Twice:
    """An all-reduce as a reduce-scatter followed by an all-gather, which starts when the first is waited for."""

    __slots__ = ("_arguments", "_first")

    def __init__(self, transport: Transport, call: Call, full: Tensor, part: Tensor, layout: Layout) -> None:
        self._arguments = (transport, call, full, part, layout)
        self._first = transport.reduce_scatter(call, full, part, layout)

    def wait(self) -> None:
        transport, call, full, part, layout = self._arguments
        self._first.wait()
        transport.all_gather(call, part, full, layout).wait()
