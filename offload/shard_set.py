"""A folder of shard files with one manifest, and the renames that make it appear whole or not at all.

The first rank makes the folder, writes the manifest last and commits; a loader asks which folder to read.  This room never
communicates and never looks inside a shard file.

Note: [Renames]
    A save writes ``NAME.tmp-TOKEN``.  When it is complete and synced it changes places with an earlier ``NAME`` in one call,
    and the old one is removed.  Where the file system cannot exchange, ``NAME`` is renamed to ``NAME.old-TOKEN`` and the new
    folder to ``NAME``; between the two ``NAME`` is missing, and ``NAME.old-TOKEN`` beside a complete ``NAME.tmp-TOKEN`` says
    so: a loader reads the new one.  Whatever is left is tidied by the next save.  Only files of these names are ever
    removed; what the user put beside them moves on to the new folder.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offload.errors import CheckpointError
from offload.shard_file import Record

__all__ = ["MANIFEST", "Draft", "Manifest", "find", "read_manifest", "shard_name"]

MANIFEST = "manifest.json"
FORMAT = "zhooks sharded checkpoint"
VERSION = 1
MANIFEST_MOST = 512 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_OURS = re.compile(r"manifest\.json|rank-\d{5,}\.safetensors")


class Manifest(BaseModel):
    """What a checkpoint is: by which save, of how many ranks, about what, and every file with its checksums."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["zhooks sharded checkpoint"]
    version: Literal[1]
    token: str
    world: int = Field(ge=1)
    about: dict[str, Any]
    files: list[Record]


def shard_name(rank: int) -> str:
    """The file of one rank."""
    return f"rank-{rank:05d}.safetensors"


class Draft:
    """A checkpoint being written beside ``target``; every rank holds one of the same token.

    Args:
        target: where the checkpoint shall be, resolved.
        token: 16 hexadecimal digits no other save uses.
    """

    def __init__(self, target: Path, token: str) -> None:
        self.target, self.token = target, token
        self.folder = target.with_name(f"{target.name}.tmp-{token}")
        self._old = target.with_name(f"{target.name}.old-{token}")

    def open(self) -> None:
        """Tidy what killed saves left and make the folder; one rank only.

        Raises:
            CheckpointError: ``target`` is something else than a checkpoint.  OSError: it cannot be written there.
        """
        _check_replaceable(self.target)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        _recover(self.target)
        self.folder.mkdir(mode=0o700)

    def commit(self, about: dict[str, Any], files: Sequence[Record]) -> None:
        """Write the manifest and put the folder in place of ``target``; one rank only, when all files are durable.

        Raises:
            CheckpointError: a file is not here as its writer says.  OSError: nothing was committed.
        """
        for record in files:
            self._check_visible(record)
        content = Manifest(
            format="zhooks sharded checkpoint", version=1, token=self.token, world=len(files), about=about, files=list(files)
        ).model_dump()
        raw = json.dumps({"checksum": _checksum(content), "manifest": content}).encode()
        if len(raw) > MANIFEST_MOST:
            raise CheckpointError(
                f"save {self.target}: expected a manifest of at most {MANIFEST_MOST} bytes, found {len(raw)} for {len(files)} "
                "rank(s). Attach with fewer units (a larger [units] min_numel), or save from fewer ranks."
            )
        handle = os.open(self.folder / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self.folder)
        old = self._put_in_place()
        _sync_folder(self.target.parent)
        _retire(old, self.target)

    def _put_in_place(self) -> Path:
        """See Note [Renames]; returns where the earlier checkpoint is now, if there was one."""
        if not (self.target.exists() and any(self.target.iterdir())):
            os.rename(self.folder, self.target)
            return self._old
        if _exchange(self.folder, self.target):
            return self.folder
        os.rename(self.target, self._old)
        try:
            os.rename(self.folder, self.target)
        except OSError:
            os.rename(self._old, self.target)
            raise
        return self._old

    def _check_visible(self, record: Record) -> None:
        path = self.folder / record.name
        found = path.stat().st_size if path.exists() else None
        if found != record.nbytes:
            raise CheckpointError(
                f"save {self.target}: expected {record.name} with {record.nbytes} bytes beside the first rank's file, found "
                f"{'no such file' if found is None else f'{found} bytes'}. Save into a file system that all hosts share."
            )

    def discard(self) -> None:
        """Remove what was written; nothing was committed."""
        _retire(self.folder, None)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where this system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    here, swap = ctypes.c_int(_AT_FDCWD), ctypes.c_uint(_RENAME_EXCHANGE)
    if call(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def find(target: Path) -> Path:
    """The folder that holds the checkpoint ``target``: itself, or what a kill between two renames left.

    Raises:
        CheckpointError: there is none.
    """
    if (target / MANIFEST).exists():
        return target
    if not _has_foreign(target):
        standing = _standing(target)
        if standing is not None:
            return standing
    what = "a folder without a manifest" if target.is_dir() else "a file" if target.exists() else "nothing there"
    raise CheckpointError(
        f"load {target}: expected a checkpoint that attachment.save() wrote, found {what}. Check the path; a save that was "
        "killed before its commit leaves none."
    )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked as far as it can be by itself.

    Raises:
        CheckpointError: it is missing, damaged, of another version, or contradicts itself.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MANIFEST_MOST:
            raise _unreadable(path, f"{path.stat().st_size} bytes, more than {MANIFEST_MOST}")
        outer = json.loads(path.read_bytes())
        content = outer["manifest"]
        intact = outer["checksum"] == _checksum(content)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(path, "no such JSON") from error
    if not intact:
        raise _unreadable(path, "a checksum that does not match")
    if isinstance(content, dict) and content.get("format") == FORMAT and content.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: expected version {VERSION} of the format, found {content.get('version')!r}. Load it with the release "
            "that wrote it."
        )
    try:
        manifest = Manifest.model_validate(content)
    except (ValidationError, RecursionError) as error:
        raise _unreadable(path, "entries of another kind") from error
    if [record.name for record in manifest.files] != [shard_name(rank) for rank in range(manifest.world)]:
        raise _unreadable(path, "files that are not one a rank")
    return manifest


