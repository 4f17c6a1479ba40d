"""Bytes of files that other ranks have: each rank asks for the ranges it wants, and gets them in chunks of a bounded size.

``resilience/peer_memory.py`` keeps copies on other hosts with it and reads what lies there.  It knows files by numbers and
bytes; it never decides who has a file, and never asks a rank for more than was wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offload.work import Work
from zhooks.comm.transport import Call, Transport

__all__ = ["Move", "Span", "fetch"]

#: A rank sends and receives at most so many bytes in a round, divided over all ranks; and never less than this for one.
_CHUNK, _LEAST = 8 << 20, 64 << 10

Move = Callable[[int, int, Tensor], None]
"""Between bytes of a file, by its number and where they begin, and a 1-D tensor of bytes."""


class Span(NamedTuple):
    """Bytes ``start`` to ``stop`` of a file, which ``server`` can read."""

    server: int
    file: int
    start: int
    stop: int


def fetch(
    transport: Transport, call: Call, wanted: Sequence[Span], read: Move, write: Move, device: torch.device, chunk: int = _CHUNK
) -> int:
    """Get ``wanted`` from their servers and serve what others want; returns the bytes received.  Collective.

    Args:
        read: fills the tensor with bytes of a file that this rank was named as the server of.
        write: takes bytes that came, in the order of ``wanted`` for each server.
        device: where the transport has its tensors.
    Raises:
        What ``read`` and ``write`` raise, once nothing is under way any more; the caller agrees on it with the other ranks.
    """
    world, rank = transport.axis.world, transport.axis.rank
    asked: list[list[Span]] = [[] for _ in range(world)]
    for span in wanted:
        asked[span.server].append(span)
    counts, sizes = _shared(transport, call, asked)
    requests = _requests(transport, call, asked, counts, device)
    going = [_Cursor(spans) for spans in requests]
    coming = [_Cursor([span[1:] for span in spans]) for spans in asked]
    most = max(_LEAST, chunk // world)
    problem: Exception | None = None
    # Two rounds are under way at once, so that one is read or written while the other travels; always in the same memory, for
    # fresh pages would cost as much as what is copied to them.
    turns = [
        (
            [torch.empty(min(most, total), dtype=torch.uint8, device="cpu") for total in sizes[rank]],
            [torch.empty(min(most, row[rank]), dtype=torch.uint8, device=device) for row in sizes],
        )
        for _ in range(2)
    ]
    under_way: deque[tuple[Work, list[Tensor]]] = deque()

    def land() -> None:
        nonlocal problem
        work, receives = under_way.popleft()
        work.wait()
        if problem is None:
            problem = _moved(zip(coming, (each.cpu() for each in receives), strict=True), write)

    for turn, low in enumerate(range(0, max(map(max, sizes)), most)):
        if len(under_way) == len(turns):
            land()
        outgoing, incoming = turns[turn % len(turns)]
        now = [[min(most, max(0, total - low)) for total in row] for row in sizes]
        sends = [memory[:nbytes] for memory, nbytes in zip(outgoing, now[rank], strict=True)]
        receives = [memory[: row[rank]] for memory, row in zip(incoming, now, strict=True)]
        if problem is None:
            problem = _moved(zip(going, sends, strict=True), read)
        there = [[each.to(device)] if each.numel() else [] for each in sends]
        work = transport.exchange(call, there, [[each] if each.numel() else [] for each in receives], now)
        under_way.append((work, receives))
    while under_way:
        land()
    if problem is not None:
        raise problem
    return sum(row[rank] for row in sizes)


def _moved(items: Iterator[tuple[_Cursor, Tensor]], move: Move) -> Exception | None:
    """Take all steps; what failed is kept, for the other ranks still wait for this one."""
    try:
        for cursor, data in items:
            at = 0
            for file, start, nbytes in cursor.take(data.numel()):
                move(file, start, data[at : at + nbytes])
                at += nbytes
    except Exception as error:
        return error
    return None


def _shared(transport: Transport, call: Call, asked: Sequence[Sequence[Span]]) -> tuple[list[list[int]], list[list[int]]]:
    """Ranges and bytes, by server and by who asks."""
    world, rank = transport.axis.world, transport.axis.rank
    both = torch.zeros(2, world, world, dtype=torch.int64, device="cpu")
    for server, spans in enumerate(asked):
        both[0, server, rank] = len(spans)
        both[1, server, rank] = sum(span.stop - span.start for span in spans)
    flat = both.reshape(-1)
    transport.all_reduce(call, flat, "sum")
    counts, sizes = flat.reshape(2, world, world).tolist()
    return counts, sizes


def _requests(
    transport: Transport, call: Call, asked: Sequence[Sequence[Span]], counts: Sequence[Sequence[int]], device: torch.device
) -> list[list[tuple[int, int, int]]]:
    """What each rank wants of this one."""
    world, rank = transport.axis.world, transport.axis.rank
    sends = [torch.tensor([span[1:] for span in spans], dtype=torch.int64, device=device).reshape(-1) for spans in asked]
    receives = [torch.zeros(3 * counts[rank][reader], dtype=torch.int64, device=device) for reader in range(world)]
    nbytes = [[24 * counts[server][reader] for server in range(world)] for reader in range(world)]
    lists = [[each] if each.numel() else [] for each in sends], [[each] if each.numel() else [] for each in receives]
    transport.exchange(call, *lists, nbytes).wait()
    return [[(file, start, stop) for file, start, stop in each.reshape(-1, 3).tolist()] for each in receives]


class _Cursor:
    """Ranges of files one after the other, taken in runs of any length."""

    def __init__(self, spans: Sequence[tuple[int, int, int]]) -> None:
        self._left = list(reversed(spans))

    def take(self, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(file, start, bytes) of the next so many."""
        while nbytes:
            file, start, stop = self._left.pop()
            count = min(nbytes, stop - start)
            if start + count < stop:
                self._left.append((file, start + count, stop))
            nbytes -= count
            if count:
                yield file, start, count
