"""Ranks that are slower than the profile says: a straggler, a node with a slow link, and what the others wait for.

``run.py`` merges what it was given to one `Pace` and hands it to `HardwareCosts`.  It simulates nothing.

Note: [The slowest rank]
    One rank stands for all that are alike.  Every rank meets every other in a step's collectives, if not in one group then over
    those of other axes, so a step takes what it takes the slowest rank, which waits for nobody: that one is simulated.  A ring
    or a tree is as fast as its slowest link, and of the groups beside each other on an axis one has it.  Ranks that are slow in
    different things are taken to be one that is slow in all of them, which is the most that a step can take.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from offload.errors import SimulationError
from offload.hardware import Hardware

__all__ = ["Pace", "Slowdown", "slowed", "slowest"]


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Ranks that are slower than the hardware profile says, by factors.

    Attributes:
        ranks: which ranks.
        compute: factor for operations on their devices.
        link: factor for bytes over the links inside their nodes; 2.0 is half the bandwidth.
        network: factor for bytes between their nodes and others.
    """

    ranks: Sequence[int]
    compute: float = 1.0
    link: float = 1.0
    network: float = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """That of the slowest rank, see Note [The slowest rank].

    Attributes:
        rank: its number.
        slow: how many ranks are slower in something.
    """

    rank: int
    slow: int
    compute: float
    link: float
    network: float


def slowest(given: Slowdown | Iterable[Slowdown], world: int) -> Pace | None:
    """All of them in one; None where nothing is slow.

    Raises:
        SimulationError: something else than slowdowns, a factor below 1, or ranks that are not there.
    """
    every = [given] if isinstance(given, Slowdown) else list(given) if isinstance(given, Iterable) else [given]
    for one in every:
        if not isinstance(one, Slowdown):
            raise SimulationError(f"slow expected a Slowdown, or several of them, found {one!r}.")
        for name in ("compute", "link", "network"):
            factor = getattr(one, name)
            if not isinstance(factor, int | float) or not 1.0 <= factor < math.inf:
                raise SimulationError(
                    f"slow expected {name} to be a factor of at least 1.0, by which it takes longer, found {factor!r}. For "
                    "faster devices, use another hardware profile."
                )
        ranks: object = one.ranks
        if not isinstance(ranks, Collection) or not ranks or not all(isinstance(at, int) and 0 <= at < world for at in ranks):
            shown = list(ranks) if isinstance(ranks, range) else ranks
            raise SimulationError(f"slow expected ranks as numbers from 0 to {world - 1}, found {shown}.")
    every = [one for one in every if max(one.compute, one.link, one.network) > 1.0]
    if not every:
        return None
    shown = max(every, key=lambda one: (one.compute, one.network, one.link))
    factors = [max(getattr(one, name) for one in every) for name in ("compute", "link", "network")]
    return Pace(min(shown.ranks), len({rank for one in every for rank in one.ranks}), *factors)


def slowed(hardware: Hardware, pace: Pace) -> Hardware:
    """The profile whose collectives are those of the slowest groups."""
    link, network = hardware.link, hardware.network
    node = None if link.node_bandwidth is None else link.node_bandwidth / pace.link
    changed = {"link": {"bandwidth": link.bandwidth / pace.link, **({} if node is None else {"node_bandwidth": node})}}
    if network is not None:
        changed["network"] = {"bandwidth": network.bandwidth / pace.network}
    return hardware.replaced(**changed)
