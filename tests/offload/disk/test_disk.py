"""The disk tier on a real file: what is written comes back, space is given and taken, and nobody waits for ever."""

from __future__ import annotations

import gc
import os
import stat
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload.disk import Bytes, DiskFile, Extent, SystemIo
from offload.disk.disk_tier import ALIGN, CHECK, STEP
from offload.errors import BudgetError, PolicyError, TierError
from offload.events import Bus, Recorder
from offload.free_ranges import Space
from offload.pages import aligned, round_up
from tests.support.waiting import soon

PAGE_EDGES = [1, ALIGN - 1, ALIGN, ALIGN + 1, CHECK - 1, CHECK, CHECK + 1, 3 * CHECK + 5000]


class Buffered(SystemIo):
    """A file system without direct I/O."""

    def open(self, path: Path, flags: int, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, os.strerror(22))
        return super().open(path, flags, dir_fd)


class Gated(SystemIo):
    """Writes wait until the gate opens; ``entered`` says that one does."""

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self.entered.set()
        assert self.gate.wait(60)
        return super().pwritev(fd, buffers, offset)


def pattern(nbytes: int, seed: int = 0, *, skew: int = 0) -> Tensor:
    """Bytes that start ``skew`` past a page."""
    memory = aligned(nbytes + skew)[skew:]
    values = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return memory.copy_(torch.from_numpy(values))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskFile]:
    opened = DiskFile(tmp_path, threads=3, block=2 * CHECK)
    yield opened
    opened.close()


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", [SystemIo(), Buffered()], ids=["direct", "buffered"])
@pytest.mark.parametrize("skew", [0, 1, 512], ids=lambda skew: f"skew{skew}")
@pytest.mark.parametrize("nbytes", PAGE_EDGES)
def test_what_is_written_comes_back_whatever_its_length_and_wherever_it_lies(
    tmp_path: Path, nbytes: int, skew: int, io: SystemIo
) -> None:
    disk = DiskFile(tmp_path, threads=2, block=CHECK, io=io)
    before, extent, after = (disk.allocate(size, "b") for size in (ALIGN, nbytes, ALIGN))
    edges = pattern(ALIGN, 1)
    disk.write(before, edges).wait()
    disk.write(after, edges).wait()
    source, into = pattern(nbytes, 2, skew=skew), aligned(nbytes + skew)[skew:]
    disk.write(extent, source).wait()
    disk.read(extent, into).wait()
    assert torch.equal(source, into)
    for edge in (before, after):
        disk.read(edge, into := aligned(ALIGN)).wait()
        assert torch.equal(edges, into)
    disk.close()


def test_an_empty_block_is_written_and_read_at_once(disk: DiskFile) -> None:
    extents = [disk.allocate(0, "nothing") for _ in range(2)]
    empty = torch.empty(0, dtype=torch.uint8)
    for extent in extents:
        for pending in (disk.write(extent, empty), disk.read(extent, empty)):
            assert pending.done()
            pending.wait()
        disk.free(extent)
    assert disk.used == 0


def test_whole_pieces_are_rewritten_and_read_alone(disk: DiskFile) -> None:
    nbytes = 5 * CHECK + 77
    expected = pattern(nbytes)
    extent = disk.allocate(nbytes, "b")
    disk.write(extent, expected).wait()
    for first, last in ((1, 3), (0, 1), (5, 6)):
        piece = expected[first * CHECK : min(last * CHECK, nbytes)]
        piece.copy_(pattern(piece.numel(), first + 10))
        disk.write(extent, piece, first * CHECK).wait()
    disk.read(extent, into := aligned(nbytes)).wait()
    assert torch.equal(into, expected)
    disk.read(extent, into := aligned(CHECK), 2 * CHECK).wait()
    assert torch.equal(into, expected[2 * CHECK : 3 * CHECK])


def test_what_was_never_written_is_not_read(disk: DiskFile) -> None:
    extent = disk.allocate(4 * CHECK, "layers.3")
    disk.write(extent, pattern(CHECK), 0).wait()
    disk.read(extent, aligned(CHECK)).wait()
    with pytest.raises(TierError, match=r"cannot read layers\.3 \(4 MiB\): byte \d+ of .*scratch was never written"):
        disk.read(extent, aligned(4 * CHECK)).wait()
    disk.free(extent)
    again = disk.allocate(4 * CHECK, "layers.4")
    assert again.offset == extent.offset
    with pytest.raises(TierError, match=r"layers\.4"):
        disk.read(again, aligned(CHECK)).wait()


