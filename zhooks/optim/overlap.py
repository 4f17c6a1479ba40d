"""``[optimizer] overlap = true``: a flat is updated in backward, as soon as its reduction has landed.

An update made early cannot know of a clip, an unscale, another backward, a new learning
rate or another optimizer, so each of these is refused by name when it comes.

Note: [Early or not]
    A flat is updated early when optimizers that have stepped before, with the states they have, hold its parameters, each of
    them one alone, all of them got a gradient on this rank, no earlier gradient was waiting, and no other forward of this
    backward is still to come through it.  Any other is left to the step, which does the same arithmetic:
    which of the two happened never changes a bit.

Note: [Whose step comes]
    torch updates what a step is called for, with what it finds then.  An early update is right if the step of the same
    optimizer comes next, and finds the groups, states and parameters that the update found or left.  Nothing takes an update
    back, so whatever else comes first is refused: the step of another optimizer, a forward, a verb that reads or writes
    values.  Parameters that two optimizers have stepped are left to the step from then on, as long as both are there.

Note: [Beside backward]
    Updates that are computed on the host have a thread of their own, one after the other.  It does arithmetic alone: the
    thread that runs backward fetches what an update needs, waits until that is there, and later puts away what the update
    made and closes it, for the store, the budget and the pools belong to it.  Meanwhile the blocks are lent: whoever else
    wants their values waits.  The optimizer is stood in for by one of the same type with groups of its own, so that nobody
    finds the groups narrowed; the states are shared.  All updates are over when backward is; an error is raised in the step.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch.optim import Optimizer

from offload.device import VirtualWork, device_guard
from offload.errors import ZhooksError
from offload.kernels import flushes_denormals
from offload.threads import Task, Workers
from offload.tier import Tier
from offload.virtual import NAME, Machine, running
from offload.work import DONE, HostWork
from zhooks.grad import GradBuffer
from zhooks.optim.groups import NO_ARGUMENTS, Arguments, group_options, same_options
from zhooks.optim.kernel import FlatUpdate
from zhooks.optim.optimizers import Optimizers
from zhooks.optim.tiered_update import Fetched, Mine, Updater
from zhooks.refusals import not_stepped, too_late
from zhooks.unit import Flat

__all__ = ["Overlap", "Update", "open_worker"]


class Worker:
    """A thread, which makes updates in turn."""

    def __init__(self) -> None:
        self._threads = Workers("zhooks-update")
        self._threads.start()
        self._end = weakref.finalize(self, self._threads.stop)

    def submit(self, job: Callable[[], None]) -> HostWork:
        """Queue ``job``, which must not raise; who has seen its end waits for what is returned, too."""
        self._threads.submit(job)
        return DONE

    def close(self) -> None:
        """Wait for what was submitted, and end."""
        self._end()


class _VirtualWorker(Worker):
    """On paper, for the virtual device."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def submit(self, job: Callable[[], None]) -> HostWork:
        with self._machine.thread("thread of updates"):
            job()
            return VirtualWork(self._machine, self._machine.moment(self._machine.host))

    def close(self) -> None:
        return None


def open_worker(device: torch.device) -> Worker:
    """A new one for updates of a model on ``device``.

    Raises:
        CapabilityError: the system does not allow another thread.
    """
    return _VirtualWorker(running()) if device.type == NAME else Worker()


class Update:
    """One flat's update under way, made elsewhere as the thread that asks for it would make it here.

    To the leases of what was fetched for it, it is work like a copy (``wait``, ``done``): until it is over nobody else gets the
    values.
    """

    def __init__(self, updater: Updater, flat: Flat, mine: Sequence[Mine], fetched: Fetched) -> None:
        self.flat, self.fetched, self.over = flat, fetched, Task(self)
        self.optimizers = [optimizer for optimizer, _ in mine]
        self._updater, self._left = updater, [(_stand_in(optimizer, update), update) for optimizer, update in mine]
        self._thread: int | None = None
        #: The end of the thread's work on it, for the streams of a device on paper.
        self.ended: HostWork = DONE
        self._mode = torch.get_num_threads(), torch.get_default_device(), flushes_denormals()

    def __call__(self) -> None:
        self._thread = threading.get_ident()
        threads, device, flush = self._mode
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if flushes_denormals() != flush:
            torch.set_flush_denormal(flush)
        default = nullcontext() if device.type == "cpu" else device
        left, self._left = self._left, []
        try:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), device_guard(self.flat.kind.device), default:
                for stand_in, update in left:
                    self._updater.update(stand_in, update, NO_ARGUMENTS)
        finally:
            self._thread = None
            for stand_in, _ in left:
                # Who looks for optimizers of these parameters must not find it.
                stand_in.param_groups = []

    def wait(self) -> None:
        if threading.get_ident() != self._thread:
            self.over.join()
            self.ended.synchronize()

    def done(self) -> bool:
        return self.over.done() and self.ended.done()


