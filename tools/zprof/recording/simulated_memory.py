"""Owns what a simulated machine's memories hold and for what: the storages of torch, and what tiers say of theirs.

`simulated.SimulatedRecorder` hands it what machine and runtime say, and its rows to the trace. It keeps no clock, no tensor.

Note: [Named or inferred]
    What the runtime says of a storage stands. Of others the category is inferred as `tracker` does on a real device: made in a
    forward with grad it is an activation, in a backward, a step or without grad temporary; what a step made and left alive is
    the optimizer's. Memory that a tier divides among what it holds is counted by what the tier says, and the rest of it, where
    it is page-locked, as not in use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.virtual import ACCELERATOR, HOST, Access, Happening, Machine, Moment, Stream, running
from zprof.recording.modules import OPTIMIZER, Doing, Places
from zprof.rows import TIERS, RowKind, placed, placement

__all__ = ["Peaks", "SimulatedMemory"]

_COUNTER, _ALLOC, _FREE = int(RowKind.COUNTER), int(RowKind.ALLOC), int(RowKind.FREE)
_SLACK = (placed("other", "host"), "(page-locked, not in use)")


@dataclass(frozen=True, slots=True)
class _Held:
    """A storage: what for, by whom; ``named`` where the runtime said so, ``mapped`` where it is a tier's to divide."""

    what: str
    key: str
    nbytes: int
    tier: str
    named: bool
    mapped: bool


class Peaks:
    """The most that any step held on the device and on the host; a simulation itself returns that of the last step.

    Attributes:
        most: bytes by tier; of a pipeline on the stage that holds the most there.
    """

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
        self._of: dict[Machine, _Peak] = {}

    @contextmanager
    def follow(self, machine: Machine) -> Iterator[None]:
        """Watch the machine, inside and from the first step of `stepping` on."""
        self._of[machine] = peak = _Peak(machine, self.most)
        try:
            yield
        finally:
            del self._of[machine]
            if peak in machine.listeners:
                machine.listeners.remove(peak)

    def stepping(self, step: Callable[..., object]) -> Callable[..., object]:
        """The same step; the first call of it on a machine begins to count."""

        @functools.wraps(step)
        def call(*args: object) -> object:
            peak = self._of.get(running())
            if peak is not None:
                peak.begin()
            return step(*args)

        return call


class _Peak:
    """One machine's listener."""

    def __init__(self, machine: Machine, most: dict[str, int]) -> None:
        self._machine, self._most = machine, most

    def begin(self) -> None:
        if self not in self._machine.listeners:
            self._machine.listeners.append(self)
            for index in range(len(self._machine.held)):
                self._count(index)

    def _count(self, index: int) -> None:
        self._most[TIERS[index]] = max(self._most.get(TIERS[index], 0), self._machine.held[index])

    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None:
        self._count(index)

    def freed(self, address: int, nbytes: int, index: int) -> None: ...
    def happened(self, happening: Happening) -> None: ...
    def recorded(self, moment: Moment, stream: Stream) -> None: ...
    def awaited(self, moment: Moment, stream: Stream) -> None: ...
    def kept(self, access: Access, stream: Stream) -> None: ...


