"""What an attachment does where other jobs train copies of its model: sums over them, and its state handed to one of them.

``Attachment`` is one of these; an integration that knows the other jobs calls it.  It hands each verb to the package that does
it, and never talks to another job itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.errors import CapabilityError, ShardedOpError
from offload.policy import Policy
from zhooks import checkpoint, tree
from zhooks.comm import CONTROL, Call, Comm, ControlPlane, policy_facts
from zhooks.grad import ReplicaSums
from zhooks.layout import Ignored
from zhooks.optim import Optimizers, Steps
from zhooks.plan import check_holds
from zhooks.run import Runtime
from zhooks.unit import Flat, Unit


class Replicated:
    """The verbs of an attachment that is one of several jobs."""

    model: nn.Module
    policy: Policy
    _units: list[Unit]
    _runtime: Runtime
    _comm: Comm
    _optimizers: Optimizers
    _ignored: Ignored
    _steps: Steps
    _why: str
    #: What was laid out when the checksum of it was made.
    _facts: tuple[Sequence[Flat], Policy, str] | None = None

    def _check_at_rest(self, verb: str) -> None:
        """Raise where the model is detached, or a step is open."""
        raise NotImplementedError

    def _check_whole(self, verb: str) -> None:
        """As ``Recovering``."""
        raise NotImplementedError

    def _loaded(self) -> None:
        """As ``Recovering``."""
        raise NotImplementedError

    def _finish_saving(self, verb: str) -> None:
        """As ``Stateful``."""
        raise NotImplementedError

    def _live(
        self, verb: str, optimizers: tuple[Any, ...], objects: Mapping[str, Any] | None, extra: Mapping[str, Any] | None = None
    ) -> checkpoint.RunState:
        """The run, for who saves and loads it."""
        raise NotImplementedError

    def reduce_over(self, replicas: ReplicaSums | None, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """From the next backward on gradients are means over these jobs too, each of which calls this.  Collective.

        Args:
            replicas: None goes back to the ranks of the mesh alone.
            optimizers: those that step the parameters.
        Raises:
            CapabilityError: what would not be right among replicas that come and go; nothing has changed.
        """
        self._check_at_rest("replicas")
        if replicas is not None:
            with ControlPlane(self._comm.stage, "replicas").all_or_none():
                check_holds(optimizers, self.model, "replicas")
                self.check_replicated()
            for each in optimizers:
                self._optimizers.meet(each, "replicas")
            with ControlPlane(self._comm.stage, "replicas").all_or_none():
                for each in optimizers:
                    if self._comm.shard.axis.world > 1 and self._optimizers.owners.is_whole(each):
                        raise _refused(f"{type(each).__name__}, which updates whole parameters on one rank each", "Train with "
                                       "an optimizer that works element by element, or with one rank per replica.")
        self._runtime.reducer.reduce_over(replicas)

    def check_replicated(self) -> None:
        """Raise where the attachment, as it is now, cannot be one of several jobs.

        Raises:
            CapabilityError: by its mesh, policy or device.
            DivergenceError: its own ranks do not stand at one step: it must not hand that on.
        """
        self._check_whole("replicas")
        comm = self._comm
        if comm.replicate.axis.world > 1 or comm.tp.axis.world > 1 or comm.pp.axis.world > 1:
            named = ", ".join(comm.names)
            raise _refused(f"a mesh with {named}", "Attach over a shard axis only: each replica is a separate job.")
        if self.policy.optimizer.overlap:
            raise _refused("[optimizer] overlap = true, which updates before the replicas commit a step", "Set it to false.")
        if self._why:
            raise _refused("a policy that was chosen by measuring on this machine", 'Write a policy instead of "auto".')
        trained = [name for name, param in self._ignored.params.items() if param.requires_grad]
        if trained:
            raise _refused(f"{trained[0]}, which [units] ignore excludes from reductions", "Freeze it, or attach it.")
        if self._runtime.reducer.probe is not None or self._runtime.reducer.measured:
            raise _refused("a measurement of gradients in progress", "Close its handle first.")
        if any(flat.kind.device.type != "cpu" for flat in self._flats):
            raise _refused("parameters on a device other than the CPU, which is untested", "Train on the CPU.")

    @property
    def _flats(self) -> list[Flat]:
        return [flat for unit in self._units for flat in unit.flats]

    def run_together(self, check: Callable[[], None]) -> None:
        """What ``check`` raises on one rank is raised on all ranks of this attachment.  Collective."""
        self._check_at_rest("replicas")
        with ControlPlane(self._comm.stage, "replicas").all_or_none():
            check()

    @property
    def steps_taken(self) -> int:
        """Optimizer steps, and other changes of values, since ``attach``."""
        return self._steps.count

    def finish_gradients(self) -> None:
        """All backward passes are over, and reduced what they owe.  Collective."""
        self._runtime.due()

    def forget_gradients(self) -> None:
        """A step begins, or was not taken: no parameter has a gradient, and no overflow is remembered.

        Raises:
            ShardedOpError: sums are held back that nobody has reduced.
        """
        reducer = self._runtime.reducer
        if reducer.open or any(gradient.partial is not None for gradient in reducer.gradients.values()):
            raise ShardedOpError(
                "step over replicas expected all gradients of the previous step to be reduced, found partial sums that "
                "no_sync holds back. End each step with a backward outside of no_sync."
            )
        for param in tree.parameters(self.model):
            param.grad = None
        self._runtime.scaling.forget()

    def replica_facts(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """A checksum of what must be the same in all jobs: layout, policy and kinds of optimizers."""
        flats, known = self._flats, self._facts
        same = known is not None and known[1] is self.policy and len(known[0]) == len(flats)
        if known is None or not same or any(a is not b for a, b in zip(known[0], flats, strict=True)):
            run = self._live("replicas", tuple(optimizers), None)
            known = self._facts = flats, self.policy, checkpoint.replica_facts(run, policy_facts(self.policy))
        return known[2]

    def meet_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """What torch has loaded into them becomes ranges.  Collective."""
        for each in optimizers:
            self._optimizers.meet(each, "replicas")

    def check_handed_on(self, beside: Any) -> None:
        """Raise CheckpointError unless it can be handed to another job without pickle."""
        checkpoint.Packer().pack(beside, "the state that goes with the model")

    def offered_state(
        self, optimizers: Sequence[torch.optim.Optimizer], extra: Mapping[str, Any]
    ) -> checkpoint.OfferedState:
        """What this rank has now, for the rank at its place in another job; valid until the next forward."""
        live = self._live("replicas", tuple(optimizers), None, extra)
        return checkpoint.OfferedState(live, extra, self.replica_facts(optimizers))

    def take_state(
        self, optimizers: Sequence[torch.optim.Optimizer], where: str, header: Mapping[str, Any], ask: checkpoint.Ask
    ) -> None:
        """Go on with what a peer has: see ``checkpoint.take_over``.  Collective.

        Args:
            where: the peer, for errors.
            header: of its ``OfferedState``; ``ask`` asks that for elements.
        """
        # What is written beside training is held where the peer's state will be.
        self._finish_saving("replicas")
        live = self._live("replicas", tuple(optimizers), None)
        facts = self.replica_facts(optimizers)
        with self._steps.changing("replicas"):
            checkpoint.take_over(live, where, header, ask, facts)
        self._loaded()
        for each in optimizers:
            self._optimizers.admit(each)

    def largest(self, what: str, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over the ranks of this attachment.  Collective."""
        found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._comm.stage.all_reduce(Call(CONTROL, what, "replicas"), found, "max")
        return [int(number) for number in found.tolist()]


def _refused(found: str, advice: str) -> CapabilityError:
    return CapabilityError(f"replicas expected a setup that elastic replicas can train, found {found}. {advice}")
