"""What a module is given in place of what its caller passed, where tensors were cast: copies of containers, too.

``hooks.py`` makes one at a forward whose inputs were cast and ends it after that forward: what the module wrote into a
container is then in the caller's own.  It never casts.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from offload.errors import PolicyError

__all__ = ["Given"]


class Given:
    """A call's arguments, (args, kwargs), and what was made of them; ``reads``: the module may not write into tensors."""

    def __init__(self, module: str, own: Any, made: Any, *, reads: bool) -> None:
        self._module, self._reads = module, reads
        self._pairs: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, int]] = []
        # Copies are kept, so that nothing else takes their ids meanwhile.
        self._own: dict[int, tuple[Any, Any]] = {}
        # The tuple and the dict of the call are torch's, and of one use.
        for mine, theirs in ((own[0], made[0]), (tuple(own[1].values()), tuple(made[1].values()))):
            self._note(mine, theirs)

    def _note(self, own: Any, made: Any) -> None:
        if own is made:
            return
        self._own[id(made)] = (made, own)
        if isinstance(own, Tensor):
            if self._reads and not made.requires_grad and not made.is_inference():
                self._tensors.append((made, made._version))
            return
        if not isinstance(own, tuple):
            self._pairs.append((own, made))
        theirs = dict(_items(made))
        for key, value in _items(own):
            if key in theirs:
                self._note(value, theirs[key])

    def end(self, failed: bool) -> None:
        """The module has run, or raised: its caller sees what it wrote into containers.

        Raises:
            PolicyError: the module wrote into a tensor that was cast, which cannot be brought to the caller.
        """
        for own, made in self._pairs:
            self._bring(own, made)
        for made, version in () if failed else self._tensors:
            if made._version != version:
                own = self._own[id(made)][1]
                raise PolicyError(
                    f'[precision] cast_inputs = "unit" needs {self._module} to only read its inputs, found a tensor of '
                    'shape '
                    f"{list(own.shape)} that it changed in place, passed in {_short(own)} and cast to {_short(made)}: only the "
                    f"cast copy has changed. Create that tensor in {_short(made)}, or return the changed one."
                )

    def _bring(self, own: Any, made: Any) -> None:
        before, after = dict(_items(own)), {key: self._of_caller(value) for key, value in _items(made)}
        if before.keys() == after.keys() and all(after[key] is value for key, value in before.items()):
            return
        if isinstance(own, (list, deque)):
            own.clear()
            own.extend(after.values())
            return
        put = own.__setitem__ if isinstance(own, dict) else own.__setattr__
        drop = own.__delitem__ if isinstance(own, dict) else own.__delattr__
        for key in before.keys() - after.keys():
            drop(key)
        for key, value in after.items():
            if key not in before or before[key] is not value:
                put(key, value)

    def _of_caller(self, value: Any) -> Any:
        return self._own[id(value)][1] if id(value) in self._own else value


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(container, dict):
        yield from container.items()
    elif isinstance(container, (list, tuple, deque)):
        yield from enumerate(container)
    elif dataclasses.is_dataclass(container):
        named = getattr(container, "__dict__", None)
        names = [field.name for field in dataclasses.fields(container)] if named is None else list(named)
        yield from ((name, getattr(container, name)) for name in names if hasattr(container, name))


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
