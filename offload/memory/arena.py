"""Memory reserved ahead for what lives long, so that what lives briefly never strands between it (MD).

``zhooks/unit/buffer_pool.py`` takes ranges for shards, gathered units and sums, ``zhooks/activation/inputs.py`` for what
recomputed units keep; the sizes are a plan's (``zhooks/plan/budget.py``).

Source: ZeRO, arXiv:1910.02054, sections 3.2 and 6.3.

Note: [A range is a storage]
    Everything about a tensor's memory is asked of its storage: who holds it, what autograd saved, what a release may reuse.  So
    a range is a storage of its own over a range of the reserved memory, made by torch's public ways in for foreign memory (the
    buffer protocol, ``__cuda_array_interface__``).  Such a storage keeps the object it was made of, and lets go of it when it
    dies, whoever held it last; a weak reference to that object is how the arena learns that the range is free.  A reference
    that the user kept therefore keeps the range: its values stay, and nobody gets it.

Note: [One region a use]
    Shards live until detach, gathered units for a layer, sums for a reduction.  In a memory of their own each kind has few
    sizes, so that holes fit what comes next.  Inside, the best fit is taken and neighbours join; the end moves up only when no
    hole fits.  What would lie beyond the reserved end gets its place there all the same, but its memory from the allocator: the
    end that was reached is then the size that the same order of requests would have needed, and ``step_ended`` reserves it.

Note: [Streams]
    The caching allocator keeps freed memory for the stream it was allocated on.  A region knows one stream, the one it was
    reserved on: a request on another is the allocator's.  Copies keep their tensors until the current stream waits for them
    (``device/streams.py``), so that a range is only free once its own stream comes after its last use."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from offload.device import grain_of, lane_of, reserve
from offload.events import Bus
from offload.free_ranges import Space
from offload.pages import ALIGN, aligned

__all__ = ["Arena", "Report", "Use", "grain", "rounded"]


class Use(Enum):
    """What a range is for; each has a region of its own."""

    SHARDS = "parameter shards"
    GRADIENTS = "gradient shards"
    GATHERED = "gathered units"
    SUMS = "partial gradients"
    CHECKPOINTS = "checkpoints"

    @property
    def passing(self) -> bool:
        """Its ranges come and go within a step: the region can be reserved anew between steps."""
        return self in (Use.GATHERED, Use.SUMS, Use.CHECKPOINTS)


@dataclass(frozen=True, slots=True)
class Report:
    """Bytes of an arena: reserved, handed out now, and at most at once.

    ``fell_back`` requests did not fit and went to the allocator, ``fell_back_nbytes`` in sum, since the arena was opened.
    """

    reserved: int
    used: int
    peak: int
    fell_back: int
    fell_back_nbytes: int

    @property
    def unused(self) -> int:
        return self.reserved - self.used


def grain(device: torch.device, *, paged: bool = False) -> int:
    """What ranges on ``device`` are rounded to; ``paged`` where a disk fills them."""
    return ALIGN if paged and device.type == "cpu" else grain_of(device)


def rounded(nbytes: int, to: int) -> int:
    """``nbytes`` in whole grains."""
    return -(-nbytes // to) * to


class Arena:
    """The regions of one attachment on one device; any thread may take, and a range may die on any.

    Args:
        paged: ranges start on a page, for buffers that a disk fills.

    Attributes:
        growing: uses whose region is reserved anew between steps where a step needed more.
    """

    def __init__(self, device: torch.device, bus: Bus, *, paged: bool = False) -> None:
        self.device, self.bus = device, bus
        self.growing: frozenset[Use] = frozenset(use for use in Use if use.passing)
        self._grain = grain(device, paged=paged)
        self._regions = {use: _Region(device, 0, self._grain) for use in Use}
        self._fell_back = self._fell_back_nbytes = self._peak = 0
        self._change = threading.Lock()

    def reserve(self, sizes: Mapping[Use, int]) -> None:
        """Reserve bytes for each use, in place of what was reserved for it; ranges that are out keep their memory alive.

        What the system refuses is not an error: the allocator, which may find it in several places, is asked as the ranges are.
        """
        with self._change:
            for use, nbytes in sizes.items():
                if self.whole(nbytes) != self._regions[use].nbytes:
                    self._open(use, nbytes)
        self.state()

    def reserved(self, use: Use) -> int:
        """Bytes reserved for ``use``."""
        return self._regions[use].nbytes

    def whole(self, nbytes: int) -> int:
        """What a range of ``nbytes`` takes."""
        return rounded(nbytes, self._grain)

    def take(self, use: Use, nbytes: int) -> Tensor:
        """uint8 [nbytes], uninitialised, a storage of its own: in the arena, or from the allocator where it does not fit.

        The range is free again when that storage dies; see Note [A range is a storage].
        """
        with self._change:
            tensor, inside = self._regions[use].take(nbytes)
            if not inside:
                self._fell_back += 1
                self._fell_back_nbytes += nbytes
            self._peak = max(self._peak, self._used())
        if not inside:
            self.bus.instant("arena full", use.value, nbytes)
        self.state()
        return tensor

    def step_ended(self) -> None:
        """A step is over: regions whose ranges come and go and that were too small for it are reserved as it needed them."""
        with self._change:
            for use, region in self._regions.items():
                region.collect()
                if region.idle and use in self.growing and region.reached > region.nbytes:
                    self._open(use, region.reached)
                elif region.idle:
                    region.forget()
        self.state()

    def report(self) -> Report:
        """What is reserved, used, and fell back."""
        with self._change:
            for region in self._regions.values():
                region.collect()
            reserved = sum(region.nbytes for region in self._regions.values())
            return Report(reserved, self._used(), self._peak, self._fell_back, self._fell_back_nbytes)

    def close(self) -> None:
        """Give the memory back, each region's as soon as nobody holds a range of it."""
        with self._change:
            for use in Use:
                self._open(use, 0)
        self.state()

    def _open(self, use: Use, nbytes: int) -> None:
        # The old one first: both at once may be more than there is.
        self._regions[use] = _Region(self.device, 0, self._grain)
        try:
            self._regions[use] = _Region(self.device, self.whole(nbytes), self._grain)
            self.bus.instant("arena", use.value, self.whole(nbytes))
        except (MemoryError, OSError, torch.OutOfMemoryError):
            self.bus.instant("arena refused", use.value, nbytes)

    def _used(self) -> int:
        return sum(region.used for region in self._regions.values())

    def state(self) -> None:
        """State what is reserved and not handed out; the ranges are stated by who holds them."""
        if self.bus.active:
            self.bus.counter("communication on device", "arena, unused", self.report().unused)


