"""What a snapshot file may say: the three forms of a sound one, torch's own viewer, and one line for anything else."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch.cuda._memory_viz as viewer

from tests.support.forked import python
from tests.support.slow import slow
from tests.support.zprof_snapshots import MIB, golden, made
from tests.support.zprof_traces import sample_rows, write_trace
from zprof.allocator.recordings import snapshot_of
from zprof.allocator.snapshot import Entry, Frame, checked, load_snapshot, plain, reduced, write_snapshot
from zprof.allocator.snapshot_files import decoded
from zprof.rows import Row, RowKind, TraceError
from zprof.trace.reader import Trace

FORMS: dict[str, Callable[[Any], bytes]] = {
    "pickle2": lambda raw: pickle.dumps(raw, protocol=2),
    "pickle4": lambda raw: pickle.dumps(raw, protocol=4),
    "pickle5": lambda raw: pickle.dumps(raw, protocol=5),
    "json": lambda raw: json.dumps(raw).encode(),
    "msgpack": lambda raw: msgpack.packb(raw),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_one_snapshot_are_read_alike(form: str, tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    path.write_bytes(FORMS[form](golden()))
    assert load_snapshot(path) == checked(golden(), "golden")


def test_a_snapshot_of_the_golden_values_says_what_they_say() -> None:
    snapshot = checked(golden(), "golden")
    assert [segment.total_size // MIB for segment in snapshot.segments] == [20, 64, 2, 32, 60]
    kinds = [(segment.stream, segment.large, segment.expandable) for segment in snapshot.segments]
    assert kinds[2:] == [(0, False, False), (9, True, False), (3, True, True)]
    assert [block.state for block in snapshot.segments[0].blocks][3] == "active_awaiting_free"
    assert snapshot.traces[0][2] == Entry("oom", 0, 512 * MIB, 0, 3, None, 100 * MIB)
    assert (snapshot.settings, snapshot.devices) == ("", [0])


def test_a_bare_list_of_segments_is_a_snapshot_as_torch_cuda_memory_snapshot_gives_it() -> None:
    assert checked(golden()["segments"], "x").segments == checked(golden(), "x").segments


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_what_is_written_reads_back_and_opens_in_torchs_viewer(text: str, tmp_path: Path) -> None:
    snapshot = checked(made(text=text), "made")
    path = tmp_path / "snapshot.pickle"
    write_snapshot(path, snapshot)
    assert load_snapshot(path) == snapshot
    data = path.read_bytes()
    assert data[:2] == b"\x80\x04"
    raw = pickle.loads(data)
    reserved = sum(segment.total_size for segment in snapshot.segments)
    assert f"total_reserved: {viewer.Bytes(reserved)}" in viewer.segsum(raw)
    page = viewer.trace_plot(raw)
    assert "Active Memory Timeline" in page and "Allocator State History" in viewer.segment_plot(raw)
    lines: list[str] = []
    viewer.memory(raw, format_flamegraph=lines.append)
    viewer.segments(raw, format_flamegraph=lines.append)
    assert sum(int(line.rpartition(" ")[2]) for line in lines[0].splitlines()) == reserved
    if not text:
        for segment in raw["segments"]:
            segment["allocated_size"] = segment["total_size"]
        assert "cudaMalloc" in viewer.trace(raw)


def test_the_viewer_makes_a_page_of_a_written_file_from_the_command_line(tmp_path: Path) -> None:
    path, page = tmp_path / "s.pickle", tmp_path / "page.html"
    write_snapshot(path, checked(made(3), "made"))
    ran = python("-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", str(page))
    assert ran.returncode == 0, ran.stderr
    assert "MemoryViz" in page.read_text(encoding="utf-8")


def test_a_reduced_snapshot_keeps_state_and_as_much_history_as_fits() -> None:
    raw = made(1)
    whole, cut = checked(raw, "x"), reduced(raw, most_nbytes=30_000)
    packed = msgpack.packb(cut)
    assert len(packed) <= 30_000
    read = checked(msgpack.unpackb(packed), "x")
    assert [s.total_size for s in read.segments] == [s.total_size for s in whole.segments]
    kept = read.traces[0]
    assert 0 < len(kept) < len(whole.traces[0])
    assert kept == tuple(entry._replace(frames=()) for entry in whole.traces[0][-len(kept) :])


def test_a_cpu_trace_gets_a_snapshot_by_replay(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "run.zprof", list(sample_rows(level="alloc", steps=1)), level="alloc")
    snapshot = snapshot_of(Trace.open(path))
    assert snapshot.source == "replay" and snapshot.traces[0]
    allocs = [entry for entry in snapshot.traces[0] if entry.action == "alloc"]
    frames = [frame for entry in allocs for frame in entry.frames]
    assert {frame.name for frame in frames} >= {"model.layers.0.attn", "model.layers.0.mlp"}
    assert {(frame.filename, frame.line) for frame in frames} == {("lines not recorded (zprof run --level stack)", 0)}
    assert viewer.segsum(plain(snapshot))


def test_a_snapshot_by_replay_has_the_lines_that_were_recorded(tmp_path: Path) -> None:
    key = "layers.0 <- a:b/model.py:31:forward <- train.py:12:<module>"
    rows = [Row(RowKind.ALLOC, "activation on device", key, 4096, 2_000_000_000, 0, 1)]
    snapshot = snapshot_of(Trace.open(write_trace(tmp_path / "run.zprof", rows, level="stack")))
    [entry] = [entry for entry in snapshot.traces[0] if entry.action == "alloc"]
    assert entry.frames == (Frame("a:b/model.py", 31, "forward"), Frame("train.py", 12, "<module>"))
    [block] = [block for segment in snapshot.segments for block in segment.blocks if block.requested]
    assert block.frames == entry.frames


def test_a_trace_with_a_snapshot_gives_that(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "run.zprof", [], notes={"snapshot": reduced(golden())}, device="cuda:0")
    assert snapshot_of(Trace.open(path)).segments[1:] == checked(reduced(golden()), "x").segments[1:]


# --- what is refused --------------------------------------------------------------------------------------------------


def changed(*keys: Any, value: Any) -> dict[str, Any]:
    raw = golden()
    at: Any = raw
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return raw


BROKEN: list[tuple[Any, str]] = [
    (7, "a map, found 7"),
    ({}, "segments: expected a list"),
    (changed("segments", 0, "total_size", value=20 * MIB + 1), "the segment's total_size"),
    (changed("segments", 0, "address", value=-1), "segments[0].address: expected a whole number"),
    (changed("segments", 0, "address", value=True), "segments[0].address: expected a whole number"),
    (changed("segments", 0, "blocks", value=None), "segments[0].blocks: expected a list"),
    (changed("segments", 0, "blocks", 1, "address", value=5), "where the one before ends"),
    (changed("segments", 0, "blocks", 1, "size", value=0), "blocks[1].size: expected a whole number from 1"),
    (changed("segments", 0, "blocks", 1, "size", value=1e6), "found a float"),
    (changed("segments", 0, "blocks", 0, "state", value="\x1b[31m"), "found '\\x1b[31m'"),
    (changed("segments", 0, "blocks", 0, "requested_size", value=99 * MIB), "at most its size"),
    (changed("segments", 0, "segment_type", value=[]), "large or small, found a list"),
    (changed("segments", 0, "segment_pool_id", value=(1, 2, 3)), "two numbers"),
    (changed("segments", 0, "blocks", 0, "frames", value=[{"name": 3}]), "a filename, a line and a name"),
    (changed("segments", 1, "address", value=0x7F0000000000 + MIB), "where the one before ends"),
    (changed("device_traces", value={}), "device_traces: expected a list"),
    (changed("device_traces", 0, 0, "action", value="explode"), "one of alloc"),
    (changed("device_traces", 0, 0, "size", value=1 << 70), "found 1180591620717411303424"),
    (changed("device_traces", 0, 0, "size", value=1 << 700), "found a huge number"),
    (changed("allocator_settings", "PYTORCH_CUDA_ALLOC_CONF", value=4), "a text, found 4"),
]


@pytest.mark.parametrize(("raw", "said"), BROKEN, ids=[said for _, said in BROKEN])
def test_what_is_no_snapshot_is_refused_in_one_line(raw: Any, said: str) -> None:
    with pytest.raises(TraceError, match=r"^file: .*expected .*found .*; ") as refused:
        checked(raw, "file")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_segments_that_overlap_are_refused() -> None:
    raw = golden()
    raw["segments"].append(raw["segments"][0])
    with pytest.raises(TraceError, match="memory of its own, found another segment"):
        checked(raw, "file")


class Trap:
    """Would write a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_runs_nothing(protocol: int, tmp_path: Path) -> None:
    raw = {**golden(), "extra": Trap(tmp_path / "made")}
    with pytest.raises(TraceError, match="file: expected"):
        decoded(pickle.dumps(raw, protocol=protocol), "file")
    assert not (tmp_path / "made").exists()


