"""What an attachment does when its processes are asked to end: it says so on all ranks alike, saves, and leaves.

``Attachment`` is one of these.  It catches no signal unless a loop has asked for it; it never ends a step.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.errors import AttachError, CheckpointError
from offload.user_warnings import warn_user
from zhooks.attachment.state import Stateful
from zhooks.comm import ControlPlane
from zhooks.run import Preemption, checked_signals

__all__ = ["Preemptible"]


class Preemptible(Stateful):
    """The verbs of an attachment around the end of its job."""

    _preemption: Preemption | None = None

    def catch_preemption(self, signals: int | Iterable[int] = (signal.SIGTERM,)) -> None:
        """Catch ``signals`` until ``detach``: they set ``preempted`` instead of ending the process.  Collective.

        Call it before the loop, on every rank, in the main thread; calling it again with the same signals changes nothing.  A
        handler that the program had installed is still called, and is restored at ``detach``.

        Args:
            signals: which signals to catch: one, or several.
        Raises:
            AttachError: ``signals`` are not signals, or differ from those of another rank or of an earlier call, or this is not
                the main thread.  Raised on every rank, with no handler changed.
        """
        self._check_at_rest("catch_preemption")
        with ControlPlane(self._comm.stage, "catch_preemption").all_or_none():
            chosen = checked_signals(signals)
            if self._preemption is not None and self._preemption.signals != chosen:
                raise AttachError(
                    f"catch_preemption expected the signals that are caught already, {_names(self._preemption.signals)}, "
                    f"found {_names(chosen)}. Catch all of them with the first call."
                )
        problem = ControlPlane(self._comm.stage, "catch_preemption").differ({"catch_preemption": {"signals": _names(chosen)}})
        if problem:
            raise AttachError(problem)
        if self._preemption is not None:
            return
        assert self._undo is not None
        caught = self._preemption = Preemption(self._comm, chosen)
        riders = self._runtime.reducer.riders
        riders.append(caught)
        self._undo.callback(riders.remove, caught)
        self._undo.callback(caught.close)
        caught.open()

    @property
    def preempted(self) -> bool:
        """Whether a caught signal has reached any rank; the same answer on every rank.

        Every rank must read it at the same place.  After a backward that reduced gradients the answer is known; otherwise
        (after an evaluation, after micro-batches inside ``no_sync``, and over ``tp`` and ``pp``) the ranks exchange one byte.
        Collective.
        """
        self._check_attached("preempted")
        if self._preemption is None:
            raise AttachError(
                "preempted expected signals to catch, found none. Call attachment.catch_preemption() before the loop, "
                "on every rank."
            )
        self._runtime.conclude()
        return self._preemption.everywhere()

    def exit_if_preempted(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        objects: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        keep: int | None = None,
    ) -> None:
        """If ``preempted``, save and end this process with ``SystemExit(0)``; otherwise do nothing.  Collective.

        Call it at the end of the loop body, after schedulers and counters: the state at that moment is saved.  Signals that
        arrive during the save change nothing.

        Args:
            folder: as in ``save``.
            optimizer: as in ``save``.
            objects: as in ``save``.
            extra: as in ``save``, or a function that returns it.
            keep: as in ``save``.
        Raises:
            SystemExit: with code 0, on every rank, once the checkpoint is complete.
            CheckpointError: as ``save``; on every rank.
        """
        if not self.preempted:
            return
        try:
            self._finish_saving("exit_if_preempted")
        except CheckpointError as error:
            # It is the same on every rank of the stage, and no reason not to save now.
            if self._comm.stage.axis.rank == 0:
                warn_user(str(error), RuntimeWarning, this_rank=True)
        ranks = ControlPlane(self._comm.stage, "exit_if_preempted", "extra")
        given = ranks.run(lambda: extra() if callable(extra) else extra)
        self.save(folder, optimizer, objects=objects, extra=given, keep=keep)
        raise SystemExit(0)


def _names(signals: Sequence[signal.Signals]) -> str:
    return " ".join(one.name for one in signals)
