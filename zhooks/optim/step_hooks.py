"""Any torch optimizer, whole or over tiers: entered through torch's own step hooks.

The pipeline calls ``before`` and ``after`` around every step; ``before`` has the package ``whole/`` and, where there are
tiers, ``tiered_update.py`` do what is theirs, and leaves the rest for the outer call.  It never computes an update and moves
nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from offload.errors import ShardedOpError
from zhooks.grad import running
from zhooks.optim.groups import leave
from zhooks.optim.kernel import Arguments, FlatUpdate, by_runs, update_here, updates_of
from zhooks.optim.overlap import Overlap
from zhooks.optim.owners import Owners, Whole
from zhooks.optim.step_pipeline import Step, go_last, is_last
from zhooks.optim.tiered_update import Updater
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

__all__ = ["Stepper"]


class Stepper:
    """The optimizer steps of one attachment.

    Args:
        owners: know which parameters are updated whole.
        update_whole: does so.  Collective.
        updater: updates the others over tiers; None where there are none.
        flats: those of the attachment, now; where nothing is on a tier torch's own optimizers are stepped on runs of them.
        due: finishes a backward that is still open, and reduces what is owed.
        overlap: what has been updated in backward; None where nothing is.
    """

    def __init__(
        self,
        owners: Owners,
        update_whole: Callable[[Optimizer, Sequence[Whole], Arguments], None],
        updater: Updater | None,
        flats: Callable[[], Iterable[Flat]],
        due: Callable[[], None],
        overlap: Overlap | None = None,
    ) -> None:
        self._owners, self._update_whole = owners, update_whole
        self.updater, self.overlap, self._flats, self._due = updater, overlap, flats, due
        self._inside = False
        self._undo: Callable[[], None] | None = None
        #: The outer step, as torch calls it: what is left of it is the optimizer's own.
        self._outer: FrameType | None = None
        self._closed = False

    def close(self) -> None:
        self.restore()
        if self.overlap is not None:
            self.overlap.close()
        self._closed = True

    def restore(self) -> None:
        """Give an optimizer its parameters back, when its own step raised in between."""
        undo, self._undo, self._outer = self._undo, None, None
        if undo is not None:
            undo()

    def before(self, step: Step) -> None:
        """Update what is ours.

        Raises:
            ShardedOpError: a closure, an argument that holds a tensor a parameter, or an optimizer whose step couples
                parameters.
            TypeError: ``step`` does not take these arguments.
            TierError, BudgetError: a tier failed; the message says how far the step had come.
        """
        optimizer, args, kwargs = step.optimizer, step.args, step.kwargs
        if self._closed:
            return
        if self._inside or self._present() is not None:
            self._check_nested(optimizer)
            return
        if self._outer is not None and running(self._outer):
            # A step that calls another (its base class's, a wrapped optimizer's): what is ours has been done.
            return
        self.restore()
        if not any(self._updates(optimizer)):
            if self.updater is None and by_runs(optimizer) and step.closure is None:
                self._step_here(step)
            return
        arguments = _arguments(optimizer, args[1:], kwargs)
        self._inside = True
        try:
            with _own_hooks_first(optimizer, args, kwargs) as hooks:
                self._due()
                # Not before: parameters frozen since backward have been laid out anew just now.
                whole, updates = self._updates(optimizer)
                self._outer, after = step.frame, dict(cast(Any, optimizer)._optimizer_step_post_hooks)
                self._undo = _leave_others(optimizer, _ids(whole) | _ids(updates), hooks)
                if whole and self.updater is not None:
                    # What is whole is updated first, and stays so when the rest is refused.
                    self.updater.check(optimizer, updates, arguments)
                if whole:
                    self._update_whole(optimizer, whole, arguments)
                if self.overlap is not None:
                    self.overlap.step_begins(optimizer, updates, arguments)
                if self.updater is not None and updates:
                    self.updater.step(optimizer, updates, arguments)
                self._restore_first(optimizer, after)
        except BaseException:
            self.restore()
            raise
        finally:
            self._inside = False

    def _step_here(self, step: Step) -> None:
        """Update what is on the device, where nobody looks between this and torch's own step, which finds nothing left."""
        optimizer = step.optimizer
        if not step.ours or not is_last() or _has_own_hooks(optimizer):
            return
        self._due()
        updates = updates_of(optimizer, self._flats())
        self._outer, self._undo = step.frame, _leave_others(optimizer, _ids(updates), {})
        try:
            update_here(optimizer, updates, Arguments(step.args[1:], step.kwargs))
            self._restore_first(optimizer, {})
        except BaseException:
            self.restore()
            raise

    def after(self, step: Step) -> None:
        """Give back what the step was to leave alone."""
        if not self._inside and self._outer is step.frame:
            self.restore()
        if not is_last():
            go_last()

    def _restore_first(self, optimizer: Any, hooks: dict[Any, Any]) -> None:
        """The post-hooks of this very optimizer, which torch calls before ours, shall see it as it is, once."""

        def restore(*called: Any) -> None:
            if self._outer is sys._getframe(1):
                self.restore()
                for hook in hooks.values():
                    hook(*called)

        optimizer._optimizer_step_post_hooks = OrderedDict([(object(), restore)])

    def _updates(self, optimizer: Optimizer) -> tuple[list[Whole], list[FlatUpdate]]:
        """What a step of it has to do here: parameters that are updated whole, and flats."""
        whole = self._owners.whole(optimizer)
        return whole, [] if self.updater is None else self.updater.updates(optimizer, _ids(whole))

    def _present(self) -> FlatUpdate | None:
        return None if self.updater is None else self.updater.present

    def _check_nested(self, optimizer: Optimizer) -> None:
        """A step within one flat's update may go over that flat alone."""
        present = self._present()
        now = set() if present is None else _ids([present])
        whole, updates = self._updates(optimizer)
        if (_ids(whole) | _ids(updates)) - now:
            raise ShardedOpError(
                f"{type(optimizer).__name__} cannot be stepped in this way. Expected an optimizer that is stepped directly, or "
                "shares the groups of the one that steps it, because states are on tiers or owner ranks; found its own "
                "groups. Step it directly."
            )


