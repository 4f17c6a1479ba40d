"""Collectives between the ranks of one host through shared memory: one copy in, one copy out, no socket.

``comm.open_comm`` builds it for CPU ranks that share a host.  Every message carries the call it belongs to, so ranks that
make different calls are told so at once, by name; it never grows with the model (a ring of slots a rank and channel).

Note: [Ring]
    A channel is one ring of ``slots`` slots a rank.  The writer fills the slot of its next message part, labels it, and
    then advances ``head``; each reader advances its own ``tail`` after copying out, and a slot is written again only when
    every reader has passed it.  Messages are consumed in the order they were launched.  Labels and counters are aligned
    64-bit words whose stores are ordered on x86-64 (total store order), the only machines ``open_comm`` lets in here.
    A reduce-scatter writes its parts by destination; writers and readers both go in rank order, so no cycle of waiting
    can close however few the slots.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import DivergenceError
from zhooks.comm import CHANNELS, CONTROL, Call, Work, stuck
from zhooks.layout import Layout
from zhooks.mesh import Axis

SLOT = 1 << 20
LABEL_BYTES = 256
SPIN_S = 0.002


class SharedMemory:
    """Collectives over one axis; sums are taken in rank order, so every rank computes the same bits."""

    name = "shm"

    def __init__(self, axis: Axis, group: dist.ProcessGroup, timeout_s: float, rings: list[Ring]) -> None:
        self.axis = axis
        self._group = group
        self._timeout_s = timeout_s
        self._rings = rings

    @classmethod
    def open(cls, axis: Axis, group: dist.ProcessGroup, timeout_s: float, bucket: int) -> SharedMemory | None:
        """Map one file for the axis' ranks; None on every rank when any rank cannot see it.  Collective."""
        slots = max(4, bucket // 2 // SLOT)
        sizes = [Ring.nbytes(axis.world, slots), Ring.nbytes(axis.world, slots), Ring.nbytes(axis.world, 4)]
        memory = _share(axis, group, sum(sizes))
        if memory is None:
            return None
        rings, offset = [], 0
        for channel, size in zip(CHANNELS, sizes, strict=True):
            count = 4 if channel == CONTROL else slots
            rings.append(Ring(memory, offset, axis, count))
            offset += size
        return cls(axis, group, timeout_s, rings)

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        ring, rank = self._rings[call.channel], self.axis.rank
        ranges = [layout.ranges(r) for r in range(self.axis.world)]
        item = full.element_size()
        step = 0
        for start, stop in ranges[rank]:
            own = full[start:stop]
            if own.data_ptr() != shard.data_ptr() + step * item:
                own.copy_(shard[step : step + stop - start])
            step += stop - start
        source, target = _bytes(shard), _bytes(full)
        parts = {r: [(a * item, b * item) for a, b in ranges[r]] for r in range(self.axis.world)}

        def land(writer: int, offset: int, data: Tensor) -> None:
            _scatter(target, parts[writer], offset, data)

        message = Message(call, source, None, land, source.numel())
        return self._launch(ring, message)

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        ring, rank, world = self._rings[call.channel], self.axis.rank, self.axis.world
        item, mine = full.element_size(), layout.ranges(rank)
        source = _bytes(full)
        parts = {r: [(a * item, b * item) for a, b in layout.ranges(r)] for r in range(world)}
        begun = False

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
                torch.add(_read(full, mine, start, values.numel()), values, out=out[start : start + values.numel()])
                return
            add(start, values)
            nonlocal begun
            begun = begun or start + values.numel() == out.numel()

        def own() -> None:
            nonlocal begun
            if world > 2:
                add(0, _read(full, mine, 0, out.numel()))
                begun = True

        message = Message(call, source, parts, land, out.numel() * item, own)
        return self._launch(ring, message)

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        rank, world = self.axis.rank, self.axis.world
        source = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
        landed = [torch.empty_like(source) for _ in range(world)]
        landed[rank].copy_(source)

        def land(writer: int, offset: int, data: Tensor) -> None:
            _bytes(landed[writer])[offset : offset + data.numel()].copy_(data)

        message = Message(call, _bytes(source), None, land, source.numel() * source.element_size())
        self._launch(self._rings[CONTROL], message).wait()
        stacked = torch.stack(landed)
        if op == "sum":
            total = landed[0]
            for part in landed[1:]:
                total = total + part
        else:
            total = stacked.amax(0) if op == "max" else stacked.amin(0)
        tensor.copy_(total.view(tensor.shape))

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        target = _bytes(flat.view(-1))
        root = self.axis.rank == 0

        def land(writer: int, offset: int, data: Tensor) -> None:
            if writer == 0:
                target[offset : offset + data.numel()].copy_(data)

        source = target if root else target[:0]
        message = Message(call, source, None, land, target.numel(), only=0)
        self._launch(self._rings[CONTROL], message).wait()
        if flat is not tensor:
            tensor.copy_(flat)

    def close(self) -> None:
        self._rings = []
        dist.destroy_process_group(self._group)

    def _launch(self, ring: Ring, message: Message) -> Work:
        ring.launch(message)
        return _Waiting(self, ring, message)

    def finish(self, ring: Ring, message: Message) -> None:
        """Make progress until ``message`` is complete; all rings are served, so no rank starves another."""
        started = time.monotonic()
        pause = 0.0
        while not message.done:
            moved = False
            for other in self._rings:
                moved = other.progress() or moved
            if moved:
                started, pause = time.monotonic(), 0.0
                continue
            waited = time.monotonic() - started
            if waited > self._timeout_s:
                raise stuck(message.call, self.axis, self._timeout_s, ring.describe_absent(message))
            pause = 0.0 if waited < SPIN_S else min(0.001, pause + 0.00005)
            time.sleep(pause)


class Message:
    """One collective as this rank sees it: what it sends, and what to do with each part that arrives."""

    __slots__ = ("arrived", "call", "land", "nbytes", "only", "own", "parts", "received", "sent", "source")

    def __init__(
        self,
        call: Call,
        source: Tensor,
        parts: dict[int, list[tuple[int, int]]] | None,
        land: Callable[[int, int, Tensor], None],
        nbytes: int,
        own: Callable[[], None] | None = None,
        *,
        only: int | None = None,
    ) -> None:
        self.call, self.source, self.parts, self.land, self.nbytes = call, source, parts, land, nbytes
        self.own, self.only = own, only
        self.received: dict[int, int] = {}
        self.arrived = False
        self.sent = False

    @property
    def done(self) -> bool:
        """Everything arrived, and nothing of ``source`` is still to be read by the ring."""
        return self.arrived and self.sent


class Ring:
    """One channel: the outboxes of all ranks, and the messages this rank has yet to write and to read."""

    @staticmethod
    def nbytes(world: int, slots: int) -> int:
        return world * (4096 * (1 + -(-slots * LABEL_BYTES // 4096)) + slots * SLOT)

    def __init__(self, memory: mmap.mmap, offset: int, axis: Axis, slots: int) -> None:
        self._axis, self._slots = axis, slots
        self._head: list[np.ndarray] = []
        self._tail: list[np.ndarray] = []
        self._labels: list[list[memoryview]] = []
        self._data: list[list[Tensor]] = []
        view = memoryview(memory)
        for _ in range(axis.world):
            counters = np.frombuffer(memory, dtype=np.int64, count=512, offset=offset)
            self._head.append(counters[:1])
            self._tail.append(counters[8:])
            offset += 4096
            self._labels.append(
                [view[offset + i * LABEL_BYTES : offset + (i + 1) * LABEL_BYTES] for i in range(slots)]
            )
            offset += 4096 * -(-slots * LABEL_BYTES // 4096)
            block = torch.frombuffer(memory, dtype=torch.uint8, count=slots * SLOT, offset=offset)
            self._data.append(list(block.split(SLOT)))
            offset += slots * SLOT
        self._peers = [r for r in range(axis.world) if r != axis.rank]
        self._outgoing: deque[Iterator[bool]] = deque()
        self._incoming: deque[Message] = deque()
        self._taken = [0] * axis.world
        self._sequence = 0

    def launch(self, message: Message) -> None:
        self._sequence += 1
        self._outgoing.append(self._write(message, self._sequence))
        self._incoming.append(message)
        silent = message.nbytes if message.only is not None else 0
        message.received = {r: 0 if r == message.only else silent for r in self._peers}
        self._write_some()

    def progress(self) -> bool:
        """Write and read what can be without waiting; True when anything moved."""
        return self._write_some() | self._read_some()

    def _write_some(self) -> bool:
        moved = False
        while self._outgoing:
            for wrote in self._outgoing[0]:
                if not wrote:
                    return moved
                moved = True
            self._outgoing.popleft()
        return moved

    def _write(self, message: Message, sequence: int) -> Iterator[bool]:
        """Yield True for each slot written and False when the ring is full."""
        rank = self._axis.rank
        if message.only is not None and message.only != rank:
            message.sent = True
            return
        label = _label(message.call, sequence)
        head, tail = self._head[rank], self._tail[rank]
        for source in self._sends(message):
            while head[0] - min(int(tail[r]) for r in self._peers) >= self._slots:
                yield False
            index = int(head[0]) % self._slots
            self._data[rank][index][: source.numel()].copy_(source)
            self._labels[rank][index][: len(label)] = label
            head[0] += 1
            yield True
        message.sent = True

    def _sends(self, message: Message) -> Iterator[Tensor]:
        if message.parts is None:
            yield from _slots_of(message.source)
            return
        for reader in self._peers:
            yield from _parts_of(message.source, message.parts[reader])

    def _read_some(self) -> bool:
        moved = False
        while self._incoming:
            message = self._incoming[0]
            for writer in self._peers:
                if message.own is not None and writer > self._axis.rank:
                    _once(message)
                moved = self._read_from(writer, message) or moved
                if message.parts is not None and message.received[writer] < message.nbytes:
                    return moved
            if any(got < message.nbytes for got in message.received.values()):
                return moved
            _once(message)
            self._incoming.popleft()
            message.arrived = True
            moved = True
        return moved

    def _read_from(self, writer: int, message: Message) -> bool:
        rank = self._axis.rank
        if message.received[writer] >= message.nbytes:
            return False
        head, tail = self._head[writer], self._tail[writer]
        if message.received[writer] == 0 and message.parts is not None:
            tail[rank] = self._taken[writer] + self._skipped(message, writer, before=True)
        moved = False
        while message.received[writer] < message.nbytes and head[0] > tail[rank]:
            index = int(tail[rank]) % self._slots
            if message.received[writer] == 0:
                self._check(message, writer, bytes(self._labels[writer][index]))
            size = min(SLOT, message.nbytes - message.received[writer])
            message.land(writer, message.received[writer], self._data[writer][index][:size])
            message.received[writer] += size
            tail[rank] += 1
            moved = True
        if message.received[writer] >= message.nbytes:
            total = self._skipped(message, writer, before=False)
            self._taken[writer] += total
            tail[rank] = self._taken[writer]
        return moved

    def _skipped(self, message: Message, writer: int, *, before: bool) -> int:
        """Slots of ``writer``'s message that come before this rank's part, or all of them."""
        if message.parts is None:
            return _count(message.nbytes)
        readers = [r for r in range(self._axis.world) if r != writer and (not before or r < self._axis.rank)]
        return sum(_count(sum(b - a for a, b in message.parts[r])) for r in readers)

    def _check(self, message: Message, writer: int, label: bytes) -> None:
        sequence = self._sequence - len(self._incoming) + 1
        expected = _label(message.call, sequence)
        found = label.partition(b"\0")[0]
        if found != expected[:-1]:
            raise DivergenceError(
                f"rank {self._axis.ranks[self._axis.rank]} is in {expected[:-1].decode(errors='replace')}, "
                f"rank {self._axis.ranks[writer]} in {found.decode(errors='replace')}: expected every rank to make the same "
                "calls in the same order. Let every rank run the same model code; put modules that only some ranks enter "
                "into their parent's unit with [units] names."
            )

    def describe_absent(self, message: Message) -> str:
        """Which ranks have not delivered, and what they delivered last on this channel."""
        late = [r for r in self._peers if message.received.get(r, 0) < message.nbytes]
        said = []
        for rank in late:
            count = int(self._head[rank][0])
            last = bytes(self._labels[rank][(count - 1) % self._slots]).partition(b"\0")[0] if count else b"nothing"
            said.append(f"rank {self._axis.ranks[rank]} last made {last.decode(errors='replace')}")
        return "; ".join(said) or "the peers have not read what this rank sent"


class _Waiting:
    __slots__ = ("_message", "_ring", "_transport")

    def __init__(self, transport: SharedMemory, ring: Ring, message: Message) -> None:
        self._transport, self._ring, self._message = transport, ring, message

    def wait(self) -> None:
        if not self._message.done:
            self._transport.finish(self._ring, self._message)


def _once(message: Message) -> None:
    """Add this rank's own values when their turn in rank order has come."""
    if message.own is not None:
        own, message.own = message.own, None
        own()


def _label(call: Call, sequence: int) -> bytes:
    return f"{call.what} {call.key} (call {sequence})".encode()[: LABEL_BYTES - 1] + b"\0"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _count(nbytes: int) -> int:
    return -(-nbytes // SLOT)


def _slots_of(source: Tensor) -> Iterator[Tensor]:
    for start in range(0, source.numel(), SLOT):
        yield source[start : start + SLOT]


def _parts_of(source: Tensor, parts: list[tuple[int, int]]) -> Iterator[Tensor]:
    if len(parts) == 1:
        yield from _slots_of(source[parts[0][0] : parts[0][1]])
        return
    yield from _slots_of(torch.cat([source[a:b] for a, b in parts]))


def _scatter(target: Tensor, parts: list[tuple[int, int]], offset: int, data: Tensor) -> None:
    """Write ``data``, found at ``offset`` of the concatenated ``parts``, to its places in ``target``."""
    done = 0
    for start, stop in parts:
        size = stop - start
        if offset < size and done < data.numel():
            count = min(size - offset, data.numel() - done)
            target[start + offset : start + offset + count].copy_(data[done : done + count])
            done += count
            offset = 0
        else:
            offset = max(0, offset - size)


def _read(full: Tensor, parts: tuple[tuple[int, int], ...], offset: int, numel: int) -> Tensor:
    """``numel`` elements at ``offset`` of the concatenated ``parts`` of ``full``; a view where there is one part."""
    if len(parts) == 1:
        start = parts[0][0] + offset
        return full[start : start + numel]
    return torch.cat([full[a:b] for a, b in parts])[offset : offset + numel]


def _share(axis: Axis, group: dist.ProcessGroup, nbytes: int) -> mmap.mmap | None:
    """One private file in /dev/shm mapped by all ranks of the axis and unlinked at once, so nothing is left behind."""
    folder, token = Path("/dev/shm"), np.zeros(64, dtype=np.uint8)
    path, memory = None, None
    if axis.rank == 0 and folder.is_dir():
        path = _create(folder, nbytes)
        if path is not None:
            name = path.name.encode()
            token[: len(name)] = np.frombuffer(name, dtype=np.uint8)
    shared = torch.from_numpy(token)
    dist.broadcast(shared, src=axis.ranks[0], group=group)
    name = bytes(shared.numpy()).rstrip(b"\0").decode()
    try:
        if name:
            with open(folder / name, "r+b") as file:
                memory = mmap.mmap(file.fileno(), nbytes)
    except (OSError, ValueError):
        memory = None
    seen = torch.tensor([memory is not None], dtype=torch.int32)
    dist.all_reduce(seen, op=dist.ReduceOp.MIN, group=group)
    if path is not None:
        path.unlink(missing_ok=True)
    return memory if bool(seen.item()) else None


def _create(folder: Path, nbytes: int) -> Path | None:
    usage = os.statvfs(folder)
    if usage.f_bavail * usage.f_frsize < 2 * nbytes:
        return None
    handle, path = tempfile.mkstemp(prefix=f"zhooks-{secrets.token_hex(8)}-", dir=folder)
    os.ftruncate(handle, nbytes)
    os.close(handle)
    return Path(path)
