"""Preemption: a signal that reaches some ranks becomes one answer on all, and a loop saves and ends.

The answer travels with the exchange that every backward of several ranks ends with.  No signal is caught unless a loop has
asked for it, and nothing is raised out of a handler.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from offload.errors import AttachError, CheckpointError
from offload.user_warnings import warn_user
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.session import Given, Session, finish_saving, save_run

__all__ = ["catch_preemption", "exit_if_preempted", "preempted"]

#: What python installs for a signal that nobody handles; there is nothing to hand on to.
_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)


def catch_preemption(session: Session, signals: int | Iterable[int]) -> None:
    """See ``Attachment.catch_preemption``.  Collective."""
    session.concluded("catch_preemption")
    ranks, known = ControlPlane(session.comm.stage, "catch_preemption"), _caught(session)
    with ranks.all_or_none():
        chosen = checked_signals(signals)
        if known is not None and known.signals != chosen:
            raise AttachError(
                f"catch_preemption expected the signals that are caught already, {_names(known.signals)}, "
                f"found {_names(chosen)}. Catch all of them with the first call."
            )
    problem = ranks.differ({"catch_preemption": {"signals": _names(chosen)}})
    if problem:
        raise AttachError(problem)
    if known is None:
        assert session.undo is not None
        caught, riders = Preemption(session.comm, chosen), session.runtime.reducer.riders
        riders.append(caught)
        session.undo.callback(riders.remove, caught)
        session.undo.callback(caught.close)
        caught.open()


def preempted(session: Session) -> bool:
    """See ``Attachment.preempted``.  Collective."""
    caught = _caught(session.attached("preempted"))
    if caught is None:
        raise AttachError(
            "preempted expected signals to catch, found none. Call attachment.catch_preemption() before the loop, "
            "on every rank."
        )
    session.runtime.conclude()
    return caught.everywhere()


def exit_if_preempted(
    session: Session,
    folder: str | Path,
    optimizer: Given,
    objects: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None,
    keep: int | None,
) -> None:
    """See ``Attachment.exit_if_preempted``.  Collective."""
    if not preempted(session):
        return
    try:
        finish_saving(session, "exit_if_preempted")
    except CheckpointError as error:
        # It is the same on every rank of the stage, and no reason not to save now.
        if session.comm.stage.axis.rank == 0:
            warn_user(str(error), RuntimeWarning, this_rank=True)
    ranks = ControlPlane(session.comm.stage, "exit_if_preempted", "extra")
    given = ranks.run(lambda: extra() if callable(extra) else extra)
    save_run(session, folder, optimizer, objects, given, True, keep)
    raise SystemExit(0)


def _caught(session: Session) -> Preemption | None:
    """What catches signals for this session, if anything does."""
    return next((one for one in session.runtime.reducer.riders if isinstance(one, Preemption)), None)


def _names(signals: Sequence[signal.Signals]) -> str:
    return " ".join(one.name for one in signals)


def checked_signals(signals: Any) -> tuple[signal.Signals, ...]:
    """The signals that are meant, each once.

    Raises:
        AttachError: they are none that a process can handle, or this is not the main thread.
    """
    given = tuple(signals) if isinstance(signals, Iterable) and not isinstance(signals, (str, bytes)) else (signals,)
    known = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}
    wrong = [one for one in given if isinstance(one, bool) or one not in known]
    if wrong or not given:
        raise AttachError(
            f"catch_preemption expected signals that a process can handle, such as signal.SIGTERM, found "
            f"{', '.join(map(repr, wrong)) or 'none'}. Pass those that the scheduler sends."
        )
    if threading.current_thread() is not threading.main_thread():
        raise AttachError(
            "catch_preemption expected the main thread, as only it can handle signals in Python, found "
            f"{threading.current_thread().name}. Call it there, before the loop."
        )
    return tuple(dict.fromkeys(signal.Signals(one) for one in given))


class Preemption:
    """Whether any rank has received one of ``signals``, the same on all; see ``Rider`` in grad/reduce.py."""

    waited_for = False

    def __init__(self, comm: Comm, signals: Sequence[signal.Signals]) -> None:
        self._comm, self.signals = comm, tuple(signals)
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        # This rank has received one; the ranks that share its slice of the model have agreed; all have; and the second of
        # these is newer than the last question.
        self._received, self._agreed, self._everywhere, self._fresh = False, False, False, False

    def open(self) -> None:
        """Handle the signals from now on."""
        for number in self.signals:
            self._before[number] = signal.signal(number, self._receive)

    def close(self) -> None:
        """Put back who handled them; a handler that came after this one stays, and still finds this one to call.

        A signal that nobody was told of is a warning: it has been kept from ending this process, and nothing else did.
        """
        while self._before:
            number, before = self._before.popitem()
            # Bound methods are made anew at every look.
            if signal.getsignal(number) == self._receive and threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_DFL if before is None else before)
        if self._received and not self._everywhere:
            self._received = False
            warn_user(
                "detach expected the loop to read attachment.preempted after a signal that catch_preemption catches, found "
                "that it has not, so this process does not stop. Read it once more before detach().",
                RuntimeWarning,
                this_rank=True,
            )

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A process that was forked from this one asks nobody: it ends as it would have.
            self._hand_over(signal.Signals(number))
            return
        self._received = True
        before = self._before.get(signal.Signals(number))
        if before not in _DEFAULTS:
            before(number, frame)

    def _hand_over(self, number: signal.Signals) -> None:
        """Be no handler of this signal any more, and let it come once again."""
        before = self._before.get(number)
        signal.signal(number, signal.SIG_DFL if before is None else before)
        signal.raise_signal(number)

    # Riding.

    def board(self) -> Sequence[int]:
        return (int(self._received),)

    def arrive(self, largest: Sequence[int]) -> None:
        self._agreed, self._fresh = self._agreed or bool(largest[0]), True

    def forget(self) -> None:
        # What this rank has received itself is said again.
        self._agreed = self._everywhere = self._fresh = False

    def everywhere(self) -> bool:
        """Any rank has received one, as all ranks know.

        Collective, over ranks that no backward has asked since the last question: over all of them where there was no
        backward, else over tp and pp alone.
        """
        if self._everywhere:
            return True
        found = torch.tensor([int(self._agreed if self._fresh else self._received)], dtype=torch.uint8, device="cpu")
        asked = () if self._fresh else (self._comm.world,)
        for transport in (*asked, self._comm.tp, self._comm.pp):
            if transport.axis.world > 1:
                transport.all_reduce(Call(CONTROL, "preempted", "all ranks"), found, "max")
        self._fresh, self._everywhere = False, bool(found.item())
        return self._everywhere
