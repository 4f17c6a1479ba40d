"""Any torch optimizer over tiers: entered through torch's own step hooks, stepped one flat buffer at a time.

torch calls ``before`` and ``after`` around every optimizer's step; for those that hold our parameters ``before`` does the
work and leaves nothing of ours for the outer call.  What one flat needs is fetched while the one before it is updated and
written back while the next one is.  It never computes an update itself: torch or ``optim_kernels.py`` does.

Note: [One step, many calls]
    The optimizer's ``step`` is called once a flat, with the arguments it was given and ``param_groups`` narrowed to the
    flat's parameters: for element-wise optimizers that is the same arithmetic, bit for bit.  What a call changes in a group
    beside the parameters (a counter) must come out the same from every call, and is changed once; an optimizer that couples
    parameters is refused by name.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offload.block import Block, Part
from offload.errors import BudgetError, ShardedOpError, ZhooksError
from offload.events import Bus
from offload.lease import Mode
from offload.store import Store
from offload.tier import Tier
from zhooks.build import state_keys
from zhooks.flat import Flat, State
from zhooks.group_numbers import numbers, same_numbers
from zhooks.sharded import ShardedTensor
from zhooks.stacks import running

__all__ = ["Arguments", "Job", "Kernel", "Stepper", "watch_steps"]


@dataclass(frozen=True, slots=True)
class Job:
    """One flat buffer's part of a step: its parameters that have a gradient, by group of the optimizer."""

    flat: Flat
    groups: tuple[tuple[nn.Parameter, ...], ...]

    def params(self) -> Iterator[nn.Parameter]:
        for group in self.groups:
            yield from group


@dataclass(frozen=True, slots=True)
class Arguments:
    """What ``step`` was called with, which every call of the step is given."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: Those of them that are no missing closure, by name.
    given: tuple[str, ...] = ()


#: New states an optimizer makes with the allocator, once each, before what they leave there is returned.
_MADE_NBYTES = 16 << 20


class Kernel(Protocol):
    """How one job is computed, with everything it needs in memory."""

    def writes_copy(self, flat: Flat) -> bool:
        """An update of the flat writes all of its copy in the compute dtype, too."""

    def apart(self, optimizer: Optimizer) -> bool:
        """An update needs nothing but the values it is given and the optimizer's groups and states: any thread may make it, on
        another optimizer of the same type that shares the states."""

    def update(self, optimizer: Optimizer, job: Job, arguments: Arguments) -> None:
        """Update the job's parameters and states; a copy that it writes is leased for a whole write."""


class Early(Protocol):
    """What has been updated before the step (``overlap.py``)."""

    def left(self, optimizer: Optimizer, jobs: Sequence[Job], arguments: Arguments) -> list[Job]:
        """The jobs that are left to the step."""

    def close(self) -> None:
        """Nothing more is updated before a step."""


class _Present(threading.local):
    """The job whose update this thread makes."""

    job: Job | None = None


