"""What is trained on the virtual device while a call is missing: policies and loops that between them make every call.

run.py runs them by name.  Each is what a user writes; what it computes is not looked at, for there is no data.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from offload.store import Mode
from offload.tier import Tier
from offload.virtual import Races, Stream, running
from tests.support.inside import store_of
from tests.support.matrix_optimizers import muon
from tests.support.two_streams import BRANCHES, TOWERS, Switch
from tests.support.virtual import machine
from tests.support.zoo import ZOO, Specimen

Policy = dict[str, Any]
Loop = Callable[[zhooks.Attachment, nn.Module, torch.optim.Optimizer, Specimen], None]

STEPS = 2


def loss_of(specimen: Specimen, model: nn.Module, step: int) -> Tensor:
    return specimen.loss(model, tuple(tensor.to("virtual") for tensor in specimen.batch(step, 0, 1)))


def plain(attachment: zhooks.Attachment, model: nn.Module, optimizer: torch.optim.Optimizer, specimen: Specimen) -> None:
    for step in range(STEPS):
        loss_of(specimen, model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def unclipped(attachment: zhooks.Attachment, model: nn.Module, optimizer: torch.optim.Optimizer, specimen: Specimen) -> None:
    for step in range(STEPS):
        loss_of(specimen, model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated(attachment: zhooks.Attachment, model: nn.Module, optimizer: torch.optim.Optimizer, specimen: Specimen) -> None:
    for step in range(STEPS):
        with attachment.no_sync():
            loss_of(specimen, model, step).backward()
        loss_of(specimen, model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with attachment.accumulate():
        loss_of(specimen, model, 0).backward()
        loss_of(specimen, model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()


def read(attachment: zhooks.Attachment, model: nn.Module, optimizer: torch.optim.Optimizer, specimen: Specimen) -> None:
    """Values, gradients and states are read and written between steps, and the model is evaluated."""
    plain(attachment, model, optimizer, specimen)
    with torch.no_grad():
        loss_of(specimen, model, 0)
        with attachment.resident():
            loss_of(specimen, model, 1)
        for param in model.parameters():
            param.mul_(0.5)
    loss_of(specimen, model, 2).backward()
    for param in model.parameters():
        assert isinstance(param, zhooks.ShardedTensor)
        param.full_tensor()
        if isinstance(param.grad, zhooks.ShardedTensor):
            param.grad.full_tensor()
        for state in optimizer.state[param].values():
            if isinstance(state, zhooks.ShardedTensor):
                state.full_tensor().add_(1)
    optimizer.step()
    optimizer.zero_grad()
    with attachment.gathered():
        pass
    attachment.unshard()
    loss_of(specimen, model, 3).backward()
    attachment.reshard()
    optimizer.step()


def moved(attachment: zhooks.Attachment, model: nn.Module, optimizer: torch.optim.Optimizer, specimen: Specimen) -> None:
    """States move between tiers, and a unit is frozen."""
    unclipped(attachment, model, optimizer, specimen)
    for tier in ("disk", "device"):
        for param in model.parameters():
            with torch.no_grad():
                param.mul_(0.5)
        attachment.apply({"units": {"min_numel": 0}, **placed(tier)})
        unclipped(attachment, model, optimizer, specimen)
    next(iter(model.parameters())).requires_grad_(False)
    unclipped(attachment, model, optimizer, specimen)


def asked(attachment: zhooks.Attachment, model: nn.Module, optimizer: torch.optim.Optimizer, specimen: Specimen) -> None:
    """Gradients go to who asked for them."""
    for step in range(STEPS):
        torch.autograd.grad(loss_of(specimen, model, step), list(model.parameters()))


def failing(attachment: zhooks.Attachment, model: nn.Module, optimizer: torch.optim.Optimizer, specimen: Specimen) -> None:
    """An update of whole parameters raises while the next ones are on their way, and training goes on."""
    unclipped(attachment, model, optimizer, specimen)
    loss_of(specimen, model, 0).backward()
    (group,) = optimizer.param_groups
    right, group["ns_steps"] = group["ns_steps"], 100  # which Muon refuses when it comes to the arithmetic
    with suppress(ValueError):
        optimizer.step()
    group["ns_steps"] = right
    optimizer.zero_grad()
    unclipped(attachment, model, optimizer, specimen)


def dropped(attachment: zhooks.Attachment, model: nn.Module, optimizer: torch.optim.Optimizer, specimen: Specimen) -> None:
    """Blocks are given back while they are being written, and their memory is used again."""
    store = store_of(attachment)
    for tier in (Tier.HOST, Tier.DISK, Tier.HOST):
        block = store.put("block", 1024, torch.float32, tier)
        with store.lease(block, Tier.DEVICE, Mode.WRITE_ALL) as values:
            values.fill_(1.0)
        del values
        block.drop()
        for _ in range(2):
            with torch.no_grad():
                store.put("next", 1024, torch.float32, tier).tensor(Mode.WRITE_ALL).fill_(2.0)
    unclipped(attachment, model, optimizer, specimen)


def side_by_side(attachment: zhooks.Attachment, model: nn.Module, optimizer: torch.optim.Optimizer, specimen: Specimen) -> None:
    """Some modules run on a stream of their own, and so do their parts of backward, of which the head's is the first."""
    with _apart(model, running().stream("second")):
        accumulated(attachment, model, optimizer, specimen)


