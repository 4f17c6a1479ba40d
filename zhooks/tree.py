"""The modules, parameters and buffers of a model, by the tables of its modules themselves.

Whatever walks over a model asks here.  A model may override ``nn.Module``'s methods of these names, for example to show only
what it trains.  Names have no trace of the wrappers of ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from zhooks.compiled import plain_name, uncompiled

__all__ = [
    "buffers", "children", "modules", "named_buffers", "named_children", "named_modules", "named_parameters", "own_parameters",
    "parameters",
]  # fmt: skip


def _walk(module: nn.Module, prefix: str, seen: set[int], remove_duplicate: bool) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    if remove_duplicate:
        seen.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}.{name}" if prefix else name, seen, remove_duplicate)


def modules(model: nn.Module) -> Iterator[nn.Module]:
    """The model and all modules below it, each once; also the wrappers of ``torch.compile``."""
    return (module for _, module in _walk(model, "", set(), remove_duplicate=True))


def named_modules(
    model: nn.Module, *, but: Collection[nn.Module] = (), remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """The model and all modules below it by name, without wrappers, and without what is in or below ``but``."""
    found = _walk(model, "", {id(module) for module in but}, remove_duplicate)
    return ((plain_name(name), module) for name, module in found if uncompiled(module) is module)


def children(module: nn.Module) -> Iterator[nn.Module]:
    """The modules right below one, each once; also wrappers."""
    return iter({id(child): child for child in module._modules.values() if child is not None}.values())


def named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules right below one by name, each once; those that are compiled without their wrappers."""
    names = {id(child): (name, child) for name, child in reversed(module._modules.items()) if child is not None}
    return ((name, uncompiled(child)) for name, child in reversed(names.values()))


def _named(module: nn.Module, tensors: str, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    """What the tables of this name of a module, and of all below it, hold."""
    seen: set[int] = set()
    for where, inner in _walk(module, prefix, set(), remove_duplicate):
        for key, tensor in getattr(inner, tensors).items():
            if tensor is None or id(tensor) in seen:
                continue
            if remove_duplicate:
                seen.add(id(tensor))
            yield plain_name(f"{where}.{key}" if where else key), tensor


def named_parameters(
    module: nn.Module, prefix: str = "", *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module and of all below it by name, each once unless all names are wanted."""
    return _named(module, "_parameters", prefix, remove_duplicate)


def parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module and of all below it, each once."""
    return (param for _, param in named_parameters(module))


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module itself has."""
    return list({id(param): param for param in module._parameters.values() if param is not None}.values())


def named_buffers(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a module and of all below it by name, each once unless all names are wanted."""
    return _named(module, "_buffers", "", remove_duplicate)


def buffers(module: nn.Module) -> Iterator[Tensor]:
    """The buffers of a module and of all below it, each once."""
    return (buffer for _, buffer in named_buffers(module))