class Stepper:
    """The optimizer steps of one attachment.

    Args:
        flats: the flats to be stepped here, now.
        settle: finishes a backward that is still open.
        place: where updates are computed, DEVICE or HOST.
        ahead: flats fetched while one is updated.
    """

    def __init__(
        self, store: Store, bus: Bus, flats: Callable[[], Iterable[Flat]], settle: Callable[[], None], place: Tier, ahead: int
    ) -> None:
        self._store, self._bus, self.flats, self._settle = store, bus, flats, settle
        self._place, self._ahead = place, ahead
        self.kernel: Kernel = Narrowed()
        self.overlap: Early | None = None
        self._inside = False
        self._undo: Callable[[], None] | None = None
        #: The step whose rest is the optimizer's own, as torch calls it.
        self._outer: FrameType | None = None
        self._present = _Present()
        self._handles: list[RemovableHandle] = []

    def open(self) -> None:
        """Be called around every optimizer's step from now on."""
        self._handles = watch_steps(self)

    def close(self) -> None:
        self.restore()
        if self.overlap is not None:
            self.overlap.close()
        while self._handles:
            self._handles.pop().remove()

    def restore(self) -> None:
        """Give an optimizer its parameters back, when its own step raised in between."""
        undo, self._undo, self._outer = self._undo, None, None
        if undo is not None:
            undo()

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's pre-hook.

        Raises:
            ShardedOpError: a closure, an argument that holds a tensor a parameter, or an optimizer whose step couples
                parameters.
            TypeError: ``step`` does not take these arguments.
            TierError, BudgetError: a tier failed; the message says how far the step had come.
        """
        if self._inside or self._present.job is not None:
            self._check_nested(optimizer)
            return
        if self._outer is not None and running(self._outer):
            # A step that calls another (its base class's, a wrapped optimizer's): what is ours has been done.
            return
        self.restore()
        if not self.jobs(optimizer):
            return
        arguments = _arguments(optimizer, args[1:], kwargs)
        self._inside = True
        try:
            with _own_hooks_first(optimizer, args, kwargs) as hooks:
                self._settle()
                # Not before: parameters frozen since backward have been laid out anew just now.
                jobs = self.jobs(optimizer)
                self._outer, after = sys._getframe(2), dict(cast(Any, optimizer)._optimizer_step_post_hooks)
                self._undo = _leave_rest(optimizer, {id(param) for job in jobs for param in job.params()}, hooks)
                left = jobs if self.overlap is None else self.overlap.left(optimizer, jobs, arguments)
                self.run(optimizer, left, arguments)
                self._restore_first(optimizer, after)
        except BaseException:
            self.restore()
            raise
        finally:
            self._inside = False

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's post-hook."""
        if not self._inside and self._outer is sys._getframe(2):
            self.restore()

    def _restore_first(self, optimizer: Any, hooks: dict[Any, Any]) -> None:
        """The post-hooks of this very optimizer, which torch calls before ours, shall see it as it is, once."""

        def restore(*called: Any) -> None:
            if self._outer is sys._getframe(1):
                self.restore()
                for hook in hooks.values():
                    hook(*called)

        optimizer._optimizer_step_post_hooks = OrderedDict([(object(), restore)])

    def _check_nested(self, optimizer: Optimizer) -> None:
        """A step within one flat's update may go over that flat alone."""
        present = self._present.job
        now = set() if present is None else {id(param) for param in present.params()}
        if any(id(param) not in now for job in self.jobs(optimizer) for param in job.params()):
            raise ShardedOpError(
                f"{type(optimizer).__name__}: expected an optimizer that is stepped by itself, or shares the groups of the one "
                "that steps it, for the policy places states on tiers; found groups of its own. Step it directly."
            )

    def jobs(self, optimizer: Optimizer) -> list[Job]:
        """What a step of the optimizer has to do here, flat by flat."""
        place: dict[int, Flat] = {id(param): flat for flat in self.flats() for param in flat.params}
        if not place:
            return []
        by_flat: dict[int, tuple[Flat, list[list[nn.Parameter]]]] = {}
        count = len(optimizer.param_groups)
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                flat = place.get(id(param))
                if flat is not None:
                    by_flat.setdefault(flat.number, (flat, [[] for _ in range(count)]))[1][number].append(param)
        return [Job(flat, tuple(tuple(group) for group in groups)) for _, (flat, groups) in sorted(by_flat.items())]

    # The pipeline.

    def run(
        self, optimizer: Optimizer, jobs: Sequence[Job], arguments: Arguments = Arguments(), *, last: bool = True
    ) -> None:
        """Update the jobs' flats; ``last``: nothing more of this step follows."""
        self.make_way(self.flats() if last else [job.flat for job in jobs])
        jobs = [job for job in jobs if any(_grad(param) is not None for param in job.params())]
        start = numbers(optimizer)
        end: list[dict[str, Any]] | None = None
        opened: list[list[Block]] = []
        done = 0
        try:
            for index, job in enumerate(jobs):
                while len(opened) < min(len(jobs), index + 1 + self._ahead):
                    opened.append(self.fetch(optimizer, jobs[len(opened)]))
                _await(opened[index])
                self.update(optimizer, job, arguments)
                done += 1
                self.put_away(optimizer, job.flat)
                end = same_numbers(optimizer, start, end)
                self.close_blocks(opened[index])
            if last:
                self._store.trim()
        except ZhooksError as error:
            self.give_up(*opened)
            if done or isinstance(error, ShardedOpError):
                lost = f"{done} of {len(jobs)} units had been updated in this step"
                mend = ": load the last checkpoint, or go on, under a larger budget (attachment.apply)"
                error.args = (f"{str(error).rstrip('.')}. {lost}{mend if done and isinstance(error, BudgetError) else ''}.",)
            raise
        except BaseException:
            self.give_up(*opened)
            raise

    def make_way(self, flats: Iterable[Flat]) -> None:
        """These flats are about to be updated: what was fetched ahead of them for a use that never came goes home."""
        for flat in flats:
            if flat.rest is not None and flat.state is not State.GATHERING:
                flat.rest.sent()
        self._store.rest()

    def fetch(self, optimizer: Optimizer, job: Job) -> list[Block]:
        """Start bringing everything of a job to where it is computed."""
        if self._place is Tier.HOST and job.flat.kind.device.type != "cpu":
            self._bring_strays(optimizer, job)
        blocks: dict[int, Block] = {}
        for param in job.params():
            for tensor in (param, _grad(param), *optimizer.state.get(param, {}).values()):
                if isinstance(tensor, ShardedTensor) and type(tensor._at) is Part:
                    blocks[id(tensor._at.block)] = tensor._at.block
        fetched: list[Block] = []
        rest = job.flat.rest
        try:
            for block in blocks.values():
                self._store.fetch(block, self._place)
                fetched.append(block)
            if rest is not None and rest.copy is not None and self.kernel.writes_copy(job.flat):
                self._store.fetch(rest.copy, self._place, Mode.WRITE_ALL)
                fetched.append(rest.copy)
        except BaseException:
            self.give_up(fetched)
            raise
        return fetched

    def fetch_now(self, optimizer: Optimizer, job: Job) -> list[Block]:
        """The same, and wait until it is there: for a thread that must not wait for copies, whose order is this one's."""
        fetched = self.fetch(optimizer, job)
        try:
            _await(fetched)
        except BaseException:
            self.give_up(fetched)
            raise
        return fetched

    def _bring_strays(self, optimizer: Optimizer, job: Job) -> None:
        """States and gradients that a load or a freeze left on the device: the update is computed on the host."""
        self.adopt(optimizer, job.flat)
        for param in job.params():
            grad = _grad(param)
            if isinstance(grad, ShardedTensor) and isinstance(grad._at, Tensor):
                grad._at = grad._at.to("cpu")

    def close_blocks(self, blocks: list[Block]) -> None:
        """They have been updated: changes start on their way home."""
        while blocks:
            self._store.close(blocks.pop())

    def give_up(self, *opened: list[Block]) -> None:
        """After an error: changes that were made start on their way home.  The first error is the one that counts."""
        for blocks in opened:
            while blocks:
                with suppress(ZhooksError):
                    self._store.give_up(blocks.pop())

    @torch.no_grad()
    def update(self, optimizer: Optimizer, job: Job, arguments: Arguments) -> None:
        """The arithmetic of one job, with everything it needs in memory; on any thread where the kernel allows it."""
        flat = job.flat
        if self._bus.active:
            self._bus.begin("update", flat.name, flat.layout.padded * flat.kind.master.itemsize)
        self._present.job = job
        try:
            self.kernel.update(optimizer, job, arguments)
        finally:
            self._present.job = None
        if self._bus.active:
            self._bus.end("update", flat.name, flat.layout.padded * flat.kind.master.itemsize)

    @torch.no_grad()
    def put_away(self, optimizer: Optimizer, flat: Flat) -> None:
        """What follows from an update that was made: new states go to their tier, the masters' copy is made."""
        self.adopt(optimizer, flat)
        if flat.rest is None:
            return
        if self.kernel.writes_copy(flat):
            flat.rest.copied()
        else:
            flat.rest.recast(self._place)

    def adopt(self, optimizer: Optimizer, flat: Flat) -> None:
        """States that are wherever they were made or loaded move to their tier: one block a kind of state."""
        tier = flat.kind.tiers.optimizer
        if tier is Tier.DEVICE:
            return
        for key in state_keys(flat, optimizer):
            held = [(index, optimizer.state.get(param, {}).get(key)) for index, param in enumerate(flat.params)]
            states = [(index, state) for index, state in held if isinstance(state, ShardedTensor)]
            new = [(index, state) for index, state in states if type(state._at) is not Part]
            for dtype in {state.dtype for _, state in new}:
                same = [(index, state) for index, state in new if state.dtype == dtype]
                old = [state._at.block for _, state in states if type(state._at) is Part and state._at.dtype == dtype]
                self._move_in(flat, key, same, old[0] if old else None)

    def _move_in(self, flat: Flat, key: str, states: Sequence[tuple[int, ShardedTensor]], block: Block | None) -> None:
        fresh = block is None
        if block is None:
            name = f"optimizer/{key}/{flat.name}"
            block = self._store.put(name, flat.shard_numel, states[0][1].dtype, flat.kind.tiers.optimizer)
        with self._store.lease(block, self._place, Mode.WRITE_ALL if fresh else Mode.UPDATE) as values:
            if fresh:
                values.zero_()
            for index, state in states:
                flat.local(index, values).copy_(state._local)
        for index, state in states:
            state._at, state._on = Part(block, *flat.span(index)), flat.kind.device
        if fresh:
            self._store.passed(block.nbytes, _MADE_NBYTES)


