"""A GPT's training run over any mesh, stage and tiers, saved in one world and loaded in another; what is compared after it.

Tests of checkpoints run ``save`` and ``load`` on the ranks of two pools. ``load`` asserts that what was loaded is what was
saved, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zhooks
from tests.support.on_ranks import place
from tests.support.torches import Muon
from tests.support.tp_gpt import batch, divide, loss_of, plain_gpt

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=1e-2, max_iter=2),
    "muon": lambda params: Muon([param for param in params if param.dim() == 2], lr=1e-2),
}


def mesh_of(tp: int, replicate: int) -> DeviceMesh | None:
    """No mesh, or replicate x shard, or shard x tp over all ranks."""
    world = place()[1]
    if tp > 1:
        return init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    if replicate > 1:
        return init_device_mesh("cpu", (replicate, world // replicate), mesh_dim_names=("replicate", "shard"))
    return None


def policy_of(folder: Path, stage: int, tier: str, units: int | None = None, *, half: bool = False) -> dict[str, Any]:
    """What a run is attached under."""
    policy: dict[str, Any] = {"stage": stage, "units": {"min_numel": 0} | ({} if units is None else {"max_numel": units})}
    if tier != "device":
        # What is replicated beside a sharded optimizer is on the device at every use.
        cells = ("optimizer",) if stage in (1, 2) else ("parameter", "gradient", "optimizer")
        policy |= {cell: {"tier": tier} for cell in cells}
        policy |= {"disk": {"path": str(folder)}} if tier == "disk" else {}
    if half:
        policy["precision"] = {"param": "bf16", "reduce": "fp32"}
    return policy


class Resharded:
    """One run; ``seed`` says what it begins with."""

    def __init__(
        self, folder: Path, *, stage: int = 3, tier: str = "device", tp: int = 1, replicate: int = 1, units: int | None = None,
        kind: str = "adamw", seed: int = 0, half: bool = False, dtype: str = "float32", rows: int = 4,
        more: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.mesh = mesh_of(tp, replicate)
        model: nn.Module = plain_gpt(1, seed=seed)
        if dtype != "float32":
            model = model.to(getattr(torch, dtype))
        if tp > 1 and self.mesh is not None:
            model = divide(model, self.mesh["tp"])  # type: ignore[arg-type]
        policy = policy_of(folder, stage, tier, units, half=half) | (more or {})
        self.model, self.kind, self.rows = model, kind, rows
        self.attachment = zhooks.attach(model, policy=policy, mesh=self.mesh)
        self.optimizer = OPTIMIZERS[kind](list(model.parameters()))
        data = place()[1] // tp
        self.at = place()[0] // tp, data

    def forward(self, step: int) -> torch.Tensor:
        return loss_of(self.model, *batch(step, *self.at, size=self.rows))

    def train(self, first: int, steps: int) -> list[float]:
        """The mean losses over all ranks."""
        losses = []
        for step in range(first, first + steps):

            def closure(step: int = step) -> Any:
                self.optimizer.zero_grad()
                loss = self.forward(step)
                loss.backward()
                return loss

            if self.kind == "lbfgs":
                loss: Any = self.optimizer.step(closure)
            else:
                loss = closure()
                self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(mean(float(loss.detach())))
        return losses

    def full(self) -> Any:
        """Everything whole, on the first rank."""
        return self.attachment.state_dict(self.optimizer)


def mean(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return float(found)


def save(path: str, steps: int = 2, more_steps: int = 2, **setup: Any) -> list[float]:
    """Train, save to ``path``/run, what it is whole to ``path``/full.pt; returns the losses of the steps after that."""
    run = Resharded(Path(path), **setup)
    run.train(0, steps)
    run.attachment.save(Path(path) / "run", run.optimizer, extra={"step": steps})
    whole = run.full()
    if place()[0] == 0:
        torch.save(whole, Path(path) / "full.pt")
    losses = run.train(steps, more_steps)
    run.attachment.detach()
    return losses


def load(path: str, steps: int = 2, more_steps: int = 2, again: str = "", **setup: Any) -> list[float]:
    """Load, compare, save anew to ``path``/``again`` where that is named, and train on."""
    run = Resharded(Path(path), seed=5, **setup)
    assert run.attachment.load(Path(path) / "run", run.optimizer) == {"step": steps}
    compare(run.full(), path)
    if again:
        run.attachment.save(Path(path) / again, run.optimizer, extra={"step": steps})
    losses = run.train(steps, more_steps)
    run.attachment.detach()
    return losses


def compare(whole: Any, path: str) -> None:
    """On the first rank: the same bits as were saved."""
    if place()[0]:
        return
    wanted = torch.load(Path(path) / "full.pt", weights_only=True)
    differ = differences(whole, wanted)
    assert not differ, differ[:8]


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two states differ, in words."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{at}: {sorted(map(str, one))} and {sorted(map(str, other))}"]
        return [found for key in one for found in differences(one[key], other[key], f"{at}/{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{at}: {len(one)} and {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for number, pair in pairs for found in differences(*pair, f"{at}/{number}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
        return [] if same else [f"{at}: {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"]
    return [] if one == other else [f"{at}: {one!r} and {other!r}"]
