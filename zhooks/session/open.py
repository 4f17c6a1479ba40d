"""A session is opened: what a plan says is built, and modules, optimizers and observers are followed; and it is closed.

The only place where the parts of the core are put together and taken apart.  Each that is opened puts its end on one stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offload.device import bus_of
from offload.virtual import NAME
from zhooks.build import build_units, open_tiers, restore_units
from zhooks.checkpoint import StockFolders, StockState
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.compiled import keep_outside_graphs
from zhooks.layout import flats_of
from zhooks.optim import Closures, Optimizers, Owners, Rounding, Step, Stepper, StepPipeline, Steps, watch_steps
from zhooks.plan import Plan, warn_of_unmatched
from zhooks.run import Casts, Runtime, install, remove
from zhooks.session.nonfinite import NonFinite
from zhooks.session.plug_in import WATCHES, Chosen, needed
from zhooks.session.session import Session
from zhooks.session.state import finish_saving
from zhooks.session.steps import Budgets, admit_step, count_step, open_stepper, whole_updater
from zhooks.tensor import Registries
from zhooks.unit import Pool, Unit

__all__ = ["abandon", "close_session", "open_session"]


def open_session(plan: Plan, comm: Comm, undo: ExitStack, choice: Chosen | None) -> Session:
    """Build what is planned, and train it from now on.  Collective.

    Args:
        undo: closes what was opened before; the session takes it over once all is done.
        choice: of the policy, where it was left to zhooks.
    """
    request, ranks = plan.request, ControlPlane(comm.stage, "attach")
    model, policy, device, ignored, bus = request.model, request.policy, request.device, request.ignored, bus_of(request.device)
    units: list[Unit] = []
    with ranks.all_or_none():
        # None of these has an effect before it is opened.  What they call is called in passes and steps.
        pool, steps = Pool(policy.comm.buffer, bus), Steps()
        rounding = Rounding(policy.optimizer.seed, stochastic=policy.optimizer.rounding == "stochastic")
        runtime = Runtime(
            model, policy, comm, pool, bus, spare=plan.headroom.spare, ignored=ignored,
            follow_freezes=lambda: _follow_freezes(session), training_begins=lambda: _training_begins(session),
        )  # fmt: skip
        stock = StockState(model, units, comm, runtime.conclude, ignored)
        owners = Owners(lambda: flats_of(units), comm, admit=whole_updater)
        optimizers = Optimizers(partial(ignored.parameters, model), comm.stage, owners, stock.check_autocast, stock.watch)
        nonfinite = NonFinite(comm, units, runtime, steps, virtual=device.type == NAME)
        reducer = runtime.reducer
        closures = Closures(comm.world, lambda: session.policy.gradient.reduce == "mean", lambda: reducer.out_of_batches)
        # The first of them comes before what hides parameters from a step that is skipped.
        before: list[Callable[[Step], None]] = [
            lambda _: _reduce_held(runtime), optimizers.before, lambda step: admit_step(session, step),
            lambda step: step.hidden.extend(runtime.scaling.before_step(step.optimizer, step.closure)),
            nonfinite.before, steps.before, lambda step: _stepper(session).before(step), closures.before,
        ]  # fmt: skip
        after: list[Callable[[Step], None]] = [lambda step: count_step(session, step), steps.after]
        pipeline, casts, budgets = StepPipeline(runtime.scaling.is_mine, before, after), Casts(runtime.scaling), Budgets()
        budgets.begin(plan.headroom)
    session = Session(
        model=model, known=request.known, ignored=ignored, device=device,
        policy=policy, tiers=open_tiers(policy, device, plan.tiers, comm, bus), why=request.chosen,
        comm=comm, bus=bus, pool=pool, rounding=rounding, runtime=runtime, units=units, steps=steps,
        casts=casts, optimizers=optimizers, budgets=budgets, nonfinite=nonfinite, pipeline=pipeline,
    )  # fmt: skip
    # `apply` may open others, and an attach that fails knows no optimizer but the one it was given.
    undo.callback(lambda: session.tiers.shut())
    undo.callback(pool.clear)
    undo.callback(_make_plain, session, request.known)
    undo.callback(runtime.close)
    with ranks.all_or_none():
        pool.keep(plan.reserve, device)
    build_units(plan, session.build_context(), units)
    with ranks.all_or_none():
        session.size_pool(plan.headroom.spare)
        _listen(session, plan, stock, choice, undo)
    session.undo = undo.pop_all()
    return session


def _listen(session: Session, plan: Plan, stock: StockState, choice: Chosen | None, undo: ExitStack) -> None:
    """Follow modules, optimizers and observers from now on."""
    runtime, policy, comm = session.runtime, session.policy, session.comm

    def begin(listener: Any, *given: Any) -> None:
        undo.callback(listener.close)
        listener.open(*given)

    runtime.take(session.units)
    runtime.saved.follow(policy, session.units, session.tiers.store, session.pool.arena)
    warn_of_unmatched(session.model, session.units, policy, comm)
    keep_outside_graphs()
    undo.callback(remove, install(session.model, session.units, runtime, session.casts))
    begin(session.casts, policy.precision, plan.islands)
    begin(runtime.members)
    begin(Registries())
    begin(stock)
    begin(StockFolders(session.model))
    begin(session.optimizers, session.known)
    begin(runtime.scaling)
    begin(session.nonfinite, policy)
    session.watches.extend(make(session) for make in WATCHES)
    undo.callback(session.end_steps)
    session.stepper = open_stepper(session)
    undo.callback(watch_steps(session.pipeline))
    undo.callback(comm.failure.ask, None)
    comm.failure.ask(session.progress)
    session.bus.stated_by(session.state_held)
    # Stages of a pipeline would wait for each other at other moments.
    if choice is not None and not comm.pipelined:
        session.watches.append(choice.review(session))
    for watch in session.watches:
        undo.callback(watch.close)


def _stepper(session: Session) -> Stepper:
    assert session.stepper is not None
    return session.stepper


def _reduce_held(runtime: Runtime) -> None:
    """At a step, gradients are those of all backward passes so far: what ``no_sync`` holds back is reduced first.

    DistributedDataParallel would step with each rank's own gradients, so that its ranks train apart.
    """
    if runtime.reducer.held:
        runtime.reduce_held()


def _training_begins(session: Session) -> None:
    """A training pass begins, on every rank.  Collective."""
    session.check_whole("forward")
    if session.comm.failure.verdict is None:
        session.steps.go_on()
    session.steps.training_begins()
    for watch in session.watches:
        watch.training_begins(session.policy)


def _follow_freezes(session: Session) -> None:
    """Parameters were frozen or unfrozen since the last step.  Collective."""
    with needed("live", "Freezing parameters in mid-run"):
        from zhooks.live import follow_freezes
    follow_freezes(session)


def _make_plain(session: Session, optimizers: Sequence[Optimizer]) -> None:
    """Full parameters, gradients and optimizer states; of units that are plain already, nothing.  Collective."""
    session.tiers.unwind()
    narrow = session.policy.optimizer.rounding == "stochastic"
    restore_units(session.model, session.units, optimizers, narrow=narrow)


def close_session(session: Session) -> nn.Module:
    """See ``Attachment.detach``.  Collective."""
    with session.bus.verb("detach"):
        session.attached("detach")
        finish_saving(session, "detach")
        runtime = session.runtime
        with runtime.laying_out():
            session.concluded("detach")
            runtime.reducer.reduce_owed()
            runtime.reducer.read_exchange()
            optimizers = session.optimizers.with_ranges("detach")
            runtime.members.barred = (
                "forward expected a completed detach(), found one that failed halfway. Call detach() again."
            )
            _make_plain(session, optimizers)
        everybody = torch.zeros(1, dtype=torch.float32, device="cpu")
        session.comm.stage.all_reduce(Call(CONTROL, "detach", "all units"), everybody, "sum")
        _close(session)
        session.bus.counter("communication on host", "message rings", 0)
        return session.model


def abandon(session: Session) -> None:
    """Close what a session opened, and give nothing back: its model is of no further use.

    A simulation's model has no values, and gathering all of them takes as long as a step.
    """
    for flat in flats_of(session.units):
        flat.detach()
    _close(session)


def _close(session: Session) -> None:
    undo, session.undo = session.undo, None
    assert undo is not None
    undo.close()
