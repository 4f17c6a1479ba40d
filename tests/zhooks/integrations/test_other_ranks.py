"""Checkpoints of Trainer, Accelerate and Lightning that go on on another number of ranks than saved them.

pytest runs it: a pool of ranks saves into a folder, another loads from it. The oracle is the run that went on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zhooks
from tests.support.launched import launched
from tests.support.on_ranks import place
from tests.support.ranks import Pool

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

Ranks = Callable[[int], Pool]
EITHER_WAY = pytest.mark.parametrize(
    ("world", "other"),
    [pytest.param(2, 1, id="world2-to-1"), pytest.param(1, 2, id="world2-from-1", marks=pytest.mark.slow)],
)


def values(model: nn.Module) -> list[Tensor]:
    """Whole parameters.  Collective."""
    return [p.full_tensor() if isinstance(p, zhooks.ShardedTensor) else p.detach().clone() for p in model.parameters()]


# Trainer.


class States(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """This rank's random state as each step begins."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_step_begin(self, *given: Any, **named: Any) -> None:
        self.seen.append(torch.get_rng_state())


def trainer(path: str, examples: int, **chosen: Any) -> Any:
    from zhooks.integrations.transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    made = torch.Generator().manual_seed(1)
    tokens = [torch.randint(1, 64, (8,), generator=made) for _ in range(48)]
    usual: dict[str, Any] = {
        "output_dir": path, "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1,
        "learning_rate": 0.01, "report_to": [], "disable_tqdm": True, "save_strategy": "steps", "save_steps": 2,
        "gradient_accumulation_steps": examples // 2 // place()[1],
    }  # fmt: skip
    data = [{"input_ids": each, "labels": each} for each in tokens]
    return Trainer(
        transformers.LlamaForCausalLM(config), TrainingArguments(**(usual | chosen)), train_dataset=data, zhooks={"stage": 3},
        callbacks=[States()],
    )  # fmt: skip


def losses(run: Any) -> list[float]:
    return [float(line["loss"]) for line in run.state.log_history if "loss" in line]


def trains(path: str) -> list[float]:
    with launched():
        run = trainer(path, 8)
        run.train()
        return losses(run)


def goes_on(path: str) -> tuple[list[float], Tensor]:
    with launched():
        run = trainer(path, 8)
        run.train(resume_from_checkpoint=f"{path}/checkpoint-2")
        assert run.state.global_step == 4
        states = next(each for each in run.callback_handler.callbacks if isinstance(each, States))
        return losses(run), states.seen[0]


def is_refused(path: str, match: str, chosen: dict[str, Any]) -> None:
    with launched():
        run = trainer(path, chosen.pop("examples"), **chosen)
        with pytest.raises(zhooks.CheckpointError, match=match):
            run.train(resume_from_checkpoint=f"{path}/checkpoint-2")


@EITHER_WAY
def test_a_trainer_goes_on_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path, world: int, other: int) -> None:
    through = ranks(world).run(f"{__name__}:trains", path=str(tmp_path))[0]
    resumed = ranks(other).run(f"{__name__}:goes_on", path=str(tmp_path))
    assert resumed[0][0] == pytest.approx(through, rel=1e-4)
    name = "rng_state_0.pth" if world > 1 else "rng_state.pth"
    with torch.serialization.safe_globals(transformers.trainer.safe_globals().__enter__() or []):
        saved = torch.load(tmp_path / "checkpoint-2" / name, weights_only=False)["cpu"]
    assert torch.equal(resumed[0][1], saved)
    assert other == 1 or not torch.equal(resumed[1][1], saved)


def test_a_trainer_whose_steps_are_of_other_examples_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(f"{__name__}:trains", path=str(tmp_path))
    for match, chosen in (
        (r"Expected 8 examples per step, as in the checkpoint \(1 rank\), found 16", {"examples": 16}),
        # The two ranks divide each batch of 2.
        (r"xpected 8 examples .* \(1 rank\), found 4", {"examples": 8, "accelerator_config": {"split_batches": True}}),
        (r"under group_by_length depends", {"examples": 8, "train_sampling_strategy": "group_by_length"}),
    ):
        ranks(2).run(f"{__name__}:is_refused", path=str(tmp_path), match=match, chosen=chosen)


# Accelerate.