NASTY = {
    "a memo slot in the billions": b"\x80\x02K\x01r" + struct.pack("<I", 0xFFFFFFF0) + b".",
    "a text longer than the file": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "a frame longer than the file": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"K\x01.",
    "containers without end": b"\x80\x04" + b"}" * 400_000 + b".",
    "tuples in tuples": b"\x80\x04}" + b"K\x01" + b"K\x01\x86" * 1_000_000 + b"K\x01s.",
    "lists in lists": b"\x80\x04" + b"]" * 60_000 + b"a" * 59_999 + b".",
    "its own member": b"\x80\x04]q\x00h\x00a.",
    "nothing on the stack": b"\x80\x04.",
    "no end": b"\x80\x04K\x01",
    "JSON in depth": b"[" * 60_000 + b"]" * 60_000,
    "a JSON number without end": b'{"segments": ' + b"9" * 100_000 + b"}",
    "msgpack in depth": b"\x91" * 60_000 + b"\x01",
    "a msgpack array without members": b"\xdd\xff\xff\xff\xff",
    "a msgpack map without members": b"\xdf\xff\xff\xff\xff",
    "a msgpack extension": b"\xc7\x01\x05x",
    "empty": b"",
    "spaces": b"   ",
    "text": b"hello",
}


@pytest.mark.parametrize("name", NASTY)
def test_a_nasty_file_is_refused_in_one_line_within_its_memory(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TraceError) as refused:
        checked(decoded(NASTY[name], "file"), "file")
    assert str(refused.value).startswith("file: ") and "\n" not in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "KiB"


