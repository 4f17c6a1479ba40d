"""Collectives on paper: those of zhooks on an axis, and torch's own, which DTensors and users start.

This process is one of any number of ranks, and all others are what it is, but for those of other stages of a pipeline
(``virtual_stages.py``).  Nothing moves: the machine is told how long each call takes and what memory it uses, on a stream for
each channel or group as NCCL has one.  Tensors of the real host get what ranks alike would give them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.device import VirtualWork
from offload.errors import SimulationError
from offload.text import counted
from offload.virtual import NAME, Happening, Machine, Moment, access, running
from offload.work import DONE, Work
from zhooks.comm import CHANNELS, CONTROL, Call, Nbytes, Opening, Transport, TwoSteps
from zhooks.layout import Axis, Layout
from zhooks.simulate.virtual_stages import Channel, Message, channel_of

__all__ = ["BACKEND", "VirtualTransport", "check_no_group", "join_on_paper", "on_paper", "ranks_on_paper"]

BACKEND = "virtual"
#: Collectives whose results on tensors of the real host are known where stages say different things.
_VALUES = ("all_reduce", "reduce", "broadcast", "all_gather")
_C10d: Any = torch._C._distributed_c10d
#: Its methods are declared with more ways to be called than torch has for them.
_Group: Any = dist.ProcessGroup
_Op = dist.ReduceOp
#: What combines the values of stages, which differ.
_COMBINE: tuple[tuple[Any, Callable[[Tensor], Tensor]], ...] = (
    (_Op.SUM, lambda rows: rows.sum(0)),
    (_Op.AVG, lambda rows: rows.sum(0) / len(rows)),
    (_Op.MAX, lambda rows: rows.amax(0)),
    (_Op.MIN, lambda rows: rows.amin(0)),
)
_LANES = {0: "gather", 1: "reduce", CONTROL: "control"}


def _started(
    kind: str, ranks: Sequence[int], nbytes: int, lane: str, what: str, channel: Channel | None, reads: Sequence[Tensor],
    writes: Sequence[Tensor],
) -> _Collective:  # fmt: skip
    """Start a collective on the stream ``lane`` (a CPU's host), after what the current one has been given."""
    machine = running()
    stream = machine.side(lane) if machine.costs.accelerated else machine.host
    machine.order(stream, machine.current)
    if channel is not None:
        channel.meet(kind, stream)
    accesses = [access(tensor, writes=False) for tensor in reads if tensor.numel()]
    accesses += [access(tensor, writes=True) for tensor in writes if tensor.numel()]
    happening = machine.communicate(kind, ranks, nbytes, stream, what, accesses)
    return _Collective(machine, machine.moment(stream), happening, (*reads, *writes))


class _Collective(VirtualWork):
    """Its tensors are kept until the caller's stream comes after it, as torch's NCCL group does."""

    def __init__(self, machine: Machine, moment: Moment, happening: Happening, tensors: Sequence[Tensor]) -> None:
        super().__init__(machine, moment, happening=happening)
        self._kept = tensors

    def wait(self) -> None:
        super().wait()
        self._kept = ()


class VirtualTransport:
    """The collectives of zhooks on one axis, over a process group of the backend "fake"."""

    name = "virtual"
    channels = CHANNELS
    nbytes = 0
    closed = False

    def __init__(self, axis: Axis) -> None:
        self.axis, self._machine, self._channel = axis, running(), channel_of(axis.ranks)

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        return self._start(call, "all_gather", full.nbytes, reads=[shard], writes=[full])

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        return self._start(call, "reduce_scatter", full.nbytes, reads=[full], writes=[out])

    def all_reduce_flat(self, call: Call, full: Tensor, layout: Layout) -> Work:
        if not self._machine.accelerated:
            # Of a CPU's ranks, through shared memory; with memory for a range.
            return TwoSteps(self, call, full, layout)
        return self._start(call, "all_reduce", full.nbytes, reads=[], writes=[full])

    def exchange(
        self, call: Call, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], nbytes: Nbytes
    ) -> Work:
        most = max(*(sum(row) for row in nbytes), *(sum(column) for column in zip(*nbytes, strict=True)))
        reads, writes = ([tensor for each in ends for tensor in each] for ends in (sends, receives))
        return self._start(call, "all_to_all", most, reads=reads, writes=writes)

    def order(self) -> int:
        return 0

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        if tensor.device.type == NAME:
            self._start(call, "all_reduce", tensor.nbytes, reads=[], writes=[tensor]).wait()
            return
        what, host = f"{call.what} {call.key}", self._machine.host
        every = None if self._channel is None else self._channel.values("all_reduce", [tensor])
        self._machine.communicate("all_reduce", self.axis.ranks, tensor.nbytes, host, what, [])
        if every is not None:
            rows = torch.stack([theirs for (theirs,) in every])
            tensor.copy_(rows.sum(0) if op == "sum" else rows.amax(0) if op == "max" else rows.amin(0))
        elif op == "sum":
            tensor.mul_(self.axis.world)

    def start_all_reduce(self, call: Call, tensor: Tensor, op: str) -> Work:
        self.all_reduce(call, tensor, op)
        return DONE

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        if tensor.device.type == NAME:
            self._start(call, "broadcast", tensor.nbytes, reads=[], writes=[tensor]).wait()
        elif self._channel is not None:
            tensor.copy_(self._channel.values("broadcast", [tensor])[0][0])

    def interrupt(self) -> None:
        return None

    def renew(self, opened: Transport) -> None:
        return None

    def close(self) -> None:
        self.closed = True

    def _start(self, call: Call, kind: str, nbytes: int, *, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Work:
        lane = f"{_LANES[call.channel]} over {self.axis.name}"
        return _started(kind, self.axis.ranks, nbytes, lane, f"{call.what} {call.key}", self._channel, reads, writes)


def on_paper(opening: Opening) -> VirtualTransport | None:
    """The transport of an axis of the virtual device; None for any other."""
    return VirtualTransport(opening.axis) if opening.device.type == NAME else None


@contextmanager
def ranks_on_paper(world: int, *, meshed: bool = False) -> Iterator[None]:
    """This process as the first of so many ranks; alone it needs no group but for a mesh.

    Raises:
        SimulationError: there is a process group already.
    """
    check_no_group()
    if world == 1 and not meshed:
        yield
        return
    join_on_paper(0, world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_no_group() -> None:
    """Raises:
    SimulationError: there is a process group already.
    """
    if dist.is_initialized():
        raise SimulationError(
            "simulate expected a process without a process group, because it creates its own; found one. Simulate before "
            "init_process_group, or in another process."
        )


def join_on_paper(rank: int, world: int) -> None:
    """Make the process group of so many ranks, as one of them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _register()
    dist.init_process_group(BACKEND, rank=rank, world_size=world, store=FakeStore())


@cache
def _register() -> None:
    dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", NAME])


def _make(options: Any, extra: Any = None) -> Any:
    return VirtualGroup(options.group_rank, options.group_size, tuple(options.global_ranks_in_group))


class VirtualGroup(_Group):  # type: ignore[misc]
    """Some ranks; names of methods and their arguments are torch's."""

    def __init__(self, rank: int, size: int, ranks: tuple[int, ...]) -> None:
        super().__init__(rank, size)
        self._ranks, self._name, self._label = ranks or tuple(range(size)), "", "all ranks"
        self._channel = channel_of(self._ranks)

    # What a group is.

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, label: str) -> None:
        self._label = label.removeprefix("mesh_")

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._label

    def shutdown(self) -> None:
        return None

    def abort(self) -> None:
        return None

    # Collectives.

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        return self._start("all_reduce", [], tensors, partial(self._reduced, tensors, options))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        return self._start("reduce", [], tensors, partial(self._reduced, tensors, options))

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        def fill() -> None:
            if self._channel is not None:
                for tensor, theirs in zip(tensors, self._channel.values("broadcast", tensors)[options.rootRank], strict=True):
                    tensor.copy_(theirs)

        return self._start("broadcast", [], tensors, fill)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None) -> Any:
        made = [tensor for each in outputs for tensor in each]
        return self._start("all_gather", inputs, made, partial(self._gathered, outputs, inputs))

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given], options)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None) -> Any:
        rows = [output.view(self.size(), -1).unbind() for output in outputs]
        return self._start("all_gather", inputs, outputs, partial(self._gathered, rows, inputs))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None) -> Any:
        made = [tensor for each in outputs for tensor in each]
        return self._start("all_to_all", inputs, made, partial(_gathered_alike, outputs, inputs))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any = None) -> Any:
        def fill() -> None:
            for output, each in zip(outputs, inputs, strict=True):
                _scattered_alike([output], each[self.rank()])
                _reduced_alike([output], self.size(), options)

        return self._start("reduce_scatter", [tensor for each in inputs for tensor in each], outputs, fill)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], options)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None) -> Any:
        def fill() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                _scattered_alike([output], given.view(self.size(), -1)[self.rank()])
                _reduced_alike([output], self.size(), options)

        return self._start("reduce_scatter", inputs, outputs, fill)

    # Their names before torch 2.13.
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], options: Any = None
    ) -> Any:
        def fill() -> None:
            equal = [len(output) // self.size()] * self.size()
            mine = given.split(list(input_sizes) or equal)[self.rank()]
            _scattered_alike(output.split(list(output_sizes) or equal), mine)

        return self._start("all_to_all", [given], [output], fill)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None) -> Any:
        return self._start("all_to_all", inputs, outputs, partial(_scattered_alike, outputs, inputs[self.rank()]))

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any = None) -> Any:
        def fill() -> None:
            # Who is not the root has no inputs.
            for output, each in zip(outputs, inputs, strict=False):
                _scattered_alike([output], each[self.rank()])

        return self._start("all_to_all", [tensor for each in inputs for tensor in each], outputs, fill)

    def barrier(self, opts: Any = None) -> Any:
        if self._channel is not None:
            self._channel.meet("barrier")
        return _Started(None, [])

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> Any:
        return self._message("send", tensors, rank, tag)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> Any:
        return self._message("receive", tensors, rank, tag)

    def _message(self, verb: str, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        (tensor,) = tensors
        message = None if self._channel is None else self._channel.message(verb, self._ranks[rank], tag, tensor)
        if message is None:
            raise SimulationError(
                "simulate expected collectives, found a send or a receive between two ranks, whose time depends on what the "
                "other one does; within a stage, all ranks are assumed to do what this one does. Send only between stages of "
                'a pipeline, over mesh["pp"].'
            )
        return _Started(message, tensors)

    # Values of the real host.

    def _reduced(self, tensors: Sequence[Tensor], options: Any) -> None:
        if self._channel is None:
            _reduced_alike(tensors, self.size(), options)
            return
        op = _Op.SUM if options is None else options.reduceOp
        combine = next((combine for known, combine in _COMBINE if op == known), None)
        if combine is None:
            raise SimulationError(f"simulate expected a sum, mean, maximum or minimum over stages, found {op}.")
        every = self._channel.values("all_reduce", tensors)
        for number, tensor in enumerate(tensors):
            tensor.copy_(combine(torch.stack([theirs[number] for theirs in every])))

    def _gathered(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
        if self._channel is None:
            _gathered_alike(outputs, inputs)
            return
        every = self._channel.values("all_gather", inputs)
        for number, each in enumerate(outputs):
            for output, theirs in zip(each, every, strict=True):
                output.copy_(theirs[number].view_as(output))

    def _start(self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor], fill: Callable[[], object]) -> Any:
        """On the group's own stream, as NCCL has it, after what the current one has been given; ``fill`` is for the host's."""
        if not any(tensor.device.type == NAME for tensor in (*reads, *writes)):
            if self._channel is not None and kind not in _VALUES:
                raise SimulationError(
                    f"simulate expected one of {', '.join(_VALUES)} for tensors on the CPU over {self._label}, found {kind}. "
                    "Keep the tensors on the device, or use one of these."
                )
            fill()
            return _Started(None, writes)
        nbytes = max(sum(tensor.nbytes for tensor in tensors) for tensors in (reads, writes))
        lane = f"collectives over {self._label}"
        work = _started(kind, self._ranks, nbytes, lane, f"{kind} over {self._label}", self._channel, reads, writes)
        return _Started(work, writes)


class _Started(_C10d.Work):  # type: ignore[misc]
    """What torch waits for."""

    def __init__(self, work: VirtualWork | Message | None, made: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._made = work, list(made)

    def wait(self, timeout: Any = None) -> bool:
        if self._work is not None:
            self._work.wait()
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.done()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._made)
        return future


# What collectives give on tensors of the real host where every rank has what this one has.


def _reduced_alike(tensors: Sequence[Tensor], ranks: int, options: Any) -> None:
    """Each tensor combined with as many like it, in place."""
    op = _Op.SUM if options is None else options.reduceOp
    if not any(op == known for known in (_Op.SUM, _Op.PRODUCT, _Op.AVG, _Op.MAX, _Op.MIN, _Op.BAND, _Op.BOR)):
        raise SimulationError(f"simulate expected a sum, product, mean, maximum or minimum over ranks, found {op}.")
    for tensor in tensors:
        if op == _Op.SUM:
            tensor.mul_(ranks)
        elif op == _Op.PRODUCT:
            tensor.pow_(ranks)


def _gathered_alike(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    """Of each input one output a rank."""
    for each, given in zip(outputs, inputs, strict=True):
        for output in each:
            output.copy_(given.view_as(output))


def _scattered_alike(outputs: Sequence[Tensor], given: Tensor) -> None:
    """What each rank has sent to the first one, which this is: the same from all."""
    if any(output.numel() != given.numel() for output in outputs):
        sizes, wanted = [output.numel() for output in outputs], counted(given.numel(), "element")
        raise SimulationError(f"simulate expected {wanted} from every rank, as all send the same; found {sizes}.")
    _gathered_alike([outputs], [given])
