"""What ``Attachment.observe`` returns: an observer that listens until it is closed.

Users hold it; it never emits. An observer that has a beginning and an end of its own (``start``, ``close``) gets them here.
"""

from __future__ import annotations

from offload.events import Bus, Observer

__all__ = ["Observation"]


class Observation:
    """An observer that listens; ``close()`` or leaving the ``with`` block ends it."""

    def __init__(self, bus: Bus, observer: Observer) -> None:
        self._bus, self.observer, self._open = bus, observer, True
        start = getattr(observer, "start", None)
        if start is not None:
            start()
        try:
            bus.attach(observer)
        except BaseException:
            # Interrupted: nobody will have a handle to end it by.
            self.close()
            raise

    def close(self) -> None:
        """End it; again changes nothing."""
        if not self._open:
            return
        self._open = False
        self._bus.detach(self.observer)
        close = getattr(self.observer, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
