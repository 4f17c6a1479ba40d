"""Owns what a stack says of where a program is: the user's own lines, and the call that they wait in.

`looks` asks it of every rank. It is pure: frames go in, and it never reads a process or a trace.

Note: [How a wait is known]
    By the calls between the innermost line of the user's and the end of the stack: a function of torch.distributed, zhooks'
    transports, a loader of torch's. What waits in C alone (``work.wait()``, the reducer of DDP at the end of a backward, a
    synchronisation with the device) has no such call; its C frames say it, where they were read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from zprof.living.stacks import Frame, Stacks, Thread

__all__ = ["KEPT", "Kind", "Place", "of_script", "place_of", "shown"]

#: Of a stack of the user's, so many lines are shown.
KEPT = 4
_INSTALLED = ("/site-packages/", "/dist-packages/")
_STANDARD = re.compile(r"/lib(?:64)?/python\d+\.\d+/", re.ASCII)
#: The folder that holds our packages, as this process has it, and their names anywhere else.
_HERE = Path(__file__).resolve().parents[1]
_OURS = (f"{_HERE}/", *(f"{folder}/{name}/" for folder in _HERE.parents[:2] for name in ("zhooks", "offload")))
#: The same of another checkout, whose folder may hold the user's scripts too.
_OURS_ELSEWHERE = re.compile(
    r"/(?:zhooks/(?:activation|attachment|build|checkpoint|comm|cpu_transport|grad|integrations|optim|parallel|run|tensor|unit)"
    r"|zprof/(?:recording|running)"
    r"|offload/(?:device|disk|memory|stash|store))/\w+\.py$",
    re.ASCII,
)
_COLLECTIVES = re.compile(r"/zhooks/(?:comm|cpu_transport)/")
_LAUNCH = "/zprof/running/launch.py"
_DISTRIBUTED = "/torch/distributed/"
_C10D = "/torch/distributed/distributed_c10d.py"
#: zhooks' functions that gather and reduce, by the names its spans have.
_ZHOOKS = {"finish_gather": "gather", "start_gather": "gather", "finish_backward": "reduce", "all_reduce": "reduce"}
#: Symbols of C frames, the innermost that is found: what they wait for.
_NATIVE: tuple[tuple[str, str, str], ...] = (
    ("c10d::Reducer", "collective", "all_reduce of DDP's gradients"),
    ("c10d::TCPStore", "collective", "an answer from the store"),
    ("c10d::", "collective", "a collective"),
    ("gloo::", "collective", "a collective"),
    ("nccl", "collective", "a collective"),
    ("cudaStreamSynchronize", "device", "the device"),
    ("cudaEventSynchronize", "device", "the device"),
    ("cudaDeviceSynchronize", "device", "the device"),
    ("cudaMemcpy", "device", "the device"),
    ("cuStreamSynchronize", "device", "the device"),
    ("cuEventSynchronize", "device", "the device"),
    ("cuCtxSynchronize", "device", "the device"),
)


class Kind(Enum):
    """What a thread is doing at a place."""

    COLLECTIVE = "collective"
    DEVICE = "device"
    LOADER = "loader"
    #: Inside autograd's engine, which is C++: it computes, or waits for what only C frames show.
    BACKWARD = "backward"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program is.

    Attributes:
        name: what it waits for, such as "all_reduce"; empty for `Kind.CODE` and `Kind.BACKWARD`.
        frames: the user's, the innermost first; a library's where there are none.
        above: the library's calls between those and the end of the stack, the innermost first.
        thread: the one it is about, where that is not the main one.
    """

    kind: Kind
    name: str
    frames: tuple[Frame, ...]
    above: tuple[Frame, ...] = ()
    thread: str = ""

    @property
    def clear(self) -> bool:
        """Python's frames alone say whether it waits, and for what."""
        return self.kind not in (Kind.BACKWARD, Kind.CODE)

    @property
    def mark(self) -> tuple[object, ...]:
        """Equal in two looks where the program has not moved: a wait may be a loop of a library's, code may not."""
        waits = self.kind in (Kind.COLLECTIVE, Kind.DEVICE, Kind.LOADER)
        inner = () if waits else tuple((frame.file, frame.function) for frame in self.above if not frame.native)
        return (self.kind, self.name, self.frames, inner)


