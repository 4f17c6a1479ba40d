"""The tables of a hardware profile: every key, what it may be and what it means; figures as text and back; curves.

`hardware.py` puts the tables together; ``docs/reference/hardware.md`` is made from them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from offload.documents import Kind, Size, Table, words
from offload.errors import HardwareError
from offload.text import shown

__all__ = [
    "DTYPES", "PROFILE", "Device", "Disk", "Host", "HostLink", "Link", "Matmul", "MemoryBound", "Network", "Peak", "Point",
    "Points", "Power", "Price", "Text", "as_flops", "as_rate", "as_seconds", "format_flops", "format_rate", "format_seconds",
    "fraction_at", "positive",
]  # fmt: skip

#: What the documents are, for their errors.
PROFILE = Kind("hardware profile", HardwareError)

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
_MOST_POINTS = 64
_MOST_CURVES = 1024
_MOST_TEXT = 2000

Point = tuple[float, float]


#: Bits and bytes differ by the case of one letter, so case counts here.
_BYTES = {"B/s": 1, "KB/s": 10**3, "MB/s": 10**6, "GB/s": 10**9, "TB/s": 10**12}
_RATES: Mapping[str, Decimal] = (
    {unit: Decimal(scale) for unit, scale in _BYTES.items()}
    | {f"{prefix}iB/s": Decimal(1 << shift) for prefix, shift in (("K", 10), ("M", 20), ("G", 30), ("T", 40))}
    | {unit.replace("B", "b"): Decimal(scale) / 8 for unit, scale in _BYTES.items()}
)
_FLOPS: Mapping[str, Decimal] = {
    f"{prefix}FLOP/s": Decimal(10) ** power for prefix, power in (("", 0), ("M", 6), ("G", 9), ("T", 12), ("P", 15))
}
_SECONDS: Mapping[str, Decimal] = {"ns": Decimal(10) ** -9, "us": Decimal(10) ** -6, "ms": Decimal(10) ** -3, "s": Decimal(1)}
_NUMBER = re.compile(r"(\d{1,24}(?:\.\d{1,24})?(?:[eE][+-]?\d{1,2})?)\s*([A-Za-z/]*)", re.ASCII)
#: No device of this century is above it, in bytes, FLOP or seconds; what is came from a unit written twice.
_MOST = 1e24


def as_rate(value: object) -> float:
    """Bytes a second meant by a number or by text such as "3.35 TB/s" (bytes) or "800 Gb/s" (bits).

    Raises:
        ValueError: neither, or not above 0.
    """
    return positive(_parsed(value, _RATES))


def as_flops(value: object) -> float:
    """FLOP a second meant by a number or by text such as "989.4 TFLOP/s".

    Raises:
        ValueError: neither, or not above 0.
    """
    return positive(_parsed(value, _FLOPS))


def as_seconds(value: object) -> float:
    """Seconds meant by a number or by text such as "3.4 us"; 0 is allowed.

    Raises:
        ValueError: neither, or negative.
    """
    return _parsed(value, _SECONDS)


def positive(value: object) -> float:
    """A finite number above 0."""
    number = _number(value)
    if not number > 0:
        raise ValueError("not above 0")
    return number


def format_rate(rate: float) -> str:
    """Text that `as_rate` reads back to exactly ``rate``, in bytes."""
    return _formatted(rate, {unit: Decimal(scale) for unit, scale in _BYTES.items()})


def format_flops(flops: float) -> str:
    """Text that `as_flops` reads back to exactly ``flops``."""
    return _formatted(flops, _FLOPS)


def format_seconds(seconds: float) -> str:
    """Text that `as_seconds` reads back to exactly ``seconds``."""
    return _formatted(seconds, _SECONDS)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("not a number")
    # Compared first: an integer above every float cannot be made one.
    if abs(value) > _MOST or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def _parsed(value: object, units: Mapping[str, Decimal]) -> float:
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value.strip())
        if match is None or match[2] not in units:
            raise ValueError(f"expected a number with one of {', '.join(units)}, found {shown(value)}")
        value = float(Decimal(match[1]) * units[match[2]])
    number = _number(value)
    if number < 0:
        raise ValueError("below 0")
    return number


def _formatted(number: float, units: Mapping[str, Decimal]) -> str:
    # The shortest text that is this float, its point moved: exact, where a division would round.
    exact = Decimal(repr(number))
    unit, scale = next(iter(units.items()))
    for each, size in units.items():
        if exact >= size:
            unit, scale = each, size
    return f"{(exact / scale).normalize():f} {unit}"


# --- curves -------------------------------------------------------------------------------------------------------------


def fraction_at(points: tuple[Point, ...], size: float) -> float:
    """The curve's value at ``size``: between two points straight where both axes are logarithms, level beyond the last ones."""
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1]
    after = bisect_right(points, size, key=lambda point: point[0])
    (low, at_low), (high, at_high) = points[after - 1], points[after]
    share = math.log(size / low) / math.log(high / low)
    return float(at_low * (at_high / at_low) ** share)