class SimulatedMemory:
    """Storages and levels of one machine.

    Args:
        write: takes (kind, what, key, nbytes, ident): a row that happens now.
        places: says in which module's forward, or whose backward, the program is.
    """

    def __init__(self, machine: Machine, places: Places, write: Callable[[int, str, str, int, int], None]) -> None:
        self._machine, self._places, self._write = machine, places, write
        self._live: dict[int, _Held] = {}
        self._mapped = self._slack = 0
        self._levels: dict[tuple[str, str], int] = {}
        self._stepping = 0
        self._made_in_step: set[int] = set()

    def state(self) -> None:
        """Write all that is held."""
        for (what, key), level in self._levels.items():
            self._write(_COUNTER, what, key, level, 0)
        for address, held in self._live.items():
            self._add(address, held)
        self._slack = 0
        self._tell_slack()

    # Storages.

    def allocated(self, address: int, nbytes: int, index: int) -> None:
        """As a machine's listener."""
        mapped = address in self._machine.mapped
        doing, key = self._places.now()
        if self._stepping:
            doing, key = Doing.STEP, OPTIMIZER
            self._made_in_step.add(address)
        if index == HOST or doing in (Doing.BACKWARD, Doing.STEP) or not torch.is_grad_enabled():
            category = "temporary"
        else:
            category = "activation" if doing == Doing.FORWARD else "other"
        tier = TIERS[0] if index == ACCELERATOR else TIERS[1]
        self._live[address] = held = _Held(placed(category, tier), key, nbytes, tier, named=False, mapped=mapped)
        if mapped:
            self._mapped += nbytes
            self._tell_slack()
        self._add(address, held)

    def freed(self, address: int) -> None:
        """As a machine's listener."""
        held = self._live.pop(address, None)
        if held is None:
            return
        if held.mapped:
            self._mapped -= held.nbytes
            self._tell_slack()
        else:
            self._write(_FREE, held.what, held.key, held.nbytes, address)

    def made_by(self, happening: Happening) -> None:
        """What an operation outside of modules makes of other tensors may be kept for backward: a loss, say."""
        if len(happening.accesses) < 2 or not torch.is_grad_enabled():
            return
        for access in happening.accesses:
            held = self._live.get(access.start) if access.writes else None
            if held is not None and not held.named and held.what.startswith("other"):
                self._change(access.start, held, replace(held, what=placed("activation", held.tier)))

    def hold(self, what: str, key: str, storage: Any) -> None:
        """The runtime says what a storage is held for. A range of other memory is none: its tier counts it."""
        address, place = storage.data_ptr(), placement(what)
        held = self._live.get(address)
        if held is not None and place is not None:
            self._change(address, held, replace(held, what=placed(place[0], held.tier), key=key, named=True))

    def step_begins(self) -> None:
        """An optimizer's step, perhaps inside another's."""
        self._stepping += 1

    def step_ends(self) -> None:
        """What it made and left alive are states."""
        self._stepping -= 1
        for address in self._made_in_step:
            held = self._live.get(address)
            if held is not None and not held.named:
                self._change(address, held, replace(held, what=placed("optimizer", held.tier)))
        self._made_in_step.clear()

    def _add(self, address: int, held: _Held) -> None:
        if not held.mapped:
            self._write(_ALLOC, held.what, held.key, held.nbytes, address)

    def _change(self, address: int, before: _Held, after: _Held) -> None:
        self._live[address] = after
        if (before.what, before.key) != (after.what, after.key) and not before.mapped:
            self._write(_FREE, before.what, before.key, before.nbytes, address)
            self._write(_ALLOC, after.what, after.key, after.nbytes, address)

    # What tiers say.

    def counted(self, what: str, key: str, level: int, time_ns: int = 0) -> None:
        """The level of a quantity; its time is this computer's, and left aside."""
        before, self._levels[what, key] = self._levels.get((what, key), 0), level
        place = placement(what)
        on_host = place is not None and place[1] == TIERS[1]
        # In the order in which the sum does not rise where only its parts change.
        if on_host and level > before:
            self._tell_slack()
        self._write(_COUNTER, what, key, level, 0)
        if on_host and level < before:
            self._tell_slack()

    def _tell_slack(self) -> None:
        """Page-locked memory that nothing is held in; without an accelerator pages that nobody has touched are no memory."""
        if not self._machine.costs.accelerated:
            return
        used = sum(level for (what, _), level in self._levels.items() if what.endswith(f" on {TIERS[1]}"))
        slack = max(0, self._mapped - used)
        if slack != self._slack:
            self._slack = slack
            self._write(_COUNTER, *_SLACK, slack, 0)