@dataclass(frozen=True, slots=True)
class _Range:
    """One that is out: where it lies, its bytes in whole grains, and what shows its end."""

    start: int
    nbytes: int
    inside: bool
    end: weakref.ref[Any]


class _Region:
    """A run of contiguous memory, and which of it is out."""

    def __init__(self, device: torch.device, nbytes: int, to: int) -> None:
        self.device, self.nbytes, self.used = device, nbytes, 0
        self._grain, self._lane = to, lane_of(device)
        self._memory = reserve(device, nbytes)
        self._space = Space(0)
        self._out: dict[int, _Range] = {}
        # Ends are noted by finalizers, which run anywhere, also while the arena's lock is held: they only append.
        self._ended: deque[int] = deque()
        self._next = 0

    @property
    def idle(self) -> bool:
        """Nothing is out."""
        return not self._out

    @property
    def reached(self) -> int:
        """The end that placement has reached, beyond what is reserved where something did not fit."""
        return self._space.end

    def forget(self) -> None:
        """Nothing is out: what was reached is of the past."""
        assert self.idle
        self._space = Space(0)

    def take(self, nbytes: int) -> tuple[Tensor, bool]:
        """A range, and whether it lies in the region."""
        self.collect()
        whole = rounded(max(nbytes, 1), self._grain)
        start = self._space.place(whole)
        inside = start + whole <= self.nbytes and lane_of(self.device) == self._lane
        number, self._next = self._next, self._next + 1
        ended = self._ended

        def gone(reference: weakref.ref[Any]) -> None:
            ended.append(number)

        if inside:
            tensor, subject = self._memory.range(start, whole, nbytes)
            self.used += whole
        else:
            tensor = _fresh(self.device, nbytes, paged=self._grain == ALIGN)
            subject = tensor.untyped_storage()
        self._out[number] = _Range(start, whole, inside, weakref.ref(subject, gone))
        return tensor, inside

    def collect(self) -> None:
        """Take back the ranges whose storages have died."""
        while self._ended:
            ended = self._out.pop(self._ended.popleft())
            self._space.give(ended.start, ended.nbytes)
            self.used -= ended.nbytes if ended.inside else 0


def _fresh(device: torch.device, nbytes: int, *, paged: bool) -> Tensor:
    """From the allocator."""
    if paged:
        return aligned(nbytes)
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