def _points(value: object) -> tuple[Point, ...]:
    """Points of a curve: sizes that grow, each with a fraction above 0 and at most 1 that grows no faster."""
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= _MOST_POINTS:
        raise ValueError("not a list of points")
    points: list[Point] = []
    for each in value:
        if not isinstance(each, (list, tuple)) or len(each) != 2:
            raise ValueError("not a pair")
        size, fraction = positive(each[0]), positive(each[1])
        if fraction > 1 or (points and size <= points[-1][0]):
            raise ValueError("not a curve")
        # More work would take less time.
        if points and fraction / points[-1][1] > size / points[-1][0] * (1 + 1e-9):
            raise ValueError("steeper than the size")
        points.append((size, fraction))
    return tuple(points)


def _curves(value: object) -> dict[str, tuple[Point, ...]]:
    """Curves by the name of an operation."""
    if not isinstance(value, Mapping) or len(value) > _MOST_CURVES:
        raise ValueError("not a table of curves")
    if not all(isinstance(name, str) and name.isidentifier() for name in value):
        raise ValueError("not the name of an operation")
    return {name: _points(points) for name, points in value.items()}


def _fraction(value: object) -> float:
    number = positive(value)
    if number > 1:
        raise ValueError("above 1")
    return number


def _text(value: str) -> str:
    if len(value) > _MOST_TEXT or not all(letter.isprintable() or letter == "\n" for letter in value):
        raise ValueError("not a text")
    return value


def _amount(value: object) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else positive(value)


def _nonzero(value: int) -> int:
    if value <= 0:
        raise ValueError("not above 0")
    return value


Rate = Annotated[float, BeforeValidator(as_rate)]
Flops = Annotated[float, BeforeValidator(as_flops)]
Seconds = Annotated[float, BeforeValidator(as_seconds)]
Fraction = Annotated[float, BeforeValidator(_fraction)]
Points = Annotated[tuple[Point, ...], BeforeValidator(_points)]
Curves = Annotated[dict[str, tuple[Point, ...]], BeforeValidator(_curves)]
Amount = Annotated[float, BeforeValidator(_amount)]
Memory = Annotated[Size, AfterValidator(_nonzero)]
Text = Annotated[str, AfterValidator(_text)]

_RATE = 'bytes a second above 0, or text like "3.35 TB/s" or "800 Gb/s"'
_FLOP = 'FLOP a second above 0, or text like "989.4 TFLOP/s"'
_TIME = 'seconds, or text like "3.4 us"'
_SIZE = 'bytes above 0 or a size like "80 GiB"'
_PART = "a number above 0 and at most 1"
_CURVE = "a list of [size, fraction], sizes growing, fractions above 0, at most 1 and growing no faster than sizes"
_CURVES = "a table of such lists by torch's name of the operation"
_COUNT = "an integer from 1 to 65536"


