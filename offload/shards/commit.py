"""How a folder is committed: the one it is written in, and the renames that make it appear whole or not at all.

Note: [Renames]
    A save writes ``NAME.tmp-TOKEN``.  When it is complete and synced it changes places with an earlier ``NAME`` in one call,
    and the old one is removed.  Where the file system cannot exchange, ``NAME`` is renamed to ``NAME.old-TOKEN`` and the new
    folder to ``NAME``; between the two ``NAME`` is missing, and ``NAME.old-TOKEN`` beside a complete ``NAME.tmp-TOKEN`` says
    so: a loader reads the new one.  Whatever is left is tidied by the next save.  An export, which other libraries load,
    writes ``NAME.exporting-TOKEN`` and is refused where the file system cannot exchange.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from offload.disk import Owner
from offload.errors import CheckpointError
from offload.private_files import make_folders
from offload.regular_files import planted_link
from offload.shards.folder import EXCHANGE, Folder, renameat2
from offload.shards.leftovers import CHECKPOINT, FolderKind, recover, retire, working
from offload.shards.manifest import MANIFEST, MANIFEST_MOST, Manifest, Record, encoded
from offload.text import counted, shown, shown_path

__all__ = ["Draft", "destination", "manifest_of", "refuse_occupied"]

#: What a save adds to the name of its target while it works; a file name has at most 255 bytes.
_NAME_MOST = 255 - len(".tmp-") - 16
_EXAMPLES = {"folder": "runs/step-100", "file": "model.safetensors"}


def destination(path: str | os.PathLike[str], verb: str, what: str = "folder") -> Path:
    """The absolute path that is meant, links followed as the system would follow them.

    Args:
        what: a folder or a file.
    Raises:
        CheckpointError: it is no such path, or leads through a link that somebody else left in a folder for everybody.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(
            f"{verb} expected the path of a {what}, found {shown(path)}. Name one, e.g. {_EXAMPLES[what]}."
        )
    try:
        planted = planted_link(Path(text))
        place = Path(text).resolve()
        nbytes = len(os.fsencode(place.name))
        if planted:
            expected = f"a {what} or a link of your own, found {planted}. Name the {what} itself."
        elif not 0 < nbytes <= _NAME_MOST:
            expected = f"a {what} whose name has 1 to {_NAME_MOST} bytes, found {nbytes}. Choose another path."
        else:
            return place
    except (OSError, RuntimeError) as error:
        # As what pathlib raises a loop depends on the version of Python.
        if isinstance(error, OSError) and error.errno != errno.ELOOP:
            raise
        expected = "a path, found a loop of links. Remove it."
    raise CheckpointError(f"Cannot {verb} {shown_path(text)}. Expected {expected}")


def refuse_occupied(target: Path, verb: str) -> None:
    """A folder that others rely on to stay what it is must not change places with a new one; asked on every rank.

    Raises:
        CheckpointError: it is the working directory of this process or holds it, the home directory, or a mount point.
    """
    found = ""
    with suppress(OSError, RuntimeError):
        if target in [here := Path.cwd().resolve(), *here.parents]:
            found = "the working directory of this process" if target == here else "a folder that holds the working directory"
        elif os.path.ismount(target):
            found = "a mount point"
        elif target == Path.home().resolve():
            found = "the home directory"
    if found:
        raise CheckpointError(
            f"Cannot {verb} {shown_path(target)}. Expected a folder that a new one may replace, found {found}. Name a folder "
            f"in it, e.g. {shown_path(target / 'step-100')}."
        )