class Around(Protocol):
    """Who is called around every optimizer's step."""

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None: ...

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None: ...


#: What torch was given for steppers, some of which may have gone without ``close``.
_watching: list[tuple[weakref.ref[Around], list[RemovableHandle]]] = []


def watch_steps(stepper: Around) -> list[RemovableHandle]:
    """Have torch call a stepper as long as it lives: torch's table must not keep a model that everybody has let go."""
    for entry in [entry for entry in _watching if entry[0]() is None]:
        _watching.remove(entry)
        for handle in entry[1]:
            handle.remove()
    me = weakref.ref(stepper)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        alive = me()
        if alive is not None:
            alive.before(optimizer, args, kwargs)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        alive = me()
        if alive is not None:
            alive.after(optimizer, args, kwargs)

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    _watching.append((me, handles))
    return handles


#: torch's optimizers whose step goes over ranges alone: no rank is asked, nothing is gathered, no attribute is kept.
_BY_RANGES = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
)
#: Options under which a step works on the device, in the order of a stream that another thread does not know.
_ON_DEVICE = ("fused", "capturable", "differentiable")


class Narrowed:
    """The optimizer's own arithmetic, on the parameters of one flat.

    Note: [Whose step may have a thread of its own]
        Those of torch's own classes, as they are.  Any other may ask all ranks in its step (a norm), at a place that would
        differ by rank, and may keep itself or its groups under other names, where a narrowed copy of it would not reach.
    """

    def writes_copy(self, flat: Flat) -> bool:
        return False

    def apart(self, optimizer: Optimizer) -> bool:
        if type(optimizer) not in _BY_RANGES:
            return False
        groups = optimizer.param_groups
        on_device = any(isinstance(value, Tensor) and value.is_cuda for group in groups for value in group.values())
        return not on_device and not any(group.get(option) for group in groups for option in _ON_DEVICE)

    def update(self, optimizer: Optimizer, job: Job, arguments: Arguments) -> None:
        step: Any = type(optimizer).step
        plain = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        held, own = [group["params"] for group in optimizer.param_groups], cast(Any, optimizer)
        hooks = own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks
        for group, params in zip(optimizer.param_groups, job.groups, strict=True):
            group["params"] = list(params)
        # A step that calls its base class's would run them once a flat.
        own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        try:
            plain(optimizer, *arguments.args, **arguments.kwargs)
        finally:
            own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks = hooks
            for group, params in zip(optimizer.param_groups, held, strict=True):
                group["params"] = params


