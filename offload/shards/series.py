"""The checkpoints of one folder: which is the newest, and which the oldest ones of a series are, to be removed.

Users ask for the newest before a load, the saver removes what is older than those to keep.  Everything is read from manifests;
no file points at a checkpoint.

Note: [What is removed]
    A checkpoint goes only after a newer one was committed, and only if it is this user's real folder, its manifest says that it
    was saved to be replaced (``keep``) by the same run, its name differs from the new one's in the last number alone, and
    nothing but files of ours lies in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload.errors import CheckpointError
from offload.regular_files import strangers
from offload.shards.commit import destination, find
from offload.shards.folder import Folder, says_nothing
from offload.shards.leftovers import names_like
from offload.shards.manifest import Manifest, read_manifest
from offload.shards.replaceable import CHECKPOINT, OURS, retire
from offload.text import shown_path

__all__ = ["Series", "latest", "run_of", "saved_ns", "when_saved"]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete checkpoint in ``folder``, by the time of its save in its manifest.

    Every rank calls it, on a file system they share; ``load`` refuses ranks that found different ones.  In a folder that
    everybody can write to (/tmp), only checkpoints of this user and of the folder's owner count.

    Args:
        folder: a folder that holds checkpoints.
    Returns:
        The path of the checkpoint; None if there is none.
    Raises:
        CheckpointError: ``folder`` is a file, or not a path.  OSError: it cannot be looked into.
    """
    place = destination(folder, "latest")
    if not place.exists():
        return None
    if not place.is_dir():
        raise CheckpointError(
            f"Cannot search {shown_path(folder)}. Expected a folder of checkpoints, found a file. Name the folder that holds "
            "them."
        )
    with Folder(place) as parent:
        names = {match[1] if (match := CHECKPOINT.draft_name.fullmatch(name)) else name for name in parent.names()}
        found = [(saved_ns(manifest), _natural(name), name) for name in names if (manifest := _whole(parent, place / name))]
    return place / max(found)[2] if found else None


def _whole(parent: Folder, target: Path) -> Manifest | None:
    """The manifest of the complete checkpoint that ``target`` is, or that a killed save of it left; None of a stranger's."""
    try:
        inside = parent.folder(find(target).name)
        if inside is not None:
            with inside:
                manifest = None if strangers(parent.status, inside.status) else inside.manifest()
                return manifest if manifest is not None and inside.whole(manifest) else None
    except (CheckpointError, OSError) as error:
        if says_nothing(error):
            raise
    return None


def saved_ns(manifest: Manifest) -> int:
    """When its state was taken, in nanoseconds; those of releases that did not say come first."""
    saved = manifest.about.get("saved_ns")
    return saved if type(saved) is int else 0


def _natural(name: str) -> list[tuple[int, str]]:
    """step-9 before step-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


@dataclass(frozen=True, slots=True)
class Series:
    """The checkpoints that one run saves to be replaced by later ones.

    Attributes:
        run: 16 hexadecimal digits of the run; a run that was resumed goes on with those it loaded.
        keep: how many stay, the newest among them; None: what is saved now stays until somebody removes it.
        after_ns: when the last one before was saved, as far as the run knows.
    """

    run: str
    keep: int | None
    after_ns: int = 0

    def check(self, target: Path) -> None:
        """
        Raises:
            CheckpointError: ``target`` cannot be one of several.
        """
        if self.keep is not None and names_like(target.name) is None:
            raise CheckpointError(
                f"Cannot save {shown_path(target)}. Expected a name with a number, which distinguishes checkpoints when keep "
                f"is given, found {target.name}. Save to e.g. runs/step-100."
            )

    def about(self, target: Path, taken_ns: int) -> dict[str, object]:
        """What the manifest of the one that is committed to ``target`` says; its state is of ``taken_ns``, by the file system's
        clock."""
        newest = max((saved_ns(each.manifest) for each in self._older(target)), default=0)
        # A clock that was put back must not make the newest the oldest.
        return {"saved_ns": max(taken_ns, newest + 1, self.after_ns + 1), "run": self.run, "replaceable": self.keep is not None}

    def remove_older(self, target: Path) -> list[tuple[str, int]]:
        """Remove what is older than the newest ``keep``, once ``target`` is committed; the names and bytes of what went."""
        removed, kept = [], 1
        for each in sorted(self._older(target), key=lambda each: saved_ns(each.manifest), reverse=True):
            if self.keep is None or kept < self.keep:
                kept += each.complete
                continue
            with suppress(OSError), Folder(target.parent) as parent:
                folder = parent.folder(each.name)
                if folder is None:
                    continue
                with folder:
                    token = each.manifest.token
                    if folder.token() != token:
                        continue
                    # By a name that the next save knows as ours even when a kill leaves an empty folder.
                    going = f"{each.name}.old-{token}"
                    parent.rename(each.name, going)
                    retire(parent, going, folder, None, CHECKPOINT)
                    if parent.holds(folder, going):
                        # Somebody has put a file there since.
                        parent.rename(going, each.name)
                    removed.append((each.name, sum(record.nbytes for record in each.manifest.files)))
        return removed

    def _older(self, target: Path) -> Iterator[_Member]:
        """The others of the series; see Note [What is removed]."""
        alike = names_like(target.name)
        if self.keep is None or alike is None or not target.parent.is_dir():
            return
        with Folder(target.parent) as parent:
            for name in parent.names():
                member = self._member(parent, name) if name != target.name and alike.fullmatch(name) else None
                if member is not None:
                    yield member

    def _member(self, parent: Folder, name: str) -> _Member | None:
        with suppress(OSError, CheckpointError):
            folder = parent.folder(name)
            if folder is None:
                return None
            with folder:
                manifest = folder.manifest()
                ours = folder.status.st_uid == os.geteuid() and all(
                    OURS.fullmatch(each) and folder.size(each) is not None for each in folder.names()
                )
                if manifest is None or not ours:
                    return None
                if manifest.about.get("run") != self.run or manifest.about.get("replaceable") is not True:
                    return None
                return _Member(name, manifest, folder.whole(manifest))
        return None


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    manifest: Manifest
    complete: bool


def run_of(target: Path) -> str | None:
    """The run that saved the checkpoint at ``target``, where it says."""
    with suppress(CheckpointError, OSError):
        run = read_manifest(find(target)).about.get("run")
        return run if isinstance(run, str) and re.fullmatch("[0-9a-f]{16}", run) else None
    return None


def when_saved(target: Path) -> int:
    """`saved_ns` of the checkpoint at ``target``; 0 where it does not say."""
    with suppress(CheckpointError, OSError):
        return saved_ns(read_manifest(find(target)))
    return 0
