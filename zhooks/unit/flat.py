"""One flat buffer: parameters of a kind, and whether they are released, being gathered, or gathered.

``unit.py`` tells it to gather and release; the sharded tensor asks it for values; ``build/shard.py`` makes it.

Note: [Release]
    Releasing drops our views and hands the buffer's storage back to the pool, which reuses it only when nobody else holds
    it.  A reference the user or autograd kept stays valid with the values it had: memory is held, never overwritten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from offload.device import StreamUses
from offload.errors import ShardedOpError, TierError
from offload.events import HERE, Bus
from offload.store import BlockRange, Store
from offload.work import during
from zhooks.comm import DONE, Transport, Work
from zhooks.layout import FlatPlan
from zhooks.refusals import too_late
from zhooks.tensor import Engine, HeldSums, ParamShard, ShardGroup, Watch
from zhooks.unit.buffer_pool import Pool
from zhooks.unit.storage import ParamStorage
from zhooks.unit.views import Views


class State(Enum):
    """Where the full values of a flat buffer are."""

    RELEASED = "released"
    LAUNCHING = "launching"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(frozen=True, slots=True)
class Links:
    """What a flat buffer is connected to.

    Attributes:
        store: where it may be kept off the device.
        beside: transports of the axes that do not share it, by name.
        engine: hears that it is to be used, looked at or laid out anew.
        node: makes the node of the graph that its values come from.
        watch: who watches its gradients.
        pretrained: the model has ``save_pretrained``, as those of transformers and PEFT do.
    """

    bus: Bus = field(default_factory=Bus)
    store: Store | None = None
    beside: Mapping[str, Transport] = field(default_factory=dict)
    engine: Engine = field(default_factory=Engine)
    node: Callable[[Flat], tuple[Tensor, ...]] | None = None
    watch: Watch | None = None
    pretrained: bool = False


class Flat:
    """The parameters of one unit that share a ``Kind``, as one padded flat range over the ranks of ``transport``.

    Attributes:
        plan: what it was made of; names, sizes and the rest of it are in there.
        group: the ranks that share the values; this one alone where they are replicated.
        storage: what this rank keeps of them between uses.
        full, state: the gathered values, [layout.padded] in the compute dtype, and whether they are there.
        long: one parameter that is larger than any buffer may be: what is not gathered of it passes through in chunks.
        releasable: the full buffer comes and goes with its uses.
    """

    def __init__(self, plan: FlatPlan, *, transport: Transport, pool: Pool, links: Links) -> None:
        self.plan, self.name, self.number, self.kind, self.layout = plan, plan.name, plan.number, plan.kind, plan.layout
        self.resident, self.long, self.transport, self.pool = plan.resident, plan.long, transport, pool
        self.bus, self.store, self.engine, self.node = links.bus, links.store, links.engine, links.node
        self.group = ShardGroup(
            plan.name,
            plan.number,
            plan.kind.device,
            plan.layout,
            transport,
            replicated=plan.replicated,
            buffer_nbytes=pool.bound,
            beside=links.beside,
            watch=links.watch,
            pretrained=links.pretrained,
        )
        self.storage = ParamStorage(plan, self.group, pool, links.store)
        self.version = self.storage.version
        # Asked many times a step.
        self.sharded, self.shard_numel, self.releasable = plan.sharded, plan.shard_numel, plan.releasable
        self.moved_nbytes = plan.moved_nbytes
        self.params: list[nn.Parameter] = []
        self.specs: list[ParamShard] = []
        self.full: Tensor | None = None
        self.state = State.RELEASED
        self.views = Views(plan.kind, plan.layout, self.specs)
        # The shard holds the parameters' values, on every rank that shares it: of an attach that failed half way, not yet.
        self.holds = False
        # Somebody asked autograd for the accumulation node of one of the parameters, and may have put hooks on it.
        self.node_asked = False
        self.sums: HeldSums | None = None
        # Parameters that were updated early in this step (overlap.py), by name, and forwards whose backward is still to come.
        self.spent: set[str] = set()
        self.nodes = 0
        # The nodes of graphs that live, and of these the ones no backward has come to.
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._version = -1
        self._uses = StreamUses(plan.kind.device)
        self._work: Work = DONE

    def members(self) -> Iterator[tuple[nn.Parameter, ParamShard]]:
        """Its parameters, each with what its tensors have in common."""
        return zip(self.params, self.specs, strict=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a bound tensor belongs to no flat buffer: it is a value of its own."""

    # What a bound tensor asks (tensor.group.Owner).

    def written(self, index: int | None = None) -> None:
        if self.storage.lent:
            # The update that writes has a thread of its own, and was told of when it began.
            return
        self.storage.writes += 1
        self.views.stale(index)

    def look(self, name: str) -> None:
        self.engine.due()
        if name in self.spent:
            self.spent = set()
            raise too_late(f"{name}.grad", "a use of the gradient before the step (clipping, unscaling, zero_grad)")

    def view(self, index: int) -> Tensor:
        self.engine.loose_use(self)
        with torch.inference_mode(False):
            value, watch = self.values()[index], self.group.watch
            return value if watch is None else watch.outside(value)

    # Gathered or not.

    @property
    def shard(self) -> Tensor:
        """This rank's values between uses, 1-D in the master dtype; short-lived where they lie on disk.  Writes reach them."""
        return self.storage.values()

    def held_nbytes(self) -> tuple[int, int]:
        """Bytes that exist of the parameter's cell, and of masters."""
        masters = self.storage.at.nbytes
        if self.resident:
            return 0 if self.full is None else self.full.nbytes, masters
        return masters if self.storage.copy is None else self.storage.copy.nbytes, masters

    def current(self) -> bool:
        """The full buffer, complete or on its way, holds the shard's present values."""
        return self.full is not None and self._version == self.version()

    @property
    def gathered(self) -> bool:
        """The full buffer holds the shard's present values, complete."""
        return self.state is State.GATHERED and self.current()

    def begin_gather(self) -> None:
        """Start bringing the full buffer up to date; nothing to do when it is."""
        if self.current() or self.layout.padded == 0:
            return
        if self.state is State.GATHERING:
            self.finish_gather()
        self.state = State.LAUNCHING
        before, self._version = self._version, -1  # an interrupt leaves no buffer that passes for the values
        if self.full is None:
            self.full = self.pool.take(self.layout.padded, self.kind.compute, self.kind.device)
            self._uses.taken()
        now = self.version()
        if before != now:
            self.views.stale(None)
        if self.bus.active:
            self.bus.hold("parameter on device", self.name, self.full.untyped_storage())
            self.bus.begin("gather", self.name, self.moved_nbytes, at=HERE)
        self._version = now
        try:
            with torch.no_grad(), torch.inference_mode(False):
                self._work = self.storage.fill(self.full)
            self._uses.filling()
            self.state = State.GATHERING
        except BaseException:
            self.abandon()
            raise

    def prepare(self) -> None:
        """Start fetching from its tier what the next gather sends."""
        if self.storage.fetches and not self.current():
            self.storage.prepare()

    def finish_gather(self) -> None:
        """Wait until the full buffer may be used, on the current stream."""
        if self.state is not State.GATHERING:
            if self.full is not None:
                self._uses.used(self.full)
            return
        work, self._work = self._work, DONE
        self.bus.begin("wait gather", self.name, at=HERE)
        try:
            with torch.no_grad():
                work.wait()
        except BaseException:
            # A tier that failed left the buffer half filled: it must not pass for the values.
            self.abandon()
            raise
        self.storage.sent()
        if self.full is not None:
            self._uses.filled(self.full)
        self.state = State.GATHERED
        if self.bus.active:
            self.bus.end("wait gather", self.name, at=HERE)
            self.bus.end("gather", self.name, self.moved_nbytes, at=during(work) or HERE)

    def settle(self) -> bool:
        """Give back what the next gather was to send, and what one under way sends once it has been finished; whether there was
        any."""
        if not self.storage.sending or self.state is State.LAUNCHING:
            return False
        if self.state is State.GATHERING:
            self.finish_gather()
        else:
            self.storage.sent()
        return True

    def end_gather(self) -> None:
        """Finish what was gathered ahead and is not wanted any more: that its tier failed is nobody's concern."""
        if self.state is State.GATHERING:
            with suppress(TierError):
                self.finish_gather()

    def release(self) -> None:
        """Drop the full buffer; the shard remains."""
        self.end_gather()
        if self.state is State.RELEASED or not self.releasable:
            return
        self.state = State.RELEASED
        self.views.drop(self.full)
        full, self.full = self.full, None
        if full is not None:
            if self.pool.arena is not None:
                self._uses.given()
            self.pool.give(full)
            self.bus.instant("release", self.name, full.nbytes)

    def abandon(self) -> None:
        """Release after a failure, without waiting for ranks that may never come: memory under way is left to its work."""
        self._work = DONE
        self.storage.sent()
        if self.releasable and self.state is not State.RELEASED:
            self.state = State.RELEASED
            self.views.drop(self.full)
            self.full = None
        elif self.state in (State.LAUNCHING, State.GATHERING):
            self.state, self._version = State.GATHERED, -1

    def forget(self) -> None:
        """As ``abandon``, and what is gathered passes for the values no more: other ranks may have gathered less."""
        self.abandon()
        self._version = -1

    # Views.

    def values(self) -> Sequence[Tensor]:
        """Full tensors, one a parameter: nodes of the graph where grad is enabled and the parameters train."""
        if self.full is None:
            raise ShardedOpError(
                f"Cannot gather the tensor of {self.name}. Expected an attached model to gather it, found one that was "
                "detached. Use the plain model; to_local() still returns this rank's range."
            )
        if self.kind.trainable and torch.is_grad_enabled() and self.node is not None:
            return self.views.graph(self.full, self._begin_node)
        return self.views.shown(self.full)

    def _begin_node(self) -> tuple[Tensor, ...]:
        assert self.node is not None
        made = self.node(self)
        self.nodes += 1
        self._made.add(made[0].grad_fn)
        self._waiting.add(made[0].grad_fn)
        return made

    def backward_came(self, node: Any) -> None:
        """A backward has come to one of its nodes."""
        self._waiting.discard(node)

    @property
    def awaits_backward(self) -> bool:
        """A graph lives that no backward has gone through."""
        return bool(self._waiting)

    def nodes_in_backward(self) -> list[Any]:
        """The nodes of this buffer that the backward that runs has reached, or will reach."""
        return [node for node in self._made if torch._C._will_engine_execute_node(node)]

    def graph_views(self) -> tuple[Tensor, ...]:
        """New tensors for a node's outputs."""
        assert self.full is not None
        return self.views.fresh(self.full)

    def end_graph(self) -> None:
        """Backward has used the nodes of this forward: the next one makes its own."""
        self.views.end_graph()

    def detach(self) -> None:
        """Its parameters are plain, or of no further use."""
        self.holds, self.engine, self.sums = False, Engine(), None
        # A forward without a backward left its node, which refers to the flat: a circle that no collector sees.
        self.end_graph()

    def span(self, index: int) -> tuple[int, int]:
        """Where this rank's range of parameter ``index`` lies in a shard-sized tensor: start and numel."""
        pieces = self.group.pieces(index)
        return (pieces[0].local if pieces else 0), sum(piece.numel for piece in pieces)

    def local(self, index: int, shard: Tensor) -> Tensor:
        """This rank's range of parameter ``index`` in a shard-sized tensor."""
        start, numel = self.span(index)
        return shard[start : start + numel]

    def part(self, index: int) -> Tensor | BlockRange:
        """This rank's range of parameter ``index``, wherever it is kept."""
        return self.storage.part(*self.span(index))

    def adopt(self, full: Tensor) -> None:
        """Take the padded values of all parameters (master dtype): keep this rank's ranges, or the buffer itself."""
        if self.storage.take(full):
            self.full = full
            self._uses.taken()
            self.state, self._version = State.GATHERED, self.version()
