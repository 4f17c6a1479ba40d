"""A frozen parameter of a tensor subclass, as quantisation makes them: what it is made of, and what stands for its values.

``ignored.py`` finds them; checks, budgets, reports and checkpoints ask for bytes and checksums.  It never copies or changes a
value, and knows no library.

Note: [Where the values are]
    Of a subclass that says it (``__tensor_flatten__``) they are its inner tensors.  Any other holds packed data, and scales in
    attributes of its own, of which a module may take some over at its first forward.  The checksum is therefore over
    the set of what parameter and state dict hold, wherever each of it is at the moment.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from offload.shards import digest
from zhooks.layout.tp_division import is_divided

__all__ = ["FrozenSubclass", "is_subclass"]

#: What attributes are not searched for tensors: none of them is a value of the parameter's.
_ELSEWHERE = (nn.Module, type, FunctionType, MethodType, ModuleType)
#: Levels of objects, dicts and lists below a parameter: scales of scales have three.
_DEEP = 5


def is_subclass(param: nn.Parameter) -> bool:
    """A frozen one, neither plain nor a DTensor, that lets its values be read: it has memory, or says what it is made of."""
    kind: Any = type(param)
    if kind is nn.Parameter or param.requires_grad or is_divided(param) or nn.parameter.is_lazy(param):
        return False
    return hasattr(kind, "__tensor_flatten__") or kind.__torch_dispatch__ is Tensor.__torch_dispatch__


@dataclass(frozen=True, slots=True, eq=False)
class FrozenSubclass:
    """One of them, at the first of its places."""

    param: nn.Parameter
    module: nn.Module
    key: str

    @property
    def kind(self) -> str:
        """The name of its class."""
        return f"{type(self.param).__module__}.{type(self.param).__qualname__}"

    def tensors(self) -> list[Tensor]:
        """The plain tensors it is made of, those included that its module has taken over."""
        if hasattr(self.param, "__tensor_flatten__"):
            return list(_flattened(self.param, "").values())
        taken = [value for key, value in vars(self.module).items() if not key.startswith("_")]
        return [_data(self.param), *_inside(vars(self.param), _DEEP), *_inside(taken, 2)]

    def nbytes(self) -> int:
        """Of memory."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self.tensors()}
        return sum(storage.nbytes() for storage in storages.values())

    def beside(self) -> Mapping[str, Tensor]:
        """What its module writes into a state dict beside parameters and buffers: scales, and what describes them."""
        said: dict[str, Any] = {}
        try:
            self.module._save_to_state_dict(said, "", keep_vars=True)
        except NotImplementedError:
            return {}
        own = {*self.module._parameters, *self.module._buffers}
        return {key: value for key, value in said.items() if key not in own and isinstance(value, Tensor)}

    @torch.no_grad()
    def checksum(self) -> str:
        """Of its class and of all its values; see Note [Where the values are]."""
        # Asked first: a module may hold its values in another order until then.
        beside = self.beside()
        param = self.param
        about = [type(param).__qualname__, _described(param)]
        if hasattr(param, "__tensor_flatten__"):
            about += [str(param.__tensor_flatten__()[1])]
            found = [f"{name} {_described(inner)} {digest([inner])}" for name, inner in _flattened(param, "").items()]
        else:
            found = [_of(tensor) for tensor in [_data(param), *_inside(vars(param), _DEEP)]]
        found += [_of(tensor) for tensor in beside.values()]
        text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join([*about, *sorted(set(found))]))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _of(tensor: Tensor) -> str:
    return f"{_described(tensor)} {digest([tensor])}"


def _data(param: nn.Parameter) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return param.detach().as_subclass(Tensor)


def _flattened(tensor: Any, name: str) -> dict[str, Tensor]:
    """The plain tensors inside, by name, however deep."""
    if type(tensor) in (Tensor, nn.Parameter):
        return {name: tensor.detach()}
    found: dict[str, Tensor] = {}
    for inner in tensor.__tensor_flatten__()[0]:
        value = getattr(tensor, inner)
        if isinstance(value, Tensor):
            found |= _flattened(value, f"{name}.{inner}")
    return found


def _inside(value: Any, depth: int) -> Iterator[Tensor]:
    """Tensors in attributes, dicts and lists, so many levels deep; modules and classes are not entered."""
    if isinstance(value, Tensor):
        if type(value) is Tensor:
            yield value.detach()
        elif not is_divided(value) and hasattr(value, "__tensor_flatten__"):
            yield from _flattened(value, "").values()
    elif depth and not isinstance(value, _ELSEWHERE):
        items: Any = value if isinstance(value, (list, tuple, dict)) else getattr(value, "__dict__", ())
        for item in list(items.values() if isinstance(items, dict) else items):
            yield from _inside(item, depth - 1)
