"""What plugs into the core: policies chosen where they are left open, and what follows the passes of a session.

Packages above ``attach.py`` put theirs into these lists.  Others are imported by the method that needs them: see ``needed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from offload.errors import CapabilityError
from offload.policy import Policy
from zhooks.comm import Comm
from zhooks.plan import Request

if TYPE_CHECKING:
    from zhooks.session.session import Session

__all__ = ["CHOOSERS", "WATCHES", "Chosen", "Watch", "needed"]


class Watch(Protocol):
    """What follows the training passes of one session."""

    def training_begins(self, policy: Policy) -> None:
        """A training pass begins under this policy.  Collective."""

    def applied(self) -> None:
        """The user has gone over to another policy or mesh."""

    def meet_again(self) -> None:
        """Ranks have recovered: they may have begun different numbers of passes."""

    def begin_anew(self) -> None:
        """A checkpoint was loaded, and steps are counted from there."""

    def close(self) -> None:
        """The model is detached."""


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """The request with the policy that was chosen, and who reviews the choice once the model is attached."""

    request: Request
    review: Callable[[Session], Watch]


#: Chooses a policy for a request that leaves it open.  Collective.
CHOOSERS: list[Callable[[Request, Comm], Chosen]] = []
#: Each makes one for every session.
WATCHES: list[Callable[[Session], Watch]] = []


@contextmanager
def needed(package: str, what: str) -> Iterator[None]:
    """Around the import of a package above the core, in the function that needs it.

    Raises:
        CapabilityError: the package is not there.
    """
    try:
        yield
    except ImportError as error:
        raise CapabilityError(f"{what} needs the package zhooks.{package}, found none. Install all of zhooks.") from error
