"""The disk tier: extents of one scratch file, written and read by threads, with checksums."""

from __future__ import annotations

from offload.disk.disk_tier import Disk, DiskFile, Extent
from offload.disk.io import BufferedIo, Bytes, Mover, SystemIo
from offload.disk.kept import Kept, KeptRange, ReadAhead
from offload.disk.scratch import Owner, started_ticks
from offload.disk.virtual_disk import VirtualDisk

__all__ = [
    "BufferedIo",
    "Bytes",
    "Disk",
    "DiskFile",
    "Extent",
    "Kept",
    "KeptRange",
    "Mover",
    "Owner",
    "ReadAhead",
    "SystemIo",
    "VirtualDisk",
    "started_ticks",
]
