"""Which process each rank is, so that others on its machine see at once that it has ended.

``rendezvous.py`` exchanges them at attach, ``agreed_failure.py`` asks who has ended.  It never waits and sends nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offload.disk import started_ticks


@dataclass(frozen=True, slots=True)
class Process:
    """A process by its machine (of one boot, and one space of process numbers), number and start, and its host's name."""

    machine: str
    number: int
    ticks: int
    host: str

    @staticmethod
    def here() -> Process:
        """This process."""
        number = os.getpid()
        return Process(machine(), number, started_ticks(number) or 0, host())

    @staticmethod
    def of(text: str) -> Process:
        """What ``text`` has written."""
        place, number, ticks, host = text.split()
        return Process(place, int(number), int(ticks), host)

    def text(self) -> str:
        return f"{self.machine} {self.number} {self.ticks} {self.host}"

    def is_elsewhere(self) -> bool:
        """It runs on another machine, or in another container: only connections tell of it."""
        return self.machine != machine()

    def has_ended(self) -> bool:
        """It is over; of another machine's nothing is known."""
        return self.ticks > 0 and not self.is_elsewhere() and started_ticks(self.number) != self.ticks


def machine() -> str:
    """The same for processes that see each other's numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        return host()
    return f"{boot}/{space}"


def host() -> str:
    """The name of this host, without spaces."""
    return socket.gethostname().replace(" ", "-") or "localhost"


def ended(processes: Mapping[int, Process]) -> list[int]:
    """The ranks whose processes have."""
    return [rank for rank, process in processes.items() if process.has_ended()]
