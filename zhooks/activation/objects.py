"""Objects that a recomputed unit is given beside tensors (a cache of keys and values, a state), kept as the forward found them.

``recompute.py`` takes one ``Found`` at every first forward and copies from it for each second one.  It never copies a tensor:
what is kept is which tensors an object held, and their versions.

Note: [Which objects]
    A forward may change what it is given: an attention puts its keys into a cache.  The second forward would find them there
    and put them in once more.  So lists, dicts, sets and plain Python objects are copied, as deep as they go; numbers, tensors,
    modules, functions, classes and everything that is not plain Python (a file, a process group) are passed as they are.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CapabilityError
from zhooks.refusals import modified

__all__ = ["Found"]

_UNCHANGED = (
    type(None), bool, int, float, complex, str, bytes, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.ModuleType, nn.Module, torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, torch.Generator,
)  # fmt: skip
#: Of one forward's inputs; beyond, they are somebody's data and not a forward's state.
_MOST_OBJECTS = 20_000


class Found:
    """``leaves`` as they are now.

    Raises:
        CapabilityError: they hold more objects than anybody would copy at every forward.
    """

    def __init__(self, leaves: Sequence[Any], unit: str) -> None:
        self._unit = unit
        copying = _Copying(unit)
        self._leaves = [copying.of(leaf) for leaf in leaves]
        self._versions = [(tensor, tensor._version) for tensor in copying.tensors]

    def again(self) -> list[Any]:
        """Copies, for a forward that may change them too.

        Raises:
            RuntimeError: a tensor in them was changed in place since.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                raise modified(f"a tensor in an object passed to unit {self._unit}", tensor._version, version)
        copying = _Copying(self._unit)
        return [copying.of(leaf) for leaf in self._leaves]


class _Copying:
    """One structure of objects, copied once each, whoever holds them."""

    def __init__(self, unit: str) -> None:
        self.tensors: list[Tensor] = []
        self._unit = unit
        # With each original beside its copy: what is dropped meanwhile would leave its id to another.
        self._known: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, _UNCHANGED):
            return value
        if isinstance(value, Tensor):
            # Of parameters the units know it; what was made under inference_mode has no version and is in no graph.
            if not (isinstance(value, nn.Parameter) or value.is_inference() or id(value) in self._known):
                self._known[id(value)] = (value, value)
                self.tensors.append(value)
            return value
        if id(value) in self._known:
            return self._known[id(value)][1]
        if len(self._known) > _MOST_OBJECTS:
            raise CapabilityError(
                f'[activation] checkpoint = "unit" needs inputs of unit {self._unit} that can be saved for recomputation, '
                f"found more than {_MOST_OBJECTS:,} objects in them. Pass tensors to the module, choose other units with "
                '[units], or set checkpoint = "none".'
            )
        return self._copied(value)

    def _copied(self, value: Any) -> Any:
        cls = type(value)
        if isinstance(value, tuple):
            parts = [self.of(one) for one in value]
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else _tuple(cls, parts)
        made = _empty(value)
        if made is None:
            return value
        self._known[id(value)] = (value, made)
        if isinstance(value, (list, deque)):
            made.extend([self.of(one) for one in value])
        elif isinstance(value, dict):
            # The class' own way to store may check, or store elsewhere too.
            for key, one in dict.items(value):
                dict.__setitem__(made, key, self.of(one))
        elif isinstance(value, set):
            made.update(value)
        for name in _slots(cls):
            if hasattr(value, name):
                object.__setattr__(made, name, self.of(getattr(value, name)))
        for name, one in getattr(value, "__dict__", {}).items():
            made.__dict__[name] = self.of(one)
        return made


def _tuple(cls: type, parts: list[Any]) -> Any:
    return cls._make(parts) if hasattr(cls, "_make") else tuple.__new__(cls, parts)


def _empty(value: Any) -> Any:
    """A new object of the class without its contents; None where contents may be elsewhere than in Python's own places."""
    cls: Any = type(value)
    if cls in (OrderedDict, defaultdict, deque):
        made = copy.copy(value)
        made.clear()
        return made
    natives = [base for base in cls.__mro__ if not base.__flags__ & _DEFINED_LATER]
    if cls.__new__ not in _MAKERS or not all(base in (object, list, dict, set) for base in natives):
        return None
    try:
        return cls.__new__(cls)
    except TypeError:
        # A class of an extension that nobody may make, such as a lock.
        return None


_MAKERS = (object.__new__, list.__new__, dict.__new__, set.__new__)
#: Of a class that was not there when the interpreter was built (``Py_TPFLAGS_HEAPTYPE``): Python's, or an extension's.
_DEFINED_LATER = 1 << 9


def _slots(cls: type) -> list[str]:
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            # What Python makes of a name that only the class itself shall use.
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]
