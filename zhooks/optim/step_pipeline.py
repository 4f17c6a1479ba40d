"""What happens around every optimizer's step: torch's two hooks, who is called in them, and the update of what is ours.

``session/open.py`` says who is called, in which order.  Whether an optimizer holds parameters of the attachment is found out
once, before its step; of a step of another nobody is told.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import islice
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from offload.errors import DivergenceError, ShardedOpError
from zhooks.comm import CONTROL, Call, Transport
from zhooks.grad import running
from zhooks.optim.groups import Arguments, leave
from zhooks.optim.kernel import FlatUpdate, by_runs, update_here, updates_of
from zhooks.optim.overlap import Overlap
from zhooks.optim.owners import Owners, Whole
from zhooks.optim.tiered_update import Updater
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

__all__ = ["Closures", "Step", "StepPipeline", "Stepper", "Steps", "Watcher", "closure_of", "watch_steps"]


class Progress(Enum):
    """How far the update of what is ours has come in a step, or in the step that it is called in."""

    COMING = "coming"
    UNDER_WAY = "under way"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Step:
    """One call of the ``step`` of an optimizer that holds parameters of the attachment.

    Attributes:
        args: what it was called with, the optimizer first.
        frame: torch's own, on the stack as long as the step lasts.
        hidden: what gives back each thing that the optimizer is to be without until its step ends.
    """

    optimizer: Optimizer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frame: FrameType
    progress: Progress = Progress.COMING
    hidden: list[Callable[[], None]] = field(default_factory=list)

    @property
    def closure(self) -> Callable[[], Any] | None:
        return closure_of(self.args, self.kwargs)

    def call_with(self, closure: Callable[[], Any]) -> None:
        """The optimizer is given this closure instead of its own."""
        if "closure" in self.kwargs:
            self.kwargs = {**self.kwargs, "closure": closure}
        else:
            self.args = (self.args[0], closure, *self.args[2:])

    def restore(self) -> None:
        """Give back what was hidden; once."""
        while self.hidden:
            self.hidden.pop()()


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """What torch's step hooks are told, the optimizer first: the closure that a step is called with, if any."""
    given = kwargs["closure"] if "closure" in kwargs else args[1] if len(args) > 1 else None
    return given if callable(given) else None


Handler = Callable[[Step], None]


class StepPipeline:
    """Who is called before and after each step of an optimizer that holds parameters of the attachment, in order.

    Args:
        is_ours: whether something is a parameter of the attachment.
    """

    def __init__(self, is_ours: Callable[[object], bool], before: Sequence[Handler], after: Sequence[Handler]) -> None:
        self._is_ours, self._before, self._after = is_ours, before, after
        #: Steps that have begun, each within the one before it; of one that raised torch says nothing.
        self._open: list[Step] = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """torch's pre-hook: other arguments, or None."""
        while self._open and not running(self._open[-1].frame):
            self._open.pop().restore()
        if not any(self._is_ours(param) for group in optimizer.param_groups for param in group["params"]):
            return None
        # Called by a hook, which torch's wrapper of the step calls.
        step = Step(optimizer, args, kwargs, sys._getframe(2))
        if self._open:
            step.progress = self._open[-1].progress
        self._open.append(step)
        try:
            for handler in self._before:
                handler(step)
        except BaseException:
            self._open.remove(step)
            step.restore()
            raise
        return None if step.args is args and step.kwargs is kwargs else (step.args, step.kwargs)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's post-hook."""
        frame = sys._getframe(2)
        if not any(step.frame is frame for step in self._open):
            return
        while (step := self._open.pop()).frame is not frame:
            step.restore()
        step.restore()
        for handler in self._after:
            handler(step)
        # Within another step torch may be going through its pre-hooks.
        if not self._open and not is_last():
            go_last()

    def restore(self) -> None:
        """Give back what steps have hidden: of those that raised, and of those that are under way."""
        for step in reversed(self._open):
            step.restore()


# torch's hooks.


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


# Who is called.


