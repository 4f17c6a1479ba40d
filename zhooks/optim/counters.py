"""What an optimizer keeps that is no parameter and no state of one: options, counters, tensors beside its groups.

``whole/`` has it put back after each round, ``probe.py`` compares it between trials.  It never looks at parameters or
their states.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zhooks import tree

__all__ = ["OF_PARAMS", "numbers_of", "of_no_param", "options_kept"]

#: Of a group: its parameters, and what runs beside them.
OF_PARAMS = ("params", "param_names")
_ATOMIC = (
    bool, int, float, complex, str, bytes, type(None), type, range, torch.dtype, torch.device, torch.Size,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
)  # fmt: skip
#: Packages whose objects an optimizer reaches through a model: what they hold is nothing that it counts.
_OURS = ("zhooks", "offload")
_Restore = Callable[[], Any]
"""Gives a value what it had when it was taken, and returns it."""


def of_no_param(optimizer: Any) -> list[Mapping[Any, Any]]:
    """Its attributes, its groups, and what its state has under other keys than parameters."""
    hidden = {"state", "param_groups"}
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in hidden and not (isinstance(value, OrderedDict) and key.endswith("_hooks"))
    }
    # A copy, made at once: a thread that updates beside backward may hand states over meanwhile.
    states = dict(optimizer.state)
    state = {key: value for key, value in states.items() if not isinstance(key, Tensor)}
    groups = [{key: value for key, value in group.items() if key not in OF_PARAMS} for group in optimizer.param_groups]
    return [own, state, *groups]


@contextmanager
def options_kept(optimizer: Optimizer) -> Iterator[None]:
    """What a call inside counts, in its groups or beside them, is undone: a step of many calls counts once."""
    taken: dict[int, _Restore] = {}
    with torch.no_grad():
        before = [{key: _taken(value, taken) for key, value in table.items()} for table in of_no_param(optimizer)]
    try:
        yield
    finally:
        tables: list[dict[Any, Any]] = [vars(optimizer), optimizer.state, *optimizer.param_groups]
        with torch.no_grad():
            for table, now, restores in zip(tables, of_no_param(optimizer), before, strict=True):
                for key in now.keys() - restores.keys():
                    del table[key]
                for key, restore in restores.items():
                    table[key] = restore()


def _taken(value: Any, taken: dict[int, _Restore]) -> _Restore:
    """What restores ``value``, and what it holds, in place."""
    if isinstance(value, (*_ATOMIC, nn.Parameter, Optimizer)) or type(value).__module__.partition(".")[0] in _OURS:
        return lambda: value
    known = taken.get(id(value))
    if known is not None:
        return known
    # Of a cycle, and of what is held twice; it also keeps the value alive, whose identity it stands for.
    taken[id(value)] = lambda: value
    made = _restore_of(value, taken)
    taken[id(value)] = made
    return made


def _restore_of(value: Any, taken: dict[int, _Restore]) -> _Restore:
    if isinstance(value, Tensor):
        values = value.detach().clone()
        return lambda: value if torch.equal(value, values) else value.copy_(values)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, nn.Module):
        buffers = [_container(module._buffers, taken) for module in tree.modules(value)]
        return lambda: (value, [restore() for restore in buffers])[0]
    if isinstance(value, (tuple, frozenset)):
        every = [_taken(one, taken) for one in value]
        return lambda: (value, [restore() for restore in every])[0]
    if isinstance(value, (dict, list, set, deque)):
        return _container(value, taken)
    if hasattr(value, "__dict__"):
        attributes = _container(vars(value), taken)
        return lambda: (value, attributes())[0]
    try:
        kept = copy.deepcopy(value)
    except Exception:
        return lambda: value
    return lambda: copy.deepcopy(kept)


def _container(value: Any, taken: dict[int, _Restore]) -> _Restore:
    if isinstance(value, dict):
        items = {key: _taken(one, taken) for key, one in value.items()}

        def restore_items() -> Any:
            found = {key: restore() for key, restore in items.items()}
            value.clear()
            value.update(found)
            return value

        return restore_items
    every = [_taken(one, taken) for one in value]

    def restore_every() -> Any:
        found = [restore() for restore in every]
        value.clear()
        value.update(found) if isinstance(value, set) else value.extend(found)
        return value

    return restore_every


def numbers_of(optimizer: Any) -> dict[str, str]:
    """The same texts, by where in the optimizer they are, where two optimizers keep the same options and counters."""
    own, state, *groups = of_no_param(optimizer)
    places = {f".{key}": value for key, value in own.items()} | {f".state[{key!r}]": value for key, value in state.items()}
    for number, group in enumerate(groups):
        places |= {f"param_groups[{number}][{key!r}]": value for key, value in group.items()}
    return {place: _text(value, set()) for place, value in places.items()}


def _text(value: Any, above: set[int]) -> str:
    if isinstance(value, _ATOMIC):
        # The text of a function has its address.
        kind: type = type(value)
        return kind.__name__ if callable(value) else repr(value)
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} {value.detach().double().sum().item() if value.numel() else 0}"
    if id(value) in above or isinstance(value, Optimizer):
        return type(value).__name__
    inside = above | {id(value)}
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {_text([module._buffers for module in tree.modules(value)], inside)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(k, inside)}: {_text(v, inside)}' for k, v in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_text(one, inside) for one in value))}}}"
    if isinstance(value, (list, tuple, deque)):
        return f"[{', '.join(_text(one, inside) for one in value)}]"
    if hasattr(value, "__dict__"):
        return f"{type(value).__name__} {_text(vars(value), inside)}"
    if isinstance(value, torch.Generator):
        return f"{hash(value.get_state().numpy().tobytes())}"
    return f"{type(value).__name__} {repr(value) if ' at 0x' not in repr(value) else ''}"
