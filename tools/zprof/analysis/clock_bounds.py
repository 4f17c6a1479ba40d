"""Owns how far apart the clocks of hosts can be at all, by the collectives that their ranks took part in.

`zprof.analysis.ranks` asks it, to put ranks of several hosts on one clock. It assumes nothing of a network's delays, and says
nothing where collectives contradict each other.

Note: [What collectives prove]
    Nobody is done with a barrier, an all-reduce, an all-gather or a reduce-scatter before everybody has begun it. So the end
    of the n-th on one host is after each begin of the n-th on another, in true time, however late the end was noticed. Each
    such pair bounds the offset between the two clocks from one side; whoever was last bounds it closely. Over many collectives
    the bounds come as close as the quickest that either host was last to. Clocks whose rates differ can leave nothing in
    between: then no one offset is right for the whole run, and none is given.

Source: Cristian, Probabilistic clock synchronization (1989), which bounds an offset by messages in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zprof.analysis.ranks import Lane

    Int64s = NDArray[np.int64]

__all__ = ["SYNCHRONISING", "bounds"]

#: Of the default group, as recordings call them; those of other groups are not of all ranks.
SYNCHRONISING = frozenset(("collective", name) for name in ("barrier", "all_reduce", "all_gather", "reduce_scatter"))

Pair = tuple[str, str]


def bounds(lanes: Sequence[Lane], hosts: Sequence[Hashable]) -> dict[Hashable, tuple[int, int]]:
    """Host -> (least, most) to be added to its clock for that of the first lane's host; nothing for one that is not known.

    Args:
        hosts: of each lane, what its clock is of.
    """
    members: dict[Hashable, list[Lane]] = {}
    for lane, host in zip(lanes, hosts, strict=True):
        members.setdefault(host, []).append(lane)
    first = hosts[0]
    folded = {host: _folded(mine) for host, mine in members.items()}
    found = {}
    for host in members:
        if host != first and (between := _between(folded[first], folded[host])) is not None:
            found[host] = between
    return found


def _folded(lanes: Iterable[Lane]) -> dict[Pair, tuple[Int64s, Int64s]]:
    """(last begin, first end) on a host of each collective that all of its ranks took part in equally often."""
    import numpy as np

    found: dict[Pair, tuple[Int64s, Int64s]] = {}
    uneven: set[Pair] = set()
    for number, lane in enumerate(lanes):
        uneven |= found.keys() - lane.ends.keys()
        for pair, ends in lane.ends.items():
            begins = lane.begins[pair]
            if not number:
                found[pair] = begins, ends
            elif pair not in found or len(found[pair][0]) != len(begins):
                uneven.add(pair)
            else:
                found[pair] = np.maximum(found[pair][0], begins), np.minimum(found[pair][1], ends)
    return {pair: times for pair, times in found.items() if pair not in uneven}


def _between(here: dict[Pair, tuple[Int64s, Int64s]], there: dict[Pair, tuple[Int64s, Int64s]]) -> tuple[int, int] | None:
    least: list[int] = []
    most: list[int] = []
    for pair in here.keys() & there.keys():
        (begun, ended), (begun_there, ended_there) = here[pair], there[pair]
        # The n-th on one host is the n-th on the other only where both had as many.
        if len(begun) == len(begun_there) and len(begun):
            least.append(int((begun - ended_there).max()))
            most.append(int((ended - begun_there).min()))
    return (max(least), min(most)) if least and max(least) <= min(most) else None
