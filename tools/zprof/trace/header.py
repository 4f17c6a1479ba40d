"""Owns a trace's header: what is known of a run when its recording begins, and how that is checked when it is read.

The writer stores one as the first frame of a file and the reader gives it back. Of the machine it knows only its name: the
recorder fills in the rest.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zprof.rows import TraceError

__all__ = ["LEVELS", "VERSION", "Header", "here"]

#: Of the format; a reader refuses any other.
VERSION = 1
#: How finely a run may be recorded.
LEVELS = ("events", "alloc", "stack")

_MOST_TEXT = 4096
_MOST_ARGS = 1000
_MOST_RANKS = 1 << 20


def here() -> tuple[str, str]:
    """(host, boot): this machine's name, and the id of its boot; that is empty where Linux does not say."""
    try:
        return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname(), ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a trace says of its run before the first row.

    Attributes:
        host, boot: the machine's name and the id of its boot; monotonic times of one boot are comparable.
        mono_ns, wall_ns: the two clocks, read together at the start.
        level: one of `LEVELS`. device: "cpu", "cuda:0" and so on.
        rss_nbytes: resident memory of the process when the recording began.
        versions: of what was imported, e.g. {"torch": "2.13"}.
        simulated: the hardware profile a simulation was of, whose times and bytes are predicted; "" for what was measured.
        process_ns: when the process began, on the clock of mono_ns, if its program is recorded from the start; else 0.
    """

    version: int = VERSION
    rank: int
    world: int
    host: str
    boot: str
    pid: int
    mono_ns: int
    wall_ns: int
    level: str
    device: str
    rss_nbytes: int
    argv: tuple[str, ...]
    versions: dict[str, str]
    simulated: str = ""
    process_ns: int = 0

    def packed(self) -> dict[str, object]:
        """The header as a map of plain values, over-long texts cut so that every header written can be read."""
        fields = asdict(self)
        cut = {name: _cut(value) for name, value in fields.items() if isinstance(value, str)}
        versions = {_cut(name): _cut(text) for name, text in list(self.versions.items())[:_MOST_ARGS]}
        return fields | cut | {"argv": [_cut(word) for word in self.argv[:_MOST_ARGS]], "versions": versions}

    @classmethod
    def unpacked(cls, fields: object, where: str) -> Header:
        """The header a map says; unknown keys are left for newer readers.

        Raises:
            TraceError: a key is missing or its value is not of its kind; the line begins with ``where``.
        """
        if not isinstance(fields, dict):
            raise TraceError(f"{where}: its header is not a map; it is damaged, record the run again")
        values: dict[str, object] = {}
        for name, (expected, right) in _CHECKS.items():
            value = fields.get(name, _DEFAULTS.get(name))
            if not right(value):
                raise TraceError(f"{where}: header key {name}: expected {expected}, found {_short(value)}; record it again")
            values[name] = tuple(value) if isinstance(value, list) else value
        header = cls(**values)  # type: ignore[arg-type]
        if header.rank >= header.world:
            raise TraceError(f"{where}: header key rank: expected less than {header.world} ranks, found {header.rank}")
        return header


_Check = tuple[str, Callable[[Any], bool]]


def _short(value: object) -> str:
    return "nothing" if value is None else ascii(value)[:60]


def _number(low: int, high: int) -> _Check:
    return f"a number from {low} to {high}", lambda value: type(value) is int and low <= value <= high


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT


def _is_versions(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) <= _MOST_ARGS
        and all(_is_text(name) and _is_text(text) for name, text in value.items())
    )


def _is_argv(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_ARGS and all(map(_is_text, value))


_TEXT: _Check = ("a short text", _is_text)
_TIME = _number(0, (1 << 62) - 1)
_CHECKS: dict[str, _Check] = {
    "version": _number(VERSION, VERSION),
    "rank": _number(0, _MOST_RANKS - 1),
    "world": _number(1, _MOST_RANKS),
    "host": _TEXT,
    "boot": _TEXT,
    "pid": _number(0, (1 << 32) - 1),
    "mono_ns": _TIME,
    "wall_ns": _TIME,
    "level": (" or ".join(LEVELS), lambda value: value in LEVELS),
    "device": _TEXT,
    "rss_nbytes": _TIME,
    "argv": ("a list of short texts", _is_argv),
    "versions": ("a map of short texts", _is_versions),
    "simulated": _TEXT,
    "process_ns": _TIME,
}
#: Of keys that older files lack.
_DEFAULTS: dict[str, object] = {"simulated": "", "process_ns": 0}


def _cut(text: str) -> str:
    """``text`` as it can be written, no longer than is read; a path of bytes that are no text is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()[:_MOST_TEXT]
