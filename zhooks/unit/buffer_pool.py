"""Buffers for gathered parameters and partial gradients, used again from step to step.

``flat.py`` and ``grad/grad_buffer.py`` take and give; fresh host memory costs page faults at a sixteenth of the speed of a
copy, so a released buffer is kept for the next taker of its size, unless somebody else still holds its memory.  Where there is
an arena that is where buffers lie, and nothing is kept here.

Note: [What stays idle]
    What has lain idle since the backward before the last goes first: sizes that nobody asks for again must not fill the bound.
    Then of sizes of which several lie idle the oldest of the one with the most bytes: a pass needs few of one size at once, and
    each size sooner or later. Were it the oldest of all, repeated layers would push out what comes once in a pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.device import computes_on_host
from offload.events import Bus
from offload.memory import Arena, Use
from offload.pages import aligned


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory that a pool shall keep, as ``plan/budget.py`` counts it.

    Attributes:
        regions: bytes of an arena by use; empty where the policy has none.
        growing: of these uses as much is reserved between steps as a step needed.
        idle_nbytes: the most that may lie idle where there is no arena.
        paged: a disk fills buffers, which start on a page for it.
    """

    regions: Mapping[Use, int]
    growing: frozenset[Use]
    idle_nbytes: int
    paged: bool


class Pool:
    """Idle buffers by size; on CUDA the caching allocator is the pool and nothing is kept here.

    Attributes:
        idle_nbytes: the most that may lie idle.
    """

    def __init__(self, bound: int, bus: Bus) -> None:
        # No buffer is larger but those that parameters are gathered in; larger ones are never kept idle.
        self.bound, self.bus = bound, bus
        self.idle_nbytes, self._paged = 0, False
        # Memory reserved ahead, where the policy wants it; of one device, as all of a model is.
        self._arenas: dict[torch.device, Arena] = {}
        # Each with the number of its return: a shelf's oldest is its first.
        self._idle: dict[tuple[int, torch.device], deque[tuple[int, Tensor]]] = {}
        self._held = self._returns = 0
        # How many had been given back when the last two backwards ended.
        self._ended = (0, 0)

    @property
    def arena(self) -> Arena | None:
        """Memory reserved ahead, where there is any."""
        return next(iter(self._arenas.values()), None)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept idle now."""
        return self._held

    def keep(self, reserve: Reserve, device: torch.device) -> None:
        """Keep so much memory on ``device`` from now on; what an arena has reserved for other uses stays reserved."""
        self.idle_nbytes, self._paged = reserve.idle_nbytes, reserve.paged
        if reserve.regions:
            if device not in self._arenas:
                self._arenas[device] = Arena(device, self.bus, paged=reserve.paged)
            self._arenas[device].reserve(reserve.regions)
            self._arenas[device].growing = reserve.growing

    def lasting(self, numel: int, dtype: torch.dtype, device: torch.device, use: Use = Use.SHARDS) -> Tensor:
        """An uninitialised 1-D tensor that is not given back here: a shard."""
        with torch.inference_mode(False), torch.no_grad():
            if device in self._arenas:
                return self._arenas[device].take(use, numel * dtype.itemsize).view(dtype)
            return torch.empty(numel, dtype=dtype, device=device)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, use: Use = Use.GATHERED) -> Tensor:
        """An uninitialised 1-D tensor; its storage is exactly as large."""
        nbytes = numel * dtype.itemsize
        if device in self._arenas:
            with torch.inference_mode(False), torch.no_grad():
                return self._arenas[device].take(use, nbytes).view(dtype)
        shelf = self._idle.get((nbytes, device))
        with torch.inference_mode(False), torch.no_grad():
            if shelf:
                self._held -= nbytes
                return shelf.pop()[1].view(dtype)
            if self._paged and device.type == "cpu":
                return aligned(nbytes).view(dtype)
            return torch.empty(nbytes, dtype=torch.uint8, device=device).view(dtype)

    def give(self, buffer: Tensor) -> None:
        """Take ``buffer`` back, unless someone else holds its storage; see Note [What stays idle].

        A range of the arena goes back there by itself, when its storage dies.
        """
        if buffer.device in self._arenas:
            return
        storage = buffer.untyped_storage()
        # One count for the tensor, one for the handle above; a buffer that is a view counts its base too.
        alone = torch._C._storage_Use_Count(storage._cdata) <= (3 if buffer._is_view() else 2)
        # Not the storage's, which may be whole pages: the next taker asks for as many as this one did.
        nbytes = buffer.nbytes
        # A device's own allocator keeps what is freed.
        if not computes_on_host(buffer.device) or not alone or nbytes > min(self.bound, self.idle_nbytes):
            return
        while self._held + nbytes > self.idle_nbytes:
            self._drop_one()
        self._held += nbytes
        self._returns += 1
        self.bus.hold("communication on device", "idle buffers", storage)
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=torch.uint8, device=buffer.device)
            whole = empty.set_(storage, 0, (nbytes,), (1,))
        self._idle.setdefault((nbytes, buffer.device), deque()).append((self._returns, whole))

    def _drop_one(self) -> None:
        """See Note [What stays idle]."""
        idle = [(shelf[0][0], key[0] * len(shelf), key) for key, shelf in self._idle.items() if shelf]
        since, _, key = min(idle)
        if since > self._ended[0]:
            several = [(nbytes, -since, key) for since, nbytes, key in idle if nbytes > key[0]]
            key = max(several)[2] if several else key
        self._idle[key].popleft()
        self._held -= key[0]

    def step_ended(self) -> None:
        """A backward is over."""
        self._ended = (self._ended[1], self._returns)
        for arena in self._arenas.values():
            arena.step_ended()

    def state_held(self) -> None:
        """State what is reserved or idle, for an observer that has just been added."""
        for arena in self._arenas.values():
            arena.state()
        # Copies: who begins to listen on another thread meets a step under way.
        for shelf in tuple(self._idle.values()):
            for _, buffer in tuple(shelf):
                self.bus.hold("communication on device", "idle buffers", buffer.untyped_storage())

    def clear(self) -> None:
        """Give all memory that is idle or reserved back to the system."""
        self._idle.clear()
        self._held = 0
        while self._arenas:
            self._arenas.popitem()[1].close()


class Scratch:
    """One buffer that the units of an attachment are laid out in, one after the other, while they are built."""

    #: Tensors in it begin on multiples of this many bytes.
    ALIGN = 64

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed 1-D tensor in the buffer, or beside it when it is too small."""
        start = -(-self._used // self.ALIGN) * self.ALIGN
        stop = start + numel * dtype.itemsize
        if stop > self._memory.numel():
            return torch.zeros(numel, dtype=dtype, device=self._memory.device)
        self._used = stop
        return self._memory[start:stop].view(dtype).zero_()

    def reset(self) -> None:
        """The next unit begins."""
        self._used = 0
