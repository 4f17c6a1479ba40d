"""The checkpoints of a folder: where one lies, which is the newest, and which of a series are too many.

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
from offload.shards.commit import destination
from offload.shards.folder import Folder, says_nothing
from offload.shards.leftovers import CHECKPOINT, OURS, leftovers, names_like, retire, standing
from offload.shards.manifest import MANIFEST, Manifest, read_manifest
from offload.text import shown_path

__all__ = ["Series", "find", "latest", "run_of", "saved_ns", "when_saved"]


def find(target: Path) -> Path:
    """The folder that holds the checkpoint ``target``: itself, or what a kill between two renames left.

    Raises:
        CheckpointError: there is none.
    """
    if (target / MANIFEST).exists():
        return target
    what = "a folder without a manifest" if target.is_dir() else "a file" if target.exists() else "nothing there"
    foreign = target.exists() and not (target.is_dir() and all(OURS.fullmatch(path.name) for path in target.iterdir()))
    if not foreign and target.parent.is_dir():
        with Folder(target.parent) as parent:
            found = standing(parent, target.name)
            made = [each.stranger for each in leftovers(parent, CHECKPOINT) if each.target == target.name]
        if found is not None:
            return target.with_name(found.name)
        stranger = next((uid for uid in made if uid is not None), None)
        if stranger is not None:
            what += f" but what another user (uid {stranger}) left beside it, in a folder that everybody can write to"
    if (target / ".metadata").exists():
        raise CheckpointError(
            f"Cannot load {target}. Expected a checkpoint that attachment.save() wrote, found one of "
            "torch.distributed.checkpoint (as FSDP2's are saved). Load it with dcp.load and get_state_dict of the attached "
            "model."
        )
    raise CheckpointError(
        f"Cannot load {target}. Expected a checkpoint that attachment.save() wrote, found {what}. Check the path; a save that "
        "was killed before its commit leaves none."
    )


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


def _natural(name: str) -> list[tuple[int, str]]:
    """step-9 before step-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def saved_ns(manifest: Manifest) -> int:
    """When its state was taken, in nanoseconds; those of releases that did not say come first."""
    saved = manifest.about.get("saved_ns")
    return saved if type(saved) is int else 0


def when_saved(target: Path) -> int:
    """`saved_ns` of the checkpoint at ``target``; 0 where it does not say."""
    with suppress(CheckpointError, OSError):
        return saved_ns(read_manifest(find(target)))
    return 0


def run_of(target: Path) -> str | None:
    """The run that saved the checkpoint at ``target``, where it says."""
    with suppress(CheckpointError, OSError):
        run = read_manifest(find(target)).about.get("run")
        return run if isinstance(run, str) and re.fullmatch("[0-9a-f]{16}", run) else None
    return None


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
        newest = max((saved_ns(manifest) for _, manifest, _ in self._older(target)), default=0)
        # A clock that was put back must not make the newest the oldest.
        return {"saved_ns": max(taken_ns, newest + 1, self.after_ns + 1), "run": self.run, "replaceable": self.keep is not None}

    def remove_older(self, target: Path) -> list[tuple[str, int]]:
        """Remove what is older than the newest ``keep``, once ``target`` is committed; the names and bytes of what went."""
        removed, kept = [], 1
        for name, manifest, complete in sorted(self._older(target), key=lambda each: saved_ns(each[1]), reverse=True):
            if self.keep is None or kept < self.keep:
                kept += complete
                continue
            with suppress(OSError), Folder(target.parent) as parent:
                folder = parent.folder(name)
                if folder is None:
                    continue
                with folder:
                    if folder.token() != manifest.token:
                        continue
                    # By a name that the next save knows as ours even when a kill leaves an empty folder.
                    going = f"{name}.old-{manifest.token}"
                    parent.rename(name, going)
                    retire(parent, going, folder, None, CHECKPOINT)
                    if parent.holds(folder, going):
                        # Somebody has put a file there since.
                        parent.rename(going, name)
                    removed.append((name, sum(record.nbytes for record in manifest.files)))
        return removed

    def _older(self, target: Path) -> Iterator[tuple[str, Manifest, bool]]:
        """The others of the series, and whether each is complete; see Note [What is removed]."""
        alike = names_like(target.name)
        if self.keep is None or alike is None or not target.parent.is_dir():
            return
        with Folder(target.parent) as parent:
            for name in parent.names():
                if name == target.name or not alike.fullmatch(name):
                    continue
                found = None
                with suppress(OSError, CheckpointError):
                    found = self._replaceable(parent, name)
                if found is not None:
                    yield name, *found

    def _replaceable(self, parent: Folder, name: str) -> tuple[Manifest, bool] | None:
        folder = parent.folder(name)
        if folder is None:
            return None
        with folder:
            manifest = folder.manifest()
            if manifest is None or folder.status.st_uid != os.geteuid():
                return None
            if not all(OURS.fullmatch(each) and folder.size(each) is not None for each in folder.names()):
                return None
            ours = manifest.about.get("run") == self.run and manifest.about.get("replaceable") is True
            return (manifest, folder.whole(manifest)) if ours else None
