"""An attached model that several jobs train copies of: sums over the jobs, and its state handed to one of them.

An integration that knows the other jobs makes a ``Replica``, which never talks to another job itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from offload.errors import CapabilityError, ShardedOpError
from offload.policy import Policy
from zhooks import tree
from zhooks.checkpoint import RunState
from zhooks.comm import CONTROL, Call, ControlPlane, policy_facts
from zhooks.grad import ReplicaSums
from zhooks.layout import flats_of
from zhooks.plan import check_holds
from zhooks.resilience.peer_state import Ask, OfferedState, replica_facts, take_over
from zhooks.session import Session, finish_saving
from zhooks.unit import Flat

__all__ = ["Replica"]


class Replica:
    """One of several jobs.

    Args:
        optimizers: those that step the parameters.
    """

    def __init__(self, session: Session, optimizers: Sequence[Optimizer]) -> None:
        self.session, self._optimizers = session, tuple(optimizers)
        #: What was laid out when the checksum of it was made.
        self._facts: tuple[Sequence[Flat], Policy, str] | None = None

    def reduce_over(self, jobs: ReplicaSums | None) -> None:
        """From the next backward on gradients are means over these jobs too, each of which calls this.  Collective.

        Args:
            jobs: None goes back to the ranks of the mesh alone.
        Raises:
            CapabilityError: what would not be right among replicas that come and go; nothing has changed.
        """
        session = self.session.concluded("replicas")
        ranks = ControlPlane(session.comm.stage, "replicas")
        if jobs is not None:
            with ranks.all_or_none():
                check_holds(self._optimizers, session.model, "replicas")
                self.check()
            self.meet_optimizers()
            with ranks.all_or_none():
                for each in self._optimizers:
                    if session.comm.shard.axis.world > 1 and session.optimizers.owners.is_whole(each):
                        raise _refused(f"{type(each).__name__}, which updates whole parameters on one rank each", "Train with "
                                       "an optimizer that works element by element, or with one rank per replica.")
        session.runtime.reducer.reduce_over(jobs)

    def check(self) -> None:
        """Raise if the session, as it is now, cannot be one of several jobs.

        Raises:
            CapabilityError: by its mesh, policy or device.
            DivergenceError: its own ranks do not stand at one step: it must not hand that on.
        """
        session = self.session
        session.check_whole("replicas")
        comm, policy, reducer = session.comm, session.policy, session.runtime.reducer
        if comm.replicate.axis.world > 1 or comm.tp.axis.world > 1 or comm.pp.axis.world > 1:
            named = ", ".join(comm.names)
            raise _refused(f"a mesh with {named}", "Attach over a shard axis only: each replica is a separate job.")
        if policy.optimizer.overlap:
            raise _refused("[optimizer] overlap = true, which updates before the replicas commit a step", "Set it to false.")
        if session.why:
            raise _refused("a policy that was chosen by measuring on this machine", 'Write a policy instead of "auto".')
        trained = [name for name, param in session.ignored.params.items() if param.requires_grad]
        if trained:
            raise _refused(f"{trained[0]}, which [units] ignore excludes from reductions", "Freeze it, or attach it.")
        if reducer.probe is not None or reducer.measured:
            raise _refused("a measurement of gradients in progress", "Close its handle first.")
        if any(flat.kind.device.type != "cpu" for flat in flats_of(session.units)):
            raise _refused("parameters on a device other than the CPU, which is untested", "Train on the CPU.")

    def run_together(self, check: Callable[[], None]) -> None:
        """What ``check`` raises on one rank is raised on all ranks of this job.  Collective."""
        session = self.session.concluded("replicas")
        with ControlPlane(session.comm.stage, "replicas").all_or_none():
            check()

    def forget_gradients(self) -> None:
        """A step begins, or was not taken: no parameter has a gradient, and no overflow is remembered.

        Raises:
            ShardedOpError: sums are held back that nobody has reduced.
        """
        runtime = self.session.runtime
        if runtime.reducer.open or any(gradient.partial is not None for gradient in runtime.reducer.gradients.values()):
            raise ShardedOpError(
                "step over replicas expected all gradients of the previous step to be reduced, found partial sums that "
                "no_sync holds back. End each step with a backward outside of no_sync."
            )
        for param in tree.parameters(self.session.model):
            param.grad = None
        runtime.scaling.forget()

    def facts(self) -> str:
        """A checksum of what must be the same in all jobs: layout, policy and kinds of optimizers."""
        session, flats, known = self.session, flats_of(self.session.units), self._facts
        same = known is not None and known[1] is session.policy and len(known[0]) == len(flats)
        if known is None or not same or any(a is not b for a, b in zip(known[0], flats, strict=True)):
            made = replica_facts(self._run(), policy_facts(session.policy))
            known = self._facts = flats, session.policy, made
        return known[2]

    def meet_optimizers(self) -> None:
        """What torch has loaded into them becomes ranges.  Collective."""
        for each in self._optimizers:
            self.session.optimizers.meet(each, "replicas")

    def offered_state(self, extra: Mapping[str, Any]) -> OfferedState:
        """What this rank has now, for the rank at its place in another job; valid until the next forward."""
        return OfferedState(self._run(extra), extra, self.facts())

    def take_state(self, where: str, header: Mapping[str, Any], ask: Ask) -> None:
        """Go on with what a peer has: see ``take_over``.  Collective.

        Args:
            where: the peer, for errors.
            header: of its ``OfferedState``; ``ask`` asks that for elements.
        """
        session = self.session
        # What a background save writes is held where the peer's state will be.
        finish_saving(session, "replicas")
        run, facts = self._run(), self.facts()
        with session.steps.changing("replicas"):
            take_over(run, where, header, ask, facts)
        session.loaded()
        for each in self._optimizers:
            session.optimizers.admit(each)

    def _run(self, extra: Mapping[str, Any] | None = None) -> RunState:
        return self.session.run_state("replicas", self._optimizers, None, extra)

    def largest(self, what: str, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over the ranks of this job.  Collective."""
        found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self.session.comm.stage.all_reduce(Call(CONTROL, what, "replicas"), found, "max")
        return [int(number) for number in found.tolist()]


def _refused(found: str, advice: str) -> CapabilityError:
    return CapabilityError(f"replicas expected a setup that elastic replicas can train, found {found}. {advice}")
