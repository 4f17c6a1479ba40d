"""Owns what one call to a GPU's library can come to: a value within its bounds, or a failure said in one line.

The quantities, counters and devices of `sampling` ask through it. It never lets what a driver or its bindings raise go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["INT64_MAX", "Failure", "Nvml", "Refused", "Unbelievable", "ask", "field_value", "one_line", "within"]

#: The module ``pynvml``, which ships no annotations; parts of it are missing in older releases.
Nvml = Any
Answer = TypeVar("Answer")

#: What a row of a trace can carry.
INT64_MAX = 2**63 - 1
#: NVML says "not available" inside a successful answer as all ones, of 32 or of 64 bits.
_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)

_WORDS = {
    1: "NVML is not initialised",
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    7: "answer of another size than expected",
    9: "driver not loaded",
    10: "timeout",
    12: "library not found",
    13: "function not in this driver",
    15: "GPU is lost",
    16: "GPU requires a reset",
    17: "blocked by the operating system",
    18: "driver and library versions differ",
    19: "in use",
    20: "out of memory",
    21: "no data",
    23: "out of resources",
    25: "version of an argument not known to this driver",
    26: "deprecated in this driver",
    27: "not ready",
    28: "GPU not found",
    999: "unknown error",
}
#: Codes that later calls will answer alike, so that asking again is in vain.
_FINAL = frozenset({1, 2, 3, 4, 6, 7, 12, 13, 15, 16, 17, 18, 25, 26, 28})
_LOST = frozenset({15, 16})


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call gave no value.

    Attributes:
        why: a few words on one line.
        final: asking again is in vain.
        lost: the whole device is gone.
        code: the library's number, None where the bindings or the bounds refused.
    """

    why: str
    final: bool
    lost: bool = False
    code: int | None = None


class Unbelievable(ValueError):
    """An answer that came with success and cannot be true."""


class Refused(Exception):
    """What a C library says instead of a value; the fields are those of a `Failure`."""

    def __init__(self, why: str, *, final: bool, lost: bool = False, code: int | None = None) -> None:
        super().__init__(why)
        self.failure = Failure(why, final, lost, code)


def ask(call: Callable[[], Answer]) -> Answer | Failure:
    """The answer of ``call``, or why there is none.

    Everything is caught: drivers answer with codes the bindings do not know, names that are no UTF-8, and functions that a
    release of the bindings lacks, and none of that may end a training run that is only being watched.
    """
    try:
        return call()
    except Refused as error:
        return error.failure
    except Unbelievable as error:
        return Failure(one_line(str(error)), final=False)
    except AttributeError as error:
        return Failure(one_line(f"not in these bindings ({error})"), final=True)
    except Exception as error:
        # The class is known only once pynvml is loaded; its instances carry the code in ``value``.
        code = getattr(error, "value", None)
        if isinstance(code, int):
            return Failure(_WORDS.get(code, f"NVML error {code}"), code in _FINAL, code in _LOST, code)
        return Failure(one_line(f"{type(error).__name__}: {error}"), final=False)


def within(value: float, least: int, most: int, unit: str) -> int:
    """``value`` as a whole number where it lies in the bounds; raises `Unbelievable` where it does not."""
    if isinstance(value, float) and not math.isfinite(value):
        raise Unbelievable(f"answered {value} {unit}")
    if least <= value <= most:
        return int(value)
    if value in _NOT_AVAILABLE:
        raise Unbelievable("answered that it is not available")
    raise Unbelievable(f"answered {value} {unit}, expected {least} to {most}")


def field_value(field: Any) -> tuple[int, int]:
    """(value, modulus) of one answered field; raises what its own return code says.

    The modulus is at which the type wraps: 2**32 for an unsigned int, 2**64 for the longer ones.
    """
    code = int(field.nvmlReturn)
    if code:
        raise _Coded(code)
    kind = int(field.valueType)
    if kind == 0:
        return within(float(field.value.dVal), 0, INT64_MAX, ""), 2**64
    names = {1: ("uiVal", 32), 2: ("ulVal", 64), 3: ("ullVal", 64), 4: ("sllVal", 64), 5: ("siVal", 32), 6: ("usVal", 16)}
    if kind not in names:
        raise Unbelievable(f"answered a value of unknown type {kind}")
    name, bits = names[kind]
    value = int(getattr(field.value, name))
    if value < 0:
        raise Unbelievable(f"answered {value}")
    return value, 1 << bits


class _Coded(Exception):
    """A return code that came inside an answer; read by `ask` as the bindings' own error is."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


def one_line(text: str, most: int = 160) -> str:
    """``text`` without control characters, on one line of at most ``most`` characters."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    shown = " ".join(shown.split())
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."
