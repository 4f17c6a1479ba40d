"""How a checkpoint is committed: the folder it is written in, and the renames that make it appear whole or not at all.

The first rank makes the folder, writes the manifest last and commits; a loader asks which folder to read.  It never
communicates and never looks inside a shard file.

Note: [Renames]
    A save writes ``NAME.tmp-TOKEN``.  When it is complete and synced it changes places with an earlier ``NAME`` in one call,
    and the old one is removed.  Where the file system cannot exchange, ``NAME`` is renamed to ``NAME.old-TOKEN`` and the new
    folder to ``NAME``; between the two ``NAME`` is missing, and ``NAME.old-TOKEN`` beside a complete ``NAME.tmp-TOKEN`` says
    so: a loader reads the new one.  Whatever is left is tidied by the next save.

Note: [What is ours]
    Anybody may make a link or a folder that is called like what a killed save left.  So a folder is opened once, never
    through a link, and from then on its descriptor is what counts: entries are looked up, renamed and removed relative to
    it, whatever becomes of the paths meanwhile.  It is emptied only when this user owns it and it is proven to be what a
    save left: it is empty, or holds the file that the save of that token made first, or a manifest of that token, or the
    checkpoint at ``NAME`` is of that token, which then took its place.  A save that may still be running keeps its folder.
    In such a folder only regular files of our own names are removed; what the user put beside them moves on to the new
    folder, never over anything.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from offload.disk import Owner
from offload.errors import CheckpointError
from offload.pages import ALIGN
from offload.shards.file import Record
from offload.shards.manifest import MANIFEST, MANIFEST_MOST, Manifest, encoded, read_manifest, shard_name
from offload.text import shown, shown_path

__all__ = ["Draft", "destination", "find"]

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_OURS = re.compile(r"manifest\.json|rank-\d{5,}\.safetensors|saving-[0-9a-f]{16}")
_TOKEN = "[0-9a-f]{16}"
#: What a save adds to the name of its target while it works; a file name has at most 255 bytes.
_NAME_MOST = 255 - len(".tmp-") - 16
#: A save of another host, whose process cannot be looked at, is over when nothing of it has changed for so long.
_SILENT_NS = 3600 * 10**9


def destination(path: str | os.PathLike[str], verb: str) -> Path:
    """The absolute path that is meant, links followed as the system would follow them.

    Raises:
        CheckpointError: it is no path of a folder, or leads through a link that somebody else left in a folder for everybody.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(
            f"{verb}: expected the path of a checkpoint's folder, found {shown(path)}. Name a folder, e.g. runs/step-100."
        )
    target = Path(text)
    try:
        for link in [target, *target.absolute().parents]:
            _follow_ours(link, verb)
        place = target.resolve()
    except RuntimeError:
        found = f"{verb} {shown_path(text)}: expected a path, found links that lead in a circle. Remove them."
        raise CheckpointError(found) from None
    if not 0 < len(os.fsencode(place.name)) <= _NAME_MOST:
        raise CheckpointError(
            f"{verb} {shown_path(text)}: expected a folder whose name has 1 to {_NAME_MOST} bytes, found "
            f"{len(os.fsencode(place.name))}. Choose another path."
        )
    return place


def _follow_ours(path: Path, verb: str) -> None:
    """As Linux protects links: in a folder where everybody may make files, another user's are not followed."""
    status = _lstat(path)
    if status is None or not stat.S_ISLNK(status.st_mode):
        return
    around = os.stat(path.parent)
    shared = around.st_mode & stat.S_ISVTX and around.st_mode & stat.S_IWOTH
    if shared and status.st_uid not in (os.geteuid(), around.st_uid):
        raise CheckpointError(
            f"{verb} {shown_path(path)}: expected a folder or a link of your own, found a link that another user (uid "
            f"{status.st_uid}) made in a folder for everybody. Name the folder itself."
        )


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


