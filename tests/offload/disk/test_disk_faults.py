"""What the disk tier does when the disk fails, fills up, lies, or is changed behind its back: the block is named, or right."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from offload.disk import Bytes, DiskFile, SystemIo
from offload.disk.disk_tier import ALIGN, CHECK, STEP
from offload.errors import BudgetError, CapabilityError, TierError
from offload.pages import aligned

NBYTES = 4 * CHECK
Call = Callable[[int, Sequence[Bytes], int], int]
#: What happens instead of a call: the real one, and its arguments, go in.
Fault = Callable[[Call, int, Sequence[Bytes], int], int]


class Faulty(SystemIo):
    """The real calls, but for the fault that is set; the first page is always written."""

    def __init__(self) -> None:
        self.on_read: Fault | None = None
        self.on_write: Fault | None = None
        self.on_grow: Callable[[int], None] | None = None

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        call = super().preadv
        return call(fd, buffers, offset) if self.on_read is None else self.on_read(call, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        call = super().pwritev
        return call(fd, buffers, offset) if self.on_write is None else self.on_write(call, fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        if self.on_grow is not None:
            self.on_grow(nbytes)
        super().fallocate(fd, offset, nbytes)


class Buffered(Faulty):
    def open(self, path: Path, flags: int, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return super().open(path, flags, dir_fd)


def fails(code: int, after: int = 0) -> Fault:
    """So many calls go well, then all fail."""
    left = [after]
    lock = threading.Lock()

    def fault(call: Call, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code))
        return call(fd, buffers, offset)

    return fault


def only(nbytes: int, *, direct: bool) -> Fault:
    """A call moves at most so much; direct I/O that says it ended within a page has not moved that page."""

    def fault(call: Call, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        if buffers[0].size <= nbytes:
            return call(fd, buffers[:1], offset)
        call(fd, [buffers[0][: nbytes // ALIGN * ALIGN if direct else nbytes]], offset)
        return nbytes

    return fault


def pattern(nbytes: int = NBYTES, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return aligned(nbytes).copy_(torch.from_numpy(values))


@pytest.fixture(params=[Faulty, Buffered], ids=["direct", "buffered"])
def io(request: pytest.FixtureRequest) -> Faulty:
    made: Faulty = request.param()
    return made


@pytest.fixture
def disk(tmp_path: Path, io: Faulty) -> Iterator[DiskFile]:
    opened = DiskFile(tmp_path, threads=2, block=CHECK, io=io)
    yield opened
    opened.close()


def still_works(disk: DiskFile, io: Faulty) -> None:
    """Another extent is written and read."""
    io.on_read = io.on_write = io.on_grow = None
    extent, into = disk.allocate(NBYTES, "another"), aligned(NBYTES)
    disk.write(extent, pattern(seed=9)).wait()
    disk.read(extent, into).wait()
    assert torch.equal(into, pattern(seed=9))


# --- the system says no -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EBADF, errno.EDQUOT, errno.ESTALE])
@pytest.mark.parametrize("after", [0, 2])
def test_a_failed_write_names_its_block_and_is_never_read(disk: DiskFile, io: Faulty, code: int, after: int) -> None:
    extent = disk.allocate(NBYTES, "optim/layers.7")
    disk.write(extent, pattern()).wait()
    io.on_write = fails(code, after)
    pending = disk.write(extent, pattern(seed=1))
    for _ in range(2):
        with pytest.raises(TierError) as caught:
            pending.wait()
    said = str(caught.value)
    assert said.startswith("disk tier cannot write optim/layers.7 (4 MiB): byte ")
    assert str(disk.path) in said and errno.errorcode[code] in said and "[disk] path" in said
    assert isinstance(caught.value.__cause__, OSError) and pending.done()
    io.on_write = None
    for piece in range(4):
        with pytest.raises(TierError, match="was never written, or its write failed"):
            disk.read(extent, aligned(CHECK), piece * CHECK).wait()
    disk.write(extent, pattern(seed=2)).wait()
    disk.read(extent, into := aligned(NBYTES)).wait()
    assert torch.equal(into, pattern(seed=2))
    still_works(disk, io)


def test_a_failed_rewrite_of_a_piece_leaves_the_others(disk: DiskFile, io: Faulty) -> None:
    extent = disk.allocate(NBYTES, "b")
    disk.write(extent, pattern()).wait()
    io.on_write = fails(errno.EIO)
    with pytest.raises(TierError, match="EIO"):
        disk.write(extent, pattern(CHECK), CHECK).wait()
    disk.read(extent, into := aligned(2 * CHECK), 2 * CHECK).wait()
    assert torch.equal(into, pattern()[2 * CHECK :])
    with pytest.raises(TierError, match="never written"):
        disk.read(extent, aligned(NBYTES)).wait()


@pytest.mark.parametrize("code", [errno.EIO, errno.EBADF])
def test_a_failed_read_names_its_block_and_may_be_tried_again(disk: DiskFile, io: Faulty, code: int) -> None:
    extent = disk.allocate(NBYTES, "layers.1")
    disk.write(extent, pattern()).wait()
    io.on_read = fails(code, 1)
    with pytest.raises(TierError, match=rf"cannot read layers\.1 \(4 MiB\): byte \d+ of .*scratch: {errno.errorcode[code]}"):
        disk.read(extent, aligned(NBYTES)).wait()
    io.on_read = None
    disk.read(extent, into := aligned(NBYTES)).wait()
    assert torch.equal(into, pattern())
    still_works(disk, io)


def test_what_is_no_error_of_the_system_reaches_the_waiting_call_too(disk: DiskFile, io: Faulty) -> None:
    def fault(call: Call, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        raise MemoryError("no bounce buffer")

    extent = disk.allocate(NBYTES, "b")
    io.on_write = fault
    with pytest.raises(TierError, match="cannot write b: MemoryError: no bounce buffer"):
        disk.write(extent, pattern()).wait()
    still_works(disk, io)


def test_an_error_keeps_no_memory_alive(disk: DiskFile, io: Faulty) -> None:
    extent = disk.allocate(NBYTES, "b")
    io.on_write = fails(errno.EIO)
    source = pattern()
    memory = weakref.ref(source)
    pending = disk.write(extent, source)
    with pytest.raises(TierError, match=r"^disk tier cannot write b .*EIO"):
        pending.wait()
    del source
    gc.collect()
    assert memory() is None and pending.error is not None


# --- the system does less than it was asked to ------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [ALIGN, 3 * ALIGN + 100, CHECK - 1])
def test_short_transfers_are_continued(disk: DiskFile, io: Faulty, nbytes: int) -> None:
    total = 2 * CHECK + 5000
    extent, source, into = disk.allocate(total, "b"), pattern(total), aligned(total)
    io.on_write = io.on_read = only(nbytes, direct=disk.direct)
    disk.write(extent, source).wait()
    disk.read(extent, into).wait()
    assert torch.equal(source, into)


def test_interrupted_calls_are_repeated(disk: DiskFile, io: Faulty) -> None:
    turn = iter(range(10**9))

    def fault(call: Call, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        if next(turn) % 2:
            raise InterruptedError
        return call(fd, buffers, offset)

    extent, into = disk.allocate(NBYTES, "b"), aligned(NBYTES)
    io.on_write = io.on_read = fault
    disk.write(extent, pattern()).wait()
    disk.read(extent, into).wait()
    assert torch.equal(into, pattern())


@pytest.mark.parametrize("nbytes", [0, 1])
def test_a_disk_that_takes_nothing_more_is_an_error_not_a_hang(tmp_path: Path, nbytes: int) -> None:
    io = Faulty()
    disk = DiskFile(tmp_path, io=io)
    extent = disk.allocate(NBYTES, "b")
    io.on_write = lambda call, fd, buffers, offset: nbytes
    with pytest.raises(TierError, match=r"cannot write b .*bytes to be written at byte \d+ of .*found 0"):
        disk.write(extent, pattern()).wait()
    still_works(disk, io)
    disk.close()


# --- the disk lies ----------------------------------------------------------------------------------------------------


def test_a_bit_that_falls_over_is_noticed(disk: DiskFile, io: Faulty) -> None:
    def fault(call: Call, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        moved = call(fd, buffers, offset)
        if offset == extent.offset + 2 * CHECK:
            buffers[0][777] ^= 4
        return moved

    extent = disk.allocate(NBYTES, "layers.5")
    disk.write(extent, pattern()).wait()
    io.on_read = fault
    begin = extent.offset + 2 * CHECK
    with pytest.raises(TierError) as caught:
        disk.read(extent, aligned(NBYTES)).wait()
    said = str(caught.value)
    assert "cannot read layers.5 (4 MiB). Expected checksum " in said
    assert f" of bytes {begin} to {begin + CHECK} of {disk.path}, found" in said
    assert "load the last checkpoint" in said
    still_works(disk, io)


def test_a_write_that_went_elsewhere_or_nowhere_is_noticed(disk: DiskFile, io: Faulty) -> None:
    one, two = disk.allocate(CHECK, "one"), disk.allocate(CHECK, "two")
    disk.write(one, pattern(CHECK, 1)).wait()
    disk.write(two, pattern(CHECK, 2)).wait()
    io.on_write = lambda call, fd, buffers, offset: call(fd, buffers, two.offset)
    disk.write(one, pattern(CHECK, 3)).wait()
    io.on_write = lambda call, fd, buffers, offset: sum(buffer.size for buffer in buffers)
    lost = disk.allocate(CHECK, "lost")
    disk.write(lost, pattern(CHECK, 4)).wait()
    for extent, key in ((one, "one"), (two, "two"), (lost, "lost")):
        with pytest.raises(TierError, match=f"cannot read {key} .*Expected checksum"):
            disk.read(extent, aligned(CHECK)).wait()


def test_a_source_that_changes_during_its_write_is_noticed(disk: DiskFile, io: Faulty) -> None:
    source = pattern(CHECK)

    def fault(call: Call, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        source[5] += 1
        return call(fd, buffers, offset)

    extent = disk.allocate(CHECK, "b")
    io.on_write = fault
    disk.write(extent, source).wait()
    with pytest.raises(TierError, match="Expected checksum"):
        disk.read(extent, aligned(CHECK)).wait()


# --- somebody has been at the file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, ALIGN, ALIGN + CHECK, ALIGN + CHECK + 700, ALIGN + NBYTES - 1])
def test_a_truncated_file_is_noticed(disk: DiskFile, io: Faulty, cut: int) -> None:
    extent, into = disk.allocate(NBYTES, "layers.2"), aligned(NBYTES)
    disk.write(extent, pattern()).wait()
    os.truncate(disk.path, cut)
    with pytest.raises(TierError, match=rf"cannot read layers\.2 .*at byte \d+ of {disk.path}, found \d+ before the end"):
        disk.read(extent, into).wait()
    whole = max(0, cut - ALIGN) // CHECK * CHECK
    disk.read(extent, into[:whole]).wait()
    assert torch.equal(into[:whole], pattern()[:whole])
    disk.write(extent, pattern()).wait()
    disk.read(extent, into).wait()
    assert torch.equal(into, pattern())
    still_works(disk, io)


def test_an_altered_file_is_noticed(disk: DiskFile, io: Faulty) -> None:
    extents = [disk.allocate(CHECK + 100, key) for key in ("one", "two", "three")]
    for extent in extents:
        disk.write(extent, pattern(CHECK + 100)).wait()
    with disk.path.open("r+b") as file:
        file.seek(extents[1].offset + CHECK + 50)
        file.write(b"altered")
    for extent, key in zip(extents, ("one", "two", "three"), strict=True):
        if key == "two":
            with pytest.raises(TierError, match=f"cannot read two .*bytes {extent.offset + CHECK} to"):
                disk.read(extent, aligned(CHECK + 100)).wait()
        else:
            disk.read(extent, aligned(CHECK + 100)).wait()
    still_works(disk, io)


def test_a_file_or_folder_deleted_behind_its_back_stays_whole_until_close(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    disk = DiskFile(folder)
    extent, into = disk.allocate(NBYTES, "b"), aligned(NBYTES)
    disk.write(extent, pattern()).wait()
    shutil.rmtree(folder)
    disk.read(extent, into).wait()
    assert torch.equal(into, pattern())
    disk.write(disk.allocate(2 * STEP, "more"), aligned(2 * STEP)).wait()
    disk.close()
    assert not folder.exists()


def test_a_stranger_under_the_files_name_survives_close(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path)
    disk.path.unlink()
    disk.path.write_text("a stranger")
    disk.close()
    assert disk.path.read_text() == "a stranger"


# --- no space ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_a_budget_error_and_leaves_the_file_as_it_was(disk: DiskFile, io: Faulty) -> None:
    def full(nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = disk.allocate(NBYTES, "kept")
    disk.write(kept, pattern()).wait()
    size = disk.path.stat().st_size
    io.on_grow = full
    with pytest.raises(BudgetError, match=r"cannot admit big \(64 MiB\): 4 MiB in use on .*, whose file system has"):
        disk.allocate(STEP, "big")
    assert disk.path.stat().st_size == size and disk.used == NBYTES
    disk.read(kept, into := aligned(NBYTES)).wait()
    assert torch.equal(into, pattern())
    still_works(disk, io)


def test_the_last_space_of_a_disk_is_used_where_a_whole_step_does_not_fit(disk: DiskFile, io: Faulty) -> None:
    def nearly_full(nbytes: int) -> None:
        if nbytes > NBYTES:
            raise OSError(errno.ENOSPC, "No space left on device")

    io.on_grow = nearly_full
    disk.allocate(NBYTES, "fits")
    assert disk.reserved == NBYTES
    with pytest.raises(BudgetError, match=r"^disk tier cannot admit does not \(4 MiB\): 4 MiB in use"):
        disk.allocate(NBYTES + 1, "does not")


def test_a_limit_on_the_size_of_files_is_named_and_no_full_disk(tmp_path: Path) -> None:
    disk, before = DiskFile(tmp_path, threads=1), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (STEP // 2, before[1]))
        disk.allocate(NBYTES, "fits")
        said = r"cannot admit big \(64 MiB\): .*file of .* to be allowed, found .*ulimit -f.*32 MiB"
        with pytest.raises(BudgetError, match=said):
            disk.allocate(STEP, "big")
        assert disk.used == NBYTES
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        disk.close()


def test_a_file_systems_limit_on_the_size_of_files_is_named(disk: DiskFile, io: Faulty) -> None:
    def large(nbytes: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    io.on_grow = large
    with pytest.raises(BudgetError, match="found the file system's limit on the size of one file"):
        disk.allocate(NBYTES, "big")
    still_works(disk, io)


def test_a_small_disk_keeps_space_for_a_save_beside_the_scratch_file(tmp_path: Path) -> None:
    class Small(SystemIo):
        """A file system of 200 MiB, of which so much is free."""

        free = 100 << 20

        def free_nbytes(self, fd: int) -> tuple[int, int]:
            return self.free, 200 << 20

    disk = DiskFile(tmp_path, threads=1, io=Small())
    disk.allocate(NBYTES, "first")
    # Ahead of need it takes half of what is free beside a 20th of the disk.
    assert disk.reserved == 45 << 20
    Small.free = 55 << 20
    with pytest.raises(BudgetError, match=r"whose file system has 45 MiB left, not counting 10 MiB kept free for checkpoints"):
        disk.allocate(87 << 20, "too much")
    disk.allocate(86 << 20, "all that there is")
    disk.close()


def test_a_file_without_threads_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(CapabilityError, match=r"cannot start thread zhooks-disk-3 of 8.*Python threads.*raise ulimit -u"):
        DiskFile(tmp_path, threads=8)
    assert list(tmp_path.iterdir()) == [] and not any(thread.is_alive() for thread in started)


def test_a_file_system_that_fails_while_growing_is_a_tier_error(disk: DiskFile, io: Faulty) -> None:
    def broken(nbytes: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    io.on_grow = broken
    with pytest.raises(TierError, match=r"cannot hold b \(4 MiB\): .*EIO, Input/output error; the device is failing"):
        disk.allocate(NBYTES, "b")
    still_works(disk, io)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_file_that_cannot_be_opened_leaves_nothing(tmp_path: Path, io: Faulty, code: int) -> None:
    io.on_write = fails(code)
    with pytest.raises(TierError, match=f"disk tier cannot open {tmp_path}/zhooks-r0.*{errno.errorcode[code]}"):
        DiskFile(tmp_path, io=io)
    assert list(tmp_path.iterdir()) == []
