"""What lasts as long as one forward pass: where it began, which modules are running, and the way it takes.

``runtime.py`` makes it when a forward enters the outermost hooked module and drops it when that has returned or raised.  It
never gathers, and outlives no pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType

from zhooks.run.schedule import Walk
from zhooks.unit import Unit

__all__ = ["Frame", "Pass"]


@dataclass(slots=True)
class Frame:
    """A hooked module that is running, and the units that were entered through it so far."""

    module: object
    entered: list[Unit] = field(default_factory=list)


@dataclass(slots=True)
class Pass:
    """A forward pass, or a recomputation inside a backward.

    Attributes:
        caller: the outermost module's own call.
        label: what observers know it by; "" for a recomputation.
        walk: along the path of the pass; None for a recomputation, which goes the way of its backward, and for a local pass
            (``Runtime._is_local``), which goes nowhere.
        keep: units that stay gathered for the backward that is to follow.
        grad: it is differentiated.
        saving: what autograd saves passes through ours of its hooks.
        frames: from the outermost module inwards.
    """

    caller: FrameType
    label: str = ""
    walk: Walk | None = None
    keep: frozenset[int] = frozenset()
    grad: bool = True
    saving: bool = False
    frames: list[Frame] = field(default_factory=list)
