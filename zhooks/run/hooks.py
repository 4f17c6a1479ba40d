"""Installs and removes the module hooks that tell the runtime when units are used; decides nothing.

``session/open.py`` installs once.  Hooks are objects of their own class so that a deep copy of the model (an EMA) carries inert
ones; they never replace a ``forward`` and never touch a parameter but through the runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from offload.policy import Precision
from zhooks import tree
from zhooks.compiled import CASTS, REASON, outside_graphs
from zhooks.grad import Scaling, each, in_backward
from zhooks.layout import DTYPES
from zhooks.refusals import captured
from zhooks.run.given import Given
from zhooks.run.islands import Island, Map
from zhooks.run.runtime import Runtime
from zhooks.run.schedule import Scope
from zhooks.tensor import ParamShard
from zhooks.unit import Unit


class Casts:
    """What a policy's [precision] casts: inputs and outputs of the outermost call, inputs of units, and both of islands."""

    def __init__(self, scaling: Scaling) -> None:
        self.scaling = scaling
        #: Dtypes of the outermost call's floating inputs and outputs; None leaves them as they are.
        self.inputs: torch.dtype | None = None
        self.outputs: torch.dtype | None = None
        self._units: dict[int, torch.dtype] = {}
        self._handles: list[RemovableHandle] = []

    def open(self, precision: Precision, charted: Map) -> None:
        """Cast as this policy says from the next forward on."""
        self.close()
        self.inputs = charted.outside if precision.cast_inputs else None
        self.outputs = None if precision.output is None else DTYPES[precision.output]
        self._units = {id(module): dtype for module, dtype in charted.units}
        self._handles = install_casts(charted.islands)

    def given(self, module: nn.Module, begins: bool) -> torch.dtype | None:
        """What the floating inputs of a module become; ``begins``: its forward began a pass."""
        return self._units.get(id(module), self.inputs if begins else None)

    def close(self) -> None:
        remove(self._handles)


def _floats(value: Any, dtype: torch.dtype) -> Any:
    return each(value, lambda tensor: tensor.to(dtype))


