"""Accelerate: ``Accelerator(zhooks="policy.toml")`` trains the models it prepares under ZeRO; the script stays as it is.

A subclass of ``accelerate.Accelerator``: autocast, data loaders, schedulers, trackers and random states are Accelerate's own.
What a model holds is ours: ``prepare`` attaches it where Accelerate would wrap DistributedDataParallel around it, and
``save_state``, ``load_state``, ``get_state_dict`` and ``save_model`` read and write whole values or each rank's shards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.errors import CheckpointError, PolicyError
from offload.policy import Policy
from offload.text import counted, shown_path
from zhooks import tree
from zhooks.attach import Attachment, attach
from zhooks.compiled import uncompiled
from zhooks.integrations.marks import NO_SYNC, mark, unmark
from zhooks.integrations.other_ranks import RandomStates, SavedBy, saved_by
from zhooks.integrations.required import require
from zhooks.integrations.weights import whole_weights
from zhooks.optim import holds

require("accelerate", "accelerate", (1, 0))

import accelerate  # noqa: E402
from accelerate.utils import DistributedType, DynamoBackend  # noqa: E402

__all__ = ["Accelerator"]

#: What Accelerate does itself, by way of its own plugins.
_OTHERS = {
    DistributedType.DEEPSPEED: "deepspeed_plugin",
    DistributedType.FSDP: "fsdp_plugin",
    DistributedType.MEGATRON_LM: "megatron_lm_plugin",
}
#: The folder of an attached model's shards inside that of a saved state.
SHARDS = "zhooks"


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` that attaches the models it prepares.

    Args:
        *args: those of ``accelerate.Accelerator``.
        zhooks: the policy: a path, a mapping, a ``Policy``, or None for stage 3 with everything on the device; or the
            ``Attachment`` of a model that is attached already (``from_pretrained``).
        **kwargs: those of ``accelerate.Accelerator``.
    Raises:
        PolicyError: the policy cannot be read, or Accelerate was asked for another precision or another way to shard.
    """

    step: int
    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(
        self, *args: Any, zhooks: Policy | str | Path | dict[str, Any] | Attachment | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._take(zhooks if isinstance(zhooks, Attachment) else Policy.of(zhooks))

    @classmethod
    def over(cls, made: Any, given: Policy | Attachment) -> Accelerator:
        """Return an accelerator that continues as ``made``, which other code has constructed."""
        accelerator = cls.__new__(cls)
        accelerator.__dict__ = made.__dict__
        accelerator._take(given)
        return accelerator

    def _take(self, given: Policy | Attachment) -> None:
        self.policy = given.policy if isinstance(given, Attachment) else given
        #: Of the models that were prepared, in order; an attachment that was given waits for its model.
        self.attachments: list[Attachment] = [given] if isinstance(given, Attachment) else []
        self._given: Sequence[torch.optim.Optimizer] = ()
        other = _OTHERS.get(self.distributed_type)
        if other is not None:
            raise PolicyError(
                f"Accelerator expected one way to shard, found zhooks and {other} ({self.distributed_type.value}). "
                "Drop one of them, in the script or in the options of `accelerate launch`."
            )
        parallel = getattr(self, "parallelism_config", None)
        if parallel is not None:
            raise PolicyError(
                "Accelerator expected only the policy to say how to shard, found parallelism_config as well. Drop it; for a "
                "mesh of several axes call zhooks.attach(model, mesh=...) in your own loop."
            )
        self._divide_precision()

    def _divide_precision(self) -> None:
        """Either the policy casts, or Accelerate's autocast does."""
        ours, theirs = self.policy.precision.param, self.mixed_precision
        if ours in (None, "fp32"):
            return
        if theirs not in ("no", ours):
            raise PolicyError(
                f'Accelerator expected one precision, found [precision] param = "{ours}" in the policy and mixed_precision = '
                f'"{theirs}" (Trainer: {theirs}=True). Make them equal or drop one.'
            )
        if theirs == "fp16" and self.policy.precision.loss_scale is None:
            raise PolicyError(
                'Accelerator expected a loss scale for fp16, found none: with [precision] param = "fp16" the policy casts and '
                'Accelerate\'s GradScaler is not used. Set [precision] loss_scale = "dynamic", or drop param.'
            )
        self.native_amp, self.scaler = False, None

    # What is prepared.

    def attachment(self, model: nn.Module) -> Attachment | None:
        """Return the attachment of a prepared model; None if it has none."""
        bare = uncompiled(self.unwrap_model(model) if isinstance(model, nn.Module) else model)
        return next((each for each in self.attachments if each.model is bare), None)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Like ``accelerate.Accelerator.prepare``; models are attached, with the optimizer that is passed along with them."""
        found = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        self._given = [bare_optimizer(each) for each in found]
        try:
            return super().prepare(*args, device_placement=device_placement)
        finally:
            self._given = ()

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Attach ``model``, also one that is only evaluated (a reference model): its parameters are sharded too."""
        if (attached := self.attachment(model)) is not None:
            if NO_SYNC not in vars(attached.model):
                self._prepare_uncompiled(attached.model, False)
                mark(attached.model, attached)
                self._compile(attached.model)
            if all(each is not attached.model for each in self._models):
                self._models.append(attached.model)
            return attached.model
        if next(tree.parameters(model), None) is None:
            plain: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return plain
        if any(param.device.type == "meta" for param in tree.parameters(model)):
            device_placement = False
        # What Accelerate does to a model for evaluation is all but the wrapping.
        prepared = self._prepare_uncompiled(model, device_placement)
        mine = {id(param) for param in tree.parameters(prepared)}
        holding = [each for each in self._given if any(id(param) in mine for param in each.state)]
        if len(holding) > 1:
            raise PolicyError(
                f"prepare expected at most one optimizer that already holds states of a model, found {len(holding)}. "
                "Prepare before the first step, and load states afterwards."
            )
        attachment = attach(prepared, holding[0] if holding else None, policy=self.policy)
        mark(prepared, attachment)
        self.attachments.append(attachment)
        self._compile(prepared)
        return prepared

    def _prepare_uncompiled(self, model: nn.Module, device_placement: bool | None) -> nn.Module:
        """What Accelerate does to a model for evaluation, but for torch.compile: see ``_compile``."""
        plugin = self.state.dynamo_plugin
        chosen, plugin.backend = plugin.backend, DynamoBackend.NO
        try:
            prepared: nn.Module = super().prepare_model(model, device_placement, True)
        finally:
            plugin.backend = chosen
        return prepared

    def _compile(self, model: nn.Module) -> None:
        """Compile an attached model as Accelerate was asked to, in place: it stays the module that was attached.

        Repeated blocks one by one: where compiled code called them, its graph would break at each (``use_regional_compilation``
        says the same, and a model without such blocks is compiled whole).
        """
        plugin = self.state.dynamo_plugin
        if plugin.backend != DynamoBackend.NO and not compiled_already(model):
            compile_regions(model, plugin.to_kwargs())

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Like Accelerate's; the states stay on their tiers."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def detach(self, model: nn.Module) -> nn.Module:
        """Return the plain model: full parameters, gradients and states.  Collective."""
        attachment = self.attachment(model)
        if attachment is None:
            return model
        plain = attachment.detach()
        unmark(plain)
        self.attachments.remove(attachment)
        return plain

    def free_memory(self, *objects: Any) -> Any:
        """Like Accelerate's; an attached model among ``objects`` is freed with its shards."""
        bare = [uncompiled(self.unwrap_model(each)) for each in objects if isinstance(each, nn.Module)]
        self.attachments = [each for each in self.attachments if all(each.model is not model for model in bare)]
        return super().free_memory(*objects)

    # State.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model on rank 0's CPU, and {} on other ranks.  Collective."""
        attachment = self.attachment(model)
        if attachment is None:
            state: dict[str, Any] = super().get_state_dict(model, unwrap)
            return state
        return whole_weights(self.unwrap_model(model), attachment)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the whole model as Accelerate does, from rank 0.  Collective."""
        state = self.get_state_dict(model)
        if not self.is_main_process:
            return
        # What Accelerate writes is what it asks itself for.
        self.__dict__["get_state_dict"] = lambda *_, **__: state
        try:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
        finally:
            del self.__dict__["get_state_dict"]

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Like Accelerate's, but each rank writes its own shards of attached models and their optimizers.  Collective.

        A hook of ``register_save_state_pre_hook`` receives the models and, on rank 0, whole weights.
        """
        hooked = bool(self._save_model_state_pre_hook)
        last = super().register_save_state_pre_hook(self._without_weights)
        try:
            with self._but_ours(hooked):
                where = super().save_state(output_dir, safe_serialization, **kwargs)
        finally:
            last.remove()
        self.wait_for_everyone()
        about = SavedBy.noting(step=int(self.step), examples=self._counts())
        for number, attachment in enumerate(self.attachments):
            attachment.save(_shards(where, number), self._optimizers_of(attachment), extra=about)
        return where

    def load_state(self, input_dir: str | None = None, load_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Continue from what ``save_state`` wrote, on any number of ranks.  Collective.

        Raises:
            CheckpointError: on every rank: shards of an attached model are missing or do not match.  That model is unchanged;
                of several, those before it are loaded.  Also if the number of ranks differs from that of the save, and
                schedulers or data loaders depend on it.
        """
        folder = self._newest(input_dir)
        saved = saved_by(_shards(folder, 0)) if self.attachments else None
        elsewhere = saved is not None and saved.ranks != self.num_processes
        if saved is not None and elsewhere:
            self._check_counts(_shards(folder, 0), saved)
        for number, attachment in enumerate(self.attachments):
            attachment.load(_shards(folder, number), self._optimizers_of(attachment))
        hooked = bool(self._load_model_state_pre_hook)
        last = super().register_load_state_pre_hook(self._without_models)
        try:
            with self._but_ours(hooked):
                random = RandomStates()
                super().load_state(input_dir, load_kwargs, **kwargs)
            if saved is not None and elsewhere:
                # Accelerate has read what the rank of this number had, where there was one.
                random.put_back()
                self.step = int(saved.facts["step"])
        finally:
            last.remove()

    def _counts(self) -> list[int]:
        """The examples of a rank between two updates, by each data loader: a prepared scheduler makes one step for them."""
        every = [getattr(loader, "total_batch_size", None) or 0 for loader in self._dataloaders]
        return [count * self.gradient_accumulation_steps // self.num_processes for count in every]

    def _check_counts(self, folder: Path, saved: SavedBy) -> None:
        """What Accelerate keeps by ranks that an attachment knows nothing of.

        Raises:
            CheckpointError: it would mean something else on this number of ranks.
        """
        saved.check_noted(folder)
        if any(getattr(loader, "use_stateful_dataloader", False) for loader in self._dataloaders):
            raise CheckpointError(
                f"Cannot load {shown_path(folder)}. Expected {counted(saved.ranks, 'rank')} as saved, found "
                f"{self.num_processes}: the state of a stateful data loader belongs to one rank. Resume on as many ranks, or "
                "do not set use_stateful_dataloader."
            )
        stepping = [one for one in self._schedulers if one.step_with_optimizer and not one.split_batches]
        if stepping:
            instead = (
                "A prepared scheduler steps once per rank: keep each rank's batch and gradient_accumulation_steps, or do not "
                "prepare the scheduler and step it yourself."
            )
            saved.check_same(folder, "examples per step on each rank", "examples", self._counts(), instead)

    def _without_weights(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        """After the hooks of others: what they left of attached models' weights is not written, as their shards are."""
        ours = [self.attachment(model) is not None for model in models]
        if len(weights) == len(models):
            weights[:] = [each for each, attached in zip(weights, ours, strict=True) if not attached]
        elif all(ours):
            weights.clear()

    def _without_models(self, models: list[nn.Module], folder: str) -> None:
        """After the hooks of others: attached models are loaded already."""
        models[:] = [model for model in models if self.attachment(model) is None]

    def _newest(self, given: str | None) -> Path:
        """The folder that Accelerate loads from."""
        if given is not None or not self.project_configuration.automatic_checkpoint_naming:
            return Path(given or "").expanduser()
        folders = [folder for folder in (Path(self.project_dir) / "checkpoints").iterdir() if folder.is_dir()]
        return max(folders, key=lambda folder: int(folder.name.rpartition("_")[2]))

    def _optimizers_of(self, attachment: Attachment) -> tuple[torch.optim.Optimizer, ...]:
        bare = [bare_optimizer(each) for each in self._optimizers]
        return tuple(each for each in bare if holds(each, tree.parameters(attachment.model)))

    @contextmanager
    def _but_ours(self, models: bool) -> Iterator[None]:
        """Accelerate sees neither the optimizers of attached models nor, unless ``models``, these."""
        ours = {id(each) for attachment in self.attachments for each in self._optimizers_of(attachment)}
        kept = self._models, self._optimizers
        self._optimizers = [each for each in kept[1] if id(bare_optimizer(each)) not in ours]
        if not models:
            self._models = [each for each in kept[0] if self.attachment(each) is None]
        try:
            yield
        finally:
            self._models, self._optimizers = kept


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that Accelerate has wrapped; one that it has not is itself."""
    bare: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return bare


def compiled_already(model: nn.Module) -> bool:
    """Somebody has compiled ``model`` or a module in it."""
    return any(uncompiled(module) is not module or module._compiled_call_impl is not None for module in tree.modules(model))


def compile_regions(module: nn.Module, how: dict[str, Any]) -> None:
    """``module.compile(**how)`` for each of repeated blocks and for what lies beside them; the whole where there are none."""
    if repeats(module):
        for block in tree.children(module):
            block.compile(**how)
    elif any(map(repeats, tree.modules(module))):
        for child in tree.children(module):
            compile_regions(child, how)
    else:
        module.compile(**how)


def repeats(module: nn.Module) -> bool:
    """A list of blocks of one class."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and len({type(block) for block in module}) == 1


def _shards(folder: str | os.PathLike[str], number: int) -> Path:
    """Where the shards of the ``number``-th attached model are."""
    return Path(folder) / (SHARDS if number == 0 else f"{SHARDS}_{number}")
