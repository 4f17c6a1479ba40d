"""Folders of safetensors files, one a rank, with checksums, a manifest, and the renames that commit them."""

from __future__ import annotations

from offload.shards.commit import Draft, destination, find, manifest_of, refuse_occupied
from offload.shards.file import CHUNK, CODES, DTYPES, Entry, Record, ShardReader, ShardWriter, blocks, digest, file_nbytes
from offload.shards.folder import Folder
from offload.shards.host_memory import HostMemory, check_memory, copy_name, remove_dead_jobs
from offload.shards.job import job_of
from offload.shards.manifest import MANIFEST, Manifest, encoded, read_manifest, shard_name
from offload.shards.outcomes import FailedElsewhere, Outcomes
from offload.shards.part import Part
from offload.shards.replaceable import ExportKind
from offload.shards.saved_layout import SavedFlat, SavedLayout, SavedParam
from offload.shards.saved_model import SavedModel, state_key
from offload.shards.series import Series, latest, run_of, saved_ns, when_saved
from offload.shards.whole_file import WholeFile

__all__ = [
    "CHUNK",
    "CODES",
    "DTYPES",
    "MANIFEST",
    "Draft",
    "Entry",
    "ExportKind",
    "FailedElsewhere",
    "Folder",
    "HostMemory",
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