def _source() -> Any:
    return words(
        "",
        expected="text",
        does="Where the figures are from.",
        why='A figure without a public source says "assumed" and the reason.',
    )


def _count(does: str, default: Any = ...) -> Any:
    return words(default, expected=_COUNT, does=does, ge=1, le=1 << 16)


class Device(Table):
    """[device]: one accelerator; of a profile of kind "cpu" one thread of one core."""

    count: int = _count("Devices of a node.")
    memory: Memory = words(..., expected=_SIZE, does="Memory of a device.")
    memory_bandwidth: Rate = words(..., expected=_RATE, does="Bytes read or written a second, at the most.")
    launch: Seconds = words(..., expected=_TIME, does="The shortest time a kernel takes on the device.")
    source: Text = _source()


class Peak(Table):
    """[peak]: dense matrix products, FLOP a second by dtype; a dtype that is not written is not there."""

    fp64: Flops | None = words(None, expected=_FLOP, does="float64.")
    fp32: Flops | None = words(None, expected=_FLOP, does="float32, computed in fp32.")
    tf32: Flops | None = words(None, expected=_FLOP, does="float32, computed in TF32, if a program allows it.")
    bf16: Flops | None = words(None, expected=_FLOP, does="bfloat16.")
    fp16: Flops | None = words(None, expected=_FLOP, does="float16, summed in fp32.")
    fp8: Flops | None = words(None, expected=_FLOP, does="float8, either format.")
    int8: Flops | None = words(None, expected=_FLOP, does="int8, operations a second.")
    source: Text = _source()


class Matmul(Table):
    """[matmul]: how much of the peak a matrix product reaches, by its FLOPs and its smallest dimension."""

    points: Points = words(..., expected=_CURVE, does="Fraction of the peak by FLOPs, between two points by logarithms.")
    fp64: Points | None = words(None, expected=_CURVE, does="As points, only for this dtype.")
    fp32: Points | None = words(None, expected=_CURVE, does="As points, only for this dtype.")
    tf32: Points | None = words(None, expected=_CURVE, does="As points, only for this dtype.")
    bf16: Points | None = words(None, expected=_CURVE, does="As points, only for this dtype.")
    fp16: Points | None = words(None, expected=_CURVE, does="As points, only for this dtype.")
    fp8: Points | None = words(None, expected=_CURVE, does="As points, only for this dtype.")
    int8: Points | None = words(None, expected=_CURVE, does="As points, only for this dtype.")
    by_dim: Points | None = words(
        None, expected=_CURVE, does="A further factor by the smallest dimension; unset is 1, whatever the shape."
    )
    by_operation: Curves = words(
        {}, expected=_CURVES, does="Instead of points and by_dim, in any dtype: convolutions, attention, recurrent layers."
    )
    source: Text = _source()


class MemoryBound(Table):
    """[memory_bound]: how much of the device's memory bandwidth an operation reaches that computes little."""

    points: Points = words(..., expected=_CURVE, does="Fraction of the bandwidth by bytes, between two points by logarithms.")
    by_operation: Curves = words(
        {}, expected=_CURVES, does="Instead of points, for an operation that is bound by compute, or moves data badly."
    )
    source: Text = _source()


class Link(Table):
    """[link]: from a device to another of its node."""

    bandwidth: Rate = words(..., expected=_RATE, does="Of a device, in one direction.")
    node_bandwidth: Rate | None = words(
        None, expected=_RATE, does="Of all devices of a node at once, in one direction; unset: they don't share."
    )
    through: Literal["switch", "pcie", "memory"] = words(
        "switch",
        expected='"switch", "pcie" or "memory"',
        does="What it goes through; memory is the host's: copied in once, out once.",
    )
    efficiency: Fraction = words(1.0, expected=_PART, does="Fraction of the bandwidth that a large collective reaches.")
    start: Seconds = words(0.0, expected=_TIME, does="What every collective takes before its first byte.")
    latency: Seconds = words(..., expected=_TIME, does="Of one hop, for messages of full bandwidth.")
    short_latency: Seconds | None = words(
        None, expected=_TIME, does="Of one hop by the protocol for short messages; unset: there is none."
    )
    short_start: Seconds | None = words(None, expected=_TIME, does="As start, by that protocol.")
    short_fraction: Fraction = words(1.0, expected=_PART, does="Fraction of the bandwidth that protocol reaches, on any link.")
    points: Points | None = words(
        None, expected=_CURVE, does="Fraction of the bandwidth by bytes that a device moves; unset is 1, whatever the size."
    )
    source: Text = _source()


