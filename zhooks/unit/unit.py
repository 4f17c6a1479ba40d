"""One unit: parameters gathered together, and the places in modules where they are put while in use.

``run/runtime.py`` tells it to gather, show, hide and release; ``build/shard.py`` makes it.

Note: [Writes that leave no mark]
    A write to a gathered copy is lost at its release.  One to the parameter changes its version; one to ``weight.data`` does
    not.  So the first forward with gradients, and the first without, compare the values themselves: a forward that
    writes so at all nearly always does so in its first call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from offload.errors import AttachError, ShardedOpError
from offload.virtual import NAME
from zhooks import tree
from zhooks.layout import UnitPlan, mark_of
from zhooks.tensor import hash_of
from zhooks.unit.flat import Flat


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the module tree that holds a parameter: a module's table of parameters and a name."""

    table: MutableMapping[str, Any]
    key: str
    flat: int
    index: int


class Unit:
    """A group of parameters gathered together, and the places in modules where they are put while in use."""

    def __init__(self, plan: UnitPlan) -> None:
        self.plan, self.name, self.number, self.entries = plan, plan.name, plan.number, plan.group.entries
        self.flats: list[Flat] = []
        self.slots: list[Slot] = []
        # Modules that keep a list of their weights beside their attributes, with weak references to see them change.
        self.recurrent: list[tuple[nn.Module, list[Any]]] = []
        self._shown: list[tuple[Tensor, tuple[int, int]]] = []
        # Values of the forward under way with a sum of each, and the kinds of forward (with gradients, without) that were
        # compared: Note [Writes that leave no mark].
        self._sums: list[tuple[str, Tensor, int]] = []
        self._compared: set[bool] = set()
        self.depth = 0
        self.trainable_left = 0
        # Inside gathered(): the slots hold full values that the user may change.
        self.lent = False

    @property
    def releasable(self) -> bool:
        return self.plan.releasable

    def prepare(self) -> None:
        """Start fetching what the next gather sends from the tiers it is on."""
        for flat in self.flats:
            flat.prepare()

    def finish_gather(self) -> None:
        for flat in self.flats:
            flat.finish_gather()

    def show(self) -> None:
        """Put the gathered values where the modules look for their parameters.

        Raises:
            AttachError: a module holds something else there by now (``model.to``, ``half``, an assignment).
        """
        values = [flat.values() for flat in self.flats]
        for slot in self.slots:
            flat = self.flats[slot.flat]
            found = slot.table.get(slot.key)
            if found is not flat.params[slot.index]:
                if self.lent:
                    raise AttachError(
                        f"Unit {self.name} ran inside gathered(). Expected no forward inside gathered(), found one. Use `with "
                        "attachment.resident():`."
                    )
                self.hide()
                name = flat.specs[slot.index].name
                raise AttachError(
                    f"Parameter {name} was replaced. Expected the parameter that was attached, found {_in_place(found)}"
                )
            slot.table[slot.key] = values[slot.flat][slot.index]
        self._shown = [(view, mark_of(view)) for group in values for view in group]
        if torch.is_grad_enabled() not in self._compared:
            self._compared.add(torch.is_grad_enabled())
            self._sums = [(name, value, hash_of(value)) for flat in self.flats for name, value in _copies_of(flat)]

    def end_show(self, *, failed: bool) -> None:
        """Let go of what was shown, and refuse a write into it: where it is a copy, it would be lost.

        A forward that failed is not judged; torch's checkpoint ends its second forwards by an exception.

        Raises:
            ShardedOpError: a forward changed a parameter in place, or replaced its data.
        """
        shown, self._shown = self._shown, []
        sums, self._sums = self._sums, []
        if failed:
            return
        names = [(flat, spec.name) for flat in self.flats for spec in flat.specs]
        for (view, mark), (flat, name) in zip(shown, names, strict=True):
            if (now := mark_of(view)) != mark and (now[1] != mark[1] or not flat.storage.in_full):
                raise _lost(name)
        for name, value, before in sums:
            if hash_of(value) != before:
                raise _lost(name)

    def hide(self) -> None:
        """Put the sharded parameters back."""
        for slot in self.slots:
            slot.table[slot.key] = self.flats[slot.flat].params[slot.index]
        for module, weights in self.recurrent:
            module.__dict__["_flat_weights"] = list(weights)
            if "_flat_weight_refs" in module.__dict__:
                module.__dict__["_flat_weight_refs"] = _references(weights)


