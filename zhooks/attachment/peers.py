"""What an attachment keeps in the memory of the ranks' hosts, and how a job that was started again goes on.

``Attachment`` is one of these.  It opens the memory when it is first asked for and gives it back at ``detach``; what is kept
there, and what is the newest, ``checkpoint/`` decides.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.errors import CapabilityError, CheckpointError
from offload.text import shown
from zhooks import checkpoint
from zhooks.attachment.spans import spanned
from zhooks.attachment.state import Stateful
from zhooks.comm import ControlPlane


class Resumable(Stateful):
    """The verbs of an attachment whose job is started again when ranks or hosts are lost, or come."""

    _peers: checkpoint.PeerMemory | None = None

    @spanned("save_to_peers")
    def save_to_peers(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        objects: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep what ``save`` would write in the memory of this rank's host, with a copy on the next host.  Collective.

        It outlives this process: after torchrun has restarted the ranks, any number of them can ``resume`` from it.  Each save
        replaces the previous one once it is complete.  ``[resilience]`` sets the number of copies, and where they are.

        Args:
            optimizer: as in ``save``.
            objects: as in ``save``.
            extra: as in ``save``.
        Raises:
            CheckpointError: on every rank; the previous save is unchanged.
        """
        self._check_at_rest("save_to_peers")
        ranks = ControlPlane(self._comm.stage, "save_to_peers", "")
        self._runtime.due()
        chosen = self._chosen("save_to_peers", optimizer)
        live = ranks.run(lambda: self._live("save_to_peers", chosen, objects, extra))
        for each in live.optimizers:
            self._optimizers.meet(each, "save_to_peers")
        peers = self._opened(ranks)
        self._run = self._run or ranks.on_first(lambda: secrets.token_hex(8))
        self._newest_ns = checkpoint.save_to_peers(peers, live, extra or {}, self._run, self._newest_ns)

    @spanned("resume")
    def resume(
        self,
        folders: str | Path | Sequence[str | Path] = (),
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        objects: Mapping[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Resume from the newest state that ``save_to_peers`` kept or that is in ``folders``.  Collective.

        Args:
            folders: checkpoints, or folders of checkpoints (as for ``zhooks.latest``), the same on every rank; they need not
                exist.
            optimizer: as in ``load``.
            objects: as in ``load``.
        Returns:
            What was saved as ``extra``; None if nothing was found, and the run starts from the beginning.
        Raises:
            CheckpointError: on every rank: the newest checkpoint in a folder is damaged, or is of another model.
        """
        self._check_at_rest("resume")
        self._finish_saving("resume")
        self._runtime.due()
        ranks = ControlPlane(self._comm.stage, "resume", "")
        given = ranks.run(lambda: _listed(folders))
        live = self._to_load(ranks, "resume", optimizer, objects)
        with self._steps.changing("resume"):
            found = checkpoint.resume(live, self._opened(ranks) if self._has_memory(ranks) else None, given, ranks)
        if found is None:
            self._check_whole("resume")
            return None
        self._loaded()
        self._run, self._newest_ns = found.run, max(self._newest_ns, found.newest_ns)
        for each in live.optimizers:
            self._optimizers.admit(each)
        return found.extra

    def _opened(self, ranks: ControlPlane) -> checkpoint.PeerMemory:
        """The job's memory; opened anew where a host has lost it, or ``apply`` has brought another policy of it."""
        if self._peers is not None and not self._peers.serves(self.policy):
            peers, self._peers = self._peers, None
            ranks.run(lambda: peers.close(over=False))
        if self._peers is None:
            self._peers = checkpoint.PeerMemory.open(self._comm, self.policy, self._tiers.store, self._bus, ranks)
        return self._peers

    def _has_memory(self, ranks: ControlPlane) -> bool:
        """Where ranks have no job or no tmpfs nobody can have kept anything; where some have, the others are refused."""
        wanted = self.policy.resilience

        def has() -> bool:
            try:
                checkpoint.check_memory(Path(wanted.memory).expanduser(), wanted.job)
            except CapabilityError:
                return False
            return True

        # Stages of a pipeline would have to agree; they are refused where the memory is opened.
        return not ranks.agree(f"{ranks.run(has)}") or has()

    def _leave_peers(self) -> None:
        """The end of the attachment: of the job, too, unless it ends by an error, after which it may be started again."""
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close(over=sys.exc_info()[0] is None)


def _listed(folders: Any) -> list[str | os.PathLike[str]]:
    given = [folders] if isinstance(folders, (str, os.PathLike)) else folders
    if not isinstance(given, (list, tuple)):
        raise CheckpointError(f"resume expected folders, found {shown(folders)}. Name them in a list.")
    return list(given)
