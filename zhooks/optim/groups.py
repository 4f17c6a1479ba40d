"""An optimizer's groups: which parameters it holds, by what names, and a group that holds fewer for a while.

Parameters are compared by identity.  It never looks at a state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["holders", "holds", "leave", "names_of", "params_of"]


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
    held: dict[str, Any] = {key: group[key] for key in ("params", "param_names") if key in group}
    params = list(params)
    if "param_names" in held:
        known = names_of(group)
        group["param_names"] = [known.get(id(param), "") for param in params] if names is None else list(names)
    group["params"] = params
    return lambda: group.update(held)


def names_of(group: dict[str, Any]) -> dict[int, str]:
    """The names that its parameters were given with, by identity."""
    return {id(param): name for param, name in zip(group["params"], group.get("param_names", ()), strict=False)}
