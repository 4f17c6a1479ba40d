"""What a run keeps in the memory of its ranks' hosts, and how a job that was started again goes on.

The methods ``save_to_peers`` and ``resume`` of an ``Attachment`` import it.  The memory is opened when it is first asked for,
and given back at ``detach``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.errors import CapabilityError, CheckpointError
from offload.text import shown
from zhooks import checkpoint
from zhooks.comm import ControlPlane
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
        session.newest_ns = checkpoint.save_to_peers(peers, run, extra or {}, session.run, session.newest_ns)


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
            found = checkpoint.resume(run, peers, given, ranks)
        if found is None:
            session.check_whole("resume")
            return None
        session.loaded()
        session.run, session.newest_ns = found.run, max(session.newest_ns, found.newest_ns)
        for each in run.optimizers:
            session.optimizers.admit(each)
        return found.extra


def _opened(session: Session, ranks: ControlPlane) -> checkpoint.PeerMemory:
    """The job's memory; opened anew where a host has lost it, or ``apply`` has brought another policy of it."""
    peers = session.peers
    if peers is not None and not peers.serves(session.policy):
        session.peers = None
        ranks.run(lambda: peers.close(over=False))
    if session.peers is None:
        session.peers = checkpoint.PeerMemory.open(session.comm, session.policy, session.tiers.store, session.bus, ranks)
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
            checkpoint.check_memory(Path(wanted.memory).expanduser(), wanted.job)
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
