"""What stages of a pipeline on paper do to each other: messages, and collectives that several stages are in.

Nothing of the virtual device is moved; tensors of the real host are.

Note: [Messages]
    As NCCL has it, a message begins when both its ends have been issued and the streams that issued them have come so far, and
    ends for both at once: a sender waits for its receiver.  It comes after the messages before it from that rank to that one.

Note: [Ranks alike]
    One rank stands for all of its stage.  In a group over several ranks of each stage every one of them has what it has.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from offload.device import VirtualWork
from offload.errors import SimulationError
from offload.virtual import NAME, Happening, Machine, Moment, Stream, Turns, access, running

__all__ = ["Channel", "Message", "Stages", "channel_of", "stages_on_paper"]


@dataclass(eq=False, slots=True)
class _End:
    """One end of a message: who issued it, and when its stream had come so far."""

    machine: Machine
    place: int
    tensor: Tensor | None
    nbytes: int
    on_device: bool
    issued: float
    stream: Stream
    moment: Moment


@dataclass(eq=False, slots=True)
class _Transfer:
    """Both ends of a message once they have been issued ("send" and "receive"), and when it begins and ends."""

    ends: dict[str, _End] = field(default_factory=dict)
    begin: float = 0.0
    end: float = 0.0

    @property
    def complete(self) -> bool:
        return len(self.ends) == 2


class Stages:
    """One rank of each stage, all in this process.

    Attributes:
        ranks: their numbers, first stage first.
        waited: by place, seconds for which a device (a CPU's host) waited for a stage that had not come so far.
    """

    def __init__(self, ranks: Sequence[int], place_of: Callable[[int], int]) -> None:
        self.ranks, self.place_of = tuple(ranks), place_of
        self.waited = [0.0] * len(self.ranks)
        self.turns: Turns[Any] | None = None
        self._worlds = [_World(place) for place in range(len(self.ranks))]
        self._channels: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._met: dict[Any, dict[int, Any]] = {}
        #: By channel, ranks and tag: messages one end of which has been issued.
        self._half: defaultdict[Any, deque[_Transfer]] = defaultdict(deque)
        self._free: defaultdict[tuple[int, int], float] = defaultdict(float)

    def begin(self, place: int) -> None:
        """What torch knows of process groups is that rank's from now on."""
        module: Any = distributed_c10d
        module._world = self._worlds[place]

    @property
    def place(self) -> int:
        """Of the stage whose program this thread is."""
        assert self.turns is not None
        return self.turns.current

    def until(self, ready: Callable[[], bool], what: str) -> None:
        assert self.turns is not None
        self.turns.until(ready, what)

    def together(self) -> None:
        """All come here before any goes on, by the clock of the latest."""
        machine = running()
        machine.pass_to(max(self.exchange(("together", self._next(self.place, ())), range(len(self.ranks)), machine.now, "")))

    def _next(self, place: int, ranks: tuple[int, ...]) -> int:
        self._channels[place, ranks] += 1
        return self._channels[place, ranks]

    def channel(self, ranks: Sequence[int]) -> Channel | None:
        """Of a group of these ranks, made by the stage whose turn it is; each makes it in the same order."""
        places = tuple(place for place, rank in enumerate(self.ranks) if rank in set(ranks))
        if len(places) < 2:
            return None
        return Channel(self, (tuple(ranks), self._next(self.place, tuple(ranks))), tuple(ranks), places)

    def exchange(self, key: Any, places: Sequence[int], value: Any, what: str) -> list[Any]:
        """What each place has given for ``key``, in their order."""
        table = self._met.setdefault(key, {})
        table[self.place] = value
        self.until(lambda: len(table) == len(places), what or "the beginning of a step")
        self._met.pop(key, None)
        return [table[place] for place in places]

    def issue(self, key: Any, verb: str, source: int, out: int, tensor: Tensor) -> Message:
        """Issue one end ("send" or "receive") of the next message from rank ``source`` to rank ``out``."""
        machine, place = running(), self.place
        current = machine.current
        lane = f"messages to rank {out}" if verb == "send" else f"messages from rank {source}"
        stream = machine.side(lane) if machine.costs.accelerated else machine.host
        issued = max(machine.now, current.ready if current is not machine.host else 0.0)
        on_device = tensor.device.type == NAME
        if on_device:
            machine.order(stream, current)
            _note(machine, stream, f"{verb} issued", issued, issued, tensor, verb)
        # As a small message of the host's is, what is sent is copied and not waited for.
        kept = tensor if on_device or verb == "receive" else tensor.clone()
        end = _End(machine, place, kept, tensor.nbytes, on_device, issued, stream, machine.moment(stream))
        half = self._half[key]
        if half and verb not in half[0].ends:
            transfer = half.popleft()
        else:
            transfer = _Transfer()
            half.append(transfer)
        transfer.ends[verb] = end
        if transfer.complete:
            self._complete(transfer, source, out)
        return Message(self, transfer, verb, source, out)

    def _complete(self, transfer: _Transfer, source: int, out: int) -> None:
        send, receive = transfer.ends["send"], transfer.ends["receive"]
        if (send.nbytes, send.on_device) != (receive.nbytes, receive.on_device):
            raise SimulationError(
                f"simulate expected that rank {out} receives what rank {source} sends, found {_said(send)} sent and "
                f"{_said(receive)} received. Give both stages the same shapes, dtypes and device."
            )
        if not send.on_device:
            assert send.tensor is not None and receive.tensor is not None
            receive.tensor.copy_(send.tensor.view_as(receive.tensor))
            transfer.begin = transfer.end = send.issued
            return
        seconds = send.machine.costs.collective("send", (source, out), send.nbytes)
        transfer.begin = max(send.issued, receive.issued, self._free[source, out])
        transfer.end = self._free[source, out] = transfer.begin + seconds

    def close(self) -> None:
        """No rank is there any more."""
        for place, world in enumerate(self._worlds):
            self.begin(place)
            if world.default_pg is not None:
                dist.destroy_process_group()


def _note(machine: Machine, stream: Stream, what: str, begin: float, end: float, tensor: Tensor, verb: str) -> None:
    """Tell who listens: of its memory when it is issued, of its time when that is known."""
    accesses = (access(tensor, writes=verb == "receive"),) if tensor.numel() and begin == end else ()
    happening = Happening(what, stream, begin, end, tensor.nbytes if end > begin else 0, accesses)
    for listener in machine.listeners:
        listener.happened(happening)


def _said(end: _End) -> str:
    return f"{end.nbytes} B on {'the device' if end.on_device else 'the CPU'}"


class Message:
    """One end of a message, as its stage waits for it; what it sends from or receives into is kept until then."""

    def __init__(self, stages: Stages, transfer: _Transfer, verb: str, source: int, out: int) -> None:
        self._stages, self._verb, self._source, self._out = stages, verb, source, out
        self._transfer: _Transfer | None = transfer

    def wait(self) -> None:
        """The current stream (a CPU's host) goes on when the message is over."""
        transfer, verb, stages = self._transfer, self._verb, self._stages
        if transfer is None:
            return
        end = transfer.ends[verb]
        if end.on_device or verb == "receive":
            other = f"rank {self._out} to receive" if verb == "send" else f"rank {self._source} to send"
            stages.until(lambda: transfer.complete, f"{other} a message")
            machine, current, tensor, end.tensor = end.machine, end.machine.current, end.tensor, None
            if not end.on_device:
                machine.pass_to(transfer.end)
            else:
                assert tensor is not None
                ready = machine.now if current is machine.host else max(machine.now, current.ready)
                stages.waited[end.place] += max(0.0, transfer.begin - ready)
                _note(machine, end.stream, f"{verb} over pp", transfer.begin, transfer.end, tensor, verb)
                end.moment.time = transfer.end
                VirtualWork(machine, end.moment).wait()
        self._transfer = None

    def done(self) -> bool:
        transfer = self._transfer
        if transfer is None:
            return True
        return transfer.complete and transfer.end <= transfer.ends[self._verb].machine.now


class Channel:
    """Collectives of a group that ranks of several stages are in, as one of these has it.

    Attributes:
        ranks: of the group.
        places: of the stages that are in it.
    """

    def __init__(self, stages: Stages, key: Any, ranks: tuple[int, ...], places: tuple[int, ...]) -> None:
        self._stages, self._key, self.ranks, self.places = stages, key, ranks, places
        self._count = 0

    def message(self, verb: str, peer: int, tag: int, tensor: Tensor) -> Message | None:
        """Issue an end of a message to or from the rank ``peer``; None where none of the ranks here is that one."""
        if peer not in self._stages.ranks:
            return None
        own = self._stages.ranks[self._stages.place]
        source, out = (own, peer) if verb == "send" else (peer, own)
        return self._stages.issue((self._key, source, out, tag), verb, source, out, tensor)

    def meet(self, kind: str, stream: Stream | None = None) -> None:
        """What comes next on ``stream``, or the host's work, begins when it can on every stage."""
        machine = running()
        if stream is None or stream is machine.host:
            machine.pass_to(max(self._exchange(kind, machine.now)))
        else:
            stream.ready = max(self._exchange(kind, max(machine.now, stream.ready)))

    def values(self, kind: str, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """By rank of the group, what it has in ``tensors`` of the real host."""
        machine = running()
        found = self._exchange(kind, (machine.now, [tensor.clone() for tensor in tensors]))
        machine.pass_to(max(now for now, _ in found))
        by_place = dict(zip(self.places, (own for _, own in found), strict=True))
        return [by_place[self._stages.place_of(rank)] for rank in self.ranks]

    def _exchange(self, kind: str, value: Any) -> list[Any]:
        self._count += 1
        found = self._stages.exchange((self._key, self._count), self.places, (kind, value), f"all stages to start {kind}")
        kinds = {theirs for theirs, _ in found}
        if len(kinds) > 1:
            raise SimulationError(
                f"simulate expected the same collective on every stage, found {' and '.join(sorted(kinds))}. Start "
                "collectives between stages in the same order on all of them."
            )
        return [theirs for _, theirs in found]


class _World(distributed_c10d._World):
    """What torch keeps of process groups, of one rank of several in a process."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self._own: dict[str, dict[Any, Any]] = defaultdict(dict)
        # Groups are found by name by the operations of DTensors: names of different ranks differ.
        self._groups = place * 1_000_000

    pg_map = property(lambda self: self._own["pg_map"])
    pg_names = property(lambda self: self._own["pg_names"])
    pg_group_ranks = property(lambda self: self._own["pg_group_ranks"])
    pg_backend_config = property(lambda self: self._own["pg_backend_config"])
    tags_to_pg = property(lambda self: self._own["tags_to_pg"])
    pg_to_tag = property(lambda self: self._own["pg_to_tag"])

    @property
    def group_count(self) -> int:
        return self._groups

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._groups = value


_stages: Stages | None = None


@contextmanager
def stages_on_paper(ranks: Sequence[int], place_of: Callable[[int], int]) -> Iterator[Stages]:
    """One rank of each stage in this process.

    Args:
        place_of: the place on the pp axis of any rank.
    """
    global _stages
    module: Any = distributed_c10d
    before, hook = module._world, sys.excepthook
    _stages = stages = Stages(ranks, place_of)
    try:
        yield stages
    finally:
        try:
            stages.close()
        finally:
            # Each process group that is made has errors begin with its rank.
            module._world, _stages, sys.excepthook = before, None, hook


def channel_of(ranks: Sequence[int]) -> Channel | None:
    """Of a new group of these ranks; None where ranks of no other stage are in it."""
    return None if _stages is None else _stages.channel(ranks)
