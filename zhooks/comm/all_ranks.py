"""Steps that all ranks take together and that fail on all ranks or on none.

``attach.py`` and ``checkpoint/`` run every step that may fail on one rank through here, so that no rank waits for another that
has raised.  It communicates through the transport it is given (before there is one, ``rendezvous.py`` does this by the process
group's store) and never decides what a step does.
"""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from offload.errors import CheckpointError, DivergenceError, ZhooksError
from offload.text import as_size, shown_path
from zhooks.comm.agree import same_text, text_digest, text_of
from zhooks.comm.choose_transport import Comm
from zhooks.comm.rendezvous import error_of
from zhooks.comm.transport import CONTROL, Call, Transport

__all__ = ["AllRanks", "all_or_none", "one_stage_a_path"]

T = TypeVar("T")
#: The most characters of one rank's reason that the others repeat.
_MOST_TEXT = 2048
#: So much of what all ranks hand to the first is in memory of the others at once.
COLLECT_NBYTES = 1 << 20


class AllRanks:
    """The steps that all ranks of ``world`` take together in one verb (save, load).

    Args:
        verb: what they do; the same on every rank, for it labels the collectives.
        subject: what they do it to, for errors; paths may differ between hosts.
    """

    def __init__(self, world: Transport, verb: str, subject: str) -> None:
        self._world, self._verb, self._subject = world, verb, subject
        self.rank, self.size = world.axis.rank, world.axis.world

    @property
    def first(self) -> bool:
        return self.rank == 0

    def run(self, step: Callable[[], T], *kinds: type[CheckpointError]) -> T:
        """Take ``step`` on every rank.  Collective.

        Args:
            *kinds: errors that stay of their kind on every rank.
        Raises:
            CheckpointError: it failed on some rank; every rank raises the first failing rank's reason.
        """
        results, problem = [], None
        try:
            results.append(step())
        except Exception as error:
            problem = error
        failure = self.first_failure(problem)
        if failure is None:
            return results[0]
        failed, name, why = failure
        kind = next((kind for kind in kinds if kind.__name__ == name), CheckpointError)
        raise kind(why if self.size == 1 else f"rank {failed}: {why}") from problem

    def first_failure(self, problem: Exception | None) -> tuple[int, str, str] | None:
        """The first rank of those that come here with a problem, its kind of error and the reason; None where none does.

        The same on every rank.  Collective.
        """
        lowest = torch.tensor([0 if problem is None else self.size - self.rank], dtype=torch.int64, device="cpu")
        self._world.all_reduce(self._call("agree"), lowest, "max")
        if not int(lowest.item()):
            return None
        failed = self.size - int(lowest.item())
        mine = ""
        if problem is not None and self.rank == failed:
            mine = f"{type(problem).__name__}\n{self.reason(problem)}"
        kind, _, why = text_of(self._world, self._call("reason"), failed, mine[:_MOST_TEXT]).partition("\n")
        return failed, kind, why

    def on_first(self, step: Callable[[], Any]) -> None:
        """Take ``step`` on the first rank alone; the others learn whether it failed.  Collective."""
        self.run(step if self.first else _nothing)

    def same(self, text: str) -> bool:
        """Every rank says the same.  Collective."""
        return same_text(self._world, self._call("compare"), text)

    def share(self, value: Any) -> Any:
        """The first rank's JSON value on every rank; tuples become lists.  Collective.

        Raises:
            CheckpointError: it is none; every rank raises.
        """
        raw = self.run(lambda: json.dumps(value).encode() if self.first else b"")
        length = torch.tensor([len(raw)], dtype=torch.int64, device="cpu")
        self._world.broadcast(self._call("share"), length)
        text = torch.zeros(int(length.item()), dtype=torch.uint8, device="cpu")
        _put(raw, text)
        self._world.broadcast(self._call("share"), text)
        return json.loads(text.numpy().tobytes())

    def collect(self, raw: bytes) -> list[bytes]:
        """Every rank's bytes in rank order on the first rank, nothing elsewhere: there a slice is held at once.  Collective."""
        lengths = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        lengths[self.rank] = len(raw)
        self._world.all_reduce(self._call("collect"), lengths, "sum")
        ends = lengths.cumsum(0).tolist()
        begin, held = ends[self.rank] - len(raw), bytearray()
        for low in range(0, ends[-1], COLLECT_NBYTES):
            chunk = torch.zeros(min(COLLECT_NBYTES, ends[-1] - low), dtype=torch.uint8, device="cpu")
            mine = raw[max(0, low - begin) : max(0, low + len(chunk) - begin)]
            _put(mine, chunk[max(0, begin - low) :])
            self._world.all_reduce(self._call("collect"), chunk, "max")
            if self.first:
                held += chunk.numpy().tobytes()
        return [bytes(held[end - count : end]) for end, count in zip(ends, lengths.tolist(), strict=True)] if self.first else []

    def _call(self, what: str) -> Call:
        return Call(CONTROL, f"{self._verb}: {what}", "all ranks")

    def reason(self, error: Exception) -> str:
        """What failed, as the other ranks are told."""
        if isinstance(error, ZhooksError):
            return str(error)
        about = f"{self._verb} {self._subject}".rstrip()
        if isinstance(error, OSError):
            place = f" at {shown_path(error.filename)}" if error.filename else ""
            found = f"{error.strerror or error}{place}"
            advice = f"{_advice(error)}, or choose another path."
            return f"Cannot {about}. Expected space and permission to do so, found: {found}. {advice}"
        return f"Cannot {about}. Expected no exception, found {type(error).__name__}: {error}. Correct it and try again."