class _Folder:
    """A folder that is held open: entries are looked up in it alone, whatever becomes of its path.

    Raises:
        OSError: there is none, or what is there is a link or no folder.
    """

    def __init__(self, name: str | Path, within: _Folder | None = None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if within else 0)
        self.fd: int = os.open(name, flags, dir_fd=within.fd if within else None)
        self.status = os.fstat(self.fd)

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def entry(self, name: str) -> os.stat_result | None:
        """What is called so here, a link itself and not what it leads to; None where nothing is."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """The size of a regular file; None where there is none."""
        status = self.entry(name)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def folder(self, name: str) -> _Folder | None:
        """The folder that is called so here; None where there is none, or a link to one."""
        try:
            return _Folder(name, self)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise

    def names(self) -> list[str]:
        return os.listdir(self.fd)

    def holds(self, folder: _Folder, name: str) -> bool:
        """Whether ``folder`` still is what is called ``name`` here."""
        status = self.entry(name)
        return status is not None and os.path.samestat(status, folder.status)

    def create(self, name: str, data: bytes) -> None:
        """A new file, its owner's alone and durable."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=self.fd), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def sync(self) -> None:
        try:
            os.fsync(self.fd)
        except OSError as error:
            # Some file systems cannot sync a folder; their renames are as durable as they get.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise

    def token(self) -> str | None:
        """The token of the manifest that lies here, where it can be read."""
        try:
            return read_manifest(self._by_descriptor()).token
        except (CheckpointError, OSError):
            return None

    def complete(self) -> bool:
        """Whether a checkpoint lies here, with every file as long as it should be."""
        try:
            files = read_manifest(self._by_descriptor()).files
            return all(self.size(record.name) == record.nbytes for record in files)
        except (CheckpointError, OSError):
            return False

    def _by_descriptor(self) -> Path:
        return Path(f"/proc/self/fd/{self.fd}")


class Draft:
    """A checkpoint being written beside ``target``; every rank holds one of the same token.

    Args:
        target: where the checkpoint shall be, from `destination`.
        token: 16 hexadecimal digits no other save uses.
    """

    def __init__(self, target: Path, token: str) -> None:
        self.target, self.token = target, token
        self._name = f"{target.name}.tmp-{token}"
        self._old = f"{target.name}.old-{token}"
        self._parent: _Folder | None = None
        self._made: _Folder | None = None

    def open(self) -> None:
        """Tidy what killed saves left and make the folder; one rank only.

        Raises:
            CheckpointError: ``target`` is something else than a checkpoint.  OSError: it cannot be written there.
        """
        if _lstat(self.target.parent) is not None:
            with _Folder(self.target.parent) as parent, self._earlier(parent, None):
                pass
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._parent = _Folder(self.target.parent)
        os.mkdir(self._name, 0o700, dir_fd=self._parent.fd)
        self._made = _Folder(self._name, self._parent)
        self._made.create(f"saving-{self.token}", Owner.here().page())
        _recover(self._parent, self.target.name, self._made)
        with self._earlier(self._parent, self._made):
            pass

    @contextmanager
    def files(self) -> Iterator[int]:
        """The folder's descriptor, for this rank to make its file in; every rank.

        Raises:
            CheckpointError: the folder that the first rank made is not here.
        """
        try:
            with _Folder(self.target.parent) as parent, _Folder(self._name, parent) as folder:
                if folder.size(f"saving-{self.token}") is None:
                    raise FileNotFoundError
                fd = os.dup(folder.fd)
        except OSError as error:
            raise CheckpointError(
                f"save {self.target}: expected the folder that the first rank made, found none on this host. Save into a file "
                "system that all hosts share, by the same path."
            ) from error
        try:
            yield fd
        finally:
            os.close(fd)

    def path(self, name: str) -> Path:
        """Where a file of the folder is while the save works, for errors."""
        return self.target.with_name(self._name) / name

    def commit(self, about: dict[str, Any], files: Sequence[Record]) -> None:
        """Write the manifest and put the folder in place of ``target``; one rank only, when all files are durable.

        Raises:
            CheckpointError: a file is not here as its writer says.  OSError: nothing was committed.
        """
        assert self._parent is not None and self._made is not None, "open() comes first"
        for record in files:
            self._check_visible(record, self._made)
        manifest = Manifest(
            format="zhooks sharded checkpoint", version=1, token=self.token, world=len(files), about=about, files=list(files)
        )
        raw = encoded(manifest)
        if len(raw) > MANIFEST_MOST:
            raise CheckpointError(
                f"save {self.target}: expected a manifest of at most {MANIFEST_MOST} bytes, found {len(raw)} for {len(files)} "
                "rank(s). Attach with fewer units (a larger [units] min_numel), or save from fewer ranks."
            )
        self._made.create(MANIFEST, raw)
        self._made.sync()
        with self._earlier(self._parent, self._made) as earlier:
            left = self._put_in_place(self._parent, self._made, earlier)
            self._parent.sync()
            with suppress(OSError):
                os.unlink(f"saving-{self.token}", dir_fd=self._made.fd)
            if earlier is not None:
                _retire(self._parent, left, earlier, self._made)

    def _put_in_place(self, parent: _Folder, made: _Folder, earlier: _Folder | None) -> str:
        """See Note [Renames]; returns what the earlier checkpoint is called now, if there was one."""
        name = self.target.name
        if not parent.holds(made, self._name):
            raise CheckpointError(
                f"save {self.target}: expected the folder {self._name} that this save made, found something else in its "
                "place. Choose a path where nobody else renames folders."
            )
        if earlier is None or not earlier.names():
            parent.rename(self._name, name)
            return self._old
        if _exchange(parent.fd, self._name, name):
            return self._name
        parent.rename(name, self._old)
        try:
            parent.rename(self._name, name)
        except OSError:
            parent.rename(self._old, name)
            raise
        return self._old

    @contextmanager
    def _earlier(self, parent: _Folder, made: _Folder | None) -> Iterator[_Folder | None]:
        """What ``target`` is now, where this save may take its place: an empty folder or a checkpoint of this user's."""
        status = parent.entry(self.target.name)
        if status is None:
            yield None
            return
        found = parent.folder(self.target.name)
        if found is None:
            kinds = {stat.S_IFLNK: "a link", stat.S_IFREG: "a file"}
            raise self._not_replaceable(kinds.get(stat.S_IFMT(status.st_mode), "a pipe or a device"))
        with found:
            if not _replaceable(found):
                raise self._not_replaceable("a folder with other files")
            if found.names() and made is not None and found.status.st_uid != made.status.st_uid:
                raise self._not_replaceable(f"a checkpoint of another user (uid {found.status.st_uid})")
            yield found

    def _not_replaceable(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"save {self.target}: expected no such path, an empty folder or an earlier checkpoint, found {what}. Choose "
            "another path."
        )

    def _check_visible(self, record: Record, made: _Folder) -> None:
        found = made.size(record.name)
        if found != record.nbytes:
            raise CheckpointError(
                f"save {self.target}: expected {record.name} with {record.nbytes} bytes beside the first rank's file, found "
                f"{'no such file' if found is None else f'{found} bytes'}. Save into a file system that all hosts share."
            )

    def discard(self) -> None:
        """Remove what was written; nothing was committed."""
        if self._parent is not None and self._made is not None:
            _retire(self._parent, self._name, self._made, None)

    def close(self) -> None:
        """Let go of the folders; idempotent."""
        for folder in (self._parent, self._made):
            if folder is not None:
                folder.close()
        self._parent = self._made = None


