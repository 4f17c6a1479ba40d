"""What ``Attachment.observe`` returns: an observer that listens until it is closed.

Users hold it; it never emits.
"""

from __future__ import annotations

from offload.events import Bus, Observer

__all__ = ["Observation"]


class Observation:
    """An observer that listens; ``close()`` or leaving the ``with`` block ends it."""

    def __init__(self, bus: Bus, observer: Observer) -> None:
        self._bus, self.observer = bus, observer

    def close(self) -> None:
        self._bus.detach(self.observer)

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
