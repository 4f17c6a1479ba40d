"""What an attachment does over axes that divide the model itself; ``open_partition`` is one of ``activation.DIVIDERS``."""

from __future__ import annotations

from zhooks.parallel.partition import open_partition

__all__ = ["open_partition"]
