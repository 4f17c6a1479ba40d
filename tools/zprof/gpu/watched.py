"""Owns one watched device: which of its quantities and buses answer, from which source, and why the others do not.

`sampling` makes one for each device and samples it. It never raises: what fails for good is dropped, all else goes on.
"""

from __future__ import annotations

from zprof.gpu.answers import Failure, ask
from zprof.gpu.counters import Meter, Total
from zprof.gpu.devices import Device
from zprof.gpu.library import Library
from zprof.gpu.quantities import Quantity, Scope
from zprof.recording.sampler import Reading

__all__ = ["Watched"]

_STRIKES = 3
_WHOLE_ONLY = "MIG: known only for the whole GPU"


class _Answering:
    """A quantity of one device with the reader that answers it."""

    __slots__ = ("quantity", "readers", "strikes")

    def __init__(self, quantity: Quantity) -> None:
        self.quantity = quantity
        self.readers = list(quantity.readers)
        self.strikes = 0


class Watched:
    """One device: the quantities and buses that answer, and why the others do not."""

    def __init__(self, library: Library, key: str, device: Device) -> None:
        self.key, self.device = key, device
        self.dropped: dict[str, str] = {}
        #: Why the device no longer answers at all; empty while it does.
        self.lost = ""
        self._library = library
        self._energy = Total()
        self._memory_nbytes = 0
        part = device.instance is not None
        self._answering: list[_Answering] = []
        self._meters: dict[str, Meter] = {}
        for quantity in (*library.quantities, library.energy):
            if part and quantity.scope is Scope.WHOLE:
                self.dropped[quantity.what] = _WHOLE_ONLY
            else:
                self._try(_Answering(quantity))
        for bus, sources in library.buses:
            if part:
                self.dropped[bus] = _WHOLE_ONLY
            elif not self.lost:
                self._meters[bus] = Meter(sources(library.api, device.handle))
                self._count(bus, [])
        memory = ask(lambda: library.total(library.api, device.handle))
        if isinstance(memory, int) and 0 < memory < 1 << 50:
            self._memory_nbytes = memory

    def sample(self) -> list[Reading]:
        """Readings of this device; what fails for good is dropped, and everything else goes on."""
        readings: list[Reading] = []
        for answering in tuple(self._answering):
            if self.lost:
                return readings
            value = self._read(answering)
            if value is not None:
                what = answering.quantity.what
                if answering.quantity is self._library.energy:
                    self._energy.advance(value)
                    value = self._energy.value
                readings.append((what, self.key, value))
        for bus in tuple(self._meters):
            self._count(bus, readings)
        return readings

    def sources(self) -> dict[str, str]:
        """What -> the call that answers it."""
        named = {answering.quantity.what: answering.readers[0][0] for answering in self._answering}
        return {**named, **{bus: meter.source for bus, meter in self._meters.items() if meter.source is not None}}

    def described(self) -> dict[str, object]:
        """The device, for the note."""
        device = self.device
        state: dict[str, object] = {"key": self.key, "label": device.label, "name": device.name, "uuid": device.uuid}
        if self._memory_nbytes:
            state["memory_nbytes"] = self._memory_nbytes
        if device.instance is not None:
            state["mig"] = {"gpu_instance": device.instance[0], "compute_instance": device.instance[1]}
        elif device.divided:
            state["mig"] = "divided"
        if self.lost:
            state["lost"] = self.lost
        return state

    def close(self) -> bool:
        """Stop; False where a call still blocks."""
        stopped = [meter.close() for meter in self._meters.values()]
        return all(stopped)

    def _read(self, answering: _Answering) -> int | None:
        """A value, or None after a failure that was noted."""
        handle = self.device.handle if answering.quantity.scope is Scope.INSTANCE else self.device.chip
        _, reader = answering.readers[0]
        value = ask(lambda: reader(self._library.api, handle))
        if not isinstance(value, Failure):
            answering.strikes = 0
            return value
        answering.strikes += 1
        if value.lost:
            self.lost = value.why
            return None
        if value.final or answering.strikes >= _STRIKES:
            answering.readers.pop(0)
            answering.strikes = 0
            if not answering.readers:
                self._answering.remove(answering)
                self.dropped[answering.quantity.what] = value.why
        return None

    def _try(self, answering: _Answering) -> None:
        """Find the reader that answers; a first answer that cannot be true may be followed by one that can."""
        self._answering.append(answering)
        while answering in self._answering and not self.lost:
            if (value := self._read(answering)) is not None:
                if answering.quantity is self._library.energy:
                    self._energy.advance(value)
                return

    def _count(self, bus: str, readings: list[Reading]) -> None:
        meter = self._meters[bus]
        totals = meter.totals()
        if totals is not None:
            readings += [(f"{bus} tx", self.key, totals[0]), (f"{bus} rx", self.key, totals[1])]
            return
        del self._meters[bus]
        meter.close()
        if meter.lost:
            self.lost = self.lost or "GPU is lost"
        self.dropped[bus] = "; ".join(meter.failures)
