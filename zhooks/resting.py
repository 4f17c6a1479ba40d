"""Where the shard of one flat buffer rests when that is not simply the device: its blocks, and the way to a gather.

``flat.py`` asks it for the shard's values and for what a gather sends; ``optim.py`` tells it when an update has written both
blocks.  It never gathers and never decides when to fetch.

Note: [Master and copy]
    Where parameters are computed in the dtype they rest in, one block is both, on the parameter's tier.  Where they are not,
    the masters rest with the optimizer's states and a copy in the compute dtype rests on the parameter's tier: a gather
    fetches the copy, an update writes both.  A write that reaches only the masters makes the copy stale; the next fetch
    casts it anew.  Parameters that stay gathered on the device need no copy: they are one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offload.block import Block
from offload.errors import ShardedOpError
from offload.lease import Mode, Step
from offload.store import Store
from offload.tier import Tier
from zhooks.kind import Kind

__all__ = ["Resting", "reserve"]


def reserve(store: Store, name: str, numel: int, kind: Kind, *, copied: bool) -> Resting:
    """New blocks for a shard of ``numel`` elements; ``copied`` where gathers read a copy in the compute dtype.

    Raises:
        BudgetError: a tier cannot admit them.
    """
    home = kind.tiers.optimizer if kind.apart else kind.tiers.parameter
    what = "optimizer/master" if kind.apart else "parameter"
    master = store.put(f"{what}/{name}", numel, kind.master, home)
    if not kind.apart or not copied:
        return Resting(store, master, None)
    return Resting(store, master, store.put(f"copy/{name}", numel, kind.compute, kind.tiers.parameter))


class Resting:
    """The blocks of one flat's shard."""

    def __init__(self, store: Store, master: Block, copy: Block | None) -> None:
        self.store, self.master, self.copy = store, master, copy
        self._copied = -1
        self._sending: Block | None = None
        self._dropped: int | None = None
        self._reclaim: Callable[[], None] | None = None

    @property
    def lent(self) -> bool:
        """A thread of its own updates the values, and writes both blocks."""
        return self._reclaim is not None

    def lend(self, reclaim: Callable[[], None]) -> None:
        """``reclaim`` waits for that thread, and leaves the blocks as an update leaves them; then it calls ``take_back``."""
        self._reclaim = reclaim

    def take_back(self) -> None:
        self._reclaim = None

    def _ours(self) -> None:
        if self._reclaim is not None:
            self._reclaim()

    def shard(self) -> Tensor:
        """The master values in memory, 1-D; short-lived where they rest on disk."""
        self._ours()
        return self.master.tensor()

    def version(self) -> int:
        return self.master.version if self._dropped is None else self._dropped

    @property
    def gathered_from(self) -> Block:
        """What a gather reads."""
        return self.master if self.copy is None else self.copy

    @property
    def nbytes(self) -> int:
        return self.master.nbytes + (0 if self.copy is None else self.copy.nbytes)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the copy anew where the masters were written without it.

        Raises:
            ShardedOpError: the flat was laid out anew since: a backward wants what its forward saw.
        """
        self._ours()
        if self._dropped is not None:
            raise ShardedOpError(
                f"{self.master.key}: expected the layout of its forward, found that apply() was called, or parameters were "
                "frozen or unfrozen, before its backward. Run the forward again."
            )
        if self.copy is None or self._copied == self.master.version:
            return
        values = self.master.tensor()
        self.copy.tensor(Mode.WRITE_ALL).copy_(values)
        self.copy.touch()
        self.copied()

    @torch.no_grad()
    def recast(self, at: Tier) -> None:
        """An update has changed the masters, which are held ``at`` this tier: the copy follows."""
        if self.copy is not None:
            with self.store.lease(self.copy, at, Mode.WRITE_ALL) as values:
                values.copy_(self.shard())
        self.copied()

    def copied(self) -> None:
        """The copy holds the masters' present values."""
        self._copied = self.master.version

    def prepare(self) -> None:
        """Start fetching what this rank sends in the next gather."""
        self.refresh()
        if self._sending is None:
            self.store.fetch(self.gathered_from, Tier.DEVICE, Mode.READ)
            self._sending = self.gathered_from

    def send(self) -> Tensor:
        """This rank's range, 1-D in the dtype of ``gathered_from``, until ``sent``."""
        self.prepare()
        assert self._sending is not None and self._sending.lease is not None
        return self._sending.lease.wait()

    def sent(self) -> None:
        """The gather has read it, or will never happen."""
        sending, self._sending = self._sending, None
        if sending is not None:
            self.store.close(sending)

    def read_into(self, full: Tensor) -> Step:
        """Start filling ``full``, for this rank holds all of it."""
        self.refresh()
        return self.store.read_into(self.gathered_from, full)

    def drop(self) -> None:
        """The blocks are not used again."""
        self._ours()
        self.sent()
        self._dropped = self.master.version
        self.master.drop()
        if self.copy is not None:
            self.copy.drop()