class Script:
    def __init__(self, batch: int = 2, accumulate: int = 2) -> None:
        from zhooks.integrations.accelerate import Accelerator

        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, zhooks={"stage": 3})
        model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        made = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(64, 12, generator=made), torch.randint(3, (64,), generator=made))
        loader = DataLoader(data, batch_size=batch)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(model, optimizer, loader, schedule)

    def train(self, batches: int) -> None:
        for number, (samples, classes) in enumerate(self.loader):
            if number == batches:
                break
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.cross_entropy(self.model(samples), classes))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()


def saves_state(path: str) -> list[Tensor]:
    with launched():
        script = Script()
        script.train(6)
        script.accelerator.save_state(path)
        return values(script.model)


def loads_state(path: str) -> tuple[list[Tensor], int, float, Tensor]:
    with launched():
        script = Script()
        script.accelerator.load_state(path)
        state = torch.get_rng_state()
        found, step, rate = values(script.model), script.accelerator.step, script.schedule.get_last_lr()[0]
        # Ranks agree on which batch is the last of an update, or this would not end.
        script.train(2)
        return found, step, rate, state


def state_is_refused(path: str) -> None:
    with launched():
        script = Script(batch=4)
        before = values(script.model)
        with pytest.raises(zhooks.CheckpointError, match=r"xpected 4 examples per step on each rank, .* found 8"):
            script.accelerator.load_state(path)
        assert all(torch.equal(*pair) for pair in zip(values(script.model), before, strict=True))


@EITHER_WAY
def test_a_state_of_accelerate_goes_on_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path, world: int, other: int) -> None:
    saved = ranks(world).run(f"{__name__}:saves_state", path=str(tmp_path))[0]
    found = ranks(other).run(f"{__name__}:loads_state", path=str(tmp_path))
    for each, step, rate, _ in found:
        assert all(torch.equal(*pair) for pair in zip(each, saved, strict=True))
        assert step == 6
        # Three updates, each of them a step of the scheduler a rank.
        assert rate == pytest.approx(0.01 * (1 / 3 + 2 / 3 * 3 * world / 20))
    assert other == 1 or not torch.equal(found[0][3], found[1][3])
    ranks(other).run(f"{__name__}:state_is_refused", path=str(tmp_path))


# Lightning.


def module() -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))

        def training_step(self, batch: Any, number: int) -> Tensor:
            return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def fits(path: str, resume: str | None, epochs: int) -> list[Tensor]:
    """Saves ``epoch-N.ckpt`` after each epoch, and ``middle.ckpt`` in the first."""
    lightning = pytest.importorskip("lightning")
    from zhooks.integrations.lightning import ZhooksStrategy

    class Save(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            if resume is None and run.global_step == 2:
                run.save_checkpoint(f"{path}/middle.ckpt")

        def on_train_epoch_end(self, run: Any, module: Any) -> None:
            run.save_checkpoint(f"{path}/epoch-{run.current_epoch}.ckpt")

    with warnings.catch_warnings(), launched() as (_, world):
        warnings.simplefilter("ignore")
        made = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(32, 8, generator=made), torch.randint(2, (32,), generator=made))
        run = lightning.Trainer(
            strategy=ZhooksStrategy(policy={"stage": 3}), max_epochs=epochs, logger=False, accelerator="cpu", devices=world,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=path,
            callbacks=[Save()],
        )  # fmt: skip
        made_of = module()
        run.fit(made_of, DataLoader(data, batch_size=8 // world), ckpt_path=resume and f"{path}/{resume}")
        return values(made_of)


def refuses_the_middle(path: str) -> None:
    with pytest.raises(zhooks.CheckpointError, match=r"from the end of an epoch, found \d and one after 2 batch\(es\)"):
        fits(path, "middle.ckpt", 2)


@EITHER_WAY
def test_lightning_goes_on_at_the_end_of_an_epoch_alone(ranks: Ranks, tmp_path: Path, world: int, other: int) -> None:
    through = ranks(world).run(f"{__name__}:fits", path=str(tmp_path), resume=None, epochs=2)[0]
    resumed = ranks(other).run(f"{__name__}:fits", path=str(tmp_path), resume="epoch-0.ckpt", epochs=2)[0]
    for value, expected in zip(resumed, through, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    ranks(other).run(f"{__name__}:refuses_the_middle", path=str(tmp_path))
