"""Owns which steps of a run have their operators recorded: how it is said, what is taken unsaid, and how long at most.

`zprof.commands.run`, notebooks and the recorder read it; `zprof.recording.operators` keeps to it. It needs only the standard
library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DEFAULT", "LONGEST_S", "MOST_RSS_NBYTES", "Schedule"]

#: Steps after the first ones, which fill pools and caches, and before a reader loses patience.
DEFAULT = "3:6"
#: One window ends after this long, or once the process has grown by so much: torch.profiler keeps all of it in memory.
LONGEST_S = 60.0
MOST_RSS_NBYTES = 4 << 30
_RANGE = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)
_MOST_RANGES = 64


@dataclass(frozen=True, slots=True)
class Schedule:
    """When operators are recorded.

    Attributes:
        ranges: of steps, counted from 0: from the first number to below the second, ascending and apart.
        whole: from the beginning of the recording on, whether there are steps or not.
        stack: also the lines of code that called operators.
    """

    ranges: tuple[tuple[int, int], ...]
    whole: bool = False
    stack: bool = False

    @classmethod
    def of(cls, steps: str = DEFAULT, *, stack: bool = False) -> Schedule:
        """From "10:13" (steps 10, 11 and 12), "3:6,100:103", or "all" for the whole recording, as far as it is bounded.

        Raises:
            ValueError: it is none of these.
        """
        if steps == "all":
            return cls((), True, stack)
        ranges: list[tuple[int, int]] = []
        for word in steps.split(","):
            found = _RANGE.fullmatch(word.strip())
            begin, end = (int(found[1]), int(found[2])) if found else (0, 0)
            if begin >= end or (ranges and begin < ranges[-1][1]) or len(ranges) == _MOST_RANGES:
                raise ValueError(f"expected steps such as 10:13 or 3:6,100:103, or all, found {steps!r}")
            ranges.append((begin, end))
        return cls(tuple(ranges), False, stack)

    def __str__(self) -> str:
        return "all" if self.whole else ",".join(f"{begin}:{end}" for begin, end in self.ranges)
