"""A folder of whole safetensors files for other tools: written beside its target, and put in its place by one rename.

``zhooks/checkpoint`` exports models with it: the first rank makes the folder and commits it, every rank writes files of its own
in it.  It knows names of files, tensors and bytes; it never communicates and never knows what a tensor means.

Note: [Exports]
    An export writes ``NAME.exporting-TOKEN``, whose mark ``saving-TOKEN`` says which process writes it.  It changes places with
    an earlier ``NAME`` in one call.  The mark stays until what the user put into the earlier one has moved on and that is
    removed, so that the next export of ``NAME`` can finish what a killed one began, and remove what it never committed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from offload.disk import Owner
from offload.errors import CheckpointError
from offload.pages import ALIGN
from offload.private_files import create, make_folders
from offload.shards.file import Entry, blocks, header
from offload.shards.folder import EXCHANGE, RENAME_NOREPLACE, Folder, lstat, made_by_first, renameat2
from offload.shards.leftovers import working

__all__ = ["ExportDraft", "ExportKind", "WholeFile"]

_MARK = re.compile(r"saving-[0-9a-f]{16}")


class ExportKind:
    """What makes a folder one that an export of this kind may replace.

    Args:
        mark: the file that such a folder has.
        weights: files that go with the earlier folder even where the new one has none of that name.
        never: files whose folder is of another kind.
        folders: names of folders that may be in it.
    """

    def __init__(self, mark: str, weights: str, never: Collection[str], folders: Collection[str]) -> None:
        self.mark, self.weights = mark, re.compile(weights)
        self.never, self.folders = frozenset(never), frozenset(folders)


class ExportDraft:
    """An exported folder being written beside ``target``; every rank holds one of the same token.

    Args:
        target: where the folder shall be, from `destination`.
        token: 16 hexadecimal digits no other export uses.
    """

    def __init__(self, target: Path, token: str, kind: ExportKind) -> None:
        self.target, self.token, self.kind = target, token, kind
        self._name = f"{target.name}.exporting-{token}"
        self._parent: Folder | None = None
        self._made: Folder | None = None

    def open(self) -> None:
        """Tidy what killed exports left and make the folder; one rank only.

        Raises:
            CheckpointError: ``target`` is something that shall not be replaced.  OSError: it cannot be written there.
        """
        if lstat(self.target.parent) is not None:
            with Folder(self.target.parent) as parent, self._earlier(parent):
                pass
        make_folders(self.target.parent)
        self._parent = Folder(self.target.parent)
        os.mkdir(self._name, 0o700, dir_fd=self._parent.fd)
        self._made = Folder(self._name, self._parent)
        working.add(self.token)
        self._made.create(f"saving-{self.token}", Owner.here().page())
        _recover(self._parent, self.target.name, self.kind)

    @property
    def path(self) -> Path:
        """The folder, whatever it is called now, for the first rank to have other files written into it."""
        assert self._made is not None, "open() comes first"
        return self._made.path

    @contextmanager
    def files(self) -> Iterator[Path]:
        """The folder as this rank finds it; every rank.

        Raises:
            CheckpointError: the folder that the first rank made is not here.
        """
        with made_by_first(self.target, self._name, f"saving-{self.token}", "export") as fd:
            yield Path(f"/proc/self/fd/{fd}")

    def commit(self, sizes: dict[str, int]) -> None:
        """Put the folder in place of ``target``; one rank only, when the files of ``sizes`` are durable on all.

        Raises:
            CheckpointError: a file is not here as its writer says.  OSError: nothing was committed.
        """
        assert self._parent is not None and self._made is not None, "open() comes first"
        for name, nbytes in sizes.items():
            found = self._made.size(name)
            if found != nbytes:
                raise CheckpointError(
                    f"Cannot export {self.target}. Expected {name} with {nbytes} bytes, found "
                    f"{'no such file' if found is None else f'{found} bytes'}. Export into a file system that all hosts share."
                )
        _sync_tree(self._made)
        with self._earlier(self._parent) as earlier:
            self._put_in_place(self._parent, self._made, earlier)
            self._parent.sync()
            if earlier is not None and earlier.names():
                _retire(self._parent, self._name, earlier, self._made, self.kind)
            with suppress(OSError):
                os.unlink(f"saving-{self.token}", dir_fd=self._made.fd)

    def _put_in_place(self, parent: Folder, made: Folder, earlier: Folder | None) -> None:
        if not parent.holds(made, self._name):
            raise CheckpointError(
                f"Cannot export {self.target}. Expected the folder {self._name} that this export made, found something else in "
                "its place. Choose a path where nobody else renames folders."
            )
        if earlier is None or not earlier.names():
            parent.rename(self._name, self.target.name)
        elif not renameat2(parent.fd, self._name, parent.fd, self.target.name, EXCHANGE):
            raise CheckpointError(
                f"Cannot export {self.target}. Expected no such path, found a folder, and a file system that cannot exchange "
                "two folders in one step. Export to a path that does not exist."
            )

    @contextmanager
    def _earlier(self, parent: Folder) -> Iterator[Folder | None]:
        """What ``target`` is now, where this export may take its place: empty, or a folder of this kind and user."""
        name = self.target.name
        if parent.entry(name) is None:
            yield None
            return
        found = parent.folder(name)
        if found is None:
            raise self._not_replaceable("something else than a folder")
        with found:
            self._check_earlier(found)
            yield found

    def _check_earlier(self, found: Folder) -> None:
        names = found.names()
        other = sorted(self.kind.never.intersection(names))
        if names and (found.size(self.kind.mark) is None or other):
            what = f"one with {other[0]}" if other else f"one without {self.kind.mark}"
            raise self._not_replaceable(what)
        inside = [each for each in sorted(names) if found.size(each) is None and each not in self.kind.folders]
        if inside:
            raise self._not_replaceable(f"one that holds {inside[0]}, which is not a file")
        if names and found.status.st_uid != os.geteuid():
            raise self._not_replaceable(f"that of another user (uid {found.status.st_uid})")

    def _not_replaceable(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"Cannot export {self.target}. Expected no such path, an empty folder, or an earlier one of the same kind (with "
            f"{self.kind.mark}), found {what}. Choose another path."
        )

    def discard(self) -> None:
        """Remove what was written; nothing was committed."""
        if self._parent is not None and self._made is not None and self._parent.holds(self._made, self._name):
            shutil.rmtree(self._name, ignore_errors=True, dir_fd=self._parent.fd)

    def close(self) -> None:
        """Let go of the folders; idempotent."""
        for folder in (self._parent, self._made):
            if folder is not None:
                folder.close()
        self._parent = self._made = None
        working.discard(self.token)


class WholeFile:
    """A new safetensors file whose tensors are written in any order, and a tensor's elements in any runs.

    Raises:
        OSError: from any call.
        CheckpointError: a dtype the format does not know.
    """

    def __init__(self, folder: Path, name: str, entries: Sequence[Entry]) -> None:
        self.name = name
        raw = header(entries)
        self._starts: dict[str, int] = {}
        self._left = {entry.name: entry.nbytes for entry in entries}
        self.nbytes = len(raw)
        for entry in entries:
            self._starts[entry.name] = self.nbytes
            self.nbytes += entry.nbytes
        self._fd = create(folder / name)
        try:
            # All of the space now, or none: a full disk is found before the model was gathered once.
            with _where_supported():
                os.posix_fallocate(self._fd, 0, self.nbytes)
            self._put(memoryview(raw), 0)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Elements of ``values``, in order, from element ``start`` of the tensor on."""
        offset = self._starts[name] + start * values.element_size()
        for block in blocks(values):
            self._put(block.data, offset)
            offset += block.size
            self._left[name] -= block.size

    def finish(self) -> None:
        """Everything is on the disk."""
        left = [name for name, nbytes in self._left.items() if nbytes]
        assert not left, f"{self.name}: announced and not written: {left[:3]}"
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _put(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)


