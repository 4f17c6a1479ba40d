"""Collectives between the ranks of one host through shared memory: one copy in, one copy out, no socket.

``comm.open_comm`` builds it for CPU ranks that share a host.  Every message carries the call it belongs to, so ranks that
make different calls are told so at once, by name; it never grows with the model (a ring of slots a rank and channel).
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zhooks.comm import CHANNELS, CONTROL, Call, Transport, Work, stuck
from zhooks.comm_ring import SLOT, SMALL_SLOT, Message, Ring
from zhooks.layout import Layout
from zhooks.mesh import Axis

SPIN_S = 0.002


class SharedMemory:
    """Collectives over one axis; sums are taken in rank order, so every rank computes the same bits."""

    name = "shm"
    closed = False

    def __init__(self, axis: Axis, group: dist.ProcessGroup, timeout_s: float, rings: list[Ring]) -> None:
        self.axis = axis
        self._group = group
        self._timeout_s = timeout_s
        self._rings = rings
        #: What is served while this rank waits: a rank that waits here may owe a message to one that waits elsewhere.
        self.served = rings
        self.nbytes = sum(ring.total for ring in rings)

    @classmethod
    def open(cls, axis: Axis, group: dist.ProcessGroup, timeout_s: float, bucket: int) -> SharedMemory | None:
        """Map one file for the axis' ranks; None on every rank when any rank cannot see it.  Collective."""
        large = (max(4, bucket // 2 // SLOT), SLOT)
        shapes = [(4, SMALL_SLOT) if channel == CONTROL else large for channel in CHANNELS]
        sizes = [Ring.nbytes(axis.world, slots, slot) for slots, slot in shapes]
        memory = _share(axis, group, sum(sizes))
        if memory is None:
            return None
        rings, offset = [], 0
        for (slots, slot), size in zip(shapes, sizes, strict=True):
            rings.append(Ring(memory, offset, axis, slots, slot))
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
        self.closed = True
        self._rings = self.served = []
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _launch(self, ring: Ring, message: Message) -> Work:
        ring.launch(message)
        return _Waiting(self, ring, message)

    def finish(self, ring: Ring, message: Message) -> None:
        """Make progress until ``message`` is complete; the rings of all axes are served, so no rank starves another."""
        started = time.monotonic()
        pause = 0.0
        while not message.done:
            moved = False
            for other in self.served:
                moved = other.progress() or moved
            if moved:
                started, pause = time.monotonic(), 0.0
                continue
            waited = time.monotonic() - started
            if waited > self._timeout_s:
                raise stuck(message.call, self.axis, self._timeout_s, ring.describe_absent(message))
            pause = 0.0 if waited < SPIN_S else min(0.001, pause + 0.00005)
            time.sleep(pause)


class _Waiting:
    __slots__ = ("_message", "_ring", "_transport")

    def __init__(self, transport: SharedMemory, ring: Ring, message: Message) -> None:
        self._transport, self._ring, self._message = transport, ring, message

    def wait(self) -> None:
        if not self._message.done:
            self._transport.finish(self._ring, self._message)


def serve_together(transports: Iterable[Transport]) -> None:
    """While a rank waits in one of these it goes on writing and reading for all of them."""
    shared = [transport for transport in transports if isinstance(transport, SharedMemory)]
    rings = [ring for transport in shared for ring in transport._rings]
    for transport in shared:
        transport.served = rings


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


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


def _share(axis: Axis, group: dist.ProcessGroup, nbytes: int) -> mmap.mmap | None:
    """One private file in /dev/shm mapped by all ranks of the axis and unlinked at once, so nothing is left behind."""
    folder, token = Path("/dev/shm"), np.zeros(64, dtype=np.uint8)
    path, memory = None, None
    if axis.rank == 0 and folder.is_dir():
        path = _create(folder, nbytes)
        if path is not None:
            raw = path.name.encode()
            token[: len(raw)] = np.frombuffer(raw, dtype=np.uint8)
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
