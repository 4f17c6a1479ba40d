"""What torch's caching allocator would have reserved for a simulated run: a listener of the machine, and a replay after it.

``run.py`` adds it where an allocator was asked for.  It decides nothing: the rules are those of ``offload.allocator``.

Note: [Memory of several streams]
    A block goes back to the stream that took it.  What another stream was recorded to use is pending until that stream has come
    so far; the allocator looks when it is next asked for memory, by the host's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offload.allocator import ALLOC, RELEASE, REQUEST, Events, Lane, Settings, replay
from offload.virtual import ACCELERATOR, Access, Happening, Machine, Moment, Stream

__all__ = ["Allocations", "Reserved"]


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the allocator reserved of the device, from ``build`` to the end of the last step.

    Attributes:
        settings: as PYTORCH_ALLOC_CONF has them; "" is torch's default.
        nbytes: the most that was reserved.
        allocated: the most that was in use, in blocks as large as the allocator makes them.
        stuck: the most that was free, and could not go back because its segment or page had something in use.
        retries: how often everything free was given back to go on.
        failed: requests that the device had no memory for.
    """

    settings: str
    nbytes: int
    allocated: int
    stuck: int
    retries: int
    failed: int


class Allocations:
    """The device's allocations in the order the allocator was asked."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._rows: list[tuple[int, int, int, int, int]] = []
        #: By address: slot, bytes, lane.
        self._live: dict[int, tuple[int, int, int]] = {}
        self._lanes: dict[int, int] = {}
        #: By address: until when streams that did not take it use it.
        self._used: dict[int, float] = {}
        self._pending: list[tuple[float, int, int, int]] = []
        self._slots = 0

    def happened(self, happening: Happening) -> None: ...
    def recorded(self, moment: Moment, stream: Stream) -> None: ...
    def awaited(self, moment: Moment, stream: Stream) -> None: ...

    def kept(self, access: Access, stream: Stream) -> None:
        base = next((address for address in (access.start,) if address in self._live), None)
        if base is None:
            base = next((at for at, (_, size, _) in self._live.items() if at <= access.start < at + size), None)
        if base is not None:
            self._used[base] = max(self._used.get(base, 0.0), stream.ready)

    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None:
        if index != ACCELERATOR:
            return
        over = [one for one in self._pending if one[0] <= self._machine.now]
        self._pending = [one for one in self._pending if one[0] > self._machine.now]
        for _, slot, size, lane in over:
            self._note(RELEASE, slot, size, lane)
        lane = self._lanes.setdefault(stream.number, len(self._lanes))
        self._live[address] = (self._slots, nbytes, lane)
        self._note(ALLOC, self._slots, nbytes, lane)
        self._slots += 1

    def freed(self, address: int, nbytes: int, index: int) -> None:
        if index != ACCELERATOR or address not in self._live:
            return
        slot, size, lane = self._live.pop(address)
        until = self._used.pop(address, 0.0)
        if until > self._machine.now:
            self._pending.append((until, slot, size, lane))
            self._note(REQUEST, slot, size, lane)
        else:
            self._note(RELEASE, slot, size, lane)

    def _note(self, action: int, slot: int, nbytes: int, lane: int) -> None:
        self._rows.append((action, slot, nbytes, lane, int(self._machine.now * 1e9)))

    def reserved(self, settings: Settings, limit: int) -> Reserved:
        """What the allocator makes of them under these settings, on a device of ``limit`` bytes."""
        columns = np.asarray(self._rows, dtype=np.int64).reshape(-1, 5)
        events = Events(
            action=columns[:, 0].astype(np.uint8),
            slot=columns[:, 1].copy(),
            nbytes=columns[:, 2].copy(),
            lane=columns[:, 3].astype(np.int32),
            time_ns=columns[:, 4].copy(),
            lanes=tuple(Lane((0, 0), number) for number in self._lanes) or (Lane((0, 0), 0),),
        )
        found = replay(events, settings, limit=limit, points=2)
        return Reserved(
            settings.text, found.peak_reserved, found.peak_allocated, found.worst_stuck, found.retries, found.failed
        )
