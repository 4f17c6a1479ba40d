"""Owns the NVML sampler: it opens the driver's library, watches the devices of this process, and says what answered.

The recorder and ``zprof top`` sample it as any other `Sampler`. It never raises after it was made: no NVML, no
device, no permission and a GPU that falls off the bus are states, each said in one line.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.errors import CapabilityError
from zprof.clock import now_ns
from zprof.gpu.answers import Failure, Nvml, ask, one_line
from zprof.recording.sampler import Reading, torch_uuids

if TYPE_CHECKING:
    # Imported where NVML answers: a start without a GPU does without them.
    from zprof.gpu.claims import Claims
    from zprof.gpu.devices import Device
    from zprof.gpu.watched import Watched

__all__ = ["NvmlSampler", "Opened", "open_nvml", "opened"]

_LIBRARY = "libnvidia-ml.so.1"
_STATES = {9: "no driver", 4: "no permission", 17: "no permission", 18: "mismatch", 15: "lost", 16: "lost"}


@dataclass(frozen=True, slots=True)
class Opened:
    """How opening went: the library where it did, and the state either way."""

    nvml: Nvml | None
    state: str
    why: str
    driver: str = ""
    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()


def open_nvml(*, required: bool = False, everything: bool = False) -> NvmlSampler:
    """Open NVML and watch the devices of this process, or all the driver shows.

    Args:
        required: raise where nothing can be watched, instead of returning a sampler whose state says why.
        everything: all devices, keyed by their place on the bus ("gpu0", "gpu0:1" for a MIG instance); otherwise those
            CUDA_VISIBLE_DEVICES leaves to this process, keyed as CUDA numbers them, so that "gpu0" is "cuda:0".
    Raises:
        CapabilityError: ``required``, and NVML is absent or shows this process no device.
    """
    sampler = _open(everything)
    if required and not sampler.ok:
        sampler.close()
        raise CapabilityError(
            f"nvml: expected a GPU that NVML shows, found {sampler.state()['state']} ({sampler.why}); install the driver, "
            f"start the container with --gpus all, or record with --nvml auto"
        )
    return sampler


def _open(everything: bool) -> NvmlSampler:
    library = opened()
    if library.nvml is None:
        return NvmlSampler(None, library.state, library.why)
    if everything:
        keyed = {f"gpu{device.label}": device for device in library.devices}
        notes = library.notes
        sampler = NvmlSampler(library.nvml, library.state, library.why, driver=library.driver, notes=notes)
        sampler.watch(keyed)
        return sampler
    sampler = NvmlSampler(
        library.nvml, library.state, library.why, driver=library.driver, notes=library.notes, found=library.devices
    )
    sampler.look()
    return sampler


def opened() -> Opened:
    """The library, begun; who gets one that is not None shuts it down."""
    try:
        # Asked before the bindings are imported, which costs more than all of a start without a GPU.
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return Opened(None, "absent", f"no NVML: {one_line(str(error))}")
    imported = ask(_bindings)
    if isinstance(imported, Failure):
        return Opened(None, "absent", f"NVML is there, its bindings are not ({imported.why}): pip install nvidia-ml-py")
    nvml = imported
    begun = ask(nvml.nvmlInit)
    if isinstance(begun, Failure):
        return Opened(None, _STATES.get(begun.code or 0, "failed"), f"NVML does not start: {begun.why}")
    driver = ask(nvml.nvmlSystemGetDriverVersion)
    said = one_line(driver, 64) if isinstance(driver, str) else ""
    from zprof.gpu.devices import found_devices

    found = found_devices(nvml)
    if isinstance(found, Failure):
        state = _STATES.get(found.code or 0, "failed")
        return Opened(nvml, state, f"NVML shows no devices: {found.why}", said)
    devices, notes = found
    if not devices:
        return Opened(nvml, "no devices", "NVML shows no devices", said, notes=tuple(notes))
    return Opened(nvml, "ok", "", said, tuple(devices), tuple(notes))


def _bindings() -> Any:
    import pynvml

    return pynvml


class NvmlSampler:
    """A sampler of the devices it watches; without any it samples nothing, and its state says why.

    Args:
        nvml: ``pynvml`` after its start, or None.
        state: "ok", "absent", "no driver", "no permission", "mismatch", "no devices", "lost" or "failed".
        why: the state in one line.
        found: all devices of the host, of which those of this process are chosen, again when its CUDA begins to run: until then
            the script may still say which.
    """

    def __init__(
        self,
        nvml: Nvml | None,
        state: str,
        why: str,
        *,
        driver: str = "",
        notes: Sequence[str] = (),
        found: Sequence[Device] = (),
    ) -> None:
        self._nvml = nvml
        self._state, self._why, self._driver = state, why, driver
        self._notes = list(notes)
        self._of_host = list(notes)
        self._found = tuple(found)
        self._by_cuda = False
        self._claims: Claims | None = None
        #: Visible here, and sampled by another rank of the job.
        self._elsewhere: dict[str, Device] = {}
        self._watched: list[Watched] = []
        self._samples = 0
        self._spent_ns = 0
        self._last: dict[str, object] | None = None

    @property
    def ok(self) -> bool:
        """Whether any device is watched and answers."""
        return self._state == "ok" and self._nvml is not None

    @property
    def why(self) -> str:
        """What is wrong, on one line; empty where nothing is."""
        return self._why

    def watch(self, keyed: Mapping[str, Device]) -> None:
        """Begin with these devices, by the keys their rows shall have."""
        assert self._nvml is not None or not keyed, "devices come from an open NVML"
        from zprof.gpu.watched import Watched

        self._watched = [Watched(self._nvml, key, device) for key, device in keyed.items()]
        self._look_for_losses()

    def look(self) -> None:
        """Watch what this process computes on, but for what another rank of its job samples already."""
        from zprof.gpu.claims import Claims
        from zprof.gpu.devices import visible_devices

        if self._nvml is None or not self._found:
            return
        uuids = torch_uuids()
        wanted, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
        seen = visible_devices(self._found, wanted, order=order, uuids=uuids)
        keyed = {f"gpu{place}": device for place, device in enumerate(seen.devices)}
        before = {watched.key: watched.device for watched in self._watched} | self._elsewhere
        self._by_cuda = uuids is not None
        if keyed == before and keyed:
            return
        for watched in self._watched:
            watched.close()
        self._state, self._why = "ok", ""
        if not keyed:
            self._state, self._why = "no devices", "none of the devices NVML shows is visible to this process"
        self._notes = [*self._of_host, *seen.notes]
        if before:
            was = ", ".join(f"{key} {device.label}" for key, device in before.items())
            self._notes.append(f"keyed anew when CUDA began to run; until then by the bus: {was}")
        if self._claims is not None:
            self._claims.close()
        self._claims, self._elsewhere = Claims(), keyed
        self._watched = []
        self._claim()

    def _claim(self) -> None:
        """Watch what no other rank samples, or no longer does."""
        assert self._claims is not None and self._nvml is not None
        from zprof.gpu.watched import Watched

        for key, device in tuple(self._elsewhere.items()):
            if self._claims.take(device.uuid or device.label):
                del self._elsewhere[key]
                self._watched.append(Watched(self._nvml, key, device))
        self._look_for_losses()

    def sample(self) -> Sequence[Reading]:
        """One reading of everything that answers, quick calls only, in the units of a trace."""
        if self._nvml is not None and self._found and not self._by_cuda and torch_uuids() is not None:
            self.look()
        if not self.ok:
            return ()
        begin = now_ns()
        if self._elsewhere:
            self._claim()
        readings: list[Reading] = []
        for watched in self._watched:
            readings += watched.sample()
        self._look_for_losses()
        self._samples += 1
        self._spent_ns += now_ns() - begin
        return readings

    def state(self) -> dict[str, object]:
        """The body of the trace's "nvml" note: what answered, from which source, and what did not and why."""
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
        return "nvml", self.state()

    def close(self) -> None:
        """Stop watching and give NVML back; again changes nothing."""
        if self._nvml is None:
            return
        # What answered is asked for after the end too, for the last note.
        self._last = self.state()
        nvml, self._nvml = self._nvml, None
        if self._claims is not None:
            self._claims.close()
        stopped = [watched.close() for watched in self._watched]
        # A thread that still blocks in the driver would run into a library that was shut down.
        if all(stopped):
            ask(nvml.nvmlShutdown)

    def _look_for_losses(self) -> None:
        lost = [watched for watched in self._watched if watched.lost]
        for watched in lost:
            line = f"{watched.key} ({watched.device.name}): {watched.lost}"
            if line not in self._notes:
                self._notes.append(line)
        if self._watched and len(lost) == len(self._watched) and self._state == "ok":
            self._state, self._why = "lost", lost[0].lost
