"""Masked-language pre-training of a BERT from transformers, on the bytes of Python's own source code.

    python examples/bert.py
    torchrun --nproc-per-node 2 examples/bert.py --policy examples/policies/teams_zero3_bf16.toml
"""

# torch leaves Tensor.backward without annotations.
# mypy: untyped-calls-exclude=torch
from __future__ import annotations

from pathlib import Path

import click
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import zhooks
from ranks import launched
from text import read_corpus, share, standard_library, train_batch

MASK, VOCABULARY = 256, 257
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


def masked(inputs: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Bytes with 15 of 100 hidden, and what was there: -100 where nothing is asked."""
    hidden = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(step)) < 0.15
    hidden[:, 0] = True  # at least one a row: a loss over nothing is not a number
    return inputs.masked_fill(hidden, MASK), inputs.masked_fill(~hidden, -100)


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=100, type=click.IntRange(1), help="Training steps.")
@click.option("--batch", default=32, type=click.IntRange(1), help="Windows of text per step and rank.")
@click.option("--hidden", default=128, type=click.IntRange(8), help="Width of the model, a multiple of 4.")
@click.option("--layers", default=4, type=click.IntRange(1), help="Transformer blocks.")
@click.option("--context", default=64, type=click.IntRange(8), help="Bytes in a window.")
@click.option("--policy", default=None, type=FILE, help="A policy file.")
@click.option("--source", default=standard_library(), type=FOLDER, help="Text: *.py files.")
def main(steps: int, batch: int, hidden: int, layers: int, context: int, policy: Path | None, source: Path) -> None:
    """Hide bytes of Python's source and learn to say what they were."""
    with launched() as place:
        corpus = read_corpus(source, max_nbytes=4 << 20, min_nbytes=2 * context)
        torch.manual_seed(0)
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 4 * hidden, "num_attention_heads": 4}
        model = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=context, **sizes)).to(place.device)
        zhooks.attach(model, policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
        for step in range(steps):
            whole, _ = train_batch(corpus.train, seed=0, step=step, rows=batch * place.world, context=context)
            # Equal shares of equal windows; masked places differ in number by a little, and so do their weights.
            inputs, labels = share(masked(whole, step), rank=place.rank, world=place.world)
            loss = model(input_ids=inputs.to(place.device), labels=labels.to(place.device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
            place.show(step, steps, loss.item())


if __name__ == "__main__":
    main()