class HostLink(Table):
    """[host_link]: between a device and its host's memory."""

    bandwidth: Rate = words(..., expected=_RATE, does="Of a device, in one direction, from page-locked memory.")
    node_bandwidth: Rate | None = words(
        None, expected=_RATE, does="Of all devices of a node at once, in one direction; unset: they don't share."
    )
    latency: Seconds = words(..., expected=_TIME, does="Of one copy.")
    points: Points | None = words(
        None, expected=_CURVE, does="Fraction of the bandwidth by bytes of a copy; unset is 1, whatever the size."
    )
    source: Text = _source()


class Host(Table):
    """[host]: the node's own memory and processors; its sockets are one."""

    memory: Memory = words(..., expected=_SIZE, does="Memory of a node.")
    memory_bandwidth: Rate = words(..., expected=_RATE, does="Of all cores at once, bytes read or written.")
    cores: int = _count("Cores of a node.")
    flops: Flops = words(..., expected=_FLOP, does="Of all cores at once, in fp32.")
    copy_rate: Rate = words(..., expected=_RATE, does="Bytes that one thread copies a second, each counted once.")
    fresh_rate: Rate | None = words(
        None, expected=_RATE, does="Bytes of new pages that one thread touches first a second; unset: not counted."
    )
    dispatch: Seconds = words(..., expected=_TIME, does="Of the host to issue one operation: Python, dispatcher, launch.")
    call: Seconds | None = words(
        None, expected=_TIME, does="Of one function that Python calls, without the operations it issues; unset: not counted."
    )
    source: Text = _source()


class Disk(Table):
    """[disk]: the node's drives, striped."""

    count: int = _count("Drives of a node.")
    read: Rate = words(..., expected=_RATE, does="Of one drive, large requests.")
    write: Rate = words(..., expected=_RATE, does="Of one drive, large requests.")
    latency: Seconds = words(..., expected=_TIME, does="Of one request.")
    capacity: Memory = words(..., expected=_SIZE, does="Of one drive.")
    stripe: Memory = words(512 << 10, expected=_SIZE, does="A larger request touches several drives.")
    source: Text = _source()


class Network(Table):
    """[network]: between nodes."""

    bandwidth: Rate = words(..., expected=_RATE, does="Of a node, in one direction, all adapters.")
    efficiency: Fraction = words(1.0, expected=_PART, does="Fraction of the bandwidth that a large collective reaches.")
    latency: Seconds = words(..., expected=_TIME, does="Of one hop, for messages of full bandwidth.")
    short_latency: Seconds | None = words(
        None, expected=_TIME, does="Of one hop by the protocol for short messages; unset is latency."
    )
    source: Text = _source()


class Power(Table):
    """[power]: watts."""

    idle: Amount = words(..., expected="watts", does="Of an idle device.")
    max: Amount = words(..., expected="watts", does="Of a busy device.")
    node: Amount = words(0.0, expected="watts", does="Of a node without its devices: processors, memory, fans, adapters.")
    source: Text = _source()


class Price(Table):
    """[price]: what a device costs."""

    device_hour: Amount = words(..., expected="US dollars", does="Of one device for an hour.")
    date: Text = words(..., expected="text such as \"2026-05\"", does="When the price was looked up.")
    source: Text = _source()