@contextmanager
def _where_supported() -> Iterator[None]:
    """Some file systems cannot do it, which changes nothing but when a full disk is found."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def _sync_tree(folder: Folder) -> None:
    """What other libraries wrote into the folder, and the folders in it."""
    for root, _, names in os.walk(folder.path):
        for name in names:
            fd = os.open(os.path.join(root, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        if root != str(folder.path):
            with Folder(root) as inner:
                inner.sync()
    folder.sync()


def _retire(parent: Folder, name: str, folder: Folder, heir: Folder, kind: ExportKind) -> None:
    """Remove an earlier folder that ``heir`` has replaced; what else the user put into it goes there, over nothing."""
    if not parent.holds(folder, name):
        return
    new = frozenset(heir.names())
    with suppress(OSError):
        # The mark of its kind last: what is half removed still is one of these.
        for each in sorted(folder.names(), key=lambda each: (each == kind.mark, each)):
            status = folder.entry(each)
            ours = kind.weights.fullmatch(each) or _MARK.fullmatch(each)
            if each not in new and not ours and each != kind.mark:
                with suppress(OSError):
                    if not renameat2(folder.fd, each, heir.fd, each, RENAME_NOREPLACE):
                        os.rename(each, each, src_dir_fd=folder.fd, dst_dir_fd=heir.fd)
            elif status is not None and stat.S_ISDIR(status.st_mode):
                shutil.rmtree(each, ignore_errors=True, dir_fd=folder.fd)
            else:
                os.unlink(each, dir_fd=folder.fd)
        os.rmdir(name, dir_fd=parent.fd)


def _recover(parent: Folder, name: str, kind: ExportKind) -> None:
    """See Note [Exports]."""
    pattern = re.compile(re.escape(name) + r"\.exporting-([0-9a-f]{16})")
    for each in parent.names():
        found = pattern.fullmatch(each)
        folder = parent.folder(each) if found is not None and found[1] not in working else None
        if folder is None or found is None:
            continue
        with folder, suppress(OSError):
            if folder.status.st_uid != os.geteuid():
                continue
            mark = f"saving-{found[1]}"
            if _is_over(folder, mark):
                shutil.rmtree(each, ignore_errors=True, dir_fd=parent.fd)
                continue
            heir = parent.folder(name)
            if heir is not None:
                with heir:
                    if folder.size(mark) is None and _is_over(heir, mark):
                        _retire(parent, each, folder, heir, kind)
                        os.unlink(mark, dir_fd=heir.fd)


def _is_over(folder: Folder, mark: str) -> bool:
    """The export that made this mark in the folder certainly does not run any more."""
    raw = folder.read(mark, ALIGN)
    owner = None if raw is None or len(raw) != ALIGN else Owner.of_page(raw)
    return owner is not None and (owner == Owner.here() or owner.is_over())