@contextmanager
def all_or_none(world: Transport, verb: str) -> Iterator[None]:
    """What fails inside on one rank fails on all, who would wait for it.  Collective at the end; nothing inside may be.

    ``verb`` labels the exchange and is the same on every rank.  A rank that failed raises its own error, and so does every
    rank if ranks do not meet any more.
    Raises:
        ZhooksError: the first failing rank's error, with that rank's number before it, where this rank did not fail.
    """
    problem: Exception | None = None
    try:
        yield
    except DivergenceError:
        raise
    except Exception as error:
        problem = error
    failure = AllRanks(world, verb, "").first_failure(problem)
    if problem is not None:
        raise problem
    if failure is not None:
        failed, kind, why = failure
        raise error_of(kind)(f"rank {world.axis.ranks[failed]}: {why}")


def one_stage_a_path(comm: Comm, verb: str, path: str) -> None:
    """Stages of a pipeline that save at once must not save to one path: the last would win.  Collective over pp.

    Raises:
        CheckpointError: two do; on the ranks of every stage.
    """
    axis = comm.pp.axis
    paths = torch.zeros(axis.world, dtype=torch.int64, device="cpu")
    paths[axis.rank] = text_digest(path)
    comm.pp.all_reduce(Call(CONTROL, f"{verb}: compare paths", "all stages"), paths, "sum")
    each, number = ("pipeline stages", "stage number") if comm.pipelined else ("ep ranks", "ep rank")
    if len(set(paths.tolist())) < axis.world:
        raise CheckpointError(
            f"Cannot {verb} {path}. Expected a separate path for each of the {axis.world} {each}, found two that save to the "
            f"same one. Put the {number} into the path."
        )


def _advice(error: OSError) -> str:
    """What to do about it, but for another path."""
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    size = "" if soft == resource.RLIM_INFINITY else f", {as_size(soft)} here"
    known = {
        errno.ENOSPC: "Free space there (df, df -i)",
        errno.EDQUOT: "Free space within the user's quota, or have it raised (quota)",
        errno.EFBIG: f"Raise the limit on the size of one file (ulimit -f{size}), save from more ranks",
        errno.EROFS: "Mount the file system writable",
        errno.EACCES: "Let this user write there",
        errno.EPERM: "Let this user write there",
        errno.EIO: "Look at the device, which fails (dmesg)",
        errno.EMFILE: "Raise ulimit -n, or close what this process has left open",
        errno.ENFILE: "Raise fs.file-max of this machine",
        errno.EMFILE: "Raise ulimit -n, or close what this process has left open",
        errno.ENFILE: "Raise fs.file-max of this machine",
    }
    return known.get(error.errno or 0, "Correct that")


def _put(raw: bytes, into: Tensor) -> None:
    """At its start; of no bytes torch makes no tensor."""
    if raw:
        into[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _nothing() -> None:
    return None
