"""Owns dispatch modes that only listen: how they keep out of torch.compile's way and of each other's, and how they come and go.

``mode`` hears storages by one, ``computing`` counts operations by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Quiet", "pop", "push"]


class Quiet(TorchDispatchMode):
    """A mode that only listens: torch.compile compiles what it would without it, and tensor subclasses come apart first.

    Attributes:
        deaf: it shall do nothing any more.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._types: dict[type, bool] = {}
        self.deaf = False
        _leave_to_python(type(self).__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper it would put around the method costs a microsecond an operation; see _leave_to_python.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # A compiled function runs compiled under us: another run than the user's would be recorded otherwise.
        return True

    def leave(self, types: Iterable[type]) -> bool:
        """Whether a subclass shall take the operation apart first, so that its own operations come to us."""
        below = range(torch._C._len_torch_dispatch_stack())
        if any(not isinstance(torch._C._get_dispatch_stack_at(index), Quiet) for index in below):
            # Somebody's mode lies below ours and must hear the operation as it is.
            return False
        leave = False
        for seen in types:
            known = self._types.get(seen)
            if known is None:
                dispatch = getattr(seen, "__torch_dispatch__", None)
                known = dispatch is not None and dispatch is not torch._C._disabled_torch_dispatch_impl
                self._types[seen] = known
            leave = leave or known
        return leave


def push(mode: TorchDispatchMode) -> None:
    """Put ``mode`` on this thread's stack of modes.

    Not by ``with``: its end may come while modes entered later are still open, whose flags it would take along.
    """
    torch._C._push_on_torch_dispatch_stack(mode)


def pop(mode: TorchDispatchMode) -> bool:
    """Take ``mode`` off this thread's stack of modes, wherever it lies; False where it is not on it."""
    count = torch._C._len_torch_dispatch_stack()
    if not any(torch._C._get_dispatch_stack_at(index) is mode for index in range(count)):
        return False
    above: list[Any] = []
    while (top := torch._C._pop_torch_dispatch_stack(None)) is not mode:
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)
    return True


def _leave_to_python(method: Callable[..., Any]) -> None:
    """Have dynamo leave the method, and what it calls, to the interpreter; costs nothing where dynamo is not loaded."""
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
    except AttributeError:
        return  # A torch without these: an operation costs a microsecond more.
