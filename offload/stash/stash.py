"""Short-lived values of a pass on a slower tier: copied out when they are saved, back ahead of their use, freed when dropped.

``zhooks/activation/saved.py`` puts what autograd saves and opens it again in backward; copies are made by the device's copy
stream and the scratch file's threads.  A tensor's own memory is not kept alive once its copy is made; autograd keeps a
``Saved``, and a copy lives as long as one of it does.

Note: [One copy an extent]
    What is copied is a range of a storage, so that views share it.  A storage is known by its address together with a weak
    reference, which keeps the address from being used again but not the memory.  A view that spans more than half of its
    storage takes the whole of it: the slices of one projection (q, k and v) then share a copy whichever is saved first.
    Versions show whether the bytes are still those that were copied.

Note: [Freed when dropped]
    Finalizers run anywhere, on any thread, inside any call, so that of a copy only leaves a ``_Note``; the stash reads it at
    its next call.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offload.device import keep
from offload.errors import BudgetError, TierError
from offload.events import HERE, Bus, Here
from offload.store import Allocation, Allocator, Pools
from offload.tier import Tier
from offload.work import DONE, HostWork, during

__all__ = ["Limits", "Saved", "Stash"]

#: Copies start on this many bytes, so that kernels find one aligned as they found the original.
_START = 64
#: How many copies to look through for one worth fetching ahead.
_LOOK = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds in bytes.

    Attributes:
        min_nbytes: extents below this are not worth a transfer.
        keep_nbytes: the last bytes that were put stay where they are.
        window_nbytes: how much is fetched ahead, and how much may be on its way out before ``put`` waits.
    """

    min_nbytes: int = 1 << 20
    keep_nbytes: int = 0
    window_nbytes: int = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Departure:
    """A copy on its way out."""

    work: HostWork
    copy: weakref.ref[_Copy]
    key: str
    nbytes: int


