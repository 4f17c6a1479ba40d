"""The Trainer of transformers: ``Trainer(..., zhooks="policy.toml")``, or ``ZeroMixin`` over any Trainer subclass (TRL's too).

The loop, the data, the callbacks, evaluation and the learning rate are the Trainer's own.  ``accelerate.py`` attaches the model
where the Trainer prepares it; here its files are: a folder that ``from_pretrained`` reads, and each rank's shards to resume.
"""

from __future__ import annotations

import os
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from offload.errors import CapabilityError, CheckpointError, PolicyError
from offload.policy import Policy
from offload.text import counted, shown_path
from zhooks import tree
from zhooks.attach import Attachment
from zhooks.integrations.accelerate import SHARDS, Accelerator, bare_optimizer
from zhooks.integrations.automatic import filled
from zhooks.integrations.other_ranks import RandomStates, SavedBy, saved_by
from zhooks.integrations.required import require
from zhooks.integrations.weights import adapter_weights

require("transformers", "transformers", (4, 50))

import transformers  # noqa: E402
from accelerate.utils import broadcast_object_list  # noqa: E402
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME  # noqa: E402

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments", "ZeroMixin"]

Given = Policy | str | Path | dict[str, Any] | Attachment | None


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` that reads its ``deepspeed`` file as a policy; DeepSpeed is not needed.

    Attributes:
        zhooks: the policy, if the Trainer is not given one.
    """

    zhooks: str | None = None

    def __post_init__(self) -> None:
        if self.deepspeed is not None:
            self.zhooks, self.deepspeed = cast(Any, self.deepspeed), None
        super().__post_init__()  # type: ignore[no-untyped-call]


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):
    """``transformers.Seq2SeqTrainingArguments``, as ``TrainingArguments`` here."""


class SaveOnPreemption(transformers.TrainerCallback):
    """In place of the Trainer's own for ``enable_jit_checkpoint``, which would save on the ranks that got a signal alone."""

    def __init__(self, trainer: ZeroMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (attachment := self._trainer.attachment) is not None:
            attachment.catch_preemption()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        attachment = self._trainer.attachment
        if attachment is not None and attachment.preempted:
            control.should_save = control.should_training_stop = True


def carry_overrides(optimizer: Any) -> None:
    """Note on each parameter what bitsandbytes was told of it (the Trainer asks for 32 bits for embeddings).

    bitsandbytes finds parameters by identity; owners step copies, which have the attributes of the parameters.
    """
    registry = optimizer.mng
    ours = {id(param) for group in optimizer.param_groups for param in group["params"]}
    others = []
    for module, name, config in registry.module_weight_config_triple:
        param = getattr(module, name)
        if id(param) in ours:
            param.bitsandbytes_config = {**getattr(param, "bitsandbytes_config", {}), **config}
        else:
            others.append((module, name, config))
    registry.module_weight_config_triple = others
    optimizer.get_config = types.MethodType(_with_override, optimizer)


def _with_override(optimizer: Any, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = type(optimizer).get_config(optimizer, gindex, pindex, group)
    return config | getattr(optimizer.param_groups[gindex]["params"][pindex], "bitsandbytes_config", {})


class ZeroMixin:
    """Put before a Trainer class: ``class MyTrainer(ZeroMixin, TheirTrainer)``.

    Args:
        *args: those of the Trainer.
        zhooks: the policy: a path, a mapping, a ``Policy``, an ``Attachment`` of the model (``from_pretrained``), or None for
            what ``TrainingArguments`` of this module was given, else the default policy.  In a DeepSpeed configuration "auto"
            is filled in from the arguments.
        **kwargs: those of the Trainer.
    """

    args: Any
    accelerator: Accelerator
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, zhooks: Given = None, **kwargs: Any) -> None:
        self._policy, self._saves_when_preempted = zhooks, False
        #: What a load on other ranks than saved gave them, whose own files there are not.
        self._random: RandomStates | None = None
        super().__init__(*args, **kwargs)
        if self._saves_when_preempted:
            self.args.enable_jit_checkpoint = True
            trainer: Any = self
            trainer.add_callback(SaveOnPreemption(self))

    @property
    def attachment(self) -> Attachment | None:
        """The attachment of the model; None before the first ``train`` or ``evaluate``."""
        model: Any = getattr(self, "model", None)
        return None if model is None else self.accelerator.attachment(model)

    def create_accelerator_and_postprocess(self) -> None:
        base: Any = super()
        base.create_accelerator_and_postprocess()
        given = self._policy if self._policy is not None else getattr(self.args, "zhooks", None)
        chosen = given if isinstance(given, Attachment) else filled(given, self.args)
        self.accelerator = Accelerator.over(self.accelerator, chosen)
        self._check_arguments()
        if getattr(self.args, "enable_jit_checkpoint", False):
            if self.args.save_strategy == "best":
                raise PolicyError(
                    'Trainer expected a save_strategy that saves on request, found "best" with enable_jit_checkpoint = True: '
                    'only evaluation would decide when to save. Set save_strategy = "no", "steps" or "epoch".'
                )
            self.args.enable_jit_checkpoint, self._saves_when_preempted = False, True
        # One process has one device: nn.DataParallel is for those who have no ranks.
        self.args._n_gpu = min(self.args.n_gpu, 1)

    def _check_arguments(self) -> None:
        if self.args.bf16_full_eval or self.args.fp16_full_eval:
            name = "bf16_full_eval" if self.args.bf16_full_eval else "fp16_full_eval"
            raise PolicyError(
                f"Trainer expected evaluation in the dtype of training, found {name} = True, which casts the model under its "
                f'optimizer. Drop it, or set [precision] param = "{name[:4]}" in the policy.'
            )
        if self.args.save_on_each_node:
            raise PolicyError(
                "Trainer expected one folder that all nodes share, found save_on_each_node = True: whole weights are only "
                "on rank 0. Drop it, and use an output_dir on a shared file system."
            )
        if self.args.auto_find_batch_size:
            raise CapabilityError(
                "Trainer expected a batch size, found auto_find_batch_size = True: if only one rank ran out of memory, the "
                "others would wait for it. Set per_device_train_batch_size; `zprof simulate` shows what fits."
            )

    def call_model_init(self, trial: Any = None) -> nn.Module:
        # The model of the last training goes, and its shards.
        if (last := self.attachment) is not None:
            self.accelerator.attachments.remove(last)
        base: Any = super()
        model: nn.Module = base.call_model_init(trial)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if all(param.device.type != "meta" for param in tree.parameters(model)):
            base: Any = super()
            base._move_model_to_device(model, device)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        optimizer = base.create_optimizer(*args, **kwargs)
        if hasattr(optimizer, "mng") and hasattr(optimizer, "get_config"):
            carry_overrides(optimizer)
        return optimizer

    # A folder that from_pretrained reads.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model, or only its PEFT adapters, from rank 0, so that ``from_pretrained`` reads it.  Collective."""
        trainer: Any = self
        if self.attachment is None:
            base: Any = super()
            base.save_model(output_dir, _internal_call)
            return
        quantised = bool(self.attachment.left_out)
        state = adapter_weights(self.attachment) if quantised else self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            trainer._save(self.args.output_dir if output_dir is None else output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    # What a run needs to go on.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.attachment is None:
            base: Any = super()
            base._save_optimizer_and_scheduler(output_dir)
            return
        about = SavedBy.noting(examples=self._examples())
        self.attachment.save(Path(output_dir) / SHARDS, bare_optimizer(self.optimizer), extra=about)
        if self.args.should_save:
            # A Trainer without zhooks would go on with fresh states, or with older ones that are there.
            torch.save({SHARDS: f"the states are in {SHARDS}/; resume with zhooks"}, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Shards, or the whole states that a run without zhooks has saved."""
        # Rank 0 looks for all: ranks of which one alone finds the folder would wait for each other.
        ours = [checkpoint is not None and (Path(checkpoint) / SHARDS).is_dir()]
        broadcast_object_list(ours)
        if checkpoint is None or self.attachment is None or not ours[0]:
            base: Any = super()
            base._load_optimizer_and_scheduler(checkpoint)
            return
        shards = Path(checkpoint) / SHARDS
        saved = saved_by(shards)
        elsewhere = saved.ranks != self.args.world_size
        if elsewhere:
            self._check_position(shards, saved)
        self.attachment.load(shards, bare_optimizer(self.optimizer))
        self._random = RandomStates() if elsewhere else None
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _examples(self) -> int:
        """Of one step, on all ranks."""
        trainer: Any = self
        batches = 1 if self.accelerator.split_batches else self.args.world_size
        count: int = trainer._train_batch_size * self.args.gradient_accumulation_steps * batches
        return count

    def _check_position(self, shards: Path, saved: SavedBy) -> None:
        """Where the data go on is a number of steps: on other ranks these must be of the same examples."""
        if self.args.ignore_data_skip:
            return
        saved.check_noted(shards)
        by_length = getattr(self.args, "group_by_length", False)
        strategy = "group_by_length" if by_length else getattr(self.args, "train_sampling_strategy", "random")
        if strategy not in ("random", "sequential"):
            raise CheckpointError(
                f"Cannot load {shown_path(shards)}. Expected {counted(saved.ranks, 'rank')} as saved, found "
                f"{self.args.world_size}: which examples were seen under {strategy} depends on each rank's batch. Resume on as "
                "many, or set ignore_data_skip=True."
            )
        instead = (
            "Set per_device_train_batch_size and gradient_accumulation_steps so that their product with the ranks is the same, "
            "or ignore_data_skip=True to start the epoch's data again."
        )
        saved.check_same(shards, "examples per step", "examples", self._examples(), instead)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Those files are one a rank, of as many ranks; on others the states are what the shards' load gave."""
        if checkpoint is None or self._random is None:
            base: Any = super()
            base._load_rng_state(checkpoint)
            return
        self._random.put_back()


class Trainer(ZeroMixin, transformers.Trainer):
    """``transformers.Trainer`` under ZeRO."""


class Seq2SeqTrainer(ZeroMixin, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` under ZeRO."""