class Inert:
    """What a copied model has in place of our hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class Hook:
    """A hook of this package on a module; a copy of the module has an inert one.  See Note [Outside compiled graphs]."""

    def __init_subclass__(cls, why: str = REASON) -> None:
        outside_graphs(cls.__call__, why)

    @property
    def __name__(self) -> NoReturn:
        # Only torch.jit.script asks a hook for its name: it would compile the hook.
        raise captured("script", "the model")

    def __deepcopy__(self, memo: dict[int, Any]) -> Inert:
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()


class Before(Hook):
    """Forward pre-hook of a module that units are entered through."""

    def __init__(self, runtime: Runtime, units: Sequence[Unit], scope: Scope, casts: Casts) -> None:
        self._runtime, self._units, self._scope, self._casts = runtime, tuple(units), scope, casts
        # The last forward of the module began a pass; a recomputation in backward then casts as that forward did.
        self.begins = False
        #: What is entered through the module, for whoever names it.
        self.where = units[0].name if units else scope.name
        # Of each forward of the module that runs.
        self._given: list[Given | None] = []

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._given.append(None)
        if torch.jit.is_tracing():
            raise captured("trace", self.where or "the model")
        runtime, where = self._runtime, self._scope.name
        backward, outermost = in_backward(), runtime.outermost
        if not backward:
            self.begins = outermost
            if outermost:
                runtime.inputs.note(args, kwargs)
        runtime.enter(module, self._units, self._scope, module.training)
        path = f"{where} {'train' if module.training else 'eval'}" if outermost and not backward else None
        runtime.saved.entered(module, args, kwargs, where=where, begins=path, unit=bool(self._units))
        scaling, begins = self._casts.scaling, outermost and self.begins
        if runtime.given is not None and begins and not backward and torch.is_grad_enabled():
            runtime.given((args, kwargs))
        dtype = self._casts.given(module, begins)
        if dtype is None and not (begins and scaling.on):
            return None
        own = (args, kwargs)
        made = scaling.inward(own) if begins else own
        made = made if dtype is None else _floats(made, dtype)
        if made is not own:
            self._given[-1] = Given(where, own, made, reads=not begins)
        return made

    def left(self, failed: bool) -> None:
        """That forward is over."""
        given = self._given.pop() if self._given else None
        if given is not None:
            given.end(failed)


class After(Hook):
    """Forward hook of the same module; runs when forward raises, too."""

    def __init__(self, runtime: Runtime, casts: Casts, before: Before) -> None:
        self._runtime, self._casts, self._before = runtime, casts, before

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        # torch calls this with None from inside its except clause; a module may also return None of its own.
        failed = output is None and sys.exc_info()[0] is not None
        runtime = self._runtime
        if runtime.made is not None and not failed and not in_backward() and torch.is_grad_enabled():
            runtime.made(self._before.where, output)
        self._before.left(failed)
        runtime.saved.left(module, failed)
        runtime.leave(module, failed)
        if not runtime.outermost:
            return None
        backward = in_backward()
        if not backward:
            runtime.saved.end(failed)
        if failed or (backward and not self._before.begins):
            return None
        if self._casts.outputs is not None:
            output = _floats(output, self._casts.outputs)
        return self._casts.scaling.outward(output)


#: Called with a unit's number, what a module of it has made, and whether the unit itself has; and with the gradient of that.
Made = Callable[[int, Tensor, bool], None]
Gradient = Callable[[int, Tensor], None]


class Watch(Hook):
    """Forward hook that shows what a module of a unit makes, and its gradient where the unit hands it on."""

    def __init__(self, number: int, made: Made, passed: Gradient, *, whole: bool) -> None:
        self._number, self._made, self._passed, self._whole = number, made, passed, whole

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                self._made(self._number, leaf, self._whole)
                if self._whole and leaf.requires_grad and not in_backward():
                    leaf.register_hook(lambda grad: self._passed(self._number, grad))


def watch(model: nn.Module, units: Sequence[Unit], made: Made, passed: Gradient) -> list[RemovableHandle]:
    """Call ``made`` with what the units' modules without children make, and what the units themselves do; ``passed`` with the
    gradients of the latter."""
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
        if number is not None and (whole or next(tree.children(module), None) is None):
            handles.append(module.register_forward_hook(Watch(number, made, passed, whole=whole)))
        waiting.extend((child, number) for child in tree.children(module))
    return handles


class Into(Hook, why=CASTS):
    """Forward pre-hook of an island: floating inputs in its dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _floats(args, self._dtype), _floats(kwargs, self._dtype)


class OutOf(Into, why=CASTS):
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
        remove(handles)
        raise


def remove(handles: list[RemovableHandle]) -> None:
    """Take these hooks away."""
    while handles:
        handles.pop().remove()


def install(model: nn.Module, units: Sequence[Unit], runtime: Runtime, casts: Casts) -> list[RemovableHandle]:
    """Hook every module that units are entered through; returns the handles that undo it."""
    names = {id(module): name for name, module in tree.named_modules(model)}
    through: dict[int, tuple[nn.Module, list[Unit]]] = {id(model): (model, [])}
    for unit in units:
        for module in unit.entries:
            through.setdefault(id(module), (module, []))[1].append(unit)
    handles: list[RemovableHandle] = []
    with _removed_if_it_fails(handles):
        for module, entered in through.values():
            below = {unit.number for inner in tree.modules(module) if id(inner) in through for unit in through[id(inner)][1]}
            own = [unit.number for unit in entered]
            scope = Scope(names.get(id(module), "") or type(module).__name__, (*own, *sorted(below.difference(own))))
            before = Before(runtime, entered, scope, casts)
            after = After(runtime, casts, before)
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(after, always_call=True))
    return handles


def rehook(param: nn.Parameter, spec: ParamShard) -> None:
    """Give a parameter that is plain again the hooks the user had put on it.

    The tables themselves: handles go on removing their hooks, and a parameter that was frozen keeps them, as in plain torch.
    """
    bare: Any = param
    bare._backward_hooks, bare._post_accumulate_grad_hooks = spec.hooks or None, spec.post_hooks or None
