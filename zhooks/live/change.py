"""Another policy or mesh for a living model, and units whose parameters were frozen.

What is asked for is found possible on every rank before anything changes; what fails halfway is taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from offload.errors import AttachError, CapabilityError, DivergenceError, PolicyError
from offload.policy import Policy
from offload.text import shown
from zhooks.activation import check_axis
from zhooks.build import BuildContext, Tiers
from zhooks.checkpoint import check_owned, own_anew
from zhooks.comm import CHANNELS_OF, Alone, Comm, ControlPlane, Transport, meet, open_axes, policy_facts
from zhooks.layout import Axis, Mesh, Table, UnitPlan, flats_of, resolve
from zhooks.live.relayout import relayout_units
from zhooks.plan import (
    Headroom,
    Layouts,
    check_change,
    check_ignored,
    check_resilience,
    check_scaled,
    shards_reserve,
    warn_of_unmatched,
)
from zhooks.run import Choices, Map, chart
from zhooks.session import Session, admit_change, admit_layout, adopt_states, finish_saving, open_stepper
from zhooks.unit import Unit

__all__ = ["apply", "follow_freezes", "go_over"]

Given = Policy | str | Path | dict[str, Any] | None


def follow_freezes(session: Session) -> None:
    """Lay parameters out anew that were frozen or unfrozen since the last step.  Collective."""
    now = session.plans()
    plans = Layouts.of(session.model, session.policy, session.comm, session.device).following(now)
    # What was frozen may be unfrozen again.
    if any(plan is not before for plan, before in zip(plans, now, strict=True)):
        spare = admit_layout(session, plans)
        # As in `apply`: what stays gathered goes by the new layout alone.
        session.keep_within(0)
        _lay_out(session, session.units, plans, session.optimizers.agreed("lay out"))
        session.keep_within(spare)


def apply(session: Session, policy: Given, mesh: DeviceMesh | None) -> None:
    """See ``Attachment.apply``.  Collective."""
    session.attached("apply")
    _change(session, policy, mesh)
    for watch in session.watches:
        watch.applied()


def go_over(session: Session, policy: Policy) -> str:
    """Go on under a policy that zhooks chose; "", or why it could not be, and everything is as it was.  Collective."""
    why = session.why
    try:
        _change(session, policy, None)
    except DivergenceError:
        raise
    except Exception as error:
        return str(error)
    finally:
        session.why = why
    return ""


def _change(session: Session, policy: Given, mesh: DeviceMesh | None) -> None:
    with session.bus.verb("apply"):
        with nullcontext() if mesh is None else ControlPlane(session.comm.pp, "apply").all_or_none():
            chosen, axes, islands = _possible(session, policy, mesh)
        with session.runtime.laying_out(), session.steps.changing("apply"):
            session.concluded("apply")
            if axes is None:
                _take_over(session, chosen, islands, None)
                return
            finish_saving(session, "apply")
            before = replace(session.comm)
            moved = _rearranged(before, axes, chosen, session.device)
            try:
                _take_over(session, chosen, islands, moved)
            except BaseException:
                _close_unused(moved, session.comm)
                raise
            _close_unused(before, session.comm)
            session.bus.counter("communication on host", "message rings", session.comm.nbytes)


def _possible(session: Session, policy: Given, mesh: DeviceMesh | None) -> tuple[Policy, Mesh | None, Map]:
    """What is asked for, the same on every rank, and found to be possible here.  Collective."""
    model, ranks = session.model, ControlPlane(session.comm.stage, "apply")
    with ranks.all_or_none():
        if policy is None and mesh is None:
            raise PolicyError("apply expected a path, a mapping or a Policy, found None; pass the new policy")
        if mesh is not None and session.runtime.reducer.replicas.jobs:
            raise CapabilityError(
                "reshard expected a model that only this job trains, found one of several replicas, which must all be "
                "sharded the same way. Call shutdown() of the Replicas first."
            )
        chosen = session.policy if policy is None else Policy.of(policy)
        axes = None if mesh is None else _another_mesh(session.comm, mesh)
    problem = ranks.differ({"mesh": {"axes": "as they are" if axes is None else axes.arrangement}})
    if problem:
        raise AttachError(problem)
    problem = ranks.differ({"policy": policy_facts(chosen)[1]})
    if problem:
        raise PolicyError(problem)
    check_change(session.policy, chosen, session.tiers.fixed)
    check_scaled(model, chosen, session.ignored)
    check_ignored(model, session.ignored, chosen)
    names = session.comm.names if axes is None else axes.names
    check_axis(chosen, names)
    check_resilience(chosen, names)
    return chosen, axes, chart(model, session.plans(), chosen)


def _take_over(session: Session, chosen: Policy, islands: Map, moved: Comm | None) -> None:
    """Take everything over to a policy that was found possible, and to the mesh of ``moved``, or nothing.  Collective."""
    optimizers, plans_before, seed = session.optimizers.with_ranges("apply"), session.plans(), session.rounding.seed
    before = replace(session, comm=replace(session.comm))
    plans = Layouts.of(session.model, chosen, moved or session.comm, session.device).anew(plans_before)
    tiers = _admitted(session, chosen, plans, optimizers, moved)
    owned: list[Optimizer] = []
    try:
        headroom = _move(session, before, chosen, tiers, moved, plans, optimizers, owned)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, DivergenceError):
            _go_back(session, before, seed, plans_before, optimizers, owned)
        else:
            # Ranks do not meet any more, so that nothing can be moved back.
            if moved is not None:
                _bar(session)
            _follow(session, islands)
        raise
    _follow(session, islands)
    session.budgets.begin(headroom)
    session.keep_within(headroom.spare)


def _admitted(
    session: Session, chosen: Policy, plans: Sequence[UnitPlan], optimizers: Sequence[Optimizer], moved: Comm | None
) -> Tiers:
    """The tiers under another policy, whose budgets hold what is planned.  Collective."""
    with ExitStack() as undo:
        with _every_stage(session, moved):
            if moved is not None:
                with ControlPlane(session.comm.stage, "apply").all_or_none():
                    for optimizer in optimizers:
                        check_owned(optimizer, session.optimizers.owners)
                admit_change(session, chosen, plans, moved, optimizers)
            tiers = session.tiers.change(chosen, session.device, plans, moved or session.comm, session.bus)
            undo.callback(tiers.shut_beside, session.tiers)
        undo.pop_all()
    return tiers


def _every_stage(session: Session, moved: Comm | None) -> AbstractContextManager[None]:
    """If the mesh changes, what fails inside in one stage of a pipeline fails in all.  Collective then."""
    return nullcontext() if moved is None else ControlPlane(session.comm.pp, "apply").all_or_none()


def _move(
    session: Session,
    before: Session,
    chosen: Policy,
    tiers: Tiers,
    moved: Comm | None,
    plans: Sequence[UnitPlan],
    optimizers: Sequence[Optimizer],
    owned: list[Optimizer],
) -> Headroom:
    """Move every value; returns what the device's budget leaves then.  Collective.

    Args:
        before: the session as it was.
        owned: takes the optimizers whose parameters have other owners.
    """
    session.tiers, session.policy, session.why, session.rounding.seed = tiers, chosen, "", chosen.optimizer.seed
    # Over the ranks that they were added up for.
    session.runtime.reducer.reduce_owed()
    before.end_steps()
    tiers.bound()
    session.pool.clear()
    session.comm.become(moved or before.comm)
    with _every_stage(session, moved):
        _lay_out_all(session, session.units, plans, before, optimizers, optimizers, owned)
        return admit_change(session, chosen, plans, session.comm, optimizers)


def _go_back(
    session: Session,
    before: Session,
    seed: int,
    plans: Sequence[UnitPlan],
    optimizers: Sequence[Optimizer],
    owned: Sequence[Optimizer],
) -> None:
    """A change failed on every rank: what has moved moves back.  Collective."""
    after = replace(session, comm=replace(session.comm))
    # Until all of it is back: if ranks do not meet any more, it stays so.
    _bar(session)
    after.end_steps()
    before.end_steps()
    session.tiers, session.policy, session.why, session.rounding.seed = before.tiers, before.policy, before.why, seed
    session.pool.clear()
    session.comm.become(before.comm)
    session.tiers.bound()
    with session.build_context().unlimited():
        # Backwards, so that no tier holds more on the way than it has held on the way there.
        _lay_out_all(session, session.units[::-1], plans[::-1], after, optimizers, owned, [])
    after.tiers.shut_beside(session.tiers)
    session.runtime.saved.follow(session.policy, session.units, session.tiers.store, session.pool.arena)
    session.size_pool(session.runtime.paths.choices.budget)
    session.half_moved, session.runtime.members.barred = False, None


def _lay_out_all(
    session: Session,
    units: Sequence[Unit],
    plans: Sequence[UnitPlan],
    before: Session,
    optimizers: Sequence[Optimizer],
    others: Sequence[Optimizer],
    owned: list[Optimizer],
) -> None:
    """Move units from where ``before`` has them, in this order, and the owners of what ``others`` update whole.  Collective."""
    ranks = ControlPlane(session.comm.stage, "apply")
    with ranks.all_or_none():
        session.stepper = open_stepper(session)
        session.pool.keep(shards_reserve(session.policy, session.device, plans), session.device)
    _lay_out(session, units, plans, optimizers, before.build_context())
    for optimizer in others:
        own_anew(optimizer, session.optimizers.owners, before.comm.shard, session.comm.shard)
        owned.append(optimizer)
    with ranks.all_or_none():
        for flat in flats_of(session.units):
            adopt_states(session, optimizers, flat)


def _lay_out(
    session: Session,
    units: Sequence[Unit],
    plans: Sequence[UnitPlan],
    optimizers: Sequence[Optimizer],
    before: BuildContext | None = None,
) -> None:
    """``before``: what units are built on that have not moved yet; ``units``: all, in the order in which they do."""
    session.runtime.reducer.reduce_owed()
    adopt = partial(adopt_states, session, optimizers)
    try:
        relayout_units(session.model, units, plans, session.build_context(), optimizers, adopt, before)
    finally:
        session.runtime.take(session.units)


def _follow(session: Session, islands: Map) -> None:
    """Passes, reductions and steps go by the current policy from now on."""
    policy, runtime = session.policy, session.runtime
    session.casts.open(policy.precision, islands)
    runtime.scaling.change(policy.precision)
    session.nonfinite.open(policy)
    runtime.reducer.change(
        most=policy.schedule.most_reductions,
        unreduced=Table.of(policy.table()).accumulates_unreduced,
        mean=policy.gradient.reduce == "mean",
    )
    runtime.saved.follow(policy, session.units, session.tiers.store, session.pool.arena)
    warn_of_unmatched(session.model, session.units, policy, session.comm)
    session.size_pool(0)
    # Nothing is kept between forward and backward until the budget is known to allow it.
    schedule = policy.schedule
    runtime.paths.choices = Choices(schedule.prefetch, schedule.reshard_after_forward, 0, schedule.uneven)


def _bar(session: Session) -> None:
    """Some units are where another policy has them, and nothing can be done about that."""
    session.half_moved = True
    session.runtime.members.barred = (
        "forward expected a model under one policy on one mesh, found one whose change to another failed halfway. "
        "Load the last checkpoint in new processes."
    )


# The transports over another mesh: what is missing is opened, the rest is kept.


def _another_mesh(comm: Comm, mesh: object) -> Mesh:
    """The axes of a mesh that an attachment over ``comm`` can be moved to.

    Raises:
        AttachError: it is no DeviceMesh over the whole process group, or divides the model itself otherwise.
    """
    if not isinstance(mesh, DeviceMesh):
        raise AttachError(f"mesh must be a DeviceMesh, found {shown(mesh)}. Build it with init_device_mesh.")
    axes = resolve(mesh)
    for before, after, what, instead in (
        (
            comm.tp.axis, axes.tp, "on its tp axis, because parameters are DTensors over these",
            "To change tp, save, build the model again under parallelize_module, attach and load",
        ),
        (
            comm.pp.axis, axes.pp, "on its pp or ep axis, because each has a part of the model",
            "To divide the model differently, save, build it again, attach and load",
        ),
        (
            comm.world.axis, axes.data, "on its replicate and shard axes together, in this order",
            "Build the mesh with init_device_mesh, or save, attach on this mesh and load",
        ),
    ):  # fmt: skip
        if before.ranks != after.ranks:
            raise AttachError(
                f"The mesh needs ranks {list(before.ranks)} {what}, found {list(after.ranks)}. {instead}."
            )
    if comm.averaged != axes.averaged:
        raise AttachError(
            f"The mesh needs losses of {comm.averaged} ranks to be averaged, as before, found {axes.averaged}: a pp axis "
            "cannot become an ep axis, or the reverse. Name the axes as in the mesh that was passed to attach."
        )
    return axes


def _rearranged(comm: Comm, mesh: Mesh, policy: Policy, device: torch.device) -> Comm:
    """The transports over ``mesh``, those of ``comm`` among them wherever the same ranks are on the same axis.  Collective over
    the process group, as ``open_comm``.

    A transport of the same ranks that has every channel of another axis serves that one too, as where both are opened at once.

    Raises:
        DivergenceError: a rank does not come in time.
    """
    # On every rank alike: an axis is the same only where its siblings are.
    kept = {_known(transport.axis): transport for transport in comm.distinct()}
    for axis in (mesh.shard, mesh.replicate):
        for transport in comm.distinct():
            has_channels = CHANNELS_OF[axis.name] <= set(transport.channels)
            if axis.world > 1 and has_channels and _known(transport.axis)[1:] == _known(axis)[1:]:
                kept[_known(axis)] = transport
    missing = [axis for axis in (mesh.shard, mesh.replicate) if axis.world > 1 and _known(axis) not in kept]
    # Where nobody lacks any, nobody meets: it is so on all ranks or on none.
    meeting = meet("apply", policy.comm.timeout_s) if missing else None
    if meeting is not None:
        meeting.agree("change of mesh")
    opened = open_axes([(axis, CHANNELS_OF[axis.name]) for axis in missing], policy, device, meeting, comm.failure)

    def over(axis: Axis) -> Transport:
        return Alone(axis) if axis.world == 1 else kept.get(_known(axis)) or opened[axis.ranks]

    # While values move over both.
    comm.failure.watch([*comm.distinct(), *opened.values()])
    return replace(comm, shard=over(mesh.shard), replicate=over(mesh.replicate), names=mesh.names)


def _known(axis: Axis) -> tuple[str, tuple[int, ...], frozenset[tuple[int, ...]]]:
    return axis.name, axis.ranks, frozenset(axis.siblings)


def _close_unused(comm: Comm, used: Comm) -> None:
    """Close the transports of ``comm`` that ``used`` does not have."""
    used.failure.watch(used.distinct())
    ours = {id(transport) for transport in used.distinct()}
    for transport in comm.distinct():
        if id(transport) not in ours:
            transport.close()
