"""What stands in for an optimizer and its parameters while its step is tried: a twin, values and gradients of it.

``probe.py`` tries steps with them, ``owners.py`` asks what makes two parameters different.  It never calls a step.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zhooks.optim.counters import OF_PARAMS
from zhooks.optim.groups import names_of

__all__ = ["LARGE", "OURS", "CannotTry", "Place", "drawn", "gradient_of", "marked", "marks_of", "twin_of", "value_of"]


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter as far as its update depends on it: its group, dtype, dimensions, what the optimizer has noted of it, and
    what the user has, in attributes of it."""

    group: int
    dtype: torch.dtype
    dims: int
    flags: tuple[tuple[Hashable, Hashable], ...] = ()
    marks: tuple[tuple[str, Hashable], ...] = ()


class CannotTry(Exception):
    """There is no twin, or it will not step: nothing is known of the optimizer."""


def twin_of(
    optimizer: Optimizer, params: Mapping[Place, Sequence[nn.Parameter]], samples: Mapping[Place, nn.Parameter]
) -> Any:
    """Another optimizer of its class, options and attributes, of stand-ins; what it keeps of parameters elsewhere is of others.

    Raises:
        CannotTry: something it keeps cannot be copied.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            # So small that a trial of a large model costs nothing, and never a stand-in.
            memo[id(param)] = nn.Parameter(torch.zeros((1,) * param.dim(), dtype=param.dtype, device="cpu"))
    twin: Any = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    state: defaultdict[Any, dict[Any, Any]] = defaultdict(dict)
    memo[id(optimizer.state)] = state
    for place, mine in params.items():
        for param in mine:
            if place.flags:
                state[param] = dict(place.flags)
    groups = []
    try:
        for number, group in enumerate(optimizer.param_groups):
            mine = [param for place, some in params.items() if place.group == number for param in some]
            options = {key: _on_host(copy.deepcopy(value, memo)) for key, value in group.items() if key not in OF_PARAMS}
            rates = {key: _trial_rate(value) for key, value in options.items() if key == "lr" or key.endswith("_lr")}
            capturable = {"capturable": False} if "capturable" in options else {}
            groups.append({**options, **rates, **capturable, "params": mine})
            if "param_names" in group:
                names, of = names_of(group), [place for place, some in params.items() if place.group == number for _ in some]
                groups[-1]["param_names"] = [names.get(id(samples[place]), "") for place in of]
        memo[id(optimizer.param_groups)] = groups
        for key, value in vars(optimizer).items():
            if isinstance(value, OrderedDict) and key.endswith("_hooks"):
                twin.__dict__[key] = OrderedDict()
            elif key not in ("state", "param_groups"):
                twin.__dict__[key] = copy.deepcopy(value, memo)
    except Exception as error:
        raise CannotTry(f"{type(error).__name__}: {error}") from error
    twin.__dict__.update(state=state, param_groups=groups)
    return twin


#: Updates by a smaller rate are lost in the rounding of the values, and warm-up begins at 0.
_LEAST_RATE = 1e-3
_TRIAL_RATE = 1e-2


def _trial_rate(rate: Any) -> Any:
    """A learning rate whose updates can be seen."""
    if isinstance(rate, Tensor):
        return torch.where(rate.abs() < _LEAST_RATE, torch.full_like(rate, _TRIAL_RATE), rate)
    if isinstance(rate, (int, float)) and not isinstance(rate, bool) and abs(rate) < _LEAST_RATE:
        return _TRIAL_RATE
    return rate


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


#: What a sharded parameter has of its own.
OURS = ("_at", "_on", "_spec", "_bound", "_origin")
#: Each has trials of its own.
_MOST_VALUES = 4


def marked(param: nn.Parameter, sample: nn.Parameter) -> nn.Parameter:
    """The stand-in has what the user noted on the parameter it stands for."""
    for key, value in vars(sample).items():
        if key not in OURS:
            setattr(param, key, value)
    return param


def marks_of(params: Sequence[nn.Parameter]) -> list[tuple[tuple[str, Hashable], ...]]:
    """What the user noted on each of them, in plain attributes that have few values: a name or a number is of one alone."""
    noted = [
        {key: value for key, value in vars(param).items() if key not in OURS and isinstance(value, (bool, int, str))}
        for param in params
    ]
    values: dict[str, set[Hashable]] = {}
    for one in noted:
        for key, value in one.items():
            values.setdefault(key, set()).add(value)
    return [tuple(sorted((key, one[key]) for key in one if len(values[key]) <= _MOST_VALUES)) for one in noted]


#: By dimensions.
LARGE: dict[int, tuple[int, ...]] = {0: (), 1: (4096,), 2: (160, 128), 3: (4, 40, 128), 4: (16, 16, 4, 4)}
_SMALL: dict[int, tuple[int, ...]] = {0: (), 1: (24,), 2: (24, 16), 3: (4, 6, 8), 4: (4, 4, 3, 3)}


def value_of(place: Place, number: int) -> Tensor:
    """The value of a small stand-in."""
    return drawn(place, 100 + number, _SMALL)


def gradient_of(place: Place, number: int, step: int) -> Tensor:
    """Its gradient in a step."""
    return drawn(place, 10 * number + step, _SMALL)


def drawn(place: Place, seed: int, shapes: Mapping[int, tuple[int, ...]]) -> Tensor:
    """Random values of a place's dims and dtype, the same for the same seed."""
    shape = shapes.get(place.dims, shapes[4] + (1,) * (place.dims - 4))
    generator = torch.Generator().manual_seed(seed)
    dtype = place.dtype if place.dtype.is_floating_point else torch.float32
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
