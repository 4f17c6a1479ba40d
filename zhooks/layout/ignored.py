"""What of a model an attachment leaves as it is: what ``[units] ignore`` names, and frozen parameters of tensor subclasses.

Note: [Ignored]
    What is ignored stays plain: it is neither sharded, gathered, cast, made equal over the ranks nor reduced, in all places
    where it appears, and modules below an ignored one are ignored with it.  What it may be is therefore open: a sparse
    embedding, a module under DistributedDataParallel, one that is attached by itself over other ranks.  Where the
    attachment writes or reads values as a whole it counts: checkpoints hold it, and memory and budgets count it.

Note: [Frozen tensor subclasses]
    A quantised weight cannot lie in a flat buffer, and need not: it is never updated.  It stays whole on every rank; ranks are
    compared as they attach, and a checkpoint has its checksum in place of its values.  One that ``[units] ignore`` names is
    every rank's own.

Note: [Where the values are]
    Of a subclass that says it (``__tensor_flatten__``) they are its inner tensors.  Any other holds packed data, and scales in
    attributes of its own, of which a module may take some over at its first forward.  The checksum is therefore over
    the set of what parameter and state dict hold, wherever each of it is at the moment.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import AttachError
from offload.shards import digest
from zhooks import tree
from zhooks.layout.mesh import is_divided

#: What attributes are not searched for tensors: none of them is a value of the parameter's.
_ELSEWHERE = (nn.Module, type, FunctionType, MethodType, ModuleType)
#: Levels of objects, dicts and lists below a parameter: scales of scales have three.
_DEEP = 5


@dataclass(frozen=True, slots=True, eq=False)
class FrozenSubclass:
    """A frozen parameter of a tensor subclass, as quantisation makes them, at the first of its places."""

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
        return [*self._packed(), *_inside(taken, 2)]

    def _packed(self) -> list[Tensor]:
        """Its data, and what its attributes hold."""
        with torch._C.DisableTorchFunctionSubclass():
            data = self.param.detach().as_subclass(Tensor)
        return [data, *_inside(vars(self.param), _DEEP)]

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
        about = [type(self.param).__qualname__, f"{self.param.dtype} {tuple(self.param.shape)}"]
        if hasattr(self.param, "__tensor_flatten__"):
            about.append(str(self.param.__tensor_flatten__()[1]))
            found = [f"{name} {_described(inner)}" for name, inner in _flattened(self.param, "").items()]
        else:
            found = [_described(tensor) for tensor in self._packed()]
        found += [_described(tensor) for tensor in beside.values()]
        text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join([*about, *sorted(set(found))]))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest([tensor])}"


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


@dataclass(frozen=True, slots=True, eq=False)
class Ignored:
    """What is left alone.

    Attributes:
        modules: each with everything below it.
        params: in order of registration, by the first of their names.
        frozen: those of them that are frozen and of a tensor subclass.
        unnamed: the names of those of ``frozen`` that no glob names.
    """

    modules: frozenset[nn.Module] = frozenset()
    params: Mapping[str, nn.Parameter] = field(default_factory=dict)
    frozen: Mapping[str, FrozenSubclass] = field(default_factory=dict)
    unnamed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, globs: Sequence[str], sharded: type[Tensor]) -> Ignored:
        """What these globs over names of modules and parameters mean; any of a shared one's names will do.

        Args:
            sharded: the class of parameters that an attachment has.
        Raises:
            AttachError: one matches nothing.
        """
        matched: set[str] = set()

        def named(name: str) -> bool:
            found = [glob for glob in globs if name and fnmatchcase(name, glob)]
            matched.update(found)
            return bool(found)

        roots = [module for name, module in tree.named_modules(model, remove_duplicate=False) if named(name)]
        modules = frozenset(inner for module in roots for inner in tree.modules(module))
        left = {id(param) for name, param in tree.named_parameters(model, remove_duplicate=False) if named(name)}
        left |= {id(param) for module in modules for param in module._parameters.values()}
        if len(matched) < len(globs):
            missing = ", ".join(sorted(set(globs) - matched))
            raise AttachError(
                f"[units] ignore needs {missing} to match a module or a parameter, found none. Names are those of "
                "model.named_modules() and model.named_parameters(); * matches dots too."
            )
        places = {
            f"{prefix}.{key}".lstrip("."): FrozenSubclass(param, module, key)
            for prefix, module in tree.named_modules(model)
            for key, param in module._parameters.items()
            if param is not None and not isinstance(param, sharded) and _is_frozen_subclass(param)
        }
        # Each once, by the first of its names.
        frozen = {name: places[name] for name, _ in tree.named_parameters(model) if name in places}
        ids = left | {id(one.param) for one in frozen.values()}
        params = {name: param for name, param in tree.named_parameters(model) if id(param) in ids}
        return cls(modules, params, frozen, frozenset(name for name in frozen if id(params[name]) not in left))

    @property
    def named(self) -> Mapping[str, nn.Parameter]:
        """The parameters that ``[units] ignore`` names."""
        return {name: param for name, param in self.params.items() if name not in self.unnamed}

    def nbytes(self, name: str) -> int:
        """Memory of one of the parameters on this rank; of one made of other tensors, theirs."""
        one = self.frozen.get(name)
        return self.params[name].nbytes if one is None else one.nbytes()

    def __bool__(self) -> bool:
        return bool(self.modules or self.params)

    def identities(self) -> frozenset[int]:
        """Of the parameters."""
        return frozenset(map(id, self.params.values()))

    # What is attached of a model.

    def named_modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules that are attached."""
        return tree.named_modules(model, but=self.modules)

    def named_parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are attached, each once."""
        left = self.identities()
        return ((name, param) for name, param in tree.named_parameters(model) if id(param) not in left)

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that are attached, in order."""
        return [param for _, param in self.named_parameters(model)]

    def named_buffers(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The buffers of modules that are attached, each once."""
        left = self.buffers()
        return ((name, buffer) for name, buffer in tree.named_buffers(model) if id(buffer) not in left)

    def buffers(self) -> frozenset[int]:
        """The identities of ignored modules' buffers."""
        return frozenset(id(buffer) for module in self.modules for buffer in module._buffers.values() if buffer is not None)


def _is_frozen_subclass(param: nn.Parameter) -> bool:
    """Neither plain nor a DTensor, and its values can be read: it has memory, or says what it is made of."""
    kind: Any = type(param)
    if kind is nn.Parameter or param.requires_grad or is_divided(param) or nn.parameter.is_lazy(param):
        return False
    return hasattr(kind, "__tensor_flatten__") or kind.__torch_dispatch__ is Tensor.__torch_dispatch__
