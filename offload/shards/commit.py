"""How a checkpoint is committed: the folder it is written in, and the renames that make it appear whole or not at all.

The first rank makes the folder, writes the manifest last and commits; a loader asks which folder to read.  It never
communicates and never looks inside a shard file.

Note: [Renames]
    A save writes ``NAME.tmp-TOKEN``.  When it is complete and synced it changes places with an earlier ``NAME`` in one call,
    and the old one is removed.  Where the file system cannot exchange, ``NAME`` is renamed to ``NAME.old-TOKEN`` and the new
    folder to ``NAME``; between the two ``NAME`` is missing, and ``NAME.old-TOKEN`` beside a complete ``NAME.tmp-TOKEN`` says
    so: a loader reads the new one.  Whatever is left is tidied by the next save.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from offload.disk import Owner
from offload.errors import CheckpointError
from offload.private_files import make_folders
from offload.regular_files import planted_link
from offload.shards.file import Record
from offload.shards.folder import EXCHANGE, OURS, Folder, lstat, made_by_first, renameat2, retire
from offload.shards.leftovers import recover, standing, strangers_of, working
from offload.shards.manifest import MANIFEST, MANIFEST_MOST, Manifest, encoded, shard_name
from offload.text import counted, shown, shown_path

__all__ = ["Draft", "destination", "find", "refuse_occupied"]

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
    target = Path(text)
    try:
        planted = planted_link(target)
        place = target.resolve()
    except (OSError, RuntimeError) as error:
        # As what pathlib raises a loop depends on the version of Python.
        if isinstance(error, OSError) and error.errno != errno.ELOOP:
            raise
        found = f"Cannot {verb} {shown_path(text)}. Expected a path, found a loop of links. Remove it."
        raise CheckpointError(found) from None
    if planted:
        raise CheckpointError(
            f"Cannot {verb} {shown_path(text)}. Expected a {what} or a link of your own, found {planted}. Name the {what} "
            "itself."
        )
    if not 0 < len(os.fsencode(place.name)) <= _NAME_MOST:
        raise CheckpointError(
            f"Cannot {verb} {shown_path(text)}. Expected a {what} whose name has 1 to {_NAME_MOST} bytes, found "
            f"{len(os.fsencode(place.name))}. Choose another path."
        )
    return place


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
    """A checkpoint being written beside ``target``; every rank holds one of the same token.

    Args:
        target: where the checkpoint shall be, from `destination`.
        token: 16 hexadecimal digits no other save uses.
    Attributes:
        opened_ns: when it was begun, by the clock of its file system; of the rank that opened it.
    """

    def __init__(self, target: Path, token: str) -> None:
        self.target, self.token = target, token
        self._name = f"{target.name}.tmp-{token}"
        self._old = f"{target.name}.old-{token}"
        self._parent: Folder | None = None
        self._made: Folder | None = None
        self.opened_ns = 0

    def open(self) -> None:
        """Tidy what killed saves left and make the folder; one rank only.

        Raises:
            CheckpointError: ``target`` is something else than a checkpoint.  OSError: it cannot be written there.
        """
        if lstat(self.target.parent) is not None:
            with Folder(self.target.parent) as parent, self._earlier(parent, None):
                pass
        make_folders(self.target.parent)
        self._parent = Folder(self.target.parent)
        working.add(self.token)
        self._made = self._marked(self._parent)
        self.opened_ns = os.fstat(self._made.fd).st_mtime_ns
        recover(self._parent, self.target.name, self._made)
        with self._earlier(self._parent, self._made):
            pass

    def _marked(self, parent: Folder) -> Folder:
        """A new folder with the file that says who works in it."""
        while True:
            os.mkdir(self._name, 0o700, dir_fd=parent.fd)
            # Another save to this path may take the empty folder for what a killed one left.
            with suppress(FileNotFoundError), ExitStack() as undo:
                made = undo.enter_context(Folder(self._name, parent))
                made.create(f"saving-{self.token}", Owner.here().page())
                undo.pop_all()
                return made

    @contextmanager
    def files(self) -> Iterator[int]:
        """The folder's descriptor, for this rank to make its file in; every rank.

        Raises:
            CheckpointError: the folder that the first rank made is not here.
        """
        with made_by_first(self.target, self._name, f"saving-{self.token}", "save") as fd:
            yield fd

    def folder(self) -> Folder:
        """The folder itself, for a rank that writes beside training; every rank.  Raises as ``files``."""
        with self.files() as fd:
            return Folder(f"/proc/self/fd/{fd}")

    def path(self, name: str) -> Path:
        """Where a file of the folder is while the save works, for errors."""
        return self.target.with_name(self._name) / name

    def commit(self, about: Mapping[str, Any], files: Sequence[Record]) -> None:
        """Write the manifest and put the folder in place of ``target``; one rank only, when all files are durable.

        Raises:
            CheckpointError: a file is not here as its writer says.  OSError: nothing was committed.
        """
        assert self._parent is not None and self._made is not None, "open() comes first"
        for record in files:
            self._check_visible(record, self._made)
        manifest = Manifest(
            format="zhooks sharded checkpoint", version=1, token=self.token, world=len(files), about=dict(about),
            files=list(files),
        )
        raw = encoded(manifest)
        if len(raw) > MANIFEST_MOST:
            raise CheckpointError(
                f"Cannot save {self.target}. Expected a manifest of at most {MANIFEST_MOST} bytes, found {len(raw)} for "
                f"{counted(len(files), 'rank')}. Attach with fewer units (a larger [units] min_numel), or save from "
                "fewer ranks."
            )
        self._made.create(MANIFEST, raw)
        self._made.sync()
        while not self._committed(self._parent, self._made):
            # Another save has put its checkpoint there since this one looked: that is the earlier one now.
            pass

    def _committed(self, parent: Folder, made: Folder) -> bool:
        with self._earlier(parent, made) as earlier:
            left = self._put_in_place(parent, made, earlier)
            if left is None:
                return False
            parent.sync()
            with suppress(OSError):
                os.unlink(f"saving-{self.token}", dir_fd=made.fd)
            if earlier is not None:
                retire(parent, left, earlier, made)
        return True

    def _put_in_place(self, parent: Folder, made: Folder, earlier: Folder | None) -> str | None:
        """See Note [Renames]; returns what the earlier checkpoint is called now, if there was one.  None: there is another."""
        name = self.target.name
        if not parent.holds(made, self._name):
            raise CheckpointError(
                f"Cannot save {self.target}. Expected the folder {self._name} that this save made, found something else in its "
                "place. Choose a path where nobody else renames folders."
            )
        if earlier is None or not earlier.names():
            try:
                parent.rename(self._name, name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return None
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
    def _earlier(self, parent: Folder, made: Folder | None) -> Iterator[Folder | None]:
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
            f"Cannot save {self.target}. Expected no such path, an empty folder or an earlier checkpoint, found {what}. Choose "
            "another path."
        )

    def _check_visible(self, record: Record, made: Folder) -> None:
        found = made.size(record.name)
        if found != record.nbytes:
            raise CheckpointError(
                f"Cannot save {self.target}. Expected {record.name} with {record.nbytes} bytes next to the first rank's file, "
                f"found {'no such file' if found is None else f'{found} bytes'}. Save into a file system that all hosts share."
            )

    def discard(self) -> None:
        """Remove what was written; nothing was committed."""
        if self._parent is not None and self._made is not None:
            retire(self._parent, self._name, self._made, None)

    def close(self) -> None:
        """Let go of the folders; idempotent."""
        for folder in (self._parent, self._made):
            if folder is not None:
                folder.close()
        self._parent = self._made = None
        working.discard(self.token)


def _exchange(parent_fd: int, one: str, other: str) -> bool:
    """Let two folders of one folder change places in one step; False where this system cannot."""
    return renameat2(parent_fd, one, parent_fd, other, EXCHANGE)


def find(target: Path) -> Path:
    """The folder that holds the checkpoint ``target``: itself, or what a kill between two renames left.

    Raises:
        CheckpointError: there is none.
    """
    if (target / MANIFEST).exists():
        return target
    stranger: int | None = None
    if not _has_foreign(target) and target.parent.is_dir():
        with Folder(target.parent) as parent:
            name = standing(parent, target.name)
            stranger = next(strangers_of(parent, target.name), None)
        if name is not None:
            return target.with_name(name)
    if (target / ".metadata").exists():
        raise CheckpointError(
            f"Cannot load {target}. Expected a checkpoint that attachment.save() wrote, found one of "
            "torch.distributed.checkpoint (as FSDP2's are saved). Load it with dcp.load and get_state_dict of the attached "
            "model."
        )
    what = "a folder without a manifest" if target.is_dir() else "a file" if target.exists() else "nothing there"
    if stranger is not None:
        what += f" but what another user (uid {stranger}) left beside it, in a folder that everybody can write to"
    raise CheckpointError(
        f"Cannot load {target}. Expected a checkpoint that attachment.save() wrote, found {what}. Check the path; a save that "
        "was killed before its commit leaves none."
    )


def _has_foreign(target: Path) -> bool:
    return target.exists() and not (target.is_dir() and all(OURS.fullmatch(path.name) for path in target.iterdir()))


def _replaceable(folder: Folder) -> bool:
    """Empty, or a checkpoint, damaged or not: anybody may call a file manifest.json."""
    names = folder.names()
    if not names:
        return True
    return folder.size(MANIFEST) is not None and (folder.size(shard_name(0)) is not None or folder.token() is not None)
