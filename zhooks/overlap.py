"""``[optimizer] overlap = true``: a flat is updated in backward, as soon as its reduction has landed.

``reduce.py`` tells it of every landing, and of the end of every backward; ``optim.py`` asks at the step what is left to do.
An update made early cannot know of a clip, an unscale, another backward or a new learning rate, so each of these is refused
by name when it comes.

Note: [Early or not]
    A flat is updated early when an optimizer that has stepped before, with the states it has, holds its parameters, all of
    them got a gradient on this rank, no earlier gradient was waiting, and no other forward of this backward is still to
    come through it.  Any other is left to the step, which does the same arithmetic:
    which of the two happened never changes a bit.

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
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch.optim import Optimizer

from offload.block import Block
from offload.errors import ZhooksError
from offload.kernel_threads import flushes_denormals
from offload.threads import Workers, finished
from zhooks.flat import Flat
from zhooks.grad import Gradient
from zhooks.group_numbers import numbers
from zhooks.optim import Arguments, Job, Stepper
from zhooks.refusals import too_late

__all__ = ["Overlap", "Worker"]


class Worker:
    """The thread that updates are made on.

    Raises:
        CapabilityError: the system does not allow another thread.
    """

    def __init__(self) -> None:
        self._threads = Workers("zhooks-update")
        self._threads.start()
        self.close = weakref.finalize(self, self._threads.stop)

    def submit(self, arithmetic: Arithmetic) -> None:
        self._threads.submit(partial(finished, arithmetic.over, arithmetic))


class Arithmetic:
    """One flat's update, made elsewhere as the thread that asks for it would make it here."""

    def __init__(self, stepper: Stepper, flat: Flat, updates: Sequence[tuple[Optimizer, Job]]) -> None:
        self.over: Future[None] = Future()
        self._stepper, self._updates, self._on = stepper, list(updates), flat.kind.device
        self._thread: int | None = None
        self._mode = torch.get_num_threads(), torch.get_default_device(), flushes_denormals()

    def __call__(self) -> None:
        self._thread = threading.get_ident()
        threads, device, flush = self._mode
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if flushes_denormals() != flush:
            torch.set_flush_denormal(flush)
        current = torch.cuda.device(self._on) if self._on.type == "cuda" else nullcontext()
        default = nullcontext() if device.type == "cpu" else device
        updates, self._updates = self._updates, []
        try:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), current, default:
                for stand_in, job in updates:
                    self._stepper.update(stand_in, job, Arguments())
        finally:
            for stand_in, _ in updates:
                # Who looks for optimizers of these parameters must not find it.
                stand_in.param_groups = []

    # A step (lease.py): until it is over nobody else gets the values.

    def wait(self) -> None:
        if threading.get_ident() != self._thread:
            self.over.exception()

    def done(self) -> bool:
        return self.over.done()


def _stand_in(optimizer: Optimizer, job: Job) -> Optimizer:
    """An optimizer of the same type and states whose groups hold the job's parameters, with the numbers of now."""
    made: Any = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    groups = zip(numbers(optimizer), job.groups, strict=True)
    made.param_groups = [{"params": list(params), **group} for group, params in groups]
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return cast(Optimizer, made)


class Update:
    """One flat's update under way."""

    def __init__(self, flat: Flat, optimizers: Sequence[Optimizer], blocks: list[Block], arithmetic: Arithmetic) -> None:
        self.flat, self.optimizers, self.blocks, self.arithmetic = flat, optimizers, blocks, arithmetic


#: Flats that are lent at a time: one is updated, the next one waits for it.
_MOST = 2


