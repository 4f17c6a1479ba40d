"""The disk tier: extents of one scratch file, written and read by threads, with checksums."""

from __future__ import annotations

from offload.disk.disk_tier import DiskFile
from offload.disk.extent import Extent, Kept, KeptRange, ReadAhead
from offload.disk.scratch import BufferedIo, Bytes, Mover, Owner, SystemIo, started_ticks
from offload.disk.virtual_disk import VirtualDisk

__all__ = [
    "BufferedIo", "Bytes", "Disk", "DiskFile", "Extent", "Kept", "KeptRange", "Mover", "Owner", "ReadAhead", "SystemIo",
    "VirtualDisk", "started_ticks",
]  # fmt: skip

#: What a store needs of the disk tier.
Disk = DiskFile | VirtualDisk
