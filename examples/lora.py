"""Train PEFT's LoRA adapters on a frozen bf16 base, both sharded over the ranks, in your own training loop.

    pip install '.[transformers,peft]'
    torchrun --nproc-per-node 2 examples/lora.py

The base takes 2 bytes per parameter in total over all ranks; only the adapters have gradients and optimizer states.
"""

# torch leaves Tensor.backward without annotations.
# mypy: untyped-calls-exclude=torch
from __future__ import annotations

from pathlib import Path

import click
import peft
import torch

import zhooks
from finetune import language_model
from ranks import launched
from text import held_out_batch, read_corpus, share, standard_library, train_batch


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=100, type=click.IntRange(1), help="Training steps.")
@click.option("--batch", default=8, type=click.IntRange(1), help="Rows per step, over all ranks.")
@click.option("--layers", default=4, type=click.IntRange(1), help="Transformer blocks.")
@click.option("--width", default=96, type=click.IntRange(16), help="Width of the model, a multiple of 16.")
@click.option("--rank", "lora_rank", default=8, type=click.IntRange(1), help="Rank of the adapters.")
@click.option("--context", default=128, type=click.IntRange(2), help="Bytes in a row.")
@click.option("--source", default=standard_library(), type=click.Path(exists=True, path_type=Path), help="Folder of sources.")
@click.option("--out", default="adapter", help="Folder for the adapters.")
def main(steps: int, batch: int, layers: int, width: int, lora_rank: int, context: int, source: Path, out: str) -> None:
    """Train, and save the adapters alone."""
    with launched() as place:
        rank, world, device = place.rank, place.world, place.device
        if batch % world:
            raise click.UsageError(f"--batch: expected a multiple of the {world} ranks, found {batch}")
        corpus = read_corpus(source, max_nbytes=16 << 20, min_nbytes=batch + context)
        adapters = peft.LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        base: torch.nn.Module = language_model(layers, width)
        model = peft.get_peft_model(base.to(device, torch.bfloat16), adapters)
        attachment = zhooks.attach(model, policy={"stage": 3})
        # From now on, the activations of every step are counted.
        attachment.memory()
        trainable = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=5e-3)
        for step in range(steps):
            mine = share(train_batch(corpus.train, seed=0, step=step, rows=batch, context=context), rank=rank, world=world)
            tokens = mine[0].to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and (step + 1) % max(1, steps // 10) == 0:
                click.echo(f"step {step + 1}: loss {loss.item():.3f}")
        tokens = held_out_batch(corpus.held_out, rows=batch, context=context)[0].to(device)
        with torch.no_grad(), model.disable_adapter():
            before = model(input_ids=tokens, labels=tokens).loss.item()
        with torch.no_grad():
            after = model(input_ids=tokens, labels=tokens).loss.item()
        # The adapters alone are gathered, and rank 0 writes them; every rank takes part.
        attachment.save_pretrained(out)
        if rank == 0:
            click.echo(attachment.memory())
            click.echo(f"held-out loss {before:.3f} without the adapters in {out}/, {after:.3f} with them")


if __name__ == "__main__":
    main()