def _exchange(parent_fd: int, one: str, other: str) -> bool:
    """Let two folders of one folder change places in one step; False where this system cannot."""
    return _renameat2(parent_fd, one, parent_fd, other, _RENAME_EXCHANGE)


def _renameat2(old_fd: int, old: str, new_fd: int, new: str, flag: int) -> bool:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(ctypes.c_int(old_fd), os.fsencode(old), ctypes.c_int(new_fd), os.fsencode(new), ctypes.c_uint(flag)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), new)


def find(target: Path) -> Path:
    """The folder that holds the checkpoint ``target``: itself, or what a kill between two renames left.

    Raises:
        CheckpointError: there is none.
    """
    if (target / MANIFEST).exists():
        return target
    if not _has_foreign(target) and target.parent.is_dir():
        with _Folder(target.parent) as parent:
            standing = _standing(parent, target.name)
        if standing is not None:
            return target.with_name(standing)
    what = "a folder without a manifest" if target.is_dir() else "a file" if target.exists() else "nothing there"
    raise CheckpointError(
        f"load {target}: expected a checkpoint that attachment.save() wrote, found {what}. Check the path; a save that was "
        "killed before its commit leaves none."
    )


# What killed saves left; see Note [What is ours].


def _leftovers(parent: _Folder, name: str, kind: str) -> list[str]:
    """The tokens of the folders ``NAME.tmp-TOKEN`` or ``NAME.old-TOKEN``, the latest first; links are none of them."""
    prefix = f"{name}.{kind}-"
    found: dict[str, int] = {}
    for each in parent.names():
        status = parent.entry(each) if each.startswith(prefix) else None
        if status is not None and stat.S_ISDIR(status.st_mode) and re.fullmatch(_TOKEN, each.removeprefix(prefix)):
            found[each.removeprefix(prefix)] = status.st_mtime_ns
    return sorted(found, key=found.__getitem__, reverse=True)


