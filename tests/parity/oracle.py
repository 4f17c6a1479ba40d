"""The oracle: plain single-process PyTorch that trains one model on every rank's data, which is what zhooks must equal.

The parity tests call ``train``; the constants and builders that both sides share (steps, optimizers, the scaler) live
here. It never imports zhooks or torch.distributed.

Note: [What the oracle computes]
Each micro step runs every rank's batch through the one model, one rank after the other, and keeps each rank's
gradients apart. Each backward's gradients are averaged over the ranks in rank order and added to what the model has;
under ``no_sync`` at stages 0 and 1 a rank's gradients are summed first, and that sum is averaged at the last micro
step. (Stages 2 and 3 promise never to hold a whole gradient, so there ``no_sync`` changes no number.) A parameter that
got no gradient on some rank counts as zeros there; one that got none on any rank keeps ``grad = None``, as in plain
training, and the optimizer passes it over.

Buffers (BatchNorm's statistics) differ by rank, because the ranks see different batches and nobody averages them:
each rank's set is put into the model before that rank's forward and taken out after it. Rank 0's set is the one
compared, as rank 0's state is the one saved.

With 16-bit parameters the forward and backward run on a working copy whose parameters are casts of the fp32 masters;
its inputs are cast on the way in, its outputs to fp32 on the way out; a rank's gradients are summed in fp32 and
averaged in the reduce dtype.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.cells import Cell
from tests.support.zoo import ZOO

STEPS = 3
SEED = 7
# Below the gradient norm of every model of the zoo, so that clipping acts at every step (test_oracle.py holds it to that).
CLIP_NORM = 0.1
# Low enough that no gradient of the zoo overflows in fp16: the skipped step is an adversity of its own.
LOSS_SCALE = 2.0**8

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Gradients = list[Tensor | None]


@dataclass(slots=True)
class Record:
    """What a run leaves: losses[micro step][rank], gradient norms where clipped, the first and last full state of
    rank 0.
    """

    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)


class Written(torch.optim.Optimizer):
    """An element-wise optimizer as a user would write it: momentum whose steps saturate."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["velocity"] = torch.zeros_like(p)
                velocity = state["velocity"]
                velocity.mul_(group["decay"]).add_(p.grad)
                p.add_(velocity / (velocity.abs() + 0.5), alpha=-group["lr"])


# The epsilons are large so that a gradient which is rounding noise (a key's bias under softmax) is not blown up to a
# whole step.
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1),
    "adamwforeach": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1, foreach=True),
    "adamwfused": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02, eps=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.003, eps=1e-2),
    "written": lambda params: Written(params, lr=0.05),
}


def build_scaler(cell: Cell) -> torch.amp.GradScaler:
    """The scaler both sides use; only fp16 turns it on."""
    return torch.amp.GradScaler("accel" if cell.accelerated else "cpu", init_scale=LOSS_SCALE, enabled=cell.precision == "fp16")


def device_of(cell: Cell, rank: int) -> torch.device:
    """Where that rank of the cell trains; on the accelerator, whose streams run in the cell's order from now on."""
    if not cell.accelerated:
        return torch.device("cpu")
    mode, seed = ("random", int(cell.device[-1])) if cell.device.startswith("random") else (cell.device, 0)
    torch.accel.native.set_schedule(mode, 10 * seed + rank)  # type: ignore[attr-defined]
    return torch.device("accel", rank)


def train_by_name(name: str) -> Record:
    """`train`, for a process that has the accelerator: its kernels are not in all things the CPU's."""
    return train(Cell.parse(name))


