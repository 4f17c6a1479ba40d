"""Backward passes that add up unreduced on this rank: when they do, and whether their sum is owed to somebody.

``reduce.py`` holds reductions back while it is on; ``runtime.py`` tells it of every training forward, and pays what is owed
when somebody needs a gradient.  It never touches a gradient; of a pipeline's stage it names the backward that is out of order.

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
from typing import Any

from offload.errors import AttachError, ScheduleError
from zhooks.stacks import Microbatch, microbatch

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
            _name_what_flies(found)
            self._checked = found.stage
        self._pipelined = found is not None and found.real

    def close(self) -> None:
        """Leave the stage as it was."""
        _plain_again(self._checked)
        self._checked = None

    def _check(self, found: Microbatch) -> None:
        shared = sorted(set(found.ranks) & set(self._ranks))
        if len(shared) > 1:
            raise AttachError(
                f"pipeline stage {found.index}: expected its parameters to be this stage's alone, found them shared by ranks "
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


class InFlight(dict[int, Any]):
    """What a stage of torch's pipelining keeps of its forwards until their backward, by microbatch."""

    def __init__(self, held: dict[int, Any], stage: int) -> None:
        super().__init__(held)
        self._stage = stage

    def pop(self, microbatch: int, *default: Any) -> Any:
        """See ``dict.pop``.

        Raises:
            ScheduleError: there is nothing of that microbatch, where torch would show a bare number.
        """
        if microbatch not in self and not default:
            raise ScheduleError(
                f"pipeline stage {self._stage}: expected one backward of microbatch {microbatch} after its forward, found "
                f"forwards in flight of {sorted(self) or 'none'}. Mend the order of the schedule; the next step may go on."
            )
        return super().pop(microbatch, *default)


def _plain_again(stage: Any) -> None:
    """The stage as torch made it."""
    if type(getattr(stage, "fwd_cache", None)) is InFlight:
        stage.fwd_cache = dict(stage.fwd_cache)


def _name_what_flies(found: Microbatch) -> None:
    """Let the stage say what it misses, where it keeps its forwards as the torch we know does."""
    stage: Any = found.stage
    if type(getattr(stage, "fwd_cache", None)) is dict:
        stage.fwd_cache = InFlight(stage.fwd_cache, found.index)
