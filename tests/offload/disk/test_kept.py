"""Extents that are kept for a reader: they stay as they are while their blocks go on elsewhere, and their space comes back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.disk import DiskFile, Extent, Kept, KeptRange, ReadAhead
from offload.disk.disk_tier import ALIGN, CHECK
from offload.errors import BudgetError, TierError
from offload.pages import aligned
from offload.work import HostWork
from tests.support.waiting import soon

NBYTES = 9 * CHECK + 77


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskFile]:
    opened = DiskFile(tmp_path, threads=2)
    yield opened
    opened.close()


def pattern(seed: int, nbytes: int = NBYTES) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return aligned(nbytes).copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator))


def written(disk: DiskFile, seed: int) -> Extent:
    extent = disk.allocate(NBYTES, "b")
    disk.write(extent, pattern(seed)).wait()
    return extent


def read(kept: Kept, start: int = 0, stop: int = NBYTES) -> Tensor:
    place = KeptRange(kept, start, stop)
    return whole(ReadAhead([place]), place)


def whole(ahead: ReadAhead, place: KeptRange) -> Tensor:
    return torch.cat([chunk.clone() for chunk in ahead.chunks(place)])


def test_what_is_kept_stays_while_its_block_goes_on_elsewhere(disk: DiskFile) -> None:
    first = written(disk, 1)
    kept = disk.keep(first, "b")
    second = disk.renew(first, "b")
    disk.write(second, pattern(2)).wait()
    assert second.offset != first.offset
    assert torch.equal(read(kept), pattern(1))
    assert torch.equal(read(kept, 5, CHECK + 3), pattern(1)[5 : CHECK + 3])
    disk.read(second, into := aligned(NBYTES)).wait()
    assert torch.equal(into, pattern(2))
    kept.close()
    kept.close()
    assert disk.used == NBYTES + ALIGN - NBYTES % ALIGN
    third = disk.allocate(NBYTES, "c")
    assert third.offset == first.offset


def test_what_nobody_keeps_is_written_where_it_lies(disk: DiskFile) -> None:
    extent = written(disk, 1)
    kept = disk.keep(extent, "b")
    kept.close()
    assert disk.renew(extent, "b") is extent
    disk.free(extent)
    assert disk.used == 0


def test_a_freed_extent_stays_until_its_last_reader_has_closed(disk: DiskFile) -> None:
    extent = written(disk, 3)
    one, other = disk.keep(extent, "b"), disk.keep(extent, "b")
    disk.free(extent)
    one.close()
    assert torch.equal(read(other), pattern(3)) and disk.used
    other.close()
    assert disk.used == 0


def test_where_there_is_no_space_for_both_the_writer_waits_for_the_reader(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path, limit=NBYTES)
    extent = written(disk, 1)
    kept, renewed = disk.keep(extent, "b"), []
    writer = threading.Thread(target=lambda: renewed.append(disk.renew(extent, "b")))
    writer.start()
    assert torch.equal(read(kept), pattern(1)) and not renewed
    kept.close()
    writer.join(60)
    assert renewed == [extent]
    disk.close()


def test_others_wait_for_space_that_a_reader_will_give_back(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path, limit=2 * NBYTES)
    first = written(disk, 1)
    kept = disk.keep(first, "b")
    second = disk.renew(first, "b")
    given: list[Extent] = []
    other = threading.Thread(target=lambda: given.append(disk.allocate(NBYTES, "c")))
    other.start()
    assert torch.equal(read(kept), pattern(1)) and not given
    kept.close()
    other.join(60)
    assert soon(lambda: len(given) == 1) and given[0].offset != second.offset
    with pytest.raises(BudgetError, match=r"^disk tier cannot admit d .*: 18\.0 of 18\.0 MiB in use"):
        disk.allocate(NBYTES, "d")
    disk.close()


def test_a_reader_of_a_closed_file_is_told(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path)
    kept = disk.keep(written(disk, 1), "b")
    disk.close()
    with pytest.raises(TierError, match="was closed"):
        read(kept)
    kept.close()


def held_reads(disk: DiskFile, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[int]]:
    """No read of the file ends before the event is set; the offsets that were asked for."""
    gate, asked, real = threading.Event(), list[int](), os.preadv

    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
        asked.append(offset)
        assert gate.wait(300)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return gate, asked


def test_the_next_ranges_are_read_while_one_is_used_and_memory_is_bounded(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path, threads=16)
    extents = [written(disk, seed) for seed in range(6)]
    kept = [disk.keep(extent, "b") for extent in extents]
    reads: list[tuple[int, Tensor]] = []

    def heard(number: int, read: Callable[[Tensor, int], HostWork]) -> Callable[[Tensor, int], HostWork]:
        return lambda into, at: (reads.append((number, into)), read(into, at))[1]

    for number, each in enumerate(kept):
        each.read = heard(number, each.read)
    places = [KeptRange(each, CHECK, NBYTES) for each in kept]
    ahead = ReadAhead(places)
    for number, place in enumerate(places):
        chunks = ahead.chunks(place)
        first = next(chunks)
        assert torch.equal(first, pattern(number)[CHECK : 8 * CHECK])
        assert max(each for each, _ in reads) >= min(number + 1, 5), "what comes next was begun before this one was used"
        assert torch.equal(torch.cat(list(chunks)), pattern(number)[8 * CHECK :])
        kept[number].close()
    assert [number for number, _ in reads] == [number for number in range(6) for _ in range(2)], "each window is read once"
    assert len({into.data_ptr() for _, into in reads}) <= 3
    disk.close()


def test_ranges_side_by_side_share_what_was_read(disk: DiskFile) -> None:
    kept = disk.keep(written(disk, 4), "b")
    cuts = [0, 5, CHECK, 8 * CHECK + 3, 8 * CHECK + 70, NBYTES]
    offsets: list[int] = []
    real = kept.read
    kept.read = lambda into, at: (offsets.append(at), real(into, at))[1]
    places = [KeptRange(kept, start, stop) for start, stop in pairwise(cuts)]
    ahead = ReadAhead(places)
    for place in places:
        assert torch.equal(whole(ahead, place), pattern(4)[place.start : place.stop])
    assert offsets == [0, 8 * CHECK]
    kept.close()


def test_closing_waits_for_reads_under_way_and_space_comes_back_after(
    disk: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [disk.keep(written(disk, seed), "b") for seed in range(3)]
    gate, asked = held_reads(disk, monkeypatch)
    places = [KeptRange(each, 0, NBYTES) for each in kept]
    ahead, over = ReadAhead(places), threading.Event()

    def read_one() -> None:
        with suppress(TierError):
            next(ahead.chunks(places[0]))
        ahead.close()
        for each in kept:
            each.close()
        over.set()

    for each in kept:
        disk.free(each.extent)
    reader = threading.Thread(target=read_one)
    reader.start()
    assert soon(lambda: bool(asked)) and disk.used == 3 * (NBYTES + ALIGN - NBYTES % ALIGN) and not over.is_set()
    gate.set()
    assert over.wait(300)
    reader.join()
    assert disk.used == 0


def test_the_file_is_closed_while_ranges_are_read(disk: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [disk.keep(written(disk, seed), "b") for seed in range(4)]
    gate, asked = held_reads(disk, monkeypatch)
    places = [KeptRange(each, 0, NBYTES) for each in kept]
    ahead, found = ReadAhead(places), list[Any]()

    def read_all() -> None:
        try:
            for seed, place in enumerate(places):
                found.append(torch.equal(whole(ahead, place), pattern(seed)))
        except TierError as error:
            found.append(error)
        ahead.close()

    reader = threading.Thread(target=read_all)
    reader.start()
    assert soon(lambda: bool(asked))
    closer = threading.Thread(target=disk.close)
    closer.start()
    gate.set()
    closer.join(300)
    reader.join(300)
    assert found and all(each is True or "was closed" in str(each) for each in found)


def test_bytes_that_have_changed_are_refused_and_those_before_them_are_right(disk: DiskFile) -> None:
    extents = [written(disk, seed) for seed in range(2)]
    kept = [disk.keep(extent, "b") for extent in extents]
    with open(disk.path, "r+b") as file:
        file.seek(extents[1].offset + CHECK)
        file.write(b"damaged")
    places = [KeptRange(each, 0, NBYTES) for each in kept]
    ahead = ReadAhead(places)
    assert torch.equal(whole(ahead, places[0]), pattern(0))
    with pytest.raises(TierError, match="Expected checksum"):
        whole(ahead, places[1])
    ahead.close()
    for each in kept:
        each.close()
