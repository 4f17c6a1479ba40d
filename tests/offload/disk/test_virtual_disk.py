"""The disk tier on paper: its limit is a real one's."""

from __future__ import annotations

import pytest

from offload.disk import VirtualDisk
from offload.errors import BudgetError
from tests.support.virtual import machine, on_virtual


@on_virtual()
def test_a_limit_is_compared_with_the_bytes_of_blocks_and_not_with_their_pages() -> None:
    with machine() as made:
        disk = VirtualDisk(made, limit=1000)
        extents = [disk.allocate(100, f"block {number}") for number in range(10)]
        assert disk.used == disk.rounded + 1000 == 10 * 4096
        with pytest.raises(BudgetError, match="1000 of 1000 B in use, 1 B short on the virtual disk"):
            disk.allocate(1, "one more")
        for extent in extents:
            disk.free(extent)
        assert disk.used == disk.rounded == 0
        disk.allocate(1000, "all")
