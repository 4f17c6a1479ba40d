"""What the tiers hold, by category and owner, stated to observers: the store's half of the ledger.

``store/allocation.py`` reports what is taken and given back; a bus hears levels, and of memory on the device the storage
itself, whose end shows by itself. It admits nothing and allocates nothing; that is the budget's and the pools'.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from offload.events import Bus
from offload.tier import Tier

__all__ = ["STAGING", "Account", "owner_of"]

#: What ``owner_of`` says of values on their way to or from a slower tier.
STAGING = ("communication", "staging")
_CATEGORIES = {"parameter": "parameter", "copy": "parameter", "gradient": "gradient", "optimizer": "optimizer"}


def owner_of(key: str) -> tuple[str, str]:
    """(category, owner) of what is held under ``key``: ("optimizer", "layers.0") of "optimizer/exp_avg/layers.0".

    Staging belongs to nobody in particular, an activation to the pass that saved it.
    """
    head, _, name = key.partition("/")
    if head in _CATEGORIES and name:
        return _CATEGORIES[head], name.partition("/")[2] if head == "optimizer" else name
    if head.startswith("staging of "):
        return STAGING
    label, activation, _ = key.rpartition(" activation ")
    return ("activation", label) if activation else ("other", key)


class Account:
    """Bytes by (category on tier, owner); any thread may call."""

    def __init__(self) -> None:
        self.bus = Bus()
        self._levels: dict[tuple[str, str], int] = {}
        #: By category on tier: what is held, and the most since ``begin_peaks``.
        self._sums: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._on_device: dict[int, tuple[weakref.ref[Any], str, str]] = {}
        self._change = threading.Lock()
        self._closed = False

    def take(self, tier: Tier, key: str, nbytes: int, memory: Any) -> None:
        """``nbytes`` more are held for ``key``; ``memory`` is the tensor, where it is one."""
        if tier is Tier.DEVICE:
            self._hold(key, memory.untyped_storage())
        else:
            self._move(tier, key, nbytes)

    def give(self, tier: Tier, key: str, nbytes: int) -> None:
        """They are held no longer."""
        if tier is not Tier.DEVICE:
            self._move(tier, key, -nbytes)

    def state(self) -> None:
        """State all levels."""
        with self._change:
            for (what, owner), level in self._levels.items():
                self.bus.counter(what, owner, level)
        for storage, what, owner in tuple(self._on_device.values()):
            alive = storage()
            if alive is not None:
                self.bus.hold(what, owner, alive)

    def held(self, category: str, tier: Tier) -> tuple[int, int]:
        """Bytes of a category on a tier: now, and at most since ``begin_peaks``; on the device only what is there now."""
        what = f"{category} on {tier.value}"
        if tier is Tier.DEVICE:
            alive = [storage() for storage, named, _ in tuple(self._on_device.values()) if named == what]
            nbytes = sum(storage.nbytes() for storage in alive if storage is not None)
            return nbytes, nbytes
        with self._change:
            return self._sums.get(what, 0), self._peaks.get(what, 0)

    def begin_peaks(self) -> None:
        """From now on the peaks are new ones."""
        with self._change:
            self._peaks = dict(self._sums)

    def close(self) -> None:
        """The tiers are given up: nothing is held on them any more, whatever was still to be given back."""
        with self._change:
            levels, self._levels, self._closed = self._levels, {}, True
            self._sums, self._peaks = {}, {}
            for what, owner in levels:
                self.bus.counter(what, owner, 0)

    def _move(self, tier: Tier, key: str, nbytes: int) -> None:
        category, owner = owner_of(key)
        what = f"{category} on {tier.value}"
        # Stated under the lock: levels stated out of order would stand wrong until the next.
        with self._change:
            if self._closed:
                # Given back late: it was stated as gone with everything else.
                return
            level = self._levels.get((what, owner), 0) + nbytes
            if level:
                self._levels[what, owner] = level
            else:
                self._levels.pop((what, owner), None)
            self._sums[what] = total = self._sums.get(what, 0) + nbytes
            self._peaks[what] = max(total, self._peaks.get(what, 0))
            if self.bus.active:
                self.bus.counter(what, owner, level)

    def _hold(self, key: str, storage: Any) -> None:
        category, owner = owner_of(key)
        what, number = f"{category} on device", storage._cdata
        held = self._on_device

        def gone(reference: weakref.ref[Any]) -> None:
            if held.get(number, (None,))[0] is reference:
                del held[number]

        held[number] = (weakref.ref(storage, gone), what, owner)
        if self.bus.active:
            self.bus.hold(what, owner, storage)
