"""What a round of parameters that are updated whole needs from tiers: values, gradients and the owner's states, and back.

``update.py`` asks for each round ahead of its turn, and closes it when the new values are written.  It never computes an
update, communicates, or decides what travels together.

Note: [Ahead]
    What a round needs is fetched while the one before it travels.  Values stay open from the way to the owners until they
    are overwritten, gradients until they are sent, states as long as their round lasts.  So blocks of three rounds are open
    at most, each of as many bytes as ``most_nbytes`` says, or of one flat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager

from torch import Tensor
from torch.optim import Optimizer

from offload.errors import BudgetError
from offload.store import Block, Mode, Store
from offload.tier import Tier
from zhooks.optim import Fetched, OwnedStates, Whole, grad_of, memory_beside, with_owners
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, State
from zhooks.whole.stored_states import adopt, bring, put_away

__all__ = ["Ahead", "Away", "InMemory", "OverTiers", "store_owned"]


class Away:
    """What one round needs, on its way to the device or there.

    Args:
        begin: starts fetching what gradients are in, and what values and states are in.
    """

    def __init__(self, begin: Callable[[], tuple[Fetched, Fetched]] | None = None) -> None:
        self._begin = begin
        self._failed: Exception | None = None
        self._gradients, self._values = Fetched(), Fetched()

    def fetch(self) -> None:
        """Start; what does not fit yet is asked for again by ``wait``, when what came before it is closed.

        An error (an earlier write-back's, too) is kept for ``wait``: in between ranks meet, and none may miss that.
        """
        try:
            self._start()
        except BudgetError:
            return
        except Exception as error:
            self._failed = error

    def _start(self) -> None:
        if self._begin is not None:
            self._gradients, self._values = self._begin()
            self._begin = None

    def wait(self) -> None:
        """Until it is there.

        Raises:
            BudgetError, TierError: it does not fit, or cannot be read; or an earlier write-back failed.
        """
        if self._failed is not None:
            raise self._failed
        self._start()
        self._gradients.wait()
        self._values.wait()

    def sent(self) -> None:
        """Gradients are needed no longer."""
        self._gradients.close()

    def close(self) -> None:
        """Changes start on their way back."""
        with self._values, self._gradients:
            pass


class InMemory:
    """Where everything is on the device: nothing to fetch, and nothing to put away.

    Attributes:
        ahead: rounds fetched while one travels, 0 or 1.
    """

    ahead = 0

    def stored(self, one: Whole) -> bool:
        """Something of the parameter is kept elsewhere."""
        return False

    def begin_step(self, members: Sequence[Whole], most_nbytes: int) -> None:
        """These are about to be updated, so many bytes at a time."""

    def end_step(self) -> None:
        """They have been."""

    def away(self, optimizer: Optimizer, members: Sequence[Whole]) -> Away:
        """What a round of these needs, not begun."""
        return Away()

    def written(self, members: Sequence[Whole]) -> None:
        """Their values are new."""

    @contextmanager
    def states(self, optimizer: Optimizer, members: Sequence[Whole]) -> Iterator[None]:
        """Inside, this owner's states of them are plain tensors on the device."""
        yield


class OverTiers(InMemory):
    """Where some of it may be in a store."""

    def __init__(self, store: Store, ahead: int) -> None:
        self._store, self.ahead = store, ahead

    def stored(self, one: Whole) -> bool:
        return one.flat.kind.tiers.anywhere

    def begin_step(self, members: Sequence[Whole], most_nbytes: int) -> None:
        # Of each of three rounds values and gradients, and states, of which Adam's are as much again.
        largest = max((2 * one.spec.numel * one.flat.kind.master.itemsize for one in members if self.stored(one)), default=0)
        if largest:
            self._store.staging_limit = max(self._store.staging_limit, 6 * max(most_nbytes, largest))
        for flat in {one.flat.number: one.flat for one in members}.values():
            if flat.state is not State.GATHERING:
                flat.storage.sent()
        self._store.evict()

    def end_step(self) -> None:
        self._store.trim()

    def away(self, optimizer: Optimizer, members: Sequence[Whole]) -> Away:
        def begin() -> tuple[Fetched, Fetched]:
            gradients = [_block(grad_of(one.param)) for one in members]
            values = [_block(one.param) for one in members]
            states: list[OwnedStates] = [optimizer.state[one.param] for one in members]
            blocks = [one.stored.block for one in states if one.stored is not None]
            with ExitStack() as undo:
                first = self._fetched(gradients)
                undo.push(first)
                second = self._fetched([*values, *blocks])
                undo.pop_all()
            return first, second

        return Away(begin)

    def _fetched(self, blocks: Sequence[Block | None]) -> Fetched:
        fetched = Fetched()
        with ExitStack() as undo:
            undo.push(fetched)
            for block in {id(block): block for block in blocks if block is not None}.values():
                fetched.leases.append(fetched.enter_context(self._store.fetched(block, Tier.DEVICE, Mode.UPDATE)))
            undo.pop_all()
        return fetched

    def written(self, members: Sequence[Whole]) -> None:
        for flat in {one.flat.number: one.flat for one in members}.values():
            flat.storage.updated(Tier.DEVICE, copied=False)

    @contextmanager
    def states(self, optimizer: Optimizer, members: Sequence[Whole]) -> Iterator[None]:
        mine: list[tuple[Whole, OwnedStates]] = [(one, optimizer.state[one.param]) for one in members]
        for _, states in mine:
            bring(states, None if states.stored is None else states.stored.block.tensor())
        try:
            yield
        finally:
            shared, failed = memory_beside(optimizer), list[Exception]()
            for one, states in mine:
                try:
                    self._put_away(one, states, shared)
                except Exception as error:
                    failed.append(error)
            if failed:
                raise failed[0]

    def _put_away(self, one: Whole, states: OwnedStates, shared: Set[int]) -> None:
        if one.flat.kind.tiers.optimizer is not Tier.DEVICE:
            values = None if states.stored is None else states.stored.block.tensor()
            put_away(self._store, states, values, _where(one.flat), shared)


class Ahead:
    """What rounds need from tiers, in their order: while one is handed out, the next is fetched."""

    def __init__(self, tiers: InMemory, optimizer: Optimizer, planned: Sequence[Sequence[Whole]]) -> None:
        self._rounds, self._ahead, self._at = [tiers.away(optimizer, members) for members in planned], tiers.ahead, 0

    def next(self) -> Away:
        now, self._at = self._rounds[self._at], self._at + 1
        for away in self._rounds[self._at : self._at + self._ahead]:
            away.fetch()
        return now

    def close(self) -> None:
        """Whatever is still open, after a round that raised too; all of it, whatever becomes of one."""
        with ExitStack() as opened:
            for away in reversed(self._rounds):
                opened.callback(away.close)


def store_owned(store: Store, optimizer: Optimizer, flat: Flat) -> None:
    """States of a flat's parameters that were moved or loaded go to their tier."""
    shared = memory_beside(optimizer)
    for _, states in with_owners(optimizer, flat.params):
        adopt(store, states, _where(flat), shared)


def _where(flat: Flat) -> tuple[str, Tier]:
    return f"optimizer/states/{flat.name}", flat.kind.tiers.optimizer


def _block(tensor: Tensor | None) -> Block | None:
    return tensor._block if isinstance(tensor, ShardedTensor) else None

