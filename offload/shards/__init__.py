"""Folders of safetensors files, one a rank, with checksums, a manifest, and the renames that commit them."""

from __future__ import annotations

from offload.shards.commit import Draft, destination, find
from offload.shards.file import CHUNK, CODES, DTYPES, Entry, Record, ShardReader, ShardWriter, digest
from offload.shards.manifest import Manifest, read_manifest, shard_name
from offload.shards.outcomes import FailedElsewhere, Outcomes
from offload.shards.saved_layout import Places, SavedFlat, SavedLayout, SavedParam
from offload.shards.saved_model import SavedModel
from offload.shards.series import Series, latest, run_of

__all__ = [
    "CHUNK",
    "CODES",
    "DTYPES",
    "Draft",
    "Entry",
    "FailedElsewhere",
    "Manifest",
    "Outcomes",
    "Places",
    "Record",
    "SavedFlat",
    "SavedLayout",
    "SavedModel",
    "SavedParam",
    "Series",
    "ShardReader",
    "ShardWriter",
    "destination",
    "digest",
    "find",
    "latest",
    "read_manifest",
    "run_of",
    "shard_name",
]
