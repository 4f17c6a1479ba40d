"""What a reader makes of files that were cut, mutated or forged: a right answer of what remains, or one line."""

from __future__ import annotations

import itertools
import os
import random
import struct
import subprocess
import sys
import textwrap
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.support.slow import slow
from tests.support.zprof_traces import HEADER, rows_of, sample_rows, write_trace
from zprof.rows import Row, RowKind, TraceError
from zprof.trace.columns import encoded
from zprof.trace.framefile import START
from zprof.trace.frames import HEAD_NBYTES, MAGIC, FrameKind, packed, sealed
from zprof.trace.reader import Trace
from zprof.trace.writer import Writer


def small(path: Path, parts: int = 5) -> list[list[Row]]:
    """A file of several chunks and notes of a few rows each; its rows, chunk by chunk."""
    writer = Writer(path, HEADER)
    rows = list(itertools.islice(sample_rows(units=2), 12 * parts))
    chunks = [rows[at : at + 12] for at in range(0, len(rows), 12)]
    for number, chunk in enumerate(chunks):
        writer.rows(chunk)
        writer.note("number", {"number": number, "text": "words " * number})
    writer.close()
    return chunks


def read(path: Path) -> tuple[list[Row], list[Any], str | None]:
    """Everything a report might ask of a file."""
    trace = Trace.open(path)
    try:
        rows = list(rows_of(trace))
        notes = trace.notes()
        assert trace.dropped >= 0 and trace.count >= len(rows)
        assert [row for chunk in trace.more() for row in chunk.kind] == [row.kind for row in rows]
        return rows, notes, trace.damage
    finally:
        trace.close()


@pytest.mark.slow
def test_cut_at_any_byte_only_the_last_chunk_is_lost(tmp_path: Path) -> None:
    chunks = small(tmp_path / "whole.zprof", 3)
    whole = (tmp_path / "whole.zprof").read_bytes()
    file = Trace.open(tmp_path / "whole.zprof").file
    ends = [offset + HEAD_NBYTES + size for offset, size in zip(file.rows, file.sizes, strict=True)]
    header_end = file.read(START)[0].end
    frame_ends = {header_end, *ends, *(file.read(offset)[0].end for offset in file.notes)}
    path = tmp_path / "cut.zprof"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size < header_end:
            with pytest.raises(TraceError) as refused:
                Trace.open(path)
            assert "\n" not in str(refused.value)
            continue
        rows, _, damage = read(path)
        assert rows == [row for chunk, end in zip(chunks, ends, strict=True) if end <= size for row in chunk]
        assert (damage is None) == (size in frame_ends)
        assert damage is None or damage == (
            f"ends inside a chunk at byte {size}: the run was killed, or is still writing"
        )


def test_a_damaged_chunk_takes_no_other_with_it(tmp_path: Path) -> None:
    chunks = small(tmp_path / "run.zprof")
    whole = (tmp_path / "run.zprof").read_bytes()
    offsets = list(Trace.open(tmp_path / "run.zprof").file.rows)
    path = tmp_path / "bad.zprof"
    for number, offset in enumerate(offsets):
        others = [row for at, chunk in enumerate(chunks) if at != number for row in chunk]
        for at in (0, 5, 9, 14, 20, HEAD_NBYTES + 3):
            path.write_bytes(whole[: offset + at] + bytes([whole[offset + at] ^ 0x41]) + whole[offset + at + 1 :])
            rows, notes, damage = read(path)
            assert rows == others and len(notes) == 6
            assert damage and damage.startswith(f"damaged at byte {offset} (")
        # Bytes lost from within, and bytes put in between.
        for lost in (whole[: offset + 40] + whole[offset + 57 :], whole[:offset] + b"noise" * 9 + whole[offset + 30 :]):
            path.write_bytes(lost)
            rows, _, damage = read(path)
            assert rows == others and damage


def test_a_damaged_chunk_asked_for_by_number_is_one_line(tmp_path: Path) -> None:
    small(tmp_path / "run.zprof")
    trace = Trace.open(tmp_path / "run.zprof")
    offset = trace.file.rows[2]
    with (tmp_path / "run.zprof").open("r+b") as file:
        file.seek(offset + HEAD_NBYTES)
        file.write(b"\x00")
    with pytest.raises(TraceError, match=f"chunk 2 at byte {offset} is damaged: its check is wrong"):
        trace.chunk(2)
    assert trace.damage is None and len(list(trace.chunks())) == len(trace) - 1 and trace.damage


@pytest.mark.parametrize(
    "content", [b"", b"zp", b"#!/usr/bin/env python\n" * 99, MAGIC, MAGIC + b"\x01\x00", MAGIC + b"\x07\x00", bytes(4096)]
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.zprof"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"run\.zprof") as refused:
        Trace.open(path)
    assert "\n" not in str(refused.value)


def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "pipe", Path("/dev/zero"), Path("a\x00b")):
        with pytest.raises(TraceError) as refused:
            Trace.open(path)
        assert "\n" not in str(refused.value)


