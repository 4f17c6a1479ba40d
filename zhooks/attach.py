"""``attach``: the one line that turns a model into a ZeRO model, and the Attachment it returns.

The only composition root: here the policy, the mesh, the comm, the units, the reducer, the runtime and the hooks are put
together and taken apart.  It never works during a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from offload.device import bus_of
from offload.errors import AttachError, CapabilityError, DivergenceError
from offload.events import Observer
from offload.policy import Policy
from offload.virtual import NAME
from zhooks.attachment import (
    CHOOSERS,
    WATCHES,
    Changeable,
    Chosen,
    Controlled,
    Preemptible,
    Recovering,
    Replicated,
    Resumable,
    Running,
    Watched,
    spanned,
)
from zhooks.build import build_units, open_tiers, restore_units
from zhooks.checkpoint import StockFolders, StockState, remove_dead_jobs
from zhooks.comm import CONTROL, Call, Comm, ControlPlane, Progress, meet, open_comm
from zhooks.compiled import keep_outside_graphs
from zhooks.keywords import explained, explained_methods
from zhooks.optim import Closures, Optimizers, Owners, Rounding, Step, Stepper, StepPipeline, Steps, watch_steps
from zhooks.plan import DeviceBudget, Plan, Request, StateBudgets, ignored_here, look, read
from zhooks.report import (
    Calibrated,
    GradStatistics,
    MemoryReport,
    NonFinite,
    Observation,
    describe,
    memory_report,
    state_held,
    warn_of_unmatched,
)
from zhooks.run import Casts, Runtime, batches, install, remove
from zhooks.tensor import Overflow, Registries
from zhooks.unit import Pool, Unit

Batch = TypeVar("Batch")

_IN_PLACE = "attach changes the model in place, so keep using the model"


@explained
def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: Policy | str | Path | dict[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    init: Callable[[nn.Module], None] | None = None,
    sync: bool = True,
) -> Attachment:
    """Train ``model`` with sharded parameters, gradients and optimizer states in an unchanged training loop.  Collective.

    Args:
        model: any module, on the device it will run on, or built under ``torch.device("meta")``.
        optimizer: only needed if it already holds state, which is then sharded too.
        policy: a path to a TOML or JSON file, a dict, a ``Policy``, or None for stage 3 with everything on the device.  "auto"
            chooses the placement that moves the least among those that fit this machine, and reconsiders after three steps;
            ``describe()`` says which was chosen, and why.
        mesh: a DeviceMesh over the whole process group with an axis ``shard`` (or ``dp``) and optionally ``replicate``, ``tp``
            and ``pp``.  Parameters that ``parallelize_module`` turned into DTensors over ``tp`` are sharded slice by slice.
            None shards over all ranks; without a process group there is one rank.
        init: called with each module of a model on meta, to initialize that module's own parameters and buffers.
        sync: broadcast rank 0's parameters and buffers.  False checks by hash that the ranks are already equal.
    Returns:
        The attachment of this model; its ``detach()`` undoes everything.
    Raises:
        PolicyError: the policy cannot be read.
        AttachError: the model, optimizer or mesh cannot be attached; the model is unchanged.
        BudgetError: the policy does not fit a budget or the machine; nothing was allocated.
        CapabilityError: the machine or the installed torch lacks what the policy asks for; the model is unchanged.

    An error on one rank is raised on every rank; the other ranks name the rank where it occurred.

    Source: ZeRO, arXiv:1910.02054; of the tiers ZeRO-Offload, arXiv:2101.06840, and ZeRO-Infinity, arXiv:2104.07857.
    """
    return attach_requested(lambda: read(model, optimizer, policy, mesh, init, sync))


def attach_requested(request: Callable[[], Request]) -> Attachment:
    """Attach what ``request`` returns; what it raises on one rank is raised on all.  Collective, but for ``request``."""
    meeting = meet()
    # What is trained later must not be made of inference tensors; the first of the two would turn gradients on.
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as span, ExitStack() as undo:
        try:
            asked = request()
            if asked.automatic and not CHOOSERS:
                raise CapabilityError('policy = "auto" needs the package zhooks.simulate. Import zhooks.')
        except Exception as error:
            # The others raise it where they compare settings.
            if meeting is not None:
                meeting.refuse(error)
            raise
        span.enter_context(bus_of(asked.device).verb("attach"))
        resilience = asked.policy.resilience
        remove_dead_jobs(Path(resilience.memory).expanduser(), resilience.job)
        comm = open_comm(asked.mesh, asked.policy, asked.device, asked.facts, meeting, asked.everywhere)
        undo.callback(comm.close)
        choice = CHOOSERS[0](asked, comm) if asked.automatic else None
        return Attachment(look(asked if choice is None else choice.request, comm), comm, undo, choice)


@explained_methods
class Attachment(
    Preemptible, Resumable, Changeable, Recovering, Replicated, Controlled, Calibrated, GradStatistics
):  # fmt: skip
    """An attached model.  ``attach`` returns it, and ``detach`` ends it.

    Attributes:
        model: the module that was attached.
        policy: the current policy.
        rank: this process's rank in the process group.
    """

    def __init__(self, plan: Plan, comm: Comm, undo: ExitStack, choice: Chosen | None) -> None:
        """``undo`` puts everything back that was done before; it is taken over once all is done.  ``choice``: of the policy,
        where it was left to us."""
        request, policy = plan.request, plan.request.policy
        self.model, self.policy, self._known = request.model, policy, request.known
        self._ignored = request.ignored
        self._why = request.chosen
        self._comm, self._table, self._device = comm, plan.table, request.device
        self._bus = bus_of(request.device)
        self._pool = Pool(policy.comm.buffer, self._bus)
        self._rounding = Rounding(policy.optimizer.seed, stochastic=policy.optimizer.rounding == "stochastic")
        self._units: list[Unit] = []
        self._steps = Steps()
        self._tiers = open_tiers(policy, request.device, plan.tiers, comm, self._bus)
        # An attach that failed knows the optimizer it was given alone; what `apply` put in the place of tiers is shut, too.
        undo.callback(lambda: self._tiers.shut())
        undo.callback(self._pool.clear)
        undo.callback(lambda: self._make_plain(self._known))
        with ControlPlane(comm.stage, "attach").all_or_none():
            self._pool.keep(plan.reserve, request.device)
            self._runtime = Runtime(
                self.model, policy, comm, self._pool, self._bus,
                spare=plan.headroom.spare, follow_freezes=self._follow_freezes, ignored=self._ignored,
                training_begins=self._training_begins,
            )
            undo.callback(self._runtime.close)
        build_units(plan, self._context(), self._units)
        with ControlPlane(comm.stage, "attach").all_or_none():
            self._size_pool(plan.headroom.spare)
            self._listen(plan, undo, choice)
        self._undo: ExitStack | None = undo.pop_all()

    def _listen(self, plan: Plan, undo: ExitStack, choice: Chosen | None) -> None:
        """Run the model that was built: modules, optimizers and observers are listened to from now on."""
        runtime, scaling = self._runtime, self._runtime.scaling
        runtime.take(self._units)
        runtime.saved.follow(self.policy, self._units, self._tiers.store, self._pool.arena)
        warn_of_unmatched(self.model, self._units, self.policy, self._comm)
        self._casts, registries = Casts(scaling), Registries()
        keep_outside_graphs()
        self._device_budget = DeviceBudget(
            self._comm, self._units, self.policy, plan.headroom, self._keep_within, ignored_here(self._ignored, self._device)
        )
        stock = StockState(self.model, self._units, self._comm, runtime.conclude, self._ignored)
        owners = Owners(lambda: (flat for unit in self._units for flat in unit.flats), self._comm)
        self._optimizers = Optimizers(partial(self._ignored.parameters, self.model), self._comm.stage, stock, owners)

        def begin(listener: Any, *given: Any) -> None:
            undo.callback(listener.close)
            listener.open(*given)

        undo.callback(remove, install(self.model, self._units, runtime, self._casts))
        begin(self._casts, self.policy.precision, plan.islands)
        begin(runtime.members)
        begin(registries)
        begin(stock)
        begin(StockFolders(self.model))
        begin(self._optimizers, self._known)
        self._state_budgets = StateBudgets(self._comm, self._units, lambda: self.policy, lambda: self._tiers.limits)
        begin(scaling)
        self._nonfinite = NonFinite(self._comm, self._units, runtime, self._steps, virtual=self._device.type == NAME)
        begin(self._nonfinite, self.policy)
        watched = Watched(self._comm, self._bus, self._units, self._steps, self._optimizers.agreed, self._ignored)
        self._watches = [make(watched) for make in WATCHES]
        undo.callback(lambda: self._tiers.end_steps())
        closures = Closures(
            self._comm.world, lambda: self.policy.gradient.reduce == "mean", lambda: runtime.reducer.idle
        )
        budgets = self._device_budget.before, self._state_budgets.before
        # The first of them comes before what hides parameters from a step that is skipped.
        before: list[Callable[[Step], None]] = [
            self._reduce_held, self._optimizers.before, *budgets,
            lambda step: scaling.before_step(step.optimizer, step.closure),
            self._nonfinite.before, self._steps.before, lambda step: self._stepper.before(step), closures.before,
        ]  # fmt: skip
        # What was hidden is back before anybody asks whose step it was.
        after: list[Callable[[Step], None]] = [
            self._device_budget.after, lambda _: scaling.restore(), self._steps.after, lambda step: self._stepper.after(step)
        ]  # fmt: skip
        self._pipeline = StepPipeline(scaling.is_mine, before, after)
        self._tiers.step(self.policy, self._bus, self._units, runtime, self._rounding, self._optimizers)
        undo.callback(watch_steps(self._pipeline))
        undo.callback(self._comm.failure.ask, None)
        self._comm.failure.ask(self._progress)
        self._bus.stated_by(self._state_held)
        # Stages of a pipeline would wait for each other at other moments.
        if choice is not None and not self._comm.pipelined:
            self._watches.append(choice.review(self._running()))
        for watch in self._watches:
            undo.callback(watch.close)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """For who takes it for a wrapper, as other libraries return one."""
        raise TypeError(f"Attachment: {_IN_PLACE}: model(...).")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            instead = f"; {_IN_PLACE}: model.{name}" if hasattr(nn.Module, name) else ""
            raise AttributeError(f"Attachment has no attribute {name}{instead}.", name=name, obj=self)

    def _reduce_held(self, step: Step) -> None:
        """At a step, gradients are those of all backward passes so far: what ``no_sync`` holds back is reduced first.

        DistributedDataParallel would step with each rank's own gradients, so that its ranks train apart.
        """
        if step.ours and self._runtime.reducer.held:
            self._runtime.reduce_held()

    @property
    def _stepper(self) -> Stepper:
        assert self._tiers.stepper is not None
        return self._tiers.stepper

    def _training_begins(self) -> None:
        """A training pass begins, on every rank.  Collective."""
        self._check_whole("forward")
        if self._comm.failure.verdict is None:
            self._steps.go_on()
        self._steps.training_begins()
        for watch in self._watches:
            watch.training_begins(self.policy)

    def _progress(self) -> Progress:
        runtime = self._runtime
        if self._comm.pp.axis.world > 1:
            # Stages are given what those before them make, and are not at the same forward.
            return Progress(self._steps.number, [])
        return Progress(self._steps.number, runtime.inputs.texts(), runtime.evaluations, runtime.evaluating)

    def _running(self) -> Running:
        """What is said and done of a policy that was chosen."""
        alike, runtime = partial(self._optimizers.agreed, "plan again"), self._runtime
        placed, quiet = (lambda tier: self._tiers.placed(tier)), (lambda: runtime.quiet)
        return Running(self._comm, self._bus, quiet, alike, placed, self._go_over, self._tell_why)

    def _go_over(self, chosen: Policy) -> str:
        """Go on under another policy; "", or why it could not be, and everything is as it was.  Collective."""
        why = self._why
        try:
            self._change(chosen)
        except DivergenceError:
            raise
        except Exception as error:
            return str(error)
        finally:
            self._why = why
        return ""

    def _tell_why(self, why: str) -> None:
        self._why = f"{self._why}\n{why}"
        self._bus.instant("policy replanned", why)

    def _make_plain(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Full parameters, gradients and optimizer states; of units that are plain already, nothing.  Collective."""
        self._tiers.unwind()
        restore_units(self.model, self._units, optimizers, narrow=self.policy.optimizer.rounding == "stochastic")

    def _state_held(self) -> None:
        self._runtime.saved.partition.state_held()
        if self._why:
            self._bus.instant("policy chosen", self._why)
        state_held(self._live("observe", (), None), self.policy, self._tiers.store, self._optimizers.here())
        self._pool.state_held()

    @spanned("detach")
    def detach(self) -> nn.Module:
        """Restore the plain model, with full parameters, gradients and optimizer states and without hooks.  Collective.

        Returns:
            The model that was attached.
        Raises:
            AttachError: it is already detached.
            CheckpointError: a background save failed and this was not reported yet; call ``detach`` again.
            TierError: a tier cannot be read; what has been restored stays so, and ``detach`` may be called again.
        """
        self._check_attached("detach")
        self._finish_saving("detach")
        with self._runtime.laying_out():
            self._check_at_rest("detach")
            self._runtime.reducer.reduce_owed()
            self._runtime.reducer.read_exchange()
            optimizers = self._optimizers.with_ranges("detach")
            self._runtime.members.barred = (
                "forward expected a completed detach(), found one that failed halfway. Call detach() again."
            )
            self._make_plain(optimizers)
        everybody = torch.zeros(1, dtype=torch.float32, device="cpu")
        self._comm.stage.all_reduce(Call(CONTROL, "detach", "all units"), everybody, "sum")
        self._leave_peers()
        undo, self._undo = self._undo, None
        assert undo is not None
        undo.close()
        self._bus.counter("communication on host", "message rings", 0)
        return self.model

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Keep all units gathered inside the block, for generation and evaluation with many short forwards.  Collective.

        It takes the memory of all full parameters, which budgets do not count.
        """
        self._check_attached("resident")
        with self._runtime.resident():
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients over the backward passes inside the block, as under DistributedDataParallel.

        At stages 0 and 1 the reduction is deferred to the first backward outside the block, or to the optimizer's step or a use
        of a gradient's values if that comes first, on every rank.  Clearing gradients (``zero_grad``, ``p.grad = None``) also
        clears what was accumulated, on this rank alone.  At stages 2 and 3, which shard gradients, each backward still reduces
        into the shards, to save memory; ``accumulate`` never does.
        """
        self._check_attached("no_sync")
        self._runtime.finish_backward()
        with self._runtime.reducer.unsynced():
            try:
                yield
            finally:
                self._runtime.finish_backward()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate the gradients of all backward passes inside the block on this rank, and reduce them once, at every stage.

        The reduction happens at the first read of a ``.grad`` outside a backward, at the optimizer's step, or at the end of the
        block, and must be the same event on every data-parallel rank.  A block left by an exception does not reduce until one
        of the other two.  Inside ``schedule.step`` of ``torch.distributed.pipelining`` this happens automatically.  It keeps a
        full gradient of the model in the reduce dtype.

        Raises:
            PolicyError: the policy updates parameters in backward (``[optimizer] overlap``).
        """
        self._check_attached("accumulate")
        with self._runtime.accumulating():
            yield

    def join(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over ``loader`` on ranks that have different numbers of batches: ``for batch in attachment.join(loader)``.

        A rank that has run out gets its last batch again until all ranks have run out, so the loop body, with its clipping,
        steps and schedulers, does not change.  Gradients of repeated batches count as zero, and means are over all ranks, as
        with DDP's ``Join``.  Anything else a repeated batch computes (a logged loss, running statistics) is not ignored: check
        ``idle``.  Collective at every batch.

        Args:
            loader: this rank's batches.
        Returns:
            The batches, then the last one again.
        """
        self._check_attached("join")

        def idle(now: bool) -> None:
            self._runtime.finish_backward()
            self._runtime.reducer.idle = now

        return batches(loader, self._comm.world, idle)

    @property
    def idle(self) -> bool:
        """Whether this rank has run out of batches inside ``join`` and is repeating its last one."""
        return self._runtime.reducer.idle

    def memory(self, *, heads: int | None = None) -> MemoryReport:
        """Report the bytes this rank holds, by kind and tier, compared with the formulas.  ``print`` it for a table.

        Activations are counted from the first call on.

        Args:
            heads: the number of attention heads, if it cannot be found in the model's modules.
        Returns:
            The bytes held now, and the upper bound of each buffer.

        Source of the formulas: ZeRO, arXiv:1910.02054, sections 3 and 6.
        """
        optimizers = self._optimizers.here()
        residual = self._runtime.saved.residual.ask(heads)
        return memory_report(self._units, self._runtime.reducer, self._comm, self._table, optimizers, residual, self._ignored)

    def observe(self, observer: Observer) -> Observation:
        """Send the runtime's events to ``observer`` until the returned handle is closed.

        Args:
            observer: any object with a method ``on_event(event)``.  One that also has ``start`` and ``close``, such as
                ``zprof.Recorder``, is started here and closed with the handle.
        Returns:
            A handle with ``close()``; it is also a context manager.
        Raises:
            AttachError: ``observer`` has no ``on_event``.
        """
        self._check_attached("observe")
        if not callable(getattr(observer, "on_event", None)):
            raise AttachError(
                f"observe expected an observer with a method on_event(event), found {type(observer).__name__}. Pass a "
                "Recorder, or your own object with this method."
            )
        return Observation(self._bus, observer)

    def describe(self) -> str:
        """Describe the units as a table: parameters, elements, padding, dtypes and placement of each.

        After the first step it also shows how many bytes a step moves.
        """
        said = describe(self.model, self._units, self.policy, self._comm, self.payload(), self._runtime.scaling, self._ignored)
        return f"{said}\n{self._why}" if self._why else said

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None if the policy sets no ``[precision] loss_scale``."""
        return self._runtime.scaling.scale.value if self._runtime.scaling.on else None

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """The latest steps, at most 64 and oldest first, whose gradients overflowed under a loss scale or a GradScaler."""
        return self._runtime.scaling.overflows.latest

    def payload(self) -> int | None:
        """Bytes that the gathers and reductions of one training step move, in full payloads; None before the first step."""
        gathers = self._runtime.paths.gathers()
        if gathers is None:
            return None
        moved = sum(flat.moved_nbytes for number in gathers for flat in self._units[number].flats)
        return moved + self._runtime.reducer.payload() + self._runtime.saved.partition.payload

    @property
    def rank(self) -> int:
        return int(self._comm.world.axis.ranks[self._comm.world.axis.rank])


def abandon(attachment: Attachment) -> None:
    """Close what an attachment opened, and give nothing back: its model is of no further use.

    A simulation's model has no values, and gathering all of them takes as long as a step.
    """
    undo, attachment._undo = attachment._undo, None
    assert undo is not None
    for unit in attachment._units:
        for flat in unit.flats:
            flat.detach()
    undo.close()
