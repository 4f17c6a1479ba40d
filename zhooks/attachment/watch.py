"""What is asked where a training pass begins, on every rank, and hears what happened to the attachment in between.

Packages that plug in have theirs made by ``WATCHES``; a policy that was chosen has one of its own (``choice.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.optim import Optimizer

from offload.events import Bus
from offload.policy import Policy
from zhooks.comm import Comm
from zhooks.layout import Ignored
from zhooks.optim import Steps
from zhooks.unit import Unit


class Watch(Protocol):
    """Of one attachment."""

    def training_begins(self, policy: Policy) -> None:
        """A training pass begins under this policy.  Collective."""

    def applied(self) -> None:
        """The user has gone over to another policy or mesh."""

    def meet_again(self) -> None:
        """Ranks have recovered: they may have begun different numbers of passes."""

    def begin_anew(self) -> None:
        """A checkpoint was loaded, and steps are counted from there."""

    def close(self) -> None:
        """The attachment is over."""


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """What is watched.

    Attributes:
        units: those of the attachment, as they are laid out now.
        optimizers: those that all ranks know, in one order.  Collective.
        ignored: what the attachment leaves alone, the same on every rank.
    """

    comm: Comm
    bus: Bus
    units: Sequence[Unit]
    steps: Steps
    optimizers: Callable[[str], Sequence[Optimizer]]
    ignored: Ignored


#: Each makes one for every attachment.
WATCHES: list[Callable[[Watched], Watch]] = []
