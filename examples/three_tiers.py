"""A model too large for its device: a policy file spreads the training state over device memory, host memory and disk.

    python examples/three_tiers.py
    python examples/three_tiers.py --policy examples/policies/one_gpu_infinity.toml
"""

# torch leaves Tensor.backward without annotations.
# mypy: untyped-calls-exclude=torch
from __future__ import annotations

from pathlib import Path

import click
import torch
import torch.nn.functional as F

import zhooks
from gpt import GPT, GPTConfig
from ranks import launched
from text import read_corpus, share, standard_library, train_batch

POLICY = Path(__file__).parent / "policies" / "three_tiers.toml"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=30, type=click.IntRange(1), help="Training steps.")
@click.option("--policy", default=POLICY, type=FILE, help="A policy file.")
@click.option("--dim", default=128, type=click.IntRange(8), help="Width of the model.")
@click.option("--source", default=standard_library(), type=FOLDER, help="Text: *.py files.")
def main(steps: int, policy: Path, dim: int, source: Path) -> None:
    """Train a small GPT on Python's own source, and print how many bytes of each kind each tier holds."""
    with launched() as place:
        corpus = read_corpus(source, max_nbytes=1 << 20, min_nbytes=4096)
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=2, dim=dim, heads=4, context=64)).to(place.device)
        attachment = zhooks.attach(model, policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for step in range(steps):
            batch = train_batch(corpus.train, seed=0, step=step, rows=8 * place.world, context=64)
            inputs, targets = (part.to(place.device) for part in share(batch, rank=place.rank, world=place.world))
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            if step < steps - 1:
                optimizer.zero_grad()
            place.show(step, steps, loss.item())
        report = attachment.memory()
        if place.rank == 0:
            print(report)
        # Files of the disk tier go with the attachment.
        optimizer.zero_grad()
        attachment.detach()


if __name__ == "__main__":
    main()