class Overlap:
    """The early updates of one attachment, between two steps.

    Args:
        worker: makes the updates beside backward; None where backward's own thread shall.
        rank: named in errors.
    """

    def __init__(self, stepper: Stepper, worker: Worker | None, *, rank: int) -> None:
        self._stepper, self._worker, self._rank = stepper, worker, rank
        #: Optimizers, each with the ``state`` of its last step: what was loaded since has not been made ranges yet.
        self._known: list[tuple[weakref.ref[Optimizer], Any]] = []
        self._start: dict[int, list[dict[str, Any]]] = {}
        self._spent: dict[int, set[int]] = {}
        #: What a step of an optimizer has to do, by flat; found once a backward.
        self._jobs: dict[int, dict[int, Job]] = {}
        self._under_way: deque[Update] = deque()
        self._failed: Exception | None = None

    def early(self, gradient: Gradient) -> None:
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
        mine = [(optimizer, job) for optimizer in self._optimizers() if (job := self._job(optimizer, flat)) is not None]
        if not mine:
            return
        for index, param in enumerate(flat.params):
            param.grad = gradient.tensor(index)
        for optimizer, _ in mine:
            self._start.setdefault(id(optimizer), numbers(optimizer))
        if self._worker is not None and all(self._stepper.kernel.apart(optimizer) for optimizer, _ in mine):
            self._begin(self._worker, flat, mine)
        else:
            self._wait()
            for optimizer, job in mine:
                self._stepper.run(optimizer, [job], last=False)
            _no_gradient(flat)
        for optimizer, _ in mine:
            self._spent.setdefault(id(optimizer), set()).add(flat.number)
        flat.spent = True

    def _begin(self, worker: Worker, flat: Flat, mine: Sequence[tuple[Optimizer, Job]]) -> None:
        """Fetch what the flat's update needs, and have it made."""
        self._wait(_MOST - 1)
        stepper, blocks = self._stepper, list[Block]()
        stepper.make_way([flat])
        try:
            for optimizer, job in mine:
                blocks.extend(stepper.fetch_now(optimizer, job))
        except BaseException:
            stepper.give_up(blocks)
            raise
        arithmetic = Arithmetic(stepper, flat, [(_stand_in(optimizer, job), job) for optimizer, job in mine])
        update = Update(flat, [optimizer for optimizer, _ in mine], blocks, arithmetic)
        for block in blocks:
            assert block.lease is not None
            block.lease.lend(arithmetic)
        flat.written()
        if flat.rest is not None:
            flat.rest.lend(partial(self._reclaim, update))
        self._under_way.append(update)
        worker.submit(arithmetic)

    def _reclaim(self, update: Update) -> None:
        while update in self._under_way:
            self._end_oldest()

    def _wait(self, most: int = 0) -> None:
        """Until so many updates are under way, or fewer."""
        while self._under_way and (len(self._under_way) > most or self._under_way[0].arithmetic.done()):
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Put away what the oldest update has made; an error is kept for the step."""
        update = self._under_way[0]
        flat, stepper = update.flat, self._stepper
        found = update.arithmetic.over.exception()
        self._under_way.popleft()
        for block in update.blocks:
            assert block.lease is not None
            block.lease.take_back()
        if flat.rest is not None:
            flat.rest.take_back()
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            try:
                flat.written()
                if found is not None:
                    raise found
                _no_gradient(flat)
                for optimizer in update.optimizers:
                    stepper.put_away(optimizer, flat)
                stepper.close_blocks(update.blocks)
            except BaseException as error:
                stepper.give_up(update.blocks)
                if not isinstance(error, Exception):
                    raise
                self._failed = self._failed or self._named(flat, error)

    def _named(self, flat: Flat, error: Exception) -> Exception:
        where = f"Found while unit {flat.name} was updated beside backward, on rank {self._rank}"
        if isinstance(error, ZhooksError):
            error.args = (f"{str(error).rstrip('.')}. {where}.",)
        else:
            error.add_note(f"{where}.")
        return error

    def finish(self) -> None:
        """A backward is over, or something else needs its updates to be."""
        self._wait()
        self._jobs.clear()

    def close(self) -> None:
        """Nothing more is updated early."""
        self.finish()
        if self._worker is not None:
            self._worker.close()

    def left(self, optimizer: Optimizer, jobs: Sequence[Job], arguments: Arguments) -> list[Job]:
        """What a step still has to do.

        Raises:
            ShardedOpError: the optimizer's numbers have changed since the first early update, or the step has arguments.
            Exception: what an update beside backward has met with, with its unit and this rank.
        """
        self.finish()
        failed, self._failed = self._failed, None
        self._known = [(known, state) for known, state in self._known if known() is not optimizer]
        self._known.append((weakref.ref(optimizer), optimizer.state))
        spent, start = self._spent.pop(id(optimizer), set()), self._start.pop(id(optimizer), None)
        for job in jobs:
            job.flat.spent = False
            job.flat.nodes = 0
        if failed is not None:
            raise failed
        if start is not None and not _same(start, numbers(optimizer)):
            raise too_late(type(optimizer).__name__, "other numbers in its groups (a learning rate)")
        if start is not None and arguments.given:
            raise too_late(f"{type(optimizer).__name__}.step", f"arguments ({', '.join(arguments.given)})")
        return [job for job in jobs if job.flat.number not in spent]

    def _forget(self) -> None:
        """Said once; from here on the step is an ordinary one."""
        self._wait()
        self._spent.clear()
        self._start.clear()
        for flat in self._stepper.flats():
            flat.spent = False

    def _optimizers(self) -> list[Optimizer]:
        self._known = [entry for entry in self._known if entry[0]() is not None]
        found = [(known(), state) for known, state in self._known]
        return [optimizer for optimizer, state in found if optimizer is not None and optimizer.state is state]

    def _job(self, optimizer: Optimizer, flat: Flat) -> Job | None:
        jobs = self._jobs.get(id(optimizer))
        if jobs is None:
            jobs = self._jobs[id(optimizer)] = {job.flat.number: job for job in self._stepper.jobs(optimizer)}
        job = jobs.get(flat.number)
        return job if job is not None and job.flat is flat else None


def _no_gradient(flat: Flat) -> None:
    """Its update was made: what is left of the gradient is nobody's."""
    for param in flat.params:
        param.grad = None


def _same(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> bool:
    return all(
        before.keys() == now.keys() and all(_equal(before[key], now[key]) for key in before)
        for before, now in zip(one, two, strict=True)
    )


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return bool(one == two)
