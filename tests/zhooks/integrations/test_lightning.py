"""Lightning's Trainer with our strategy: what it trains, saves and resumes, held to Lightning in a world of one.

pytest runs it, on one rank and on two.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zhooks
from tests.support.launched import launched
from tests.support.on_ranks import folder, hooks_left, on_ranks, place
from tests.support.slow import slow

pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))
        self.scale = nn.Parameter(torch.ones(3))
        self.losses: list[float] = []

    def forward(self, samples: Tensor) -> Tensor:
        return self.net(samples) * self.scale

    def training_step(self, batch: Any, number: int) -> Tensor:
        samples, classes = batch
        loss = nn.functional.cross_entropy(self(samples), classes)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        samples, classes = batch
        self.log("val", nn.functional.cross_entropy(self(samples), classes), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def data(count: int, rank: int, world: int) -> DataLoader[Any]:
    """This rank's samples in their order; Lightning's own sampler would shuffle them, but not in a world of one."""
    made = torch.Generator().manual_seed(1)
    samples, classes = torch.randn(count, 8, generator=made), torch.randint(3, (count,), generator=made)
    return DataLoader(TensorDataset(samples[rank::world], classes[rank::world]), batch_size=2)


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's advice on how many workers load data, and on where it writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trainer(where: Path, strategy: Any, world: int, accumulate: int, **chosen: Any) -> Any:
    usual = {
        "accelerator": "cpu", "devices": world, "max_epochs": 2, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": where, "gradient_clip_val": 0.5, "num_sanity_val_steps": 0,
        "enable_checkpointing": False, "use_distributed_sampler": False,
    }  # fmt: skip
    return lightning.Trainer(strategy=strategy, accumulate_grad_batches=accumulate, **(usual | chosen))


def fitted(
    where: Path, strategy: Any, world: int, accumulate: int, resume: Path | None = None, **chosen: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = Module()
    run = trainer(where, strategy, world, accumulate, **chosen)
    rank = place()[0] if world > 1 else 0
    run.fit(module, data(32, rank, world), data(8, rank, world), ckpt_path=resume)
    return run, module


def ours(policy: Any = None, **chosen: Any) -> Any:
    from zhooks.integrations.lightning import ZhooksStrategy

    return ZhooksStrategy(policy, process_group_backend="gloo", **chosen)


def values(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


POLICIES = (
    *slow({"stage": 1}),
    {"stage": 3, "units": {"min_numel": 0}, "activation": {"checkpoint": "unit"}},
    *slow({"stage": 3, "optimizer": {"tier": "host"}}),
)


@on_ranks(1, 2, limit_s=180.0, policy=POLICIES)
def test_a_module_trains_as_it_does_under_lightning_alone(policy: dict[str, Any]) -> None:
    with quiet(), folder() as path:
        with launched() as (_, world):
            run, module = fitted(path, ours(policy), world, 2)
            assert run.strategy.attachment is None and not hooks_left(module)
            found, validated = values(module), float(run.callback_metrics["val"])
        alone, expected = fitted(path, "auto", 1, 2 * world)
        for value, other in zip(found, values(expected), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)
        assert validated == pytest.approx(float(alone.callback_metrics["val"]), rel=1e-4)


@on_ranks(1, 2, limit_s=180.0)
def test_a_checkpoint_is_whole_and_a_run_resumes_from_it_as_if_it_had_gone_on() -> None:
    with quiet(), folder() as path, launched() as (_, world):
        saved: dict[int, Any] = {}

        class Save(lightning.Callback):  # type: ignore[misc, name-defined]
            def on_train_epoch_end(self, run: Any, module: Any) -> None:
                run.save_checkpoint(path / f"{run.current_epoch}.ckpt")
                saved[run.current_epoch] = run.strategy.attachment.model

        _, through = fitted(path, ours(), world, 1, callbacks=[Save()])
        loaded = Module.load_from_checkpoint(path / "1.ckpt")
        for value, other in zip(values(loaded), values(through), strict=True):
            assert torch.equal(value, other)
        _, again = fitted(path, ours(), world, 1, resume=path / "0.ckpt")
        for value, other in zip(values(again), values(through), strict=True):
            assert torch.equal(value, other)
        assert sorted(saved) == [0, 1]


class Overflowing(Module):
    """Its third step overflows on the last rank."""

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = super().training_step(batch, number)
        lost = self.current_epoch == 0 and number == 2 and place()[0] == place()[1] - 1
        return loss * (float("inf") if lost else 1.0)


def by_hand(world: int) -> list[Tensor]:
    """Two epochs of a plain loop that leaves out the step that overflows."""
    torch.manual_seed(0)
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for epoch in range(2):
        for number, batches in enumerate(zip(*(data(32, rank, world) for rank in range(world)), strict=True)):
            if (epoch, number) == (0, 2):
                continue
            for samples, classes in batches:
                (nn.functional.cross_entropy(module(samples), classes) / world).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return values(module)


SCALED = {"loss_scale": "dynamic", "growth_interval": 3}


@on_ranks(2, limit_s=180.0)
def test_the_policys_loss_scale_skips_the_step_that_overflowed_and_clips_true_gradients() -> None:
    with quiet(), folder() as path, launched() as (rank, world):
        torch.manual_seed(0)
        module, run = Overflowing(), trainer(path, ours({"precision": SCALED}, keep_attached=True), world, 1)
        run.fit(module, data(32, rank, world), data(8, rank, world))
        attachment = run.strategy.attachment
        steps = len(data(32, 0, world))
        # Halved once, and doubled by every third of the other steps.
        assert attachment.loss_scale == 65536.0 / 2 * 2 ** ((2 * steps - 3) // 3)
        assert [lost.step for lost in attachment.overflows] == [2]
        attachment.detach()
        for value, other in zip(values(module), by_hand(world), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)


@on_ranks(2, limit_s=180.0)
def test_a_run_resumes_with_the_loss_scale_it_had() -> None:
    with quiet(), folder() as path, launched() as (rank, world):
        policy = {"precision": {"param": "fp16", **SCALED, "initial_scale": 256.0, "growth_interval": 7}}
        scales: list[float | None] = []

        class Save(lightning.Callback):  # type: ignore[misc, name-defined]
            def on_train_epoch_end(self, run: Any, module: Any) -> None:
                run.save_checkpoint(path / f"{run.current_epoch}.ckpt")
                scales.append(run.strategy.attachment.loss_scale)

        def fit(resume: Path | None, callbacks: list[Any]) -> Any:
            torch.manual_seed(0)
            module = Overflowing()
            run = trainer(path, ours(policy, keep_attached=True), world, 1, callbacks=callbacks)
            run.fit(module, data(32, rank, world), data(8, rank, world), ckpt_path=resume)
            scales.append(run.strategy.attachment.loss_scale)
            run.strategy.attachment.detach()
            return values(module)

        through = fit(None, [Save()])
        again = fit(path / "0.ckpt", [])
        assert all(torch.equal(value, other) for value, other in zip(again, through, strict=True))
        assert scales[0] != scales[1] == scales[2] == scales[3], scales


class Adversaries(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Two networks against each other, in optimization by hand; the learned shift is used outside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        self.shift = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any, number: int) -> None:
        for turn, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch[0], turn)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def loss(self, samples: Tensor, turn: int) -> Tensor:
        made = self(samples[:, :4]) + self.shift
        if turn == 0:
            return nn.functional.softplus(-self.discriminator(made)).mean()
        true = nn.functional.softplus(-self.discriminator(samples)).mean()
        return true + nn.functional.softplus(self.discriminator(made.detach())).mean()

    def configure_optimizers(self) -> Any:
        sides = ([*self.generator.parameters(), self.shift], self.discriminator.parameters())
        return [torch.optim.AdamW(side, lr=0.01) for side in sides]


def played_by_hand(world: int) -> list[Tensor]:
    torch.manual_seed(0)
    module = Adversaries()
    optimizers = module.configure_optimizers()
    for _ in range(2):
        for batches in zip(*(data(32, rank, world) for rank in range(world)), strict=True):
            for turn, optimizer in enumerate(optimizers):
                module.zero_grad()
                for samples, _classes in batches:
                    (module.loss(samples, turn) / world).backward()
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
                optimizer.step()
    return values(module)


BY_HAND: tuple[Any, ...] = (
    {"stage": 1, "precision": {"loss_scale": 128.0}},
    *slow({}, {"optimizer": {"tier": "host"}, "units": {"min_numel": 0}}),
)


@on_ranks(1, 2, limit_s=180.0, policy=BY_HAND)
def test_optimization_by_hand_trains_what_a_plain_loop_does(policy: dict[str, Any]) -> None:
    with quiet(), folder() as path, launched() as (rank, world):
        torch.manual_seed(0)
        module, run = Adversaries(), trainer(path, ours(policy), world, 1, gradient_clip_val=None)
        run.fit(module, data(32, rank, world))
        for value, other in zip(values(module), played_by_hand(world), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)


@on_ranks(2, limit_s=180.0)
def test_a_module_that_is_kept_attached_is_made_plain_by_its_attachment() -> None:
    with quiet(), folder() as path, launched() as (_, world):
        run, module = fitted(path, ours(keep_attached=True), world, 1)
        assert any(isinstance(param, zhooks.ShardedTensor) for param in module.parameters())
        with pytest.raises(zhooks.AttachError, match="expected Module, which is attached, found another module"):
            run.fit(Module(), data(32, *place()))
        run.strategy.attachment.detach()
        assert not hooks_left(module)


def test_what_contradicts_the_policy_is_refused_and_both_are_named(tmp_path: Path) -> None:
    for option in ("find_unused_parameters", "ddp_comm_hook"):
        with pytest.raises(zhooks.PolicyError, match=option):
            ours(**{option: True})
    scaled = {"precision": {"loss_scale": "dynamic"}}
    with quiet(), launched(), pytest.raises(zhooks.PolicyError, match=r"\[precision\] loss_scale.*MixedPrecision"):
        fitted(tmp_path, ours(scaled), 1, 1, precision="bf16-mixed")
    with quiet(), launched(), pytest.raises(zhooks.PolicyError, match=r'\[precision\] param = "bf16".*precision="bf16-mixed"'):
        fitted(tmp_path, ours({"precision": {"param": "bf16"}}), 1, 1, precision="bf16-mixed")


class Signalled(lightning.Callback):  # type: ignore[misc, name-defined]
    """The last rank alone is told to end during a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, number: int) -> None:
        rank, world = place()
        if run.global_step == self._step and rank == world - 1:
            signal.raise_signal(signal.SIGTERM)


