"""Owns the samplers of one recording: which there are, when one fails, and that each is closed.

The recorder asks it once an interval. A sampler that raises is closed and asked no more; neither its mistake nor its warning
reaches the recorder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zprof.recording.sampler import Sampler

__all__ = ["Sampling"]


class Sampling:
    """The samplers of one recording.

    Args:
        warn: says what went wrong; never raises.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._given: list[Sampler] = []
        self._own: list[Sampler] = []
        self._handing = threading.Lock()
        self._noted: dict[str, Mapping[str, object]] = {}

    def add(self, sampler: Sampler) -> None:
        """One of the user's: kept when the recording's own are closed because it could not begin."""
        self._given.append(sampler)

    def open(self, *, resident: bool, nvml: str, children: Callable[[], Mapping[int, str]] | None = None) -> None:
        """The recording's own.

        Args:
            children: as of `ChildrenSampler`; None samples no children.
        Raises:
            CapabilityError: ``nvml`` is "on" and no GPU's library answers.
        """
        from zprof.gpu.sampling import open_gpus
        from zprof.recording.sampler import process_samplers

        self._own.extend(process_samplers())
        if resident:
            from zprof.recording.resident import ResidentSampler

            self._own.append(ResidentSampler())
        if children is not None:
            from zprof.recording.children import ChildrenSampler

            self._own.append(ChildrenSampler(children))
        if nvml != "off":
            self._own.append(open_gpus(required=nvml == "on"))

    def sample(self, into: Callable[[str, str, int], None]) -> None:
        """Hand what all of them say now to ``into``, but nothing of a sampler that was left while it was asked."""
        for sampler in (*self._own, *self._given):
            try:
                readings = tuple(sampler.sample())
            except Exception as error:
                self._drop(sampler, error)
                continue
            # Asking may take long, handing does not: who leaves a sampler waits for this alone.
            with self._handing:
                if sampler in self._own or sampler in self._given:
                    for reading in readings:
                        into(*reading)

    def notes(self) -> Iterator[tuple[str, Mapping[str, object]]]:
        """What those that keep a note would have written, where that is not what they said last."""
        return self._notes_of(lambda sampler: True)

    def news(self) -> Iterator[tuple[str, Mapping[str, object]]]:
        """The notes of those that have something to say before the end."""
        return self._notes_of(lambda sampler: getattr(sampler, "news", False))

    def _notes_of(self, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Mapping[str, object]]]:
        for sampler in (*self._own, *self._given):
            said = getattr(sampler, "note", None)
            if said is not None and wanted(sampler):
                try:
                    name, body = said()
                except Exception as error:
                    self._drop(sampler, error)
                    continue
                if self._noted.get(name) != body:
                    self._noted[name] = body
                    yield name, body

    def _drop(self, sampler: Sampler, error: Exception) -> None:
        for samplers in (self._own, self._given):
            if sampler in samplers:
                samplers.remove(sampler)
        self._warn(f"{type(sampler).__name__} raised {type(error).__name__}: {error}; it is not sampled again")
        self._close(sampler)

    def _close(self, sampler: Sampler) -> None:
        try:
            sampler.close()
        except Exception as error:
            self._warn(f"{type(sampler).__name__} could not be closed: {type(error).__name__}: {error}")

    def leave_resident(self) -> None:
        """What resident memory consists of is asked no more, and nothing of it is handed on after this returns."""
        from zprof.recording.resident import ResidentSampler

        for sampler in [each for each in self._own if isinstance(each, ResidentSampler)]:
            with self._handing:
                if sampler in self._own:
                    self._own.remove(sampler)
            self._close(sampler)

    def close_own(self) -> None:
        """Close the recording's own."""
        while self._own:
            self._close(self._own.pop())

    def close(self) -> None:
        """Close all."""
        self.close_own()
        while self._given:
            self._close(self._given.pop())
