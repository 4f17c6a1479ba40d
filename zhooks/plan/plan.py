"""From what ``attach`` was given to what it will build, as data: a request, read and checked by one rank; then a plan.

Whatever the model, the ranks or a budget do not allow is refused here.  No model is changed, and no tensor made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from offload.errors import AttachError
from offload.policy import Policy
from offload.text import counted
from zhooks.activation import check_axis
from zhooks.comm import CONTROL, Call, Comm, ControlPlane, Facts, Transport, by_rank, text_digest
from zhooks.compiled import uncompiled
from zhooks.layout import Division, Group, Ignored, Mesh, Table, UnitPlan, find_units, part_of, resolve
from zhooks.optim import optimizer_facts
from zhooks.plan.budget import Admission, Headroom, admit, device_headroom, ignored_here, shards_reserve
from zhooks.plan.checks import (
    check_arguments,
    check_division,
    check_embeddings,
    check_ignored,
    check_initialisers,
    check_model,
    check_module,
    check_optimizer,
    check_own_memory,
    check_resilience,
    check_scaled,
)
from zhooks.plan.layouts import Layouts
from zhooks.run import Map, chart
from zhooks.tensor import ShardedTensor
from zhooks.unit import Reserve

__all__ = ["Plan", "Request", "make", "read"]

#: In place of a policy: choose one.
AUTO = "auto"
#: So many parameters that differ between ranks are named.
_NAMED = 2


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


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What will be built.

    Attributes:
        units: in order; no tensor is in them but the model's own parameters, by their names.
        islands: where the model changes dtype.
        tiers: what is kept off the device; None where nothing is.
        headroom: what ``[budget] device`` leaves.
        reserve: what the arena reserves for shards.
    """

    request: Request
    table: Table
    units: tuple[UnitPlan, ...]
    islands: Map
    tiers: Admission | None
    headroom: Headroom
    reserve: Reserve


def make(request: Request, comm: Comm) -> Plan:
    """What building ``request`` comes to.  Collective.

    Raises:
        AttachError: ranks have other models or values, or a rule splits a module over dtypes.
        BudgetError, CapabilityError: a tier or the device cannot hold what the policy keeps there; on every rank.
    """
    model, policy, device = request.model, request.policy, request.device
    ranks = ControlPlane(comm.stage, "attach")
    with ranks.all_or_none():
        groups = find_units(model, policy, request.ignored)
    _check_same_model(groups, request.ignored, comm.stage)
    if not request.sync:
        _check_ranks_equal(model, comm, request.ignored)
    with ranks.all_or_none():
        units = Layouts.of(model, policy, comm, device).units(groups)
    tiers = admit(policy, device, units, comm)
    headroom = device_headroom(policy, device, units, request.known, comm, ignored_here(request.ignored, device))
    islands = chart(model, units, policy)
    return Plan(
        request, Table.of(policy.table()), units, islands, tiers, headroom, shards_reserve(policy, device, units)
    )


def _check_same_model(groups: Sequence[Group], ignored: Ignored, world: Transport) -> None:
    """Every rank attaches the same parameters in the same units, beside the same frozen tensor subclasses.  Collective.

    Raises:
        AttachError: names, shapes, dtypes, requires_grad or units differ between ranks, or what a frozen subclass holds; it
            says what each rank has.
    """
    facts = [
        f"{name} {tuple(param.shape)} {param.dtype}, {'trainable' if param.requires_grad else 'frozen'}, in unit {number}"
        f"{f', {placements}' if (placements := getattr(param, 'placements', '')) else ''}"
        for number, group in enumerate(groups)
        for name, param in group.params.items()
    ]
    if world.axis.world > 1:
        frozen = {name: one for name, one in ignored.frozen.items() if name in ignored.unnamed}
        facts += [f"{name} {one.kind}, which is frozen, checksum {one.checksum()}" for name, one in frozen.items()]
    ranks = ControlPlane(world, "compare models")
    if ranks.agree("\n".join(facts)):
        return

    def on_each_rank(text: str) -> str:
        return by_rank(dict(zip(world.axis.ranks, ranks.texts(text), strict=True)))

    if not ranks.agree(str(len(facts))):
        found = on_each_rank(counted(len(facts), "parameter"))
    else:
        differ = _differing(facts, [text_digest(fact) for fact in facts], world, "compare models")
        found = "; ".join(on_each_rank(fact) for fact in differ[:_NAMED])
        found += f"; and {counted(len(differ) - _NAMED, 'more parameter')}" if len(differ) > _NAMED else ""
    raise AttachError(f"attach expected the same model and policy on every rank, found {found}. Build the same on all ranks.")


def _check_ranks_equal(model: nn.Module, comm: Comm, ignored: Ignored) -> None:
    """With ``sync=False``: every rank's parameters and buffers hash to the same, over tp too where it has them whole."""
    named = [*ignored.named_parameters(model), *ignored.named_buffers(model)]
    apart = {name for name, tensor in named if (division := Division.of(tensor)) is not None and division.place is not None}
    for ranks, compared in ((comm.world, dict(named)), (comm.tp, {name: one for name, one in named if name not in apart})):
        differ = _differing(list(compared), [_digest(part_of(tensor)) for tensor in compared.values()], ranks, "compare ranks")
        if differ:
            more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
            raise AttachError(
                f"attach(sync=False) expected equal values on every rank, found that {', '.join(differ[:3])}{more} differ "
                f"(rank {ranks.axis.ranks[ranks.axis.rank]} among them). Use sync=True, or the same seed on every rank."
            )


def _digest(tensor: Tensor) -> int:
    if tensor.device.type == "meta":
        return 0
    raw = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(raw.data, digest_size=8).digest(), "little", signed=True)


def _differing(names: Sequence[str], digests: Sequence[int], ranks: Transport, what: str) -> list[str]:
    """Those of ``names`` whose digests are not the same on every rank.  Collective."""
    least = torch.tensor(digests, dtype=torch.int64, device="cpu")
    most = least.clone()
    if digests:
        ranks.all_reduce(Call(CONTROL, what, "each parameter"), least, "min")
        ranks.all_reduce(Call(CONTROL, what, "each parameter"), most, "max")
    return [name for name, same in zip(names, (least == most).tolist(), strict=True) if not same]
