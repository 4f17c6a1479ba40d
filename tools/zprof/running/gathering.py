"""Owns how the traces of a job come together where its hosts share no folder: at the end, in the folder of rank 0.

`zprof.commands.run` calls `gather` in each rank's process that waited for the script, once that has ended well. It never
touches the process that trained nor its groups, waits for a bounded time, and loses nothing: what was not taken stays.

Note: [Why torchrun's store]
    Ranks of torchrun have met at a TCPStore of its agent on the first host, which lives until the last rank's process is over,
    that is until this one is. A process group of the script may be destroyed by then, may hang in a collective of a rank
    that died, and its collectives are the script's: sending through it could hold up the job, or take part in its order. The
    store needs no agreement, its calls have time limits, and it is there after the script has ended, whatever that did. All
    bytes pass through the agent, 2 MiB at a time, one rank after the other.

Note: [The keys]
    Every rank says `here` with the size of its trace. Rank 0 says `take` to those that have, in turn; the rank sends chunks,
    two ahead of what rank 0 has acknowledged, and then their checksum; rank 0 answers `done`, with why not where it could not
    keep them. `alive` counts what rank 0 does, so that who waits for its turn knows a long queue from a dead one; `over`
    ends it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from offload.bounded_calls import BoundedCalls, NoAnswer
from offload.regular_files import open_regular
from offload.text import as_duration, as_size, one_line, plural
from zprof.problem import CapabilityProblem
from zprof.rows import TraceError
from zprof.trace.families import member_name, rank_of
from zprof.writing import committing

__all__ = ["Meeting", "gather", "meeting", "name_of_rank"]

T = TypeVar("T")

CHUNK = 1 << 20
#: A trace is bounded to 1 GiB, and to a quarter more while it is made smaller.
MOST_NBYTES = 2 << 30
#: One call of the store, such as a chunk's way.
_CALL_S = 30.0
#: Until a disk has all of one.
_COMMIT_S = 300.0
_LOOK_S = 0.1
_MOST_NAMED = 8
_MOST_WHY = 200


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a job meet: the store's host and port, which start of the ranks it is, and who this one is."""

    host: str
    port: int
    attempt: str
    rank: int
    world: int


def meeting(rank: int, world: int) -> Meeting | None:
    """As torchrun says; None for a job of one rank, which has nothing to gather.

    Raises:
        CapabilityProblem: there is no store of torchrun's.
    """
    if world == 1:
        return None
    told = os.environ.get
    host, port = told("MASTER_ADDR", ""), told("MASTER_PORT", "")
    if told("TORCHELASTIC_USE_AGENT_STORE") != "True" or not host or not port.isdecimal():
        why = "needs the store that torchrun's agent keeps, found none (TORCHELASTIC_USE_AGENT_STORE)"
        remedy = "start the ranks with torchrun, or name a folder that all hosts share with -o"
        raise CapabilityProblem(f"--gather: {why}; {remedy}")
    return Meeting(host, int(port), told("TORCHELASTIC_RESTART_COUNT", "0"), rank, world)


def name_of_rank(mine: Path, rank: int, other: int) -> Path | None:
    """What another rank's trace is called beside this one's; None where the name does not say the rank."""
    if rank_of(mine) != rank:
        return None
    found = re.fullmatch(rf"(.+)\.{rank}(?:\.restart(\d+))?\.zprof", mine.name)
    return mine.with_name(member_name(found[1], other, int(found[2] or 0))) if found else None


def gather(at: Meeting, path: Path, patience_s: float) -> list[str]:
    """Send this rank's trace to rank 0, or take those of all others; what there is to say of it.

    Args:
        path: this rank's trace, which has ended; rank 0 keeps the others' beside it.
        patience_s: how long nothing may happen before it is given up.
    """
    try:
        store = _Store(at, patience_s)
    except (ImportError, RuntimeError) as error:
        return [f"traces are not gathered: {_said(error)}; that of rank {at.rank} is {path}"]
    if at.rank == 0:
        return _take_all(store, at, path, patience_s)
    try:
        why = _send(store, at, path, patience_s)
    except (RuntimeError, OSError, TraceError) as error:
        why = _said(error)
    return [f"not gathered by rank 0: {why}; it stays {socket.gethostname()}:{path.absolute()}"] if why else []


