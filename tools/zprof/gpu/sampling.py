"""Owns the sampler of GPUs: it opens the library of whoever made them, watches this process's devices, and says what answered.

The recorder and ``zprof top`` sample it as any other `Sampler`. It never raises after it was made: no library, no
device, no permission and a GPU that falls off the bus are states, each said in one line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from offload.errors import CapabilityError
from zprof.clock import now_ns
from zprof.gpu import nvml
from zprof.gpu.library import Library, Opened, kernel_shows
from zprof.gpu.vendors import AMD, INTEL, Vendor
from zprof.recording.sampler import Reading

if TYPE_CHECKING:
    # Imported where a library answers: a start without a GPU does without them.
    from zprof.gpu.claims import Claims
    from zprof.gpu.devices import Device
    from zprof.gpu.watched import Watched

__all__ = ["GpuSampler", "open_gpus"]


def open_gpus(*, required: bool = False, everything: bool = False) -> GpuSampler:
    """Open the first library that shows a device, and watch those of this process, or all of them.

    Args:
        required: raise where nothing can be watched, not even later, instead of returning a sampler whose state says why.
        everything: all devices, keyed by their place on the bus ("gpu0", "gpu0:1" for a MIG instance); otherwise those
            that are left to this process, keyed as torch numbers them, so that "gpu0" is "cuda:0" or "xpu:0".
    Raises:
        CapabilityError: ``required``, and no library shows this process a device.
    """
    sampler = GpuSampler(_first(everything), everything=everything)
    if required and not (sampler.ok or sampler.waits):
        sampler.close()
        raise CapabilityError(
            f"nvml: expected a GPU that NVML, AMD SMI or Level Zero shows, found {sampler.state()['state']} ({sampler.why}); "
            f"install the driver, start the container with its GPUs (--gpus all), or record with --nvml auto"
        )
    return sampler


def _first(everything: bool) -> Opened:
    """The first library that shows devices; where none does, what NVML says, or the first other that is there at all."""
    first = nvml.opened()
    for vendor, begin in _OTHERS:
        # Loading a library for nothing is left out: some take long, and some speak up, where the kernel has no such GPU.
        if first.state == "ok" or not kernel_shows(vendor):
            continue
        other = begin(everything)
        if other.state == "ok" or (first.state == "absent" and other.state != "absent"):
            if first.library is not None:
                first.library.close()
            first = other
        elif other.later is not None:
            return replace(first, later=other.later, notes=(*first.notes, *other.notes))
        else:
            first = replace(first, notes=(*first.notes, f"a GPU of another vendor is not sampled: {other.why}"))
    return first


def _amd(everything: bool) -> Opened:
    from zprof.gpu.amd import opened

    return opened()


def _intel(everything: bool) -> Opened:
    from zprof.gpu.intel import opened, opened_later

    if everything:
        return opened()
    return Opened(INTEL, "absent", "", notes=("Level Zero is asked once torch.xpu runs",), later=opened_later)


#: Imported where the kernel shows a GPU of theirs.
_OTHERS: tuple[tuple[Vendor, Callable[[bool], Opened]], ...] = ((AMD, _amd), (INTEL, _intel))


class GpuSampler:
    """A sampler of the devices it watches; without any it samples nothing, and its state says why.

    Args:
        opened: the library and the devices of the host; those of this process are chosen among them, and again when torch
            begins to compute on them: until then the script may still say which.
        everything: watch all of them.
    """

    def __init__(self, opened: Opened, *, everything: bool = False) -> None:
        self._everything = everything
        self._claims: Claims | None = None
        #: Visible here, and sampled by another rank of the job.
        self._elsewhere: dict[str, Device] = {}
        self._watched: list[Watched] = []
        self._samples = 0
        self._spent_ns = 0
        self._last: dict[str, object] | None = None
        # Held while the library is asked: a call that hangs keeps the thread it is on, and no other.
        self._asking = threading.Lock()
        self._begin(opened)

    def _begin(self, opened: Opened) -> None:
        self.vendor, self._library, self._driver, self._later = opened.vendor, opened.library, opened.driver, opened.later
        self._state, self._why = opened.state, opened.why
        self._notes = list(opened.notes)
        self._of_host = list(opened.notes)
        self._found = opened.devices
        self._running = False
        if self._library is None or not self._found:
            return
        if self._everything:
            self._watch({f"gpu{device.label}": device for device in self._found}, self._library)
        else:
            self._look(self._library)

    @property
    def ok(self) -> bool:
        """Whether any device is watched and answers."""
        return self._state == "ok" and self._library is not None

    @property
    def waits(self) -> bool:
        """Whether the library begins only once the script has begun to use its devices."""
        return self._later is not None

    @property
    def why(self) -> str:
        """What is wrong, on one line; empty where nothing is."""
        return self._why

    def _watch(self, keyed: Mapping[str, Device], library: Library) -> None:
        """Begin with these devices, by the keys their rows shall have."""
        from zprof.gpu.watched import Watched

        self._watched += [Watched(library, key, device) for key, device in keyed.items()]
        self._look_for_losses()

    def _look(self, library: Library) -> None:
        """Watch what this process computes on, but for what another rank of its job samples already."""
        from zprof.gpu.claims import Claims

        running, seen = library.running(), library.visible(self._found)
        keyed = {f"gpu{place}": device for place, device in enumerate(seen.devices)}
        before = {watched.key: watched.device for watched in self._watched} | self._elsewhere
        self._running = running
        if keyed == before and keyed:
            return
        for watched in self._watched:
            watched.close()
        self._state, self._why = "ok", ""
        if not keyed:
            self._state = "no devices"
            self._why = f"none of the devices {self.vendor.library} shows is visible to this process"
        self._notes = [*self._of_host, *seen.notes]
        if before:
            was = ", ".join(f"{key} {device.label}" for key, device in before.items())
            self._notes.append(f"keys corrected when torch began to compute on them; until then by the bus: {was}")
        if self._claims is not None:
            self._claims.close()
        self._claims, self._elsewhere = Claims(), keyed
        self._watched = []
        self._claim(library)

    def _claim(self, library: Library) -> None:
        """Watch what no other rank samples, or no longer does."""
        assert self._claims is not None
        taken = {key: device for key, device in self._elsewhere.items() if self._claims.take(device.uuid or device.label)}
        for key in taken:
            del self._elsewhere[key]
        self._watch(taken, library)

    def sample(self) -> Sequence[Reading]:
        """One reading of everything that answers, quick calls only, in the units of a trace."""
        if not self._asking.acquire(blocking=False):
            return ()
        try:
            return self._sampled()
        finally:
            self._asking.release()

    def _sampled(self) -> Sequence[Reading]:
        if self._later is not None and (opened := self._later()) is not None:
            self._begin(opened)
        library = self._library
        if library is not None and self._found and not (self._everything or self._running) and library.running():
            self._look(library)
        if not self.ok or library is None:
            return ()
        begin = now_ns()
        if self._elsewhere:
            self._claim(library)
        readings: list[Reading] = []
        for watched in self._watched:
            readings += watched.sample()
        self._look_for_losses()
        self._samples += 1
        self._spent_ns += now_ns() - begin
        return readings

    def state(self) -> dict[str, object]:
        """The body of the trace's note: what answered, from which source, and what did not and why."""
        if self._last is not None:
            return self._last
        sources: dict[str, str] = {}
        for watched in self._watched:
            for what, source in watched.sources().items():
                # Devices of a host mostly agree; one that differs is named beside the others.
                if sources.setdefault(what, source) != source:
                    sources[f"{what} of {watched.key}"] = source
        return {
            "state": self._state,
            "why": self._why,
            "driver": self._driver,
            "sources": sources,
            "devices": [watched.described() for watched in self._watched],
            "dropped": {f"{watched.key} {what}": why for watched in self._watched for what, why in watched.dropped.items()},
            "notes": [
                *self._notes,
                *(f"{key} ({device.name}): sampled by another rank of this job" for key, device in self._elsewhere.items()),
            ],
            "sample_us": self._spent_ns // 1000 // self._samples if self._samples else 0,
        }

    def note(self) -> tuple[str, dict[str, object]]:
        """The trace's note about this sampler: its name and its body."""
        return self.vendor.prefix, self.state()

    def close(self) -> None:
        """Stop watching and give the library back; again changes nothing."""
        self._later = None
        if self._library is None:
            return
        # What answered is asked for after the end too, for the last note.
        self._last = self.state()
        library, self._library = self._library, None
        if self._claims is not None:
            self._claims.close()
        # A thread that still blocks in the driver would run into a library that was shut down.
        if not self._asking.acquire(blocking=False):
            return
        try:
            stopped = [watched.close() for watched in self._watched]
            if all(stopped):
                library.close()
        finally:
            self._asking.release()

    def _look_for_losses(self) -> None:
        lost = [watched for watched in self._watched if watched.lost]
        for watched in lost:
            line = f"{watched.key} ({watched.device.name}): {watched.lost}"
            if line not in self._notes:
                self._notes.append(line)
        if self._watched and len(lost) == len(self._watched) and self._state == "ok":
            self._state, self._why = "lost", lost[0].lost