class Steps:
    """The steps of all optimizers that hold parameters of one attachment.

    Attributes:
        count: steps that have ended since the attach or the last load; after a lost rank, ranks at one count can go on.
        number: the step that is being made, counted from 0 at the attach and at every load: those of several optimizers
            between two training passes are one.
        under_way: what has begun to change values and has not ended: "" where nothing has.
        dropped: gradients were, and no training pass has come since.
    """

    def __init__(self) -> None:
        self.count, self.under_way, self.dropped = 0, "", False
        self.number, self._made = 0, False

    def before(self, step: Step) -> None:
        if self.dropped:
            raise DivergenceError(
                f"{type(step.optimizer).__name__}.step expected a backward after recover(), which dropped all gradients, "
                "found none. Repeat the step from its first forward."
            )
        self.under_way = f"{type(step.optimizer).__name__}.step"

    def after(self, step: Step) -> None:
        self.count, self.under_way, self._made = self.count + 1, "", True

    @property
    def behind(self) -> int:
        """As ``number``, of the steps that have been made."""
        return self.number + self._made

    def training_begins(self) -> None:
        """A training pass begins: what was stepped before it was one step."""
        self.number, self._made = self.number + self._made, False

    def begin_anew(self) -> None:
        """A checkpoint was loaded: ranks that had come to different steps have one again."""
        self.count, self.under_way, self.number, self._made = 0, "", 0, False

    def go_on(self) -> None:
        """The loop went on after an error that was no lost rank's: whatever that left, all ranks have."""
        self.under_way, self.dropped = "", False

    @contextmanager
    def changing(self, verb: str) -> Iterator[None]:
        """``verb`` changes values inside; it counts as one step."""
        self.under_way = verb
        try:
            yield
        except DivergenceError:
            raise
        except Exception:
            # It failed on every rank, and each knows what it has left.
            self.under_way = ""
            raise
        self.count, self.under_way = self.count + 1, ""


class Closures:
    """Closures of optimizers that decide by the loss (LBFGS): all ranks get one value.

    Ranks have other batches, so their closures return other losses, while gradients are averaged (or summed) over the ranks: a
    line search would go other ways on each rank.  Whoever *requires* a closure is taken to use its value: it gets the ranks'
    values averaged, or summed, as gradients are.

    Args:
        world: the ranks that have other batches.
        mean: gradients are averaged over them, now.
        idle: this rank has run out of batches, now.
    """

    def __init__(self, world: Transport, mean: Callable[[], bool], idle: Callable[[], bool]) -> None:
        self._world, self._mean, self._idle = world, mean, idle

    def before(self, step: Step) -> None:
        """Give the optimizer a closure whose value is that of all ranks, where it requires one."""
        kind: Any = type(step.optimizer)
        closure = step.closure
        if closure is None or isinstance(closure, _Agreed) or self._world.axis.world == 1 or not _requires_closure(kind):
            return
        step.call_with(_Agreed(closure, self._over_ranks))

    def _over_ranks(self, value: Any) -> Any:
        """The loss of all ranks.  Collective."""
        if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
            return value
        # A rank that repeats its last batch for others has no part in the gradients either.
        own = 0.0 if self._idle() else float(value.detach() if isinstance(value, Tensor) else value)
        total = torch.tensor([own], dtype=torch.float64, device="cpu")
        self._world.all_reduce(Call(CONTROL, "all-reduce sum", "the closure's loss"), total, "sum")
        found = float(total) / (self._world.axis.world if self._mean() else 1)
        return torch.full_like(value.detach(), found) if isinstance(value, Tensor) else found


@dataclass(frozen=True, slots=True)
class _Agreed:
    """A closure whose value is that of all ranks."""

    closure: Callable[[], Any]
    over_ranks: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.over_ranks(self.closure())


@cache
def _requires_closure(kind: Any) -> bool:
    """Its step, or one that it overrides, cannot be called without."""
    steps = [vars(base)["step"] for base in kind.__mro__ if "step" in vars(base)]
    found = [inspect.signature(step).parameters.get("closure") for step in steps if callable(step)]
    return any(one is not None and one.default is inspect.Parameter.empty for one in found)


