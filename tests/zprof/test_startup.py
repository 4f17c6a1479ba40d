"""From the start of a process to its first step: known of a program that `zprof run` starts, and not guessed of others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import HEADER, sample_rows, write_trace
from zprof.analysis.analysis import Analysis
from zprof.analysis.coverage import Unseen
from zprof.analysis.measures import measures
from zprof.clock import boot_ns, now_ns
from zprof.recording.surroundings import header, process_ns
from zprof.trace.reader import Trace

SECOND = 1_000_000_000


def started(path: Path, **changes: Any) -> object:
    trace = write_trace(path, sample_rows(steps=3, units=4), **changes)
    return measures(Analysis.of(Trace.open(trace)))["startup.ms"]


def test_it_lasts_from_the_process_to_the_first_forward(tmp_path: Path) -> None:
    now = started(tmp_path / "a.zprof", process_ns=HEADER.mono_ns - SECOND // 4)
    earlier = started(tmp_path / "b.zprof", process_ns=HEADER.mono_ns - SECOND // 2)
    assert isinstance(now, float) and now >= 250 and earlier == pytest.approx(now + 250)


def test_a_recording_that_began_in_a_running_program_does_not_say_it(tmp_path: Path) -> None:
    unseen = started(tmp_path / "a.zprof")
    assert isinstance(unseen, Unseen) and "zprof run" in unseen.why
    later = started(tmp_path / "b.zprof", process_ns=HEADER.mono_ns + 3600 * SECOND)
    assert isinstance(later, Unseen)


def test_a_report_has_a_line_of_it(zprof: Zprof) -> None:
    write_trace(Path("a.zprof"), sample_rows(steps=3, units=4), process_ns=HEADER.mono_ns - SECOND // 2)
    write_trace(Path("b.zprof"), sample_rows(steps=3, units=4))
    [known] = [line for line in zprof("report", "a.zprof").output.splitlines() if line.startswith("start-up")]
    [unknown] = [line for line in zprof("report", "b.zprof").output.splitlines() if line.startswith("start-up")]
    assert known.split()[1:3] == ["500", "ms:"] and known.endswith(": imports, attach, the first batch")
    assert unknown.split()[1:3] == ["not", "recorded:"]


def test_the_kernel_says_when_a_process_began_whatever_its_name(tmp_path: Path) -> None:
    stat = tmp_path / f"proc/{os.getpid()}/stat"
    stat.parent.mkdir(parents=True)
    ticks = (boot_ns() - 5 * SECOND) * os.sysconf("SC_CLK_TCK") // SECOND
    stat.write_text(f"7 (a) b (c) {' '.join(['S', *map(str, range(1, 19))])} {ticks} 0 0\n")
    assert 0 < process_ns(tmp_path) <= now_ns() - 5 * SECOND + SECOND
    assert now_ns() - process_ns(tmp_path) < 600 * SECOND
    assert process_ns(tmp_path / "nothing") == 0
    own = header(0, 1, "events", whole=True)
    assert 0 < own.process_ns <= own.mono_ns and header(0, 1, "events").process_ns == 0
