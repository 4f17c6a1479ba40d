"""Owns the stored figures of ``zprof bench``: what each host's memory, buses and disks were measured to do.

``zprof bench`` writes them, reports and doctor read them; one file in the user's configuration, for all hosts that share the
home. It never measures, and a file it cannot read is a stated problem, never an empty answer.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from offload.private_files import make_folders
from offload.regular_files import read_regular
from zprof.rows import TraceError
from zprof.writing import committed

__all__ = ["NAMES", "Figure", "bench_path", "keep", "stored"]

#: What ``zprof bench`` measures, in bytes a second.
NAMES = ("h2d", "d2h", "memcpy", "disk read", "disk write", "gather")

_VERSION = 1
_MOST_NBYTES = 1 << 20
_MOST_TEXT = 4096


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement.

    Attributes:
        name: one of `NAMES`.
        bytes_per_s: above 0.
        date: ISO 8601, when it was measured; later ones sort later.
        device: "cpu", or the GPU's name.
        path: the folder measured, for disks; else "".
    """

    name: str
    bytes_per_s: float
    date: str
    device: str = "cpu"
    path: str = ""


def bench_path() -> Path:
    """The file that holds the figures of all hosts."""
    return Path(click.get_app_dir("zprof")) / "bench.json"


def stored(host: str, path: Path | None = None) -> list[Figure]:
    """The figures of ``host``; empty where none were measured.

    Raises:
        TraceError: the file is there and is not what `keep` writes.
    """
    return _read(path or bench_path()).get(host, [])


def keep(host: str, figures: Sequence[Figure], path: Path | None = None) -> Path:
    """Store ``figures`` of ``host``, each in the place of one of the same name, device and path; returns the file.

    The file is only ever seen whole, and readable by its user alone; several processes may store at once.

    Raises:
        TraceError: it cannot be written, or what is there is not what this wrote.
    """
    path = path or bench_path()
    for figure in figures:
        assert _sound(figure), f"{figure}: expected a name of {NAMES} and a finite rate above 0"
    try:
        make_folders(path.parent)
        with _locked(path):
            hosts = _read(path)
            new = {(figure.name, figure.device, figure.path): figure for figure in [*hosts.get(host, []), *figures]}
            hosts[host] = list(new.values())
            body = {"version": _VERSION, "hosts": {name: [asdict(one) for one in known] for name, known in hosts.items()}}
            committed(path, json.dumps(body, indent=1).encode())
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Beside the file, for the file itself is replaced.
    handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(path: Path) -> dict[str, list[Figure]]:
    try:
        text = read_regular(path, _MOST_NBYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        found = error.strerror or error
        raise TraceError(f"{path}: cannot be read: {found}. Delete it and run zprof bench again") from None
    try:
        body = json.loads(text)
        if body["version"] != _VERSION:
            raise ValueError(f"version {body['version']!r}, expected {_VERSION}")
        hosts = {str(host): [Figure(**figure) for figure in known] for host, known in body["hosts"].items()}
        unsound = next((figure for known in hosts.values() for figure in known if not _sound(figure)), None)
        if unsound is not None:
            raise ValueError("an invalid figure")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        said = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise TraceError(f"{path}: expected the figures of zprof bench: {said}. Delete it and run zprof bench again") from None
    return hosts


def _sound(figure: Figure) -> bool:
    texts = (figure.name, figure.date, figure.device, figure.path)
    if not all(isinstance(text, str) and len(text) <= _MOST_TEXT for text in texts) or figure.name not in NAMES:
        return False
    rate = figure.bytes_per_s
    return isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate <= sys.float_info.max
