"""An optimizer of the same class and options over parameters of a few elements on the CPU, which steps in place of the user's.

``plan/state_sizes.py`` asks it what an optimizer will keep, ``checkpoint/check_optimizers.py`` whether it steps with the states
that are loaded.  There can be none where the optimizer needs a closure, or its constructor other arguments.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Place", "stand_in_of", "step_stand_in"]

Place = tuple[int, torch.dtype, int]
"""A parameter as far as states depend on it: its group, the dtype that is updated, its dimensions."""


def stand_in_of(optimizer: Optimizer, places: Iterable[Place]) -> tuple[Optimizer, dict[Place, nn.Parameter]] | None:
    """One with a parameter of each kind, after its first step; None where there can be none."""
    params = {place: nn.Parameter(torch.zeros((3,) * max(1, place[2]), dtype=place[1], device="cpu")) for place in places}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        mine = [param for place, param in params.items() if place[0] == number]
        if mine:
            options = {key: _on_cpu(value) for key, value in group.items() if key not in ("params", "param_names")}
            # It asks for a device to capture on.
            groups.append({**options, **({"capturable": False} if "capturable" in options else {}), "params": mine})
    kind: Any = type(optimizer)
    # Whatever it raises, it is another's code that was not made for this.
    try:
        with warnings.catch_warnings(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            named = inspect.signature(kind.__init__).parameters
            stand_in = kind(groups, **{key: _on_cpu(value) for key, value in optimizer.defaults.items() if key in named})
            step_stand_in(stand_in)
            return stand_in, params
    except Exception:
        return None


def step_stand_in(stand_in: Optimizer) -> None:
    """A step with gradients of ones, outside the hooks that steps have.

    Raises:
        Exception: whatever the optimizer raises.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()), torch.no_grad(), torch.device("cpu"):
        warnings.simplefilter("ignore")
        for group in stand_in.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        step: Any = type(stand_in).step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(stand_in)


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