def _stand_in(optimizer: Optimizer, update: FlatUpdate) -> Optimizer:
    """An optimizer of the same type and states whose groups hold these parameters, with the options of now."""
    made: Any = object.__new__(type(optimizer))
    # Options that a call has changed are put back in place, perhaps while this one steps on its own thread.
    vars(made).update(vars(optimizer), defaults=dict(optimizer.defaults))
    groups = zip(group_options(optimizer), update.groups, strict=True)
    made.param_groups = [{"params": list(params), **group} for group, params in groups]
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return cast(Optimizer, made)


class Made:
    """What was updated early for one optimizer, until its step."""

    def __init__(self, optimizer: Optimizer, known: Optimizers) -> None:
        self.optimizer, self.name = weakref.ref(optimizer), type(optimizer).__name__
        self.start, self._known, self._met = group_options(optimizer), known, known.met(optimizer)
        #: The group of each parameter that was updated, by its id.
        self.groups: dict[int, int] = {}
        #: The flats, and their versions once all updates of a backward are made.
        self.flats: list[tuple[Flat, int]] = []

    def changed(self, optimizer: Optimizer, updates: Sequence[FlatUpdate]) -> str:
        """What the step of the optimizer finds otherwise than the updates did; "" where it is the same."""
        places, now = _group_of_each(updates), group_options(optimizer)
        if self._known.met(optimizer) is not self._met:
            return "different states (load_state_dict)"
        if any(places.get(param) != group for param, group in self.groups.items()):
            return "different parameters in its groups"
        if len(now) < len(self.start) or not same_options(self.start, now[: len(self.start)]):
            return "different options in its groups (a learning rate)"
        here = {update.flat.number: update.flat for update in updates}
        written = [flat.name for flat, version in self.flats if here.get(flat.number) is flat and flat.version() != version]
        return f"a write to parameters of unit {written[0]}" if written else ""


def _group_of_each(updates: Sequence[FlatUpdate]) -> dict[int, int]:
    """The group of each parameter, by its id."""
    return {id(param): number for update in updates for number, group in enumerate(update.groups) for param in group}


#: Flats that are lent at a time: one is updated, the next one waits for it.
_MOST = 2