def test_a_freed_extent_is_not_its_successor(disk: DiskFile) -> None:
    extent = disk.allocate(CHECK, "old")
    disk.free(extent)
    again = disk.allocate(CHECK, "new")
    assert (again.offset, again.nbytes) == (extent.offset, extent.nbytes)
    for use in (lambda: disk.write(extent, pattern(CHECK)), lambda: disk.free(extent)):
        with pytest.raises(AssertionError, match="was freed before"):
            use()


@pytest.mark.parametrize("offset,nbytes", [(1, CHECK), (0, CHECK - 1), (CHECK, 2 * CHECK), (0, 3 * CHECK), (-CHECK, CHECK)])
def test_a_range_that_is_not_whole_pieces_is_refused(disk: DiskFile, offset: int, nbytes: int) -> None:
    extent = disk.allocate(2 * CHECK + 9, "b")
    with pytest.raises(AssertionError, match="are not whole CHECKs of"):
        disk.write(extent, aligned(nbytes), offset)


WRONG = [torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]]


@pytest.mark.parametrize("wrong", WRONG, ids=["floats", "matrix", "strided"])
def test_only_plain_bytes_are_moved(disk: DiskFile, wrong: Tensor) -> None:
    with pytest.raises(AssertionError, match="Expected contiguous bytes on the CPU"):
        disk.write(disk.allocate(4, "b"), wrong)


def test_autograd_sees_a_read(disk: DiskFile) -> None:
    extent = disk.allocate(CHECK, "b")
    memory = pattern(CHECK)
    disk.write(extent, memory).wait()
    version = memory._version
    disk.read(extent, memory).wait()
    assert memory._version == version + 1


def test_many_threads_may_use_one_file(disk: DiskFile) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(6):
                nbytes = (seed + turn) % 4 * CHECK + 1000 * seed + 1
                source, into = pattern(nbytes, seed), aligned(nbytes)
                extent = disk.allocate(nbytes, f"{seed}.{turn}")
                disk.write(extent, source).wait()
                disk.read(extent, into).wait()
                assert torch.equal(source, into)
                disk.free(extent)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and disk.used == 0
    assert disk.holes == [(ALIGN, disk.reserved)]


# --- what is under way ------------------------------------------------------------------------------------------------


def test_a_transfer_keeps_its_memory_alive_until_it_is_over_and_no_longer(tmp_path: Path) -> None:
    io = Gated()
    disk = DiskFile(tmp_path, io=io)
    extent = disk.allocate(CHECK, "b")
    io.gate.clear()
    source = pattern(CHECK)
    storage = weakref.ref(source.untyped_storage())
    memory = weakref.ref(source)
    expected = source.clone()
    pending = disk.write(extent, source)
    del source
    gc.collect()
    assert not pending.done()
    io.gate.set()
    pending.wait()
    disk.write(extent, expected).wait()
    gc.collect()
    assert memory() is None and storage() is None
    disk.close()


def test_a_request_that_overlaps_one_under_way_starts_after_it(tmp_path: Path) -> None:
    io = Gated()
    disk = DiskFile(tmp_path, io=io)
    extent = disk.allocate(2 * CHECK, "b")
    disk.write(extent, pattern(2 * CHECK)).wait()
    io.gate.clear()
    io.entered.clear()
    new = pattern(CHECK, 5)
    disk.write(extent, new, CHECK)
    assert io.entered.wait(60)
    disk.read(extent, apart := aligned(CHECK)).wait()
    assert torch.equal(apart, pattern(2 * CHECK)[:CHECK])
    into, read = aligned(CHECK), threading.Event()

    def reader() -> None:
        disk.read(extent, into, CHECK).wait()
        read.set()

    thread = threading.Thread(target=reader)
    thread.start()
    assert not read.wait(0.05)
    io.gate.set()
    thread.join()
    assert torch.equal(into, new)
    disk.close()


