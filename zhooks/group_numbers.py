"""What an optimizer's groups hold beside their parameters: counters and options, the same after each of a step's many calls.

``optim.py`` notes them before a step and compares them after every call.  It never touches a parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.errors import ShardedOpError

__all__ = ["numbers", "same_numbers"]


def numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the groups hold beside their parameters."""
    return [{key: _copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def same_numbers(
    optimizer: Optimizer, start: list[dict[str, Any]], end: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """After one of many calls: its changes to the groups are undone, and must be those of every other call.

    Raises:
        ShardedOpError: they are not: the optimizer's step depends on all parameters at once.
    """
    now = numbers(optimizer)
    for group, before in zip(optimizer.param_groups, start, strict=True):
        for key, value in before.items():
            if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    if end is not None and not all(_equal(one, two) for one, two in zip(now, end, strict=True)):
        raise ShardedOpError(
            f"{type(optimizer).__name__}: expected an optimizer that updates each element by itself, for the policy places its "
            "states on tiers; found that its groups' numbers depend on all parameters at once. Use tier = \"device\" for "
            "[parameter], [gradient] and [optimizer], or another optimizer."
        )
    return now


def _equal(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return torch.equal(one, two)
    return bool(one == two)