def test_shared_members_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zprof.allocator.snapshot._MOST_BLOCKS", 1 << 16)
    block = {"size": 512, "requested_size": 512, "state": "active_allocated", "frames": []}
    segment = {"address": 0, "total_size": 512 << 12, "blocks": [block] * (1 << 12), "segment_type": "large"}
    with pytest.raises(TraceError, match="blocks, found more"):
        checked({"segments": [segment] * (1 << 16)}, "file")


@pytest.mark.parametrize("path", ["/nonexistent/snapshot", "/", "/dev/zero", "a\0b"])
def test_a_path_that_is_no_file_is_one_line(path: str) -> None:
    with pytest.raises(TraceError, match=r"expected .*found") as refused:
        load_snapshot(path)
    assert "\n" not in str(refused.value)


def mutated(data: bytes, dice: random.Random) -> bytes:
    """The same bytes, with a few of them changed, cut out, doubled, or moved."""
    body = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at, end = sorted(dice.randrange(len(body)) for _ in range(2))
        kind = dice.randrange(6)
        if kind <= 2:
            body[at] = dice.randrange(256)
        elif kind == 3:
            del body[at : min(end, at + dice.randint(1, 40))]
        elif kind == 4:
            body[at:at] = body[at : min(end, at + 60)]
        else:
            del body[at:]
        if not body:
            return b""
    return bytes(body)


def survives(data: bytes) -> bool:
    """Whether it still is a snapshot; anything but a snapshot or an error of one line fails the test."""
    try:
        snapshot = checked(decoded(data, "file"), "file")
    except TraceError as error:
        assert "\n" not in str(error) and str(error).startswith("file: ") and len(str(error)) < 600
        return False
    for segment in snapshot.segments:
        assert sum(block.size for block in segment.blocks) == segment.total_size
    return True


@pytest.mark.parametrize("count", [400, *slow(2_000)])
@pytest.mark.parametrize("form", FORMS)
def test_mutated_snapshots_are_refused_in_one_line_or_right(form: str, count: int) -> None:
    dice = random.Random(count)
    sound = [FORMS[form](raw) for raw in (golden(), made(2, 12))]
    assert all(survives(data) for data in sound)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    alive = sum(survives(mutated(dice.choice(sound), dice)) for _ in range(count))
    assert 0 < alive < count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "KiB"
