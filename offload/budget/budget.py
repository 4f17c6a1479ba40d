"""Bytes per tier: how many are allowed, how many are held now, and the most that ever were.

Tiers ask it before they take memory, and it names what would not fit.  Arithmetic alone: it knows no tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from offload.budget.account import STAGING, Account, owner_of
from offload.errors import BudgetError
from offload.text import UNITS, as_size
from offload.tier import Tier

_REMEDIES = {
    Tier.DEVICE: 'raise [budget] device, or set [optimizer] tier = "host"',
    Tier.HOST: 'raise [budget] host, or set [optimizer] tier = "disk"',
    Tier.DISK: "raise [budget] disk, or run on more ranks",
}


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
    if owner_of(key) == STAGING:
        # The slower tier is chosen already.
        remedy = f"raise [budget] {tier.value}, or name smaller units in [units]"
    return BudgetError(f"{tier.value} tier cannot admit {key} ({as_size(nbytes)}): {held}, {short}{said}; {remedy}")


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
                limit = self._limits[tier]
                assert limit is not None, "a tier without a limit admits everything"
                raise cannot_admit(tier, key, nbytes, used=self._used[tier] + lent, limit=limit, note=self._note)
            with self._change:
                self._change.wait_for(lambda before=lent: self._lent[tier] < before)  # type: ignore[misc]
                lent = self._lent[tier]

    def check_room(self, tier: Tier, key: str, nbytes: int) -> None:
        """Whether ``nbytes`` more would be admitted now; nothing is counted.

        Raises:
            BudgetError: they would not.
        """
        used, limit = self._used[tier] + self._lent[tier], self._limits[tier]
        if limit is not None and nbytes and used + nbytes > limit:
            raise cannot_admit(tier, key, nbytes, used=used, limit=limit, note=self._note)

    def try_admit(self, tier: Tier, nbytes: int) -> bool:
        """As `admit`, answering instead of raising: for whoever can wait or evict."""
        assert nbytes >= 0, "a block's size is not negative"
        with self._change:
            used, limit = self._used[tier] + nbytes, self._limits[tier]
            if limit is not None and used + self._lent[tier] > limit and nbytes:
                return False
            self._used[tier] = used
            self._high_water[tier] = max(self._high_water[tier], used)
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
            taken, limit = self._high_water[tier] + self._lent[tier], self._limits[tier]
            if limit is not None and nbytes and taken + nbytes > limit:
                raise cannot_admit(tier, key, nbytes, used=taken, limit=limit, note=self._note)
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
