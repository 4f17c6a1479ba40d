"""Clocks of several hosts, bounded by the collectives that their ranks took part in: right where wall clocks are not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import forked
from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import HEADER
from zprof.analysis.clock_bounds import bounds
from zprof.analysis.ranks import Lane, Lanes, clocks
from zprof.rows import Row
from zprof.trace.reader import Trace
from zprof.trace.writer import Writer

MS = 1_000_000
PAIR = ("collective", "all_reduce")


def lane(rank: int, begins: list[int], ends: list[int], *, boot: str = "", pair: tuple[str, str] = PAIR) -> Lane:
    header = dataclasses.replace(HEADER, rank=rank, world=8, boot=boot)
    times = (np.array(each, dtype=np.int64) for each in (begins, ends))
    begun, ended = ({pair: each} for each in times)
    return Lane(header, None, begun, None, None, {}, True, None, ended)


# --- what collectives prove -------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.data())
def test_the_true_offset_is_never_outside_the_bounds(data: st.DataObject) -> None:
    """Ranks begin when they like, a collective takes what it takes, and each notices its end late by what it likes."""
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=6))
    offsets = [0, *data.draw(st.lists(st.integers(-(10**15), 10**15), min_size=2, max_size=2))]
    count = data.draw(st.integers(1, 6))
    times = st.lists(st.integers(0, 10**9), min_size=count, max_size=count)
    begun = [np.cumsum(np.array(data.draw(times), np.int64)) + 2 * 10**9 * np.arange(count) for _ in hosts]
    over = np.max(begun, axis=0)
    lanes = []
    for rank, (host, begins) in enumerate(zip(hosts, begun, strict=True)):
        ends = over + np.array(data.draw(times), np.int64)
        lanes.append(lane(rank, (begins - offsets[host]).tolist(), (ends - offsets[host]).tolist()))
    found = bounds(lanes, hosts)
    for host in {*hosts} & found.keys():
        least, most = found[host]
        assert least <= offsets[host] - offsets[hosts[0]] <= most


def test_who_is_last_bounds_the_offset_closely() -> None:
    # Each is last once, and the collective is over 10 ns later; the other clock shows 1,000 less.
    here = lane(0, [100, 900], [510, 910])
    there = lane(1, [500 - 1000, 300 - 1000], [510 - 1000, 910 - 1000])
    assert bounds([here, there], ["a", "b"]) == {"b": (990, 1010)}


def test_collectives_that_contradict_each_other_or_cannot_be_matched_prove_nothing() -> None:
    here = lane(0, [0, 1000], [10, 1010])
    drifted = lane(1, [0, 1500], [10, 1510])
    assert bounds([here, drifted], ["a", "b"]) == {}
    fewer = lane(1, [0], [10])
    assert bounds([here, fewer], ["a", "b"]) == {}
    other = lane(1, [0, 1000], [10, 1010], pair=("collective", "barrier"))
    assert bounds([here, other], ["a", "b"]) == {}
    # Of a host whose ranks do not agree nothing is taken, as of one on which a rank has none.
    assert bounds([here, lane(1, [0, 1000], [10, 1010]), fewer], ["a", "b", "b"]) == {}
    assert bounds([here, lane(1, [0, 1000], [10, 1010]), other], ["a", "b", "b"]) == {}


def test_a_wall_clock_is_kept_where_nothing_proves_it_wrong() -> None:
    def at(rank: int, shift_ns: int, wall_off_ns: int) -> Lane:
        each = lane(rank, [100 - shift_ns, 900 - shift_ns], [910 - shift_ns, 920 - shift_ns], boot=f"boot{rank}")
        header = dataclasses.replace(each.header, mono_ns=HEADER.mono_ns - shift_ns, wall_ns=HEADER.wall_ns + wall_off_ns)
        return dataclasses.replace(each, header=header)

    first, near, far = clocks([at(0, 0, 0), at(1, 5000, 15), at(2, 7000, 60_000)])
    assert (first.by, first.offset_ns, first.bounds_ns) == ("monotonic", 0, None)
    assert (near.by, near.offset_ns, near.wall_ns) == ("wall", 5015, 5015)
    assert near.bounds_ns is not None and near.bounds_ns[0] <= 5000 <= near.bounds_ns[1]
    assert far.by == "collectives" and far.wall_ns == 67_000
    assert far.bounds_ns is not None and abs(far.offset_ns - 7000) <= (far.bounds_ns[1] - far.bounds_ns[0] + 1) // 2


def test_thinned_lanes_keep_begins_and_ends_of_the_same_collectives() -> None:
    kept = Lanes(most=60)
    for rank in range(3):
        begins = list(range(0, 100_000, 1000))
        kept.add(lane(rank, begins, [begin + 7 for begin in begins]))
    assert kept.every > 1
    assert all((each.ends[PAIR] - each.begins[PAIR] == 7).all() and len(each.ends[PAIR]) for each in kept.all)
    assert sum(len(each.begins[PAIR]) + len(each.ends[PAIR]) for each in kept.all) <= 60


# --- real ranks -------------------------------------------------------------------------------------------------------

#: Each rank is the last one in turn, as in any job where the slow rank changes.
SCRIPT = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(40):
    time.sleep(0.002 * ((step + dist.get_rank()) % 2))
    model(torch.ones(2, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def moved(path: Path, shift_ns: int, wall_off_ns: int) -> None:
    """The same recording as another host would have made it: its monotonic clock shows ``shift_ns`` more, its wall clock is
    ``wall_off_ns`` ahead."""
    trace = Trace.open(path)
    header = trace.header
    other = dataclasses.replace(
        header, host="far", boot="far", mono_ns=header.mono_ns + shift_ns, wall_ns=header.wall_ns + wall_off_ns
    )
    writer = Writer(path.with_suffix(".moved"), other)
    for rows in trace.chunks():
        columns = (rows.kind, rows.what, rows.key, rows.nbytes, rows.time_ns, rows.thread, rows.ident)
        for kind, what, key, nbytes, time_ns, thread, ident in zip(*(each.tolist() for each in columns), strict=True):
            row = Row(kind, trace.strings[what], trace.strings[key], nbytes, time_ns + shift_ns, thread, ident)
            writer.rows([row])
    for note in trace.notes():
        if note.name not in ("end", "clock"):
            writer.note(note.name, note.body)
    writer.close()
    trace.close()
    path.with_suffix(".moved").rename(path)


@pytest.mark.slow
def test_the_offset_of_a_host_whose_wall_clock_is_wrong_is_recovered_within_what_is_said(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["-m", "zprof", "run", "--level", "events", "-o", "job7.{rank}.zprof", "script.py"]
    for told in forked.launch(2, *words, at=tmp_path):
        assert told.returncode == 0, told.stderr
    shift_ns, wall_off_ns = 3_600_000 * MS, -250 * MS
    moved(tmp_path / "job7.1.zprof", shift_ns, wall_off_ns)
    body = json.loads(zprof("report", "job7.0.zprof", "job7.1.zprof", "--json").stdout)
    clock = body["ranks"]["clocks"][1]
    assert clock["by"] == "collectives"
    least, most = clock["bounds_ns"]
    assert least <= -shift_ns <= most and abs(clock["offset_ns"] + shift_ns) <= (most - least + 1) // 2
    assert most - least < 250 * MS, "far better than the wall clock"
    assert clock["wall_ns"] == pytest.approx(wall_off_ns - shift_ns, abs=50 * MS)
    skew = body["ranks"]["skew"]
    assert skew and all(each["late_ns"] < 200 * MS for each in skew), "as late as they were, not as their clocks are wrong"
    text = " ".join(zprof("report", "job7.0.zprof", "job7.1.zprof").stdout.split())
    assert "rank 1: its wall clock is 25" in text
    assert "behind the first rank's; corrected by collectives, to within" in text
    assert "aligned with the first by wall clock" not in text
    assert zprof("export", "job7.0.zprof", "job7.1.zprof", "--format", "perfetto", "-o", "out").exit_code == 0
    events = json.loads(Path("out").read_bytes())["traceEvents"]
    reduced = [each for each in events if each["ph"] == "X" and each["name"] == "collective all_reduce"]
    first, second = ([each["ts"] for each in reduced if each["pid"] == pid] for pid in (1, 2))
    assert len(first) == len(second) >= 40
    assert max(abs(one - two) for one, two in zip(first, second, strict=True)) < 200_000
