"""Folders that are replaced whole: how a kind of them is known, and what is removed of an earlier one or of a killed save.

Note: [What is ours]
    Anybody may make a link or a folder that is called like what a killed save left.  So a folder is opened once, never
    through a link, and from then on its descriptor is what counts: entries are looked up, renamed and removed relative to
    it, whatever becomes of the paths meanwhile.  It is emptied only when this user owns it and it is proven to be what a
    save left: it is empty, or holds the file that the save of that token made first, or a manifest of that token, or the
    checkpoint at ``NAME`` is of that token, which then took its place.  A save that may still be running keeps its folder.
    So it is with names that differ from ``NAME`` in the last number alone (step-9 before step-10), but for an hour an empty
    one stays there: its save may be running, and be about to make that file.  Where an empty one is removed all the same,
    its save makes another.
    In a folder where everybody may make files, what another user than its owner made is nothing that a save left, to loaders
    neither.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass

from offload.disk import Owner
from offload.pages import ALIGN
from offload.regular_files import strangers
from offload.shards.folder import RENAME_NOREPLACE, Folder, renameat2
from offload.shards.manifest import MANIFEST, shard_name

__all__ = [
    "CHECKPOINT", "OURS", "ExportKind", "FolderKind", "Leftover", "leftovers", "names_like", "recover", "retire", "standing",
    "working",
]  # fmt: skip

_TOKEN = "[0-9a-f]{16}"
_SAVING = re.compile(f"saving-({_TOKEN})")
#: Files that a save makes, while it works and to stay.
OURS = re.compile(rf"manifest\.json|rank-\d{{5,}}\.(safetensors|owner|outcome(-part)?)|{_SAVING.pattern}")
_NUMBERED = re.compile(r"(.*?)\d+(\D*)", re.DOTALL)
#: Tokens of the saves of this process that still work.
working: set[str] = set()
#: A save of another host, whose process cannot be looked at, is over when nothing of it has changed for so long.
_SILENT_NS = 3600 * 10**9


class FolderKind(ABC):
    """Folders of one kind.

    Attributes:
        mark: the file that such a folder has; it is removed last, so that what is half removed still is one.
        suffixes: what is added to the name while one is written, and where the earlier one goes for want of an exchange: none
            where loaders would not find it there.
        verb, noun, earlier: for errors, what is done, what one is called, and what may be replaced.
        draft_name: what one is called while it is written: the name, what was added, and the token of the save.
    """

    def __init__(self, mark: str, suffixes: tuple[str, ...], verb: str, noun: str, earlier: str) -> None:
        self.mark, self.suffixes = mark, suffixes
        self.verb, self.noun, self.earlier = verb, noun, earlier
        self.draft_name = re.compile(rf"(.+)\.({'|'.join(suffixes)})-({_TOKEN})", re.DOTALL)

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
    """Remove the folder and what goes with it; what else lies in it goes to ``heir``, never over anything, or keeps the folder.

    Args:
        begun: it never was in its place.
    """
    if not parent.holds(folder, name):
        return
    new = frozenset() if heir is None else frozenset(heir.names())
    with suppress(OSError):
        for each in sorted(folder.names(), key=lambda each: (each == kind.mark, each)):
            with suppress(OSError):
                if kind.removes(folder, each, new, begun=begun):
                    status = folder.entry(each)
                    if status is not None and stat.S_ISDIR(status.st_mode):
                        shutil.rmtree(each, ignore_errors=True, dir_fd=folder.fd)
                    else:
                        os.unlink(each, dir_fd=folder.fd)
                elif heir is not None:
                    moved = renameat2(folder.fd, each, heir.fd, each, RENAME_NOREPLACE)
                    if not moved and heir.entry(each) is None:
                        os.rename(each, each, src_dir_fd=folder.fd, dst_dir_fd=heir.fd)
        os.rmdir(name, dir_fd=parent.fd)


# What killed saves left.


def names_like(name: str) -> re.Pattern[str] | None:
    """Names that differ from this one in its last number alone; None where it has none."""
    numbered = _NUMBERED.fullmatch(name)
    return None if numbered is None else re.compile(re.escape(numbered[1]) + r"\d+" + re.escape(numbered[2]))


@dataclass(frozen=True, slots=True)
class Leftover:
    """What is called as a save of ``target`` calls its folder; ``stranger`` is who made it, where that is nobody we trust."""

    name: str
    target: str
    suffix: str
    token: str
    status: os.stat_result
    stranger: int | None


def leftovers(parent: Folder, kind: FolderKind) -> list[Leftover]:
    """All of a kind, links too, the latest first."""
    found: list[Leftover] = []
    for name in parent.names():
        match = kind.draft_name.fullmatch(name)
        if match and (status := parent.entry(name)) is not None:
            stranger = status.st_uid if strangers(parent.status, status) else None
            found.append(Leftover(name, match[1], match[2], match[3], status, stranger))
    return sorted(found, key=lambda each: each.status.st_mtime_ns, reverse=True)


def _ours(found: list[Leftover]) -> list[Leftover]:
    return [each for each in found if each.stranger is None and stat.S_ISDIR(each.status.st_mode)]


def standing(parent: Folder, name: str) -> Leftover | None:
    """The checkpoint of a save that was killed between its renames: the new folder, or else the old one."""
    mine = [each for each in _ours(leftovers(parent, CHECKPOINT)) if each.target == name]
    new, old = ([each for each in mine if each.suffix == suffix] for suffix in CHECKPOINT.suffixes)
    moved = {each.token for each in old}
    for each in [*(one for one in new if one.token in moved), *old]:
        folder = parent.folder(each.name)
        if folder is None:
            continue
        with folder:
            manifest = folder.manifest()
            if manifest is not None and folder.whole(manifest) and (each in old or manifest.token == each.token):
                return each
    return None


def recover(parent: Folder, name: str, made: Folder, kind: FolderKind) -> None:
    """Finish what killed saves of ``name`` began, or of one that differs in its last number alone, and remove what is proven to
    be left of them.

    Args:
        made: a folder that this process has just made here, which says whom it counts as on this file system, and when now is.
    """
    alike = names_like(name)
    found = _ours(leftovers(parent, kind))
    for target in [name, *sorted({each.target for each in found if alike and alike.fullmatch(each.target)} - {name})]:
        # Another user's that nobody else may open, or one that goes meanwhile: no reason not to save here.
        with suppress(OSError) if target != name else nullcontext(), ExitStack() as opened:
            if kind is CHECKPOINT and parent.entry(target) is None:
                _finish(parent, target, made)
            heir = parent.folder(target)
            current = kind.token(opened.enter_context(heir)) if heir is not None else None
            for each in found:
                if each.target == target:
                    with suppress(OSError):
                        _tidy(parent, each, made, heir, current, kind, others=target != name)


def _tidy(
    parent: Folder, each: Leftover, made: Folder, heir: Folder | None, current: str | None, kind: FolderKind, *, others: bool
) -> None:
    """Remove one leftover, if it is one; ``others``: of a save to another path, which may be at work."""
    folder = parent.folder(each.name)
    if folder is None:
        return
    with folder:
        if os.path.samestat(folder.status, made.status) or folder.status.st_uid != made.status.st_uid:
            return
        if folder.names():
            if each.token == current or _is_over(folder, each.token, made, kind):
                retire(parent, each.name, folder, heir, kind, begun=folder.size(f"saving-{each.token}") is not None)
        # A save that has made its folder has no file in it yet.
        elif not others or each.suffix != kind.suffixes[0] or _silent(folder.status, made):
            # Whoever makes a file in it meanwhile keeps it.
            os.rmdir(each.name, dir_fd=parent.fd)


def _finish(parent: Folder, name: str, made: Folder) -> None:
    """Put the checkpoint of a save that was killed between its renames in its place."""
    found = standing(parent, name)
    folder = parent.folder(found.name) if found is not None and found.suffix == "tmp" else None
    if folder is None or found is None:
        return
    with folder:
        if folder.status.st_uid == made.status.st_uid and _is_over(folder, found.token, made, CHECKPOINT):
            parent.rename(found.name, name)
            parent.sync()


def _silent(status: os.stat_result, made: Folder) -> bool:
    return made.status.st_mtime_ns - status.st_mtime_ns >= _SILENT_NS


def _is_over(folder: Folder, token: str, made: Folder, kind: FolderKind) -> bool:
    """Whether ``folder``, which is not empty, is of the save of that token, and the save certainly does not run any more."""
    mark = f"saving-{token}"
    names, nbytes = folder.names(), folder.size(mark)
    if nbytes is None:
        return kind.token(folder) == token
    if nbytes != ALIGN:
        # Killed in its first write, or in it now.
        return names == [mark] and _silent(folder.status, made)
    with open(os.open(mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder.fd), "rb") as file:
        owner = Owner.of_page(file.read(ALIGN))
    if owner is None:
        return False
    here = Owner.here()
    if owner == here:
        return token not in working
    if owner.is_over():
        return True
    elsewhere = (owner.host, owner.namespace) != (here.host, here.namespace)
    changed = [status for name in names if (status := folder.entry(name)) is not None]
    return elsewhere and all(made.status.st_mtime_ns - status.st_mtime_ns > _SILENT_NS for status in changed)
