"""Collectives between the ranks of one host through shared memory: one copy in, one copy out, no socket.

``open_transport.py`` opens it for ranks that share a host.  Every message carries the call it belongs to, so ranks that
make different calls get an error at once that names them; it never grows with the model (a ring of slots a rank and channel).
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import sys
import time
from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from offload.errors import DivergenceError
from offload.work import DONE, Work
from zhooks.comm import (
    CHANNELS,
    CONTROL,
    LOOK_S,
    SAME_ORDER,
    AgreedFailure,
    Call,
    Meeting,
    Nbytes,
    ScatteredBytes,
    Transport,
    TwoSteps,
    bytes_of,
    copy,
    machine,
)
from zhooks.cpu_transport.shared_memory_ring import SLOT, SMALL_SLOT, Message, Ring
from zhooks.cpu_transport.wait_board import WaitBoard
from zhooks.layout import Axis, Layout

SPIN_S = 0.002
#: At the end of the memory, so that a rank knows it is the right one.
TOKEN_BYTES = 16


#: What is open; what transports of one attachment have in common is who finds out that a rank is gone.
_OPEN: WeakSet[SharedMemory] = WeakSet()


class SharedMemory:
    """Collectives over one axis; sums are taken in rank order, so every rank computes the same bits."""

    name = "shm"
    channels = CHANNELS
    closed = False

    def __init__(self, axis: Axis, rings: list[Ring], board: WaitBoard, failure: AgreedFailure) -> None:
        self.axis, self._failure = axis, failure
        self._rings, self._board = rings, [board]
        #: Where it is noted that this rank waits here: of this axis, and of those that have all of its ranks.
        self.boards = self._board
        #: What is served while this rank waits: a rank that waits here may owe a message to one that waits elsewhere.
        self.served = rings
        self.nbytes = sum(ring.total for ring in rings) + WaitBoard.nbytes(axis.world)
        _OPEN.add(self)
        self._serve_together()

    @classmethod
    def open(cls, axis: Axis, meeting: Meeting | None, bucket: int, failure: AgreedFailure) -> SharedMemory | str:
        """Map memory for the axis' ranks; else the reason why not, the same on every rank.

        Collective over the process group, sibling axes included: all have shared memory, or none.
        """
        large = (max(4, bucket // 2 // SLOT), SLOT)
        shapes = [(4, SMALL_SLOT) if channel == CONTROL else large for channel in CHANNELS]
        sizes = [Ring.nbytes(axis.world, slots, slot) for slots, slot in shapes]
        if meeting is None:
            return "there is no process group whose ranks could share memory"
        memory = _share(axis, meeting, sum(sizes) + WaitBoard.nbytes(axis.world))
        if isinstance(memory, str):
            return memory
        rings, offset = [], 0
        for (slots, slot), size in zip(shapes, sizes, strict=True):
            rings.append(Ring(memory, offset, axis, slots, slot))
            offset += size
        return cls(axis, rings, WaitBoard(memory, offset, axis), failure)

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        ring, rank = self._rings[call.channel], self.axis.rank
        owned = [layout.ranges(r) for r in range(self.axis.world)]
        item = full.element_size()
        step = 0
        for start, stop in owned[rank]:
            own = full[start:stop]
            if own.data_ptr() != shard.data_ptr() + step * item:
                own.copy_(shard[step : step + stop - start])
            step += stop - start
        places = [ScatteredBytes([full[start:stop] for start, stop in ranges]) for ranges in owned]

        def land(writer: int, offset: int, data: Tensor) -> None:
            places[writer].write(offset, data)

        return self._launch(ring, Message(call, ScatteredBytes([shard]), land, shard.numel() * item))

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        ring, rank, world = self._rings[call.channel], self.axis.rank, self.axis.world
        item, mine = full.element_size(), layout.ranges(rank)
        sends = {r: ScatteredBytes([full[start:stop] for start, stop in layout.ranges(r)]) for r in range(world)}
        begun = False
        if len(mine) > 1:
            own_values = torch.cat([full[a:b] for a, b in mine])
        else:
            own_values = full[mine[0][0] : mine[0][1]] if mine else full[:0]

        def add(start: int, values: Tensor) -> None:
            target = out[start : start + values.numel()]
            if begun:
                target.add_(values)
            else:
                target.copy_(values)

        def land(writer: int, offset: int, data: Tensor) -> None:
            values = data.view(full.dtype)
            start = offset // item
            if world == 2:
                torch.add(own_values[start : start + values.numel()], values, out=out[start : start + values.numel()])
                return
            add(start, values)
            nonlocal begun
            begun = begun or start + values.numel() == out.numel()

        def own() -> None:
            nonlocal begun
            if world > 2:
                add(0, own_values)
                begun = True

        return self._launch(ring, Message(call, sends, land, out.numel() * item, own))

    def all_reduce_flat(self, call: Call, full: Tensor, layout: Layout) -> Work:
        return TwoSteps(self, call, full, layout)

    def exchange(
        self, call: Call, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], nbytes: Nbytes
    ) -> Work:
        rank = self.axis.rank
        copy(sends[rank], receives[rank])
        going, coming = dict(enumerate(map(ScatteredBytes, sends))), [*map(ScatteredBytes, receives)]

        def land(writer: int, offset: int, data: Tensor) -> None:
            coming[writer].write(offset, data)

        return self._launch(self._rings[call.channel], Message(call, going, land, nbytes))

    def order(self) -> int:
        return 0

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        rank, world = self.axis.rank, self.axis.world
        source = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
        landed = [torch.empty_like(source) for _ in range(world)]
        landed[rank].copy_(source)

        def land(writer: int, offset: int, data: Tensor) -> None:
            bytes_of(landed[writer])[offset : offset + data.numel()].copy_(data)

        self._launch(self._rings[CONTROL], Message(call, ScatteredBytes([source]), land, source.nbytes)).wait()
        stacked = torch.stack(landed)
        if op == "sum":
            total = landed[0]
            for other in landed[1:]:
                total = total + other
        else:
            total = stacked.amax(0) if op == "max" else stacked.amin(0)
        tensor.copy_(total.view(tensor.shape))

    def start_all_reduce(self, call: Call, tensor: Tensor, op: str) -> Work:
        self.all_reduce(call, tensor, op)
        return DONE

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        target = bytes_of(flat)
        root = self.axis.rank == 0

        def land(writer: int, offset: int, data: Tensor) -> None:
            if writer == 0:
                target[offset : offset + data.numel()].copy_(data)

        source = ScatteredBytes([target] if root else [])
        self._launch(self._rings[CONTROL], Message(call, source, land, target.numel(), only=0)).wait()
        if flat is not tensor:
            tensor.copy_(flat)

    def interrupt(self) -> None:
        for ring in self._rings:
            ring.interrupt()

    def renew(self, opened: Transport) -> None:
        assert isinstance(opened, SharedMemory)
        self._rings, self._board = opened._rings, opened._board
        opened.close()
        self._serve_together()

    def close(self) -> None:
        self.closed = True
        self._rings = self.served = []
        self._board = self.boards = []
        _OPEN.discard(self)
        self._serve_together()

    def _serve_together(self) -> None:
        """While a rank waits in one of an attachment's transports it goes on writing and reading for all of them."""
        shared = [other for other in _OPEN if other._failure is self._failure]
        rings = [ring for transport in shared for ring in transport._rings]
        for transport in shared:
            transport.served = rings
            here = set(transport.axis.ranks)
            transport.boards = [board for other in shared for board in other._board if here <= set(board.axis.ranks)]

    def _launch(self, ring: Ring, message: Message) -> Work:
        if ring.interrupted:
            # Not even what is there is taken: this rank shall stand where the others do.
            raise self._failure.fail(message.call, self.axis, "other ranks have given up this call", kind="gone")
        ring.launch(message)
        return _Waiting(self, ring, message)

    def finish(self, ring: Ring, message: Message) -> None:
        """Make progress until ``message`` is complete; the rings of all axes are served, so no rank starves another."""
        if ring.interrupted:
            raise self._gone(ring, message)
        try:
            self._finish(ring, message)
        finally:
            self._moved()

    def _finish(self, ring: Ring, message: Message) -> None:
        started = looked = time.monotonic()
        pause = 0.0
        while not message.done:
            if self._progress(message):
                started, pause = time.monotonic(), 0.0
                self._moved()
                continue
            waited = time.monotonic() - started
            if waited > self._failure.patience_s:
                raise self._late(ring, message)
            if started + waited - looked > LOOK_S:
                looked = started + waited
                # What a rank had written before it ended is still to be read.
                if self._is_over(ring):
                    if not self._progress(message):
                        raise self._gone(ring, message)
                    self._moved()
                else:
                    self._look(message)
            pause = 0.0 if waited < SPIN_S else min(0.001, pause + 0.00005)
            time.sleep(pause)

    def _moved(self) -> None:
        for board in self.boards:
            board.moved()

    def _look(self, message: Message) -> None:
        """Note that this rank waits.

        Raises:
            DivergenceError: all ranks do, each for another.
        """
        for stuck in [board for board in self.boards if board.look(message.call)]:
            found = f"The ranks wait for each other in different calls: {stuck.describe()}. {SAME_ORDER}"
            raise self._failure.fail(message.call, self.axis, found, kind="apart")

    def _progress(self, message: Message) -> bool:
        """Anything moved.

        Raises:
            DivergenceError: ranks make other calls.
        """
        try:
            moved = False
            for other in self.served:
                moved = other.progress() or moved
            return moved
        except DivergenceError as error:
            raise self._failure.fail(message.call, self.axis, str(error), kind="apart") from error

    def _is_over(self, ring: Ring) -> bool:
        """What is waited for may never come."""
        return any(other.interrupted for other in self.served) or self._failure.called(self.axis)

    def _late(self, ring: Ring, message: Message) -> DivergenceError:
        return self._failure.fail(message.call, self.axis, ring.describe_absent(message), suspects=ring.absent(message))

    def _gone(self, ring: Ring, message: Message) -> DivergenceError:
        return self._failure.fail(
            message.call, self.axis, ring.describe_absent(message), kind="gone", suspects=ring.absent(message)
        )