class Draft:
    """A folder being written beside ``target``; every rank holds one of the same token.

    Args:
        target: where the folder shall be, from `destination`.
        token: 16 hexadecimal digits no other save uses.
    Attributes:
        opened_ns: when it was begun, by the clock of its file system; of the rank that opened it.
    """

    def __init__(self, target: Path, token: str, kind: FolderKind = CHECKPOINT) -> None:
        self.target, self.token, self.kind = target, token, kind
        self._names = [f"{target.name}.{suffix}-{token}" for suffix in kind.suffixes]
        self._mark = f"saving-{token}"
        self._parent: Folder | None = None
        self._made: Folder | None = None
        self.opened_ns = 0

    def open(self) -> None:
        """Tidy what killed saves left and make the folder; one rank only.

        Raises:
            CheckpointError: ``target`` is something that shall not be replaced.  OSError: it cannot be written there.
        """
        if os.path.lexists(self.target.parent):
            with Folder(self.target.parent) as parent, self._earlier(parent, None):
                pass
        make_folders(self.target.parent)
        self._parent = Folder(self.target.parent)
        working.add(self.token)
        while True:
            # Where a file cannot be made in it, ``discard`` removes the folder.
            os.mkdir(self._names[0], 0o700, dir_fd=self._parent.fd)
            try:
                self._made = Folder(self._names[0], self._parent)
                self._made.create(self._mark, Owner.here().page())
                break
            except FileNotFoundError:
                # Another save to this path took the empty folder for what a killed one left.
                if self._made is not None:
                    self._made.close()
                    self._made = None
        self.opened_ns = os.fstat(self._made.fd).st_mtime_ns
        recover(self._parent, self.target.name, self._made, self.kind)
        with self._earlier(self._parent, self._made):
            pass

    @contextmanager
    def files(self) -> Iterator[Folder]:
        """The folder as this rank finds it, to make its files in; every rank.

        Raises:
            CheckpointError: the folder that the first rank made is not here.
        """
        verb, parent = self.kind.verb, self.target.parent
        with ExitStack() as opened:
            try:
                folder = opened.enter_context(Folder(self._names[0], opened.enter_context(Folder(parent))))
                if folder.size(self._mark) is None:
                    raise FileNotFoundError
            except (FileNotFoundError, NotADirectoryError) as error:
                found = "none on this host"
                with suppress(OSError):
                    if os.statvfs(parent).f_flag & os.ST_RDONLY:
                        found += f", where the file system at {parent} is mounted read-only"
                raise self._refused(
                    f"the folder that the first rank made, found {found}. {verb.capitalize()} into a file system that all "
                    "hosts share, by the same path."
                ) from error
            yield folder

    def folder(self) -> Folder:
        """The same, for a rank that writes beside training and closes it; every rank.  Raises as ``files``."""
        with self.files() as folder:
            return Folder(folder.path)

    @property
    def made(self) -> Folder:
        """The folder, whatever it is called now; the first rank only."""
        assert self._made is not None, "open() comes first"
        return self._made

    def path(self, name: str) -> Path:
        """Where a file of the folder is while the save works, for errors."""
        return self.target.with_name(self._names[0]) / name

    def commit(self, sizes: Mapping[str, int], last: Mapping[str, bytes] | None = None) -> None:
        """Put the folder in place of ``target``; one rank only, when the files of ``sizes`` are durable on all.

        Args:
            last: files that are made when all others are there.
        Raises:
            CheckpointError: a file is not here as its writer says.  OSError: nothing was committed.
        """
        parent, made, last = self._parent, self.made, last or {}
        assert parent is not None, "open() comes first"
        for name, nbytes in sizes.items():
            size = made.size(name)
            if size != nbytes:
                raise self._refused(
                    f"{name} with {nbytes} bytes next to the first rank's file, found "
                    f"{'no such file' if size is None else f'{size} bytes'}. {self.kind.verb.capitalize()} into a file system "
                    "that all hosts share."
                )
        for name, data in last.items():
            made.create(name, data)
        _sync_tree(made, {*sizes, *last})
        while True:
            with self._earlier(parent, made) as earlier:
                left = self._put_in_place(parent, made, earlier)
                if left is None:
                    # Another save has put its folder there since this one looked: that is the earlier one now.
                    continue
                parent.sync()
                if earlier is not None:
                    retire(parent, left, earlier, made, self.kind)
                # Until now it says whose the earlier folder was to remove.
                with suppress(OSError):
                    os.unlink(self._mark, dir_fd=made.fd)
                return

    def _put_in_place(self, parent: Folder, made: Folder, earlier: Folder | None) -> str | None:
        """See Note [Renames]; returns what the earlier folder is called now, if there was one.  None: there is another."""
        name, (begun, *old) = self.target.name, self._names
        if not parent.holds(made, begun):
            raise self._refused(
                f"the folder {begun} that this {self.kind.verb} made, found something else in its place. Choose a path where "
                "nobody else renames folders."
            )
        if earlier is None or not earlier.names():
            try:
                parent.rename(begun, name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return None
            return begun
        if _exchange(parent.fd, begun, name):
            return begun
        if not old:
            raise self._refused(
                "no such path, found a folder, and a file system that cannot exchange two folders in one step. Export to a "
                "path that does not exist."
            )
        parent.rename(name, old[0])
        try:
            parent.rename(begun, name)
        except OSError:
            parent.rename(old[0], name)
            raise
        return old[0]

    @contextmanager
    def _earlier(self, parent: Folder, made: Folder | None) -> Iterator[Folder | None]:
        """What ``target`` is now, where this save may take its place: an empty folder or one of this kind and user."""
        status = parent.entry(self.target.name)
        found = None if status is None else parent.folder(self.target.name)
        with found or nullcontext():
            problem = ""
            if status is not None and found is None:
                kinds = {stat.S_IFLNK: "a link", stat.S_IFREG: "a file"}
                problem = kinds.get(stat.S_IFMT(status.st_mode), "a pipe or a device")
            elif found is not None and found.names():
                problem = self.kind.problem(found)
                if not problem and made is not None and found.status.st_uid != made.status.st_uid:
                    problem = f"{self.kind.noun} of another user (uid {found.status.st_uid})"
            if problem:
                raise self._refused(f"no such path, {self.kind.earlier}, found {problem}. Choose another path.")
            yield found

    def _refused(self, expected: str) -> CheckpointError:
        return CheckpointError(f"Cannot {self.kind.verb} {self.target}. Expected {expected}")

    def discard(self) -> None:
        """Remove what was written; nothing was committed."""
        if self._parent is not None and self._made is not None:
            retire(self._parent, self._names[0], self._made, None, self.kind, begun=True)

    def close(self) -> None:
        """Let go of the folders; idempotent."""
        for folder in (self._parent, self._made):
            if folder is not None:
                folder.close()
        self._parent = self._made = None
        working.discard(self.token)


def manifest_of(draft: Draft, about: Mapping[str, Any], files: Sequence[Record]) -> dict[str, bytes]:
    """The manifest of a checkpoint, to be the last file of its folder.

    Raises:
        CheckpointError: nobody would read one of that size.
    """
    raw = encoded(Manifest.of(draft.token, about, files))
    if len(raw) > MANIFEST_MOST:
        raise CheckpointError(
            f"Cannot save {draft.target}. Expected a manifest of at most {MANIFEST_MOST} bytes, found {len(raw)} for "
            f"{counted(len(files), 'rank')}. Attach with fewer units (a larger [units] min_numel), or save from fewer ranks."
        )
    return {MANIFEST: raw}


def _sync_tree(folder: Folder, durable: set[str]) -> None:
    """What other libraries wrote into the folder, and the folders in it; ``durable``: files in it that are so already."""
    for root, _, names in os.walk(folder.path):
        for name in set(names).difference(durable if root == str(folder.path) else ()):
            fd = os.open(os.path.join(root, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        if root != str(folder.path):
            with Folder(root) as inner:
                inner.sync()
    folder.sync()


def _exchange(parent_fd: int, one: str, other: str) -> bool:
    """Let two folders of one folder change places in one step; False where this system cannot."""
    return renameat2(parent_fd, one, parent_fd, other, EXCHANGE)
