"""``attach``: the one line that turns a model into a ZeRO model, and the Attachment it returns.

The only composition root: here the policy, the mesh, the comm, the units, the reducer, the runtime and the hooks are put
together and taken apart.  It never works during a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from offload.errors import AttachError, PolicyError
from offload.events import Bus, Observer
from offload.policy import Policy
from offload.store import Store
from offload.tier import Tier
from zhooks import memory
from zhooks.activation import open_inputs, open_stash
from zhooks.agree import Agreement, disagreement
from zhooks.arena_plan import forget_plan, open_arena, planned, reserve_rest
from zhooks.attached_state import Stateful
from zhooks.build import (
    Ground,
    build_unit,
    loose_references,
    plain_unit,
    relay_unit,
    scratch_for,
    shard_states,
)
from zhooks.calibrate import Calibrated
from zhooks.checks import (
    check_arguments,
    check_division,
    check_model,
    check_optimizer,
    check_ranks_equal,
    check_same_model,
    check_scaled,
)
from zhooks.comm import CONTROL, Call, Comm, open_comm
from zhooks.comm_meet import meet, policy_facts, refused_by_all
from zhooks.describe import describe
from zhooks.device_budget import DeviceBudget
from zhooks.held import tell
from zhooks.hooks import casts_of, install, install_casts
from zhooks.islands import Map, chart
from zhooks.materialize import Materializer
from zhooks.members import Members
from zhooks.mesh import resolve
from zhooks.node import Gather, Node
from zhooks.observation import Observation
from zhooks.optim import Stepper, watch_steps
from zhooks.optimizers import Optimizers, optimizer_facts
from zhooks.overflow import Overflow
from zhooks.partition import Owners, buffers_of, check_axis, open_partition
from zhooks.paths import Paths
from zhooks.placement import Table
from zhooks.pool import Pool
from zhooks.recompute import Recompute, recomputed
from zhooks.reduce import Reducer
from zhooks.registries import Registries
from zhooks.rounding import Rounding
from zhooks.runtime import Runtime, forget_idle_graphs
from zhooks.scaling import Scaling
from zhooks.schedule import Choices
from zhooks.stock_state import StockState
from zhooks.tiers import change_store, check_change, groups_of, open_stepper, open_store
from zhooks.together import all_or_none
from zhooks.unit import Unit
from zhooks.units import find_units


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: Policy | str | Path | dict[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    init: Callable[[nn.Module], None] | None = None,
    sync: bool = True,
) -> Attachment:
    """Train ``model`` with partitioned parameters, gradients and optimizer states; the training loop stays as it is.

    Args:
        model: any module, on the device it shall run on, or built under ``torch.device("meta")``.
        optimizer: needed only when it already holds state; its states are partitioned too.
        policy: a path to a TOML or JSON file, a dict, a ``Policy``, or None (stage 3, everything on the device).
        mesh: a DeviceMesh over the whole process group with a ``shard`` (or ``dp``) axis and optionally ``replicate``, ``tp``
            and ``pp``; parameters that ``parallelize_module`` has made DTensors over ``tp`` are partitioned part by part.
            None is one shard axis over all ranks, or a world of one without a process group.
        init: called with each module of a meta model to fill its own parameters and buffers.
        sync: broadcast rank 0's parameters and buffers; False verifies by hash that ranks are equal already.
    Returns:
        The Attachment; ``detach()`` undoes everything.
    Raises:
        PolicyError: the policy cannot be read.
        AttachError: model, optimizer or mesh cannot be attached; the model is as it was.
        Either is raised on every rank, with ``rank N: `` before it on those that have no reason of their own.
    """
    meeting = meet()
    # What is trained later must not be made of inference tensors; the first of the two would turn gradients on.
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as undo:
        with refused_by_all(meeting):
            chosen = Policy.of(policy)
            check_arguments(optimizer, mesh, init, sync)
            device = check_model(model)
            check_optimizer(model, optimizer)
            check_scaled(model, chosen)
            axes = resolve(mesh)
            check_division(model, axes.tp)
            check_axis(chosen, axes.names)
            given = {"attach": {"sync": str(sync)}, "optimizer": optimizer_facts(optimizer, model.parameters())}
        forget_idle_graphs()
        comm = open_comm(axes, chosen, device, given, meeting)
        undo.callback(comm.close)
        return Attachment(model, optimizer, chosen, comm, Materializer(model, device, init, sync), undo)


class Attachment(Stateful, Calibrated):
    """A model under ZeRO.  Made by ``attach``; the model knows it until ``detach``."""

    def __init__(
        self, model: nn.Module, optimizer: Any, policy: Policy, comm: Comm, materializer: Materializer, undo: ExitStack
    ) -> None:
        """``undo`` puts everything back that was done before; it is taken over once all is done."""
        self.model, self.policy = model, policy
        self._comm, self._bus = comm, Bus()
        self._table = Table.of(policy.table())
        self._pool = Pool(policy.comm.buffer, self._bus)
        self._ground = Ground(policy, self._table, comm, self._pool, self._bus, materializer.sync)
        self._store: Store | None = None
        self._stepper: Stepper | None = None
        self._rounding = Rounding(policy.optimizer.seed)
        self._optimizer = optimizer
        self._device_budget = DeviceBudget(comm)
        self._registries = Registries()
        self._units: list[Unit] = []
        self._members = Members(model)
        self._handles: list[RemovableHandle] = []
        self._cast_handles: list[RemovableHandle] = []
        self._budget_handles: list[RemovableHandle] = []
        if not materializer.sync:
            check_ranks_equal(model, comm)
        for put_back in (self._shut_store, self._pool.clear, self._unmake):
            undo.callback(put_back)
        spare = self._build(materializer)
        with all_or_none(comm.stage, "attach"):
            self._start(spare, undo)
        self._undo: ExitStack | None = undo.pop_all()

    def _start(self, spare: int | None, undo: ExitStack) -> None:
        """Run the model that was built: everything that listens is put together, and begins to."""
        policy, schedule = self.policy, self.policy.schedule
        reducer = Reducer(
            self._comm, self._pool, self._bus, most=schedule.max_reductions, unreduced=self._table.accumulates_unreduced
        )
        self._scaling = Scaling(self._comm, self._bus, policy.precision)
        reducer.scaling, self._scaling.gather = self._scaling, Gather
        self._scaling.held = lambda: [each.partial for each in reducer.gradients.values() if each.partial is not None]
        choices = Choices(schedule.prefetch, schedule.reshard_after_forward, spare)
        self._node = Node(reducer)
        self._wire()
        self._runtime = Runtime(self._units, reducer, self._bus, Paths(choices, Agreement(self._comm.world)), self._members)
        self._runtime.relay = self._relay  # type: ignore[method-assign]
        self._keep_activations()
        self._scaling.settle, self._scaling.inside = self._runtime.due, lambda: not self._runtime.outermost
        self._casts = casts_of(policy.precision, self._charted.outside)
        self._casts.scaling = self._scaling
        self._stock = StockState(self.model, self._units, self._comm, self._runtime.settle)
        self._optimizers = Optimizers(self.model, self._comm.stage, self._stock)
        held = (self._members, self._registries, self._stock, self._optimizers, self._scaling)
        for put_back in (self._node.close, self._unhook, *(each.close for each in held), self._close_stepper):
            undo.callback(put_back)
        self._handles = install(self.model, self._units, self._runtime, self._casts)
        self._cast_handles = install_casts(self._charted.islands)
        self._members.open()
        self._registries.open()
        self._stock.open()
        self._optimizers.open(watch_steps, self._optimizer)
        self._device_budget.follow(self._units)
        self._device_budget.spared = self._keep_within
        self._budget_handles = watch_steps(self._device_budget)
        self._scaling.open(watch_steps)
        self._step_over_tiers()
        self._bus.told_by(self._tell)

    # Each puts back what one step of attach has done, if it was done.

    def _close_stepper(self) -> None:
        if self._stepper is not None:
            self._stepper.close()

    def _unhook(self) -> None:
        for handles in (self._budget_handles, self._handles, self._cast_handles):
            while handles:
                handles.pop().remove()

    def _unmake(self) -> None:
        """What ``detach`` has not done: an attach that failed knows the optimizer it was given alone."""
        self._make_plain(() if self._optimizer is None else (self._optimizer,))

    def _make_plain(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Full parameters, gradients and optimizer states; of units that are plain already, nothing.  Collective."""
        if self._store is not None:
            self._store.unwind()
        with loose_references(self.model):
            for unit in self._units:
                plain_unit(unit, optimizers, narrow=self.policy.optimizer.rounding == "stochastic")

    def _shut_store(self) -> None:
        if self._store is not None:
            self._store.shut()

    def _tell(self) -> None:
        if self._runtime.saved.partition is not None:
            self._runtime.saved.partition.tell()
        tell(self._live("observe", (), None), self.policy, self._store, self._optimizers.here())
        if self._pool.arena is not None:
            self._pool.arena.tell()

    def _keep_activations(self) -> None:
        """What autograd saves stays, goes to its tier or is computed again, as the policy says."""
        saved, arena = self._runtime.saved, self._pool.arena
        saved.stash = open_stash(self.policy, self._store, self._bus, saved)
        saved.residual.follow(self.policy.activation, self._comm.tp.axis.world, self.model.buffers)
        owners = Owners(partial(buffers_of, self.model), saved.holds)
        saved.partition = open_partition(self.policy, self._comm, saved.stash, self._bus, owners)
        again = recomputed(self.model, self._units) if self.policy.activation.checkpoint == "unit" else {}
        saved.inputs = open_inputs(self.policy, arena, self._bus, len(again))
        self._runtime.recompute = Recompute(again, saved) if again else None

    def _step_over_tiers(self) -> None:
        if self._store is not None:
            self._stepper = open_stepper(self.policy, self._store, self._bus, self._units, self._runtime, self._rounding)

    def _build(self, materializer: Materializer) -> int | None:
        """Shard the model; returns the bytes of gathered units that may stay between forward and backward."""
        groups = find_units(self.model, self.policy)
        check_same_model(groups, self._comm.stage)
        if self.policy.tiered:
            self._store = open_store(self.policy, materializer.device, groups, self._table, self._comm, self._bus)
            self._ground = replace(self._ground, store=self._store)
        device = materializer.device
        plan = partial(planned, self.model, groups, self._ground, device)
        spare = self._spare(plan, device)
        with all_or_none(self._comm.stage, "attach"):
            scratch = scratch_for(groups, self._ground, device)
            self._pool.arena = open_arena(self.policy, device, self._bus, plan)
        with loose_references(self.model):
            for number, group in enumerate(groups):
                self._units.append(Unit(group.name, number, group.entries))
                build_unit(self.model, group, self._units[-1], self._ground, materializer, scratch)
                if self._optimizer is not None:
                    shard_states(self._units[-1], self._optimizer, self._ground)
        materializer.buffers(self._comm)
        self._charted = chart(self.model, self._units, self.policy)
        with all_or_none(self._comm.stage, "attach"):
            self._size_pool(spare)
        return spare

    def _spare(self, plan: Callable[[], list[Unit]], device: torch.device) -> int | None:
        """Ask the device's budget before anything is allocated, for units that are not there yet."""
        if not self._device_budget.open(self.policy, device):
            return None
        units = plan()
        try:
            return self._device_budget.room(units, () if self._optimizer is None else (self._optimizer,))
        finally:
            forget_plan(units)

    def _keep_within(self, spare: int | None) -> None:
        """So many bytes of gathered units may stay between forward and backward, from now on."""
        self._size_pool(spare)
        self._runtime.paths.choices = replace(self._runtime.paths.choices, budget=spare)

    def _size_pool(self, spare: int | None) -> None:
        """Keep as many idle buffers as the schedule has under way at once, or reserve memory for them."""
        flats = [flat for unit in self._units for flat in unit.flats]
        self._pool.paged = any(flat.kind.tiers.parameter is Tier.DISK for flat in flats)
        sizes = sorted((f.layout.padded * max(f.kind.compute.itemsize, f.kind.reduce.itemsize) for f in flats), reverse=True)
        sizes = [min(size, self._pool.bound) for size in sizes]
        reserve_rest(self._pool.arena, self.policy, self._units, spare)
        self._pool.idle_nbytes = sum(sizes[: 2 + self.policy.schedule.prefetch])

    def _wire(self) -> None:
        for unit in self._units:
            for flat in unit.flats:
                flat.node, flat.home.watch = self._node if flat.kind.trainable else None, self._scaling

    def _relay(self) -> None:
        """Follow parameters that were frozen or unfrozen since the last step."""
        self._lay_out(self._optimizers.agreed("lay out"))

    def _lay_out(self, optimizers: Sequence[torch.optim.Optimizer], before: Ground | None = None) -> None:
        self._runtime.reducer.flush()
        try:
            for unit in self._units:
                if relay_unit(unit, self._ground, optimizers, self.model, before=before) and self._stepper is not None:
                    for optimizer in optimizers:
                        for flat in unit.flats:
                            self._stepper.adopt(optimizer, flat)
        finally:
            self._wire()
            self._runtime.take(self._units)

    def apply(self, policy: Policy | str | Path | dict[str, Any]) -> None:
        """Go on under another policy: states move between tiers, partitions change, nothing restarts.  Collective.

        Call it between steps.  [units] and [comm] stay as they were, and so does the scratch file once there is one.
        Raises:
            PolicyError: the policy cannot be read, differs between ranks, or changes what cannot change.
            AttachError: a rule splits a module's parameters over dtypes; nothing has changed.
            BudgetError, TierError: a tier cannot take what should move there; what has moved stays moved, all of it usable.
        """
        self._check_attached("apply")
        with all_or_none(self._comm.stage, "apply"):
            if policy is None:
                raise PolicyError("apply: expected a path, a mapping or a Policy, found None; name what shall change")
            chosen = Policy.of(policy)
        problem = disagreement(self._comm.stage, {"policy": policy_facts(chosen)[1]})
        if problem:
            raise PolicyError(problem)
        check_change(self.policy, chosen, self._store)
        check_scaled(self.model, chosen)
        check_axis(chosen, self._comm.names)
        charted = chart(self.model, self._units, chosen)
        self._runtime.settle()
        optimizers = self._optimizers.with_ranges("apply")
        table, device = Table.of(chosen.table()), self._units[0].flats[0].kind.device
        if chosen.tiered or self._store is not None:
            self._store = change_store(self._store, chosen, device, self._units, table, self._comm, self._bus)
        self.policy, self._table = chosen, table
        self._rounding.seed = chosen.optimizer.seed
        before, self._ground = self._ground, replace(self._ground, policy=chosen, table=self._table, store=self._store)
        self._close_stepper()
        self._pool.clear()
        self._pool.arena = None
        try:
            with all_or_none(self._comm.stage, "apply"):
                self._step_over_tiers()
                plan = partial(planned, self.model, groups_of(self._units), self._ground, device)
                self._pool.arena = open_arena(chosen, device, self._bus, plan)
            self._lay_out(optimizers, before)
        finally:
            self._cast_as(charted)
            self._scaling.change(chosen.precision)
            self._runtime.reducer.change(most=chosen.schedule.max_reductions, unreduced=self._table.accumulates_unreduced)
            self._keep_activations()
            self._size_pool(0)
            # Nothing is kept between forward and backward until the budget is known to allow it.
            self._runtime.paths.choices = Choices(chosen.schedule.prefetch, chosen.schedule.reshard_after_forward, 0)
        bounded = self._device_budget.open(chosen, device)
        self._keep_within(self._device_budget.room(self._units) if bounded else None)

    def _cast_as(self, charted: Map) -> None:
        """Cast where and to what another policy says."""
        while self._cast_handles:
            self._cast_handles.pop().remove()
        self._casts.change(casts_of(self.policy.precision, charted.outside))
        self._cast_handles.extend(install_casts(charted.islands))

    def detach(self) -> nn.Module:
        """Restore the plain model: full parameters, gradients and optimizer states, no hook left.  Collective.

        Raises:
            AttachError: it was detached already.
            TierError: a tier cannot be read; what is plain stays plain, and detach may be called again.
        """
        self._check_attached("detach")
        self._runtime.settle()
        self._runtime.reducer.flush()
        optimizers = self._optimizers.with_ranges("detach")
        self._members.barred = "forward: expected a detach that has ended, found one that failed half way. Call detach() again."
        self._make_plain(optimizers)
        self._comm.stage.all_reduce(Call(CONTROL, "detach", "all units"), torch.zeros(1), "sum")
        undo, self._undo = self._undo, None
        assert undo is not None
        undo.close()
        self._runtime.saved.part()
        self._bus.counter("communication on host", "message rings", 0)
        return self.model

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Keep every unit gathered inside the block: generation, evaluation in many short forwards.  Collective."""
        self._check_attached("resident")
        with self._runtime.resident():
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate.  Stages 0 and 1 defer the reduction to the first backward outside; where the
        policy partitions gradients (stages 2 and 3) each backward still reduces into the shards, as memory demands;
        ``accumulate`` never does."""
        self._check_attached("no_sync")
        reducer = self._runtime.reducer
        self._runtime.settle()
        before, reducer.sync = reducer.sync, False
        try:
            yield
        finally:
            self._runtime.settle()
            reducer.sync = before

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside add up unreduced on this rank, at every stage; one reduction follows.

        It comes with the first read of a ``.grad`` outside a backward, the step, or the end of the block: every data rank
        must come to the same one.  A block left by an exception reduces nothing until then.  In a ``schedule.step`` of
        ``torch.distributed.pipelining`` this happens by itself.  Holds the whole gradient of the model in the reduce dtype.
        Raises:
            PolicyError: the policy updates in backward (``[optimizer] overlap``).
        """
        self._check_attached("accumulate")
        with self._runtime.accumulating():
            yield

    def memory(self, *, heads: int | None = None) -> memory.MemoryReport:
        """Bytes this rank holds, what x tier, from the storages that exist, beside the formula.

        Activations are counted from the first call on.  ``heads``: of the attention, where the model's modules do not say.
        """
        optimizers = self._optimizers.here()
        residual = self._runtime.saved.residual.ask(heads)
        return memory.report(self._units, self._runtime.reducer, self._comm, self._table, optimizers, residual)

    def observe(self, observer: Observer) -> Observation:
        """Send the runtime's events to ``observer`` until the returned handle is closed.

        An observer with a ``start`` and a ``close``, such as ``zprof.Recorder``, is started here and closed with the handle.
        """
        self._check_attached("observe")
        if not callable(getattr(observer, "on_event", None)):
            raise AttachError(
                f"observe: expected an observer with a method on_event(event), found {type(observer).__name__}. Pass a "
                "Recorder, or an object of your own that has one."
            )
        return Observation(self._bus, observer)

    def describe(self) -> str:
        """A table: unit, parameters, numel, padding, placement; after a step also what the plan moves."""
        return describe(self.model, self._units, self.policy, self._comm, self.payload(), self._scaling)

    @property
    def loss_scale(self) -> float | None:
        """What gradients are scaled by inside the model now; None where [precision] loss_scale is unset."""
        return self._scaling.scale.value if self._scaling.on else None

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """The latest steps (64 at most, oldest first) whose gradients were not finite, under a loss scale or a GradScaler."""
        return self._scaling.overflows.latest

    def payload(self) -> int | None:
        """Bytes of gathers and reductions one training step moves by the plan (full payloads); None before a first step."""
        gathers = self._runtime.paths.gathers()
        if gathers is None:
            return None
        moved = sum(flat.moved_nbytes for number in gathers for flat in self._units[number].flats)
        cut = self._runtime.saved.partition
        return moved + self._runtime.reducer.payload() + (cut.payload if cut is not None else 0)

    @property
    def rank(self) -> int:
        return int(self._comm.world.axis.ranks[self._comm.world.axis.rank])
