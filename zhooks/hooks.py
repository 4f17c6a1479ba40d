"""Installs and removes the module hooks that tell the runtime when units are used; decides nothing.

``attach.py`` installs once.  Hooks are objects of their own class so that a deep copy of the model (an EMA) carries inert
ones; they never replace a ``forward`` and never touch a parameter but through the runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from offload.policy_precision import Precision
from zhooks.islands import Island
from zhooks.kind import DTYPES
from zhooks.runtime import Runtime
from zhooks.scaling import Scaling
from zhooks.schedule import Scope
from zhooks.sharded import Spec
from zhooks.stacks import in_backward
from zhooks.unit import Unit


class Casts:
    """Floating inputs of the outermost call in the compute dtype, its outputs in the policy's."""

    def __init__(self, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.scaling: Scaling | None = None

    def change(self, other: Casts) -> None:
        """Cast as ``other`` does from now on."""
        self.inputs, self.outputs = other.inputs, other.outputs


def _floats(value: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, value)


def casts_of(precision: Precision, compute: torch.dtype | None) -> Casts:
    """The casts a policy's [precision] asks for, of a model that computes in ``compute``, None for its own dtype."""
    outputs = None if precision.output is None else DTYPES[precision.output]
    return Casts(compute if precision.cast_inputs else None, outputs)


class Inert:
    """What a copied model has in place of our hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class Before:
    """Forward pre-hook of a module that units are entered through."""

    def __init__(self, runtime: Runtime, units: Sequence[Unit], scope: Scope, casts: Casts) -> None:
        self._runtime, self._units, self._scope, self._casts = runtime, tuple(units), scope, casts
        # The last forward of the module began a pass; a recomputation in backward then casts as that forward did.
        self.begins = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Inert:
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not in_backward():
            self.begins = self._runtime.outermost
        begins = self._runtime.outermost and not in_backward()
        outermost = self._runtime.outermost and (self.begins or not in_backward())
        self._runtime.enter(module, self._units, self._scope, module.training)
        saved, recompute = self._runtime.saved, self._runtime.recompute
        saved.where = self._scope.name
        if begins:
            saved.begin(f"{self._scope.name} {'train' if module.training else 'eval'}")
        if self._units and saved.residual.counts and not in_backward():
            saved.residual.entering(module, args, kwargs)
        if recompute is not None:
            saved.residual.inputs = True
            recompute.enter(module, args, kwargs)
            saved.residual.inputs = False
        scaling = self._casts.scaling
        if not outermost or (self._casts.inputs is None and (scaling is None or not scaling.on)):
            return None
        if scaling is not None:
            args, kwargs = scaling.inward(args), scaling.inward(kwargs)
        if self._casts.inputs is not None:
            return _floats(args, self._casts.inputs), _floats(kwargs, self._casts.inputs)
        return args, kwargs


class After:
    """Forward hook of the same module; runs when forward raises, too."""

    def __init__(self, runtime: Runtime, casts: Casts, before: Before) -> None:
        self._runtime, self._casts, self._before = runtime, casts, before

    def __deepcopy__(self, memo: dict[int, Any]) -> Inert:
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        # torch calls this with None from inside its except clause; a module may also return None of its own.
        failed = output is None and sys.exc_info()[0] is not None
        if self._runtime.recompute is not None:
            self._runtime.recompute.leave(module, failed)
        self._runtime.leave(module, failed)
        if self._runtime.outermost and not in_backward():
            self._runtime.saved.end(failed)
        if failed or not self._runtime.outermost or (in_backward() and not self._before.begins):
            return None
        if self._casts.outputs is not None:
            output = _floats(output, self._casts.outputs)
        return output if self._casts.scaling is None else self._casts.scaling.outward(output)


class Watcher(Protocol):
    """Who is shown what units make (``calibrate.Meter``)."""

    def output(self, number: int, value: Tensor, whole: bool) -> None:
        """A module of unit ``number`` has made ``value``; ``whole``: the unit itself has."""

    def gradient(self, number: int, value: Tensor) -> None:
        """The gradient of what unit ``number`` has handed on."""


class Watch:
    """Forward hook that shows what a module of a unit makes, and its gradient where the unit hands it on."""

    def __init__(self, meter: Watcher, number: int, *, whole: bool) -> None:
        self._meter, self._number, self._whole = meter, number, whole

    def __deepcopy__(self, memo: dict[int, Any]) -> Inert:
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                self._meter.output(self._number, leaf, self._whole)
                if self._whole and leaf.requires_grad and not in_backward():
                    leaf.register_hook(lambda grad: self._meter.gradient(self._number, grad))


def watch(model: nn.Module, units: Sequence[Unit], meter: Watcher) -> list[RemovableHandle]:
    """Show ``meter`` what the units' modules without children make, and what the units themselves do."""
    entries = {id(entry): unit.number for unit in units for entry in reversed(unit.entries)}
    handles: list[RemovableHandle] = []
    waiting: list[tuple[nn.Module, int | None]] = [(model, None)]
    seen: set[int] = set()
    while waiting:
        module, around = waiting.pop()
        number = entries.get(id(module), around)
        if id(module) in seen:
            continue
        seen.add(id(module))
        whole = id(module) in entries
        if number is not None and (whole or next(module.children(), None) is None):
            handles.append(module.register_forward_hook(Watch(meter, number, whole=whole)))
        waiting.extend((child, number) for child in module.children())
    return handles


class Into:
    """Forward pre-hook of an island: floating inputs in its dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> Inert:
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _floats(args, self._dtype), _floats(kwargs, self._dtype)


class OutOf(Into):
    """Forward hook of an island: floating outputs in the dtype around it."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _floats(output, self._dtype)


def install_casts(found: Sequence[Island]) -> list[RemovableHandle]:
    """Cast at these islands, next to their forward: everybody else's hooks see what surrounds the island."""
    handles: list[RemovableHandle] = []
    with _removed_if_it_fails(handles):
        for island in found:
            handles.append(island.module.register_forward_pre_hook(Into(island.inside), with_kwargs=True))
            handles.append(island.module.register_forward_hook(OutOf(island.outside), prepend=True))
    return handles


@contextmanager
def _removed_if_it_fails(handles: list[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        while handles:
            handles.pop().remove()
        raise


def install(model: nn.Module, units: Sequence[Unit], runtime: Runtime, casts: Casts) -> list[RemovableHandle]:
    """Hook every module that units are entered through; returns the handles that undo it."""
    names = {id(module): name for name, module in model.named_modules()}
    through: dict[int, tuple[nn.Module, list[Unit]]] = {id(model): (model, [])}
    for unit in units:
        for module in unit.entries:
            through.setdefault(id(module), (module, []))[1].append(unit)
    handles: list[RemovableHandle] = []
    with _removed_if_it_fails(handles):
        for module, entered in through.values():
            below = {id(inner) for inner in module.modules()}
            numbers = tuple(u.number for u in units if u in entered or any(id(entry) in below for entry in u.entries))
            scope = Scope(names.get(id(module), "") or type(module).__name__, numbers)
            before = Before(runtime, entered, scope, casts)
            after = After(runtime, casts, before)
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(after, always_call=True))
    return handles


def rehook(param: nn.Parameter, spec: Spec) -> None:
    """Give a parameter that is plain again the hooks the user had put on it."""
    for hook in spec.hooks.values():
        param.register_hook(hook)
    for post in spec.post_hooks.values():
        param.register_post_accumulate_grad_hook(post)