def shown(frame: Frame) -> str:
    """"train.py:88 load_batch": a frame in a few words; the file by its last name."""
    name = frame.function.rpartition("<locals>.")[2]
    return f"{Path(frame.file).name}:{frame.line}" + ("" if name == "<module>" else f" {name}")


def place_of(stacks: Stacks) -> Place | None:
    """Where a training process is: its main thread, or the thread of autograd's that works for it; None without frames."""
    main = stacks.main
    if main is None or not main.frames:
        return None
    place = _place(main)
    if place.kind is not Kind.BACKWARD:
        return place
    for thread in stacks.threads[1:]:
        # Autograd's own threads were not begun by Python.
        python = [frame for frame in thread.frames if not frame.native]
        if python and not python[-1].function.endswith("_bootstrap"):
            inner = _place(thread)
            frames = inner.frames if _users(thread.frames) else ()
            who = thread.name or f"thread {thread.number}"
            return Place(inner.kind, inner.name, (*frames, *place.frames), inner.above, who)
    return place


def _place(thread: Thread) -> Place:
    frames = of_script(thread.frames)
    users = _users(frames)
    first = next((at for at, frame in enumerate(frames) if frame in users), len(frames))
    above = frames[:first]
    if not users:
        # A program that is a library's: its own lines, without torch's.
        users = tuple(frame for frame in frames if not frame.native and not _STANDARD.search(frame.file))[:KEPT]
        users = users or tuple(frame for frame in frames if not frame.native)[:KEPT]
    kind, name = _wait(above)
    return Place(kind, name, users, tuple(above))


def _wait(above: Sequence[Frame]) -> tuple[Kind, str]:
    python = [frame for frame in above if not frame.native]
    ours = [frame for frame in python if "/zhooks/" in frame.file]
    if any(_COLLECTIVES.search(frame.file) for frame in ours):
        outer = [frame.function.rpartition(".")[2] for frame in ours if not _COLLECTIVES.search(frame.file)]
        known = next((_ZHOOKS[name] for name in outer if name in _ZHOOKS), None)
        return Kind.COLLECTIVE, known or f"zhooks' {outer[0].lstrip('_') if outer else 'exchange'}"
    if (name := _collective(python)) is not None:
        return Kind.COLLECTIVE, name
    if any(frame.file.endswith("/torch/utils/data/dataloader.py") for frame in python):
        return Kind.LOADER, "a batch of the loader"
    if any(frame.function == "synchronize" and "/torch/" in frame.file for frame in python):
        return Kind.DEVICE, "the device"
    for frame in above:
        if frame.native:
            for begin, kind, name in _NATIVE:
                if frame.function.startswith(begin):
                    return Kind(kind), name
    if any(frame.function == "_engine_run_backward" for frame in python):
        return Kind.BACKWARD, ""
    return Kind.CODE, ""


def _collective(python: Sequence[Frame]) -> str | None:
    """The function of torch.distributed's that was called: the outermost public one, and who called it of FSDP's."""
    inside = [frame for frame in python if _DISTRIBUTED in frame.file and "/torch/distributed/elastic/" not in frame.file]
    if not inside:
        return None
    public = [frame.function for frame in inside if frame.file.endswith(_C10D) and not frame.function.startswith("_")]
    if public:
        sharded = any("/torch/distributed/fsdp/" in frame.file for frame in inside)
        return f"{public[-1]} of FSDP" if sharded else public[-1]
    functional = [frame.function for frame in inside if frame.file.endswith("/_functional_collectives.py")]
    if functional:
        return functional[0].rpartition(".")[2]
    return inside[-1].function.rpartition(".")[2].lstrip("_")


def of_script(frames: Sequence[Frame]) -> list[Frame]:
    """Without what runs the script under ``zprof run``, which lies outside of it."""
    cut = next((at for at, frame in enumerate(frames) if frame.file.endswith(_LAUNCH)), None)
    return list(frames if cut is None else frames[:cut])


def _users(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    return tuple(frame for frame in of_script(frames) if not _is_library(frame))


def _is_library(frame: Frame) -> bool:
    if frame.native or frame.file.startswith(("<frozen", "<__array_function__")):
        return True
    if frame.file.startswith(_OURS) or any(part in frame.file for part in _INSTALLED):
        return True
    return bool(_STANDARD.search(frame.file) or _OURS_ELSEWHERE.search(frame.file))