class Overlap:
    """The early updates of one attachment, between two steps.

    Args:
        known: the optimizers of the attachment, which are asked which of them have stepped.
        worker: makes the updates beside backward; None where backward's own thread shall.
        rank: named in errors.
    """

    def __init__(self, updater: Updater, known: Optimizers, worker: Worker | None, *, rank: int) -> None:
        self._updater, self._known, self._worker, self._rank = updater, known, worker, rank
        self._made: list[Made] = []
        #: What a step of an optimizer has to do, by flat; found once a backward.
        self._to_do: weakref.WeakKeyDictionary[Optimizer, dict[int, FlatUpdate]] = weakref.WeakKeyDictionary()
        self._under_way: deque[Update] = deque()
        self._failed: Exception | None = None

    def early(self, gradient: GradBuffer) -> None:
        """A whole reduced gradient lies in its shard: update now where that is right.

        Raises:
            ShardedOpError: the flat was updated already in this step: a second backward.
        """
        flat = gradient.flat
        if flat.spent:
            self._forget()
            raise too_late(f"unit {flat.name}", "a second backward")
        if self._failed is not None or flat.nodes > 1 or any(param.grad is not None for param in flat.params):
            return
        mine = [(one, update) for one in self._known.stepped() if (update := self._update_of(one, flat)) is not None]
        held = [id(param) for _, update in mine for param in update.params()]
        if not len(set(held)) == len(held) == len(flat.params):
            return
        for index, param in enumerate(flat.params):
            param.grad = gradient.claim(index)
        for optimizer, update in mine:
            made = self._made_for(optimizer)
            if made is None:
                made = Made(optimizer, self._known)
                self._made.append(made)
            made.groups |= _group_of_each([update])
            made.flats.append((flat, 0))
        beside = self._worker is not None and self._updater.place_of(flat) is Tier.HOST
        if self._worker is not None and beside and all(self._updater.kernel_of(flat).apart(one) for one, _ in mine):
            self._begin(self._worker, flat, mine)
        else:
            if beside:
                self._wait()
            elif flat.kind.tiers.anywhere:
                # What it needs from tiers takes the place of one that is lent.
                self._wait(_MOST - 1)
            for optimizer, update in mine:
                self._updater.make_way([flat])
                self._updater.run(optimizer, [update], NO_ARGUMENTS)
            _no_gradient(flat)
        flat.spent = {spec.name for spec in flat.specs}

    def _made_for(self, optimizer: Optimizer) -> Made | None:
        return next((made for made in self._made if made.optimizer() is optimizer), None)

    def _begin(self, worker: Worker, flat: Flat, mine: Sequence[Mine]) -> None:
        """Fetch what the flat's update needs, and have it made."""
        self._wait(_MOST - 1)
        self._updater.make_way([flat])
        fetched = self._updater.fetch(mine)
        with ExitStack() as undo:
            undo.push(fetched)
            # Here: the thread that updates must not wait for copies, whose order is this one's.
            fetched.wait()
            undo.pop_all()
        update = Update(self._updater, flat, mine, fetched)
        for lease in fetched.leases:
            lease.lend(update)
        flat.written()
        flat.storage.lend(partial(self._reclaim, update))
        self._under_way.append(update)
        update.ended = worker.submit(update.over.run)

    def _reclaim(self, update: Update) -> None:
        while update in self._under_way:
            self._end_oldest()

    def _wait(self, most: int = 0) -> None:
        """Until so many updates are under way, or fewer."""
        while self._under_way and (len(self._under_way) > most or self._under_way[0].done()):
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Put away what the oldest update has made; an error is kept for the step."""
        update = self._under_way[0]
        flat = update.flat
        update.wait()
        found = update.over.error()
        self._under_way.popleft()
        for lease in update.fetched.leases:
            lease.take_back()
        flat.storage.take_back()
        try:
            with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), update.fetched:
                flat.written()
                if found is not None:
                    raise found
                _no_gradient(flat)
                for optimizer in update.optimizers:
                    self._updater.put_away(optimizer, flat)
        except Exception as error:
            where = f"Raised while unit {flat.name} was updated during backward, on rank {self._rank}"
            if isinstance(error, ZhooksError):
                error.args = (f"{str(error).rstrip('.')}. {where}.",)
            else:
                error.add_note(f"{where}.")
            self._failed = self._failed or error

    def finish(self) -> None:
        """A backward is over, or something else needs its updates to be."""
        self._wait()
        if self._to_do:
            self._to_do.clear()
            for made in self._made:
                made.flats = [(flat, flat.version()) for flat, _ in made.flats]

    def due(self, what: str) -> None:
        """``what`` reads or writes parameters: no step may be waited for.

        Raises:
            ShardedOpError: parameters were updated in backward for an optimizer that has not stepped since.
        """
        if self._made:
            name = self._made[0].name
            self._forget()
            raise not_stepped(what, name, f"{what} before it")

    def close(self) -> None:
        """Nothing more is updated early."""
        self.finish()
        if self._worker is not None:
            self._worker.close()

    def step_begins(self, optimizer: Optimizer, updates: Sequence[FlatUpdate], arguments: Arguments) -> None:
        """The step that early updates were made for: what has been updated has no gradient left, so it does the others alone.

        Raises:
            ShardedOpError: the optimizer is another than the one whose step was expected, something of it has changed since
                the first early update, or the step has arguments.
            Exception: what an update beside backward has met with, with its unit and this rank.
        """
        self.finish()
        failed, self._failed = self._failed, None
        name, mine = type(optimizer).__name__, self._made_for(optimizer)
        self._known.steps(optimizer)
        others = [made for made in self._made if made is not mine]
        if others:
            held = _group_of_each(updates)
            other = next((made for made in others if not made.groups.keys().isdisjoint(held)), None)
            if other is not None:
                self._forget()
                raise not_stepped(f"{name}.step", other.name, "the step of another optimizer of these parameters")
        self._made = others
        waiting = {param for made in others for param in made.groups}
        for update in updates:
            flat = update.flat
            flat.spent = {spec.name for param, spec in flat.members() if id(param) in waiting} if waiting else set()
            flat.nodes = 0
        if failed is not None:
            raise failed
        found = "" if mine is None else mine.changed(optimizer, updates)
        if found:
            raise too_late(name, found)
        if mine is not None and arguments.given:
            raise too_late(f"{name}.step", f"arguments ({', '.join(arguments.given)})")

    def _forget(self) -> None:
        """Said once; from here on the step is an ordinary one."""
        self._wait()
        self._made.clear()
        for flat in self._updater.flats():
            flat.spent = set()

    def _update_of(self, optimizer: Optimizer, flat: Flat) -> FlatUpdate | None:
        known = self._to_do.get(optimizer)
        if known is None:
            known = self._to_do[optimizer] = {
                update.flat.number: update for update in self._updater.updates(optimizer, self._known.whole(optimizer))
            }
        update = known.get(flat.number)
        return update if update is not None and update.flat is flat else None


def _no_gradient(flat: Flat) -> None:
    """Its update was made: what is left of the gradient is nobody's."""
    for param in flat.params:
        param.grad = None
