"""Owns one look at the ranks of a job: each one's process, its stack and its recording, at about the same time.

`zprof hang` takes two of them, an interval apart, and `verdict` compares. It asks each process as little as it must, and says
why where something could not be seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from offload.errors import CapabilityError, ZhooksError
from offload.text import one_line
from zprof.clock import now_ns
from zprof.living.jobs import Job, Member
from zprof.living.places import Kind, Place, place_of
from zprof.living.processes import Process, children_of, ending_by, found, stuck_in_kernel
from zprof.living.recorded import Activity, Doing, Following
from zprof.living.stacks import Frame, Stacks, Thread, stacks_of
from zprof.rows import TraceError

__all__ = ["Look", "Looking", "Worker"]

_AT_ONCE = 8
_MOST_WORKERS = 64
_MOST_THREADS, _MOST_FRAMES = 64, 128


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that a rank started, such as a loader's worker, and where it is; None where that could not be seen."""

    pid: int
    place: Place | None


@dataclass(frozen=True, slots=True)
class Look:
    """A rank as it was at ``time_ns``.

    Attributes:
        process: None where there is none here.
        gone: how it ended, in words; "" while it runs, and where it is on another machine.
        unseen: why no process of it is seen though it may run, or why no stack could be read; "" where both were.
        denied: that was for want of a right or a package.
        place: where its stack is; of one that noted its own stacks, where it noted so.
        noted: the stack is one that it noted itself, for so many nanoseconds ago; None where it was read now.
        doing: what its recording says; None without one.
        spent_s, moved_nbytes: CPU used and bytes read and written by it and by those it started, so far.
    """

    label: str
    rank: int | None
    process: Process | None
    time_ns: int
    gone: str = ""
    unseen: str = ""
    denied: bool = False
    stacks: Stacks | None = None
    place: Place | None = None
    noted_ns: int | None = None
    doing: Doing | None = None
    trace: Path | None = None
    host: str = ""
    spent_s: float | None = None
    moved_nbytes: float | None = None
    workers: tuple[Worker, ...] = ()

    @property
    def waits_for(self) -> Activity | None:
        """The exchange with other ranks that its recording says it stands in."""
        return self.doing.waits_for if self.doing is not None else None

    def waited_ns(self) -> int | None:
        """For how long it has stood there: until now, or, of one that is gone, until its last row."""
        waits = self.waits_for
        if waits is None or self.doing is None:
            return None
        until = self.time_ns if self.process is not None and not self.gone else self.doing.newest_ns
        return max(0, until - waits.begin_ns)


