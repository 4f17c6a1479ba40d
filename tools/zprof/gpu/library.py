"""Owns what the sampler needs of a vendor's library: its devices, what each is asked for, and how a call into C ends.

`nvml`, `amd` and `intel` each open one; `sampling` and `watched` use it and do not know whose it is. It samples nothing itself.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zprof.clock import now_ns
from zprof.gpu.answers import Failure, Refused, Unbelievable, ask, one_line

if TYPE_CHECKING:
    # Imported where a library answers: a start without a GPU does without them.
    from zprof.gpu.counters import Source
    from zprof.gpu.devices import Device, Visible
    from zprof.gpu.quantities import Quantity
    from zprof.gpu.vendors import Vendor

__all__ = ["Calls", "Counted", "Library", "Opened", "Rate", "begun", "kernel_shows", "measured", "text_of"]

#: Where the kernel lists GPUs, whoever made them.
DRM = Path("/sys/class/drm")
#: From a rate's first reading to its second; and for how long a counter that is not written anew is believed.
_MOMENT_S, _STALE_NS = 0.02, 2_000_000_000
#: More than any device's buses carry; a faster counter is one that jumped.
_MOST_PER_SECOND = 16 << 40


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
        later: asked again and again where a library may begin only once the script has begun to use it: what it is then.
    """

    vendor: Vendor
    state: str
    why: str
    library: Library | None = None
    driver: str = ""
    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
    later: Callable[[], Opened | None] | None = None


class Calls:
    """A C library whose functions answer 0, or a code.

    Args:
        words: code -> why, in words.
        final: codes that later calls will answer alike.  lost: those that say that the whole device is gone.
    """

    def __init__(
        self, library: ctypes.CDLL, words: Mapping[int, str], final: frozenset[int], lost: frozenset[int] = frozenset()
    ) -> None:
        self._library, self._words, self._final, self._lost = library, words, final, lost

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call ``name`` with arguments that are of ctypes' types.

        Raises:
            Refused: the library lacks it, or it did not answer 0.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise Refused(f"{name} is not in this library", final=True) from None
        function.restype = ctypes.c_uint32
        code = int(function(*arguments))
        if code:
            words = self._words.get(code, f"error {code:#x}")
            raise Refused(words, final=code in self._final, lost=code in self._lost, code=code)

    def handles(self, name: str, *of: Any, most: int = 256) -> list[int]:
        """What a function lists that is asked twice: how many there are, and which."""
        count = ctypes.c_uint32(0)
        self(name, *of, ctypes.byref(count), None)
        if not count.value:
            return []
        if count.value > most:
            raise Unbelievable(f"{name} counts {count.value}, expected at most {most}")
        found = (ctypes.c_void_p * count.value)()
        self(name, *of, ctypes.byref(count), found)
        return [each for each in found[: count.value] if each]


class Rate:
    """How fast a counter rises by a clock that is read with it.

    Args:
        read: (counter, clock).
    """

    def __init__(self, read: Callable[[], tuple[int, int]]) -> None:
        self._read = read
        self._last: tuple[int, int] | None = None
        self._at_ns = 0
        self._rate: float | None = None

    def begin(self) -> None:
        """Read once, so that the first rate need not wait."""
        with suppress(Refused, Unbelievable):
            self._take(self._read())

    def __call__(self) -> float:
        """Since the call before; the first time over a moment. Raises what reading does, and `Unbelievable`."""
        last = self._last or self._take(self._read())
        if self._rate is None:
            time.sleep(max(0.0, _MOMENT_S - (now_ns() - self._at_ns) / 1e9))
        value, clock = self._read()
        if value < last[0] or clock < last[1]:
            self._take((value, clock))
            self._rate = None
            raise Unbelievable("its counter was reset")
        if clock > last[1]:
            self._take((value, clock))
            self._rate = (value - last[0]) / (clock - last[1])
        elif self._rate is None or now_ns() - self._at_ns > _STALE_NS:
            raise Unbelievable("its counter does not move")
        return self._rate

    def _take(self, reading: tuple[int, int]) -> tuple[int, int]:
        self._last, self._at_ns = reading, now_ns()
        return reading


class Counted:
    """Bytes over a bus that a library counts itself, as `zprof.gpu.counters.Source`.

    Args:
        name: of the call.  read: (sent, received) so far.
    """

    period_s: float | None = None

    def __init__(self, name: str, read: Callable[[], tuple[int, int]]) -> None:
        from zprof.gpu.counters import Total

        self.name, self._read = name, read
        self._totals = (Total(), Total())
        self._at_ns = now_ns()

    def advance(self) -> tuple[int, int]:
        readings = self._read()
        now, before = now_ns(), self._at_ns
        self._at_ns = now
        most = int(_MOST_PER_SECOND * ((now - before) / 1e9 + 1.0))
        sent, received = (total.advance(raw, most=most) for total, raw in zip(self._totals, readings, strict=True))
        return sent, received

    def close(self) -> None:
        pass


def begun(
    vendor: Vendor,
    states: Mapping[int, str],
    begin: Callable[[], object],
    devices: Callable[[], tuple[Sequence[Device], str]],
    library: Callable[[], Library],
) -> Opened:
    """How it goes to begin a library that was loaded.

    Args:
        states: code of a call that failed -> the state; "failed" for any other.
        devices: in the order of the bus, and the driver's version.
    """

    def failed(failure: Failure, what: str) -> Opened:
        return Opened(vendor, states.get(failure.code or 0, "failed"), f"{vendor.library} {what}: {failure.why}")

    started = ask(begin)
    if isinstance(started, Failure):
        return failed(started, "does not start")
    shown = ask(devices)
    if isinstance(shown, Failure):
        return failed(shown, "shows no devices")
    found, driver = shown
    if not found:
        return Opened(vendor, "no devices", f"{vendor.library} shows no devices")
    return Opened(vendor, "ok", "", library(), driver, tuple(found))


def measured(vendor: Vendor, quantity: str, call: str, read: Callable[[Any], float]) -> Quantity:
    """A quantity that ``call`` answers: ``read`` gives it in its unit from a device's handle."""
    from zprof.gpu.quantities import Quantity, Scope, bounded

    return Quantity(f"{vendor.prefix} {quantity}", Scope.CHIP, ((call, lambda api, handle: bounded(quantity, read(handle))),))


def kernel_shows(vendor: Vendor) -> bool:
    """Whether the kernel has a GPU of this vendor's, so that loading its library is worth the while."""
    for path in DRM.glob("renderD*/device/vendor"):
        with suppress(OSError, ValueError):
            if int(path.read_text(), 16) == vendor.pci:
                return True
    return False


def text_of(value: bytes) -> str:
    """What a library says in characters, on one line; "" where it says that it does not know."""
    shown = one_line(value.partition(b"\0")[0].decode(errors="replace"), 96)
    return "" if shown in ("unknown", "N/A") else shown
