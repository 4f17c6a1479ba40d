"""Updates flat buffers over tiers: flat k + 1 is fetched while k is updated, and k - 1 is written back meanwhile.

Note: [One step, many calls]
    The optimizer's ``step`` is called once a flat, with the arguments it was given and ``param_groups`` narrowed to the
    flat's parameters: for element-wise optimizers that is the same arithmetic, bit for bit.  What a call changes beside the
    parameters and their states (a counter, in a group or an attribute) is undone, for the outer call changes it once; in
    groups it must come out the same from every call: an optimizer that couples parameters is refused by name.

Note: [Both sides at once]
    Of flats whose states are on the device and others ([optimizer] device_share, rules) a step begins with what keeps more
    than one side busy.  Updates on the host come last: an accelerator works on its own meanwhile.  Where all are updated on
    the device, what has to be fetched comes first: the last of it is written back while the device updates what it has.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.optim import Optimizer

from offload.device import computes_on_host
from offload.errors import BudgetError, ShardedOpError, ZhooksError
from offload.events import HERE, Bus
from offload.policy import Policy
from offload.store import Block, BlockRange, Lease, Mode, Store
from offload.text import counted
from offload.tier import Tier
from zhooks.layout import Kind
from zhooks.optim.groups import Arguments, grad_of, group_options, options_kept, same_options
from zhooks.optim.kernel import FlatUpdate, TorchKernel, sharded_states, updates_of
from zhooks.optim.numba_kernel import NumbaKernel
from zhooks.optim.rounding import RoundedKernel, Rounding
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, State

__all__ = ["Fetched", "Mine", "Updater", "choices_of"]

#: New states an optimizer makes with the allocator, once each, before what they leave there is returned.
_MADE_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """How one flat is updated, and where: DEVICE or HOST."""

    kernel: TorchKernel
    place: Tier


def choices_of(policy: Policy, rounding: Rounding) -> Callable[[Kind], Choice]:
    """From a flat's kind to how it is updated: the one place that chooses.

    Args:
        rounding: the attachment's noise, used where the policy rounds stochastically.
    """
    stochastic = rounding if policy.optimizer.rounding == "stochastic" else None
    plain = TorchKernel() if stochastic is None else RoundedKernel(stochastic)
    chosen = NumbaKernel(stochastic) if policy.optimizer.kernel == "numba" else plain
    place = Tier.HOST if policy.optimizer.compute == "host" else Tier.DEVICE

    def choice(kind: Kind) -> Choice:
        if place is Tier.DEVICE or kind.tiers.optimizer is not Tier.DEVICE:
            return Choice(chosen, place)
        # What device_share keeps there; our own kernels run on CPUs.
        return Choice(chosen if kind.device.type == "cpu" else plain, Tier.DEVICE)

    return choice


class _Present(threading.local):
    """What this thread updates."""

    update: FlatUpdate | None = None


#: An optimizer, and what its step has to do for one flat.
Mine = tuple[Optimizer, FlatUpdate]


class Fetched(ExitStack):
    """Blocks on their way to where they are needed.

    ``close`` once they were used: changes start on their way back.  Where something is raised inside, they are given up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.leases: list[Lease] = []

    @classmethod
    def begin(cls, store: Store, wanted: Iterable[tuple[Block | None, Mode]], place: Tier) -> Fetched:
        """Start bringing these blocks, each once, to ``place``.

        Raises:
            BudgetError, TierError: they do not fit, or an earlier write-back failed; nothing stays fetched.
        """
        fetched = cls()
        with ExitStack() as undo:
            undo.push(fetched)
            for block, mode in {id(block): (block, mode) for block, mode in wanted}.values():
                if block is not None:
                    fetched.leases.append(fetched.enter_context(store.fetched(block, place, mode)))
            undo.pop_all()
        return fetched

    def wait(self) -> None:
        """Until they are there."""
        for lease in self.leases:
            lease.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> bool:
        self.leases.clear()
        return bool(super().__exit__(kind, error, traceback))


