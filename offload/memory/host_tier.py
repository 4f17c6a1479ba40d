"""The host tier's memory: a few large slabs, page-locked once each and split to the exact size of each block.

A slab is used again from step to step, so no step faults its pages in or locks them anew.

Note: [Under a limit]
    Memory that lies unused in slabs counts, too.  So where there is a limit each block has a slab of exactly its size, new or
    used before; free ones of other sizes are returned once their memory is needed.  Blocks whose sum is within the limit fit
    then, whatever came and went before.  Holes of other slabs are left from a time without a limit."""

from __future__ import annotations

import ctypes
import platform
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from offload.budget import cannot_admit
from offload.device import Device, HostMemory
from offload.errors import BudgetError, CapabilityError
from offload.free_ranges import Space
from offload.pages import ALIGN, round_up
from offload.text import as_size, counted
from offload.tier import Tier

__all__ = ["HostPool"]

#: Steps a slab lies free before `trim` returns it: an evaluation between two training steps must not cost the slabs.
TRIM_STEPS = 4
#: A request above this fraction of a slab gets a slab of its own: several such in one would leave a large hole at its end.
OWN_FRACTION = 4

#: Offsets of one slab, which has less than so many bytes.
_SLAB_BITS = 50
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True, eq=False)
class _Slab:
    """One mapping.

    Attributes:
        start: where its offsets begin among those of all slabs; of older ones they are smaller.
        shared: small blocks lie here; otherwise it was made for one large block.
        used: bytes taken from it.
        idle_steps: steps that have ended while none was.
    """

    start: int
    memory: HostMemory
    nbytes: int
    shared: bool
    used: int = 0
    idle_steps: int = 0

    def whole(self) -> Tensor:
        """A tensor over all of it."""
        return self.memory.tensor(0, self.nbytes)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A block that is taken: where it lies, its pages and what was asked for, and the identity of its storage."""

    slab: _Slab
    start: int
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
    Attributes:
        used: bytes taken now, in whole pages; ``high_water`` is the most that were at once.
        reserved: bytes of all slabs: what the machine gave, used or not.
        rounded: bytes that blocks take beyond what was asked for, because they end on pages of their own.
        pinned: slabs are locked: all of them is resident, used or not.
    """

    def __init__(
        self, device: Device, *, limit: int | None = None, slab_nbytes: int = 64 << 20, pin: bool | None = None
    ) -> None:
        assert slab_nbytes >= ALIGN, "a slab is at least a page"
        self._device = device
        self.limit = limit
        self._slab_nbytes = round_up(slab_nbytes)
        self.pinned = device.pins() and pin is not False
        self._node = _distant_node(device)
        self._lock = threading.Lock()
        self._slabs: dict[int, _Slab] = {}
        self._serial = 0
        #: What is free of slabs that are shared, and of others; a slab is known by the upper bits of its offsets.
        self._spaces = {True: Space(0), False: Space(0)}
        self._taken: dict[int, _Taken] = {}
        self.used = self.high_water = self.reserved = self.rounded = 0
        # A pool that is dropped unclosed must not leave memory locked whose addresses are then mapped anew.
        self._release = weakref.finalize(self, _return_all, device if self.pinned else None, self._slabs)

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
            slab, start = self._find(span, nbytes, key)
            self._spaces[slab.shared].take_at(start, span)
            slab.used += span
            tensor = slab.memory.tensor(start - slab.start, nbytes)
            self._taken[tensor.data_ptr()] = _Taken(slab, start, span, nbytes, tensor.untyped_storage()._cdata)
            self.used += span
            self.rounded += span - nbytes
            self.high_water = max(self.high_water, self.used)
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
            self._spaces[taken.slab.shared].give(taken.start, taken.nbytes)
            self.used -= taken.nbytes
            self.rounded -= taken.nbytes - taken.asked
            taken.slab.used -= taken.nbytes
            taken.slab.idle_steps = 0

    def trim(self) -> int:
        """End a step: return slabs that no block has lain in for the last steps; the bytes returned."""
        with self._lock:
            free = [slab for slab in self._slabs.values() if not slab.used]
            for slab in free:
                slab.idle_steps += 1
            return sum(self._return(slab) for slab in free if slab.idle_steps > TRIM_STEPS)

    def release_heap(self) -> None:
        """Return what the allocator keeps of freed tensors: glibc gives back on its own only what lies at the heap's end.

        Nothing where the device has memory of its own, or where the allocator is another.
        """
        trim = getattr(_LIBC, "malloc_trim", None) if self._device.addresses_host else None
        if trim is not None:
            trim(0)

    def close(self) -> None:
        """Unlock and return all memory; no copy may be under way. What is still looked at lives until it is not."""
        with self._lock:
            self._release()
            self._taken.clear()
            self._spaces = {True: Space(0), False: Space(0)}
            self.used = self.reserved = self.rounded = 0

    def _find(self, span: int, nbytes: int, key: str) -> tuple[_Slab, int]:
        """A hole of at least ``span`` bytes, in a new slab if need be."""
        if self.limit is not None:
            return self._find_within(self.limit, span, nbytes, key)
        shared = span * OWN_FRACTION <= self._slab_nbytes
        return self._best(span, shared) or self._grow(self._slab_nbytes if shared else span, shared, key)

    def _find_within(self, limit: int, span: int, nbytes: int, key: str) -> tuple[_Slab, int]:
        """See Note [Under a limit]."""
        found = self._best(span, False, span)
        if found is not None:
            return found
        left = (limit + self.rounded + span - nbytes) // ALIGN * ALIGN - self.reserved
        if left < span:
            left += self._shrink(span - left)
        if left >= span:
            return self._grow(span, False, key)
        found = self._best(span, False) or self._best(span, True)
        if found is None:
            raise self._full(nbytes, key)
        return found

    def _best(self, span: int, shared: bool, most: int | None = None) -> tuple[_Slab, int] | None:
        """The smallest hole of at least ``span`` bytes and of at most so many."""
        start = self._spaces[shared].fit(span, most)
        return None if start is None else (self._slabs[start >> _SLAB_BITS], start)

    def _grow(self, nbytes: int, shared: bool, key: str) -> tuple[_Slab, int]:
        """A new slab, and where it begins."""
        try:
            slab = _Slab(self._serial << _SLAB_BITS, self._device.map_host(nbytes, locked=self.pinned), nbytes, shared)
        except CapabilityError as error:
            raise _not_locked(key, error) from error
        except (OSError, OverflowError, MemoryError, ValueError) as error:
            raise BudgetError(
                f"host tier cannot admit {key}. Expected the system to map {as_size(nbytes)}, found {error}; raise RLIMIT_AS "
                f'(ulimit -v) or the memory limit, or set [optimizer] tier = "disk"'
            ) from error
        if self._node is not None:
            _prefer(slab, self._node)
        if self.pinned:
            try:
                self._device.pin(slab.whole())
            except CapabilityError as error:
                slab.memory.close()
                raise _not_locked(key, error) from error
        self._slabs[self._serial] = slab
        self._serial += 1
        self.reserved += nbytes
        self._spaces[shared].give_apart(slab.start, nbytes)
        return slab, slab.start

    def _shrink(self, nbytes: int) -> int:
        """Return free slabs of ``nbytes`` or a little more, the largest first, or none if that is not to be had."""
        free = [slab for slab in self._slabs.values() if not slab.used]
        free.sort(key=lambda slab: (-slab.nbytes, -slab.start))
        returned = 0
        if sum(slab.nbytes for slab in free) >= nbytes:
            while returned < nbytes:
                returned += self._return(free.pop(0))
        return returned

    def _return(self, slab: _Slab) -> int:
        """Unlock and unmap a free slab; its bytes."""
        if self.pinned:
            self._device.unpin(slab.whole())
        slab.memory.close()
        del self._slabs[slab.start >> _SLAB_BITS]
        self._spaces[slab.shared].take_at(slab.start, slab.nbytes)
        self.reserved -= slab.nbytes
        return slab.nbytes

    def _full(self, nbytes: int, key: str) -> BudgetError:
        assert self.limit is not None, "only a limit is ever full"
        used, note = self.used - self.rounded, ""
        if used + nbytes <= self.limit:
            note = f"in {counted(len(self._slabs), 'slab')} ({as_size(self.reserved)})"
        return cannot_admit(Tier.HOST, key, nbytes, used=used, limit=self.limit, note=note)


def _not_locked(key: str, error: CapabilityError) -> CapabilityError:
    return CapabilityError(f"host tier cannot lock memory for {key}: {error}")


def _return_all(device: Device | None, slabs: dict[int, _Slab]) -> None:
    """The end of a pool, closed or dropped; ``device`` is None where nothing is locked."""
    for slab in slabs.values():
        if device is not None:
            device.unpin(slab.whole())
        slab.memory.close()
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
    call = _LIBC.syscall
    address = ctypes.c_void_p(slab.whole().data_ptr())
    length, bits = ctypes.c_ulong(slab.nbytes), ctypes.c_ulong(words * 64 + 1)
    return bool(call(ctypes.c_long(number), address, length, ctypes.c_int(_MPOL_PREFERRED), mask, bits, ctypes.c_uint(0)) == 0)
