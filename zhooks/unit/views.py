"""The full tensors that a flat's gathered buffer is shown as: plain, and as outputs of the node that stands for its unit.

``flat.py`` asks for them when a module runs and drops them at release.  They lie on the buffer's storage; a parameter that
is divided over ``tp`` is shown as a DTensor around such a tensor.  It never gathers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from offload.references import held_elsewhere
from zhooks.layout import Kind, Layout, part_of
from zhooks.tensor import ParamShard


class Views:
    """What modules and autograd get to see of one flat buffer; ``specs`` may grow until the first is asked for."""

    def __init__(self, kind: Kind, layout: Layout, specs: list[ParamShard]) -> None:
        self._kind, self._layout, self._specs = kind, layout, specs
        self._plain: list[Tensor] | None = None
        self._shown: list[Tensor] | None = None
        self._graph: tuple[Tensor, ...] | None = None
        # The node's outputs left the buffer they were made on: they share no version counters with the plain views any more.
        self._moved = False
        # Wrappers count versions of their own, and autograd checks those.
        self._wrappers: list[weakref.ref[Tensor]] = []

    @cached_property
    def _divided(self) -> bool:
        return any(spec.division is not None for spec in self._specs)

    def shown(self, full: Tensor) -> list[Tensor]:
        """One tensor a parameter on ``full``, outside any graph; the same ones while the buffer stays."""
        if self._shown is None:
            with torch.inference_mode(False):
                plain = self.plain(full)
                self._shown = [*map(self._wrapped, self._specs, plain)] if self._divided else plain
        return self._shown

    def graph(self, full: Tensor, node: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Outputs of the unit's node on ``full``: those of this forward where there are some, else what ``node`` makes."""
        if self._graph is None:
            self._graph, self._moved = node(), False
        elif self._graph and part_of(self._graph[0]).untyped_storage()._cdata != full.untyped_storage()._cdata:
            for view, fresh in zip(self._graph, self.plain(full), strict=True):
                part_of(view).data = fresh
        return self._graph

    def fresh(self, full: Tensor) -> tuple[Tensor, ...]:
        """New tensors for a node's outputs; they share the version counters of the plain ones."""
        views = [view.detach() for view in self.plain(full)]
        return tuple(map(self._wrapped, self._specs, views) if self._divided else views)

    def plain(self, full: Tensor) -> list[Tensor]:
        """New tensors on the buffer's storage; not views to autograd, so a gather bumps no version they check."""
        if self._plain is None:
            with torch.inference_mode(False):
                storage, starts = full.untyped_storage(), self._layout.starts
                dtype, device, empty = self._kind.compute, self._kind.device, torch.empty
                self._plain = [
                    empty(0, dtype=dtype, device=device).set_(storage, start, spec.part_shape, spec.part_stride)
                    for start, spec in zip(starts, self._specs, strict=True)
                ]
        return self._plain

    def _wrapped(self, spec: ParamShard, view: Tensor) -> Tensor:
        if spec.division is None:
            return view
        self._wrappers = [known for known in self._wrappers if known() is not None]
        made = spec.division.wrap(view)
        self._wrappers.append(weakref.ref(made))
        return made

    def parts(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What autograd hands to the node, as plain tensors of the parts.  Collective where a partial sum is among them."""
        if not self._divided:
            return list(grads)
        return [
            grad if grad is None or spec.division is None else spec.division.cut(grad)
            for grad, spec in zip(grads, self._specs, strict=True)
        ]

    def _others(self, graph: tuple[Tensor, ...], full: Tensor | None) -> tuple[Tensor, ...] | None:
        """Tensors whose gradients go on to the node of ``graph``; None where none can be made."""
        if full is None or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        with torch.inference_mode(False), torch.enable_grad():
            others: tuple[Tensor, ...] = _Others.apply(self.fresh(full), *graph)  # type: ignore[no-untyped-call]
        return others

    def end_graph(self) -> None:
        """Backward has used the nodes of this forward: the next one makes its own."""
        self._graph = None

    def stale(self, index: int | None) -> None:
        """Values changed under tensors that autograd may have saved, of one parameter or all: its check shall find out."""
        graph, self._graph = self._graph, None
        if self._plain is not None:
            torch.autograd.graph.increment_version(self._plain if index is None else self._plain[index])
        if graph is not None and self._moved:
            torch.autograd.graph.increment_version([part_of(view) for view in graph])
        if self._wrappers:
            alive = [wrapper for wrapper in (known() for known in self._wrappers) if wrapper is not None]
            torch.autograd.graph.increment_version(alive)

    def drop(self, full: Tensor | None) -> None:
        """The buffer is released: let go of it, and keep the node's outputs for the next use, others in place of those that
        somebody else has.

        One node a forward sends one sum to the reductions, as plain autograd adds up the uses of a parameter; of two nodes
        each would be averaged by itself, and their sum rounded otherwise.
        """
        graph, self._graph = self._graph, None
        if graph and held(graph):
            graph = self._others(graph, full)
        self._plain = self._shown = None
        if graph is None:
            return
        self._graph = graph
        nothing = torch.empty(0, dtype=self._kind.compute, device=self._kind.device)
        for view in self._graph:
            part_of(view).data = nothing
        self._moved = True


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
