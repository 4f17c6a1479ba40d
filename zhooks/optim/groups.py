"""An optimizer's groups, and its own step in several calls: each on some of its parameters, what it counts counted once.

Parameters are compared by identity.
"""

from __future__ import annotations

import copy
import gc
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zhooks import tree
from zhooks.tensor import as_step

__all__ = [
    "ATOMIC", "NO_ARGUMENTS", "OF_PARAMS", "Arguments", "grad_of", "group_options", "holders", "holds", "leave", "names_of",
    "narrowed", "of_no_param", "options_kept", "params_of", "same_options", "step_of",
]  # fmt: skip

#: Of a group: its parameters, and what runs beside them.
OF_PARAMS = ("params", "param_names")


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Every parameter it holds, group by group, as its state dict counts them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def holds(optimizer: Optimizer, params: Iterable[Tensor]) -> bool:
    """It holds one of them at least."""
    wanted = {id(param) for param in params}
    return any(id(param) in wanted for param in params_of(optimizer))


def holders(params: Iterable[Tensor]) -> list[Optimizer]:
    """Every optimizer in memory that holds one of these parameters, those that wait for the collector among them."""
    params = list(params)
    found = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    # Of one that is half built there may be no more than its class.
    return [each for each in found if hasattr(each, "state") and hasattr(each, "param_groups") and holds(each, params)]


def leave(group: dict[str, Any], params: Iterable[nn.Parameter], names: Iterable[str] | None = None) -> Callable[[], None]:
    """Leave a group these parameters and their names; returns what gives it back those it had."""
    held: dict[str, Any] = {key: group[key] for key in OF_PARAMS if key in group}
    params = list(params)
    if "param_names" in held:
        known = names_of(group)
        group["param_names"] = [known.get(id(param), "") for param in params] if names is None else list(names)
    group["params"] = params
    return lambda: group.update(held)


def names_of(group: dict[str, Any]) -> dict[int, str]:
    """The names that its parameters were given with, by identity."""
    return {id(param): name for param, name in zip(group["params"], group.get("param_names", ()), strict=False)}


def grad_of(param: nn.Parameter) -> Tensor | None:
    """Its gradient as it is: nothing that is owed is reduced for it."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.grad


# One step in several calls.


@dataclass(frozen=True, slots=True)
class Arguments:
    """What ``step`` was called with, which every call of the step is given."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: Those of them that are no missing closure, by name.
    given: tuple[str, ...] = ()


NO_ARGUMENTS = Arguments()


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


def group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the groups hold beside their parameters: options and counters, as they are now."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def same_options(one: Sequence[dict[str, Any]], two: Sequence[dict[str, Any]]) -> bool:
    """Whether groups held the same at two times."""

    def same(before: Any, now: Any) -> bool:
        return torch.equal(before, now) if isinstance(before, Tensor) and isinstance(now, Tensor) else bool(before == now)

    return all(
        before.keys() == now.keys() and all(same(before[key], now[key]) for key in before)
        for before, now in zip(one, two, strict=True)
    )


ATOMIC = (
    bool, int, float, complex, str, bytes, type(None), type, range, torch.dtype, torch.device, torch.Size,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, nn.Parameter, Optimizer,
)  # fmt: skip
#: Packages whose objects an optimizer reaches through a model: what they hold is nothing that it counts.
_OURS = ("zhooks", "offload")


def of_no_param(optimizer: Any) -> list[Mapping[Any, Any]]:
    """Its attributes, what its state has under other keys than parameters, and its groups without theirs."""
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups") and not (isinstance(value, OrderedDict) and key.endswith("_hooks"))
    }
    # A copy, made at once: a thread that updates beside backward may hand states over meanwhile.
    states = dict(optimizer.state)
    state = {key: value for key, value in states.items() if not isinstance(key, Tensor)}
    groups = [{key: value for key, value in group.items() if key not in OF_PARAMS} for group in optimizer.param_groups]
    return [own, state, *groups]


@contextmanager
def options_kept(optimizer: Optimizer) -> Iterator[None]:
    """What a call inside counts, in its groups or beside them, is undone: a step of many calls counts once."""
    kept, seen = list[tuple[Any, Any]](), dict[int, tuple[Any, Any]]()
    with torch.no_grad():
        before = [{key: _keep(value, kept, seen) for key, value in table.items()} for table in of_no_param(optimizer)]
    try:
        yield
    finally:
        tables: list[dict[Any, Any]] = [vars(optimizer), optimizer.state, *optimizer.param_groups]
        with torch.no_grad():
            for table, now, was in zip(tables, of_no_param(optimizer), before, strict=True):
                for key in now.keys() - was.keys():
                    del table[key]
                table.update(was)
            for value, was in kept:
                _give_back(value, was)


def _keep(value: Any, kept: list[tuple[Any, Any]], seen: dict[int, tuple[Any, Any]]) -> Any:
    """Note in ``kept`` what a value holds now, however deep; returns what shall be in its place afterwards.

    Args:
        seen: by identity, values that were here before and what is in their place: of a cycle, and of what is held twice.
    """
    if isinstance(value, ATOMIC) or type(value).__module__.partition(".")[0] in _OURS:
        return value
    if id(value) in seen:
        return seen[id(value)][1]
    seen[id(value)] = value, value
    if isinstance(value, Tensor):
        kept.append((value, value.detach().clone()))
    elif isinstance(value, torch.Generator):
        kept.append((value, value.get_state()))
    elif isinstance(value, nn.Module):
        for module in tree.modules(value):
            _keep(module._buffers, kept, seen)
    elif isinstance(value, dict):
        kept.append((value, {key: _keep(one, kept, seen) for key, one in value.items()}))
    elif isinstance(value, (list, set, deque)):
        kept.append((value, [_keep(one, kept, seen) for one in value]))
    elif isinstance(value, (tuple, frozenset)):
        for one in value:
            _keep(one, kept, seen)
    elif hasattr(value, "__dict__"):
        _keep(vars(value), kept, seen)
    else:
        try:
            seen[id(value)] = value, copy.deepcopy(value)
        except Exception:
            return value
    return seen[id(value)][1]


def _give_back(value: Any, was: Any) -> None:
    if isinstance(value, Tensor):
        if not torch.equal(value, was):
            value.copy_(was)
    elif isinstance(value, torch.Generator):
        value.set_state(was)
    else:
        value.clear()
        value.extend(was) if isinstance(value, (list, deque)) else value.update(was)
