"""Fine-tune a small Llama with TRL's SFTTrainer on the functions of Python's standard library, sharded over the ranks.

    pip install '.[trl]'
    torchrun --nproc-per-node 2 examples/sft.py

Two things differ from a script for TRL itself: where `SFTTrainer` and `SFTConfig` are imported from, and the argument `zhooks`,
the policy. DPO, KTO, GRPO and the others work the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune import language_model
from text import find_sources, standard_library
from zhooks.integrations.trl import SFTConfig, SFTTrainer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; two that text never has end rows and fill them up."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    # The bytes 0xFE and 0xFF are in no UTF-8 text.
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=alphabet[-1], pad_token=alphabet[-2])


def functions(source: Path, count: int) -> Iterator[dict[str, str]]:
    """The first `count` top-level functions: what is asked for, and what shall be answered."""
    for name in find_sources(source):
        for part in (source / name).read_text(encoding="utf-8", errors="ignore").split("\ndef ")[1:]:
            head, _, body = part.partition("\n")
            if head.endswith(":") and body:
                yield {"prompt": f"def {head}\n", "completion": body[:200]}
                count -= 1
            if count == 0:
                return


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=100, type=click.IntRange(1), help="Training steps.")
@click.option("--batch", default=4, type=click.IntRange(1), help="Functions per step and rank.")
@click.option("--layers", default=4, type=click.IntRange(1), help="Transformer blocks.")
@click.option("--width", default=96, type=click.IntRange(16), help="Width of the model, a multiple of 16.")
@click.option("--policy", default=None, type=click.Path(exists=True, path_type=Path), help="Policy file; stage 3 without one.")
@click.option("--source", default=standard_library(), type=click.Path(exists=True, path_type=Path), help="Folder of sources.")
@click.option("--out", default="sft", help="Folder for the model.")
def main(steps: int, batch: int, layers: int, width: int, policy: Path | None, source: Path, out: str) -> None:
    """Train on completions of function headers, and save a folder that from_pretrained reads."""
    config = SFTConfig(
        out, max_steps=steps, per_device_train_batch_size=batch, learning_rate=2e-3, logging_steps=max(1, steps // 10),
        max_length=256, report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
        bf16=False,
    )  # fmt: skip
    data = Dataset.from_list(list(functions(source, 2000))).train_test_split(64, seed=0)
    trainer = SFTTrainer(
        language_model(layers, width), config, train_dataset=data["train"], eval_dataset=data["test"],
        processing_class=byte_tokenizer(), zhooks=policy,
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    # The model is attached by now. Activations are counted from the first call on.
    trainer.attachment.memory()
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(out)
    if trainer.is_world_process_zero():
        click.echo(trainer.attachment.memory())
        click.echo(f"held-out loss {before:.3f} before and {after:.3f} after training; the model is in {out}/")


if __name__ == "__main__":
    main()
