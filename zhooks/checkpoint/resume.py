"""Which of the checkpoints that a job left is the newest: in the memory of peers, or in folders; loaded, and said where it was.

``resilience/peers.py`` calls ``resume`` for the Attachment's method.  An older one is never taken without a warning that says
why; it never writes a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import CheckpointError
from offload.shards import destination, find, latest, read_manifest, run_of, saved_ns
from offload.user_warnings import warn_user
from zhooks.checkpoint.peer_files import brought
from zhooks.checkpoint.peer_memory import Generation, PeerMemory
from zhooks.checkpoint.save_load import load
from zhooks.checkpoint.shard_contents import RunState
from zhooks.comm import ControlPlane

__all__ = ["Resumed", "resume"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """What was loaded.

    Attributes:
        run: whose checkpoints later ones may replace.
        newest_ns: when the newest was saved that was found.
    """

    extra: dict[str, Any]
    run: str
    newest_ns: int


@dataclass(frozen=True, slots=True)
class _Saved:
    """A complete checkpoint in one of the folders that were given: by its number, and its name there, if it has one."""

    saved_ns: int
    number: int
    name: str


def resume(
    run: RunState, memory: PeerMemory | None, folders: Sequence[str | os.PathLike[str]], ranks: ControlPlane
) -> Resumed | None:
    """Load the newest of what is there; None where nothing is.  Collective.

    Raises:
        CheckpointError: on every rank: a checkpoint in a folder is damaged, or the newest is of another model.
    """
    found = ranks.on_first(lambda: [list(one) for one in _in_folders(folders)])
    sources: list[Generation | _Saved] = [_Saved(*one) for one in found]
    sources += [] if memory is None else memory.generations(ranks)
    # Later saves are newer than all that was seen, what is passed over here too: clocks of hosts differ.
    newest = max((each.saved_ns for each in sources), default=0)
    # Of two of one moment the one in memory, which is read faster.
    for source in sorted(sources, key=lambda one: (one.saved_ns, isinstance(one, Generation)), reverse=True):
        if isinstance(source, _Saved):
            return _from_folder(run, source, folders, ranks, newest)
        assert memory is not None
        resumed = _from_memory(run, memory, source, ranks, newest)
        if resumed is not None:
            return resumed
    return None


def _in_folders(folders: Sequence[str | os.PathLike[str]]) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    for number, folder in enumerate(folders):
        target = destination(folder, "resume")
        name = ""
        if not _holds(target):
            newest = latest(target)
            if newest is None:
                continue
            target, name = newest, newest.name
        found.append((saved_ns(read_manifest(find(target))), number, name))
    return found


def _holds(target: Path) -> bool:
    with suppress(CheckpointError):
        return bool(find(target))
    return False


def _from_folder(
    run: RunState, source: _Saved, folders: Sequence[str | os.PathLike[str]], ranks: ControlPlane, newest_ns: int
) -> Resumed:
    def here() -> Path:
        place = destination(folders[source.number], "resume")
        return place / source.name if source.name else place

    target = ranks.run(here)
    extra = load(run, target)
    run.bus.instant("resume", source.name or target.name)
    return Resumed(extra, ranks.on_first(lambda: run_of(target) or ""), newest_ns)


def _from_memory(
    run: RunState, memory: PeerMemory, source: Generation, ranks: ControlPlane, newest_ns: int
) -> Resumed | None:
    missing = [rank for rank in range(source.world) if rank not in source.holders]
    if not missing:
        with brought(run, memory, source, ranks) as found:
            if found is not None:
                extra = load(run, found.folder, found.present)
                memory.last = source.token
                run.bus.instant("resume", "memory of peers", sum(record.nbytes for record in found.manifest.files))
                return Resumed(extra, str(found.manifest.about["run"]), newest_ns)
    run.bus.instant("resume skipped", "memory of peers")
    why = f"no host has the file of rank {missing[0]}" if missing else "every copy of a file is damaged"
    warn_user(
        f"resume expected a complete checkpoint in the memory of peers, found that {why}: the newest older one is loaded. "
        "Raise [resilience] copies.",
        RuntimeWarning,
    )
    return None


