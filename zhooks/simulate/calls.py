"""What Python itself takes in a simulated step: each call that the program makes passes the host's clock on.

``run.py`` puts it around a step.  The profile says what a call takes; it counts none where the profile does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload import device, disk
from offload.virtual import Access, Calls, Happening, Machine, Moment, Stream

__all__ = ["program_calls"]


def _beside(package: object, name: str) -> str:
    return str(Path(str(package.__file__)).with_name(name))  # type: ignore[attr-defined]


#: What stands in for the parts of a real run that are not Python's: streams, disks, other ranks.
_APART = (
    str(Path(__file__).parent), _beside(device, "virtual.py"), _beside(device, "clock.py"), _beside(disk, "virtual_disk.py"),
)  # fmt: skip


@contextmanager
def program_calls(machine: Machine) -> Iterator[None]:
    """Calls of the program inside take their time."""
    call = machine.costs.call
    if not call:
        yield
        return

    def called() -> None:
        machine.now += call

    calls = Calls(_APART, called)
    follower = _Follower(calls)
    machine.listeners.append(follower)
    try:
        with calls.on():
            yield
    finally:
        machine.listeners.remove(follower)


class _Follower:
    """Threads that issue operations are followed from their first on."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def happened(self, happening: Happening) -> None:
        self._calls.follow()

    def recorded(self, moment: Moment, stream: Stream) -> None: ...
    def awaited(self, moment: Moment, stream: Stream) -> None: ...
    def kept(self, access: Access, stream: Stream) -> None: ...
    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None: ...
    def freed(self, address: int, nbytes: int, index: int) -> None: ...