class _Copy:
    """One range of one storage: still in its own memory (``source``), under way, or away."""

    __slots__ = (
        "__weakref__", "_notes", "address", "arriving", "away", "back", "data", "key", "leaving", "lost", "nbytes", "number",
        "reads", "saves", "source", "start", "storage", "version",
    )  # fmt: skip

    def __init__(self, key: str, number: int, tensor: Tensor, span: tuple[int, int], notes: deque[_Note]) -> None:
        storage = tensor.untyped_storage()
        self.key, self.number, self.start, self.nbytes = key, number, span[0], span[1] - span[0]
        self.address, self.data, self.version = int(storage._cdata), storage.data_ptr(), int(tensor._version)
        self.storage = StorageWeakRef(storage)
        self.source: Tensor | None = _bytes_of(storage, span[0], self.nbytes)
        self.away: Allocation | None = None
        self.back: Allocation | None = None
        self.leaving: HostWork = DONE
        self.arriving: HostWork = DONE
        #: Why its values are gone, in words: an error would keep the frames it passed through alive.
        self.lost: str | None = None
        self.saves = self.reads = 0
        self._notes = notes

    def holds(self, tensor: Tensor, span: tuple[int, int]) -> bool:
        """These bytes of the tensor's storage, unchanged, lie in this copy."""
        return (
            self.version == tensor._version
            and self.start <= span[0]
            and span[1] <= self.start + self.nbytes
            and self.data == tensor.untyped_storage().data_ptr()
            and self.lost is None
        )

    def __del__(self) -> None:
        kept = self.nbytes if self.source is not None else 0
        allocations = tuple(allocation for allocation in (self.away, self.back) if allocation is not None)
        self._notes.append(_Note(self.number, self.address, kept, (self.leaving, self.arriving), allocations))


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A tensor that was put: its copy and its geometry in it, and what shows whether it was changed since.

    Attributes:
        probe: an empty tensor that shares the original's version counter.
        offset: bytes from the start of the copy.
    """

    copy: _Copy
    probe: Tensor
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class _Note:
    """A copy that nobody refers to any more, and what it left."""

    number: int
    address: int
    kept: int
    works: tuple[HostWork, HostWork]
    allocations: tuple[Allocation, ...]


class Stash:
    """What one attachment has put away.

    Args:
        pools: where buffers, extents and copies come from.
        tier: HOST or DISK.
        bus: hears "stash" and "unstash" spans, ended when the end is noticed.
        label: names what is running now, for events and errors.
    """

    def __init__(self, pools: Pools, tier: Tier, limits: Limits, bus: Bus, label: Callable[[], str] = lambda: "model") -> None:
        assert tier is not Tier.DEVICE, "what stays on the device needs no stash"
        self.limits, self.device, self.account = limits, pools.device.device, pools.budget.account
        self._tier, self._bus, self._label = tier, bus, label
        # What goes to a disk is on its way by threads of the host's, which notice its end.
        self._at: Here | None = HERE if tier is Tier.HOST else None
        #: Where compute reads values; what was put away to there never comes back.
        self._back_on = Tier.HOST if pools.device.addresses_host else Tier.DEVICE
        # A model's own activations are not charged to the device's budget, and neither is what comes back.
        self._allocations = Allocator(pools, uncharged=Tier.DEVICE, buffer=partial(self._take, Tier.HOST, private=True))
        self._notes: deque[_Note] = deque()
        self._copies: dict[int, weakref.ref[_Copy]] = {}
        self._numbers: list[int] = []
        self._storages: dict[int, list[weakref.ref[_Copy]]] = {}
        self._kept: deque[weakref.ref[_Copy]] = deque()
        self._kept_nbytes = 0
        self._departures: list[_Departure] = []
        self._failed: list[weakref.ref[_Copy]] = []
        self._empty: dict[torch.dtype, Tensor] = {}
        self._next = 0
        # Autograd may run nodes of two devices on two threads.
        self._lock = threading.RLock()

    # Putting away.

    def put(self, tensor: Tensor, least: int | None = None) -> Saved | None:
        """Put a plain strided tensor on the device away; None where it has less than ``least`` bytes (the limits').

        Raises:
            BudgetError: the tier is full.  TierError: an earlier transfer of a value still needed has failed.
        """
        span = _extent_of(tensor)
        known = self._storages.get(torch._C._storage_address(tensor))  # type: ignore[attr-defined]
        nbytes, least = span[1] - span[0], self.limits.min_nbytes if least is None else least
        if nbytes == 0 or (known is None and nbytes < least):
            return None
        with self._lock:
            self._sweep()
            copies = (reference() for reference in known or ())
            copy = next((one for one in copies if one is not None and one.holds(tensor, span)), None)
            if copy is None:
                if nbytes < least:
                    return None
                # What could not be put away is lost: better said in this forward than in its backward.
                failed, self._failed = self._failed, []
                for lost in (one.lost for reference in failed if (one := reference()) is not None):
                    if lost is not None:
                        raise TierError(lost)
                copy = self._new(tensor, span)
            copy.saves += 1
            probe = tensor.detach()
            probe.data = self._nothing(tensor.dtype)
            offset = int(tensor.storage_offset() * tensor.element_size()) - copy.start
            return Saved(copy, probe, tensor._version, tensor.shape, tensor.stride(), offset)

    def _new(self, tensor: Tensor, span: tuple[int, int]) -> _Copy:
        whole = tensor.untyped_storage().nbytes()
        span = (0, whole) if 2 * (span[1] - span[0]) > whole else (span[0] - span[0] % _START, span[1])
        number, self._next = self._next, self._next + 1
        copy = _Copy(f"{self._label()} activation {number}", number, tensor, span, self._notes)
        reference = weakref.ref(copy)
        self._copies[number] = reference
        insort(self._numbers, number)
        self._storages.setdefault(copy.address, []).append(reference)
        self._kept.append(reference)
        self._kept_nbytes += copy.nbytes
        if len(self._kept) > 2 * len(self._copies):
            self._kept = deque(one for one in self._kept if one() is not None)
        while self._kept and self._kept_nbytes > self.limits.keep_nbytes:
            oldest = self._kept.popleft()()
            if oldest is not None:
                self._kept_nbytes -= oldest.nbytes
                self._send(oldest)
        return copy

    def _send(self, copy: _Copy) -> None:
        source = copy.source
        assert source is not None
        # Whatever comes of it: the transfer keeps the memory alive until it is over, and nothing of ours does.
        copy.source = None
        try:
            self._make_way(copy.nbytes)
            copy.away = self._take(self._tier, copy.key, copy.nbytes)
            copy.leaving = self._allocations.write(source, copy.away.memory, copy.key, detached=True)
        except BaseException as error:
            copy.lost = f"{copy.key} was not offloaded: {error}"
            raise
        self._departures.append(_Departure(copy.leaving, weakref.ref(copy), copy.key, copy.nbytes))
        if self._bus.active:
            self._bus.begin("stash", copy.key, copy.nbytes, at=self._at)

    def _make_way(self, nbytes: int) -> None:
        """Wait until so much more may be under way: a tier slower than compute must not pile the originals up."""
        # Two at least, or the next copy would never begin while one runs.
        while len(self._departures) > 1 and sum(one.nbytes for one in self._departures) + nbytes > self.limits.window_nbytes:
            departure = self._departures.pop(0)
            self._bus.begin("wait stash", departure.key, at=HERE)
            self._departed(departure)
            self._bus.end("wait stash", departure.key, at=HERE)

    def _departed(self, departure: _Departure) -> None:
        """Wait for a copy to be out; a failure is kept for whoever puts or opens next."""
        copy = departure.copy()
        try:
            departure.work.synchronize()
        except Exception as error:
            if copy is not None and copy.lost is None:
                copy.lost = str(error)
                self._failed.append(departure.copy)
        if copy is not None:
            copy.leaving = DONE
        if self._bus.active:
            self._bus.end("stash", departure.key, departure.nbytes, at=self._at and (during(departure.work) or HERE))

    # Bringing back.

    def open(self, saved: Saved) -> Tensor:
        """The tensor's values on the device, with its geometry; what is likely to be asked for next is set on its way.

        Raises:
            TierError: they are lost.  BudgetError: no memory to bring them back to.
        """
        with self._lock:
            copy = saved.copy
            self._sweep()
            base = copy.source
            if base is None:
                base = self._bring(copy)
            empty = torch.empty(0, dtype=saved.probe.dtype, device=self.device)
            first = saved.offset + base.storage_offset()
            values = empty.set_(base.untyped_storage(), first // empty.element_size(), saved.shape, saved.stride)
            copy.reads += 1
            if copy.back is not None and copy.reads >= copy.saves:
                # Everybody has read it; a graph that is kept and run again fetches it again.
                self._drop(copy)
            return values

    def _bring(self, copy: _Copy) -> Tensor:
        if copy.lost is None:
            self._bus.begin("wait stash", copy.key, at=HERE)
            try:
                copy.leaving.wait()
            except Exception as error:
                copy.lost = str(error)
            self._bus.end("wait stash", copy.key, at=HERE)
        if copy.lost is not None:
            raise TierError(copy.lost)
        if self._bus.active:
            self._bus.begin("unstash", copy.key, copy.nbytes, at=HERE)
        if self._tier is self._back_on:
            assert copy.away is not None
            base = copy.away.values
        else:
            self._fetch(copy)
            self._fetch_ahead(copy.number)
            base = self._arrive(copy)
        if self._bus.active:
            self._bus.end("unstash", copy.key, copy.nbytes, at=during(copy.arriving) or HERE)
        return base

    def _fetch(self, copy: _Copy) -> None:
        """Start bringing a copy back."""
        if copy.back is not None:
            return
        assert copy.away is not None
        back = self._take(self._back_on, copy.key, copy.nbytes)
        try:
            copy.arriving = self._allocations.read(copy.away.memory, back.values, copy.key)
        except BaseException:
            self._allocations.free(back)
            raise
        copy.back = back

    def _fetch_ahead(self, number: int) -> None:
        """Autograd asks in the reverse order of saving: what was put before this comes next."""
        ahead = 0
        place = bisect_left(self._numbers, number)
        for older in reversed(self._numbers[max(0, place - _LOOK) : place]):
            copy = self._copies[older]()
            if copy is None or copy.source is not None or copy.lost is not None:
                continue
            ahead += copy.nbytes
            if copy.back is None:
                if ahead > max(copy.nbytes, self.limits.window_nbytes) or not copy.leaving.done():
                    return
                try:
                    self._fetch(copy)
                except Exception:
                    # Raised again where somebody asks for it; this was only early.
                    return

    def _arrive(self, copy: _Copy) -> Tensor:
        back = copy.back
        assert back is not None
        self._bus.begin("wait unstash", copy.key, copy.nbytes, at=HERE)
        try:
            copy.arriving.wait()
        except BaseException:
            self._drop(copy)
            raise
        finally:
            self._bus.end("wait unstash", copy.key, copy.nbytes, at=HERE)
        # Two streams may read it, and neither need be the one that fetched it ahead.
        keep(back.values)
        return back.values

    def _drop(self, copy: _Copy) -> None:
        """Keep what was brought back only as long as somebody has a view of it."""
        back, copy.back, copy.reads = copy.back, None, 0
        if back is not None:
            self._allocations.free_later(back, copy.arriving)

    # Memory.

    def _take(self, tier: Tier, key: str, numel: int, dtype: torch.dtype = torch.uint8, *, private: bool = False) -> Allocation:
        """Memory of a tier; where that is full, after waiting for what is about to become free."""
        try:
            with suppress(BudgetError):
                return self._allocations.take(tier, key, numel, dtype, private=private)
            self._catch_up()
            return self._allocations.take(tier, key, numel, dtype, private=private)
        except BudgetError as error:
            raise BudgetError(f'{error}; or set [activation] keep or tier, or [activation] checkpoint = "unit"') from error

    def _nothing(self, dtype: torch.dtype) -> Tensor:
        empty = self._empty.get(dtype)
        if empty is None:
            empty = self._empty[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return empty

    def _sweep(self) -> None:
        """Take note of everything that has ended since the last call."""
        while self._notes:
            note = self._notes.popleft()
            del self._copies[note.number], self._numbers[bisect_left(self._numbers, note.number)]
            alive = [one for one in self._storages.pop(note.address, ()) if one() is not None]
            if alive:
                self._storages[note.address] = alive
            self._kept_nbytes -= note.kept
            for allocation in note.allocations:
                self._allocations.free_later(allocation, *note.works)
        # Copies to the host end in their order; those to disk in any.
        in_order = self._tier is Tier.HOST
        for departure in tuple(self._departures):
            if departure.work.done():
                self._departures.remove(departure)
                self._departed(departure)
            elif in_order:
                break
        if self._allocations.later:
            self._allocations.sweep()

    def _catch_up(self) -> None:
        """Wait for everything that is on its way out."""
        while self._departures:
            self._departed(self._departures.pop(0))
        self._sweep()

    def near(self) -> int:
        """Bytes of copies that are in their own memory still: kept there, or on their way out."""
        return self._kept_nbytes + sum(one.nbytes for one in self._departures)

    def flush(self) -> int:
        """Wait for what is on its way out and give back what is free; the bytes that graphs still keep away."""
        with self._lock:
            self._catch_up()
            copies = (reference() for reference in self._copies.values())
            return sum(copy.nbytes for copy in copies if copy is not None and copy.away is not None)


def _extent_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a strided tensor spans: (start, stop)."""
    size, first = tensor.element_size(), tensor.storage_offset()
    if tensor.is_contiguous():
        return int(first * size), int((first + tensor.numel()) * size)
    if tensor.numel() == 0:
        return int(first * size), int(first * size)
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first * size), int((first + last + 1) * size)


def _bytes_of(storage: torch.UntypedStorage, start: int, nbytes: int) -> Tensor:
    """A range of a storage as 1-D uint8, with a version counter of its own."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))
