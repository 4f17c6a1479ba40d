"""Owns the export to TensorBoard: levels by category, step times and samples as scalars, one run a rank.

`commands.export` calls `write`; tensorboard's own record writer and messages make the files, which load neither torch nor
TensorFlow, as its writer of whole files would. It never touches a folder that holds anything but an earlier export.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from offload.errors import CapabilityError
from offload.text import counted
from zprof.analysis.analysis import Analysis
from zprof.rows import TraceError
from zprof.show.exports.exported import Written, full, lost, text, unit_of
from zprof.trace.reader import Trace

__all__ = ["write"]

_POINTS = 2_000
_EVENTS = re.compile(r"events\.out\.tfevents\.\d+\.zprof")
_VERSION = "brain.Event:2"


def write(traces: Iterable[Trace], path: Path) -> Written:
    """Write a folder with one event file a rank, whole or not at all.

    Raises:
        TraceError: ``path`` is a folder of something else.  CapabilityError: tensorboard is not installed.
    """
    _tensorboard()
    if path.exists():
        _ours(path)
    passing = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    count, missing = 0, list[str]()
    try:
        passing.mkdir(0o700)
        for trace in traces:
            analysis = Analysis.of(trace)
            missing += lost(trace, analysis.ledger.damage)
            count += _written(passing / f"rank{trace.header.rank}", analysis)
        if path.exists():
            _remove(path)
        passing.rename(path)
    finally:
        # Nobody else knows its name.
        shutil.rmtree(passing, ignore_errors=True)
    # Without the last option it would draw every second point or fewer.
    opened = f"tensorboard --logdir {shlex.quote(str(path))} --samples_per_plugin scalars={_POINTS + 1}"
    return Written(f"{counted(count, 'scalar')}; {opened}", missing)


def _tensorboard() -> tuple[Any, Any]:
    """Its writer of records, and its message of one event."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        remedy = "pip install 'zhooks[tensorboard]'"
        raise CapabilityError(f"tensorboard: needed for its format, not installed; {remedy}") from None
    return RecordWriter, Event


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
    writer, event = _tensorboard()
    folder.mkdir(0o700)
    header = analysis.header
    began_s = header.wall_ns / 1e9
    count = 0
    with open(folder / f"events.out.tfevents.{header.wall_ns // 10**9:010}.zprof", "xb") as file:
        records = writer(file)
        records.write(event(wall_time=began_s, file_version=_VERSION).SerializeToString())
        for tag, step, time_ns, value in _scalars(analysis):
            at = event(wall_time=began_s + (time_ns - header.mono_ns) / 1e9, step=max(0, step))
            at.summary.value.add(tag=text(tag), simple_value=value)
            records.write(at.SerializeToString())
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

