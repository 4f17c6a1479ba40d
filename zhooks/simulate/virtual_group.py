"""The process group of the virtual device: torch's own collectives, which DTensors and users start, take time and order memory.

``simulation/`` makes one of any number of ranks, of which this process is one and all others are what it is, but for those of
other stages of a pipeline (``virtual_stages.py``).  Nothing moves; tensors of the real host get what ranks alike would give
them (``alike.py``).
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
from offload.virtual import NAME, access, running
from zhooks.simulate.alike import combined, gathered, reduced, scattered
from zhooks.simulate.virtual_stages import Message, channel_of

__all__ = ["BACKEND", "check_no_group", "join_on_paper", "ranks_on_paper"]

BACKEND = "virtual"
#: Collectives whose results on tensors of the real host are known where stages say different things.
_VALUES = ("all_reduce", "reduce", "broadcast", "all_gather")
_C10d: Any = torch._C._distributed_c10d
#: Its methods are declared with more ways to be called than torch has for them.
_Group: Any = dist.ProcessGroup


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
        return self._start("all_to_all", inputs, made, partial(gathered, outputs, inputs))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any = None) -> Any:
        def fill() -> None:
            for output, each in zip(outputs, inputs, strict=True):
                scattered([output], each[self.rank()])
                reduced([output], self.size(), options)

        return self._start("reduce_scatter", [tensor for each in inputs for tensor in each], outputs, fill)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], options)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None) -> Any:
        def fill() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                scattered([output], given.view(self.size(), -1)[self.rank()])
                reduced([output], self.size(), options)

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
            scattered(output.split(list(output_sizes) or equal), mine)

        return self._start("all_to_all", [given], [output], fill)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None) -> Any:
        return self._start("all_to_all", inputs, outputs, partial(scattered, outputs, inputs[self.rank()]))

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any = None) -> Any:
        def fill() -> None:
            # Who is not the root has no inputs.
            for output, each in zip(outputs, inputs, strict=False):
                scattered([output], each[self.rank()])

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
            raise _one_stage()
        return _Started(message, tensors)

    # Values of the real host.

    def _reduced(self, tensors: Sequence[Tensor], options: Any) -> None:
        if self._channel is None:
            reduced(tensors, self.size(), options)
        else:
            combined(tensors, self._channel.values("all_reduce", tensors), options)

    def _gathered(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
        if self._channel is None:
            gathered(outputs, inputs)
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
        machine = running()
        stream = machine.side(f"collectives over {self._label}") if machine.costs.accelerated else machine.host
        machine.order(stream, machine.current)
        if self._channel is not None:
            self._channel.meet(kind, stream)
        nbytes = max(sum(tensor.nbytes for tensor in tensors) for tensors in (reads, writes))
        accesses = [access(tensor, writes=False) for tensor in reads if tensor.numel()]
        accesses += [access(tensor, writes=True) for tensor in writes if tensor.numel()]
        machine.communicate(kind, self._ranks, nbytes, stream, f"{kind} over {self._label}", accesses)
        return _Started(VirtualWork(machine, machine.moment(stream)), writes, reads)


class _Started(_C10d.Work):  # type: ignore[misc]
    """What torch waits for; its tensors are kept until then."""

    def __init__(self, work: VirtualWork | Message | None, made: Sequence[Tensor], reads: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._work, self._made, self._kept = work, list(made), (*made, *reads)

    def wait(self, timeout: Any = None) -> bool:
        if self._work is not None:
            self._work.wait()
        self._kept = ()
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.done()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._made)
        return future


def _one_stage() -> SimulationError:
    return SimulationError(
        "simulate expected collectives, found a send or a receive between two ranks, whose time depends on what the other one "
        "does; within a stage, all ranks are assumed to do what this one does. Send only between stages of a pipeline, over "
        "mesh[\"pp\"]."
    )