class _Store:
    """torchrun's store, with a bound on every answer: to ``check``, ``add`` and ``set`` no time limit of torch's applies."""

    def __init__(self, at: Meeting, patience_s: float) -> None:
        from torch.distributed import PrefixStore, TCPStore

        to_connect = timedelta(seconds=min(patience_s, _CALL_S))
        self._where, self._calls = f"the store at {at.host}:{at.port}", BoundedCalls()
        store = self._made(lambda: TCPStore(at.host, at.port, None, False, to_connect, wait_for_workers=False))
        store.set_timeout(timedelta(seconds=_CALL_S))
        self._store: Any = PrefixStore(f"zprof/gather/{at.attempt}", store)

    def _made(self, call: Callable[[], T], waits_s: float = 0.0) -> T:
        try:
            return self._calls.make(call, waits_s + _CALL_S)
        except NoAnswer as error:
            raise RuntimeError(f"{self._where} {error}") from None

    def check(self, key: str) -> bool:
        return self._made(lambda: bool(self._store.check([key])))

    def add(self, key: str, amount: int) -> int:
        return self._made(lambda: int(self._store.add(key, amount)))

    def set(self, key: str, value: str | bytes) -> None:
        self._made(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._made(lambda: bytes(self._store.get(key)), _CALL_S)

    def wait(self, key: str, within_s: float) -> None:
        self._made(lambda: self._store.wait([key], timedelta(seconds=within_s)), within_s)

    def delete_key(self, key: str) -> None:
        self._made(lambda: self._store.delete_key(key))


def _said(error: BaseException) -> str:
    text = one_line(str(error)) or type(error).__name__
    # What is behind the first sentence are the store's own C++ frames.
    return text.partition(" Exception raised from ")[0][:_MOST_WHY]


# A rank that has a trace.


def _send(store: _Store, at: Meeting, path: Path, patience_s: float) -> str:
    """Why it was not taken; "" where it was."""
    try:
        file = os.fdopen(open_regular(path), "rb")
        identity = _identity(path)
    except (OSError, TraceError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or _said(error)
        store.set(f"here/{at.rank}", json.dumps({"nbytes": -1, "why": why}))
        return f"there is no trace: {why}"
    with file:
        nbytes = os.fstat(file.fileno()).st_size
        store.set(f"here/{at.rank}", json.dumps({"nbytes": nbytes, "is": identity}))
        if not _my_turn(store, at.rank, patience_s):
            return f"rank 0 has not asked for it, nor done anything else for {as_duration(patience_s * 1e9)}"
        if store.check(f"take/{at.rank}"):
            try:
                _send_chunks(store, at.rank, file)
            except RuntimeError:
                # Rank 0 takes no more of it where it cannot keep it, and says why.
                if not store.check(f"done/{at.rank}"):
                    raise
    store.wait(f"done/{at.rank}", _COMMIT_S)
    return one_line(store.get(f"done/{at.rank}").decode("utf-8", "replace"))[:_MOST_WHY]


def _send_chunks(store: _Store, rank: int, file: BinaryIO) -> None:
    checksum = hashlib.sha256()
    for number, chunk in enumerate(iter(lambda: file.read(CHUNK), b"")):
        if number > 1:
            store.wait(f"ack/{rank}/{number - 2}", _CALL_S)
            store.delete_key(f"ack/{rank}/{number - 2}")
        store.set(f"data/{rank}/{number}", chunk)
        checksum.update(chunk)
    store.set(f"sum/{rank}", checksum.hexdigest())


def _my_turn(store: _Store, rank: int, patience_s: float) -> bool:
    """Whether rank 0 asks for it, or has answered already, before nothing happens for too long."""
    done, until_s = -1, time.monotonic() + patience_s

    def answered() -> bool:
        return bool(store.check(f"take/{rank}") or store.check(f"done/{rank}"))

    while not answered():
        if (now := store.add("alive", 0)) != done:
            done, until_s = now, time.monotonic() + patience_s
        if store.check("over") or time.monotonic() > until_s:
            # Its own answer may have come since it was looked for.
            return answered()
        time.sleep(_LOOK_S)
    return True


# Rank 0.


def _take_all(store: _Store, at: Meeting, path: Path, patience_s: float) -> list[str]:
    waited_for = set(range(1, at.world))
    missing: dict[int, str] = {}
    count = there = nbytes = 0
    began_s = until_s = time.monotonic()
    until_s += patience_s
    try:
        while waited_for and time.monotonic() < until_s:
            here = [rank for rank in sorted(waited_for) if store.check(f"here/{rank}")]
            for rank in here:
                try:
                    took = _take(store, at, rank, path)
                    nbytes += took
                    count += took > 0
                    there += not took
                except (TraceError, OSError, ValueError, KeyError, TypeError) as error:
                    missing[rank] = _said(error)
                waited_for.discard(rank)
                store.add("alive", 1)
                until_s = time.monotonic() + patience_s
            if not here:
                store.add("alive", 1)
                time.sleep(_LOOK_S)
        store.set("over", "")
    except RuntimeError as error:
        # The store is gone, and with it who waits there.
        missing |= dict.fromkeys(waited_for, _said(error))
    else:
        missing |= dict.fromkeys(waited_for, f"nothing came from it for {as_duration(patience_s * 1e9)}")
    lasted = as_duration((time.monotonic() - began_s) * 1e9)
    already = f"; {there} were there already" if there else ""
    said = f"gathered {count} of {at.world - 1} other ranks' traces in {path.parent} ({as_size(nbytes)}, {lasted}){already}"
    return [said, *_named(missing)]


def _named(missing: dict[int, str]) -> Iterator[str]:
    """A line for each reason: a thousand ranks mostly share one."""
    whys: dict[str, list[int]] = {}
    for rank, why in sorted(missing.items()):
        whys.setdefault(why, []).append(rank)
    for why, ranks in whys.items():
        more = f" and {len(ranks) - _MOST_NAMED:,} more" if len(ranks) > _MOST_NAMED else ""
        yield f"not gathered: {plural(len(ranks), 'rank')} {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}: {why}"


def _take(store: _Store, at: Meeting, rank: int, path: Path) -> int:
    """Keep one rank's trace beside ``path``; its size, or 0 where it lies there already, for the folder is shared.

    Raises:
        TraceError: it has none, or what came is none of this rank.  OSError: it cannot be kept.
    """
    said = json.loads(store.get(f"here/{rank}"))
    nbytes = said["nbytes"]
    if type(nbytes) is not int or nbytes < 0:
        raise TraceError(f"it has no trace ({one_line(str(said.get('why')))})")
    target = name_of_rank(path, at.rank, rank)
    if target is None:
        raise TraceError(f"{path.name} is not of the form <run>.<rank>.zprof; name traces so with -o")
    try:
        if nbytes > MOST_NBYTES:
            raise TraceError(f"its trace of {as_size(nbytes)} is larger than {as_size(MOST_NBYTES)}")
        if os.path.lexists(target):
            if _identity(target) == said["is"]:
                store.set(f"done/{rank}", "")
                return 0
            raise TraceError(f"{target} exists already, of another run")
        store.set(f"take/{rank}", "")
        with committing(target) as file:
            _receive(store, rank, nbytes, file)
            file.flush()
            _check(Path(file.name), rank, at.world)
    except Exception as error:
        with suppress(RuntimeError):
            store.set(f"done/{rank}", _said(error))
        raise
    store.set(f"done/{rank}", "")
    return nbytes


def _receive(store: _Store, rank: int, nbytes: int, file: BinaryIO) -> None:
    checksum, left, number = hashlib.sha256(), nbytes, 0
    while left:
        chunk = store.get(f"data/{rank}/{number}")
        if len(chunk) != min(CHUNK, left):
            raise TraceError("the trace that arrived is not as long as announced")
        store.delete_key(f"data/{rank}/{number}")
        file.write(chunk)
        checksum.update(chunk)
        store.set(f"ack/{rank}/{number}", "")
        left, number = left - len(chunk), number + 1
        store.add("alive", 1)
    if store.get(f"sum/{rank}").decode() != checksum.hexdigest():
        raise TraceError("the trace that arrived is not the one that was sent")


def _identity(path: Path) -> list[object]:
    """What tells a recording from all others."""
    from zprof.trace.reader import header_of

    header = header_of(path)
    return [header.host, header.pid, header.mono_ns, header.wall_ns]


def _check(path: Path, rank: int, world: int) -> None:
    from zprof.trace.reader import header_of

    header = header_of(path)
    if (header.rank, header.world) != (rank, world):
        raise TraceError(f"expected a trace of rank {rank} of {world}, found one of rank {header.rank} of {header.world}")
