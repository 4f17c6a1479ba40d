"""Bytes per tier: how many are allowed, how many are held now, for what, and the most that ever were.

Tiers ask the `Budget` before they take memory, and it names what would not fit; who took it tells the `Account`, which states
levels to observers, and of memory on the device the storage itself, whose end shows by itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

from offload.errors import BudgetError
from offload.events import Bus
from offload.text import UNITS, as_size
from offload.tier import Tier

__all__ = ["Account", "Budget", "cannot_admit", "holder_of"]

#: What ``holder_of`` says of values on their way to or from a slower tier.
STAGING = ("communication", "staging")
_CATEGORIES = {"parameter": "parameter", "copy": "parameter", "gradient": "gradient", "optimizer": "optimizer"}
_REMEDIES = {
    Tier.DEVICE: 'raise [budget] device, or set [optimizer] tier = "host"',
    Tier.HOST: 'raise [budget] host, or set [optimizer] tier = "disk"',
    Tier.DISK: "raise [budget] disk, or run on more ranks",
}


def holder_of(key: str) -> tuple[str, str]:
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


def cannot_admit(tier: Tier, key: str, nbytes: int, *, used: int, limit: int, note: str = "") -> BudgetError:
    """The error of a tier that is full, with its arithmetic and the remedy.

    Args:
        used: bytes in use before the request.
        note: more to say between the arithmetic and the remedy, e.g. "on rank 3".
    """
    unit, name = next(((unit, name) for unit, name in UNITS if limit >= unit), (1, "B"))
    digits = 0 if unit == 1 else 1
    held = f"{used / unit:.{digits}f} of {limit / unit:.{digits}f} {name} in use"
    # Rounded figures can look as if it fitted.
    short = f"{as_size(used + nbytes - limit)} short" if used + nbytes > limit else "no free range is large enough"
    said = f" {note}" if note else ""
    remedy = _REMEDIES[tier]
    if holder_of(key) == STAGING:
        # The slower tier is chosen already.
        remedy = f"raise [budget] {tier.value}, or name smaller units in [units]"
    return BudgetError(f"{tier.value} tier cannot admit {key} ({as_size(nbytes)}): {held}, {short}{said}; {remedy}")


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
        category, owner = holder_of(key)
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
        category, owner = holder_of(key)
        what, number = f"{category} on device", storage._cdata
        held = self._on_device

        def gone(reference: weakref.ref[Any]) -> None:
            if held.get(number, (None,))[0] is reference:
                del held[number]

        held[number] = (weakref.ref(storage, gone), what, owner)
        if self.bus.active:
            self.bus.hold(what, owner, storage)


class Budget:
    """Bytes admitted to each tier, against each tier's limit; any thread may call.

    Args:
        limits: bytes per tier; a tier that is missing or None has no limit.
        rank: named in errors where given.
    """

    def __init__(self, limits: Mapping[Tier, int | None], *, rank: int | None = None) -> None:
        assert all(limit is None or limit >= 0 for limit in limits.values()), "a limit is not negative"
        self._limits = {tier: limits.get(tier) for tier in Tier}
        self._used = dict.fromkeys(Tier, 0)
        self._high_water = dict.fromkeys(Tier, 0)
        self._lent = dict.fromkeys(Tier, 0)
        self._coming_back = dict.fromkeys(Tier, False)
        self._note = "" if rank is None else f"on rank {rank}"
        #: Who holds what was admitted.
        self.account = Account()
        self._change = threading.Condition()

    def admit(self, tier: Tier, key: str, nbytes: int) -> None:
        """Count ``nbytes`` for block ``key`` as held by ``tier``; waits for what is lent where that is in the way.

        Raises:
            BudgetError: the limit does not allow it; nothing is counted.
        """
        lent = self._lent[tier]
        while not self.try_admit(tier, nbytes):
            if not (lent and self._coming_back[tier]):
                raise self._refused(tier, key, nbytes, self._used[tier] + lent)
            with self._change:
                self._change.wait_for(lambda before=lent: self._lent[tier] < before)  # type: ignore[misc]
                lent = self._lent[tier]

    def check_room(self, tier: Tier, key: str, nbytes: int) -> None:
        """Whether ``nbytes`` more would be admitted now; nothing is counted.

        Raises:
            BudgetError: they would not.
        """
        if not self._fits(tier, self._used[tier], nbytes):
            raise self._refused(tier, key, nbytes, self._used[tier] + self._lent[tier])

    def _fits(self, tier: Tier, taken: int, nbytes: int) -> bool:
        limit = self._limits[tier]
        return limit is None or not nbytes or taken + self._lent[tier] + nbytes <= limit

    def _refused(self, tier: Tier, key: str, nbytes: int, used: int) -> BudgetError:
        limit = self._limits[tier]
        assert limit is not None, "a tier without a limit admits everything"
        return cannot_admit(tier, key, nbytes, used=used, limit=limit, note=self._note)

    def try_admit(self, tier: Tier, nbytes: int) -> bool:
        """As `admit`, answering instead of raising: for whoever can wait or evict."""
        assert nbytes >= 0, "a block's size is not negative"
        with self._change:
            if not self._fits(tier, self._used[tier], nbytes):
                return False
            self._used[tier] += nbytes
            self._high_water[tier] = max(self._high_water[tier], self._used[tier])
            return True

    def release(self, tier: Tier, nbytes: int) -> None:
        """Count ``nbytes`` that were admitted as held no longer."""
        with self._change:
            assert 0 <= nbytes <= self._used[tier], f"{tier.value}: {nbytes} B released, {self._used[tier]} B were admitted"
            self._used[tier] -= nbytes

    def lend(self, tier: Tier, key: str, nbytes: int) -> None:
        """Count ``nbytes`` that another thread gives back soon, whatever others do: who wants them after `hand_over` waits.

        Raises:
            BudgetError: beside the most that was ever held the limit does not allow it; nothing is counted.
        """
        with self._change:
            if not self._fits(tier, self._high_water[tier], nbytes):
                raise self._refused(tier, key, nbytes, self._high_water[tier] + self._lent[tier])
            self._lent[tier] += nbytes
            self._coming_back[tier] = False

    def hand_over(self, tier: Tier) -> None:
        """The other thread begins: before, whoever lends would wait for itself."""
        with self._change:
            self._coming_back[tier] = True

    def give_back(self, tier: Tier, nbytes: int) -> None:
        """They are lent no longer; any thread."""
        with self._change:
            assert 0 <= nbytes <= self._lent[tier], f"{tier.value}: {nbytes} B given back, {self._lent[tier]} B were lent"
            self._lent[tier] -= nbytes
            self._change.notify_all()

    def used(self, tier: Tier) -> int:
        """Bytes held now."""
        return self._used[tier]

    def high_water(self, tier: Tier) -> int:
        """The most bytes held since the start."""
        return self._high_water[tier]

    def change(self, limits: Mapping[Tier, int | None]) -> None:
        """Other limits from now on; what is held above one stays, and nothing more is admitted."""
        with self._change:
            self._limits = {tier: limits.get(tier) for tier in Tier}

    def limit(self, tier: Tier) -> int | None:
        """Bytes the tier may hold; None is no limit."""
        return self._limits[tier]
