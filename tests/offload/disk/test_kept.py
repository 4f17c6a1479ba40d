"""Extents that are kept for a reader: they stay as they are while their blocks go on elsewhere, and their space comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.disk import DiskFile, Extent, Kept
from offload.disk.disk_tier import ALIGN, CHECK
from offload.errors import BudgetError, TierError
from offload.pages import aligned
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
    return torch.cat([chunk.clone() for chunk in kept.chunks(start, stop)])


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
    with pytest.raises(BudgetError):
        disk.allocate(NBYTES, "d")
    disk.close()


def test_a_reader_of_a_closed_file_is_told(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path)
    kept = disk.keep(written(disk, 1), "b")
    disk.close()
    with pytest.raises(TierError, match="was closed"):
        read(kept)
    kept.close()
