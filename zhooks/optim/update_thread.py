"""The thread that updates are made on beside backward: one of the process, or one on paper for the virtual device.

``build/tiers.py`` opens one, ``overlap.py`` submits to it.  It never knows what a job does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from offload.device import VirtualWork
from offload.threads import Workers
from offload.virtual import NAME, Machine, running
from offload.work import DONE, HostWork

__all__ = ["Worker", "open_worker"]


class Worker(Protocol):
    """One thread, which does what is submitted in turn."""

    def submit(self, job: Callable[[], None]) -> HostWork:
        """Queue ``job``, which must not raise; who has seen its end waits for what is returned, too."""

    def close(self) -> None:
        """Wait for what was submitted, and end."""


class _Thread:
    def __init__(self) -> None:
        self._threads = Workers("zhooks-update")
        self._threads.start()
        self._end = weakref.finalize(self, self._threads.stop)

    def close(self) -> None:
        self._end()

    def submit(self, job: Callable[[], None]) -> HostWork:
        self._threads.submit(job)
        return DONE


class _VirtualThread:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def submit(self, job: Callable[[], None]) -> HostWork:
        machine = self._machine
        with machine.thread("thread of updates"):
            job()
            return VirtualWork(machine, machine.moment(machine.host))

    def close(self) -> None:
        return None


def open_worker(device: torch.device) -> Worker:
    """A new one for updates of a model on ``device``.

    Raises:
        CapabilityError: the system does not allow another thread.
    """
    return _VirtualThread(running()) if device.type == NAME else _Thread()
