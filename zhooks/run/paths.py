"""The paths of one attachment: ways through the model by their labels, each recorded in its first pass and agreed on once.

``runtime.py`` asks for a walk at the begin of a pass and says when it has ended; ``schedule.py`` does the arithmetic.  It
never gathers and never releases.
"""

from __future__ import annotations

from collections.abc import Sequence

from zhooks.comm import ControlPlane
from zhooks.layout import UnitPlan, inner_units
from zhooks.run.schedule import Choices, LoneWalk, Path, Scope, Walk, arrange, backward_guess, keep_gathered

__all__ = ["Paths"]


class Paths:
    """Ways through the units of one attachment, and what each keeps gathered for its backward."""

    def __init__(self, choices: Choices, control: ControlPlane) -> None:
        self.choices, self._control = choices, control
        self._walk = LoneWalk if control.size == 1 else Walk
        self._paths: dict[str, Path] = {}
        self._units: list[UnitPlan] = []
        # Of each unit, those that run inside its modules.
        self._inner: dict[int, frozenset[int]] = {}
        self._last = "loose"
        # What recorded paths keep gathered, with the choices and the order it was found for: asked twice a pass.
        self._kept: dict[str, tuple[Choices, list[int], frozenset[int]]] = {}
        #: Some unit is gathered for its uses only.
        self.releases = False

    def take(self, units: Sequence[UnitPlan]) -> None:
        """Paths lead through these units from now on; those known are forgotten."""
        self._units = list(units)
        self._paths.clear()
        self._kept.clear()
        self._inner = inner_units(units)
        self.releases = any(unit.releasable for unit in units)

    @staticmethod
    def label(scope: Scope, training: bool, grad: bool) -> str:
        """What a forward that begins at ``scope`` is called."""
        return f"{scope.name} {'train' if training else 'eval'}{'' if grad else ' no_grad'}"

    def forward(self, label: str, scope: Scope, grad: bool) -> Walk:
        """A forward of that label begins at ``scope``."""
        if grad:
            self._last = label
        return self._walk(self._of(label, scope.numbers), self.choices.prefetch)

    def backward(self) -> Walk:
        """The backward of the last forward begins."""
        label = f"backward of {self._last}"
        path = self._paths.get(label)
        return self._walk(self._of(label, self._guess_backward()) if path is None else path, self.choices.prefetch)

    def _of(self, label: str, guess: Sequence[int]) -> Path:
        if label not in self._paths:
            self._paths[label] = Path(label, list(guess), uneven=self.choices.uneven)
        return self._paths[label]

    def _guess_backward(self) -> list[int]:
        forward = self._paths.get(self._last)
        order = backward_guess(forward.order if forward is not None else [], self._inner)
        return [number for number in order if self._units[number].releasable]

    def record(self, walk: Walk, open_: Sequence[int], released: Sequence[int] = ()) -> frozenset[int]:
        """All ranks take over one order after a first pass; the units that none of them has ``released``.  Collective."""
        path, count = walk.path, len(self._units)
        here = [number in walk.used for number in range(count)] + [number in released for number in range(count)]
        anywhere = self._control.any(here, path.name)
        path.used = frozenset(number for number in range(count) if anywhere[number])
        order = self._control.on_first(lambda: list(walk.used))
        if path.uneven:
            order, open_ = list(dict.fromkeys(order)), path.order
        path.order = arrange(path.order, order, path.used | set(open_))
        path.recorded = True
        return frozenset(number for number in range(count) if not anywhere[count + number])

    def record_backward(self, walk: Walk) -> None:
        """Backward reads no parameters of some units (an embedding): what forward used and backward did not is left out."""
        forward = self._paths.get(self._last)
        used = forward.used if forward is not None else frozenset()
        self.record(walk, [number for number in walk.path.order if number not in used])

    def keep(self, path: Path, *, grad: bool) -> frozenset[int]:
        """The units that path keeps gathered: for its backward, and where it has none for the next pass.

        See Note [Kept from pass to pass] in ``schedule.py``.
        """
        if not self.releases or not path.recorded or (path.uneven and self.choices.reshard is not True):
            # Ranks that differ may not be at one unit when a pass ends: they keep all, or none.
            return frozenset(range(len(self._units))) if self.choices.reshard is False else frozenset()
        known = self._kept.get(path.name)
        if known is None or known[0] is not self.choices or known[1] != path.order:
            known = self._kept[path.name] = self.choices, list(path.order), self._keep(path, grad)
        return known[2]

    def _keep(self, path: Path, grad: bool) -> frozenset[int]:
        units = (self._units[number] for number in path.order)
        nbytes = {unit.number: unit.full_nbytes for unit in units if unit.releasable and (unit.trainable or not grad)}
        order, budget = [number for number in path.order if number in nbytes], self.choices.budget
        return keep_gathered(order, nbytes, reshard=self.choices.reshard, budget=budget if grad else budget or 0)

    def gathers(self) -> list[int] | None:
        """The units one training step gathers, in order, by the plan; None before a first step."""
        forward = self._paths.get(self._last)
        backward = self._paths.get(f"backward of {self._last}")
        if forward is None or not forward.recorded:
            return None
        if not self.releases:
            return [unit.number for unit in self._units]
        kept = self.keep(forward, grad=True)
        return [*forward.order, *(number for number in (backward.order if backward else ()) if number not in kept)]
