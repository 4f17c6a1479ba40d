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
from contextlib import ExitStack, suppress

from offload.disk import Owner
from offload.pages import ALIGN
from offload.regular_files import strangers
from offload.shards.folder import Folder
from offload.shards.replaceable import CHECKPOINT, TOKEN, FolderKind, retire

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


def _leftovers(parent: Folder, name: str, kind: str) -> list[str]:
    """The tokens of the folders ``NAME.tmp-TOKEN`` or ``NAME.old-TOKEN``, the latest first; links and what strangers made are
    none of them."""
    prefix = f"{name}.{kind}-"
    found: dict[str, int] = {}
    for each in parent.names():
        status = parent.entry(each) if each.startswith(prefix) and re.fullmatch(TOKEN, each.removeprefix(prefix)) else None
        if status is not None and stat.S_ISDIR(status.st_mode) and not strangers(parent.status, status):
            found[each.removeprefix(prefix)] = status.st_mtime_ns
    return sorted(found, key=found.__getitem__, reverse=True)


def strangers_of(parent: Folder, name: str) -> Iterator[int]:
    """Who made what looks like something a save of ``name`` left, where it was neither this user nor the folder's owner."""
    for each in parent.names():
        beside = CHECKPOINT.beside.fullmatch(each)
        status = parent.entry(each) if beside is not None and beside[1] == name else None
        if status is not None and strangers(parent.status, status):
            yield status.st_uid


def standing(parent: Folder, name: str) -> str | None:
    """The checkpoint of a save that was killed between its renames: the new folder, or else the old one."""
    tokens = _leftovers(parent, name, "old")
    new = next((token for token in tokens if _token(parent, f"{name}.tmp-{token}") == token), None)
    if new is not None:
        return f"{name}.tmp-{new}"
    return next((f"{name}.old-{token}" for token in tokens if _token(parent, f"{name}.old-{token}") is not None), None)


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
    begun = {beside[1] for each in parent.names() if (beside := kind.beside.fullmatch(each))}
    _recover(parent, name, made, kind, beside=False)
    for other in sorted(begun - {name}):
        if alike is not None and alike.fullmatch(other):
            # Another user's that nobody else may open, or one that goes meanwhile: no reason not to save here.
            with suppress(OSError):
                _recover(parent, other, made, kind, beside=True)


def _recover(parent: Folder, name: str, made: Folder, kind: FolderKind, *, beside: bool) -> None:
    """``beside``: another save may be at work on ``name``, one that has made its folder and no mark yet."""
    if kind is CHECKPOINT and parent.entry(name) is None:
        _finish(parent, name, made)
    with ExitStack() as opened:
        heir = parent.folder(name)
        current = kind.token(opened.enter_context(heir)) if heir is not None else None
        for number, suffix in enumerate(kind.suffixes):
            for token in _leftovers(parent, name, suffix):
                patience_ns = _SILENT_NS if beside and number == 0 else 0
                _tidy(parent, f"{name}.{suffix}-{token}", token, made, heir, current, patience_ns, kind)


def _finish(parent: Folder, name: str, made: Folder) -> None:
    """Put the checkpoint of a save that was killed between its renames in its place."""
    found = standing(parent, name)
    begun = CHECKPOINT.beside.fullmatch(found or "")
    folder = parent.folder(begun[0]) if begun is not None and begun[2] == "tmp" else None
    if folder is None or begun is None:
        return
    with folder:
        if folder.status.st_uid == made.status.st_uid and _is_over(folder, begun[3], made, CHECKPOINT):
            parent.rename(begun[0], name)
            parent.sync()


def _tidy(
    parent: Folder,
    name: str,
    token: str,
    made: Folder,
    heir: Folder | None,
    current: str | None,
    patience_ns: int,
    kind: FolderKind,
) -> None:
    """Remove one leftover, if it is one."""
    with suppress(OSError):
        folder = parent.folder(name)
        if folder is None:
            return
        with folder:
            if os.path.samestat(folder.status, made.status) or folder.status.st_uid != made.status.st_uid:
                return
            if not folder.names():
                # Whoever makes a file in it meanwhile keeps it.
                if _silent(folder, made, patience_ns):
                    os.rmdir(name, dir_fd=parent.fd)
            elif token == current or _is_over(folder, token, made, kind):
                retire(parent, name, folder, heir, kind, begun=folder.size(f"saving-{token}") is not None)


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
