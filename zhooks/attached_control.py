"""What an attachment lets a loop decide for parts of the model: hooks on reductions.

``Attachment`` is one of these.  It hands each verb to the package that does it; it never decides when a pass gathers or
reduces.
"""

from __future__ import annotations

from torch.utils.hooks import RemovableHandle

from offload.errors import AttachError
from zhooks.grad import ReduceHook
from zhooks.run import Runtime


class Controlled:
    """The verbs of an attachment over parts of a model."""

    _runtime: Runtime

    def _check_attached(self, verb: str) -> None:
        """Raise AttachError once the model is detached."""
        raise NotImplementedError

    def register_reduce_hook(
        self, *, before: ReduceHook | None = None, after: ReduceHook | None = None
    ) -> RemovableHandle:
        """Call functions at every reduction of gradients, in backward, until the returned handle is removed.

        Both are called as ``hook(unit, gradient)`` with the name of a flat buffer and a 1-D tensor, and may change it in place.

        Args:
            before: given what this rank sends: its sum of the whole buffer in the reduce dtype, before anything is divided,
                under a loss scale still scaled.  A buffer above ``[comm] buffer`` comes in chunks.
            after: given what is kept of the result, divided and unscaled: this rank's range (at stage 0 all of it).
        Raises:
            AttachError: neither is a function.
        """
        self._check_attached("register_reduce_hook")
        if (before is None and after is None) or not all(hook is None or callable(hook) for hook in (before, after)):
            raise AttachError(
                f"register_reduce_hook: expected functions of a unit's name and a tensor as before or after, found "
                f"{type(before).__name__} and {type(after).__name__}. Pass at least one."
            )
        return self._runtime.reducer.hooks.register(before, after)
