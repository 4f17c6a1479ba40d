"""Train a small Llama on Python source code with transformers' Trainer, sharded over the ranks.

    pip install '.[transformers]'
    torchrun --nproc-per-node 2 examples/finetune.py
    torchrun --nproc-per-node 2 examples/finetune.py --policy examples/policies/one_gpu_offload.toml

Two things differ from a script for transformers' own `Trainer`: where `Trainer` is imported from, and its argument `zhooks`,
the policy. To fine-tune your own weights, load them in `language_model`.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from text import read_corpus, standard_library
from zhooks.integrations.transformers import Trainer


class Windows(Dataset[dict[str, Tensor]]):
    """A text as rows of `context` bytes; bytes are the tokens, so that no vocabulary is needed."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.rows = text[: text.numel() // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index].long()
        return {"input_ids": row, "labels": row}


def language_model(layers: int, width: int) -> LlamaForCausalLM:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, tie_word_embeddings=True, num_attention_heads=width // 16, num_key_value_heads=width // 16,
            hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        )
    )  # fmt: skip


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=200, type=click.IntRange(1), help="Training steps.")
@click.option("--batch", default=8, type=click.IntRange(1), help="Rows per step and rank.")
@click.option("--layers", default=4, type=click.IntRange(1), help="Transformer blocks.")
@click.option("--width", default=96, type=click.IntRange(16), help="Width of the model, a multiple of 16.")
@click.option("--context", default=128, type=click.IntRange(2), help="Bytes in a row.")
@click.option("--policy", default=None, type=click.Path(exists=True, path_type=Path), help="Policy file; stage 3 without one.")
@click.option("--source", default=standard_library(), type=click.Path(exists=True, path_type=Path), help="Folder of sources.")
@click.option("--out", default="finetuned", help="Folder for checkpoints and the model.")
def main(steps: int, batch: int, layers: int, width: int, context: int, policy: Path | None, source: Path, out: str) -> None:
    """Train, evaluate on files that were held out, and save a folder that from_pretrained reads."""
    corpus = read_corpus(source, max_nbytes=16 << 20, min_nbytes=context)
    arguments = TrainingArguments(
        out, max_steps=steps, per_device_train_batch_size=batch, learning_rate=2e-3, logging_steps=max(1, steps // 10),
        report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
    )  # fmt: skip
    held_out = torch.utils.data.Subset(Windows(corpus.held_out, context), range(min(64, corpus.held_out.numel() // context)))
    train, model = Windows(corpus.train, context), language_model(layers, width)
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=held_out, zhooks=policy)
    before = trainer.evaluate()["eval_loss"]
    attachment = trainer.attachment
    assert attachment is not None, "the first evaluation attaches the model"
    # Activations are counted from the first call on.
    attachment.memory()
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(out)
    if trainer.is_world_process_zero():
        click.echo(attachment.memory())
        click.echo(f"held-out loss {before:.3f} before and {after:.3f} nats per byte after training; the model is in {out}/")


if __name__ == "__main__":
    main()
