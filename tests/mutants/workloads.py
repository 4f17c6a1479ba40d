"""What is trained while a call is missing: policies and loops that between them make every call.

run.py runs them by name on the virtual device, which has no data, and accelerated.py on the accelerator, where what they
compute is compared.  Each is what a user writes.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zhooks
from offload.store import Mode
from offload.tier import Tier
from offload.virtual import Races
from tests.support.inside import store_of
from tests.support.matrix_optimizers import muon
from tests.support.on_ranks import folder, place
from tests.support.tp_gpt import Mlp
from tests.support.two_streams import BRANCHES, SKIPPING, TOWERS, Switch, on_accelerator, streams
from tests.support.virtual import machine
from tests.support.zoo import ZOO, Specimen, draw_vectors, squared

Policy = dict[str, Any]


STEPS = 2


@dataclass(frozen=True, slots=True)
class Run:
    """A model in training.

    Attributes:
        seen: what was computed on the way, copies that nothing overwrites.
    """

    attachment: zhooks.Attachment
    model: nn.Module
    optimizer: torch.optim.Optimizer
    specimen: Specimen
    device: torch.device
    seen: list[Tensor] = field(default_factory=list)

    def loss(self, step: int) -> Tensor:
        batch = self.specimen.batch(step, *(place() if on_accelerator() and self.specimen is not ALIKE else (0, 1)))
        loss = self.specimen.loss(self.model, tuple(tensor.to(self.device) for tensor in batch))
        self.see(loss)
        return loss

    def see(self, tensor: Tensor) -> None:
        self.seen.append(tensor.detach().clone())


Loop = Callable[[Run], None]


def plain(run: Run) -> None:
    for step in range(STEPS):
        run.loss(step).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()


def unclipped(run: Run) -> None:
    for step in range(STEPS):
        run.loss(step).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def accumulated(run: Run) -> None:
    for step in range(STEPS):
        with run.attachment.no_sync():
            run.loss(step).backward()
        run.loss(step).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    with run.attachment.accumulate():
        run.loss(0).backward()
        run.loss(1).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def read(run: Run) -> None:
    """Values, gradients and states are read and written between steps, and the model is evaluated."""
    plain(run)
    with torch.no_grad():
        run.loss(0)
        with run.attachment.resident():
            run.loss(1)
        for param in run.model.parameters():
            param.mul_(0.5)
    run.loss(2).backward()
    for param in run.model.parameters():
        assert isinstance(param, zhooks.ShardedTensor)
        run.see(param.full_tensor())
        if isinstance(param.grad, zhooks.ShardedTensor):
            run.see(param.grad.full_tensor())
        for state in run.optimizer.state[param].values():
            if isinstance(state, zhooks.ShardedTensor):
                run.see(state.full_tensor().add_(1))
    run.optimizer.step()
    run.optimizer.zero_grad()
    with run.attachment.gathered():
        pass
    run.attachment.unshard()
    run.loss(3).backward()
    run.attachment.reshard()
    run.optimizer.step()


def moved(run: Run) -> None:
    """States move between tiers, and a unit is frozen."""
    unclipped(run)
    for tier in ("disk", "device"):
        for param in run.model.parameters():
            with torch.no_grad():
                param.mul_(0.5)
        run.attachment.apply({"units": {"min_numel": 0}, **placed(tier)})
        unclipped(run)
    next(iter(run.model.parameters())).requires_grad_(False)
    unclipped(run)


def asked(run: Run) -> None:
    """Gradients go to who asked for them."""
    for step in range(STEPS):
        for grad in torch.autograd.grad(run.loss(step), list(run.model.parameters())):
            run.see(grad.full_tensor() if isinstance(grad, zhooks.ShardedTensor) else grad)


def failing(run: Run) -> None:
    """An update of whole parameters raises while the next ones are on their way, and training goes on."""
    unclipped(run)
    run.loss(0).backward()
    (group,) = run.optimizer.param_groups
    right, group["ns_steps"] = group["ns_steps"], 100  # which Muon refuses when it comes to the arithmetic
    with suppress(ValueError):
        run.optimizer.step()
    group["ns_steps"] = right
    # What would still be written for the next ones was free when this was taken.
    sizes = range(128, 2048, 128) if on_accelerator() else ()
    taken = [torch.full((size,), 2.0, device=run.device) for size in sizes for _ in range(3)]
    run.optimizer.zero_grad()
    unclipped(run)
    for tensor in taken:
        run.see(tensor)


def dropped(run: Run) -> None:
    """Blocks are given back while they are being written, and their memory is used again."""
    store = store_of(run.attachment)
    for tier in (Tier.HOST, Tier.DISK, Tier.HOST):
        block = store.put("block", 1024, torch.float32, tier)
        with store.lease(block, Tier.DEVICE, Mode.WRITE_ALL) as values:
            values.fill_(1.0)
        del values
        block.drop()
        for _ in range(2):
            with torch.no_grad():
                run.see(store.put("next", 1024, torch.float32, tier).tensor(Mode.WRITE_ALL).fill_(2.0))
    unclipped(run)


def side_by_side(run: Run) -> None:
    """Some modules run on a stream of their own, and so do their parts of backward, of which the head's is the first."""
    with _apart(run.model, streams().stream("second")):
        accumulated(run)


