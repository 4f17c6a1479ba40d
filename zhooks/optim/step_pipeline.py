"""What happens around every optimizer's step: one pre- and one post-hook of torch's an attachment, and who is called in them.

``session/open.py`` says who is called, in which order.  Whether an optimizer holds parameters of the attachment is found out
once, before and after a step, here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zhooks.optim.groups import params_of

__all__ = ["Step", "StepPipeline", "Watcher", "closure_of", "go_last", "is_last", "watch_steps"]


@dataclass(slots=True)
class Step:
    """One call of an optimizer's ``step``.

    Attributes:
        args: what it was called with, the optimizer first.
        is_ours: whether something is a parameter of the attachment.
        frame: torch's own, on the stack as long as the step lasts.
    """

    optimizer: Optimizer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_ours: Callable[[object], bool]
    frame: FrameType
    _ours: bool | None = None

    @property
    def ours(self) -> bool:
        """The optimizer holds some parameter of the attachment; found out by who asks first, as a handler may empty groups."""
        if self._ours is None:
            self._ours = any(map(self.is_ours, params_of(self.optimizer)))
        return self._ours

    @property
    def closure(self) -> Callable[[], Any] | None:
        return closure_of(self.args, self.kwargs)

    def call_with(self, closure: Callable[[], Any]) -> None:
        """The optimizer is given this closure instead of its own."""
        if "closure" in self.kwargs:
            self.kwargs = {**self.kwargs, "closure": closure}
        else:
            self.args = (self.args[0], closure, *self.args[2:])


Handler = Callable[[Step], None]


class StepPipeline:
    """Who is called before and after each step, in order.

    Args:
        is_ours: whether something is a parameter of the attachment.
    """

    def __init__(self, is_ours: Callable[[object], bool], before: Sequence[Handler], after: Sequence[Handler]) -> None:
        self._is_ours, self._before, self._after = is_ours, before, after

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """torch's pre-hook: other arguments, or None."""
        step = self._step(optimizer, args, kwargs)
        for handler in self._before:
            handler(step)
        return None if step.args is args and step.kwargs is kwargs else (step.args, step.kwargs)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's post-hook."""
        step = self._step(optimizer, args, kwargs)
        for handler in self._after:
            handler(step)

    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Step:
        # Called by a hook, which torch's wrapper of the step calls.
        return Step(optimizer, args, kwargs, self._is_ours, sys._getframe(3))


class Watcher(Protocol):
    """Who is called around every optimizer's step."""

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """None, or what the step shall be called with."""

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None: ...


#: Watchers, some of which may have gone without unwatching, by the number of their pre-hook in torch's table; what ends each.
_watching: dict[int, tuple[weakref.ref[Watcher], Callable[[], None]]] = {}


def is_last() -> bool:
    """No step hook of others comes after those here: one that changes gradients has done so."""
    return _watching.keys() >= set(islice(reversed(_global_optimizer_pre_hooks), len(_watching)))


def go_last() -> None:
    """From the next step on the hooks of others come first.  Not while torch goes through its pre-hooks."""
    table: Any = _global_optimizer_pre_hooks
    for number in _watching:
        table.move_to_end(number)


def watch_steps(watcher: Watcher) -> Callable[[], None]:
    """Have torch call a watcher until what is returned is called, and as long as it lives: torch's table must not keep a model
    that everybody has let go."""
    for known, end in list(_watching.values()):
        if known() is None:
            end()
    me = weakref.ref(watcher)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        alive = me()
        return None if alive is None else alive.before(optimizer, args, kwargs)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        alive = me()
        if alive is not None:
            alive.after(optimizer, args, kwargs)

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)

    def unwatch() -> None:
        _watching.pop(handles[0].id, None)
        for handle in handles:
            handle.remove()

    _watching[handles[0].id] = me, unwatch
    return unwatch


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """What torch's step hooks are told, the optimizer first: the closure that a step is called with, if any."""
    given = kwargs["closure"] if "closure" in kwargs else args[1] if len(args) > 1 else None
    return given if callable(given) else None