def _has_own_hooks(optimizer: Any) -> bool:
    """Functions that torch calls around its own step, after ours: they may change a gradient."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _ids(updates: Iterable[Whole | FlatUpdate]) -> set[int]:
    return {id(param) for update in updates for param in update.params()}


def _arguments(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """What a step was called with, where that can hold for each of many calls."""
    bound = inspect.signature(type(optimizer).step).bind(optimizer, *args, **kwargs).arguments
    named = {name: value for name, value in list(bound.items())[1:] if name != "closure" or value is not None}
    where = "expected a step without {0}, found {1}: states on tiers or owner ranks are updated in several steps. {2}"
    if "closure" in named:
        what = where.format("a closure", "one", "Call the closure yourself, then step().")
        raise ShardedOpError(f"{type(optimizer).__name__}.step(closure) {what}")
    for name, value in named.items():
        if _by_parameter(value):
            what = where.format("tensors for each parameter", "some", "Write them into .grad, or use tier = \"device\".")
            raise ShardedOpError(f"{type(optimizer).__name__}.step({name}) {what}")
    return Arguments(args, kwargs, tuple(named))


def _by_parameter(value: Any) -> bool:
    """It holds tensors, perhaps one for each parameter: which is whose only the optimizer knows."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, ShardedTensor) or any(isinstance(one, Tensor) or _by_parameter(one) for one in inside)


@contextmanager
def _own_hooks_first(optimizer: Any, args: Any, kwargs: Any) -> Iterator[dict[int, Any]]:
    """Run the pre-hooks of this very optimizer, which torch would call after ours, and take them away until the step ends."""
    table = optimizer._optimizer_step_pre_hooks
    hooks = dict(table)
    for hook in hooks.values():
        changed = hook(optimizer, args, kwargs)
        if changed is not None:
            raise ShardedOpError(
                f"{type(optimizer).__name__} expected step pre-hooks that return None, because its states are on tiers; "
                "found one that changes the arguments of step. Change them where step is called."
            )
    table.clear()
    try:
        yield hooks
    except BaseException:
        table.update(hooks)
        raise


def _leave_others(optimizer: Any, ours: set[int], hooks: dict[int, Any]) -> Callable[[], None]:
    """Leave the outer call only parameters that are not ours, and no hooks; returns what puts everything back."""
    # Another attachment's step may have left fewer when this one began, and given them back when it ends.
    left = [
        (group, len(group["params"]), leave(group, [param for param in group["params"] if id(param) not in ours]))
        for group in optimizer.param_groups
    ]
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks

    def undo() -> None:
        for group, count, back in left:
            if len(group["params"]) < count:
                back()
        before.update(hooks)
        optimizer._optimizer_step_post_hooks = after

    optimizer._optimizer_step_post_hooks = OrderedDict()
    return undo
