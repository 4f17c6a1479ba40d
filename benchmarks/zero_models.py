"""The models and the mixed precision of the ZeRO paper, and one attached to so many ranks of the virtual device.

`zero_tables.py` calls it. It prints nothing and knows no figure of the paper's.

Source: ZeRO, arXiv:1910.02054, section 3.1: parameters and gradients in fp16, an fp32 copy of the parameters, momentum and
variance, 16 bytes a parameter. So the model is fp16 here, and the fp32 copy is a state of its optimizer; what a policy with
`[precision] param` makes of an fp32 model is another layout (docs/explanation/memory.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import zhooks
from offload.hardware import Hardware
from offload.virtual import NAME, Machine
from workload import GPT, Shape
from zhooks.simulate.costs import HardwareCosts

VOCAB, LENGTH = 50_304, 1024


def shape(layers: int, dim: int, batch: int = 1, length: int = LENGTH) -> Shape:
    return Shape(layers=layers, dim=dim, heads=dim // 128, vocab=VOCAB, length=length, batch=batch)


class MasterAdam(torch.optim.Optimizer):
    """Adam for 16-bit parameters that keeps fp32 copies of them among its states: 12 bytes a parameter."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (first, second), lr, eps = group["betas"], group["lr"], group["eps"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["master"] = param.detach().to(torch.float32)
                    state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
                    state["step"] = 0
                state["step"] += 1
                grad: Tensor = param.grad.to(torch.float32)
                state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
                size = lr / (1 - first ** state["step"])
                root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(eps)
                state["master"].addcdiv_(state["exp_avg"], root, value=-size)
                param.copy_(state["master"])


def build(size: Shape, dtype: torch.dtype = torch.float16) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer]]:
    """What `zhooks.simulate` calls."""

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = GPT(size).to(dtype)
        return model, MasterAdam(model.parameters())

    return built


def build_divided(size: Shape) -> Callable[[DeviceMesh], tuple[nn.Module, torch.optim.Optimizer]]:
    """The same with every layer divided over the mesh's "tp", as Megatron divides it (arXiv:1909.08053)."""

    def built(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = GPT(size).to(torch.float16)
        whole = Replicate()
        plan: dict[str, ParallelStyle] = {
            "wte": RowwiseParallel(input_layouts=whole, output_layouts=whole),
            "head": ColwiseParallel(input_layouts=whole, output_layouts=whole),
        }
        for at in (f"blocks.{index}" for index in range(size.layers)):
            plan |= {f"{at}.{name}": ColwiseParallel() for name in ("qkv", "fc")}
            plan |= {f"{at}.{name}": RowwiseParallel() for name in ("proj", "out")}
        parallelize_module(model, mesh["tp"], plan)
        return model, MasterAdam(model.parameters())

    return built


def loss_of(model: nn.Module, size: Shape) -> Tensor:
    tokens = torch.zeros(size.batch, size.length, dtype=torch.int64, device=NAME)
    loss: Tensor = model(tokens, tokens)
    return loss


def step(size: Shape) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    """A step of training, as `zhooks.simulate` calls it."""

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model, size).backward()
        optimizer.step()
        optimizer.zero_grad()

    return stepped


@dataclass(frozen=True, slots=True)
class Attached:
    """A model that one of many ranks has attached."""

    machine: Machine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    attachment: zhooks.Attachment


@contextmanager
def attached(size: Shape, world: int, policy: dict[str, Any], hardware: str) -> Iterator[Attached]:
    """A model on rank 0 of `world`, all of which are alike."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    profile = Hardware.of(hardware)
    if world > 1:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with Machine(HardwareCosts(profile, world)).on() as machine:
            with torch.device(NAME):
                model, optimizer = build(size)()
            attachment = zhooks.attach(model, optimizer, policy=policy)
            yield Attached(machine, model, optimizer, attachment)
    finally:
        if world > 1:
            dist.destroy_process_group()
