"""Where an optimizer keeps its parameters, or lists that run beside them, other than in its groups and as keys of its state.

``owners.py`` asks before an optimizer is stepped, ``probe.py`` and ``whole/`` after a step on stand-ins: what knows
parameters by identity does not know a stand-in.  ``whole/`` asks which tensors must stay where they are, for the
optimizer has them elsewhere, too.  It never changes what it looks through.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zhooks import tree
from zhooks.optim.counters import OF_PARAMS
from zhooks.optim.groups import params_of
from zhooks.optim.owned_states import plain_parts
from zhooks.tensor import ShardedTensor

__all__ = ["beside_params", "kept_elsewhere", "memory_beside"]

_LEAVES = (
    bool, float, complex, str, bytes, type(None), type, range, torch.dtype, torch.device, torch.Size, torch.Generator,
    types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip
#: Attributes of attributes: further down is the rest of the program.
_DEEPEST = 12


def kept_elsewhere(optimizer: Any, params: Iterable[Tensor]) -> str:
    """The first place beside groups and keys of its state where it has one of ``params``, or its ``id``; "" where none is."""
    ids = {id(param) for param in params}
    seen = {id(optimizer), id(optimizer.param_groups), id(optimizer.state), *map(id, optimizer.param_groups)}
    for path, value in _roots(optimizer):
        found = _find(value, path, ids, seen, 0)
        if found:
            return found
    return ""


def beside_params(optimizer: Optimizer) -> str:
    """The first list of a group with an item a parameter; "" where none is."""
    for number, group in enumerate(optimizer.param_groups):
        count = len(group["params"])
        for key, value in group.items():
            if key not in OF_PARAMS and isinstance(value, list) and len(value) == count > 1:
                return f"param_groups[{number}][{key!r}]"
    return ""


def memory_beside(optimizer: Any) -> set[int]:
    """The memory of all tensors that it has elsewhere than in states of parameters, by identity."""
    seen = {id(optimizer), id(optimizer.param_groups), id(optimizer.state), *map(id, optimizer.param_groups)}
    found: set[int] = set()
    for path, value in _roots(optimizer):
        if path != _OF_PARAM:
            _collect(value, found, seen, 0)
    return found


def _collect(value: Any, found: set[int], seen: set[int], depth: int) -> None:
    if isinstance(value, (*_LEAVES, int, Optimizer)) or id(value) in seen or depth == _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        found.update(one.untyped_storage()._cdata for one in plain_parts(value) if type(one) in (Tensor, nn.Parameter))
        return
    for _, inside in _inside(value):
        _collect(inside, found, seen, depth + 1)


#: The states of a parameter, among the places where an optimizer has something.
_OF_PARAM = ".state[a parameter]"


def _roots(optimizer: Any) -> Iterator[tuple[str, Any]]:
    for key, value in vars(optimizer).items():
        # What others put around its methods is none of its own.
        around = callable(value) and hasattr(type(optimizer), key)
        if key not in ("state", "param_groups") and not key.endswith("_hooks") and not around:
            yield f".{key}", value
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in OF_PARAMS:
                yield f".param_groups[{number}][{key!r}]", value
    for key, value in optimizer.state.items():
        yield (_OF_PARAM if isinstance(key, Tensor) else f".state[{key!r}]"), value


def _find(value: Any, path: str, ids: set[int], seen: set[int], depth: int) -> str:
    if isinstance(value, _LEAVES):
        return ""
    if isinstance(value, Tensor):
        # Ranges that are no state have a parameter each.
        return path if id(value) in ids or (isinstance(value, ShardedTensor) and not path.startswith(".state")) else ""
    if isinstance(value, int):
        return f"{path} (its id)" if value in ids else ""
    if id(value) in seen or depth == _DEEPEST:
        return ""
    seen.add(id(value))
    if isinstance(value, Optimizer):
        own = any(id(param) in ids for param in params_of(value))
        own = own or any(id(key) in ids for key in value.state)
        return f"{path}, an optimizer of its own" if own else ""
    for name, inside in _inside(value):
        found = _find(inside, f"{path}{name}", ids, seen, depth + 1)
        if found:
            return found
    return ""


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, and what is said of the way there."""
    if isinstance(value, Mapping):
        for key, item in list(value.items()):
            yield " (a key)", key
            yield f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", item
    elif isinstance(value, (list, tuple, deque, Set)):
        for item in list(value):
            yield "[...]", item
    elif isinstance(value, weakref.ref):
        yield "()", value()
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield "", value.__func__
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield " (its closure)", cell.cell_contents
            except ValueError:
                continue  # not yet filled
    elif isinstance(value, nn.Module):
        yield ".parameters()", list(tree.parameters(value))
    elif hasattr(value, "__dict__"):
        for key, item in list(vars(value).items()):
            yield f".{key}", item