class Stepper:
    """Updates what is ours before the optimizer's own step, which is left the rest.

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
        self._closed = False

    def close(self) -> None:
        if self.overlap is not None:
            self.overlap.close()
        self._closed = True

    def before(self, step: Step) -> None:
        """Update what is ours.

        Raises:
            ShardedOpError: a closure, an argument that holds a tensor a parameter, or an optimizer whose step couples
                parameters.
            TypeError: ``step`` does not take these arguments.
            TierError, BudgetError: a tier failed; the message says how far the step had come.
        """
        present = None if self.updater is None else self.updater.present
        if self._closed:
            return
        if step.progress is Progress.UNDER_WAY or present is not None:
            self._check_nested(step.optimizer, present)
        elif step.progress is Progress.COMING:
            # Else a step that calls another (its base class's, a wrapped optimizer's): what is ours has been done.
            if any(self._updates(step.optimizer)):
                self._step_in_calls(step)
            elif self.updater is None and by_runs(step.optimizer) and step.closure is None:
                self._step_here(step)

    def _step_in_calls(self, step: Step) -> None:
        """Update what is whole or on tiers, by several calls of the optimizer's own step."""
        optimizer = step.optimizer
        arguments = _arguments(optimizer, step.args[1:], step.kwargs)
        step.progress = Progress.UNDER_WAY
        _run_own_hooks(step)
        self._due()
        # Not before: parameters frozen since backward have been laid out anew just now.
        whole, updates = self._updates(optimizer)
        _leave_others(step, _ids(whole) | _ids(updates))
        if whole and self.updater is not None:
            # What is whole is updated first, and stays so when the rest is refused.
            self.updater.check(optimizer, updates, arguments)
        if whole:
            self._update_whole(optimizer, whole, arguments)
        if self.overlap is not None:
            self.overlap.step_begins(optimizer, updates, arguments)
        if self.updater is not None and updates:
            self.updater.step(optimizer, updates, arguments)
        step.progress = Progress.DONE

    def _step_here(self, step: Step) -> None:
        """Update what is on the device, where nobody looks between this and torch's own step, which finds nothing left."""
        optimizer: Any = step.optimizer
        # Functions that torch calls around its own step, after ours, may change a gradient.
        if not is_last() or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return
        self._due()
        updates = updates_of(optimizer, self._flats())
        _leave_others(step, _ids(updates))
        step.progress = Progress.DONE
        update_here(optimizer, updates, Arguments(step.args[1:], step.kwargs))

    def _updates(self, optimizer: Optimizer) -> tuple[list[Whole], list[FlatUpdate]]:
        """What a step of it has to do here: parameters that are updated whole, and flats."""
        whole = self._owners.whole(optimizer)
        return whole, [] if self.updater is None else self.updater.updates(optimizer, _ids(whole))

    def _check_nested(self, optimizer: Optimizer, present: FlatUpdate | None) -> None:
        """A step within one flat's update may go over that flat alone."""
        whole, updates = self._updates(optimizer)
        if (_ids(whole) | _ids(updates)) - (set() if present is None else _ids([present])):
            raise ShardedOpError(
                f"{type(optimizer).__name__} cannot be stepped in this way. Expected an optimizer that is stepped directly, or "
                "shares the groups of the one that steps it, because states are on tiers or owner ranks; found its own "
                "groups. Step it directly."
            )


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


def _run_own_hooks(step: Step) -> None:
    """Run the pre-hooks of this very optimizer, which torch would call after ours, and hide them from it."""
    optimizer: Any = step.optimizer
    table = optimizer._optimizer_step_pre_hooks
    hooks = dict(table)
    for hook in hooks.values():
        if hook(optimizer, step.args, step.kwargs) is not None:
            raise ShardedOpError(
                f"{type(optimizer).__name__} expected step pre-hooks that return None, because its states are on tiers; "
                "found one that changes the arguments of step. Change them where step is called."
            )
    table.clear()
    step.hidden.append(lambda: table.update(hooks))


def _leave_others(step: Step, ours: set[int]) -> None:
    """Leave the outer call only parameters that are not ours.

    The post-hooks of this very optimizer, which torch calls before ours, shall see it as it is, once.
    """
    optimizer: Any = step.optimizer
    # Another attachment's step may have left fewer when this one began, and given them back when it ends.
    left = [
        (group, len(group["params"]), leave(group, [param for param in group["params"] if id(param) not in ours]))
        for group in optimizer.param_groups
    ]
    after = optimizer._optimizer_step_post_hooks

    def undo() -> None:
        for group, count, back in left:
            if len(group["params"]) < count:
                back()
        optimizer._optimizer_step_post_hooks = after

    def restore(*called: Any) -> None:
        if step.frame is sys._getframe(1):
            step.restore()
            # A step that a hook makes is one of its own.
            step.progress = Progress.COMING
            for hook in list(after.values()):
                hook(*called)

    step.hidden.append(undo)
    optimizer._optimizer_step_post_hooks = OrderedDict([(object(), restore)])