@contextmanager
def _apart(model: nn.Module, second: Any) -> Iterator[None]:
    first = streams().current
    apart = [model.get_submodule(name) for name in ("blocks.0", "blocks.2", "head")]
    handles = [
        module.register_forward_pre_hook(lambda _, inputs: Switch.apply(inputs[0], first, second), prepend=True)
        for module in apart
    ]
    handles += [module.register_forward_hook(lambda _, __, output: Switch.apply(output, second, first)) for module in apart]
    yield
    for handle in handles:
        handle.remove()


def elsewhere(run: Run) -> None:
    """As `side_by_side`; between steps the second stream goes on by itself, and waits for nothing of the first."""
    here = streams()
    second = here.stream("second")

    def step_over() -> None:
        run.optimizer.step()
        run.optimizer.zero_grad()
        with here.using(second):
            torch.empty(4096, device=run.device).fill_(1)

    with _apart(run.model, second):
        for step in range(STEPS):
            run.loss(step).backward()
            step_over()


def watching(run: Run) -> None:
    """Backward reads states that an update beside it is changing."""

    def look(module: nn.Module, *_: Any) -> None:
        for param in run.model.parameters():
            for state in run.optimizer.state.get(param, {}).values():
                if isinstance(state, zhooks.ShardedTensor):
                    run.see(state.to_local().sum())

    # Not of what is given integers: torch warns where no input needs a gradient.
    leaves = [module for module in run.model.modules() if not list(module.children()) and not isinstance(module, nn.Embedding)]
    handles = [module.register_full_backward_hook(look) for module in leaves]
    unclipped(run)
    for handle in handles:
        handle.remove()


def saved(run: Run) -> None:
    """What was saved while training went on is loaded after it."""
    unclipped(run)
    with folder() as path:
        run.attachment.save(path / "one", run.optimizer, wait=False)
        unclipped(run)
        run.attachment.load(path / "one", run.optimizer)
    unclipped(run)


def kept_by_peers(run: Run) -> None:
    """What each rank has is in the memory of the other's host, too, and is found there."""
    unclipped(run)
    run.attachment.save_to_peers(run.optimizer)
    unclipped(run)
    run.attachment.resume((), run.optimizer)
    unclipped(run)


def exported(run: Run) -> None:
    """The states of whole parameters leave their owners."""
    unclipped(run)
    # Rank 0 has it all.
    for states in run.attachment.state_dict(run.optimizer).get("optimizer", {"state": {}})["state"].values():
        for state in states.values():
            if isinstance(state, Tensor):
                run.see(state)


def averaged(run: Run) -> None:
    """The user's own collectives change parameters."""
    unclipped(run)
    for param in run.model.parameters():
        param.data.mul_(1.0 + place()[0])
        dist.all_reduce(param.data, async_op=True).wait()
    unclipped(run)


