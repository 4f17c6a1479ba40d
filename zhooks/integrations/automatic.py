"""What the Trainer's arguments say where a DeepSpeed configuration says "auto"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload.policy import Argument, Policy

#: DeepSpeed's schedulers and the Trainer's names for the same course of the learning rate.
_SCHEDULES = {
    "constant_with_warmup": ("WarmupLR",),
    "linear": ("WarmupDecayLR",),
    "cosine": ("WarmupCosineLR",),
}


def filled(policy: Policy | str | Path | dict[str, Any] | None, args: Any) -> Policy:
    """The policy that is meant, "auto" taken from ``args``, a ``transformers.TrainingArguments``.

    Raises:
        PolicyError: it cannot be read, or what it says contradicts an argument; both are named.
    """
    return Policy.of(policy, arguments(args))


def arguments(args: Any) -> dict[str, Argument]:
    """By DeepSpeed's keys, what ``args`` say and the Trainer does itself; as transformers fills its configuration."""
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    optim, schedule = (str(getattr(each, "value", each)) for each in (args.optim, args.lr_scheduler_type))
    adam = ("Adam", "AdamW") if optim.startswith("adamw") else ()
    # Without max_steps the Trainer counts them from the data, which nobody has seen yet.
    steps = {"scheduler.params.total_num_steps": Argument("max_steps", args.max_steps)} if args.max_steps > 0 else {}
    return steps | {
        "bf16.enabled": Argument("bf16", bool(args.bf16)),
        "fp16.enabled": Argument("fp16", bool(args.fp16)),
        "train_micro_batch_size_per_gpu": Argument("per_device_train_batch_size", args.per_device_train_batch_size),
        "gradient_accumulation_steps": Argument("gradient_accumulation_steps", args.gradient_accumulation_steps),
        "train_batch_size": Argument("per_device_train_batch_size x gradient_accumulation_steps x ranks", batch),
        "gradient_clipping": Argument("max_grad_norm", args.max_grad_norm),
        "optimizer.type": Argument("optim", optim, adam),
        "optimizer.params.lr": Argument("learning_rate", args.learning_rate),
        "optimizer.params.betas": Argument("adam_beta1, adam_beta2", [args.adam_beta1, args.adam_beta2]),
        "optimizer.params.eps": Argument("adam_epsilon", args.adam_epsilon),
        "optimizer.params.weight_decay": Argument("weight_decay", args.weight_decay),
        "scheduler.type": Argument("lr_scheduler_type", schedule, _SCHEDULES.get(schedule, ())),
        "scheduler.params.warmup_max_lr": Argument("learning_rate", args.learning_rate),
        "scheduler.params.warmup_min_lr": Argument("(the Trainer warms up from 0)", 0),
        "scheduler.params.warmup_num_steps": Argument("warmup_steps", args.warmup_steps),
        "optimizer.params.adam_w_mode": Argument("optim", optim.startswith("adamw")),
        "optimizer.params.bias_correction": Argument("(the Trainer's AdamW corrects its biases)", True),
    }