def _arguments(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """What a step was called with, where that can hold for each of many calls."""
    bound = inspect.signature(type(optimizer).step).bind(optimizer, *args, **kwargs).arguments
    named = {name: value for name, value in list(bound.items())[1:] if name != "closure" or value is not None}
    where = "expected a step without {0}, for the policy places its states on tiers; found one. {1}"
    if "closure" in named:
        what = where.format("closure", "Call the closure yourself, then step().")
        raise ShardedOpError(f"{type(optimizer).__name__}.step(closure): {what}")
    for name, value in named.items():
        if _by_parameter(value):
            what = where.format("tensors a parameter", "Write them into .grad, or use tier = \"device\".")
            raise ShardedOpError(f"{type(optimizer).__name__}.step({name}): {what}")
    return Arguments(args, kwargs, tuple(named))


def _by_parameter(value: Any) -> bool:
    """It holds tensors, perhaps one for each parameter: which is whose only the optimizer knows."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, ShardedTensor) or any(isinstance(one, Tensor) or _by_parameter(one) for one in inside)


def _await(blocks: Iterable[Block]) -> None:
    for block in blocks:
        assert block.lease is not None
        block.lease.wait()


def _grad(param: nn.Parameter) -> Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return param.grad


@contextmanager
def _own_hooks_first(optimizer: Any, args: Any, kwargs: Any) -> Iterator[dict[int, Any]]:
    """Run the pre-hooks of this very optimizer, which torch would call after ours, and take them away until the step ends."""
    table = optimizer._optimizer_step_pre_hooks
    hooks = dict(table)
    for hook in hooks.values():
        changed = hook(optimizer, args, kwargs)
        if changed is not None:
            raise ShardedOpError(
                f"{type(optimizer).__name__}: expected step pre-hooks that return None, for the policy places its states on "
                "tiers; found one that changes the arguments of step. Change them where step is called."
            )
    table.clear()
    try:
        yield hooks
    except BaseException:
        table.update(hooks)
        raise


def _leave_rest(optimizer: Any, ours: set[int], hooks: dict[int, Any]) -> Callable[[], None]:
    """Leave the outer call only parameters that are not ours, and no hooks; returns what puts everything back."""
    held = [(group, group["params"]) for group in optimizer.param_groups]
    rest = [[param for param in params if id(param) not in ours] for _, params in held]
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks

    def undo() -> None:
        for group, params in held:
            group["params"] = params
        before.update(hooks)
        optimizer._optimizer_step_post_hooks = after

    optimizer._optimizer_step_post_hooks = OrderedDict()
    for (group, _), params in zip(held, rest, strict=True):
        group["params"] = params
    return undo
