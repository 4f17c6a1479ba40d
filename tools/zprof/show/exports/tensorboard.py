"""Owns the export to TensorBoard: levels by category, step times and samples as scalars, one run a rank.

`commands.export` calls `write`. It writes event files itself, since they are simple and TensorBoard's own writer loads
TensorFlow where that is installed; it never touches a folder that holds anything but an earlier export.

Note: [Event files]
    A file is records of (length, check, body, check): the length has 64 bits, a check is a rotated CRC-32C, the body an Event
    as protocol buffer: 1 wall time, double; 2 step, varint; 3 version, text; 5 summary, whose 1 is a value with 1 tag and
    2 value, of 32 bits: seven digits.

Source: tensorboard/compat/proto/event.proto and summary.proto; TFRecord's format in TensorFlow's documentation.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zprof.analysis.analysis import Analysis
from zprof.rows import TraceError
from zprof.show.exports.exported import Written, counted, full, text, unit_of
from zprof.trace.reader import Trace

__all__ = ["write"]

_POINTS = 2_000
_EVENTS = re.compile(r"events\.out\.tfevents\.\d+\.zprof")
_VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78


def write(traces: Sequence[Trace], path: Path) -> Written:
    """Write a folder with one event file a rank, whole or not at all.

    Raises:
        TraceError: ``path`` is a folder of something else.
    """
    if path.exists():
        _ours(path)
    passing = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    count, damages = 0, []
    try:
        passing.mkdir()
        for trace in traces:
            analysis = Analysis.of(trace)
            damages.append(analysis.ledger.damage)
            count += _written(passing / f"rank{trace.header.rank}", analysis)
        if path.exists():
            _remove(path)
        passing.rename(path)
    finally:
        # Nobody else knows its name.
        shutil.rmtree(passing, ignore_errors=True)
    # Without the last option it would draw every second point or fewer.
    opened = f"tensorboard --logdir {shlex.quote(str(path))} --samples_per_plugin scalars={_POINTS + 1}"
    return Written(f"{counted(count, 'scalar')}; {opened}", damages)


def _ours(path: Path) -> None:
    """Refuse a folder that is not an earlier export: it is going to be removed."""
    ranks = [rank for rank in path.iterdir() if rank.is_dir() and not rank.is_symlink() and rank.name.startswith("rank")]
    inside = [one for one in path.iterdir() if one not in ranks] + [one for rank in ranks for one in rank.iterdir()]
    if path.is_symlink() or any(not _EVENTS.fullmatch(one.name) or not one.is_file() or one.is_symlink() for one in inside):
        raise TraceError(f"{path}: expected a folder of an earlier export, found something else; name another with -o")


def _remove(path: Path) -> None:
    """Remove an earlier export file by file: what somebody put there since it was looked at makes the folder stay."""
    for folder in (*(rank for rank in path.iterdir() if rank.is_dir() and not rank.is_symlink()), path):
        for one in folder.iterdir():
            if _EVENTS.fullmatch(one.name):
                one.unlink()
        folder.rmdir()


def _written(folder: Path, analysis: Analysis) -> int:
    folder.mkdir()
    header = analysis.header
    began_s = header.wall_ns / 1e9
    count = 0
    with open(folder / f"events.out.tfevents.{header.wall_ns // 10**9:010}.zprof", "xb") as file:
        file.write(_record(_double(1, began_s) + _bytes(3, _VERSION.encode())))
        for tag, step, time_ns, value in _scalars(analysis):
            scalar = _bytes(1, text(tag).encode()) + b"\x15" + struct.pack("<f", value)
            at = _double(1, began_s + (time_ns - header.mono_ns) / 1e9) + b"\x10" + _varint(max(0, step))
            file.write(_record(at + _bytes(5, _bytes(1, scalar))))
            count += 1
    return count


def _scalars(analysis: Analysis) -> Iterator[tuple[str, int, int, float]]:
    """(tag, step, time, value) of everything."""
    curves: list[tuple[str, Any, Any]] = []
    ledger, steps, covered = analysis.ledger, analysis.steps, analysis.covered
    for tier in ledger.tiers:
        found = ledger.curves("category", tier, _POINTS)
        curves += [(f"{tier}/{name} bytes", found.time_ns, levels) for name, levels in found.levels.items()]
        whole = "recorded" if covered.tier(tier) else "total"
        curves.append((f"{tier}/{whole} bytes", found.time_ns, sum(found.levels.values())))
    for what in ledger.sampled():
        for key, (time_ns, values) in ledger.samples(what, _POINTS).items():
            curves.append((f"samples/{full(what, key)} {unit_of(what)}", time_ns, values))
    for tag, time_ns, values in curves:
        for at, value in zip(time_ns.tolist(), values.tolist(), strict=True):
            yield tag, (at - ledger.begin_ns) // 1_000_000, at, float(value)
    if steps.count and covered.steps() is None:
        for number, (begin, end) in enumerate(steps.bounds.tolist()):
            if number or steps.unseen is None:
                yield "time/step ms", number, end, (end - begin) / 1e6


def _record(body: bytes) -> bytes:
    length = len(body).to_bytes(8, "little")
    return length + _check(length) + body + _check(body)


def _check(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def _entry(number: int) -> int:
    for _ in range(8):
        number = number >> 1 ^ (_POLYNOMIAL if number & 1 else 0)
    return number


_TABLE = [_entry(number) for number in range(256)]


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
