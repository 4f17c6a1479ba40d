"""What an attachment measures of its gradients: their norms, and how noisy they are.

``Attachment`` is one of these.  It checks that every rank asks for the same and that the gradients are there to be read; it
computes nothing itself.
"""

from __future__ import annotations

from torch import nn

from offload.errors import CapabilityError, ShardedOpError
from offload.policy import Policy
from offload.text import shown
from zhooks.comm import Comm, ControlPlane
from zhooks.report.grad_norms import GradNorms, gradient_norms
from zhooks.report.noise_scale import NoiseScale, probing
from zhooks.run import Runtime
from zhooks.unit import Unit

__all__ = ["GradStatistics"]


class GradStatistics:
    """``Attachment.grad_norms`` and ``Attachment.noise_scale``."""

    model: nn.Module
    policy: Policy
    _units: list[Unit]
    _comm: Comm
    _runtime: Runtime

    def _check_attached(self, verb: str) -> None:
        """Raise AttachError once the model is detached."""
        raise NotImplementedError

    def grad_norms(self) -> GradNorms:
        """Return the 2-norms of the gradients in ``.grad``: ``.total``, and ``.units`` by unit name.  Collective.

        These are the norms of the reduced means over the ranks, as clipping sees them: accumulated over the backward passes
        since ``zero_grad``, unscaled if the policy scales the loss, scaled as long as a GradScaler scales them, on any tier.
        It communicates one number per unit.  Gradients accumulated in ``accumulate()`` are reduced first.  On a mesh with
        ``pp`` they are those of this stage.

        Returns:
            Python floats, the same on every rank.
        Raises:
            ShardedOpError: the policy updates in backward (``[optimizer] overlap``), or a ``.grad`` was replaced.
            TierError: a tier cannot be read.
        """
        self._check_attached("grad_norms")
        if self.policy.optimizer.overlap:
            raise ShardedOpError(
                "grad_norms expected gradients that stay until the step, found [optimizer] overlap = true, which updates in "
                "backward and drops them. apply() a policy without overlap."
            )
        self._runtime.due()
        return gradient_norms(self._units, self._comm)

    def noise_scale(self, batch_size: int, *, decay: float = 0.99) -> NoiseScale:
        """Measure the gradient noise scale, roughly the batch size beyond which more samples save few steps.  Collective.

        On several ranks it compares what each rank sends to a reduction with the mean that it receives.  A single rank needs
        several backward passes per step, after ``zero_grad()``.  The loss must be a mean over samples, with equally many on
        every rank and in every pass.  It costs one pass over the gradients and one exchange of five numbers per reduction.

        Args:
            batch_size: samples in one backward pass of one rank; the estimate is in the same unit.
            decay: of the running averages, from one reduction to the next; 1 weighs all alike.
        Returns:
            A handle that measures until it is closed; also a context manager.  ``estimate`` is the result so far.
        Raises:
            CapabilityError: the mesh has ``tp`` or ``pp``, or ``overlap`` is set on a single rank.
            ShardedOpError: another handle is open, or an argument is invalid or differs between ranks.

        Source: McCandlish et al., arXiv:1812.06162, appendix A.1.
        """
        self._check_attached("noise_scale")
        self._runtime.finish_backward()
        with ControlPlane(self._comm.stage, "noise_scale").all_or_none():
            self._check_noise_scale(batch_size, decay)
        settings = {"noise_scale": {"batch_size": str(batch_size), "decay": repr(decay)}}
        found = ControlPlane(self._comm.stage, "noise_scale").differ(settings)
        if found:
            raise ShardedOpError(found)
        name = type(self.model).__name__
        return probing(self._units, self._comm, self._runtime.reducer, name, batch_size, float(decay))

    def _check_noise_scale(self, batch_size: int, decay: float) -> None:
        whole = isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size > 0
        share = isinstance(decay, (int, float)) and not isinstance(decay, bool) and 0 < decay <= 1
        if not whole or not share:
            raise ShardedOpError(
                f"noise_scale expected a batch_size of at least 1 and a decay above 0 and at most 1, found "
                f"{shown(batch_size)} and {shown(decay)}. Pass the number of samples in one rank's backward pass."
            )
        if self._comm.tp.axis.world > 1 or self._comm.pp.axis.world > 1:
            raise CapabilityError(
                "noise_scale expected ranks that all compute gradients of the whole model, found a mesh with tp or pp. "
                "Measure on a mesh of only data ranks."
            )
        if self.policy.optimizer.overlap and self._comm.world.axis.world == 1:
            raise CapabilityError(
                "noise_scale expected several ranks, or several backward passes per step, found one rank and [optimizer] "
                "overlap = true, which allows one pass. Set overlap = false."
            )
        if self._runtime.reducer.replicas.jobs:
            raise CapabilityError(
                "noise_scale expected a mean over the ranks of the mesh, found one over replicas that are separate jobs. "
                "Measure without them."
            )
        if self._runtime.reducer.probe is not None:
            raise ShardedOpError(
                "noise_scale expected one measurement at a time, found another handle that is open. Close that one first."
            )