def _copies_of(flat: Flat) -> Iterator[tuple[str, Tensor]]:
    """The gathered values of each parameter, where the full buffer is a copy that a release drops."""
    if flat.storage.in_full or flat.full is None or flat.kind.device.type == NAME:
        return
    for start, spec in zip(flat.layout.starts, flat.specs, strict=True):
        yield spec.name, flat.full[start : start + spec.part_shape.numel()].detach()


def _lost(name: str) -> ShardedOpError:
    return ShardedOpError(
        f"Parameter {name} is written in its own forward. Expected its forward to read it, found a write that would be lost. "
        "Write outside the forward under no_grad (weight.clamp_(...)), or use `with attachment.gathered(parameter, "
        "write=True):`."
    )


def _in_place(found: Tensor | None) -> str:
    """What is in the place of an attached parameter, and what to do; the parameter has been put back."""
    if found is not None and not isinstance(found, nn.Parameter):
        return (
            "a tensor that torch.func.functional_call puts into the model, which is not sharded. Call it on the plain "
            "model: detach() first, or copy the model before attach."
        )
    what = "none (a deletion" if found is None else "another in its place (an assignment, model.to(), half()"
    return (
        f"{what}; undone now). To change its value, write into it under torch.no_grad() (parameter.copy_(value)); to replace "
        "it, call detach(), change it, attach again."
    )


def find_slots(model: nn.Module, units: Sequence[Unit]) -> None:
    """Let every unit know the places in the tree that hold its parameters, all units in one walk.

    RNNs rebuild their list of weights from their attributes; it is put back with the sharded parameters.
    """
    where: dict[int, tuple[Unit, int, int]] = {}
    for unit in units:
        unit.slots, unit.recurrent = [], []
        where |= {id(param): (unit, f, i) for f, flat in enumerate(unit.flats) for i, param in enumerate(flat.params)}
    for module in tree.modules(model):
        for key, param in module._parameters.items():
            if id(param) in where:
                unit, flat, index = where[id(param)]
                unit.slots.append(Slot(module._parameters, key, flat, index))
        weights = module.__dict__.get("_flat_weights")
        if isinstance(weights, list):
            for unit in {where[id(weight)][0] for weight in weights if id(weight) in where}:
                unit.recurrent.append((module, list(weights)))


def _drop_computed(model: nn.Module) -> None:
    """torch's old weight_norm and spectral_norm leave the weight they computed, and its graph, in the module, where the graph
    would forbid the swap.  The value stays; their hook computes weight and graph anew before every forward."""
    for module in tree.modules(model):
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                weight = module.__dict__.get(hook.name)
                if isinstance(weight, Tensor) and weight.grad_fn is not None:
                    module.__dict__[hook.name] = weight.detach()


@contextmanager
def loose_references(model: nn.Module) -> Iterator[None]:
    """RNNs keep weak references to their weights, which would forbid the swap: taken away and given back."""
    _drop_computed(model)
    held = [module for module in tree.modules(model) if isinstance(module.__dict__.get("_flat_weight_refs"), list)]
    for module in held:
        module.__dict__["_flat_weight_refs"] = []
    try:
        yield
    finally:
        for module in held:
            module.__dict__["_flat_weight_refs"] = _references(module.__dict__["_flat_weights"])


def _references(weights: Sequence[Any]) -> list[weakref.ref[Any] | None]:
    return [None if weight is None else weakref.ref(weight) for weight in weights]
