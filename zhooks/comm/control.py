"""What ranks must agree on once they have transports: same texts, any rank's flags, calls that fail on every rank or on none.

Every verb is one small exchange over the control channel of one group of ranks, with tensors of the host.  Before there are
transports ranks meet through the process group's store, see ``rendezvous.py``; a rank that does not come is named by
``lost_rank.py``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor

from offload.errors import CheckpointError, DivergenceError, ZhooksError
from offload.text import as_size, shown_path
from offload.work import Work
from zhooks.comm.choose_transport import Comm
from zhooks.comm.progress import Progress, describe_evaluations, describe_progress
from zhooks.comm.rendezvous import Facts, difference, error_of
from zhooks.comm.transport import CONTROL, Call, Transport

__all__ = ["ControlPlane", "Exchange", "GatherControl", "text_digest"]

T = TypeVar("T")
#: The most characters of one rank's reason that the others repeat.
_MOST_TEXT = 2048
#: So much of the ranks' texts is in memory of those that do not keep them.
COLLECT_NBYTES = 1 << 20
_DIGEST_BYTES = 4
_UNBOUNDED = torch.iinfo(torch.int64).max


def text_digest(text: str) -> int:
    """A number that stands for ``text`` in an exchange of int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=7).digest(), "little")


class Exchange:
    """An exchange of flags that has been started: ``numbers`` become the largest of any rank once ``work`` is done."""

    def __init__(self, work: Work, numbers: Tensor) -> None:
        self._work, self._numbers = work, numbers

    def largest(self) -> list[int]:
        """Of each number the largest of any rank, which waits until all have started the exchange."""
        self._work.wait()
        return list(self._numbers.tolist())


