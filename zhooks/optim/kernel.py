"""How one flat buffer's parameters are updated: what a kernel is given, what it promises, and torch's own arithmetic.

``choose_kernel.py`` says which kernel is for a flat, ``tiered_update.py`` calls it with everything it needs in memory.
It never moves a value between tiers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.device import computes_on_host
from zhooks.optim.groups import leave
from zhooks.optim.runs import runs_of, step_runs
from zhooks.tensor import as_step
from zhooks.unit import Flat

__all__ = [
    "BY_RANGES", "NO_ARGUMENTS", "Arguments", "FlatUpdate", "Kernel", "TorchKernel", "by_runs", "grad_of", "narrowed",
    "step_groups", "step_of", "update_here", "updates_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlatUpdate:
    """What a step has to do for one flat buffer: the parameters the optimizer holds, by its groups."""

    flat: Flat
    groups: tuple[tuple[nn.Parameter, ...], ...]

    def params(self) -> Iterator[nn.Parameter]:
        for group in self.groups:
            yield from group

    def in_order(self) -> Iterator[tuple[nn.Parameter, int]]:
        """As they lie in the flat, each with the number of its group."""
        group_of = {id(param): number for number, group in enumerate(self.groups) for param in group}
        return ((param, group_of[id(param)]) for param in self.flat.params if id(param) in group_of)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What ``step`` was called with, which every call of the step is given."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: Those of them that are no missing closure, by name.
    given: tuple[str, ...] = ()


NO_ARGUMENTS = Arguments()


class Kernel(Protocol):
    """How one flat is updated, with everything it needs in memory."""

    def writes_copy(self, flat: Flat) -> bool:
        """An update of the flat writes all of its copy in the compute dtype, too."""

    def apart(self, optimizer: Optimizer) -> bool:
        """An update needs nothing but the values it is given and the optimizer's groups and states: any thread may make it, on
        another optimizer of the same type that shares the states."""

    def check(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        """Before anything of a step is updated.

        Raises:
            ShardedOpError: it cannot update these parameters of this optimizer.
        """

    def update(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        """Update its parameters and states; a copy that it writes is leased for a whole write."""


#: torch's optimizers whose step goes over ranges alone: no rank is asked, nothing is gathered, no attribute is kept.
BY_RANGES = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
)
#: Options under which a step works on the device, in the order of a stream that another thread does not know.
_ON_DEVICE = ("fused", "capturable", "differentiable")


class TorchKernel:
    """The optimizer's own arithmetic, on the parameters of one flat.

    Note: [Whose step may have a thread of its own]
        Those of torch's own classes, as they are.  Any other may ask all ranks in its step (a norm), at a place that would
        differ by rank, and may keep itself or its groups under other names, where a narrowed copy of it would not reach.
    """

    def writes_copy(self, flat: Flat) -> bool:
        return False

    def apart(self, optimizer: Optimizer) -> bool:
        if type(optimizer) not in BY_RANGES:
            return False
        groups = optimizer.param_groups
        tensors = [value for group in groups for value in group.values() if isinstance(value, Tensor)]
        on_device = not all(computes_on_host(value.device) for value in tensors)
        return not on_device and not any(group.get(option) for group in groups for option in _ON_DEVICE)

    def check(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        """Its own arithmetic knows all of them."""

    def update(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        update_here(optimizer, [update], arguments)


def by_runs(optimizer: Optimizer) -> bool:
    """A step of it may go over many parameters as one tensor; see `runs.py`."""
    return type(optimizer) in BY_RANGES and not any(group.get("differentiable") for group in optimizer.param_groups)


def update_here(optimizer: Optimizer, updates: Sequence[FlatUpdate], arguments: Arguments) -> None:
    """Update flats that are in the memory they are computed in, by one step."""
    members = chain.from_iterable(update.in_order() for update in updates)
    runs = runs_of(optimizer, members) if by_runs(optimizer) else None
    if runs is None:
        groups = [tuple(chain.from_iterable(each)) for each in zip(*(update.groups for update in updates), strict=True)]
        step_groups(optimizer, arguments, groups)
    else:
        step_runs(optimizer, runs, partial(step_groups, optimizer, arguments))


def step_groups(optimizer: Optimizer, arguments: Arguments, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Its own step over these parameters alone."""
    with narrowed(optimizer, groups):
        step_of(optimizer)(optimizer, *arguments.args, **arguments.kwargs)


def updates_of(optimizer: Optimizer, flats: Iterable[Flat], without: Set[int] = frozenset()) -> list[FlatUpdate]:
    """What a step of the optimizer has to do for these flats, in their order; ``without`` parameters of these identities."""
    place: dict[int, Flat] = {id(param): flat for flat in flats for param in flat.params if id(param) not in without}
    if not place:
        return []
    by_flat: dict[int, tuple[Flat, list[list[nn.Parameter]]]] = {}
    count = len(optimizer.param_groups)
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            flat = place.get(id(param))
            if flat is not None:
                by_flat.setdefault(flat.number, (flat, [[] for _ in range(count)]))[1][number].append(param)
    return [FlatUpdate(flat, tuple(tuple(group) for group in groups)) for _, (flat, groups) in sorted(by_flat.items())]


def step_of(optimizer: Optimizer) -> Callable[..., Any]:
    """The step of its class, without what torch and others have put around it."""
    step: Any = type(optimizer).step
    return as_step(getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step)


@contextmanager
def narrowed(
    optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]], names: Sequence[Sequence[str]] | None = None
) -> Iterator[None]:
    """Inside it has these parameters alone, group by group, and no hooks; of parameters of its own it finds the names."""
    own = cast(Any, optimizer)
    hooks = own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks
    undo = [
        leave(group, params, None if names is None else names[number])
        for number, (group, params) in enumerate(zip(optimizer.param_groups, groups, strict=True))
    ]
    # A step that calls its base class's would run them once a call.
    own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks = hooks
        for back in undo:
            back()


def grad_of(param: nn.Parameter) -> Tensor | None:
    """Its gradient as it is: nothing that is owed is reduced for it."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.grad
