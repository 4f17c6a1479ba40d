"""Policies that are chosen where the user leaves that to zhooks, and looked at again once the model has trained.

``attach`` asks the first of ``CHOOSERS``; the package that searches policies has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from offload.events import Bus
from offload.policy import Policy
from offload.tier import Tier
from zhooks.attachment.watch import Watch
from zhooks.comm import Comm
from zhooks.plan import Request


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """What an attachment under a chosen policy says, and what can be asked of it.

    Attributes:
        quiet: whether nothing of a pass is open here, so that the layout may change.
        optimizers: those of the model that every rank knows.  Collective.
        placed: bytes that are kept on a tier off the device.
        change: goes over to another policy; returns why it could not, and then everything is as it was.  Collective.
        tell: hears what came of it.
    """

    comm: Comm
    bus: Bus
    quiet: Callable[[], bool]
    optimizers: Callable[[], Sequence[Optimizer]]
    placed: Callable[[Tier], int]
    change: Callable[[Policy], str]
    tell: Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """The request with the policy that was chosen, and who looks at it again once the model is attached."""

    request: Request
    review: Callable[[Running], Watch]


#: What chooses a policy for a request that leaves it open.  Collective.
CHOOSERS: list[Callable[[Request, Comm], Chosen]] = []