@on_ranks(1, 2, limit_s=180.0)
def test_a_signal_on_one_rank_alone_ends_all_after_the_step_with_exit_code_0_in_a_checkpoint_that_goes_on() -> None:
    from zhooks.integrations.lightning import SaveOnPreemption

    class Third(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, run: Any, *_: Any) -> None:
            if run.global_step == 3:
                run.save_checkpoint(path / "third.ckpt")

    with quiet(), folder() as path, launched() as (_, world):
        fitted(path, ours(), world, 1, callbacks=[Third()], max_steps=3)
        file = path / "preempted.ckpt"
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            fitted(path, ours(), world, 1, callbacks=[SaveOnPreemption(file), Signalled(2)])
        assert not ended.value.code
        assert signal.getsignal(signal.SIGTERM) == before
        found, expected = (torch.load(each, weights_only=False) for each in (file, path / "third.ckpt"))
        assert found["global_step"] == expected["global_step"] == 3
        for part in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0)
        run, _ = fitted(path, ours(), world, 1, resume=file, max_steps=4)
        assert run.global_step == 4


def test_a_signal_between_two_backwards_of_a_step_saves_after_the_step_and_no_gradient_is_lost(tmp_path: Path) -> None:
    from zhooks.integrations.lightning import SaveOnPreemption

    with quiet(), launched() as (_, world):
        _, undisturbed = fitted(tmp_path, ours(), world, 2, max_steps=2)
        file = tmp_path / "preempted.ckpt"
        with pytest.raises(SystemExit):
            fitted(tmp_path, ours(), world, 2, callbacks=[SaveOnPreemption(file), Signalled(1)], max_steps=2)
        run, resumed = fitted(tmp_path, ours(), world, 2, resume=file, max_steps=2)
        assert run.global_step == 2
        torch.testing.assert_close(values(resumed), values(undisturbed), rtol=0, atol=0)


def test_saving_on_preemption_is_refused_by_name_under_another_strategy(tmp_path: Path) -> None:
    from zhooks.integrations.lightning import SaveOnPreemption

    with quiet(), pytest.raises(zhooks.AttachError, match="expected ZhooksStrategy, found"):
        fitted(tmp_path, "auto", 1, 1, callbacks=[SaveOnPreemption(tmp_path / "file")])
