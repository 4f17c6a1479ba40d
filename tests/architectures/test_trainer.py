"""The Trainer's loop over several families of transformers: ours on one rank and two against transformers' own.

pytest runs it.  What else the Trainer does (saving, evaluation, precision) is tests/zhooks/integrations/test_transformers.py's.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.architectures.subject import SEED, Subject, score, seeded
from tests.architectures.train import find
from tests.support.launched import launched
from tests.support.on_ranks import folder, on_ranks
from tests.support.slow import slow

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

FAMILIES = ("bert", "t5", "vit")
MORE = ("llama", "gpt2", "mixtral", "bart", "convnext", "wav2vec2", "mamba", "xlm")
STEPS = 3
ROWS = 2
POLICY = {"units": {"min_numel": 1000}, "activation": {"checkpoint": "unit"}}


def rows(subject: Subject, world: int) -> list[dict[str, Tensor]]:
    """The rows of as many batches as all ranks see."""
    batches = [subject.draw(torch.Generator().manual_seed(number)) for number in range(STEPS * world)]
    return [{name: value[row] for name, value in batch.items()} for batch in batches for row in range(ROWS)]


def trained(
    base: type[Any], subject: Subject, where: Path, world: int, micro: int, **more: Any
) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters of ``base``, a Trainer, over the subject's rows."""

    class Scoring(base):  # type: ignore[misc]
        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
            # The same draws (dropout) for each batch of a step, whichever rank sees it.
            with seeded(SEED + self.state.global_step):
                return score(model(**inputs))

    given = transformers.TrainingArguments(
        output_dir=str(where), use_cpu=True, per_device_train_batch_size=ROWS, max_steps=STEPS, logging_steps=1,
        learning_rate=0.01, optim="sgd", max_grad_norm=0.0, report_to=[], disable_tqdm=True, save_strategy="no",
        gradient_accumulation_steps=micro,
    )  # fmt: skip
    trainer = Scoring(subject.build(), given, train_dataset=rows(subject, world), **more)
    # The score is a mean, whatever the model would make of the number of tokens.
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    params = trainer.model.parameters()
    return losses, [p.full_tensor() if isinstance(p, zhooks.ShardedTensor) else p.detach() for p in params]


def compare(family: str) -> None:
    from zhooks.integrations.transformers import Trainer

    with folder() as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = find(f"transformers/{family}")
        with launched() as (rank, world):
            losses, found = trained(Trainer, subject, path / "ours", world, 1, zhooks=POLICY)
        expected_losses, expected = trained(transformers.Trainer, subject, path / f"plain{rank}", world, world)
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    # The Trainer divides each loss, ranks divide their sum: numbers below 1e-37 have fewer bits for it.
    assert all(torch.allclose(one, other, rtol=0.0, atol=1e-37) for one, other in zip(found, expected, strict=True))


@on_ranks(*slow(1), 2, limit_s=600.0, family=FAMILIES)
def test_its_loop_trains_a_family_as_transformers_own_does(family: str) -> None:
    compare(family)


@pytest.mark.slow
@on_ranks(1, 2, limit_s=600.0, family=MORE)
def test_its_loop_trains_other_families_as_transformers_own_does(family: str) -> None:
    compare(family)