class _Waiting:
    __slots__ = ("_message", "_ring", "_transport")

    def __init__(self, transport: SharedMemory, ring: Ring, message: Message) -> None:
        self._transport, self._ring, self._message = transport, ring, message

    def wait(self) -> None:
        if not self._message.done:
            self._transport.finish(self._ring, self._message)

    def done(self) -> bool:
        return self._message.done


def _share(axis: Axis, meeting: Meeting, nbytes: int) -> mmap.mmap | str:
    """Memory that all ranks of the axis have mapped, or why they have not.

    It has no name: the first rank makes it (`memfd_create`), the others open it through that rank's descriptor, and the system
    frees it with the last process that maps it, however that one ends.  Nor has it the bound of /dev/shm.
    """
    what = f"shared memory of {axis.name_among}"
    memory, handle, place, problem = None, -1, "", ""
    me = f"rank {axis.ranks[axis.rank]} cannot share {nbytes} B of memory"
    if axis.rank == 0:
        try:
            place, handle = _reserve(nbytes)
        except OSError as error:
            problem = f"{me}: {error}"
        meeting.say(what, place)
    try:
        place = meeting.heard(what, axis.ranks[0])
        if place:
            try:
                memory = _open_at(place, nbytes)
            except OSError as error:
                problem = f"{me}: {error}"
        problem = meeting.agree(what, problem)
    finally:
        if handle >= 0:
            os.close(handle)
    if problem:
        return problem
    assert memory is not None
    return memory


def _reserve(nbytes: int) -> tuple[str, int]:
    """Memory of this process, every page of it taken now: one that is missing later would end a rank by SIGBUS."""
    if not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"expected Linux on x86-64, whose stores are ordered, found {sys.platform} on {platform.machine()}")
    token = secrets.token_bytes(TOKEN_BYTES)
    handle = os.memfd_create("zhooks")
    try:
        os.posix_fallocate(handle, 0, nbytes + TOKEN_BYTES)
        os.pwrite(handle, token, nbytes)
    except BaseException:
        os.close(handle)
        raise
    return f"{machine()} {os.getpid()} {handle} {token.hex()}", handle


def _open_at(place: str, nbytes: int) -> mmap.mmap:
    host, process, number, token = place.split()
    if host != machine():
        raise OSError("the first rank of the axis runs on another host, or in another container")
    handle = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(handle, TOKEN_BYTES, nbytes) != bytes.fromhex(token):
            raise OSError("the first rank's memory was not found")
        return mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)