class Looking:
    """Follows the ranks of a job; `look` as often as wanted, `close` at the end."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._following: dict[str, Following] = {}
        for member in job.members:
            if member.trace is not None:
                try:
                    self._following[member.label] = Following(member.trace)
                except TraceError:
                    continue

    @property
    def has_elsewhere(self) -> bool:
        """Some ranks are on other machines: what their traces say comes later than it happens."""
        return any(member.elsewhere for member in self.job.members)

    def look(self, before: Sequence[Look] = ()) -> list[Look]:
        """Every rank now.

        Args:
            before: the look before; of ranks that stand where they stood, and whose frames do not say why, C frames are read.
        """
        known = {each.label: each for each in before}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda member: self._look(member, known.get(member.label)), self.job.members))

    def moved(self, since: Sequence[Look]) -> set[str]:
        """The labels of those whose stack is not where it was; of who waits by its own recording, which is not asked here."""
        asked = [each for each in since if each.place is not None and each.noted_ns is None and each.waits_for is None]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return {each.label for each, moved in zip(asked, pool.map(_has_moved, asked), strict=True) if moved}

    def close(self) -> None:
        """Let the traces go."""
        for following in self._following.values():
            following.close()

    def _look(self, member: Member, before: Look | None) -> Look:
        process = found(member.process.pid) if member.process is not None else None
        if process is not None and member.process is not None and process.began_s != member.process.began_s:
            process = None
        if process is None or not process.alive:
            return self._absent(member, process)
        stacks, unseen, denied = _stacks(process)
        place = place_of(stacks) if stacks is not None else None
        # After the stack: a wait that ends between the two is none.
        doing = self._doing(member)
        if before is not None and before.place is not None and place is not None and not place.clear:
            waits = doing is not None and doing.waits_for is not None
            if not waits and place.mark == before.place.mark:
                place = _native(process, place)
        now = now_ns()
        noted_ns = None
        if place is None and doing is not None and (noted := _noted(doing)) is not None:
            stacks, noted_ns = noted[0], max(0, now - noted[1])
            place = place_of(stacks)
        below = _below(process)
        return Look(
            label=member.label,
            rank=member.rank,
            process=process,
            time_ns=now,
            unseen=unseen,
            denied=denied,
            stacks=stacks,
            place=place,
            noted_ns=noted_ns,
            doing=doing,
            trace=member.trace,
            host=member.header.host if member.header is not None else "",
            spent_s=_sum(each.spent_s() for each in (process, *below)),
            moved_nbytes=_sum(each.moved_nbytes() for each in (process, *below)),
            workers=_workers(below) if place is not None and place.kind is Kind.LOADER else (),
        )

    def _absent(self, member: Member, process: Process | None) -> Look:
        """No process runs here: it is on another machine, or has ended."""
        doing = self._doing(member)
        gone, unseen = "", ""
        following = self._following.get(member.label)
        if process is not None:
            gone = process.ending
        elif doing is not None and doing.end is not None:
            code, reason = doing.end
            gone = f"ended with exit code {code}" + (f" ({reason})" if reason else "")
        elif doing is not None and doing.signal:
            gone = ending_by(doing.signal)
        elif member.elsewhere:
            assert member.header is not None
            unseen = f"stacks of {_text(member.header.host)} are not seen from here"
            if following is not None and following.silent:
                gone = "has not written to its trace for a long time: it was killed, or its machine is lost"
        elif following is not None:
            gone = "killed: its trace has no end"
        else:
            gone = "no such process runs here"
        stacks = noted_ns = None
        if doing is not None and (noted := _noted(doing)) is not None:
            stacks, noted_ns = noted[0], max(0, doing.newest_ns - noted[1])
        return Look(
            label=member.label,
            rank=member.rank,
            process=None,
            time_ns=now_ns(),
            gone=gone,
            unseen=unseen,
            stacks=stacks,
            place=place_of(stacks) if stacks is not None else None,
            noted_ns=noted_ns,
            doing=doing,
            trace=member.trace,
            host=member.header.host if member.header is not None else "",
        )

    def _doing(self, member: Member) -> Doing | None:
        following = self._following.get(member.label)
        if following is None:
            return None
        try:
            return following.look()
        except TraceError:
            return None


def _stacks(process: Process) -> tuple[Stacks | None, str, bool]:
    if stuck := stuck_in_kernel(process):
        return None, f"its stack cannot be read while it is {stuck}", False
    try:
        return stacks_of(process), "", False
    except CapabilityError as error:
        return None, str(error), True
    except ZhooksError as error:
        return None, str(error), False


def _has_moved(look: Look) -> bool:
    """Its stack is another one now; one that cannot be read any more says nothing."""
    stacks = _stacks(look.process)[0] if look.process is not None else None
    place = place_of(stacks) if stacks is not None else None
    return place is not None and look.place is not None and place.mark != look.place.mark


def _native(process: Process, place: Place) -> Place:
    """With C frames, where they say more."""
    try:
        better = place_of(stacks_of(process, native=True))
    except ZhooksError:
        return place
    return better if better is not None and better.frames == place.frames and better.clear else place


def _noted(doing: Doing) -> tuple[Stacks, int] | None:
    """The stacks that the rank noted itself, and when; None where it has moved since."""
    noted = doing.noted
    if noted is None:
        return None
    try:
        when = int(noted["time_ns"])
        threads = tuple(
            Thread(
                _text(each["name"]),
                int(each["number"]),
                tuple(Frame(_text(file), _text(function), int(line)) for file, function, line in each["frames"][:_MOST_FRAMES]),
            )
            for each in noted["threads"][:_MOST_THREADS]
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if doing.last_ns is not None and doing.last_ns > when:
        return None
    return Stacks(threads, "its own note"), when


def _text(value: object) -> str:
    return one_line(str(value)[-400:])


def _below(process: Process) -> list[Process]:
    return children_of(process.pid)[:_MOST_WORKERS]


def _workers(processes: Sequence[Process]) -> tuple[Worker, ...]:
    """Those of Python's that a rank waits for; multiprocessing's own are none."""
    workers = []
    for each in processes:
        if each.alive and each.is_python and not any("resource_tracker" in word for word in each.words):
            stacks, _, _ = _stacks(each)
            workers.append(Worker(each.pid, place_of(stacks) if stacks is not None else None))
    return tuple(workers)


def _sum(values: Iterable[float | None]) -> float | None:
    """Of those that were seen; None where the first, its own, was not."""
    seen = list(values)
    return None if not seen or seen[0] is None else sum(each for each in seen if each is not None)
