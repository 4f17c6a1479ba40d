"""Kinds of folders that are replaced whole: how one is known, and what of an earlier one goes when a new one takes its place.

``commit.py`` and ``leftovers.py`` ask it.  What the user put into an earlier folder moves on to the new one, never over
anything.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress

from offload.shards.folder import RENAME_NOREPLACE, Folder, renameat2
from offload.shards.manifest import MANIFEST, shard_name

__all__ = ["CHECKPOINT", "OURS", "TOKEN", "ExportKind", "FolderKind", "retire"]

TOKEN = "[0-9a-f]{16}"
_SAVING = re.compile(f"saving-({TOKEN})")
#: Files that a save makes, while it works and to stay.
OURS = re.compile(rf"manifest\.json|rank-\d{{5,}}\.(safetensors|owner|outcome(-part)?)|{_SAVING.pattern}")


class FolderKind(ABC):
    """Folders of one kind.

    Attributes:
        mark: the file that such a folder has; it is removed last, so that what is half removed still is one.
        suffixes: what is added to the name while one is written, and where the earlier one goes for want of an exchange: none
            where loaders would not find it there.
        verb, noun, earlier: for errors, what is done, what one is called, and what may be replaced.
    """

    def __init__(self, mark: str, suffixes: tuple[str, ...], verb: str, noun: str, earlier: str) -> None:
        self.mark, self.suffixes = mark, suffixes
        self.verb, self.noun, self.earlier = verb, noun, earlier
        #: What one is called while it is written: the name, what was added, and the token of the save.
        self.draft_name = re.compile(rf"(.+)\.({'|'.join(suffixes)})-({TOKEN})", re.DOTALL)

    @abstractmethod
    def problem(self, folder: Folder) -> str:
        """Why this folder, which is not empty, is none that may be replaced; "" where it may."""

    @abstractmethod
    def token(self, folder: Folder) -> str | None:
        """Of the save that made it, where it says."""

    @abstractmethod
    def removes(self, folder: Folder, name: str, heir: Collection[str], *, begun: bool) -> bool:
        """Whether this entry is removed with the folder.

        Args:
            heir: the names in the folder that has taken its place.
            begun: it never was in its place.
        """


class _Checkpoint(FolderKind):
    def problem(self, folder: Folder) -> str:
        # A checkpoint, damaged or not: anybody may call a file manifest.json.
        ours = folder.size(MANIFEST) is not None and (folder.size(shard_name(0)) is not None or folder.token() is not None)
        return "" if ours else "a folder with other files"

    def token(self, folder: Folder) -> str | None:
        return folder.token()

    def removes(self, folder: Folder, name: str, heir: Collection[str], *, begun: bool) -> bool:
        return bool(OURS.fullmatch(name)) and folder.size(name) is not None


CHECKPOINT = _Checkpoint(MANIFEST, ("tmp", "old"), "save", "a checkpoint", "an empty folder or an earlier checkpoint")


class ExportKind(FolderKind):
    """Folders of whole safetensors files for other tools.

    Args:
        weights: files that go with the earlier folder even where the new one has none of that name.
        never: files whose folder is of another kind.
        folders: names of folders that may be in it.
    """

    def __init__(self, mark: str, weights: str, never: Collection[str], folders: Collection[str]) -> None:
        earlier = f"an empty folder, or an earlier one of the same kind (with {mark})"
        super().__init__(mark, ("exporting",), "export", "one", earlier)
        self._weights, self._never, self._folders = re.compile(weights), frozenset(never), frozenset(folders)

    def problem(self, folder: Folder) -> str:
        names = sorted(folder.names())
        other = next((each for each in names if each in self._never), None)
        if other is not None or folder.size(self.mark) is None:
            return f"one with {other}" if other else f"one without {self.mark}"
        inside = next((each for each in names if folder.size(each) is None and each not in self._folders), None)
        return "" if inside is None else f"one that holds {inside}, which is not a file"

    def token(self, folder: Folder) -> str | None:
        """It stays until the earlier folder has gone."""
        return next((found[1] for each in folder.names() if (found := _SAVING.fullmatch(each))), None)

    def removes(self, folder: Folder, name: str, heir: Collection[str], *, begun: bool) -> bool:
        ours = name == self.mark or self._weights.fullmatch(name) or _SAVING.fullmatch(name)
        return begun or bool(ours) or name in heir


def retire(
    parent: Folder, name: str, folder: Folder, heir: Folder | None, kind: FolderKind, *, begun: bool = False
) -> None:
    """Remove the folder and what goes with it; what else lies in it goes to ``heir``, or keeps the folder."""
    if not parent.holds(folder, name):
        return
    new = frozenset() if heir is None else frozenset(heir.names())
    with suppress(OSError):
        for each in sorted(folder.names(), key=lambda each: (each == kind.mark, each)):
            with suppress(OSError):
                if kind.removes(folder, each, new, begun=begun):
                    _remove(folder, each)
                elif heir is not None:
                    _hand_on(folder, each, heir)
        os.rmdir(name, dir_fd=parent.fd)


def _remove(folder: Folder, name: str) -> None:
    status = folder.entry(name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder.fd)
    else:
        os.unlink(name, dir_fd=folder.fd)


def _hand_on(folder: Folder, name: str, heir: Folder) -> None:
    """Move a file of the user's, never over anything."""
    with suppress(FileExistsError):
        if not renameat2(folder.fd, name, heir.fd, name, RENAME_NOREPLACE) and heir.entry(name) is None:
            os.rename(name, name, src_dir_fd=folder.fd, dst_dir_fd=heir.fd)
