"""Lightning: ``Trainer(strategy=ZhooksStrategy(policy="policy.toml"))``; the LightningModule stays as it is.

A subclass of Lightning's DDPStrategy, which starts the processes and connects them: the module is attached where that would
wrap DistributedDataParallel around it.  Checkpoints are Lightning's own, whole, and load anywhere.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from offload.errors import AttachError, CheckpointError, PolicyError
from offload.policy import Policy
from offload.text import counted, shown_path
from zhooks import tree
from zhooks.attach import Attachment, attach
from zhooks.integrations.required import require
from zhooks.integrations.weights import whole_weights

require("lightning", "lightning", (2, 4))

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision, Precision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402
from lightning.pytorch.utilities.exceptions import SIGTERMException  # noqa: E402

__all__ = ["SaveOnPreemption", "ZhooksStrategy"]

#: How many ranks saved, in Lightning's checkpoints.
_RANKS = "zhooks.ranks"
#: Options of DDPStrategy that are named in its signature.
_OF_DDP = frozenset({"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"})


class PolicyPrecision(Precision):
    """Lightning's precision where the policy sets a loss scale, which it keeps in Lightning's checkpoints."""

    def __init__(self) -> None:
        self.attachment: Attachment | None = None
        self._kept: dict[str, Any] = {}

    def begin(self, attachment: Attachment) -> None:
        """Keep the scale of this attachment, which goes on from where the last one ended."""
        self.attachment = attachment
        attachment.load_loss_scale_state(self._kept)

    def end(self) -> None:
        """It is detached next."""
        self._kept, self.attachment = self.state_dict(), None

    def state_dict(self) -> dict[str, Any]:
        return self._kept if self.attachment is None else self.attachment.loss_scale_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = state_dict
        if self.attachment is not None:
            self.attachment.load_loss_scale_state(state_dict)


class ZhooksStrategy(DDPStrategy):
    """Train a LightningModule under ZeRO.

    Args:
        policy: a path, a mapping, a ``Policy``, or None for stage 3 with everything on the device.
        keep_attached: leave the module attached at the end, for a model whose full size does not fit;
            ``attachment.detach()`` restores it.
        **kwargs: ``process_group_backend``, ``timeout`` and other options of ``DDPStrategy`` that do not belong to DDP itself.
    Attributes:
        attachment: that of the module, from ``setup`` on; None while the module is plain.
    """

    def __init__(
        self, policy: Policy | str | Path | dict[str, Any] | None = None, *, keep_attached: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        of_ddp = sorted({*self._ddp_kwargs, *(_OF_DDP & kwargs.keys())})
        if of_ddp:
            raise PolicyError(
                f"ZhooksStrategy expected a policy and options of the launch, found {', '.join(of_ddp)}, an option of "
                "DistributedDataParallel. Drop it."
            )
        self.policy, self.keep_attached = Policy.of(policy), keep_attached
        self.attachment: Attachment | None = None
        self._failed = False

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.model is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._check_precision()
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self._failed = False
        if self.attachment is not None and self.attachment.model is not self.lightning_module:
            raise AttachError(
                f"ZhooksStrategy expected {type(self.attachment.model).__name__}, which is attached, found another module. "
                "Call trainer.strategy.attachment.detach(), or make a new Trainer and strategy for it."
            )
        if self.attachment is None:
            if all(param.device.type != "meta" for param in tree.parameters(self.model)):
                self.model_to_device()
            self.attachment = attach(self.lightning_module, policy=self.policy)
            if isinstance(self.precision_plugin, PolicyPrecision):
                self.precision_plugin.begin(self.attachment)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _check_precision(self) -> None:
        """Either the policy casts and scales, or Lightning does."""
        ours, theirs = self.policy.precision.param, str(self.precision_plugin.precision)
        if self.policy.precision.loss_scale is not None and not isinstance(self.precision_plugin, PolicyPrecision):
            if type(self.precision_plugin) is not Precision:
                raise PolicyError(
                    "ZhooksStrategy expected one loss scale and one precision, found [precision] loss_scale in the policy and "
                    f'{type(self.precision_plugin).__name__} of Trainer(precision="{theirs}"). Drop one of them.'
                )
            self.precision_plugin = PolicyPrecision()
        if ours not in (None, "fp32") and theirs not in ("32-true", "32"):
            raise PolicyError(
                f'ZhooksStrategy expected one precision, found [precision] param = "{ours}" in the policy and '
                f'Trainer(precision="{theirs}"). Drop one of them.'
            )

    # A step.

    def _redirected(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module by way of its forward: the whole step is one pass."""
        module: Any = self.lightning_module
        return self._forward_redirection(module, module, method, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            if not self.lightning_module.automatic_optimization:
                # Its forwards are passes, with its backwards and steps between them.
                return self.lightning_module.training_step(*args, **kwargs)
            return self._redirected("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._redirected("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._redirected("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._redirected("predict_step", *args, **kwargs)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure (forward and backward), then the step: with tiers or a loss scale it cannot run inside the step."""
        plugin: Any = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.attachment is not None
        with self.attachment.no_sync():
            yield

    # Checkpoints: Lightning calls these on every rank, and writes on rank 0.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on rank 0's CPU, {} on the others.  Collective."""
        if self.attachment is None:
            return super().lightning_module_state_dict()
        return whole_weights(self.attachment.model, self.attachment)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole states on rank 0's CPU, {} on the others.  Collective."""
        bare: Any = getattr(optimizer, "_optimizer", optimizer)
        if self.attachment is None:
            return super().optimizer_state(bare)
        return dict(self.attachment.state_dict(bare).get("optimizer", {}))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint({**checkpoint, _RANKS: self.world_size}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *how: Any, **options: Any) -> dict[str, Any]:
        """Like Lightning's, on any number of ranks.

        Raises:
            CheckpointError: it is from another number of ranks and the middle of an epoch, where Lightning counts each rank's
                batches.
        """
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *how, **options)
        ranks = checkpoint.get(_RANKS, self.world_size)
        module = self.lightning_module
        fitting = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        batches = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
        done = batches.get("current", {}).get("processed", 0)
        if fitting and ranks != self.world_size and done and not batches.get("is_last_batch"):
            raise CheckpointError(
                f"Cannot load {shown_path(checkpoint_path)}. Expected {counted(ranks, 'rank')} as saved, or a checkpoint from "
                f"the end of an epoch, found {self.world_size} and one after {done} batch(es) per rank. Resume on as many, or "
                "save when epochs end."
            )
        return checkpoint

    # The end.

    def on_exception(self, exception: BaseException) -> None:
        # Other ranks may be gone: making the model whole would wait for them.
        self._failed = True

    def teardown(self) -> None:
        if self.attachment is not None and not (self.keep_attached or self._failed):
            if isinstance(self.precision_plugin, PolicyPrecision):
                self.precision_plugin.end()
            self.attachment.detach()
            self.attachment = None
        if self.attachment is None:
            super().teardown()
            return
        # As Lightning's, but the shards stay where they are.
        assert self.accelerator is not None and self.cluster_environment is not None
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()


class SaveOnPreemption(pl.Callback):
    """After SIGTERM has reached any rank, finish the step on all ranks, save, and exit with code 0.

    During ``fit`` it replaces Lightning's own handler, which waits inside the signal for ranks that may not have received it.

    Args:
        path: of the checkpoint, as ``trainer.save_checkpoint`` takes it; ``fit(ckpt_path=path)`` resumes from it.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._before: Any = signal.SIG_DFL

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # Lightning's comes after this one.
        self._before = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        attachment = getattr(trainer.strategy, "attachment", None)
        if attachment is None:
            raise AttachError(
                f"SaveOnPreemption expected ZhooksStrategy, found {type(trainer.strategy).__name__}. Pass "
                "strategy=ZhooksStrategy()."
            )
        if threading.current_thread() is threading.main_thread():
            # What is there is called as well by what catches signals next: Lightning's would wait for the other ranks.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        attachment.catch_preemption()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Lightning's checkpoints have no gradients: those of a step begun would be lost.
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        if stepped and trainer.strategy.attachment.preempted:
            trainer.save_checkpoint(self._path)
            raise SIGTERMException(0)
