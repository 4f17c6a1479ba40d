"""The disk tier on paper: extents without a file, requests that take the time the profile's disk takes.

``DiskFile.open`` is its counterpart for real disks; ``build/tiers.py`` opens it for models on the virtual device.  Nothing is
stored: it says when a transfer is over, and what memory it used.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from torch import Tensor

from offload.budget import cannot_admit
from offload.device import VirtualTask
from offload.disk.extent import Extent, ExtentFile, Verb, taken_by
from offload.errors import SimulationError
from offload.events import Bus
from offload.pages import ALIGN
from offload.tier import Tier
from offload.virtual import Access, Machine, access
from offload.work import HostWork

__all__ = ["VirtualDisk"]

#: How many requests are told apart by who looks for races: the next one is ordered after the one that many before it.
_LANES = 16
#: Where the file lies for who looks for races: beyond all memory.
_FILE = 1 << 60


class VirtualDisk(ExtentFile):
    """The scratch file that a rank would have.  Arguments and attributes as of `DiskFile`."""

    direct = True

    def __init__(self, machine: Machine, *, limit: int | None = None, bus: Bus | None = None) -> None:
        super().__init__(Path("virtual"), limit, ALIGN)
        self._machine, self._bus = machine, Bus() if bus is None else bus
        #: Requests take their time one after the other, and are in no order but for who waits for them.
        self._lanes = [machine.side(f"disk {number}") for number in range(_LANES)]
        self._asked = 0

    def allocate(self, nbytes: int, key: str) -> Extent:
        used = self.used - self.rounded
        if self.limit is not None and used + nbytes > self.limit:
            raise cannot_admit(Tier.DISK, key, nbytes, used=used, limit=self.limit, note="on the virtual disk")
        extent = self._take(nbytes, key)
        if extent is None:
            self._space.extend(self._space.lacking(taken_by(nbytes)))
            extent = self._take(nbytes, key)
        assert extent is not None
        return extent

    def free(self, extent: Extent) -> None:
        self._give(extent)

    def keep(self, extent: Extent, key: str) -> NoReturn:
        raise SimulationError(
            f"Cannot save {key}. Expected values to save, found the virtual disk, which stores none. Save in a real run."
        )

    def renew(self, extent: Extent, key: str) -> Extent:
        return extent

    def write(self, extent: Extent, source: Tensor, offset: int = 0, key: str = "") -> HostWork:
        return self._move(Verb.WRITE, extent, source, key)

    def read(self, extent: Extent, into: Tensor, offset: int = 0, key: str = "") -> HostWork:
        return self._move(Verb.READ, extent, into, key)

    def _move(self, verb: Verb, extent: Extent, tensor: Tensor, key: str) -> HostWork:
        """By the disk's own threads, one request after the other, after what the host has done so far."""
        machine, what = self._machine, f"disk {verb.value}"
        key = key or extent.key
        before, lane = (self._lanes[number % _LANES] for number in (self._asked - 1, self._asked))
        self._asked += 1
        lane.ready = before.ready
        machine.order(lane, machine.host)
        seconds = machine.costs.disk(verb.value, tensor.nbytes)
        uses = []
        if tensor.numel():
            start = _FILE + extent.offset
            uses = [access(tensor, writes=verb is Verb.READ), Access(start, start + tensor.nbytes, verb is Verb.WRITE)]
        happening = machine.do(what, lane, seconds, tensor.nbytes, uses)
        task = VirtualTask(machine, machine.moment(lane), f"thread of {lane.name}", happening)
        during = task.during
        assert during is not None
        self._bus.begin(what, key, tensor.nbytes, at=during.begin)
        self._bus.end(what, key, tensor.nbytes, at=during)
        return task

    def close(self) -> None:
        return None
