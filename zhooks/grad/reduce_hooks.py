"""Functions of the user that see what reductions send and what comes back, and may change both in place.

Users register them, ``reduction.py`` and ``reduce.py`` call them at every reduction.  It never keeps a tensor
and never communicates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from offload.errors import AttachError, ShardedOpError

__all__ = ["ReduceHook", "ReduceHooks"]

ReduceHook = Callable[[str, Tensor], None]
"""Given the name of a unit's flat buffer and a 1-D tensor of its gradient, which it may change in place."""


class ReduceHooks:
    """The hooks of one attachment, in the order they were registered."""

    def __init__(self) -> None:
        self._before: OrderedDict[int, ReduceHook] = OrderedDict()
        self._after: OrderedDict[int, ReduceHook] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._before or self._after)

    def register(self, before: ReduceHook | None, after: ReduceHook | None) -> RemovableHandle:
        """Call these from now on, until the handle is removed.

        Raises:
            AttachError: neither is a function.
        """
        if (before is None and after is None) or not all(hook is None or callable(hook) for hook in (before, after)):
            raise AttachError(
                f"register_reduce_hook expected before or after to be functions of a unit's name and a tensor, found "
                f"{type(before).__name__} and {type(after).__name__}. Pass at least one."
            )
        handle = RemovableHandle(self._before, extra_dict=self._after)
        if before is not None:
            self._before[handle.id] = before
        if after is not None:
            self._after[handle.id] = after
        return handle

    def sending(self, unit: str, partial: Tensor) -> None:
        """What this rank has added up is about to be sent."""
        _call(self._before, unit, partial)

    def received(self, unit: str, reduced: Tensor) -> None:
        """This rank's range of the reduced gradient is about to be put where it belongs."""
        _call(self._after, unit, reduced)


def _call(hooks: OrderedDict[int, ReduceHook], unit: str, gradient: Tensor) -> None:
    for hook in tuple(hooks.values()):
        # Typed as returning nothing, which is for us to find out.
        returned: object = hook(unit, gradient)
        if returned is not None:
            raise ShardedOpError(
                f"The reduce hook at unit {unit} returned a value. Expected it to return None, found "
                f"{type(returned).__name__}. Change the gradient in place: a return value is not used."
            )