@pytest.mark.parametrize("verb", ["free", "close"])
def test_space_is_given_back_only_after_what_is_under_way_there(tmp_path: Path, verb: str) -> None:
    io = Gated()
    disk = DiskFile(tmp_path, io=io)
    extent = disk.allocate(CHECK, "b")
    io.gate.clear()
    io.entered.clear()
    pending = disk.write(extent, pattern(CHECK))
    assert io.entered.wait(60)
    thread = threading.Thread(target=disk.close if verb == "close" else lambda: disk.free(extent))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and disk.used == CHECK and disk.path.exists()
    io.gate.set()
    thread.join()
    pending.wait()
    disk.close()


def test_observers_hear_each_transfer_with_its_key_and_bytes(tmp_path: Path) -> None:
    bus, recorder = Bus(), Recorder()
    bus.attach(recorder)
    disk = DiskFile(tmp_path, block=CHECK, bus=bus)
    extent = disk.allocate(3 * CHECK, "layers.0")
    disk.write(extent, pattern(3 * CHECK)).wait()
    disk.read(extent, aligned(CHECK), CHECK, key="optim/layers.0").wait()
    assert recorder.names() == [
        "begin disk write layers.0",
        "end disk write layers.0",
        "begin disk read optim/layers.0",
        "end disk read optim/layers.0",
    ]
    assert [event.nbytes for event in recorder.events] == [3 * CHECK] * 2 + [CHECK] * 2
    disk.close()