def placed(tier: str, **more: Any) -> Policy:
    return {cell: {"tier": tier} for cell in ("parameter", "gradient", "optimizer")} | more


#: Layers whose inputs two ranks have alike.
ALIKE = Specimen("alike", lambda: nn.Sequential(Mlp(8), Mlp(8), Mlp(8)), draw_vectors(8, 8), squared)
SPECIMENS = {each.name: each for each in (*ZOO.values(), BRANCHES, TOWERS, SKIPPING, ALIKE)}


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
    "owners failing": Workload({"comm": {"buffer": 1024}}, failing, optimizer=muon, costs=AHEAD),
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


#: What has to have values, or ranks that are there.
VALUED: dict[str, Workload] = {
    "saved": Workload(loop=saved),
    "saved from tiers": Workload(placed("host"), saved),
    "kept by peers": Workload({"resilience": {"job": "mutants"}}, kept_by_peers),
    "owners exported": Workload(loop=exported, optimizer=muon),
    "averaged": Workload(loop=averaged),
    "layers skipped": Workload(loop=unclipped, model="skipping"),
    "towers in an arena, prefetch 4": Workload(
        {"device": {"arena": "all"}, "schedule": {"prefetch": 4}}, unclipped, model="towers"
    ),
    "inputs divided": Workload({"activation": {"checkpoint": "unit", "partition": "tp", **SMALL}}, unclipped, model="alike"),
}


def train(name: str) -> Races:
    """Train, and return what was found; an error of the packages' is raised."""
    chosen = WORKLOADS[name]
    races = Races()
    with machine(world=chosen.world, **chosen.costs) as made:
        made.listeners.append(races)
        with torch.device("virtual"):
            model = SPECIMENS[chosen.model].make()
        _train(chosen, model, torch.device("virtual"))
        del model
        gc.collect()
    return races


def train_on_accelerator(name: str) -> list[Tensor]:
    """What is computed: on the way, states at the end, and the parameters."""
    chosen, device = (WORKLOADS | VALUED)[name], torch.device("accel", torch.accelerator.current_device_index())
    if chosen.model == "gpt" and chosen.loop not in (side_by_side, elsewhere, watching):
        # It has a tenth of the kernels.
        chosen = replace(chosen, model="mlp")
    # Other values than rank 0's, which attach sends to all but those that have the same.
    model = SPECIMENS[chosen.model].build(7 + (0 if chosen.model == ALIKE.name else place()[0])).to(device)
    run = _train(chosen, model, device)
    torch.accelerator.synchronize()
    seen = [tensor.cpu() for tensor in (*run.seen, *(param.detach() for param in model.parameters()))]
    del run, model
    gc.collect()
    return seen


def _train(chosen: Workload, model: nn.Module, device: torch.device) -> Run:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        policy = {"units": {"min_numel": 0}, **chosen.policy}
        if chosen.loop is kept_by_peers:
            # That of a host of each rank's own.
            policy["resilience"] = {**policy["resilience"], "memory": memory}
        attachment = zhooks.attach(model, policy=policy, mesh=_mesh_of(chosen))
        with _detached_at_the_end(attachment):
            run = Run(attachment, model, chosen.optimizer(model.parameters()), SPECIMENS[chosen.model], device)
            chosen.loop(run)
            for states in run.optimizer.state.values() if on_accelerator() else ():
                for state in states.values():
                    if isinstance(state, Tensor):
                        run.see(state.to_local() if isinstance(state, zhooks.ShardedTensor) else state)
    return run


def _mesh_of(chosen: Workload) -> DeviceMesh | None:
    if chosen.model == ALIKE.name:
        return init_device_mesh("accel", (1, 2), mesh_dim_names=("dp", "tp"))
    kind = "accel" if on_accelerator() else "cpu"
    return init_device_mesh(kind, chosen.mesh, mesh_dim_names=("replicate", "shard")) if chosen.mesh else None


@contextmanager
def _detached_at_the_end(attachment: zhooks.Attachment) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(Exception):
            attachment.detach()
        raise
    attachment.detach()