class Updater:
    """The updates of one attachment.

    Args:
        flats: the flats to be updated here, now.
        choice_of: how a flat of some kind is updated, and where.
        ahead: flats fetched while one is updated.
    """

    def __init__(
        self,
        store: Store,
        bus: Bus,
        flats: Callable[[], Iterable[Flat]],
        *,
        choice_of: Callable[[Kind], Choice],
        ahead: int,
    ) -> None:
        self._store, self._bus, self.flats, self._choice_of = store, bus, flats, choice_of
        self._ahead = ahead
        #: Those that have stepped: their states are made.
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._present = _Present()

    def kernel_of(self, flat: Flat) -> TorchKernel:
        """What updates it."""
        return self._choice_of(flat.kind).kernel

    def place_of(self, flat: Flat) -> Tier:
        """Where that is computed, DEVICE or HOST."""
        return self._choice_of(flat.kind).place

    @property
    def present(self) -> FlatUpdate | None:
        """What the calling thread is updating."""
        return self._present.update

    def updates(self, optimizer: Optimizer, without: Set[int] = frozenset()) -> list[FlatUpdate]:
        """What a step of the optimizer has to do here, flat by flat; ``without`` parameters of these identities."""

        def turn(update: FlatUpdate) -> tuple[bool, bool, int]:
            # See Note [Both sides at once].
            flat = update.flat
            return self.place_of(flat) is Tier.HOST, flat.kind.tiers.optimizer is Tier.DEVICE, flat.number

        return sorted(updates_of(optimizer, self.flats(), without), key=turn)

    def check(self, optimizer: Optimizer, updates: Sequence[FlatUpdate], arguments: Arguments) -> None:
        """Before anything of a step is updated.

        Raises:
            ShardedOpError: the kernel cannot.
        """
        for update in _with_gradients(updates):
            self.kernel_of(update.flat).check(optimizer, update, arguments)

    def step(self, optimizer: Optimizer, updates: Sequence[FlatUpdate], arguments: Arguments) -> None:
        """All that is left of one step."""
        self.make_way(self.flats())
        self.run(optimizer, updates, arguments)
        self._store.trim()

    def run(self, optimizer: Optimizer, updates: Sequence[FlatUpdate], arguments: Arguments) -> None:
        """Update flats that ``make_way`` has been called for."""
        updates = _with_gradients(updates)
        end: list[dict[str, Any]] | None = None
        to_fetch, ahead = deque(updates), deque[Fetched]()
        # States that are made need the memory that what is fetched ahead would take.
        bounded = optimizer not in self._known and self._store.budget.limit(Tier.HOST) is not None
        most, done = 0 if bounded else self._ahead, 0
        try:
            # All of them before the first: flats may have kernels of their own, and one of them may refuse.
            self.check(optimizer, updates, arguments)
            with ExitStack() as opened:
                for update in updates:
                    while to_fetch and len(ahead) <= most:
                        try:
                            ahead.append(opened.enter_context(self.fetch([(optimizer, to_fetch[0])])))
                        except BudgetError:
                            if not ahead:
                                raise
                            break  # It is fetched when the one in use has gone back.
                        to_fetch.popleft()
                    fetched = ahead.popleft()
                    fetched.wait()
                    with options_kept(optimizer):
                        self.update(optimizer, update, arguments)
                        now = group_options(optimizer)
                    done += 1
                    self.put_away(optimizer, update.flat)
                    if end is not None and not same_options(now, end):
                        raise ShardedOpError(
                            f"{type(optimizer).__name__} cannot be used with tiers. Expected an optimizer that updates each "
                            "element by itself, because its states are on tiers; found that the options of its groups depend "
                            'on all parameters at once. Use tier = "device" for [parameter], [gradient] and [optimizer], or '
                            "another optimizer."
                        )
                    end = now
                    fetched.close()
            self._known.add(optimizer)
        except ZhooksError as error:
            if done or isinstance(error, (BudgetError, ShardedOpError)):
                error.args = (f"{str(error).rstrip('.')}. {_how_far(error, done, len(updates))}.",)
            raise

    def make_way(self, flats: Iterable[Flat]) -> None:
        """These flats are about to be updated: what was fetched ahead of them for a use that never came goes back."""
        for flat in flats:
            if flat.state is not State.GATHERING:
                flat.storage.sent()
        self._store.evict()

    def fetch(self, mine: Sequence[Mine]) -> Fetched:
        """Start bringing everything that these updates, one or more of one flat, need to where they are computed.

        Raises:
            BudgetError, TierError: they do not fit, or an earlier write-back failed; nothing stays fetched.
        """
        flat = mine[0][1].flat
        place, wanted = self.place_of(flat), list[tuple[Block | None, Mode]]()
        for optimizer, update in mine:
            if place is Tier.HOST and not computes_on_host(flat.kind.device):
                self._bring_strays(optimizer, update)
            for param in update.params():
                for tensor in (param, grad_of(param), *optimizer.state.get(param, {}).values()):
                    if isinstance(tensor, ShardedTensor):
                        wanted.append((tensor.local_shard.block, Mode.UPDATE))
        if self.kernel_of(flat).writes_copy(flat):
            wanted.append((flat.storage.copy, Mode.WRITE_ALL))
        return Fetched.begin(self._store, wanted, place)

    def _bring_strays(self, optimizer: Optimizer, update: FlatUpdate) -> None:
        """States and gradients that a load or a freeze left on the device: the update is computed on the host."""
        self.adopt(optimizer, update.flat)
        for param in update.params():
            grad = grad_of(param)
            if isinstance(grad, ShardedTensor) and grad.local_shard.block is None:
                grad.local_shard.memory = grad.local_shard.values.to("cpu")

    @torch.no_grad()
    def update(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        """The arithmetic of one flat, with everything it needs in memory; on any thread where the kernel allows it."""
        flat = update.flat
        at = HERE if self.place_of(flat) is Tier.DEVICE else None
        if self._bus.active:
            self._bus.begin("update", flat.name, flat.layout.padded * flat.kind.master.itemsize, at=at)
        self._present.update = update
        try:
            self.kernel_of(flat).update(optimizer, update, arguments)
        finally:
            self._present.update = None
        if self._bus.active:
            self._bus.end("update", flat.name, flat.layout.padded * flat.kind.master.itemsize, at=at)

    @torch.no_grad()
    def put_away(self, optimizer: Optimizer, flat: Flat) -> None:
        """What follows from an update that was made: new states go to their tier, the masters' copy is made."""
        self.adopt(optimizer, flat)
        flat.storage.updated(self.place_of(flat), copied=self.kernel_of(flat).writes_copy(flat))

    def adopt(self, optimizer: Optimizer, flat: Flat) -> None:
        """States that are wherever they were made or loaded move to their tier: one block a kind of state."""
        tier = flat.kind.tiers.optimizer
        if tier is Tier.DEVICE:
            return
        kinds: dict[tuple[str, torch.dtype], list[tuple[int, ShardedTensor]]] = {}
        for index, key, state in sharded_states(flat, optimizer):
            kinds.setdefault((key, state.dtype), []).append((index, state))
        for (key, dtype), states in sorted(kinds.items(), key=lambda kind: str(kind[0])):
            blocks = [state.local_shard.block for _, state in states]
            new = [one for one, block in zip(states, blocks, strict=True) if block is None]
            if not new:
                continue
            block = next((block for block in blocks if block is not None), None)
            fresh = block is None
            if block is None:
                block = self._store.put(f"optimizer/{key}/{flat.name}", flat.shard_numel, dtype, tier)
            with self._store.lease(block, self.place_of(flat), Mode.WRITE_ALL if fresh else Mode.UPDATE) as values:
                if fresh:
                    values.zero_()
                for index, state in new:
                    flat.local(index, values).copy_(state.local_shard.values)
            for index, state in new:
                state.local_shard.memory, state.local_shard.device = BlockRange(block, *flat.span(index)), flat.kind.device
            if fresh:
                self._store.passed(block.nbytes, _MADE_NBYTES)


def _how_far(error: ZhooksError, done: int, count: int) -> str:
    """What a step that failed leaves behind, and what its error does not say."""
    said = f"{done} of {counted(count, 'unit')} had been updated in this step"
    if not isinstance(error, BudgetError):
        return said
    instead = ": load the last checkpoint, or continue under a larger budget (attachment.apply)" if done else ""
    return f"At least that much is lacking: what the rest of the step needs could not be counted ahead. {said}{instead}"


def _with_gradients(updates: Sequence[FlatUpdate]) -> list[FlatUpdate]:
    return [update for update in updates if any(grad_of(param) is not None for param in update.params())]
