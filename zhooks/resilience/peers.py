"""What a run keeps in the memory of its ranks' hosts, and how a job that was started again goes on: for the methods
``save_to_peers`` and ``resume`` of an ``Attachment``.

The memory is opened when it is first asked for, and given back at ``detach``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offload.errors import CapabilityError, CheckpointError
from offload.shards import check_memory, destination, find, latest, read_manifest, run_of, saved_ns
from offload.text import shown
from offload.user_warnings import warn_user
from zhooks import checkpoint
from zhooks.checkpoint import RunState
from zhooks.comm import ControlPlane
from zhooks.resilience.peer_files import brought
from zhooks.resilience.peer_memory import Generation, PeerMemory
from zhooks.session import Given, Session, finish_saving, name_run, run_to_load, run_to_save

__all__ = ["resume_run", "save_run_to_peers"]


def save_run_to_peers(
    session: Session, optimizer: Given, objects: Mapping[str, Any] | None, extra: Mapping[str, Any] | None
) -> None:
    """See ``Attachment.save_to_peers``.  Collective."""
    with session.verb("save_to_peers"):
        ranks = ControlPlane(session.comm.stage, "save_to_peers", "")
        run = run_to_save(session, ranks, "save_to_peers", optimizer, objects, extra)
        peers = _opened(session, ranks)
        name_run(session, ranks)
        session.newest_ns = peers.save(run, extra or {}, session.run, session.newest_ns)


def resume_run(
    session: Session, folders: str | Path | Sequence[str | Path], optimizer: Given, objects: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """See ``Attachment.resume``.  Collective."""
    with session.verb("resume", whole=False):
        finish_saving(session, "resume")
        session.runtime.due()
        ranks = ControlPlane(session.comm.stage, "resume", "")
        given = ranks.run(lambda: _listed(folders))
        run = run_to_load(session, ranks, "resume", optimizer, objects)
        with session.steps.changing("resume"):
            peers = _opened(session, ranks) if _has_memory(session, ranks) else None
            found = _resume(run, peers, given, ranks)
        if found is None:
            session.check_whole("resume")
            return None
        session.loaded()
        session.run, session.newest_ns = found.run, max(session.newest_ns, found.newest_ns)
        for each in run.optimizers:
            session.optimizers.admit(each)
        return found.extra


def _opened(session: Session, ranks: ControlPlane) -> PeerMemory:
    """The job's memory; opened anew where a host has lost it, or ``apply`` has brought another policy of it."""
    peers = session.peers
    if peers is not None and not peers.serves(session.policy):
        session.peers = None
        ranks.run(lambda: peers.close(over=False))
    if session.peers is None:
        session.peers = PeerMemory.open(session.comm, session.policy, session.tiers.store, session.bus, ranks)
        assert session.undo is not None
        session.undo.callback(_leave, session)
    return session.peers


def _leave(session: Session) -> None:
    """The end of the attachment: of the job, too, unless it ends by an error, after which it may be started again."""
    peers, session.peers = session.peers, None
    if peers is not None:
        peers.close(over=sys.exc_info()[0] is None)


def _has_memory(session: Session, ranks: ControlPlane) -> bool:
    """Where ranks have no job or no tmpfs nobody can have kept anything; where some have, the others are refused."""
    wanted = session.policy.resilience

    def has() -> bool:
        try:
            check_memory(Path(wanted.memory).expanduser(), wanted.job)
        except CapabilityError:
            return False
        return True

    # Stages of a pipeline would have to agree; they are refused where the memory is opened.
    return not ranks.agree(f"{ranks.run(has)}") or has()


def _listed(folders: Any) -> list[str | os.PathLike[str]]:
    given = [folders] if isinstance(folders, (str, os.PathLike)) else folders
    if not isinstance(given, (list, tuple)):
        raise CheckpointError(f"resume expected folders, found {shown(folders)}. Name them in a list.")
    return list(given)


@dataclass(frozen=True, slots=True)
class _Resumed:
    """What was loaded.

    Attributes:
        run: whose checkpoints later ones may replace.
        newest_ns: when the newest was saved that was found.
    """

    extra: dict[str, Any]
    run: str
    newest_ns: int


@dataclass(frozen=True, slots=True)
class _InFolder:
    """A complete checkpoint in one of the folders that were given: by its number, and its name there, if it has one."""

    saved_ns: int
    number: int
    name: str


def _resume(
    run: RunState, memory: PeerMemory | None, folders: Sequence[str | os.PathLike[str]], ranks: ControlPlane
) -> _Resumed | None:
    """Load the newest of what is there; None where nothing is.  Collective."""
    found = ranks.on_first(lambda: _in_folders(folders))
    sources: list[Generation | _InFolder] = [_InFolder(*one) for one in found]
    sources += [] if memory is None else memory.generations(ranks)
    # Later saves are newer than all that was seen, what is passed over here too: clocks of hosts differ.
    newest_ns = max((each.saved_ns for each in sources), default=0)
    # Of two of one moment the one in memory, which is read faster.
    for source in sorted(sources, key=lambda one: (one.saved_ns, isinstance(one, Generation)), reverse=True):
        if isinstance(source, _InFolder):

            def target(source: _InFolder = source) -> Path:
                return destination(folders[source.number], "resume") / source.name

            folder = ranks.run(target)
            extra = checkpoint.load(run, folder)
            run.bus.instant("resume", folder.name)
            return _Resumed(extra, ranks.on_first(partial(_run_of, folder)), newest_ns)
        assert memory is not None
        if (resumed := _from_memory(run, memory, source, ranks, newest_ns)) is not None:
            return resumed
    return None


def _run_of(folder: Path) -> str:
    return run_of(folder) or ""


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


def _from_memory(
    run: RunState, memory: PeerMemory, source: Generation, ranks: ControlPlane, newest_ns: int
) -> _Resumed | None:
    missing = [rank for rank in range(source.world) if rank not in source.holders]
    if not missing:
        with brought(run, memory, source, ranks) as found:
            if found is not None:
                extra = checkpoint.load(run, found.folder, found.present)
                memory.last = source.token
                run.bus.instant("resume", "memory of peers", sum(record.nbytes for record in found.manifest.files))
                return _Resumed(extra, str(found.manifest.about["run"]), newest_ns)
    run.bus.instant("resume skipped", "memory of peers")
    why = f"no host has the file of rank {missing[0]}" if missing else "every copy of a file is damaged"
    warn_user(
        f"resume expected a complete checkpoint in the memory of peers, found that {why}: the newest older one is loaded. "
        "Raise [resilience] copies.",
        RuntimeWarning,
    )
    return None