@contextmanager
def _apart(model: nn.Module, second: Stream) -> Iterator[None]:
    first = running().current
    apart = [model.get_submodule(name) for name in ("blocks.0", "blocks.2", "head")]
    handles = [
        module.register_forward_pre_hook(lambda _, inputs: Switch.apply(inputs[0], first, second), prepend=True)
        for module in apart
    ]
    handles += [module.register_forward_hook(lambda _, __, output: Switch.apply(output, second, first)) for module in apart]
    yield
    for handle in handles:
        handle.remove()


def elsewhere(attachment: zhooks.Attachment, model: nn.Module, optimizer: torch.optim.Optimizer, specimen: Specimen) -> None:
    """As `side_by_side`; between steps the second stream goes on by itself, and waits for nothing of the first."""
    here = running()
    second = here.stream("second")

    def step_over() -> None:
        optimizer.step()
        optimizer.zero_grad()
        with here.using(second):
            torch.empty(4096, device="virtual").fill_(1)

    with _apart(model, second):
        for step in range(STEPS):
            loss_of(specimen, model, step).backward()
            step_over()


def watching(attachment: zhooks.Attachment, model: nn.Module, optimizer: torch.optim.Optimizer, specimen: Specimen) -> None:
    """Backward reads states that an update beside it is changing."""

    def look(module: nn.Module, *_: Any) -> None:
        for param in model.parameters():
            for state in optimizer.state.get(param, {}).values():
                if isinstance(state, zhooks.ShardedTensor):
                    state.to_local().sum()

    # Not of what is given integers: torch warns where no input needs a gradient.
    leaves = [module for module in model.modules() if not list(module.children()) and not isinstance(module, nn.Embedding)]
    handles = [module.register_full_backward_hook(look) for module in leaves]
    unclipped(attachment, model, optimizer, specimen)
    for handle in handles:
        handle.remove()


def placed(tier: str, **more: Any) -> Policy:
    return {cell: {"tier": tier} for cell in ("parameter", "gradient", "optimizer")} | more


SPECIMENS = {**ZOO, BRANCHES.name: BRANCHES, TOWERS.name: TOWERS}


@dataclass(frozen=True)
class Workload:
    """A policy under which a model of the zoo is trained in a loop, on hardware with such costs."""

    policy: Policy = field(default_factory=dict)
    loop: Loop = plain
    model: str = "gpt"
    world: int = 4
    mesh: tuple[int, int] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    costs: dict[str, float] = field(default_factory=dict)


#: A host that is far ahead of slow copies and disks, and one that finds them over.
AHEAD: dict[str, float] = {"issue": 1e-3, "kernel": 1e-2, "transfer": 10.0, "drive": 30.0, "network": 5.0}
BEHIND: dict[str, float] = {"issue": 1.0, "kernel": 1e-3, "transfer": 1e-3, "drive": 1e-3, "network": 1e-3}

