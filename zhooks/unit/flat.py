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
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from offload.device import StreamUses
from offload.errors import ShardedOpError, TierError
from offload.events import HERE, Bus
from offload.references import held_elsewhere
from offload.store import BlockRange, Store
from offload.work import during
from zhooks.comm import DONE, Transport, Work
from zhooks.layout import FlatPlan, part_of
from zhooks.refusals import too_late
from zhooks.tensor import Engine, HeldSums, ParamShard, ShardGroup, Watch
from zhooks.unit.buffer_pool import Pool
from zhooks.unit.storage import ParamStorage


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
        long: one parameter that is larger than ``[comm] buffer``: its gradient and copies of it pass through in chunks.
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
        # What modules and autograd see of the full buffer: tensors on its memory, the same with parts of a divided parameter
        # wrapped, and outputs of the node that stands for the flat.
        self._plain: list[Tensor] | None = None
        self._shown: list[Tensor] | None = None
        self._graph: tuple[Tensor, ...] | None = None
        # The node's outputs left the buffer they were made on: they share no version counters with the plain views any more.
        self._moved = False
        # Wrappers count versions of their own, and autograd checks those.
        self._wrappers: list[weakref.ref[Tensor]] = []
        # The shard holds the parameters' values, on every rank that shares it: of an attach that failed half way, not yet.
        self.holds = False
        # Somebody asked autograd for the accumulation node of one of the parameters, and may have put hooks on it.
        self.node_asked = False
        self.sums: HeldSums | None = None
        # Parameters, by name, that backward has updated in this step (overlap.py).
        self.spent: set[str] = set()
        # Forwards whose backward is still to come.
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
        self._stale(index)

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
            self._stale(None)
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
        self._drop_views()
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
            self._drop_views()
            self.full = None
        elif self.state in (State.LAUNCHING, State.GATHERING):
            self.state, self._version = State.GATHERED, -1

    def forget(self) -> None:
        """What is gathered passes for the values no more: other ranks may have gathered less."""
        self._version = -1

    # Views.

    def values(self) -> Sequence[Tensor]:
        """Full tensors, one a parameter: nodes of the graph where grad is enabled and the parameters train."""
        if self.full is None:
            raise ShardedOpError(
                f"Cannot gather the tensor of {self.name}. Expected an attached model to gather it, found one that was "
                "detached. Use the plain model; to_local() still returns this rank's range."
            )
        if not (self.kind.trainable and torch.is_grad_enabled() and self.node is not None):
            if self._shown is None:
                with torch.inference_mode(False):
                    plain = self._on_full()
                    self._shown = [*map(self._wrapped, self.specs, plain)] if self._divided else plain
            return self._shown
        if self._graph is None:
            self._graph, self._moved = self.node(self), False
            self.nodes += 1
            self._made.add(self._graph[0].grad_fn)
            self._waiting.add(self._graph[0].grad_fn)
        elif self._graph and part_of(self._graph[0]).untyped_storage()._cdata != self.full.untyped_storage()._cdata:
            for view, fresh in zip(self._graph, self._on_full(), strict=True):
                part_of(view).data = fresh
        return self._graph

    @cached_property
    def _divided(self) -> bool:
        return any(spec.division is not None for spec in self.specs)

    def fresh_views(self) -> tuple[Tensor, ...]:
        """New tensors for a node's outputs; they share the version counters of the plain ones."""
        views = [view.detach() for view in self._on_full()]
        return tuple(map(self._wrapped, self.specs, views) if self._divided else views)

    def _on_full(self) -> list[Tensor]:
        """New tensors on the buffer's storage; not views to autograd, so a gather bumps no version they check."""
        if self._plain is None:
            assert self.full is not None
            with torch.inference_mode(False):
                storage, starts = self.full.untyped_storage(), self.layout.starts
                dtype, device, empty = self.kind.compute, self.kind.device, torch.empty
                self._plain = [
                    empty(0, dtype=dtype, device=device).set_(storage, start, spec.part_shape, spec.part_stride)
                    for start, spec in zip(starts, self.specs, strict=True)
                ]
        return self._plain

    def _wrapped(self, spec: ParamShard, view: Tensor) -> Tensor:
        """A parameter that is divided over tp is shown as a DTensor."""
        if spec.division is None:
            return view
        self._wrappers = [known for known in self._wrappers if known() is not None]
        made = spec.division.wrap(view)
        self._wrappers.append(weakref.ref(made))
        return made

    def plain_grads(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What autograd hands to the node, as plain tensors of the parts.  Collective where a partial sum is among them."""
        if not self._divided:
            return list(grads)
        return [
            grad if grad is None or spec.division is None else spec.division.cut(grad)
            for grad, spec in zip(grads, self.specs, strict=True)
        ]

    def _stale(self, index: int | None) -> None:
        """Values changed under tensors that autograd may have saved, of one parameter or all: its check shall find out."""
        graph, self._graph = self._graph, None
        if self._plain is not None:
            torch.autograd.graph.increment_version(self._plain if index is None else self._plain[index])
        if graph is not None and self._moved:
            torch.autograd.graph.increment_version([part_of(view) for view in graph])
        if self._wrappers:
            alive = [wrapper for wrapper in (known() for known in self._wrappers) if wrapper is not None]
            torch.autograd.graph.increment_version(alive)

    def _drop_views(self) -> None:
        """The buffer is released: let go of it, and keep the node's outputs for the next use, others in place of those that
        somebody else has.

        One node a forward sends one sum to the reductions, as plain autograd adds up the uses of a parameter; of two nodes
        each would be averaged by itself, and their sum rounded otherwise.
        """
        graph, self._graph = self._graph, None
        if graph and held(graph):
            graph = self._others(graph)
        self._plain = self._shown = None
        if graph is None:
            return
        self._graph = graph
        nothing = torch.empty(0, dtype=self.kind.compute, device=self.kind.device)
        for view in self._graph:
            part_of(view).data = nothing
        self._moved = True

    def _others(self, graph: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Tensors whose gradients go on to the node of ``graph``; None where none can be made."""
        if self.full is None or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        with torch.inference_mode(False), torch.enable_grad():
            others: tuple[Tensor, ...] = _Others.apply(self.fresh_views(), *graph)  # type: ignore[no-untyped-call]
        return others

    def end_graph(self) -> None:
        """Backward has used the nodes of this forward: the next one makes its own."""
        self._graph = None

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
        return self.storage.slice(*self.span(index))

    def adopt(self, full: Tensor) -> None:
        """Take the padded values of all parameters (master dtype): keep this rank's ranges, or the buffer itself."""
        if self.storage.take(full):
            self.full = full
            self._uses.taken()
            self.state, self._version = State.GATHERED, self.version()


class _Others(torch.autograd.Function):
    """The same values in other tensors; gradients go where those of the first go."""

    @staticmethod
    def forward(ctx: Any, others: tuple[Tensor, ...], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


def held(views: Sequence[Tensor]) -> bool:
    """Somebody besides the table of views refers to these very tensors, or to the parts that DTensors among them wrap."""
    parts = _wrapped(views)
    return (
        held_elsewhere(views)
        or held_elsewhere(parts, known=1)
        or any(tensor._use_count() > 1 for tensor in (*views, *parts))  # type: ignore[attr-defined]
    )


def _wrapped(views: Sequence[Tensor]) -> list[Tensor]:
    """The parts inside DTensors; no name of it outlives the call, for ``held`` counts references."""
    pairs = [(view, part_of(view)) for view in views]
    return [part for view, part in pairs if part is not view]
