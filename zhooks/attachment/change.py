"""What an attachment changes of a living model: its policy, its mesh, and units with parameters that were frozen.

``Attachment`` is one of these.  It finds out whether the change is possible before it makes it; it never moves a value itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from offload.errors import AttachError, CapabilityError, DivergenceError, PolicyError
from offload.events import Bus
from offload.policy import Policy
from zhooks.activation import check_axis
from zhooks.attachment.spans import spanned
from zhooks.attachment.watch import Watch
from zhooks.build import BuildContext, Tiers, relayout_units
from zhooks.checkpoint import check_owned, own_anew
from zhooks.comm import Comm, ControlPlane, another_mesh, close_unused, policy_facts, rearranged
from zhooks.compiled import uncompiled
from zhooks.layout import PP, TP, Ignored, Mesh, Table, UnitPlan
from zhooks.optim import Optimizers, Rounding, Steps
from zhooks.plan import (
    DeviceBudget,
    Headroom,
    Layouts,
    check_change,
    check_ignored,
    check_resilience,
    check_scaled,
    rest_reserve,
    shards_reserve,
)
from zhooks.report import NonFinite, warn_of_unmatched
from zhooks.run import Casts, Choices, Map, Runtime, chart
from zhooks.unit import Links, Pool, Unit


@dataclass(frozen=True, slots=True)
class _Before:
    """What an attachment stands on before a change, which goes back to it where it fails."""

    policy: Policy
    table: Table
    why: str
    seed: int
    comm: Comm
    tiers: Tiers
    plans: list[UnitPlan]


class Changeable:
    """The verbs of an attachment that put a living model under another policy, or on another mesh."""

    model: nn.Module
    policy: Policy
    _units: list[Unit]
    _runtime: Runtime
    _comm: Comm
    _bus: Bus
    _pool: Pool
    _table: Table
    _device: torch.device
    _tiers: Tiers
    _rounding: Rounding
    _optimizers: Optimizers
    _steps: Steps
    _nonfinite: NonFinite
    _device_budget: DeviceBudget
    _casts: Casts
    _ignored: Ignored
    _watches: list[Watch]
    _why: str
    _torn: bool

    def _check_attached(self, verb: str) -> None:
        """Raise AttachError once the model is detached."""
        raise NotImplementedError

    def _check_at_rest(self, verb: str) -> None:
        """As ``Stateful``."""
        raise NotImplementedError

    def _finish_saving(self, verb: str) -> None:
        """As ``Stateful``."""
        raise NotImplementedError

    def _context(self, comm: Comm | None = None, tiers: Tiers | None = None) -> BuildContext:
        """What flats are built on, now or over another mesh and other tiers."""
        comm, tiers = comm or self._comm, tiers or self._tiers
        runtime, beside = self._runtime, {TP: comm.tp, PP: comm.pp}
        pretrained = callable(getattr(uncompiled(self.model), "save_pretrained", None))
        links = Links(self._bus, tiers.store, beside, runtime, runtime.node, runtime.scaling, pretrained)
        return BuildContext(comm, self._pool, links)

    def _keep_within(self, spare: int | None) -> None:
        """So many bytes of gathered units may stay between forward and backward, from now on."""
        self._size_pool(spare)
        self._runtime.paths.choices = replace(self._runtime.paths.choices, budget=spare)

    def _size_pool(self, spare: int | None) -> None:
        """Keep as many idle buffers as the schedule has under way at once, or reserve memory for them."""
        self._pool.keep(rest_reserve(self.policy, self._device, self._plans(), spare), self._device)

    def _plans(self) -> list[UnitPlan]:
        """How units are laid out now."""
        return [unit.plan for unit in self._units]

    def _follow_freezes(self) -> None:
        """Lay parameters out anew that were frozen or unfrozen since the last step.  Collective."""
        now = self._plans()
        plans = Layouts.of(self.model, self.policy, self._comm, self._device).following(now)
        # What was frozen may be unfrozen again.
        if any(plan is not before for plan, before in zip(plans, now, strict=True)):
            spare = self._device_budget.lay_out(plans)
            # As in `apply`: what stays gathered goes by the new layout alone.
            self._keep_within(0)
            self._lay_out(self._units, plans, self._optimizers.agreed("lay out"))
            self._keep_within(spare)

    def _lay_out(
        self,
        units: Sequence[Unit],
        plans: Sequence[UnitPlan],
        optimizers: Sequence[torch.optim.Optimizer],
        before: BuildContext | None = None,
    ) -> None:
        """``before``: what units are built on that have not moved yet; ``units``: all, in the order in which they do."""
        self._runtime.reducer.reduce_owed()
        adopt = partial(self._tiers.adopt, optimizers)
        try:
            relayout_units(self.model, units, plans, self._context(), optimizers, adopt, before)
        finally:
            self._runtime.take(self._units)

    def apply(self, policy: Policy | str | Path | dict[str, Any] | None = None, *, mesh: DeviceMesh | None = None) -> None:
        """Continue under another policy, or on another mesh, without a restart.  Collective.

        Call it between steps.  States move between tiers, and stage and precision may change; ``[units]`` and ``[comm]`` may
        not, nor ``[disk]`` and ``[host]`` once something is stored there.

        Args:
            policy: a complete policy: keys that are left out get their defaults.  None keeps the current one.
            mesh: the same ranks, arranged differently on ``replicate`` and ``shard``; None keeps the current mesh.  Collective
                over the process group, and waits for a background save.
        Raises:
            PolicyError: the policy cannot be read, differs between ranks, or changes what may not change.
            AttachError: a rule splits a module's parameters over dtypes, or the mesh differs between ranks, does not cover the
                process group, or has another ``tp`` or ``pp``; nothing has changed.
            BudgetError: a tier cannot hold what would move there; nothing has changed on any rank.
            TierError: a tier failed; everything was moved back on every rank.
            CheckpointError: a background save failed, or an optimizer's states cannot be sent; nothing has changed.
        """
        self._check_attached("apply")
        self._change(policy, mesh)
        for watch in self._watches:
            watch.applied()

    @spanned("apply")
    def _change(self, policy: Policy | str | Path | dict[str, Any] | None, mesh: DeviceMesh | None = None) -> None:
        """As ``apply``."""
        with nullcontext() if mesh is None else ControlPlane(self._comm.pp, "apply").all_or_none():
            chosen, axes, charted = self._possible(policy, mesh)
        with self._runtime.laying_out(), self._steps.changing("apply"):
            self._check_at_rest("apply")
            if axes is None:
                self._apply(chosen, charted)
            else:
                self._finish_saving("apply")
                self._move(chosen, charted, axes)

    def _possible(
        self, policy: Policy | str | Path | dict[str, Any] | None, mesh: DeviceMesh | None
    ) -> tuple[Policy, Mesh | None, Map]:
        """What is asked for, the same on every rank, and found to be possible here.  Collective."""
        stage = self._comm.stage
        with ControlPlane(stage, "apply").all_or_none():
            if policy is None and mesh is None:
                raise PolicyError("apply expected a path, a mapping or a Policy, found None; pass the new policy")
            if mesh is not None and self._runtime.reducer.replicas.jobs:
                raise CapabilityError(
                    "reshard expected a model that only this job trains, found one of several replicas, which must all be "
                    "sharded the same way. Call shutdown() of the Replicas first."
                )
            chosen = self.policy if policy is None else Policy.of(policy)
            axes = None if mesh is None else another_mesh(self._comm, mesh)
        problem = ControlPlane(stage, "apply").differ({"mesh": {"axes": "as they are" if axes is None else axes.arrangement}})
        if problem:
            raise AttachError(problem)
        problem = ControlPlane(stage, "apply").differ({"policy": policy_facts(chosen)[1]})
        if problem:
            raise PolicyError(problem)
        check_change(self.policy, chosen, self._tiers.fixed)
        check_scaled(self.model, chosen, self._ignored)
        check_ignored(self.model, self._ignored, chosen)
        names = self._comm.names if axes is None else axes.names
        check_axis(chosen, names)
        check_resilience(chosen, names)
        return chosen, axes, chart(self.model, self._plans(), chosen)

    def _move(self, chosen: Policy, charted: Map, axes: Mesh) -> None:
        """Take everything over to another mesh as well.  Collective over the process group."""
        before = replace(self._comm)
        moved = rearranged(before, axes, chosen, self._device)
        try:
            self._apply(chosen, charted, moved)
        except BaseException:
            close_unused(moved, self._comm)
            raise
        close_unused(before, self._comm)
        self._bus.counter("communication on host", "message rings", self._comm.nbytes)

    def _apply(self, chosen: Policy, charted: Map, moved: Comm | None = None) -> None:
        """Take everything over to a policy that was found possible, and to the mesh of ``moved``, or nothing.  Collective."""
        optimizers = self._optimizers.with_ranges("apply")
        comm, seed = replace(self._comm), self._rounding.seed
        before = _Before(self.policy, self._table, self._why, seed, comm, self._tiers, self._plans())
        plans = Layouts.of(self.model, chosen, moved or comm, self._device).anew(before.plans)
        tiers = self._admitted(chosen, plans, optimizers, moved)
        turned: list[torch.optim.Optimizer] = []
        try:
            headroom = self._take_over(chosen, plans, optimizers, before, tiers, moved, turned)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, DivergenceError):
                self._go_back(before, optimizers, turned)
            else:
                # Ranks do not meet any more, so that nothing can be moved back.
                if moved is not None:
                    self._tear()
                self._follow(chosen, charted)
            raise
        self._follow(chosen, charted)
        self._device_budget.change(chosen, headroom)
        self._keep_within(headroom.spare)

    def _admitted(
        self, chosen: Policy, plans: Sequence[UnitPlan], optimizers: Sequence[torch.optim.Optimizer], moved: Comm | None
    ) -> Tiers:
        """The tiers under another policy, whose budgets hold what is planned.  Collective."""
        with ExitStack() as undo:
            with self._every_stage(moved):
                if moved is not None:
                    with ControlPlane(self._comm.stage, "apply").all_or_none():
                        for optimizer in optimizers:
                            check_owned(optimizer, self._optimizers.owners)
                    self._device_budget.admit(chosen, self._device, plans, moved, optimizers)
                tiers = self._tiers.change(chosen, self._device, plans, moved or self._comm, self._bus)
                undo.callback(tiers.shut_beside, self._tiers)
            undo.pop_all()
        return tiers

    def _every_stage(self, moved: Comm | None) -> AbstractContextManager[None]:
        """Where the mesh changes, what fails inside in one stage of a pipeline fails in all.  Collective then."""
        return nullcontext() if moved is None else ControlPlane(self._comm.pp, "apply").all_or_none()

    def _take_over(
        self,
        chosen: Policy,
        plans: Sequence[UnitPlan],
        optimizers: Sequence[torch.optim.Optimizer],
        before: _Before,
        tiers: Tiers,
        moved: Comm | None,
        turned: list[torch.optim.Optimizer],
    ) -> Headroom:
        """Move every value; returns what the device's budget leaves then.  Collective.

        ``turned`` takes the optimizers whose parameters have other owners."""
        self._tiers, self.policy, self._table, self._why = tiers, chosen, Table.of(chosen.table()), ""
        self._rounding.seed = chosen.optimizer.seed
        # Over the ranks that they were added up for.
        self._runtime.reducer.reduce_owed()
        before.tiers.end_steps()
        tiers.bound()
        self._pool.clear()
        self._comm.become(moved or before.comm)
        with self._every_stage(moved):
            with ControlPlane(self._comm.stage, "apply").all_or_none():
                self._step()
                self._pool.keep(shards_reserve(chosen, self._device, plans), self._device)
            self._lay_out(self._units, plans, optimizers, self._context(before.comm, before.tiers))
            for optimizer in optimizers:
                own_anew(optimizer, self._optimizers.owners, before.comm.shard, self._comm.shard)
                turned.append(optimizer)
            with ControlPlane(self._comm.stage, "apply").all_or_none():
                self._adopt(optimizers)
            return self._device_budget.admit(chosen, self._device, plans, self._comm, optimizers)

    def _follow(self, chosen: Policy, charted: Map) -> None:
        """The parts of the runtime are under another policy."""
        self._casts.open(chosen.precision, charted)
        self._runtime.scaling.change(chosen.precision)
        self._nonfinite.open(chosen)
        self._runtime.reducer.change(
            most=chosen.schedule.most_reductions,
            unreduced=self._table.accumulates_unreduced,
            mean=chosen.gradient.reduce == "mean",
        )
        self._runtime.saved.follow(chosen, self._units, self._tiers.store, self._pool.arena)
        warn_of_unmatched(self.model, self._units, chosen, self._comm)
        self._size_pool(0)
        # Nothing is kept between forward and backward until the budget is known to allow it.
        schedule = chosen.schedule
        self._runtime.paths.choices = Choices(schedule.prefetch, schedule.reshard_after_forward, 0, schedule.uneven)

    def _step(self) -> None:
        self._tiers.step(self.policy, self._bus, self._units, self._runtime, self._rounding, self._optimizers)

    def _adopt(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for unit in self._units:
            for flat in unit.flats:
                self._tiers.adopt(optimizers, flat)

    def _tear(self) -> None:
        """Part of the model is where another policy has it, and nothing can be done about that."""
        self._torn = True
        self._runtime.members.barred = (
            "forward expected a model under one policy on one mesh, found one whose change to another failed halfway. "
            "Load the last checkpoint in new processes."
        )

    def _go_back(
        self, before: _Before, optimizers: Sequence[torch.optim.Optimizer], turned: Sequence[torch.optim.Optimizer]
    ) -> None:
        """A change failed on every rank: what has moved moves back.  Collective."""
        tiers, after = self._tiers, replace(self._comm)
        # Until all of it is back: where ranks do not meet any more it stays so.
        self._tear()
        for ended in (tiers, before.tiers):
            ended.end_steps()
        self._tiers, self.policy, self._table, self._why = before.tiers, before.policy, before.table, before.why
        self._rounding.seed = before.seed
        self._pool.clear()
        self._comm.become(before.comm)
        self._tiers.bound()
        # Backwards, so that no tier holds more on the way than it has held on the way there.
        units, plans = self._units[::-1], before.plans[::-1]
        with self._context().unlimited():
            with ControlPlane(self._comm.stage, "apply").all_or_none():
                self._step()
                self._pool.keep(shards_reserve(self.policy, self._device, plans), self._device)
            self._lay_out(units, plans, optimizers, self._context(after, tiers))
            for optimizer in turned:
                own_anew(optimizer, self._optimizers.owners, after.shard, self._comm.shard)
            with ControlPlane(self._comm.stage, "apply").all_or_none():
                self._adopt(optimizers)
        tiers.shut_beside(self._tiers)
        self._runtime.saved.follow(self.policy, self._units, self._tiers.store, self._pool.arena)
        self._size_pool(self._runtime.paths.choices.budget)
        self._torn, self._runtime.members.barred = False, None