class ControlPlane:
    """Agreement between the ranks of ``group`` on one verb (attach, save).  Every method is collective over them.

    Args:
        verb: what they do; the same on every rank, because it labels the exchanges.
        subject: what they do it to, for errors; paths may differ between hosts.
    Attributes:
        rank, size: this rank's place in the group, and how many ranks that has.
    """

    def __init__(self, group: Transport, verb: str, subject: str = "") -> None:
        self._group, self._verb, self._subject = group, verb, subject
        self.rank, self.size = group.axis.rank, group.axis.world

    @property
    def first(self) -> bool:
        return self.rank == 0

    def run(self, call: Callable[[], T], *kinds: type[CheckpointError]) -> T:
        """Make ``call``, in which nothing is collective, on every rank.

        Args:
            *kinds: errors that stay of their kind on every rank.
        Raises:
            CheckpointError: it failed on some rank; every rank raises the first failing rank's reason.
        """
        results, problem = [], None
        try:
            results.append(call())
        except Exception as error:
            problem = error
        failure = self.failed(problem)
        if failure is None:
            return results[0]
        failed, name, why = failure
        kind = next((kind for kind in kinds if kind.__name__ == name), CheckpointError)
        raise kind(why if self.size == 1 else f"rank {failed}: {why}") from problem

    def on_first(self, call: Callable[[], Any]) -> Any:
        """Make ``call`` on the first rank alone; its result, which must be JSON, on every rank: tuples become lists.

        Raises:
            CheckpointError: it failed; every rank raises the reason.
        """
        raw, problem = b"", None
        if self.first:
            try:
                raw = json.dumps([call()]).encode()
            except Exception as error:
                raw, problem = json.dumps([None, self.reason(error)]).encode(), error
        length = torch.tensor([len(raw)], dtype=torch.int64, device="cpu")
        self._group.broadcast(self._call("share"), length)
        text = torch.zeros(int(length.item()), dtype=torch.uint8, device="cpu")
        if raw:
            text.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        self._group.broadcast(self._call("share"), text)
        result, *why = json.loads(text.numpy().tobytes())
        if why:
            raise CheckpointError(why[0] if self.size == 1 else f"rank 0: {why[0]}") from problem
        return result

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What fails inside on one rank fails on all, which would wait for it; nothing inside may be collective.

        A rank that failed raises its own error, and so does every rank if ranks do not meet any more.
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
        failure = self.failed(problem)
        if problem is not None:
            raise problem
        if failure is not None:
            failed, kind, why = failure
            raise error_of(kind)(f"rank {self._group.axis.ranks[failed]}: {why}")

    def failed(self, problem: Exception | None) -> tuple[int, str, str] | None:
        """The first rank that has a problem, its kind of error and the reason; None where none has.  The same on every rank."""
        lowest = torch.tensor([0 if problem is None else self.size - self.rank], dtype=torch.int64, device="cpu")
        self._group.all_reduce(self._call("agree"), lowest, "max")
        if not int(lowest.item()):
            return None
        failed = self.size - int(lowest.item())
        mine = f"{type(problem).__name__}\n{self.reason(problem)}" if problem is not None and self.rank == failed else ""
        kind, _, why = self.texts(mine[:_MOST_TEXT])[failed].partition("\n")
        return failed, kind, why

    def agree(self, text: str) -> bool:
        """Every rank has this text."""
        return self._same(self._call("compare"), text)

    def differ(self, facts: Mapping[str, Facts]) -> str:
        """What ``difference`` says of the first rank that has other facts than the first; "" where none has."""
        text = json.dumps(facts)
        if self._same(Call(CONTROL, "compare settings", " ".join(facts)), text):
            return ""
        ranks, every = self._group.axis.ranks, [json.loads(each or "{}") for each in self.texts(text)]
        found = (difference(each, rank, every[0], ranks[0]) for rank, each in zip(ranks, every, strict=True))
        return next(filter(None, found), "")

    def any(self, flags: Sequence[int], of: str = "all ranks") -> list[int]:
        """Of each number, from 0 to 255, the largest of any rank."""
        return self.begin(flags, of).largest()

    def begin(self, flags: Sequence[int], of: str = "all ranks") -> Exchange:
        """Start the same; between real ranks nobody waits before somebody reads it."""
        numbers = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        return Exchange(self._group.start_all_reduce(self._call("any", of), numbers, "max"), numbers)

    def least(self, number: int | None) -> int | None:
        """The smallest number of any rank; None, which is no bound, where all have that."""
        value = torch.tensor([_UNBOUNDED if number is None else number], dtype=torch.int64, device="cpu")
        self._group.all_reduce(self._call("least"), value, "min")
        found = int(value.item())
        return None if found == _UNBOUNDED else found

    def texts(self, text: str, *, first_only: bool = False) -> list[str]:
        """Every rank's text in rank order; with ``first_only`` on the first rank alone, where others hold a slice at once."""
        raw = text.encode(errors="backslashreplace")
        lengths = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        lengths[self.rank] = len(raw)
        self._group.all_reduce(self._call("collect"), lengths, "max")
        ends, held = lengths.cumsum(0).tolist(), bytearray()
        begin, keeps = ends[self.rank] - len(raw), self.first or not first_only
        for low in range(0, ends[-1], COLLECT_NBYTES):
            chunk = torch.zeros(min(COLLECT_NBYTES, ends[-1] - low), dtype=torch.uint8, device="cpu")
            mine = raw[max(0, low - begin) : max(0, low + len(chunk) - begin)]
            if mine:
                place = max(0, begin - low)
                chunk[place : place + len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            self._group.all_reduce(self._call("collect"), chunk, "max")
            if keeps:
                held += chunk.numpy().tobytes()
        if not keeps:
            return []
        return [held[end - count : end].decode() for end, count in zip(ends, lengths.tolist(), strict=True)]

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

    def _same(self, call: Call, text: str) -> bool:
        digest = text_digest(text)
        bounds = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
        self._group.all_reduce(call, bounds, "max")
        return int(bounds[0]) == -int(bounds[1])

    def _call(self, what: str, of: str = "all ranks") -> Call:
        return Call(CONTROL, f"{self._verb}: {what}", of)


class GatherControl(ControlPlane):
    """Agreement between all ranks that hold shards of one model; each exchange of flags also compares what they gathered."""

    def __init__(self, comm: Comm, verb: str) -> None:
        super().__init__(comm.world, verb)
        self._comm = comm

    def any(self, flags: Sequence[int], of: str = "all units") -> list[int]:
        """As ``ControlPlane.any``; raises as ``compare``."""
        largest = self.begin(flags, of).largest()
        self.compare(largest, len(flags), of)
        return largest[: len(flags)]

    def begin(self, flags: Sequence[int], of: str = "all units") -> Exchange:
        return super().begin([*flags, *self._started()], of)

    def compare(self, largest: Sequence[int], flags: int, of: str = "all units") -> None:
        """Judge what an exchange of so many ``flags`` says of the gathers before it.  Collective.

        Raises:
            DivergenceError: on every rank, where ranks that gather together have not started the same gathers in one order.
        """
        digests = largest[flags:]
        for start in range(0, len(digests), 2 * _DIGEST_BYTES):
            middle, end = start + _DIGEST_BYTES, start + 2 * _DIGEST_BYTES
            both = zip(digests[start:middle], digests[middle:end], strict=True)
            if any(one + other > 255 for one, other in both):
                along = "" if of == "all units" else f" along {of}"
                raise DivergenceError(
                    "The ranks gathered different units, so that some computed with the values of others. Expected every rank "
                    f"to gather the same units in the same order, found ranks that differ at the {self._verb}{along}. Let "
                    "every rank run the same model code; where ranks drop layers, set [schedule] uneven = true. "
                    f"{self._progress()} (Axis {self._comm.shard.axis.name}.)".replace("  ", " ")
                )

    def _started(self) -> list[int]:
        """A digest of what this rank has started since it was last asked, and its complement: the largest of both compare.

        Each group of ranks that gather together has a place of its own, that of its first rank.
        """
        shard, world = self._comm.shard.axis, self._comm.world.axis
        alone = world.world == shard.world
        mine = self._comm.shard.order().to_bytes(_DIGEST_BYTES, "little")
        every = [0] * (2 * _DIGEST_BYTES * (1 if alone else world.world))
        start = 0 if alone else 2 * _DIGEST_BYTES * world.ranks.index(shard.ranks[0])
        every[start : start + 2 * _DIGEST_BYTES] = [*mine, *(255 - byte for byte in mine)]
        return every

    def _progress(self) -> str:
        """Where the ranks are, all of which raise."""
        here = self._comm.failure.progress()
        if here is None:
            return ""
        every = zip(self._comm.world.axis.ranks, self.texts(json.dumps(asdict(here))), strict=True)
        ranks = {rank: Progress(**json.loads(one)) for rank, one in every}
        return f"{describe_evaluations(ranks, ranks)} {describe_progress(ranks)}".strip()

    def _call(self, what: str, of: str = "all units") -> Call:
        # Without a colon: it is no step of a method that the user calls.
        return Call(CONTROL, self._verb if what == "any" else f"{self._verb} ({what})", of)


_ADVICE = {
    errno.ENOSPC: "Free space there (df, df -i)",
    errno.EDQUOT: "Free space within the user's quota, or have it raised (quota)",
    errno.EROFS: "Mount the file system writable",
    errno.EACCES: "Let this user write there",
    errno.EPERM: "Let this user write there",
    errno.EIO: "Look at the device, which fails (dmesg)",
    errno.EMFILE: "Raise ulimit -n, or close what this process has left open",
    errno.ENFILE: "Raise fs.file-max of this machine",
}


def _advice(error: OSError) -> str:
    """What to do about it, apart from another path."""
    if error.errno == errno.EFBIG:
        soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        size = "" if soft == resource.RLIM_INFINITY else f", {as_size(soft)} here"
        return f"Raise the limit on the size of one file (ulimit -f{size}), save from more ranks"
    return _ADVICE.get(error.errno or 0, "Correct that")
