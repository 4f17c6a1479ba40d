"""Backward passes that add up unreduced on this rank: when they do, and whether their sum is owed to somebody.

``reduce.py`` holds reductions back while it is on; ``run/runtime.py`` tells it of every training forward, and pays what is owed
when somebody needs a gradient.  It never touches a gradient, nor a pipeline's stage.

Note: [Until somebody needs it]
    Inside ``accumulate()``, and where torch's pipelining runs the forward as a microbatch, no backward reduces.  One
    reduction of the sum follows at the first read of a ``.grad`` outside a backward, the step, ``save`` or the end of the
    block, whichever comes first.  Every data rank comes to the same one, for a pipeline's last act is to scale the
    gradients, and an optimizer reads them.  The sum is whole: a full gradient of the attached module in the reduce dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from offload.errors import AttachError
from zhooks.grad.stacks import Microbatch, microbatch

__all__ = ["Accumulation"]


class Accumulation:
    """Whether gradients of one attachment add up unreduced; ``ranks``: those that share its parameters."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._blocks, self._pipelined = 0, False
        self._checked: object = None
        #: A backward has been held back, and its sum not yet been reduced.
        self.owed = False

    @property
    def on(self) -> bool:
        """A backward that ends now is not reduced."""
        return self._blocks > 0 or self._pipelined

    def begin(self, caller: FrameType | None) -> None:
        """A training forward begins, called by ``caller``.

        Raises:
            AttachError: it is a pipeline stage, attached over the ranks of other stages.
        """
        found = microbatch(caller)
        if found is not None and found.stage is not self._checked:
            self._check(found)
            self._checked = found.stage
        self._pipelined = found is not None and found.real

    def _check(self, found: Microbatch) -> None:
        shared = sorted(set(found.ranks) & set(self._ranks))
        if len(shared) > 1:
            raise AttachError(
                f"Pipeline stage {found.index} shares parameters with others. Expected parameters of this stage only, found "
                "them shared by ranks "
                f"{shared}, which run other stages. Name the axes: attach(stage_module, mesh=mesh) with a mesh made by "
                'init_device_mesh(..., mesh_dim_names=("pp", "dp")).'
            )

    @contextmanager
    def block(self) -> Iterator[None]:
        """On inside."""
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
