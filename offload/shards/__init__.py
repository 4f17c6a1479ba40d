"""Folders of safetensors files, one a rank, with checksums, a manifest, and the renames that commit them."""

from __future__ import annotations

from offload.shards.commit import Draft, destination, manifest_of, refuse_occupied
from offload.shards.file import CHUNK, CODES, DTYPES, NAMED, Entry, Part, ShardReader, blocks, digest, file_nbytes
from offload.shards.folder import Folder
from offload.shards.host_memory import HostMemory, check_memory, copy_name, job_of, remove_dead_jobs
from offload.shards.leftovers import ExportKind
from offload.shards.manifest import MANIFEST, Manifest, Record, encoded, read_manifest, shard_name
from offload.shards.outcomes import FailedElsewhere, Outcomes
from offload.shards.saved import Lazy, SavedFlat, SavedLayout, SavedModel, SavedParam, WholeModel, state_key
from offload.shards.series import Series, find, latest, run_of, saved_ns, when_saved
from offload.shards.writer import ShardWriter, WholeFile

__all__ = [
    "CHUNK",
    "CODES",
    "DTYPES",
    "MANIFEST",
    "NAMED",
    "Draft",
    "Entry",
    "ExportKind",
    "FailedElsewhere",
    "Folder",
    "HostMemory",
    "Lazy",
    "Manifest",
    "Outcomes",
    "Part",
    "Record",
    "SavedFlat",
    "SavedLayout",
    "SavedModel",
    "SavedParam",
    "Series",
    "ShardReader",
    "ShardWriter",
    "WholeFile",
    "WholeModel",
    "blocks",
    "check_memory",
    "copy_name",
    "destination",
    "digest",
    "encoded",
    "file_nbytes",
    "find",
    "job_of",
    "latest",
    "manifest_of",
    "read_manifest",
    "refuse_occupied",
    "remove_dead_jobs",
    "run_of",
    "saved_ns",
    "shard_name",
    "state_key",
    "when_saved",
]
