"""Owns what the sampler needs of a vendor's library: its devices, and what each is asked for.

`nvml` opens one; `sampling` and `watched` use it and do not know whose it is. It samples nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Imported where a library answers: a start without a GPU does without them.
    from zprof.gpu.counters import Source
    from zprof.gpu.devices import Device, Visible
    from zprof.gpu.quantities import Quantity
    from zprof.gpu.vendors import Vendor

__all__ = ["Library", "Opened"]


@dataclass(frozen=True, slots=True)
class Library:
    """A library that has begun.

    Attributes:
        api: what its readers are handed beside a device's handle.
        energy: the one of its quantities that only grows.
        buses: (name of its rows, the ways to the bytes that crossed it, the best first).
        total: bytes of memory that a device has.
        visible: of its devices those that this process computes on, as far as is known now.
        running: whether the process computes on them already, so that nothing is guessed.
        close: gives it back.
    """

    api: Any
    quantities: tuple[Quantity, ...]
    energy: Quantity
    buses: tuple[tuple[str, Callable[[Any, Any], Sequence[Callable[[], Source]]]], ...]
    total: Callable[[Any, Any], int]
    visible: Callable[[Sequence[Device]], Visible]
    running: Callable[[], bool]
    close: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Opened:
    """How opening went: the library where it did, and the state either way.

    Attributes:
        state: "ok", "absent", "no driver", "no permission", "mismatch", "no devices", "lost" or "failed".
        why: the state in one line, "" where it is "ok".
    """

    vendor: Vendor
    state: str
    why: str
    library: Library | None = None
    driver: str = ""
    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
