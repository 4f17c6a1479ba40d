"""The session of an attached model: all that works on it, as data that the methods of an ``Attachment`` hand to functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from offload.errors import AttachError, DivergenceError
from offload.events import Bus
from offload.policy import Policy
from zhooks import checkpoint, tree
from zhooks.build import BuildContext, Tiers
from zhooks.comm import Comm, ControlPlane, Progress
from zhooks.compiled import uncompiled
from zhooks.layout import PP, TP, Ignored, UnitPlan
from zhooks.optim import Optimizers, Rounding, Stepper, StepPipeline, Steps
from zhooks.plan import check_holds, rest_reserve
from zhooks.run import Casts, Runtime
from zhooks.session.nonfinite import NonFinite
from zhooks.session.observe import state_held
from zhooks.session.plug_in import Watch
from zhooks.session.steps import Budgets, adopt_states
from zhooks.unit import Links, Pool, Unit

if TYPE_CHECKING:
    from zhooks.resilience import PeerMemory

__all__ = ["Session"]


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class Session:
    """One attached model and what works on it.

    Attributes:
        known: the optimizer that ``attach`` was given, if any.
        ignored: what of the model stays as it is.
        policy: the current one; ``apply`` changes it, ``tiers``, ``why``, ``stepper``, and what ``comm`` consists of.
        why: why this policy was chosen, where it was left to zhooks.
        stepper: steps optimizers over the current tiers.
        units: as they are laid out now; one list as long as the model is attached.
        undo: puts the plain model back, and closes what was opened; None once the model is detached.
        half_moved: a move to another policy or mesh failed halfway, and could not be taken back.
        apart: why only a load may come next: a recovery found ranks at different steps; "" if there is no reason.
        saving: the last save that was begun in the background.
        run: whose checkpoints later ones replace; a run that is resumed is the one that it loads.
        newest_ns: when the last checkpoint that the run knows of was saved; on the first rank.
        peers: what this run keeps in the memory of hosts, once it was asked for.
    """

    model: Final[nn.Module]
    known: Final[tuple[torch.optim.Optimizer, ...]]
    ignored: Final[Ignored]
    device: Final[torch.device]
    policy: Policy
    tiers: Tiers
    why: str
    stepper: Stepper | None = None
    comm: Final[Comm]
    bus: Final[Bus]
    pool: Final[Pool]
    rounding: Final[Rounding]
    runtime: Final[Runtime]
    units: Final[list[Unit]]
    steps: Final[Steps]
    casts: Final[Casts]
    optimizers: Final[Optimizers]
    budgets: Final[Budgets]
    nonfinite: Final[NonFinite]
    pipeline: Final[StepPipeline]
    watches: Final[list[Watch]] = field(default_factory=list)
    undo: ExitStack | None = None
    half_moved: bool = False
    apart: str = ""
    saving: checkpoint.Saving | None = None
    run: str = ""
    newest_ns: int = 0
    peers: PeerMemory | None = None

    def attached(self, verb: str) -> Session:
        """The session, for a verb that needs an attached model.

        Raises:
            AttachError: the model is detached, or a change of it failed halfway.
        """
        if self.undo is None:
            raise AttachError(
                f"{verb} expected an attached model, found one that was detached already. To go on training, attach it again."
            )
        if self.half_moved:
            raise AttachError(
                f"{verb} expected a model under one policy on one mesh, found one whose change to another failed halfway, "
                "because ranks or tiers failed. Load the last checkpoint in new processes."
            )
        return self

    def concluded(self, verb: str, *, whole: bool = True) -> Session:
        """The session, for a verb that reads or writes values: after the step that early updates were made for.

        Args:
            whole: ranks must be at one step; a load brings them back to one.
        Raises:
            DivergenceError: ranks are at different steps; on every rank.
        """
        self.attached(verb)
        if whole:
            self.check_whole(verb)
        self.runtime.conclude()
        self.runtime.reducer.updates_due(verb)
        return self

    @contextmanager
    def verb(self, name: str, *, whole: bool = True) -> Iterator[Session]:
        """A span around a verb that reads or writes values: observers see what memory is for that is taken meanwhile."""
        with self.bus.verb(name):
            yield self.concluded(name, whole=whole)

    def check_whole(self, verb: str) -> None:
        """Raise DivergenceError after a recovery that found ranks at different steps; on every rank."""
        if self.apart:
            raise DivergenceError(f"{verb} {self.apart}")

    def loaded(self) -> None:
        """Every rank has what a checkpoint says."""
        self.apart = ""
        self.steps.begin_anew()
        for watch in self.watches:
            watch.begin_anew()

    def plans(self) -> list[UnitPlan]:
        """How units are laid out now."""
        return [unit.plan for unit in self.units]

    def units_of(self, verb: str, module: nn.Module | None) -> list[Unit]:
        """The units that hold parameters of a module; None is all of the model.  Collective.

        Raises:
            AttachError: there are none; on every rank.
        """
        self.attached(verb)
        if module is None:
            return list(self.units)
        with ControlPlane(self.comm.stage, verb).all_or_none():
            if not isinstance(module, nn.Module):
                raise AttachError(
                    f"{verb} expected a module of the attached model, found {type(module).__name__}. Pass the module itself."
                )
            wanted = {id(param) for param in tree.parameters(module)}
            found = [unit for unit in self.units if any(id(param) in wanted for flat in unit.flats for param in flat.params)]
            if not found:
                raise AttachError(
                    f"{verb} expected a module with attached parameters, found {type(module).__name__} with none. Pass a "
                    "module of the attached model that [units] ignore does not name."
                )
        return found

    def build_context(self) -> BuildContext:
        """What flats are built on."""
        runtime, other_axes = self.runtime, {TP: self.comm.tp, PP: self.comm.pp}
        pretrained = callable(getattr(uncompiled(self.model), "save_pretrained", None))
        links = Links(self.bus, self.tiers.store, other_axes, runtime, runtime.node, runtime.scaling, pretrained)
        return BuildContext(self.comm, self.pool, links)

    def size_pool(self, spare: int | None) -> None:
        """Keep as many idle buffers as the schedule has under way at once, or reserve memory for them."""
        self.pool.keep(rest_reserve(self.policy, self.device, self.plans(), spare), self.device)

    def keep_within(self, spare: int | None) -> None:
        """From now on, so many bytes of gathered units may stay between forward and backward."""
        self.size_pool(spare)
        self.runtime.paths.choices = replace(self.runtime.paths.choices, budget=spare)

    def end_steps(self) -> None:
        """Leave optimizers to torch again."""
        self.pipeline.restore()
        if self.stepper is not None:
            self.stepper.close()

    def run_state(
        self, verb: str, optimizers: tuple[Any, ...], objects: Mapping[str, Any] | None, extra: Mapping[str, Any] | None = None
    ) -> checkpoint.RunState:
        """What a checkpoint of the run consists of."""
        checkpoint.check_handed(verb, objects, extra)
        check_holds(optimizers, self.model, verb)
        about = {"stage": self.policy.stage, "table": dict(self.policy.table())}
        runtime = self.runtime
        return checkpoint.RunState(
            self.model, self.units, self.comm, runtime.reducer, self.bus, optimizers, objects, about, runtime.scaling,
            partial(adopt_states, self, optimizers), self.tiers.check_room, self.rounding, self.ignored,
        )

    # What the bus and a lost rank's peers hold weakly, as methods.

    def state_held(self) -> None:
        """A new observer hears what is held already."""
        state_held(self)

    def progress(self) -> Progress:
        """Where this rank is, for ranks that wait for it."""
        if self.comm.pp.axis.world > 1:
            # Stages are given what those before them make, and are not at the same forward.
            return Progress(self.steps.number, [])
        runtime = self.runtime
        return Progress(self.steps.number, runtime.inputs.texts(), runtime.evaluations, runtime.evaluating)