SMALL = {"min_bytes": 0}
WORKLOADS: dict[str, Workload] = {
    "device": Workload(),
    "device, prefetch 0": Workload({"schedule": {"prefetch": 0}}, costs=AHEAD),
    "device, prefetch 4": Workload({"schedule": {"prefetch": 4}}, costs=AHEAD),
    "host": Workload(placed("host"), costs=AHEAD),
    "host, prefetch 0": Workload(placed("host", schedule={"prefetch": 0}), costs=BEHIND),
    "host, prefetch 4": Workload(placed("host", schedule={"prefetch": 4})),
    "host, updated there": Workload(placed("host", optimizer={"tier": "host", "compute": "host"}), costs=AHEAD),
    "disk": Workload(placed("disk"), costs=AHEAD),
    "disk, prefetch 4": Workload(placed("disk", schedule={"prefetch": 4})),
    "disk, updated on the host": Workload(placed("disk", optimizer={"tier": "disk", "compute": "host"}), costs=AHEAD),
    "bf16 over tiers": Workload(placed("disk", parameter={"tier": "host"}, precision={"param": "bf16"}), costs=AHEAD),
    "stage 0": Workload({"stage": 0}, accumulated),
    "stage 1": Workload({"stage": 1, "optimizer": {"tier": "disk"}, "precision": {"param": "bf16"}}, costs=AHEAD),
    "stage 2": Workload({"stage": 2, "optimizer": {"tier": "host"}, "gradient": {"tier": "host"}}, accumulated, costs=AHEAD),
    "activations on the host": Workload({"activation": {"tier": "host", **SMALL}}, costs=AHEAD),
    "activations on disk": Workload({"activation": {"tier": "disk", **SMALL}}, costs=AHEAD),
    "recomputed from disk": Workload({"activation": {"tier": "disk", "checkpoint": "unit", **SMALL}}),
    "arena": Workload({"device": {"arena": "all"}, "activation": {"checkpoint": "unit"}}),
    "arena over tiers": Workload(placed("host", device={"arena": "all"}), costs=AHEAD),
    "small buffers": Workload(placed("host", comm={"buffer": 4096}), accumulated, costs=AHEAD),
    "accumulated": Workload({"gradient": {"tier": "host"}}, accumulated),
    "overlap": Workload({"optimizer": {"overlap": True}}, unclipped),
    "overlap over tiers": Workload(placed("disk", optimizer={"tier": "disk", "overlap": True}), unclipped, costs=AHEAD),
    "overlap, updated on the host": Workload(
        placed("host", optimizer={"tier": "host", "compute": "host", "overlap": True}), unclipped, costs=AHEAD
    ),
    "one rank": Workload(placed("host"), unclipped, world=1, costs=AHEAD),
    "owners moved": Workload(placed("host"), moved, optimizer=muon, costs=AHEAD),
    "owners failing": Workload({"comm": {"buffer": 4096}}, failing, optimizer=muon, costs=AHEAD),
    "stage 1 in segments": Workload(
        {"stage": 1, "precision": {"param": "bf16"}, "units": {"min_numel": 0, "max_numel": 256}}, costs=AHEAD
    ),
    "owners alone": Workload(placed("disk"), unclipped, world=1, optimizer=muon, costs=AHEAD),
    "dropped": Workload(placed("disk"), dropped, costs=AHEAD),
    "long parameters": Workload(placed("host", comm={"buffer": 512}), read, costs=AHEAD),
    "gradients asked for": Workload(placed("host"), asked, costs=AHEAD),
    "replicas": Workload(mesh=(2, 2), costs=AHEAD),
    "replicas over tiers": Workload(placed("host"), accumulated, mesh=(2, 2), costs=AHEAD),
    "owners": Workload(optimizer=muon, loop=unclipped, costs=AHEAD),
    "owners over tiers": Workload(placed("disk"), unclipped, optimizer=muon, costs=AHEAD),
    "read": Workload(loop=read),
    "read over tiers": Workload(placed("disk"), read, costs=AHEAD),
    "moved": Workload(placed("host"), moved, costs=AHEAD),
    "overlap, updated on the host from disk": Workload(
        placed("disk", optimizer={"tier": "disk", "compute": "host", "overlap": True}), unclipped, costs=AHEAD
    ),
    "overlap, states looked at": Workload(
        placed("host", optimizer={"tier": "host", "compute": "host", "overlap": True}), watching, costs=AHEAD
    ),
    "two streams": Workload(loop=side_by_side),
    "a stream that goes on": Workload(loop=elsewhere),
    "towers": Workload(loop=unclipped, model="towers"),
    "towers, kept gathered": Workload({"stage": 2}, unclipped, model="towers"),
    "towers over tiers": Workload(placed("host"), unclipped, model="towers"),
    "towers in an arena": Workload({"device": {"arena": "all"}}, unclipped, model="towers"),
    "towers, activations on the host": Workload({"activation": {"tier": "host", **SMALL}}, unclipped, model="towers"),
    "branches": Workload(loop=unclipped, model="branches"),
    "branches, kept gathered": Workload({"stage": 2}, read, model="branches"),
    "branches over tiers": Workload(placed("host"), unclipped, model="branches"),
    "branches in an arena": Workload({"device": {"arena": "all"}}, unclipped, model="branches"),
    "branches on one rank": Workload(placed("host"), unclipped, model="branches", world=1),
    "branches, activations on the host": Workload({"activation": {"tier": "host", **SMALL}}, unclipped, model="branches"),
}


def train(name: str) -> Races:
    """Train, and return what was found; an error of the packages' is raised."""
    chosen = WORKLOADS[name]
    races = Races()
    with machine(world=chosen.world, **chosen.costs) as made:
        made.listeners.append(races)
        specimen = SPECIMENS[chosen.model]
        with torch.device("virtual"):
            model = specimen.make()
        mesh = chosen.mesh and init_device_mesh("cpu", chosen.mesh, mesh_dim_names=("replicate", "shard"))
        attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, **chosen.policy}, mesh=mesh)
        with _detached_at_the_end(attachment):
            chosen.loop(attachment, model, chosen.optimizer(model.parameters()), specimen)
        del model, attachment
        gc.collect()
    return races


@contextmanager
def _detached_at_the_end(attachment: zhooks.Attachment) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(Exception):
            attachment.detach()
        raise
    attachment.detach()
