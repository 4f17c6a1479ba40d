"""Carries the plan out: gather before use, release after it, in forward and backward, and leave everything at rest.

``hooks.py``, ``activation/saved.py``, ``grad/reduce.py`` and the sharded tensor tell it what happens; it tells units what to
do.

Note: [Passes]
    A pass is one way through the model from the outermost hooked module to its end, or one backward.  Passes with the
    same entry, mode and grad setting share a path.  A backward is over when autograd's callback says so or, where that
    cannot be (an exception, reentrant checkpointing), when the next entry finds it open: reading ``p.grad``, a forward.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from torch import nn

from offload.errors import BudgetError, ShardedOpError
from offload.events import HERE, Bus
from offload.policy import Policy
from zhooks.activation import SavedParameters
from zhooks.comm import Comm, GatherControl, LastInputs
from zhooks.compiled import Breaks
from zhooks.grad import Node, Reducer, Scaling, in_backward, running, transforms, watch_direct
from zhooks.layout import Ignored, Table, flats_of
from zhooks.refusals import no_accumulation, transformed
from zhooks.run.members import Members
from zhooks.run.passes import Frame, Pass
from zhooks.run.paths import Paths
from zhooks.run.schedule import Choices, Scope, Step, Walk
from zhooks.tensor import Engine
from zhooks.unit import Flat, Pool, Unit

_living: weakref.WeakSet[Runtime] = weakref.WeakSet()


def forget_idle_graphs() -> None:
    """Let every attachment that is not running drop what its last forward left for a backward that may never come.

    A node leads back to its model by a way the garbage collector cannot see: a model dropped after such a forward would never
    be freed.  A graph that somebody still has keeps its nodes; the next forward makes new ones.
    """
    if sum(runtime.forget_idle_graphs() for runtime in _living):
        gc.collect()


class Runtime(Engine):
    """The state machine between the hooks and the units of one attachment.

    Args:
        spare: bytes for units that stay gathered between forward and backward; None where there is no budget.
        follow_freezes: lays parameters out anew that were frozen or unfrozen since the last step.  Collective.
        training_begins: called before each training pass, when units may still be laid out anew.  Collective.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        comm: Comm,
        pool: Pool,
        bus: Bus,
        *,
        spare: int | None,
        follow_freezes: Callable[[], None],
        training_begins: Callable[[], None],
        ignored: Ignored,
    ) -> None:
        schedule = policy.schedule
        unreduced = Table.of(policy.table()).accumulates_unreduced
        self.bus, self.members, self._follow_freezes = bus, Members(model, ignored), follow_freezes
        self._training_begins = training_begins
        self.scaling = Scaling(comm, bus, policy.precision, self)
        self.reducer = Reducer(
            comm, pool, bus, self.scaling, self,
            most=schedule.most_reductions, unreduced=unreduced, mean=policy.gradient.reduce == "mean",
        )
        self.node = Node(self.reducer)
        choices = Choices(schedule.prefetch, schedule.reshard_after_forward, spare, schedule.uneven)
        self.paths = Paths(choices, GatherControl(comm, "first pass"))
        self.saved = SavedParameters(self.backward_use, model, comm, bus, ignored)
        #: Where given: called with a training forward's arguments, and with what a unit's module made, by the unit's name.
        self.given: Callable[[Any], None] | None = None
        self.made: Callable[[str, Any], None] | None = None
        self.inputs = LastInputs()
        self._units: list[Unit] = []
        self._of: dict[int, Unit] = {}
        self.relayout_due, self.releases = False, False
        self._breaks = Breaks()
        self._pass: Pass | None = None
        #: Forwards without gradients that have begun and wait for other ranks, since ranks last met anew.
        self.evaluations = 0
        self._back: Walk | None = None
        # Gathered now, and of these what stays for the next backward.
        self._out: dict[int, Unit] = {}
        self._kept: frozenset[int] = frozenset()
        self._resident = 0
        # What is fetched now can wait.
        self._fetches_ahead = False
        # Numbers of units that stay gathered until resharded.
        self._unsharded: frozenset[int] = frozenset()
        # Modules at which a differentiated forward began.  One that is entered again inside such a forward is taken out: its
        # recomputation in backward may be of either.
        self._entries: set[int] = set()
        # Backwards of autograd that are to say when they end.
        self._tasks: set[int] = set()
        #: The backward that is open has run another inside one of its nodes.
        self.nested = False
        _living.add(self)

    def close(self) -> None:
        """The attachment is over: graphs that somebody keeps lead no further than this."""
        self.node.close()
        self.scaling.close()
        self.saved.part()

    def take(self, units: Sequence[Unit]) -> None:
        """Run these units from now on."""
        self._units = list(units)
        self._of = {id(flat): unit for unit in units for flat in unit.flats}
        self.paths.take([unit.plan for unit in units])
        self.releases = self.paths.releases
        self._out.clear()
        self.saved.watch(flats_of(units))
        self.reducer.watch([flat for flat in flats_of(units) if flat.kind.trainable])
        self.bus.restate()

    def forget_idle_graphs(self) -> bool:
        idle = self.outermost and not in_backward()
        for flat in flats_of(self._units) if idle else ():
            flat.end_graph()
        return idle

    @property
    def quiet(self) -> bool:
        """Nothing is open here that a layout made anew would end: no forward without its backward, no sum that is held back,
        nothing that somebody keeps gathered."""
        asked = self._resident or self._unsharded or self.reducer.open or self.reducer.accumulation.owed
        return not asked and not any(flat.awaits_backward for flat in flats_of(self._units))

    # Forward.

    @property
    def outermost(self) -> bool:
        """No hooked module is running: the next one entered begins a pass."""
        return self._pass is None

    @property
    def _walk(self) -> Walk | None:
        return None if self._pass is None else self._pass.walk

    @property
    def evaluating(self) -> bool:
        """A forward without gradients that waits for other ranks is under way."""
        return self._pass is not None and not self._pass.grad and self._pass.walk is not None

    @property
    def _forward_runs(self) -> bool:
        """A forward pass is under way; a recomputation is part of its backward."""
        return self._pass is not None and self._pass.label != ""

    def enter(self, module: object, units: tuple[Unit, ...], scope: Scope, training: bool) -> None:
        """A module that ``units`` are entered through is about to run; the outermost one begins a pass."""
        if self._pass is not None and self._pass.frames[0].module is module:
            self._abandon_dead()
        current = self._pass
        if (current is None or id(module) in self._entries) and torch.is_grad_enabled() and not in_backward():
            (self._entries.add if current is None else self._entries.discard)(id(module))
        if current is None:
            # The caller is the module's own call: on the stack as long as the pass lasts.
            current = self._begin(module, scope, training, sys._getframe(2))
        frame = Frame(module)
        current.frames.append(frame)
        self._pass = current
        for unit in units:
            if unit.depth == 0:
                self.use(unit)
                unit.show()
                self.bus.begin("compute", unit.name, at=HERE)
            unit.depth += 1
            frame.entered.append(unit)

    def leave(self, module: object, failed: bool) -> None:
        """That module has run, or raised."""
        current = self._pass
        if current is None or current.frames[-1].module is not module:
            return
        frame, left = current.frames.pop(), []
        if not current.frames:
            self._pass = None
        for unit in frame.entered:
            unit.depth -= 1
            if unit.depth == 0:
                unit.hide()
                left.append(unit)
                self.bus.end("compute", unit.name, at=HERE)
        if self._pass is None:
            if current.saving:
                self.saved.exit(failed)
            if current.label:
                self._end_pass(current, failed)
        for unit in left:
            unit.end_show(failed=failed)

    def _abandon_dead(self) -> None:
        """A pass was left without its hooks running (an interrupt): put everything back before the next."""
        if self._pass is None or running(self._pass.caller):
            return
        self.saved.abandon()
        while self._pass is not None:
            self.leave(self._pass.frames[-1].module, failed=True)

    def _begin(self, module: object, scope: Scope, training: bool, caller: FrameType) -> Pass:
        """Begin a pass or, inside backward, a recomputation.

        A recomputation must save what its forward saved: parameters pass as references where the forward began at this
        module, and belong to the checkpoint where it began further out, or where the module's unit is what is recomputed: that
        checkpoint lies inside our hooks in the first forward.
        """
        grad = torch.is_grad_enabled()
        begun = Pass(caller) if in_backward() else self._begin_pass(scope, training, grad, caller)
        if grad and (self.releases or self.saved.kept) and id(module) in self._entries and not self.saved.recomputes:
            self.saved.enter()
            begun.saving = True
        return begun

    def _begin_pass(self, scope: Scope, training: bool, grad: bool, caller: FrameType) -> Pass:
        found = transforms()
        if found and (grad or found != {"vmap"}):
            raise transformed(scope.name, found)
        self.members.check()
        if grad:
            self.finish_backward()
        else:
            # A pass for values alone, between a forward and its backward perhaps (PEFT's disable_adapter freezes for it what
            # it unfreezes after it): that graph belongs to the layout it was made in.
            self._finish_open(False)
        self.reducer.updates_due("forward")
        if grad:
            self._training_begins()
            self.reducer.accumulation.begin(caller)
            self.check_overlap()
        label = self.paths.label(scope, training, grad)
        walk = None if not grad and self._is_local() else self.paths.forward(label, scope, grad)
        self.evaluations += not grad and walk is not None
        self.bus.begin("forward", label, at=HERE)
        return Pass(caller, label, walk, frozenset() if walk is None else self.paths.keep(walk.path, grad=grad), grad=grad)

    def _is_local(self) -> bool:
        """Everything is gathered and stays so on every rank, as in ``resident``: a forward without gradients waits for nobody,
        and nobody for it."""
        stays = self._resident > 0 or not self.releases
        return stays and all(flat.current() or not flat.layout.padded for flat in flats_of(self._units))

    def _end_pass(self, current: Pass, failed: bool) -> None:
        walk, grad = current.walk, current.grad
        keep: frozenset[int] = frozenset()
        new = walk is not None and not walk.path.recorded
        if walk is not None and not failed:
            self._catch_up(walk, current.keep)
            gathered = frozenset(range(len(self._units)))
            if not walk.path.recorded:
                # Ranks that used different units in a first pass may have others gathered: what is on all of them may stay.
                released = [unit.number for unit in self._units if not all(flat.current() for flat in unit.flats)]
                gathered = self.paths.record(walk, walk.path.order, released)
                self.members.changed = True
                self.reducer.expect(walk.path.order)
            keep = self.paths.keep(walk.path, grad=grad) & gathered
        self.bus.end("forward", current.label, at=HERE)
        if walk is None:
            return
        self._kept = keep
        if failed:
            self._abandon_gathers()
        self._release_others(keep)
        if not failed:
            if new:
                self._breaks.look()
            self.members.check_new()

    def _abandon_gathers(self) -> None:
        """After an exception nothing may wait: other ranks may be anywhere."""
        self.saved.forget()
        for flat in flats_of(self._units):
            flat.abandon()
        self._out.clear()

    def _catch_up(self, walk: Walk, keep: frozenset[int]) -> None:
        for number in walk.finish():
            self._gather_for_others(self._units[number], keep)
        for unit in self._units:
            unit.finish_gather()

    def _gather_for_others(self, unit: Unit, keep: frozenset[int]) -> None:
        """This rank skips the unit, which others may use: it takes part in the gather, and holds it no longer than they do."""
        if not all(flat.current() for flat in unit.flats):
            self._start(unit)
            unit.finish_gather()
            if not unit.depth and unit.number not in keep:
                self._release(unit)

    def use(self, unit: Unit) -> None:
        """Have ``unit`` gathered now, and what the plan wants next on its way."""
        backward = in_backward()
        if backward:
            self.backward_open()
        walk = self._back if backward and self._back is not None else self._walk
        if walk is not None:
            step = walk.use(unit.number)
            if self._out:
                self._release_idle(step, backward)
            # Kept units are there on every rank when backward begins; a rank may be done with them already.
            for number in step.launch:
                if not backward and number not in step.window:
                    self._gather_for_others(self._units[number], frozenset() if self._pass is None else self._pass.keep)
                elif not (backward and number in self._kept):
                    self._start(self._units[number])
            self._fetch_ahead(step.fetch)
        self._start(unit)
        if backward and self.releases:
            self.reducer.came_to(unit.number)
        unit.finish_gather()

    def _start(self, unit: Unit) -> None:
        for flat in unit.flats:
            if not flat.current():
                flat.begin_gather()
                self.saved.live(flat)
                if flat.releasable:
                    self._out[unit.number] = unit

    def _fetch_ahead(self, numbers: Sequence[int]) -> None:
        """What the gathers that are launched next will send starts to be fetched from its tier, as far as there is memory."""
        self._fetches_ahead = True
        try:
            with suppress(BudgetError):
                for number in numbers:
                    self._units[number].prepare()
        finally:
            self._fetches_ahead = False

    def make_room(self) -> bool:
        """A tier is full: what gathers send goes back to it, those under way finished first; whether there was any.

        All ranks launched these gathers before they come here, so each of them comes to an end; under ``[schedule] uneven``
        they may not have.
        """
        if self._fetches_ahead or self.paths.choices.uneven:
            return False
        settled = [flat.settle() for flat in flats_of(self._units)]
        return any(settled)

    def _release_idle(self, step: Step, backward: bool) -> None:
        """Units that are neither in use, nor next, nor to be kept for backward are released."""
        keep = self._kept if backward or self._pass is None else self._pass.keep
        for unit in tuple(self._out.values()):
            if unit.depth or unit.number in step.window or unit.number in keep or (backward and unit.trainable_left):
                continue
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        walk = self._back if self._back is not None else self._walk
        if self._resident or unit.number in self._unsharded or not unit.releasable or (walk is not None and walk.path.uneven):
            return
        for flat in unit.flats:
            if flat.releasable:
                flat.end_gather()
                self.saved.gone(flat)
                flat.release()
        self._out.pop(unit.number, None)

    def _release_others(self, keep: frozenset[int]) -> None:
        for unit in tuple(self._out.values()):
            if unit.number not in keep and not unit.depth:
                self._release(unit)

    # Backward.

    def backward_open(self) -> None:
        """Something of this attachment runs inside a backward: be told when it ends."""
        if self._back is None and not self._forward_runs:
            self.members.check_new()
            self._back = self.paths.backward()
            self.bus.begin("backward", self._back.path.name, at=HERE)
        task = torch._C._current_graph_task_id()
        if task >= 0 and task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        """Autograd finished a backward; one inside a node of another (reentrant checkpointing) does not count."""
        if torch._C._current_autograd_node() is None:
            self.finish_backward(force=True)
        else:
            self.nested = True

    def backward_use(self, flat: Flat) -> None:
        """Backward reads parameters of ``flat`` that autograd saved."""
        unit, back = self._of.get(id(flat)), self._back
        again = unit is not None and back is not None and back.last == unit.number and unit.trainable_left > 0
        if again and flat.gathered and torch._C._current_graph_task_id() in self._tasks:
            flat.finish_gather()  # the current stream may not be the one that waited for it
            return
        self.backward_open()
        if unit is None:
            flat.begin_gather()
            flat.finish_gather()
            return
        if not unit.trainable_left:
            unit.trainable_left = sum(other.kind.trainable for other in unit.flats)
        self.use(unit)

    def backward_done(self, flat: Flat) -> None:
        """All gradients of ``flat`` are complete: nothing later in this backward reads it."""
        flat.end_graph()
        unit = self._of.get(id(flat))
        if unit is None or not unit.releasable:
            return
        unit.trainable_left = max(0, unit.trainable_left - 1)
        stays = self._more_to_come and unit.number in self._kept
        if unit.trainable_left == 0 and not unit.depth and unit.number in self._out and not stays:
            self._release(unit)

    def backward_passed(self, unit: int) -> bool:
        """No gather up to that unit's last in this backward is still to be launched."""
        return self._back is None or self._back.launched(unit)

    def finish_backward(self, *, force: bool = False) -> None:
        """Be at rest: finish an open backward, and follow freezes.  Called at every entry."""
        if self._finish_open(force) and self.relayout_due and not self._forward_runs:
            with torch.inference_mode(False), torch.no_grad(), self.laying_out():
                self.reducer.read_exchange()
                self._follow_freezes()

    def conclude(self) -> None:
        """Be at rest, and read what ranks said at the end of the last backward.  Collective; raises as ``read_exchange``."""
        self.finish_backward()
        self.reducer.read_exchange()

    def _finish_open(self, force: bool) -> bool:
        """Finish a backward that is open; False inside one that runs, unless ``force``."""
        if self._pass is not None:
            self._abandon_dead()
        if not force and in_backward():
            return False
        if self._back is not None or self.reducer.open:
            with torch.inference_mode(False), torch.no_grad():
                self._end_backward()
        return True

    @contextmanager
    def laying_out(self) -> Iterator[None]:
        """Units follow freezes, or are made plain: what is asked for meanwhile begins no second time; the next entry does if
        this fails."""
        pending, self.relayout_due = self.relayout_due, False
        self.members.changed = self.members.changed or pending
        try:
            yield
        except BaseException:
            self.relayout_due = self.relayout_due or pending
            raise

    def due(self) -> None:
        """Somebody needs the gradients: be at rest, and reduce what adds up; see Note [Until somebody needs it]."""
        self.finish_backward()
        if in_backward():
            self.reducer.catch_up()
        elif self.reducer.accumulation.owed:
            with torch.inference_mode(False), torch.no_grad():
                self._kept = frozenset()
                self._release_others(self._kept)
                self.reducer.reduce_owed()

    def reduce_held(self) -> None:
        """Somebody needs what ``no_sync`` holds back: a step, or who reads a gradient's values.  Collective."""
        self.finish_backward()
        if self.reducer.held and not in_backward():
            with torch.inference_mode(False), torch.no_grad():
                self._kept = frozenset()
                self._release_others(self._kept)
                self.reducer.reduce_owed()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Backward passes inside add up unreduced, if the policy does not shard gradients."""
        self.finish_backward()
        with self.reducer.unsynced():
            try:
                yield
            finally:
                self.finish_backward()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside add up; where all went well the end of the block needs the sum."""
        self.finish_backward()
        with self.reducer.accumulation.block():
            self.check_overlap()
            yield
            self.finish_backward()
        if not self.reducer.accumulation.on:
            self.due()

    @property
    def _more_to_come(self) -> bool:
        """Units that the policy keeps gathered until backward are kept until the last backward of a sum."""
        return self.reducer.accumulation.on and self.paths.choices.reshard is False

    def check_overlap(self) -> None:
        if self.reducer.accumulation.on and self.reducer.updates is not None:
            raise no_accumulation()

    def _end_backward(self) -> None:
        walk, self._back = self._back, None
        self._tasks.clear()
        kept = self._kept
        self._kept = kept if self._more_to_come else frozenset()
        self.saved.backward_over()
        if walk is not None and self.releases:
            for number in walk.finish():
                if number not in kept:
                    self._start(self._units[number])
        for unit in self._units:
            unit.trainable_left = 0
        try:
            # Before anything else that waits for other ranks: Note [Who skips a unit] in reduce.py.
            self.reducer.finish_backward()
            self._release_others(self._kept)
            if walk is not None and self.releases and not walk.path.recorded:
                self.paths.record_backward(walk)
        finally:
            self.nested = False
            self.saved.residual.backward_over()
            if walk is not None:
                self.bus.end("backward", walk.path.name, at=HERE)

    @property
    def updated_early(self) -> bool:
        """Updates in backward have changed values for a step that has not come."""
        return any(flat.spent for flat in flats_of(self._units))

    def abandon(self) -> bool:
        """Be at rest after ranks have not met, without waiting for any; whether gradients of a backward were lost.

        What paths and reductions had agreed on is forgotten, for some ranks may have come further than others.
        """
        lost = self._back is not None
        with suppress(ShardedOpError):
            self.reducer.updates_due("recover")
        if self._pass is not None:
            self._abandon_dead()
        self._back, self._kept = None, frozenset()
        self._tasks.clear()
        self._entries.clear()
        self.nested = False
        self.saved.backward_over()
        self.saved.residual.backward_over()
        lost = self.reducer.abandon() or lost
        for unit in self._units:
            unit.trainable_left = 0
        self._abandon_gathers()
        for flat in flats_of(self._units):
            flat.forget()
        self.forget_idle_graphs()
        self.take(self._units)
        return lost

    def payload(self) -> int | None:
        """See ``Attachment.payload``."""
        gathers = self.paths.gathers()
        if gathers is None:
            return None
        moved = sum(flat.moved_nbytes for number in gathers for flat in self._units[number].flats)
        return moved + self.reducer.payload() + self.saved.partition.payload

    # The sharded tensor.

    def relayout(self) -> None:
        """A parameter was frozen or unfrozen: the layout follows at the next entry."""
        self.relayout_due = True

    def before_use(self) -> None:
        """A parameter is about to be used outside its module's forward."""
        # A graph made in the layout before would have no gradient for what was frozen there.
        if self.relayout_due and torch.is_grad_enabled():
            self.finish_backward()

    def loose_use(self, flat: Flat) -> None:
        """A parameter is used outside its module's forward."""
        unit = self._of.get(id(flat))
        if unit is None:
            flat.begin_gather()
            flat.finish_gather()
            return
        backward = in_backward()
        if not torch.is_grad_enabled() and not backward:
            # By the forward of a custom Function, it may be: that was given the parameter, and returns its gradient.
            watch_direct(flat, self.node)
        loose = not self._forward_runs and not backward
        if loose and self._back is not None:
            self.finish_backward()
        self.use(unit)
        if loose:
            self._release_others(frozenset((unit.number, *self._kept)))

    def unshard(self, units: Sequence[Unit]) -> None:
        """Gather these units, and release them no more."""
        self.finish_backward()
        self._unsharded |= {unit.number for unit in units}
        for unit in units:
            self._start(unit)
        for unit in units:
            unit.finish_gather()

    def reshard(self, units: Sequence[Unit]) -> None:
        """Release these units, those in use when their pass is over; backward gathers them again."""
        self.finish_backward()
        numbers = frozenset(unit.number for unit in units)
        self._unsharded -= numbers
        if self._pass is None:
            self._kept -= numbers
            for unit in units:
                if not self._resident and unit.number in self._out:
                    self._release(unit)

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Everything gathered, and nothing released, inside."""
        self.finish_backward()
        self._resident += 1
        try:
            for unit in self._units:
                self._start(unit)
            for unit in self._units:
                unit.finish_gather()
            yield
        finally:
            self._resident -= 1
            if not self._resident:
                self._kept = frozenset()
                self._release_others(self._kept)
