"""A ring of labelled slots in memory that the ranks of one host share: messages in, messages out, in order.

``shared_memory.py`` makes one a channel and says what each message carries; it owns the protocol and its counters.  It
never waits: ``progress`` does what can be done now.

Note: [Ring]
    A channel is one ring of ``slots`` slots a rank.  The writer fills the slot of its next chunk, labels it, and
    then advances ``head``; each reader advances its own ``tail`` after copying out, and a slot is written again only when
    every reader has passed it.  Messages are consumed in the order they were launched.  Labels and counters are aligned
    64-bit words whose stores are ordered on x86-64 (total store order), the only machines ``open_comm`` lets in here.
    A reduce-scatter writes its ranges by destination; writers and readers both go in rank order, so no cycle of waiting
    can close however few the slots.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from offload.disk import started_ticks
from offload.errors import DivergenceError
from zhooks.comm import SAME_ORDER, Call, ScatteredBytes
from zhooks.layout import Axis

SLOT = 1 << 19
SMALL_SLOT = 1 << 17
LABEL_BYTES = 256


class Message:
    """One collective as this rank sees it: what it sends, and what to do with each chunk that arrives."""

    __slots__ = (
        "_nbytes", "arrived", "call", "land", "only", "own", "passed", "received", "sends", "sent", "total",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        sends: ScatteredBytes | Mapping[int, ScatteredBytes],
        land: Callable[[int, int, Tensor], None],
        nbytes: int | Sequence[Sequence[int]],
        own: Callable[[], None] | None = None,
        *,
        only: int | None = None,
    ) -> None:
        """``sends`` is for all, or by reader; ``nbytes`` is what any writer has for any reader, or by both."""
        self.call, self.sends, self.land, self._nbytes = call, sends, land, nbytes
        self.own, self.only = own, only
        # What all ranks must agree on: the whole of what is sent to one reader, or divided between them.
        if not isinstance(nbytes, int):
            self.total = sum(map(sum, nbytes))
        else:
            self.total = nbytes if isinstance(sends, ScatteredBytes) else nbytes * len(sends)
        self.received: dict[int, int] = {}
        #: The writers whose message has been read.
        self.passed: set[int] = set()
        self.arrived = False
        self.sent = False

    @property
    def divided(self) -> bool:
        """Every reader gets something else."""
        return not isinstance(self.sends, ScatteredBytes)

    def sent_to(self, readers: Sequence[int]) -> list[ScatteredBytes]:
        """What is written for these readers: once for all, or for one after the other."""
        return [self.sends] if isinstance(self.sends, ScatteredBytes) else [self.sends[reader] for reader in readers]

    def size(self, writer: int, reader: int) -> int:
        """Bytes that one rank has for another."""
        return self._nbytes if isinstance(self._nbytes, int) else self._nbytes[writer][reader]

    @property
    def done(self) -> bool:
        """Everything arrived, and nothing of ``sends`` is still to be read by the ring."""
        return self.arrived and self.sent


class Ring:
    """One channel: the outboxes of all ranks, and the messages this rank has yet to write and to read."""

    @staticmethod
    def nbytes(world: int, slots: int, slot: int) -> int:
        return world * (4096 * (1 + -(-slots * LABEL_BYTES // 4096)) + slots * slot)

    def __init__(self, memory: mmap.mmap, offset: int, axis: Axis, slots: int, slot: int) -> None:
        self._axis, self._slots, self._slot = axis, slots, slot
        self.total = self.nbytes(axis.world, slots, slot)
        self._head: list[np.ndarray] = []
        self._tail: list[np.ndarray] = []
        self._labels: list[list[memoryview]] = []
        self._data: list[list[Tensor]] = []
        self._process: list[np.ndarray] = []
        self._over = np.frombuffer(memory, dtype=np.int64, count=4, offset=offset)[3:]
        view = memoryview(memory)
        for _ in range(axis.world):
            counters = np.frombuffer(memory, dtype=np.int64, count=512, offset=offset)
            self._head.append(counters[:1])
            self._process.append(counters[1:3])
            self._tail.append(counters[8:])
            offset += 4096
            self._labels.append([view[offset + i * LABEL_BYTES : offset + (i + 1) * LABEL_BYTES] for i in range(slots)])
            offset += 4096 * -(-slots * LABEL_BYTES // 4096)
            block = torch.frombuffer(memory, dtype=torch.uint8, count=slots * slot, offset=offset)
            self._data.append(list(block.split(slot)))
            offset += slots * slot
        self._peers = [r for r in range(axis.world) if r != axis.rank]
        self._outgoing: deque[Iterator[bool]] = deque()
        self._incoming: deque[Message] = deque()
        self._taken = [0] * axis.world
        self._sequence = 0
        self._process[axis.rank][:] = os.getpid(), started_ticks(os.getpid()) or 0

    def lost(self) -> list[int]:
        """Ranks whose processes have ended."""
        known = [(r, *self._process[r].tolist()) for r in self._peers]
        return [self._axis.ranks[r] for r, process, ticks in known if process and started_ticks(process) != ticks]

    def interrupt(self) -> None:
        """Tell the others that this rank has given up a wait."""
        self._over[0] = 1

    @property
    def interrupted(self) -> bool:
        """Some rank has given up a wait: what is not here yet may never come."""
        return bool(self._over[0])

    def launch(self, message: Message) -> None:
        self._sequence += 1
        self._outgoing.append(self._write(message, self._sequence))
        self._incoming.append(message)
        message.received = dict.fromkeys(self._peers, 0)
        if message.only is not None:
            message.passed = set(self._peers) - {message.only}
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
        label = _label(message.call, sequence, message.total)
        head, tail = self._head[rank], self._tail[rank]
        for ranges in message.sent_to(self._peers):
            for start in range(0, ranges.nbytes, self._slot):
                while head[0] - min(int(tail[r]) for r in self._peers) >= self._slots:
                    yield False
                index = int(head[0]) % self._slots
                ranges.read(start, self._data[rank][index][: min(self._slot, ranges.nbytes - start)])
                self._labels[rank][index][: len(label)] = label
                head[0] += 1
                yield True
        message.sent = True

    def _read_some(self) -> bool:
        moved = False
        while self._incoming:
            message = self._incoming[0]
            for writer in self._peers:
                if message.own is not None and writer > self._axis.rank:
                    _once(message)
                moved = self._read_from(writer, message) or moved
                if message.divided and writer not in message.passed:
                    return moved
            if len(message.passed) < len(self._peers):
                return moved
            _once(message)
            self._incoming.popleft()
            message.arrived = True
            moved = True
        return moved

    def _read_from(self, writer: int, message: Message) -> bool:
        if writer in message.passed:
            return False
        rank = self._axis.rank
        nbytes = message.size(writer, rank)
        head, tail = self._head[writer], self._tail[writer]
        if message.received[writer] == 0 and message.divided:
            tail[rank] = self._taken[writer] + self._skipped(message, writer, before=True)
        moved = False
        while message.received[writer] < nbytes and head[0] > tail[rank]:
            index = int(tail[rank]) % self._slots
            if message.received[writer] == 0:
                self._check(message, writer, bytes(self._labels[writer][index]))
            size = min(self._slot, nbytes - message.received[writer])
            message.land(writer, message.received[writer], self._data[writer][index][:size])
            message.received[writer] += size
            tail[rank] += 1
            moved = True
        if message.received[writer] >= nbytes:
            message.passed.add(writer)
            self._taken[writer] += self._skipped(message, writer, before=False)
            tail[rank] = self._taken[writer]
        return moved

    def _skipped(self, message: Message, writer: int, *, before: bool) -> int:
        """Slots of ``writer``'s message that come before this rank's range, or all of them."""
        if not message.divided:
            return _count(message.size(writer, self._axis.rank), self._slot)
        readers = [r for r in range(self._axis.world) if r != writer and (not before or r < self._axis.rank)]
        return sum(_count(message.size(writer, r), self._slot) for r in readers)

    def _check(self, message: Message, writer: int, label: bytes) -> None:
        sequence = self._sequence - len(self._incoming) + 1
        expected = _label(message.call, sequence, message.total)
        if not label.startswith(expected):
            raise DivergenceError(
                f"The ranks make different calls: rank {self._axis.ranks[self._axis.rank]} is in {label_text(expected)}, "
                f"rank {self._axis.ranks[writer]} in {label_text(label)}. {SAME_ORDER}"
            )

    def absent(self, message: Message) -> list[int]:
        """Ranks that have not delivered, or else have not read."""
        return [self._axis.ranks[r] for r in self._peers if r not in message.passed]

    def describe_absent(self, message: Message) -> str:
        """Which ranks have not delivered, and what they delivered last on this channel."""
        late = [r for r in self._peers if r not in message.passed]
        said = []
        for rank in late:
            count = int(self._head[rank][0])
            last = label_text(self._labels[rank][(count - 1) % self._slots]) if count else ""
            made = f"last called {last}" if last else "has made no call yet"
            said.append(f"rank {self._axis.ranks[rank]} {made}")
        return "; ".join(said) or "the peers have not read what this rank sent"


def _once(message: Message) -> None:
    """Add this rank's own values when their turn in rank order has come."""
    if message.own is not None:
        own, message.own = message.own, None
        own()


def _label(call: Call, sequence: int, nbytes: int) -> bytes:
    return as_label(f"{call.what} {call.key} (call {sequence}, {nbytes} B)", LABEL_BYTES)


def as_label(text: str, most: int) -> bytes:
    """A text as it stands in memory that ranks share, in at most so many bytes."""
    return text.encode()[: most - 1] + b"\0"


def label_text(label: bytes | memoryview) -> str:
    """What `as_label` was given, as far as it fitted; what follows it in memory does not count."""
    return bytes(label).partition(b"\0")[0].decode(errors="replace")


def _count(nbytes: int, slot: int) -> int:
    return -(-nbytes // slot)
