"""How one flat buffer's parameters are updated: what a kernel is given, what it promises, and torch's own arithmetic.

``choose_kernel.py`` says which kernel is for a flat, ``tiered_update.py`` calls it with everything it needs in memory.
It never moves a value between tiers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.device import computes_on_host
from zhooks.optim.groups import leave
from zhooks.tensor import as_step
from zhooks.unit import Flat

__all__ = [
    "BY_RANGES", "NO_ARGUMENTS", "Arguments", "FlatUpdate", "Kernel", "TorchKernel", "grad_of", "narrowed", "step_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlatUpdate:
    """What a step has to do for one flat buffer: the parameters the optimizer holds, by its groups."""

    flat: Flat
    groups: tuple[tuple[nn.Parameter, ...], ...]

    def params(self) -> Iterator[nn.Parameter]:
        for group in self.groups:
            yield from group


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
        with narrowed(optimizer, update.groups):
            step_of(optimizer)(optimizer, *arguments.args, **arguments.kwargs)


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
