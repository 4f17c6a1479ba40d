"""What a sharded tensor asks of the flat buffer it belongs to: over which ranks to combine and gather, and, where it is bound,
to settle, to show its value and to hear of writes.

``sharded.py`` holds both; ``flat.py`` is the owner of its parameters, ``flat_home.py`` the home of their ranges.  It names and
never does.

Note: [Home and owner]
    A gradient or a state needs its home as long as somebody keeps it, whatever became of the model or its layout.  The home
    therefore knows ranks and sizes alone: from a parameter's ``.grad``, which the garbage collector cannot follow, no way
    shall lead back to the parameter.  What is bound, a parameter or an alias of one, keeps the flat buffer itself alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from zhooks.mesh import SHARD

if TYPE_CHECKING:
    from zhooks.sharded import ShardedTensor

__all__ = ["Home", "Owner"]


class Home(Protocol):
    """The ranks that share what a range is part of."""

    @property
    def sharded(self) -> bool:
        """More than one rank shares the buffer."""

    @property
    def buffer_nbytes(self) -> int:
        """Bytes that no buffer may exceed."""

    def assemble(self, tensor: ShardedTensor) -> Tensor:
        """The full plain tensor of a range of this buffer.  Collective."""

    def all_reduce(self, tensor: Tensor, op: str, axes: tuple[str, ...] = (SHARD,)) -> None:
        """Combine a small tensor over axes of the mesh; "shard" stands for the ranks that share the buffer, if any do."""

    def spans(self, axis: str) -> bool:
        """More than one rank is on ``axis``, tp or pp."""

    def first(self, axis: str) -> bool:
        """This is the first rank on ``axis``, shard or tp, or holds the same as the first."""


class Owner(Protocol):
    """The flat buffer of a parameter."""

    node_asked: bool
    """Somebody has asked autograd for a parameter's accumulation node."""

    def written(self, index: int | None = None) -> None:
        """The shard's values changed, those of one parameter or all: whatever is gathered is stale."""

    def settle(self) -> None:
        """Finish a backward that is still open, so that gradients are what they claim."""

    def look(self, name: str) -> None:
        """The user reads the gradient of a parameter: settle, and it must be there to be read."""

    def view(self, index: int) -> Tensor:
        """The full plain tensor of parameter ``index``, gathered if need be; part of the graph where grad is on."""

    def relay(self) -> None:
        """A parameter was frozen or unfrozen: the layout follows at the next entry."""
