"""What killed saves left beside a checkpoint: which of it is one, and what is removed because it certainly is none.

``commit.py`` asks before it makes its own folder, and for a loader.  It never looks inside a shard file, and what is in doubt
stays.

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
    What is removed in such a folder is for its kind to say.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass

from offload.disk import Owner
from offload.pages import ALIGN
from offload.regular_files import strangers
from offload.shards.folder import Folder
from offload.shards.replaceable import CHECKPOINT, FolderKind, retire

__all__ = ["names_like", "recover", "standing", "strangers_of", "working"]

_NUMBERED = re.compile(r"(.*?)\d+(\D*)", re.DOTALL)
#: Tokens of the saves of this process that still work.
working: set[str] = set()
#: A save of another host, whose process cannot be looked at, is over when nothing of it has changed for so long.
_SILENT_NS = 3600 * 10**9


def names_like(name: str) -> re.Pattern[str] | None:
    """Names that differ from this one in its last number alone; None where it has none."""
    numbered = _NUMBERED.fullmatch(name)
    return None if numbered is None else re.compile(re.escape(numbered[1]) + r"\d+" + re.escape(numbered[2]))


@dataclass(frozen=True, slots=True)
class Leftover:
    """What is called as a save of ``target`` calls its folder: links and what strangers made, too."""

    name: str
    target: str
    suffix: str
    token: str
    status: os.stat_result


def _leftovers(parent: Folder, kind: FolderKind) -> list[Leftover]:
    """All of a kind, the latest first."""
    found = [(match, parent.entry(each)) for each in parent.names() if (match := kind.draft_name.fullmatch(each))]
    made = [Leftover(each[0], each[1], each[2], each[3], status) for each, status in found if status is not None]
    return sorted(made, key=lambda each: each.status.st_mtime_ns, reverse=True)


def _ours(parent: Folder, each: Leftover) -> bool:
    return stat.S_ISDIR(each.status.st_mode) and not strangers(parent.status, each.status)


def strangers_of(parent: Folder, name: str) -> Iterator[int]:
    """Who made what looks like something a save of ``name`` left, where it was neither this user nor the folder's owner."""
    for each in _leftovers(parent, CHECKPOINT):
        if each.target == name and strangers(parent.status, each.status):
            yield each.status.st_uid


def standing(parent: Folder, name: str) -> Leftover | None:
    """The checkpoint of a save that was killed between its renames: the new folder, or else the old one."""
    mine = [each for each in _leftovers(parent, CHECKPOINT) if each.target == name and _ours(parent, each)]
    new, old = ([each for each in mine if each.suffix == suffix] for suffix in CHECKPOINT.suffixes)
    moved = {each.token for each in old}
    whole = [each for each in new if each.token in moved and _token(parent, each.name) == each.token]
    return next((each for each in [*whole, *old] if _token(parent, each.name) is not None), None)


def _token(parent: Folder, name: str) -> str | None:
    """Of the whole checkpoint that is called so in ``parent``."""
    folder = parent.folder(name)
    if folder is None:
        return None
    with folder:
        return folder.token() if folder.complete() else None


def recover(parent: Folder, name: str, made: Folder, kind: FolderKind) -> None:
    """Finish what killed saves of ``name`` began, or of one that differs in its last number alone, and remove what is proven to
    be left of them.

    Args:
        made: a folder that this process has just made here, which says whom it counts as on this file system, and when now is.
    """
    alike = names_like(name)
    found = [each for each in _leftovers(parent, kind) if _ours(parent, each)]
    for target in [name, *sorted({each.target for each in found if alike and alike.fullmatch(each.target)} - {name})]:
        # Another user's that nobody else may open, or one that goes meanwhile: no reason not to save here.
        with suppress(OSError) if target != name else nullcontext(), ExitStack() as opened:
            if kind is CHECKPOINT and parent.entry(target) is None:
                _finish(parent, target, made)
            heir = parent.folder(target)
            current = kind.token(opened.enter_context(heir)) if heir is not None else None
            for each in found:
                if each.target == target:
                    # Another save may be at work there, one that has made its folder and no mark yet.
                    patience_ns = _SILENT_NS if target != name and each.suffix == kind.suffixes[0] else 0
                    _tidy(parent, each, made, heir, current, patience_ns, kind)


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


def _tidy(
    parent: Folder, each: Leftover, made: Folder, heir: Folder | None, current: str | None, patience_ns: int, kind: FolderKind
) -> None:
    """Remove one leftover, if it is one."""
    with suppress(OSError):
        folder = parent.folder(each.name)
        if folder is None:
            return
        with folder:
            if os.path.samestat(folder.status, made.status) or folder.status.st_uid != made.status.st_uid:
                return
            if not folder.names():
                # Whoever makes a file in it meanwhile keeps it.
                if _silent(folder, made, patience_ns):
                    os.rmdir(each.name, dir_fd=parent.fd)
            elif each.token == current or _is_over(folder, each.token, made, kind):
                retire(parent, each.name, folder, heir, kind, begun=folder.size(f"saving-{each.token}") is not None)


def _silent(folder: Folder, made: Folder, patience_ns: int) -> bool:
    """Nothing in it has changed for so long."""
    return not patience_ns or made.status.st_mtime_ns - folder.status.st_mtime_ns >= patience_ns


def _is_over(folder: Folder, token: str, made: Folder, kind: FolderKind) -> bool:
    """Whether ``folder``, which is not empty, is of the save of that token, and the save certainly does not run any more."""
    mark = f"saving-{token}"
    names, nbytes = folder.names(), folder.size(mark)
    if nbytes is None:
        return kind.token(folder) == token
    if nbytes != ALIGN:
        # Killed in its first write, or in it now.
        return names == [mark] and _silent(folder, made, _SILENT_NS)
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
    changed = [status.st_mtime_ns for name in names if (status := folder.entry(name)) is not None]
    return elsewhere and made.status.st_mtime_ns - max(changed, default=0) > _SILENT_NS
