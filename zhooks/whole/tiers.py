"""What a round of parameters that are updated whole needs from tiers: values, gradients and the owner's states, and back.

Note: [Ahead]
    What a round needs is fetched while the one before it travels.  Values stay open from the way to the owners until they
    are overwritten, gradients until they are sent, states as long as their round lasts.  So blocks of three rounds are open
    at most, each of as many bytes as ``most_nbytes`` says, or of one flat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor
from torch.optim import Optimizer

from offload.errors import BudgetError
from offload.store import Block, Mode, Store
from offload.tier import Tier
from zhooks.optim import Fetched, OwnedStates, Whole, grad_of, memory_beside
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, State
from zhooks.whole.stored_states import bring, put_away

__all__ = ["Ahead", "Away", "Tiers", "where_stored"]


class Away:
    """What one round needs, on its way to the device or there; where there is no store, nothing."""

    def __init__(self, store: Store | None, optimizer: Optimizer, members: Sequence[Whole]) -> None:
        self._store, self._optimizer, self._members = store, optimizer, members
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
        store = self._store
        if store is None:
            return
        states: list[OwnedStates] = [self._optimizer.state[one.param] for one in self._members]
        values = [_block(one.param) for one in self._members]
        values += [one.stored.block for one in states if one.stored is not None]
        with ExitStack() as undo:
            gradients = undo.enter_context(_fetched(store, [_block(grad_of(one.param)) for one in self._members]))
            self._gradients, self._values, self._store = gradients, _fetched(store, values), None
            undo.pop_all()

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


class Tiers:
    """What parameters that are updated whole have on tiers.

    Args:
        store: None where everything is on the device.
        ahead: rounds fetched while one travels, 0 or 1.
    """

    def __init__(self, store: Store | None, ahead: int) -> None:
        self.store, self.ahead = store, ahead

    def stored(self, one: Whole) -> bool:
        """Something of the parameter is kept elsewhere."""
        return self.store is not None and one.flat.kind.tiers.anywhere

    def begin_step(self, members: Sequence[Whole], most_nbytes: int) -> None:
        """These are about to be updated, so many bytes at a time."""
        if self.store is None:
            return
        # Of each of three rounds values and gradients, and states, of which Adam's are as much again.
        largest = max((2 * one.spec.numel * one.flat.kind.master.itemsize for one in members if self.stored(one)), default=0)
        if largest:
            self.store.staging_limit = max(self.store.staging_limit, 6 * max(most_nbytes, largest))
        for flat in _flats(members):
            if flat.state is not State.GATHERING:
                flat.storage.sent()
        self.store.evict()

    def end_step(self) -> None:
        """They have been."""
        if self.store is not None:
            self.store.trim()

    def written(self, members: Sequence[Whole]) -> None:
        """Their values are new."""
        for flat in _flats(members) if self.store is not None else ():
            flat.storage.updated(Tier.DEVICE, copied=False)

    @contextmanager
    def states(self, optimizer: Optimizer, members: Sequence[Whole]) -> Iterator[None]:
        """Inside, this owner's states of them are plain tensors on the device."""
        store = self.store
        if store is None:
            yield
            return
        mine: list[tuple[Whole, OwnedStates]] = [(one, optimizer.state[one.param]) for one in members]
        for _, states in mine:
            bring(states, _opened(states))
        try:
            yield
        finally:
            shared, failed = memory_beside(optimizer), list[Exception]()
            for one, states in mine:
                try:
                    if one.flat.kind.tiers.optimizer is not Tier.DEVICE:
                        put_away(store, states, _opened(states), where_stored(one.flat), shared)
                except Exception as error:
                    failed.append(error)
            if failed:
                raise failed[0]


class Ahead:
    """What rounds need from tiers, in their order: while one is handed out, the next is fetched."""

    def __init__(self, tiers: Tiers, optimizer: Optimizer, planned: Sequence[Sequence[Whole]]) -> None:
        self._rounds = [Away(tiers.store, optimizer, members) for members in planned]
        self._ahead, self._at = tiers.ahead, 0

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


def where_stored(flat: Flat) -> tuple[str, Tier]:
    """What a block of states of the flat's parameters is called, and its tier."""
    return f"optimizer/states/{flat.name}", flat.kind.tiers.optimizer


def _opened(states: OwnedStates) -> Tensor | None:
    return None if states.stored is None else states.stored.block.tensor()


def _flats(members: Iterable[Whole]) -> list[Flat]:
    return list({one.flat.number: one.flat for one in members}.values())


def _block(tensor: Tensor | None) -> Block | None:
    return tensor.local_shard.block if isinstance(tensor, ShardedTensor) else None


def _fetched(store: Store, blocks: Iterable[Block | None]) -> Fetched:
    return Fetched.begin(store, [(block, Mode.UPDATE) for block in blocks], Tier.DEVICE)
