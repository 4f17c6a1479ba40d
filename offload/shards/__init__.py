"""Folders of safetensors files, one a rank, with checksums, a manifest, and the renames that commit them."""

from __future__ import annotations

from offload.shards.commit import Draft, destination, find
from offload.shards.file import CODES, DTYPES, Entry, Record, ShardReader, ShardWriter, digest
from offload.shards.manifest import Manifest, read_manifest, shard_name

__all__ = [
    "CODES",
    "DTYPES",
    "Draft",
    "Entry",
    "Manifest",
    "Record",
    "ShardReader",
    "ShardWriter",
    "destination",
    "digest",
    "find",
    "read_manifest",
    "shard_name",
]
