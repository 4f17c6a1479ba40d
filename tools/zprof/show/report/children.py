"""Owns what a report says of the processes under the recorded one: plain values for programs, and the lines drawn from them.

`findings` and `text` call it. It finds out nothing; `zprof.analysis.children` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from offload.text import as_moment, as_size
from zprof.analysis.children import Children
from zprof.trace.children import Recorded
from zprof.trace.header import Header

__all__ = ["Body", "children_body", "children_lines", "children_rows", "recorded_body", "recorded_rows"]

Body = dict[str, Any]

_MOST_NAMED = 4
#: A few have ended just now; so many are piling up.
_MANY_ZOMBIES = 16


def children_body(found: Children, begin_ns: int) -> Body:
    """The values; ``begin_ns`` is when the recording began."""

    def at_s(time_ns: int | None) -> float | None:
        return None if time_ns is None else (time_ns - begin_ns) / 1e9

    return {
        "seen": found.seen,
        "most": found.most,
        "bytes": found.pss_nbytes,
        "at_s": at_s(found.pss_ns),
        "rss_bytes": found.rss_nbytes,
        "tree_bytes": found.tree_nbytes,
        "shared_bytes": found.shared_nbytes,
        "unread": found.unread,
        "zombies": found.zombies,
        "kinds": [
            {
                "name": kind.name,
                "most": kind.most,
                "bytes": kind.pss_nbytes,
                "rss_bytes": kind.rss_nbytes,
                "cpu_s": kind.cpu_ns / 1e9,
                "busy": kind.busy,
                "queued": kind.queued,
            }
            for kind in found.kinds
        ],
        "who": [
            {name: value for name, value in asdict(child).items() if not name.endswith("nbytes")}
            | {"bytes": child.pss_nbytes, "rss_bytes": child.rss_nbytes}
            for child in found.who
        ],
        "who_at_s": at_s(found.who_ns),
    }


def children_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each kind: name, how many at once, the most they held, resident, and how busy each was."""
    for kind in found["kinds"]:
        busy = "-" if kind["busy"] is None else f"{kind['busy']:.0%} of a core"
        yield kind["name"], str(kind["most"]), _sized(kind["bytes"]), _sized(kind["rss_bytes"]), busy


def children_lines(found: Mapping[str, Any], shm_bytes: float | None) -> Iterator[str]:
    """What they held together; ``shm_bytes`` is the most of all files in /dev/shm."""
    if found["bytes"] is not None:
        line = f"{as_size(found['bytes'])} at most, at {as_moment(found['at_s'] * 1e9)}, shared memory counted once"
        if found["tree_bytes"] is not None:
            line += f"; {as_size(found['tree_bytes'])} at most with this process"
        if found["shared_bytes"]:
            line += f"; {as_size(found['shared_bytes'])} of it in shared memory"
        yield line if not shm_bytes else f"{line}; all files in /dev/shm {as_size(int(shm_bytes))} at most"
    if found["who"]:
        named = [f"{child['name']} (pid {child['pid']}) {as_size(child['bytes'])}" for child in found["who"][:_MOST_NAMED]]
        more = len(found["who"]) - _MOST_NAMED
        yield f"held most: {', '.join(named)}{f', and {more} more' if more > 0 else ''}"
    if found["unread"]:
        yield f"{found['unread']} of them cannot be read: counted with all the memory they share"
    if found["zombies"] >= _MANY_ZOMBIES:
        yield f"{found['zombies']} of them had ended and were not waited for"


def recorded_body(found: Sequence[Recorded], root: Header) -> list[Body]:
    """Those that have a trace of their own; ``root`` is the header of their script's."""
    return [
        {
            "file": str(child.path),
            "pid": child.header.pid,
            "rank": child.header.rank,
            "world": child.header.world,
            "began_s": (child.header.mono_ns - root.mono_ns) / 1e9,
            "since": child.why,
            "how": child.how,
            "end": None if child.exit is None else {"exit": child.exit, "reason": child.reason},
        }
        for child in found
    ]


def recorded_rows(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for each: file, which it is, when its recording began and with what, and how it ended."""
    for child in found:
        which = f"rank {child['rank']} of {child['world']}" if child["world"] > 1 else "a process"
        end = child["end"]
        ended = "killed, or still running" if end is None else "normally"
        if end is not None and end["exit"]:
            ended = f"exit code {end['exit']} {end['reason']}"
        began = f"{as_moment(child['began_s'] * 1e9)}: {child['since']}"
        yield child["file"], f"{which} (pid {child['pid']})", began, ended


def _sized(nbytes: int | None) -> str:
    return "-" if nbytes is None else as_size(nbytes)
