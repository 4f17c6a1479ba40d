"""The manifest of a folder of shard files: what a checkpoint is, and every file of it with its checksums; written last."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offload.errors import CheckpointError
from offload.regular_files import read_regular

__all__ = ["MANIFEST", "MANIFEST_MOST", "Manifest", "Record", "encoded", "read_manifest", "shard_name"]

MANIFEST = "manifest.json"
FORMAT = "zhooks sharded checkpoint"
VERSION = 1
MANIFEST_MOST = 512 << 20


class Record(BaseModel):
    """What a manifest keeps of one shard file: its name and size, and checksums of its header and of every tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    nbytes: int
    header: str
    tensors: dict[str, str]


class Manifest(BaseModel):
    """What a checkpoint is: by which save, of how many ranks, about what, and every file with its checksums."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["zhooks sharded checkpoint"]
    version: Literal[1]
    token: str
    world: int = Field(ge=1)
    about: dict[str, Any]
    files: list[Record]

    @classmethod
    def of(cls, token: str, about: Mapping[str, Any], files: Sequence[Record]) -> Manifest:
        """That of a save of this release."""
        return cls(
            format="zhooks sharded checkpoint", version=1, token=token, world=len(files), about=dict(about), files=list(files)
        )


def shard_name(rank: int) -> str:
    """The file of one rank."""
    return f"rank-{rank:05d}.safetensors"


def encoded(manifest: Manifest) -> bytes:
    """The bytes of the file."""
    content = manifest.model_dump()
    return json.dumps({"checksum": _checksum(content), "manifest": content}).encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked as far as it can be by itself.

    Raises:
        CheckpointError: it is missing, damaged, of another version, or contradicts itself.
    """
    path = folder / MANIFEST
    try:
        outer = json.loads(read_regular(path, MANIFEST_MOST))
        content = outer["manifest"]
        intact = outer["checksum"] == _checksum(content)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(path, "something else than its JSON") from error
    if not intact:
        raise _unreadable(path, "a checksum that does not match")
    if isinstance(content, dict) and content.get("format") == FORMAT and content.get("version") != VERSION:
        raise CheckpointError(
            f"Cannot read {path}. Expected version {VERSION} of the format, found {content.get('version')!r}. Load it with the "
            "release that wrote it."
        )
    try:
        manifest = Manifest.model_validate(content)
    except (ValidationError, RecursionError) as error:
        raise _unreadable(path, "entries of another kind") from error
    names = [record.name for record in manifest.files]
    if len(names) != manifest.world or names != [shard_name(rank) for rank in range(len(names))]:
        raise _unreadable(path, "files that are not one per rank")
    return manifest


def _checksum(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _unreadable(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot read {path}. Expected the manifest of a checkpoint, found {found}. Load another checkpoint."
    )
