"""What ``attach`` was given: read, checked as far as one rank can tell, and kept as data.

``attach.py`` reads it before ranks meet.  It never changes a model and asks no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from offload.policy import Policy
from zhooks.activation import check_axis
from zhooks.comm import Facts
from zhooks.compiled import uncompiled
from zhooks.layout import Ignored, Mesh, resolve
from zhooks.optim import optimizer_facts
from zhooks.plan.checks import (
    check_arguments,
    check_division,
    check_embeddings,
    check_ignored,
    check_model,
    check_module,
    check_optimizer,
    check_resilience,
    check_scaled,
)
from zhooks.plan.initialisers import check_initialisers
from zhooks.plan.overlaps import check_own_memory
from zhooks.tensor import ShardedTensor

__all__ = ["Request", "read"]

#: In place of a policy: choose one.
AUTO = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What ``attach`` was given, read, and possible as far as one rank can tell.

    Attributes:
        ignored: what of the model stays as it is.
        device: where the parameters are, or shall be made.
        known: the optimizer that was passed, or none.
        automatic: the policy is still to be chosen, from this one on; ``chosen`` says once it was why it is this.
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
    ignored: Ignored
    automatic: bool = False
    chosen: str = ""

    @property
    def everywhere(self) -> Mapping[str, Facts]:
        """What must be the same on stages of a pipeline, too: they choose a policy together."""
        return {"attach": {"policy": AUTO if self.automatic else "given"}}


def read(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    policy: Policy | str | Path | dict[str, Any] | None,
    mesh: DeviceMesh | None,
    init: Callable[[nn.Module], None] | None,
    sync: bool,
) -> Request:
    """What ``attach`` was given.

    Raises:
        PolicyError: the policy cannot be read.
        AttachError: model, optimizer or mesh cannot be attached.
    """
    automatic = isinstance(policy, str) and policy == AUTO
    chosen = Policy() if automatic else Policy.of(policy)
    check_arguments(optimizer, mesh, init, sync)
    check_module(model)
    model = uncompiled(model)
    ignored = Ignored.of(model, chosen.units.ignore, ShardedTensor)
    device = check_model(model, ignored)
    check_ignored(model, ignored, chosen)
    check_own_memory(model, ignored)
    check_optimizer(model, optimizer, ignored)
    check_scaled(model, chosen, ignored)
    axes = resolve(mesh)
    check_embeddings(model, ignored, axes)
    check_division(model, axes.tp, ignored)
    check_axis(chosen, axes.names)
    check_resilience(chosen, axes.names)
    check_initialisers(model, init)
    facts = {"attach": {"sync": str(sync)}, "optimizer": optimizer_facts(optimizer, ignored.parameters(model))}
    known = () if optimizer is None else (optimizer,)
    return Request(model, known, chosen, axes, device, init, sync, facts, ignored, automatic)
