"""One flat buffer: parameters of a kind, and whether they rest, are being gathered, or are gathered.

``unit.py`` tells it to gather and release; the sharded tensor asks it for values; ``build.py`` makes it.  It never decides
when anything happens and knows nothing of modules.

Note: [Release]
    Releasing drops our views and hands the buffer's storage back to the pool, which reuses it only when nobody else holds
    it.  A reference the user or autograd kept stays valid with the values it had: memory is held, never overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor, nn

from offload.block import Part
from offload.device import beside
from offload.errors import ShardedOpError, TierError
from offload.events import Bus
from offload.lease import Mode
from offload.store import Store
from offload.tier import Tier
from zhooks.comm import DONE, GATHER, Call, Transport, Work
from zhooks.flat_home import FlatHome
from zhooks.kind import Kind, Ownership
from zhooks.layout import Layout, Piece
from zhooks.pieces import gather
from zhooks.pool import Pool
from zhooks.refusals import too_late
from zhooks.resting import Resting, reserve
from zhooks.sharded import Spec
from zhooks.views import Views


class State(Enum):
    """Where the full values of a flat buffer are."""

    RESTING = "resting"
    GATHERING = "gathering"
    GATHERED = "gathered"


MOVES = {
    (State.RESTING, "begin"): State.GATHERING,
    (State.GATHERING, "finish"): State.GATHERED,
    (State.GATHERED, "begin"): State.GATHERING,
    (State.GATHERED, "release"): State.RESTING,
}


class Flat:
    """The parameters of one unit that share a ``Kind``, as one padded flat range over the ranks of ``transport``."""

    def __init__(
        self, name: str, number: int, kind: Kind, layout: Layout, ownership: Ownership, transport: Transport, pool: Pool
    ) -> None:
        self.name, self.number, self.kind, self.layout = name, number, kind, layout
        self.ownership, self.transport, self.pool = ownership, transport, pool
        self.home = FlatHome(name, number, kind, layout, ownership, transport, pool.bound)
        self.sharded = self.home.sharded
        # One parameter larger than any buffer may be: what is not gathered of it passes through in pieces (pieces.py).
        self.long = len(layout.numels) == 1 and layout.padded * kind.wide > pool.bound
        self.params: list[nn.Parameter] = []
        self.specs: list[Spec] = []
        self._shard: Tensor = torch.empty(0)
        self.rest: Resting | None = None
        self.store: Store | None = None
        self.full: Tensor | None = None
        self.state = State.RESTING
        self.node: Callable[[Flat], tuple[Tensor, ...]] | None = None
        self.ask: Callable[[Flat, str], None] | None = None
        self.views = Views(kind, layout, self.specs)
        # The shard holds the parameters' values, on every rank that shares it: of an attach that failed half way, not yet.
        self.holds = False
        # Somebody asked autograd for the accumulation node of one of the parameters, and may have put hooks on it.
        self.node_asked = False
        # Updated early in this step (overlap.py), and forwards whose backward is still to come.
        self.spent, self.nodes = False, 0
        self._writes, self._version = 0, -1
        self._work: Work = DONE
        self.bus: Bus = Bus()

    # What a bound tensor asks (home.Owner).

    def written(self, index: int | None = None) -> None:
        if self.rest is not None and self.rest.lent:
            # The update that writes has a thread of its own, and was told of when it began.
            return
        self._writes += 1
        self._stale(index)

    def settle(self) -> None:
        self._ask("settle")

    def relay(self) -> None:
        self._ask("relay")

    def look(self, name: str) -> None:
        if self.ask is not None:
            self.ask(self, "settle")
        if self.spent:
            self.spent = False
            raise too_late(f"{name}.grad", "a look at the gradient before the step (clipping, unscaling, zero_grad)")

    def view(self, index: int) -> Tensor:
        self._ask("use")
        with torch.inference_mode(False):
            value, watch = self.values()[index], self.home.watch
            return value if watch is None else watch.outside(value)

    def _ask(self, what: str) -> None:
        if self.ask is not None:
            self.ask(self, what)

    # Gathered or not.

    @property
    def shard(self) -> Tensor:
        """This rank's resting values, 1-D in the master dtype; short-lived where they rest on disk.  Writes reach them."""
        return self._shard if self.rest is None else self.rest.shard()

    def overwritten(self) -> Tensor:
        """The shard for whoever writes all of it: what it held is not read, and may have been lost."""
        return self._shard if self.rest is None else self.rest.master.tensor(Mode.WRITE_ALL)

    @cached_property
    def rests(self) -> bool:
        """The shard is kept in blocks of the store, not simply on the device."""
        return self.kind.apart or self.kind.tiers.parameter is not Tier.DEVICE

    @cached_property
    def aliased(self) -> bool:
        """The shard is this rank's range of the full buffer itself: nothing to copy, nothing to release."""
        if self.rests and self.layout.padded:
            return False
        same = self.kind.master == self.kind.compute
        if self.layout.padded == 0:
            return True
        return same and (self.ownership.whole or self.layout.world == 1 or self._in_place())

    def _in_place(self) -> bool:
        return self.ownership.resident and len(self.layout.segments) == 1

    @cached_property
    def releasable(self) -> bool:
        return not (self.ownership.resident or self.aliased)

    @property
    def full_nbytes(self) -> int:
        return self.layout.padded * self.kind.compute.itemsize

    @property
    def moved_nbytes(self) -> int:
        """Payload of one gather."""
        return self.full_nbytes if self.sharded else 0

    def version(self) -> int:
        return self._writes + (self._shard._version if self.rest is None else self.rest.version())

    def current(self) -> bool:
        """The full buffer, complete or on its way, holds the shard's present values."""
        return self.full is not None and self._version == self.version()

    def begin_gather(self) -> None:
        """Start bringing the full buffer up to date; nothing to do when it is."""
        if self.current() or self.layout.padded == 0:
            return
        if self.state is State.GATHERING:
            self.finish_gather()
        self._move("begin")
        before, self._version = self._version, -1  # an interrupt leaves no buffer that passes for the values
        if self.full is None:
            self.full = self.pool.take(self.layout.padded, self.kind.compute, self.kind.device)
        if before != self.version():
            self._stale()
        if self.bus.active:
            self.bus.hold("parameter on device", self.name, self.full.untyped_storage())
            self.bus.begin("gather", self.name, self.moved_nbytes)
        self._version = self.version()
        try:
            with torch.no_grad(), torch.inference_mode(False):
                self._work = self._fill(self.full)
        except BaseException:
            self.abandon()
            raise

    def prepare(self) -> None:
        """Start fetching from its tier what the next gather sends."""
        if self.rest is not None and not (self._read_whole or self.long or self.current()):
            self.rest.prepare()

    @property
    def _read_whole(self) -> bool:
        """The full buffer is filled from this rank's blocks alone, or from masters that nobody prefetches."""
        return self.ownership.whole or self.layout.world == 1 or self.ownership.resident

    def _fill(self, full: Tensor) -> Work:
        call = Call(GATHER, "gather", self.name, self.number)
        if self.rest is not None and (self.ownership.whole or self.layout.world == 1):
            return self.rest.read_into(full)
        if self.ownership.whole:
            if not self.aliased:
                full.copy_(self.shard)
            return DONE
        if self.rest is None:
            return gather(self.transport, call, self.shard, full, self.layout)
        # What is computed next must not wait for this shard's way from its tier: only the collective does.
        with beside(self.kind.device, "gather"):
            return gather(self.transport, call, self._sent(full), full, self.layout)

    def _sent(self, full: Tensor) -> Tensor:
        """What this rank sends of what a tier has; of a long one straight into its range of ``full``."""
        assert self.rest is not None
        if self._read_whole:
            return self.shard
        if not self.long:
            return self.rest.send()
        start, stop = self.layout.ranges(self.transport.axis.rank)[0]
        self.rest.read_into(full[start:stop]).wait()
        return full[start:stop]

    def finish_gather(self) -> None:
        """Wait until the full buffer may be used."""
        if self.state is not State.GATHERING:
            return
        work, self._work = self._work, DONE
        self.bus.begin("wait gather", self.name)
        try:
            with torch.no_grad():
                work.wait()
        except BaseException:
            # A tier that failed left the buffer half filled: it must not pass for the values.
            self.abandon()
            raise
        if self.rest is not None:
            self.rest.sent()
        self._move("finish")
        if self.bus.active:
            self.bus.end("wait gather", self.name)
            self.bus.end("gather", self.name, self.moved_nbytes)

    def end_gather(self) -> None:
        """Finish what was gathered ahead and is not wanted any more: that its tier failed is nobody's concern."""
        with suppress(TierError):
            self.finish_gather()

    def release(self) -> None:
        """Drop the full buffer; the shard remains."""
        self.end_gather()
        if self.state is State.RESTING or not self.releasable:
            return
        self._move("release")
        self.views.drop()
        full, self.full = self.full, None
        if full is not None:
            self.pool.give(full)
            self.bus.instant("release", self.name, full.nbytes)

    def abandon(self) -> None:
        """Release after a failure, without waiting for ranks that may never come: memory under way is left to its work."""
        self._work = DONE
        if self.rest is not None:
            self.rest.sent()
        if self.releasable and self.state is not State.RESTING:
            self.state = State.RESTING
            self.views.drop()
            self.full = None
        elif self.state is State.GATHERING:
            self.state, self._version = State.GATHERED, -1

    def _move(self, verb: str) -> None:
        moved = MOVES.get((self.state, verb))
        assert moved is not None, f"unit {self.name}: cannot {verb} while {self.state.value}"
        self.state = moved

    # Views.

    def values(self) -> Sequence[Tensor]:
        """Full tensors, one a parameter: nodes of the graph where grad is enabled and the parameters train."""
        if self.full is None:
            raise ShardedOpError(
                f"tensor of {self.name}: expected an attached model to gather it, found one that was detached. Use what the "
                "plain model has; to_local() still is this rank's range."
            )
        if self.kind.trainable and torch.is_grad_enabled() and self.node is not None:
            return self.views.graph(self.full, self._begin_node)
        return self.views.shown(self.full)

    def _begin_node(self) -> tuple[Tensor, ...]:
        assert self.node is not None
        made = self.node(self)
        self.nodes += 1
        return made

    def graph_views(self) -> tuple[Tensor, ...]:
        """New tensors for a node's outputs."""
        assert self.full is not None
        return self.views.fresh(self.full)

    def end_graph(self) -> None:
        """Backward has used the nodes of this forward: the next one makes its own."""
        self.views.end_graph()

    def _stale(self, index: int | None = None) -> None:
        self.views.stale(index, releasable=self.releasable)

    def pieces(self, index: int) -> tuple[Piece, ...]:
        if self.ownership.whole:
            return (Piece(0, self.layout.starts[index], self.layout.numels[index]),) if self.layout.numels[index] else ()
        return self.layout.pieces(index, self.transport.axis.rank)

    def span(self, index: int) -> tuple[int, int]:
        """Where parameter ``index``'s part lies in a shard-sized tensor: start and numel."""
        pieces = self.pieces(index)
        return (pieces[0].local if pieces else 0), sum(piece.numel for piece in pieces)

    def local(self, index: int, shard: Tensor) -> Tensor:
        """Parameter ``index``'s part of a shard-sized tensor."""
        start, numel = self.span(index)
        return shard[start : start + numel]

    def part(self, index: int) -> Tensor | Part:
        """Parameter ``index``'s part of the shard, wherever that rests."""
        return self.local(index, self._shard) if self.rest is None else Part(self.rest.master, *self.span(index))

    @property
    def shard_numel(self) -> int:
        return self.layout.padded if self.ownership.whole else self.layout.shard_numel

    def reserve(self) -> None:
        """Allocate the long-lived shard, before anything short-lived that would strand behind it.

        Raises:
            BudgetError: its tier cannot admit it.
        """
        if self.rests and self.layout.padded:
            assert self.store is not None
            self.rest = reserve(self.store, self.name, self.shard_numel, self.kind, copied=not self.ownership.resident)
        elif not self.aliased:
            self._shard = self.pool.lasting(self.shard_numel, self.kind.master, self.kind.device)

    def adopt(self, full: Tensor) -> None:
        """Take the padded values of all parameters (master dtype): keep this rank's ranges, or alias them."""
        ranges = ((0, self.layout.padded),) if self.ownership.whole else self.layout.ranges(self.transport.axis.rank)
        if self.aliased:
            self.full = full
            # Of a world of one the segments follow each other.
            low, high = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
            empty = torch.empty(0, dtype=full.dtype, device=full.device)
            self._shard = empty.set_(full.untyped_storage(), low, (high - low,), (1,))
            self.state, self._version = State.GATHERED, self.version()
            return
        lengths = [stop - start for start, stop in ranges]
        for piece, (start, stop) in zip(self.overwritten().split(lengths), ranges, strict=True):
            piece.copy_(full[start:stop])