def _standing(parent: _Folder, name: str) -> str | None:
    """The checkpoint of a save that was killed between its renames: the new folder, or else the old one."""
    tokens = _leftovers(parent, name, "old")
    new = next((token for token in tokens if _token(parent, f"{name}.tmp-{token}") == token), None)
    if new is not None:
        return f"{name}.tmp-{new}"
    return next((f"{name}.old-{token}" for token in tokens if _token(parent, f"{name}.old-{token}") is not None), None)


def _token(parent: _Folder, name: str) -> str | None:
    """Of the whole checkpoint that is called so in ``parent``."""
    folder = parent.folder(name)
    if folder is None:
        return None
    with folder:
        return folder.token() if folder.complete() else None


def _recover(parent: _Folder, name: str, made: _Folder) -> None:
    """Finish what a killed save began, and remove what is proven to be left of one.

    Args:
        made: a folder that this process has just made here, which says whom it counts as on this file system, and when now is.
    """
    if parent.entry(name) is None:
        standing = _standing(parent, name)
        status = parent.entry(standing) if standing is not None and standing.startswith(f"{name}.tmp-") else None
        if standing is not None and status is not None and status.st_uid == made.status.st_uid:
            parent.rename(standing, name)
            parent.sync()
    heir = parent.folder(name)
    try:
        current = heir.token() if heir is not None else None
        for kind in ("tmp", "old"):
            for token in _leftovers(parent, name, kind):
                _tidy(parent, f"{name}.{kind}-{token}", token, made, heir, current)
    finally:
        if heir is not None:
            heir.close()


def _tidy(parent: _Folder, name: str, token: str, made: _Folder, heir: _Folder | None, current: str | None) -> None:
    """Remove one leftover, if it is one."""
    with suppress(OSError):
        folder = parent.folder(name)
        if folder is None or os.path.samestat(folder.status, made.status):
            return
        with folder:
            if folder.status.st_uid != made.status.st_uid:
                return
            if token == current or _is_over(folder, token, made):
                _retire(parent, name, folder, heir)


def _is_over(folder: _Folder, token: str, made: _Folder) -> bool:
    """Whether ``folder`` is of the save of that token, and the save certainly does not run any more."""
    mark = f"saving-{token}"
    names, nbytes = folder.names(), folder.size(mark)
    if nbytes is None:
        return not names or folder.token() == token
    if nbytes != ALIGN:
        # Killed in its first write.
        return names == [mark]
    with open(os.open(mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder.fd), "rb") as file:
        owner = Owner.of_page(file.read(ALIGN))
    if owner is None:
        return False
    here = Owner.here()
    if owner == here or owner.is_over():
        return True
    elsewhere = (owner.host, owner.namespace) != (here.host, here.namespace)
    changed = [status.st_mtime_ns for name in names if (status := folder.entry(name)) is not None]
    return elsewhere and made.status.st_mtime_ns - max(changed, default=0) > _SILENT_NS


def _retire(parent: _Folder, name: str, folder: _Folder, heir: _Folder | None) -> None:
    """Remove our files and the folder; what else lies in it goes to ``heir``, or keeps the folder."""
    if not parent.holds(folder, name):
        return
    with suppress(OSError):
        # The manifest last: what is half removed still says whose it was.
        for each in sorted(folder.names(), key=lambda each: (each == MANIFEST, each)):
            with suppress(OSError):
                if _OURS.fullmatch(each) and folder.size(each) is not None:
                    os.unlink(each, dir_fd=folder.fd)
                elif heir is not None:
                    _hand_on(folder, each, heir)
        os.rmdir(name, dir_fd=parent.fd)


def _hand_on(folder: _Folder, name: str, heir: _Folder) -> None:
    """Move a file of the user's, never over anything."""
    with suppress(FileExistsError):
        if not _renameat2(folder.fd, name, heir.fd, name, _RENAME_NOREPLACE) and heir.entry(name) is None:
            os.rename(name, name, src_dir_fd=folder.fd, dst_dir_fd=heir.fd)


def _has_foreign(target: Path) -> bool:
    return target.exists() and not (target.is_dir() and all(_OURS.fullmatch(path.name) for path in target.iterdir()))


def _replaceable(folder: _Folder) -> bool:
    """Empty, or a checkpoint, damaged or not: anybody may call a file manifest.json."""
    names = folder.names()
    if not names:
        return True
    return folder.size(MANIFEST) is not None and (folder.size(shard_name(0)) is not None or folder.token() is not None)
