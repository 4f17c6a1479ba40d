"""Every way of training the workload that is compared: plain torch, its wrappers, DeepSpeed, and zhooks.

`worker.py` calls one function of `DRIVERS` with a fresh model and times the three callables it gets back. It never
measures anything, and never imports a peer that is not asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import workload

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True, slots=True)
class Trial:
    """A model ready to train: the three parts of a step, and zhooks' Attachment where there is one."""

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor], object]
    update: Callable[[], object]
    attachment: Any = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What a driver is told beside the model: `dtype` is "fp32" or "bf16"; `world` ranks; the workload's shape."""

    shape: workload.Shape
    dtype: str
    world: int


@dataclass(frozen=True, slots=True)
class Driver:
    """One row of the table.

    `needs` are imported before memory is first read, so that an import never counts as growth; a driver whose needs
    are not importable is listed as not installed. `alone` runs in one process on the whole global batch.
    """

    build: Callable[[nn.Module, Setting], Trial]
    needs: tuple[str, ...]
    alone: bool = False


def torch_trial(model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, *, autocast: bool) -> Trial:
    """The ordinary loop; `autocast` is how drivers without a precision policy of their own compute in bf16."""

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        lowered = autocast and setting.dtype == "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16) if lowered else contextlib.nullcontext():
            loss: Tensor = model(tokens, targets)
        return loss

    return Trial(forward, Tensor.backward, optimizer.step)


def plain(model: nn.Module, setting: Setting) -> Trial:
    """One process, the whole global batch: half its step is the compute floor of one of two ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return torch_trial(model, optimizer, setting, autocast=True)


def ddp(model: nn.Module, setting: Setting) -> Trial:
    """DistributedDataParallel as a user writes it; what stage 0 is compared with."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True, **ADAMW)
    return torch_trial(wrapped, optimizer, setting, autocast=True)


def zero1(model: nn.Module, setting: Setting) -> Trial:
    """DDP with torch's ZeroRedundancyOptimizer, both at their leanest; what stage 1 is compared with."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **ADAMW
    )
    return torch_trial(wrapped, optimizer, setting, autocast=True)


def fsdp2(model: nn.Module, setting: Setting, *, reshard: bool) -> Trial:
    """torch's fully_shard, a unit a block; resharding after forward is stage 3, keeping the parameters is stage 2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy()
    if setting.dtype == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (setting.world,))
    for module in [*_blocks(model), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return torch_trial(model, optimizer, setting, autocast=False)


def zhooks(model: nn.Module, setting: Setting, *, stage: int, transport: str, more: dict[str, Any] | None = None) -> Trial:
    """Ours, with nothing tuned: the stage, the transport, in bf16 the precision every peer uses, and tables of `more`."""
    from zhooks import attach

    policy: dict[str, Any] = {"stage": stage, "comm": {"transport": transport}, **(more or {})}
    if setting.dtype == "bf16":
        policy["precision"] = {"param": "bf16", "reduce": "fp32"}
    attachment = attach(model, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    trial = torch_trial(model, optimizer, setting, autocast=False)
    return Trial(trial.forward, trial.backward, trial.update, attachment)


def placed(tier: str, kernel: str = "torch") -> dict[str, Any]:
    """Everything that rests, on one tier."""
    optimizer = {"tier": tier, "kernel": kernel}
    return {"parameter": {"tier": tier}, "gradient": {"tier": tier}, "optimizer": optimizer}


def deepspeed(model: nn.Module, setting: Setting, *, stage: int) -> Trial:
    """DeepSpeed's engine with its own choice of AdamW kernel, as its users run it."""
    import deepspeed as ds

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.shape.batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        # 0.19.8 clips to 1.0 unless told; no other driver here clips.
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "bf16": {"enabled": setting.dtype == "bf16"},
    }
    engine = ds.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    return Trial(engine, engine.backward, engine.step)


def compiled(model: nn.Module, setting: Setting, *, build: Callable[[nn.Module, Setting], Trial]) -> Trial:
    """Another driver over blocks that torch.compile has compiled one by one; the steps that warm up compile."""
    for block in _blocks(model):
        block.compile()
    return build(model, setting)


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, workload.Block)]


_DDP = ("torch.nn.parallel",)
# torch imports its DTensor package, 35 MB, when any tensor subclass is first used; FSDP2's own import has it already.
_ZHOOKS = ("zhooks", "torch.distributed.tensor")
_FSDP = ("torch.distributed.device_mesh", "torch.distributed.fsdp")

DRIVERS: dict[str, Driver] = {
    "plain": Driver(plain, (), alone=True),
    "ddp": Driver(ddp, _DDP),
    "zero1": Driver(zero1, (*_DDP, "torch.distributed.optim")),
    "fsdp2": Driver(partial(fsdp2, reshard=True), _FSDP),
    "fsdp2-noreshard": Driver(partial(fsdp2, reshard=False), _FSDP),
    **{f"zhooks-{stage}": Driver(partial(zhooks, stage=stage, transport="auto"), _ZHOOKS) for stage in range(4)},
    "zhooks-3-stock": Driver(partial(zhooks, stage=3, transport="stock"), _ZHOOKS),
    **{
        f"zhooks-3-{name}": Driver(partial(zhooks, stage=3, transport="auto", more=more), _ZHOOKS)
        for name, more in {
            "numba": {"optimizer": {"kernel": "numba"}},
            "host": placed("host"),
            "host-numba": placed("host", "numba"),
            "disk": placed("disk"),
            "disk-numba": placed("disk", "numba"),
            "activations": {"activation": {"tier": "host"}},
            "recompute": {"activation": {"checkpoint": "unit"}},
        }.items()
    },
    "plain-compiled": Driver(partial(compiled, build=plain), (), alone=True),
    "fsdp2-compiled": Driver(partial(compiled, build=partial(fsdp2, reshard=True)), _FSDP),
    "zhooks-3-compiled": Driver(partial(compiled, build=partial(zhooks, stage=3, transport="auto")), _ZHOOKS),
    **{f"deepspeed-{stage}": Driver(partial(deepspeed, stage=stage), ("deepspeed",)) for stage in (1, 2, 3)},
}
