"""What a simulated step was busy with, by resource, and what the device held before updates began.

``policy_search.py`` puts one into each simulation it makes.  It listens to the machine and to torch's steps of optimizers; it
changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.virtual import ACCELERATOR, Access, Happening, Machine, Moment, Stream
from zhooks.simulate.measure import covered, merged

__all__ = ["RESOURCES", "Watch"]

#: In the order in which they are shown.
RESOURCES = ("compute", "update", "gather", "reduce", "collectives", "copies", "disk", "host update", "dispatch", "control")


#: Of torch's process groups, as ``zhooks.comm`` calls them on a CPU's one stream.
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(slots=True, weakref_slot=True)
class Watch:
    """One simulation's last step.

    Attributes:
        busy: seconds by resource; "compute" is forward and backward on the device, "update" the optimizer's there,
            "collectives" those of the model's own code (``tp``).
        moved: bytes by resource.
        passes_peak: the most that the device held outside of updates.
    """

    busy: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    moved: Counter[str] = field(default_factory=Counter)
    passes_peak: int = 0
    _spans: list[tuple[float, float]] = field(default_factory=list)
    _machine: Machine | None = None
    _counts: bool = False
    _updating: bool = False

    @property
    def passes_s(self) -> float:
        """Seconds in which forward and backward compute or wait for collectives of their own."""
        return covered(merged(self._spans))

    def open(self, machine: Machine) -> None:
        """Follow this machine."""
        self._machine = machine
        machine.listeners.append(self)

    def begin(self) -> None:
        """A step begins: what was seen before does not count."""
        assert self._machine is not None
        self.busy, self.moved, self._updating, self._counts = defaultdict(float), Counter(), False, True
        self.passes_peak = self._machine.held[ACCELERATOR]
        self._spans = []

    def end(self) -> None:
        """It has been issued: what detaching does is not its own."""
        self._counts = False

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._updating = True

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._updating = False

    def happened(self, happening: Happening) -> None:
        assert self._machine is not None
        if not self._counts:
            return
        resource = self._resource(happening)
        self.busy[resource] += happening.end - happening.begin
        self.moved[resource] += happening.nbytes
        if resource in ("compute", "collectives"):
            self._spans.append((happening.begin, happening.end))
        if happening.what.startswith(("aten", "copy")):
            self.busy["dispatch"] += self._machine.costs.issue

    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None:
        assert self._machine is not None
        if index == ACCELERATOR and self._counts and not self._updating:
            self.passes_peak = max(self.passes_peak, self._machine.held[ACCELERATOR])

    def recorded(self, moment: Moment, stream: Stream) -> None: ...
    def awaited(self, moment: Moment, stream: Stream) -> None: ...
    def kept(self, access: Access, stream: Stream) -> None: ...
    def freed(self, address: int, nbytes: int, index: int) -> None: ...

    def _resource(self, happening: Happening) -> str:
        stream, what = happening.stream.name, happening.what
        for name in ("gather", "reduce", "disk", "collectives"):
            if stream.startswith(name) or what.startswith(f"{name} "):
                return name
        assert self._machine is not None
        accelerated, operation = self._machine.costs.accelerated, what.startswith(("aten", "copy"))
        if stream == "compute" or (stream == "host" and operation and not accelerated):
            return "update" if self._updating else "compute"
        if what.partition(" over ")[0] in _COLLECTIVES:
            return "collectives"
        if stream == "host":
            return "host update" if operation else "control"
        return "control" if stream.startswith("control") else "copies"