def mutated(chance: random.Random, whole: bytes) -> bytes:
    """One to three mutations."""
    data = bytearray(whole)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data)) if data else 0
        act = chance.randrange(7)
        if act == 0:
            data[at : at + 1] = bytes([chance.randrange(256)])
        elif act == 1:
            data[at : at + 1] = bytes([(data[at] if data else 0) ^ 1 << chance.randrange(8)])
        elif act == 2:
            del data[at : at + chance.randrange(1, 60)]
        elif act == 3:
            data[at:at] = chance.randbytes(chance.randrange(1, 60))
        elif act == 4:
            data[at : at + 4] = chance.choice([b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f", b"\xdd\xff\xff\xff"])
        elif act == 5:
            begin = chance.randrange(len(data) or 1)
            data[at:at] = data[begin : begin + chance.randrange(1, 400)]
        else:
            del data[at:]
    return bytes(data)


def resealed(data: bytes) -> bytes:
    """``data`` with every frame's checks made right again, so that what lies below them is tried too."""
    out, at = bytearray(data), START
    while at + HEAD_NBYTES <= len(out):
        nbytes = int.from_bytes(out[at + 12 : at + 16], "little")
        payload = bytes(out[at + HEAD_NBYTES : at + HEAD_NBYTES + nbytes])
        out[at + 16 : at + 20] = zlib.crc32(payload).to_bytes(4, "little")
        out[at + 20 : at + 24] = zlib.crc32(bytes(out[at : at + 20])).to_bytes(4, "little")
        at += HEAD_NBYTES + nbytes
    return bytes(out)


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 10))])
def test_ten_times_a_thousand_mutated_files_are_read_or_refused_in_one_line(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    sources = []
    for parts in (1, 3, 6):
        small(tmp_path / f"{parts}.zprof", parts)
        sources.append((tmp_path / f"{parts}.zprof").read_bytes())
    # One whose chunk is zipped.
    sources.append(write_trace(tmp_path / "zipped.zprof", itertools.islice(sample_rows(), 300)).read_bytes())
    originals = [set(rows_of(Trace.open(each))) for each in sorted(tmp_path.iterdir())]
    known = set[Row]().union(*originals)
    path = tmp_path / "mutated.zprof"
    outcomes = {"read": 0, "read in part": 0, "refused": 0}
    for number in range(1000):
        whole = mutated(chance, sources[number % len(sources)])
        checked = chance.randrange(2)
        path.write_bytes(resealed(whole) if checked else whole)
        if number % 5 == 0:
            tracemalloc.start()
        try:
            rows, _, damage = read(path)
        except TraceError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
            outcomes["refused"] += 1
        else:
            assert damage is None or ("\n" not in damage and len(damage) < 400)
            assert checked or known.issuperset(rows), "a row that was never written"
            outcomes["read in part" if damage else "read"] += 1
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < 32 << 20, f"{peak} bytes for a file of {len(whole)}"
    assert min(outcomes.values()) > 5, outcomes


def forged(path: Path, *frames: bytes) -> Path:
    start = MAGIC + b"\x01\x00" + sealed(FrameKind.HEADER, packed(HEADER.packed()))
    path.write_bytes(start + b"".join(frames))
    return path


def bomb(kind: FrameKind, plain: bytes, count: int = 0) -> bytes:
    """A frame that unzips to ``plain`` whatever the ratio."""
    zipped = zlib.compress(plain, 9)
    head = struct.pack("<4sBBHIII", b"\xf5zp\xfa", kind, 1, count, 1, len(zipped), zlib.crc32(zipped))
    return head + struct.pack("<I", zlib.crc32(head)) + zipped


def nested(depth: int, length: int) -> bytes:
    """Lists in lists, each of which claims ``length`` elements."""
    return struct.pack(">BI", 0xDD, length) * depth


def chunk(count: int, names: object = ("a",), **columns: object) -> bytes:
    """A frame of rows whose columns are [base, bytes] as given, [0, nothing] where not."""
    order = ("kind", "what", "key", "nbytes", "time_ns", "thread", "ident")
    payload = packed([names, 5, *(columns.get(name, [0, b""]) for name in order)])
    return sealed(FrameKind.ROWS, payload, count=count)


def note(payload: bytes) -> bytes:
    return sealed(FrameKind.NOTE, payload, zipped=False)


FORGED = {
    "unzips a thousandfold": bomb(FrameKind.ROWS, bytes(4 << 20), 4096),
    "unzips beyond its kind": bomb(FrameKind.NOTE, os.urandom(1 << 20) * 40),
    "claims lists it does not hold": note(nested(1000, 60_000) + bytes(60_000)),
    "is nested too deep": note(b"\x91" * 100_000 + b"\x00"),
    "holds millions of empty maps": note(b"\x92\xa1n\xdd" + struct.pack(">I", 1 << 23) + b"\x80" * (1 << 23)),
    "has a map of numbers": note(packed(["n", {1: 2}])),
    "has a note that is none": note(packed({"n": 1})),
    "has an extension": note(msgpack.packb(["n", {"x": msgpack.ExtType(4, b"x" * 99)}])),
    "has bytes left over": note(packed(["n", {}]) + b"\x00"),
    "points outside its names": chunk(9, what=[7, b""]),
    "has a column too short": chunk(9, ident=[0, bytes(7)]),
    "has a column of odd width": chunk(9, ident=[0, bytes(27)]),
    "has a column that is none": chunk(9, ident=7),
    "has times before the clock": chunk(9, time_ns=[-9, b""]),
    "has times that wrap": chunk(9, time_ns=[(1 << 62) - 1, b""]),
    "has sizes beyond any": chunk(9, nbytes=[1 << 60, b""]),
    "has numbers that wrap": chunk(2, nbytes=[9, b"\xff" * 16]),
    "has numbers beyond 64 bits": chunk(2, nbytes=[(1 << 64) - 1, b""]),
    "has a kind there is not": chunk(9, kind=[7, b""]),
    "has no name": chunk(9, names=[]),
    "has names that are none": chunk(9, names=[b"a"]),
    "has too many names": chunk(9, names=["a"] * 8193),
    "is a number": sealed(FrameKind.ROWS, b"\x07", count=9),
    "is empty": sealed(FrameKind.ROWS, b"", count=9),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_frame_is_damage_and_takes_no_memory(tmp_path: Path, name: str) -> None:
    before, after = (encoded([Row(RowKind.INSTANT, "release", key, 0, 1)]) for key in ("before", "after"))
    frames = (sealed(FrameKind.ROWS, before, count=1), FORGED[name], sealed(FrameKind.ROWS, after, count=1))
    path = forged(tmp_path / "run.zprof", *frames)
    size = path.stat().st_size
    tracemalloc.start()
    try:
        rows, notes, damage = read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [row.key for row in rows] == ["before", "after"] and notes == []
    assert damage and "\n" not in damage and "damaged at byte" in damage
    assert peak < 8 * size + (24 << 20)


def test_a_frame_of_an_unknown_kind_is_passed_over(tmp_path: Path) -> None:
    row = encoded([Row(RowKind.INSTANT, "release", "u", 0, 1)])
    strange = bytearray(sealed(FrameKind.NOTE, b"from the future"))
    strange[4] = 77
    strange[20:24] = zlib.crc32(bytes(strange[:20])).to_bytes(4, "little")
    path = forged(tmp_path / "run.zprof", bytes(strange), sealed(FrameKind.ROWS, row, count=1))
    rows, notes, damage = read(path)
    assert len(rows) == 1 and notes == [] and damage is None


def test_a_header_that_claims_nonsense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.zprof"
    changes: list[dict[str, Any]] = [
        {"rank": -1}, {"argv": "x"}, {"argv": [1]}, {"host": 3}, {"mono_ns": 1 << 63}, {"world": True},
    ]  # fmt: skip
    for change in changes:
        path.write_bytes(MAGIC + b"\x01\x00" + sealed(FrameKind.HEADER, packed(HEADER.packed() | change)))
        with pytest.raises(TraceError, match=f"header key {next(iter(change))}: expected") as refused:
            Trace.open(path)
        assert "\n" not in str(refused.value)


def test_everything_a_killed_run_had_written_can_be_read(tmp_path: Path) -> None:
    child = textwrap.dedent(
        """
        import sys
        from tests.support.zprof_traces import HEADER
        from zprof.rows import Row
        from zprof.trace.writer import Writer
        writer = Writer(sys.argv[1], HEADER, force=True)
        done = 0
        while True:
            writer.rows([Row(3, "parameter on device", f"unit.{n % 50}", n, n) for n in range(done, done + 700)])
            writer.flush()
            done += 700
            sys.stdout.write(f"{done}\\n"); sys.stdout.flush()
        """
    )
    path = tmp_path / "run.zprof"
    for number in (0, 2, 4):
        process = subprocess.Popen([sys.executable, "-c", child, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(3 + 40 * number):
            process.stdout.readline()
        process.kill()
        told = process.stdout.read().splitlines(keepends=True)
        process.stdout.close()
        process.wait()
        last = [line for line in told if line.endswith(b"\n")]
        rows = list(rows_of(Trace.open(path)))
        assert [row.nbytes for row in rows] == list(range(len(rows)))
        assert len(rows) >= (int(last[-1]) if last else 700 * (3 + 40 * number))
