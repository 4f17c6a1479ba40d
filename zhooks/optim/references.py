"""Where an optimizer keeps its parameters, and what else it keeps, other than in its groups and as keys of its state.

What knows parameters by identity does not know a stand-in; a tensor that the optimizer has elsewhere, too, must stay where it
is.
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
from zhooks.optim.groups import ATOMIC, OF_PARAMS, of_no_param, params_of
from zhooks.optim.states import plain_parts
from zhooks.tensor import ShardedTensor

__all__ = ["beside_params", "kept_elsewhere", "memory_beside", "numbers_of"]

_LEAVES = (
    bool, int, float, complex, str, bytes, type(None), type, range, torch.dtype, torch.device, torch.Size, torch.Generator,
    types.BuiltinFunctionType, types.ModuleType, Tensor,
)  # fmt: skip
#: Attributes of attributes: further down is the rest of the program.
_DEEPEST = 12


def kept_elsewhere(optimizer: Any, params: Iterable[Tensor]) -> str:
    """The first place beside groups and keys of its state where it has one of ``params``, or its ``id``; "" where none is."""
    ids = {id(param) for param in params}
    for path, value in _reached(optimizer):
        if isinstance(value, Tensor):
            # Ranges that are no state have a parameter each.
            if id(value) in ids or (isinstance(value, ShardedTensor) and not path.startswith(".state")):
                return path
        elif type(value) is int and value in ids:
            return f"{path} (its id)"
        elif isinstance(value, Optimizer) and any(id(one) in ids for one in (*params_of(value), *value.state)):
            return f"{path}, an optimizer of its own"
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
    tensors = [value for _, value in _reached(optimizer, of_params=False) if isinstance(value, Tensor)]
    plain = [one for one in plain_parts(tensors) if type(one) in (Tensor, nn.Parameter)]
    return {one.untyped_storage()._cdata for one in plain}


def _reached(optimizer: Any, *, of_params: bool = True) -> Iterator[tuple[str, Any]]:
    """Everything that it has elsewhere, as far down as it goes, and the way there; of states of parameters if ``of_params``."""
    seen = {id(optimizer), id(optimizer.param_groups), id(optimizer.state), *map(id, optimizer.param_groups)}
    # What others put around its methods is none of its own.
    around = {f".{key}" for key, value in vars(optimizer).items() if callable(value) and hasattr(type(optimizer), key)}
    roots = [(path, value) for path, value in _places(optimizer).items() if path not in around]
    if of_params:
        roots += [(".state[a parameter]", value) for key, value in optimizer.state.items() if isinstance(key, Tensor)]
    waiting = [(path, value, 0) for path, value in reversed(roots)]
    while waiting:
        path, value, depth = waiting.pop()
        if not isinstance(value, _LEAVES):
            if id(value) in seen or depth == _DEEPEST:
                continue
            seen.add(id(value))
            waiting += [(path + name, inside, depth + 1) for name, inside in reversed(list(_inside(value)))]
        yield path, value


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
        for param in tree.parameters(value):
            yield ".parameters()[...]", param
    elif hasattr(value, "__dict__") and not isinstance(value, Optimizer):
        for key, item in list(vars(value).items()):
            yield f".{key}", item


def numbers_of(optimizer: Any) -> dict[str, str]:
    """Texts that are the same, by where in the optimizer they are, where two optimizers keep the same options and counters."""
    return {path: _text(value, frozenset()) for path, value in _places(optimizer).items()}


def _places(optimizer: Any) -> dict[str, Any]:
    """What it has that is no parameter and no state of one."""
    own, loose, *groups = of_no_param(optimizer)
    places = {f".{key}": value for key, value in own.items()}
    for number, group in enumerate(groups):
        places |= {f".param_groups[{number}][{key!r}]": value for key, value in group.items()}
    return places | {f".state[{key!r}]": value for key, value in loose.items()}


def _text(value: Any, above: frozenset[int]) -> str:
    kind, inside = type(value).__name__, above | {id(value)}
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} {value.detach().double().sum().item() if value.numel() else 0}"
    if isinstance(value, torch.Generator):
        return f"{hash(value.get_state().numpy().tobytes())}"
    if isinstance(value, Optimizer) or id(value) in above:
        return kind
    if isinstance(value, ATOMIC):
        # The text of a function has its address.
        return kind if callable(value) else repr(value)
    if isinstance(value, nn.Module):
        return f"{kind} {_text([module._buffers for module in tree.modules(value)], inside)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(k, inside)}: {_text(v, inside)}' for k, v in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_text(one, inside) for one in value))}}}"
    if isinstance(value, (list, tuple, deque)):
        return f"[{', '.join(_text(one, inside) for one in value)}]"
    if hasattr(value, "__dict__"):
        return f"{kind} {_text(vars(value), inside)}"
    return f"{kind} {repr(value) if ' at 0x' not in repr(value) else ''}"