@functools.cache
def train(cell: Cell) -> Record:
    """Train the cell's model plainly on all ranks' data; the record is shared by all who ask for this cell."""
    specimen = ZOO[cell.model]
    device = device_of(cell, 0)
    model = specimen.build(SEED).to(device)
    ranks = Ranks(model, cell)
    optimizer = OPTIMIZERS[cell.optimizer](model.parameters())
    scaler = build_scaler(cell)
    record = Record(start=snapshot(model))
    for step in range(STEPS):
        losses = []
        for micro in range(cell.micro_steps):
            number = step * cell.micro_steps + micro
            boundary = micro == cell.micro_steps - 1 or not cell.holds_back
            scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
            losses.append([ranks.backward(specimen, number, rank, scale=scale) for rank in range(cell.world)])
            if boundary:
                ranks.reduce()
        record.losses.extend(losses)
        if scaler.is_enabled():
            # Only scale() makes the scaler's own tensors; the oracle scaled the loss by hand.
            scaler.scale(torch.zeros((), device=device))
        if cell.clip == "clipped":
            scaler.unscale_(optimizer)
            record.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    ranks.show_buffers(0)
    record.final = snapshot(model)
    return record


class Ranks:
    """Every rank of the oracle, played in turn by one model."""

    def __init__(self, model: nn.Module, cell: Cell) -> None:
        self._model = model
        self._cell = cell
        self._working = working_copy(model, cell.precision)
        self._grads: list[Gradients] = [[None for _ in model.parameters()] for _ in range(cell.world)]
        self._buffers = [[buffer.clone() for buffer in self._working.buffers()] for _ in range(cell.world)]

    def backward(self, specimen: Any, number: int, rank: int, *, scale: float) -> float:
        """Run one rank's micro step, keep its gradients, and return its loss."""
        with torch.no_grad():
            for master, twin in zip(self._model.parameters(), self._working.parameters(), strict=True):
                if twin is not master:
                    twin.copy_(master)
            for buffer, own in zip(self._working.buffers(), self._buffers[rank], strict=True):
                buffer.copy_(own)
        worked = list(self._working.parameters())
        # The gradients already averaged rest on the model meanwhile.
        averaged = [p.grad for p in worked]
        for p, grad in zip(worked, self._grads[rank], strict=True):
            p.grad = grad if p.dtype == torch.float32 else None
        batch = tuple(tensor.to(worked[0].device) for tensor in specimen.batch(number, rank, self._cell.world))
        loss = specimen.loss(self._working, batch)
        (loss / self._cell.micro_steps * scale).backward()
        for place, p in enumerate(worked):
            kept = self._grads[rank][place]
            if p.dtype == torch.float32:
                kept = p.grad
            elif p.grad is not None:
                kept = p.grad.float() if kept is None else kept + p.grad.float()
            self._grads[rank][place] = kept
        for p, grad in zip(worked, averaged, strict=True):
            p.grad = grad
        for buffer, own in zip(self._working.buffers(), self._buffers[rank], strict=True):
            own.copy_(buffer)
        return loss.item()

    def reduce(self) -> None:
        """Average the ranks' gradients and add them to the model's."""
        precision = self._cell.precision
        dtype = DTYPES["bf16"] if precision == "bf16reduce" else torch.float32
        for place, p in enumerate(self._model.parameters()):
            grads = [rank[place] for rank in self._grads]
            if all(grad is None for grad in grads):
                continue
            total = torch.zeros_like(p, dtype=dtype) if grads[0] is None else grads[0].to(dtype)
            for grad in grads[1:]:
                total = total if grad is None else total + grad.to(dtype)
            mean = (total / self._cell.world).float()
            p.grad = mean if p.grad is None else p.grad + mean
        self._grads = [[None for _ in rank] for rank in self._grads]

    def show_buffers(self, rank: int) -> None:
        """Leave that rank's buffers in the model."""
        for buffer, kept in zip(self._model.buffers(), self._buffers[rank], strict=True):
            buffer.copy_(kept)


def working_copy(model: nn.Module, precision: str) -> nn.Module:
    """The model itself in fp32; else a copy with 16-bit parameters that casts what enters and what leaves."""
    if precision == "fp32":
        return model
    dtype = DTYPES[precision.removesuffix("reduce")]
    working = copy.deepcopy(model)
    for p in working.parameters():
        p.data = p.data.to(dtype)

    def cast_inputs(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)

    def cast_output(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.float()

    working.register_forward_pre_hook(cast_inputs)
    working.register_forward_hook(cast_output)
    return working


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's whole state dict."""
    return on_host({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})


def on_host(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}