def _checksum(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _unreadable(path: Path, found: str) -> CheckpointError:
    return CheckpointError(f"{path}: expected the manifest of a checkpoint, found {found}. Load another checkpoint.")


# What killed saves left.


def _leftovers(target: Path, kind: str) -> list[Path]:
    """Folders ``NAME.tmp-TOKEN`` or ``NAME.old-TOKEN`` beside ``target``, the latest first."""
    pattern = re.compile(re.escape(f"{target.name}.{kind}-") + "[0-9a-f]{16}")
    if not target.parent.is_dir():
        return []
    found = [path for path in target.parent.iterdir() if pattern.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _standing(target: Path) -> Path | None:
    """The checkpoint of a save that was killed between its renames: the new folder, or else the old one."""
    olds = _leftovers(target, "old")
    news = [target.with_name(old.name.replace(f"{target.name}.old-", f"{target.name}.tmp-")) for old in olds]
    return next((folder for folder in [*news, *olds] if _complete(folder)), None)


def _complete(folder: Path) -> bool:
    try:
        files = read_manifest(folder).files
        return all((folder / record.name).stat().st_size == record.nbytes for record in files)
    except (CheckpointError, OSError):
        return False


def _recover(target: Path) -> None:
    if not (target / MANIFEST).exists():
        standing = _standing(target)
        if standing is not None:
            os.rename(standing, target)
            _sync_folder(target.parent)
    for leftover in [*_leftovers(target, "tmp"), *_leftovers(target, "old")]:
        _retire(leftover, target if target.is_dir() else None)


def _retire(folder: Path, heir: Path | None) -> None:
    """Remove our files and the folder; what else lies in it goes to ``heir``, or keeps the folder."""
    with suppress(OSError):
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink()
            elif heir is not None and not (heir / path.name).exists():
                os.rename(path, heir / path.name)
        folder.rmdir()


def _has_foreign(target: Path) -> bool:
    return target.exists() and not (target.is_dir() and all(_OURS.fullmatch(path.name) for path in target.iterdir()))


def _check_replaceable(target: Path) -> None:
    if not target.exists() or (target.is_dir() and (_is_ours(target) or not any(target.iterdir()))):
        return
    what = "a folder with other files" if target.is_dir() else "a file"
    raise CheckpointError(
        f"save {target}: expected no such path, an empty folder or an earlier checkpoint, found {what}. Choose another path."
    )


def _is_ours(target: Path) -> bool:
    """A checkpoint, damaged or not: anybody may call a file manifest.json."""
    if not (target / MANIFEST).exists():
        return not _has_foreign(target)
    try:
        return (target / shard_name(0)).exists() or read_manifest(target).format == FORMAT
    except CheckpointError:
        return False


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot sync a folder; their renames are as durable as they get.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
