"""The host tier's memory: a few large slabs, page-locked once each and split to the exact size of each block.

The store and the disk tier's staging take and give; a slab is used again from step to step, so no step faults its pages in
or locks them anew.  It never rounds a block beyond a page, and never looks at what a block holds.

Note: [Under a limit]
    Memory that lies unused in slabs counts, too.  So where there is a limit each block has a slab of exactly its size, new or
    used before; free ones of other sizes are returned once their memory is needed.  Blocks whose sum is within the limit fit
    then, whatever came and went before.  Holes of other slabs are left from a time without a limit.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import weakref
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from offload.budget import cannot_admit
from offload.device import Device, HostMemory
from offload.errors import BudgetError, CapabilityError
from offload.pages import ALIGN, round_up
from offload.text import as_size, counted
from offload.tier import Tier

__all__ = ["HostPool"]

#: Steps a slab lies free before `trim` returns it: an evaluation between two training steps must not cost the slabs.
TRIM_STEPS = 4
#: A request above this fraction of a slab gets a slab of its own: several such in one would leave a large hole at its end.
OWN_FRACTION = 4

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class _Slab:
    """One mapping and its holes.

    Attributes:
        serial: the slab's number; older slabs have smaller ones.
        shared: small blocks lie here; otherwise it was made for one large block.
        hole_at, hole_before: bytes of a hole by its offset, and its offset by its end; no two holes touch.
        idle_steps: steps that have ended while it was free.
    """

    def __init__(self, serial: int, memory: HostMemory, nbytes: int, shared: bool) -> None:
        self.serial = serial
        self.nbytes = nbytes
        self.shared = shared
        self.memory = memory
        self.hole_at: dict[int, int] = {0: nbytes}
        self.hole_before: dict[int, int] = {nbytes: 0}
        self.idle_steps = 0

    def whole(self) -> Tensor:
        """A tensor over all of it."""
        return self.memory.tensor(0, self.nbytes)

    def split(self, offset: int, nbytes: int) -> tuple[int, int] | None:
        """Take ``nbytes`` from the start of the hole at ``offset``; what is left of it as (offset, nbytes)."""
        span = self.hole_at.pop(offset)
        del self.hole_before[offset + span]
        if span == nbytes:
            return None
        self._add(offset + nbytes, span - nbytes)
        return offset + nbytes, span - nbytes

    def give_back(self, offset: int, nbytes: int) -> tuple[tuple[int, int], list[tuple[int, int]]]:
        """Give a range back; the hole it is now in, and the neighbouring holes that this one swallowed."""
        swallowed = []
        after = self.hole_at.get(offset + nbytes)
        if after is not None:
            swallowed.append((offset + nbytes, after))
        before = self.hole_before.get(offset)
        if before is not None:
            swallowed.append((before, offset - before))
        for start, span in swallowed:
            del self.hole_at[start], self.hole_before[start + span]
            offset, nbytes = min(offset, start), nbytes + span
        self._add(offset, nbytes)
        return (offset, nbytes), swallowed

    def is_free(self) -> bool:
        """Whether nothing is taken from it."""
        return self.hole_at.get(0) == self.nbytes

    def unmap(self) -> None:
        """Return the memory now, or with the last tensor that still looks at it."""
        self.memory.close()

    def _add(self, offset: int, nbytes: int) -> None:
        self.hole_at[offset] = nbytes
        self.hole_before[offset + nbytes] = offset


@dataclass(frozen=True, slots=True)
class _Taken:
    """A block that is taken: where it lies, its pages and what was asked for, and the identity of its storage."""

    slab: _Slab
    offset: int
    nbytes: int
    asked: int
    storage: int


class HostPool:
    """Page-aligned host memory, taken from slabs; any thread may call.

    Args:
        device: whose copies must reach the memory; it says whether and how it is locked.
        limit: the most bytes of slabs, so that it holds for the machine and not only for the sum of the blocks; what blocks
            lose by starting on pages of their own comes on top.  It may be changed.
        slab_nbytes: of a slab for small blocks, where there is no limit.
        pin: None locks where the device can; False leaves the memory pageable.
    """

    def __init__(
        self, device: Device, *, limit: int | None = None, slab_nbytes: int = 64 << 20, pin: bool | None = None
    ) -> None:
        assert slab_nbytes >= ALIGN, "a slab is at least a page"
        self._device = device
        self.limit = limit
        self._slab_nbytes = round_up(slab_nbytes)
        self._pin = device.pins() and pin is not False
        self._node = _distant_node(device)
        self._lock = threading.Lock()
        self._slabs: dict[int, _Slab] = {}
        self._serial = 0
        # Holes by size, then age of the slab and place: bisection finds the best fit, and old slabs fill first.
        self._holes: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self._taken: dict[int, _Taken] = {}
        self._used = self._high_water = self._reserved = 0
        #: Bytes between the ends of blocks and of their pages.
        self._rounded = 0
        # A pool that is dropped unclosed must not leave memory locked whose addresses are then mapped anew.
        self._release = weakref.finalize(self, _return_all, device if self._pin else None, self._slabs)

    @property
    def used(self) -> int:
        """Bytes taken now, in whole pages."""
        return self._used

    @property
    def high_water(self) -> int:
        """The most bytes that were taken at once."""
        return self._high_water

    @property
    def reserved(self) -> int:
        """Bytes of all slabs: what the machine gave, used or not."""
        return self._reserved

    @property
    def rounded(self) -> int:
        """Bytes that blocks take beyond what was asked for, for they end on pages of their own."""
        return self._rounded

    @property
    def pinned(self) -> bool:
        """Slabs are locked: all of them is resident, used or not."""
        return self._pin

    def take(self, nbytes: int, key: str) -> Tensor:
        """uint8 [nbytes] of host memory, contents undefined, locked where the device locks.

        It starts on a page in a storage of its own, which spans whole pages (the bytes past ``nbytes`` are the taker's).

        Args:
            key: what errors call it.
        Raises:
            BudgetError: the limit, or the system, does not allow it.
            CapabilityError: a new slab cannot be locked.
        """
        span = round_up(nbytes)
        if span == 0:
            with torch.inference_mode(False):
                return torch.empty(0, dtype=torch.uint8, device=self._device.host)
        with self._lock:
            assert self._release.alive, f"host tier: {key} is taken from a closed pool"
            slab, offset = self._find(span, nbytes, key)
            self._holes[slab.shared].remove((slab.hole_at[offset], slab.serial, offset))
            left = slab.split(offset, span)
            if left is not None:
                insort(self._holes[slab.shared], (left[1], slab.serial, left[0]))
            tensor = slab.memory.tensor(offset, nbytes)
            self._taken[tensor.data_ptr()] = _Taken(slab, offset, span, nbytes, tensor.untyped_storage()._cdata)
            self._used += span
            self._rounded += span - nbytes
            self._high_water = max(self._high_water, self._used)
            return tensor

    def give(self, tensor: Tensor) -> None:
        """Take back what `take` gave: that tensor or any view of it. Nobody may use the memory afterwards."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return
        with self._lock:
            taken = self._taken.get(storage.data_ptr())
            # The storage's identity, not its address: an old tensor over memory that was taken again is a stranger.
            ours = taken is not None and taken.storage == storage._cdata
            assert taken is not None and ours, "host tier: a tensor was given back that is not taken (twice, or not its own)"
            del self._taken[storage.data_ptr()]
            slab, holes = taken.slab, self._holes[taken.slab.shared]
            hole, swallowed = slab.give_back(taken.offset, taken.nbytes)
            for offset, span in swallowed:
                holes.remove((span, slab.serial, offset))
            insort(holes, (hole[1], slab.serial, hole[0]))
            self._used -= taken.nbytes
            self._rounded -= taken.nbytes - taken.asked
            slab.idle_steps = 0

    def trim(self) -> int:
        """End a step: return slabs that no block has lain in for the last steps; the bytes returned."""
        with self._lock:
            free = [slab for slab in self._slabs.values() if slab.is_free()]
            for slab in free:
                slab.idle_steps += 1
            return sum(self._return(slab) for slab in free if slab.idle_steps > TRIM_STEPS)

    def release_heap(self) -> None:
        """Return what the allocator keeps of freed tensors: glibc gives back on its own only what lies at the heap's end.

        Nothing where the device has memory of its own, or where the allocator is another.
        """
        trim = getattr(_libc(), "malloc_trim", None) if self._device.addresses_host else None
        if trim is not None:
            trim(0)

    def close(self) -> None:
        """Unlock and return all memory; no copy may be under way. What is still looked at lives until it is not."""
        with self._lock:
            self._release()
            self._taken.clear()
            self._holes = {True: [], False: []}
            self._used = self._reserved = self._rounded = 0

    def _find(self, span: int, nbytes: int, key: str) -> tuple[_Slab, int]:
        """A hole of at least ``span`` bytes, in a new slab if need be."""
        if self.limit is not None:
            return self._find_within(self.limit, span, nbytes, key)
        shared = span * OWN_FRACTION <= self._slab_nbytes
        return self._best(span, shared) or (self._grow(self._slab_nbytes if shared else span, shared, key), 0)

    def _find_within(self, limit: int, span: int, nbytes: int, key: str) -> tuple[_Slab, int]:
        """See Note [Under a limit]."""
        found = self._best(span, False, span)
        if found is not None:
            return found
        left = (limit + self._rounded + span - nbytes) // ALIGN * ALIGN - self._reserved
        if left < span:
            left += self._shrink(span - left)
        if left >= span:
            return self._grow(span, False, key), 0
        found = self._best(span, False) or self._best(span, True)
        if found is None:
            raise self._full(nbytes, key)
        return found

    def _best(self, span: int, shared: bool, most: int | None = None) -> tuple[_Slab, int] | None:
        """The smallest hole of at least ``span`` bytes and of at most so many."""
        holes = self._holes[shared]
        index = bisect_left(holes, (span, 0, 0))
        if index == len(holes) or (most is not None and holes[index][0] > most):
            return None
        return self._slabs[holes[index][1]], holes[index][2]

    def _grow(self, nbytes: int, shared: bool, key: str) -> _Slab:
        try:
            slab = _Slab(self._serial, self._device.map_host(nbytes, locked=self._pin), nbytes, shared)
        except CapabilityError as error:
            raise _not_locked(key, error) from error
        except (OSError, OverflowError, MemoryError, ValueError) as error:
            raise BudgetError(
                f"host tier cannot admit {key}. Expected the system to map {as_size(nbytes)}, found {error}; raise RLIMIT_AS "
                f'(ulimit -v) or the memory limit, or set [optimizer] tier = "disk"'
            ) from error
        if self._node is not None:
            _prefer(slab, self._node)
        if self._pin:
            try:
                self._device.pin(slab.whole())
            except CapabilityError as error:
                slab.unmap()
                raise _not_locked(key, error) from error
        self._serial += 1
        self._slabs[slab.serial] = slab
        self._reserved += nbytes
        insort(self._holes[shared], (nbytes, slab.serial, 0))
        return slab

    def _shrink(self, nbytes: int) -> int:
        """Return free slabs of ``nbytes`` or a little more, the largest first, or none if that is not to be had."""
        free = sorted((slab for slab in self._slabs.values() if slab.is_free()), key=lambda slab: (-slab.nbytes, -slab.serial))
        returned = 0
        if sum(slab.nbytes for slab in free) >= nbytes:
            while returned < nbytes:
                returned += self._return(free.pop(0))
        return returned

    def _return(self, slab: _Slab) -> int:
        """Unlock and unmap a free slab; its bytes."""
        if self._pin:
            self._device.unpin(slab.whole())
        slab.unmap()
        del self._slabs[slab.serial]
        self._holes[slab.shared].remove((slab.nbytes, slab.serial, 0))
        self._reserved -= slab.nbytes
        return slab.nbytes

    def _full(self, nbytes: int, key: str) -> BudgetError:
        assert self.limit is not None, "only a limit is ever full"
        used, note = self._used - self._rounded, ""
        if used + nbytes <= self.limit:
            note = f"in {counted(len(self._slabs), 'slab')} ({as_size(self._reserved)})"
        return cannot_admit(Tier.HOST, key, nbytes, used=used, limit=self.limit, note=note)


def _not_locked(key: str, error: CapabilityError) -> CapabilityError:
    return CapabilityError(f"host tier cannot lock memory for {key}: {error}")


def _return_all(device: Device | None, slabs: dict[int, _Slab]) -> None:
    """The end of a pool, closed or dropped; ``device`` is None where nothing is locked."""
    for slab in slabs.values():
        if device is not None:
            device.unpin(slab.whole())
        slab.unmap()
    slabs.clear()


# --- where on the machine ---------------------------------------------------------------------------------------------


def _distant_node(device: Device, root: Path = Path("/sys")) -> int | None:
    """The NUMA node beside the device, on machines that have several; None leaves the kernel's choice."""
    place = device.pci_address()
    try:
        online = (root / "devices/system/node/online").read_text().strip()
        if place is None or online.isdigit():
            return None
        node = int((root / "bus/pci/devices" / place / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _prefer(slab: _Slab, node: int) -> bool:
    """Ask for the slab's pages on ``node``, before the first is touched; a full or forbidden node is no error."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    address = ctypes.c_void_p(slab.whole().data_ptr())
    length, bits = ctypes.c_ulong(slab.nbytes), ctypes.c_ulong(words * 64 + 1)
    return bool(call(ctypes.c_long(number), address, length, ctypes.c_int(_MPOL_PREFERRED), mask, bits, ctypes.c_uint(0)) == 0)
