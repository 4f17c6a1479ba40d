"""What ``attach`` was given and what it will do, as data: made by ``checks.py`` and ``looking.py``, built by ``build.py``.

No tensor is in it but the model's own parameters, by their names.  It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from offload.policy import Policy
from zhooks.comm import Facts
from zhooks.layout import Group, Mesh, Table
from zhooks.run import Map
from zhooks.setup.arena import Reserve
from zhooks.setup.device_budget import Headroom
from zhooks.setup.tiers import Admission

__all__ = ["Plan", "Request"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What ``attach`` was given, read, and possible as far as one rank can tell.

    Attributes:
        device: where the parameters are, or shall be made.
        known: the optimizer that was passed, or none.
        facts: what must be the same on every rank beside policy and mesh, by subject.
    """

    model: nn.Module
    known: tuple[torch.optim.Optimizer, ...]
    policy: Policy
    mesh: Mesh
    device: torch.device
    init: Callable[[nn.Module], None] | None
    sync: bool
    facts: Mapping[str, Facts]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What will be built.

    Attributes:
        groups: the parameters of each unit, and the modules it is entered through.
        islands: where the model changes dtype.
        tiers: what is kept off the device; None where nothing is.
        headroom: what ``[budget] device`` leaves.
        arena: what the arena reserves for shards; None where there is none.
    """

    request: Request
    table: Table
    groups: tuple[Group, ...]
    islands: Map
    tiers: Admission | None
    headroom: Headroom
    arena: Reserve | None