def test_an_observer_that_fails_makes_nobody_wait_for_ever(tmp_path: Path) -> None:
    class Faulty(Recorder):
        def on_event(self, event: object) -> None:
            raise KeyError("observer")

    bus = Bus()
    disk = DiskFile(tmp_path, bus=bus)
    extent = disk.allocate(CHECK, "b")
    bus.attach(Faulty())
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning, match="observer Faulty raised"):
        warnings.simplefilter("error")
        disk.write(extent, pattern(CHECK))
    disk.read(extent, into := aligned(CHECK)).wait()
    assert torch.equal(into, pattern(CHECK))
    disk.close()


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_its_owners_alone_and_goes_at_close(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    disk = DiskFile(folder, label="r7")
    assert stat.S_IMODE(disk.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert disk.path.parent == folder and "r7" in disk.path.name
    extent = disk.allocate(CHECK, "b")
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("zhooks-disk")]
    assert threads
    disk.close()
    disk.close()
    assert list(folder.iterdir()) == []
    assert not any(thread.is_alive() for thread in threads)
    disk.free(extent)
    for use in (lambda: disk.allocate(1, "late"), lambda: disk.write(extent, aligned(CHECK)).wait()):
        with pytest.raises(TierError, match="was closed"):
            use()


def test_a_file_that_nobody_refers_to_goes(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path)
    disk.write(disk.allocate(CHECK, "b"), pattern(CHECK)).wait()
    path = disk.path
    del disk
    gc.collect()
    assert soon(lambda: not path.exists()), "once the worker has let go of what it wrote"


def test_a_file_system_without_direct_io_is_used_and_said_once(tmp_path: Path) -> None:
    bus, recorder = Bus(), Recorder()
    bus.attach(recorder)
    disk = DiskFile(tmp_path, io=Buffered(), bus=bus)
    assert not disk.direct
    assert recorder.names("disk buffered") == [f"instant disk buffered {disk.path}"]
    disk.close()


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(PolicyError, match=r"as \[disk\] path. Expected a folder this process may write, found a file"):
            DiskFile(folder)
    with pytest.raises(PolicyError, match=r"Cannot use /proc/zhooks as \[disk\] path. Expected a folder"):
        DiskFile(Path("/proc/zhooks"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PolicyError, match="Permission denied"):
        DiskFile(tmp_path)
    tmp_path.chmod(0o700)


# --- space -------------------------------------------------------------------------------------------------------------


def test_the_limit_holds_to_the_byte_and_its_error_has_the_arithmetic(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path, limit=8 * CHECK)
    first = disk.allocate(7 * CHECK, "first")
    with pytest.raises(BudgetError) as caught:
        disk.allocate(2 * CHECK, "optim/layers.7")
    said = str(caught.value)
    assert "disk tier cannot admit optim/layers.7 (2 MiB): 7.0 of 8.0 MiB in use" in said and str(disk.path) in said
    disk.allocate(CHECK, "second")
    assert disk.used == disk.high_water == disk.reserved == 8 * CHECK
    disk.free(first)
    assert (disk.used, disk.high_water) == (CHECK, 8 * CHECK)
    disk.allocate(7 * CHECK, "third")
    disk.close()


def test_more_than_the_disk_has_is_refused_before_anything_is_written(disk: DiskFile) -> None:
    with pytest.raises(BudgetError, match=r"cannot admit huge \(1024 TiB\): 0 B in use on .*, whose file system has .* left"):
        disk.allocate(1 << 50, "huge")
    assert disk.reserved == disk.used == 0
    disk.allocate(1, "small")


def test_the_file_grows_in_steps_and_is_used_again(disk: DiskFile) -> None:
    extents = [disk.allocate(CHECK, "b") for _ in range(8)]
    assert disk.reserved == STEP == disk.path.stat().st_size - ALIGN
    assert disk.path.stat().st_blocks * 512 >= STEP
    for extent in extents:
        disk.free(extent)
    large = disk.allocate(STEP + 1, "large")
    assert large.offset == ALIGN and disk.reserved == 2 * STEP


def test_the_smallest_hole_that_holds_a_block_is_taken() -> None:
    space = Space(0)
    space.extend(100)
    starts = [space.take(nbytes) for nbytes in (30, 10, 20, 10, 30)]
    assert starts == [0, 30, 40, 60, 70]
    space.give(0, 30)
    space.give(40, 20)
    assert space.take(15) == 40 and space.take(25) == 0 and space.take(6) is None
    assert space.holes() == [(25, 5), (55, 5)]
    with pytest.raises(AssertionError, match="partly free already"):
        space.give(25, 10)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate", "free", "write", "write", "rewrite", "read"]),
        st.integers(0, 1 << 30),
        st.sampled_from([1, 4095, 4096, 8193, CHECK - 1, CHECK, CHECK + 1, 2 * CHECK + 5]),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(moves=MOVES)
def test_any_sequence_of_uses_equals_a_dict_and_leaves_one_hole(tmp_path: Path, moves: list[tuple[str, int, int]]) -> None:
    disk = DiskFile(tmp_path, threads=2, block=CHECK)
    live: dict[int, tuple[Extent, Tensor | None]] = {}
    for turn, (verb, seed, nbytes) in enumerate(moves):
        if verb == "allocate":
            live[turn] = (disk.allocate(nbytes, str(turn)), None)
        if verb == "allocate" or not live:
            check_apart(disk, [extent for extent, _ in live.values()])
            continue
        key = sorted(live)[seed % len(live)]
        extent, expected = live[key]
        if verb == "free":
            disk.free(live.pop(key)[0])
        elif verb == "write":
            source = pattern(extent.nbytes, seed, skew=seed % 2)
            live[key] = (extent, source.clone())
            disk.write(extent, source)
        elif verb == "rewrite" and expected is not None:
            start = seed % (-(-extent.nbytes // CHECK)) * CHECK
            piece = pattern(min(CHECK, extent.nbytes - start), seed)
            expected[start : start + piece.numel()] = piece
            disk.write(extent, piece, start)
        elif expected is not None:
            disk.read(extent, into := aligned(extent.nbytes)).wait()
            assert torch.equal(into, expected)
    for extent, expected in live.values():
        if expected is not None:
            disk.read(extent, into := aligned(extent.nbytes)).wait()
            assert torch.equal(into, expected)
        disk.free(extent)
    assert disk.used == 0
    assert disk.holes == ([(ALIGN, disk.reserved)] if disk.reserved else [])
    disk.close()
    assert list(tmp_path.iterdir()) == []


def check_apart(disk: DiskFile, extents: list[Extent]) -> None:
    """Extents and holes tile the file, so no two extents overlap."""
    taken = [(extent.offset, round_up(extent.nbytes)) for extent in extents]
    assert sum(nbytes for _, nbytes in taken) == disk.used <= disk.high_water
    at = ALIGN
    for start, nbytes in sorted([*taken, *disk.holes]):
        assert start == at and start % ALIGN == 0
        at += nbytes
    assert at == ALIGN + disk.reserved
