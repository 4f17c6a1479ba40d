"""Image classification with a ViT or a ResNet from transformers, on generated images: stripes in eight directions with noise.

    python examples/vision.py
    torchrun --nproc-per-node 2 examples/vision.py --model resnet
"""

# torch leaves Tensor.backward without annotations.
# mypy: untyped-calls-exclude=torch
from __future__ import annotations

import math
from pathlib import Path

import click
import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

import zhooks
from ranks import launched

CLASSES = 8


def images(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """[count, 3, size, size] and the direction of each image's stripes, [count]."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle, phase = labels * math.pi / CLASSES, torch.rand(count, generator=generator) * math.tau
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    along = angle.cos()[:, None, None] * columns + angle.sin()[:, None, None] * rows
    waves = torch.sin(along * math.tau / 8 + phase[:, None, None])
    return waves[:, None] + 0.5 * torch.randn(count, 3, size, size, generator=generator), labels


def build(kind: str, size: int, width: int) -> nn.Module:
    """A small network of either kind."""
    if kind == "vit":
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 3, "num_attention_heads": 4}
        return ViTForImageClassification(ViTConfig(image_size=size, patch_size=8, num_labels=CLASSES, **sizes))
    sizes = {"embedding_size": width // 2, "hidden_sizes": [width // 2, width], "depths": [1, 1]}
    return ResNetForImageClassification(ResNetConfig(layer_type="basic", num_labels=CLASSES, **sizes))


@click.command(context_settings={"show_default": True})
@click.option("--model", "kind", default="vit", type=click.Choice(["vit", "resnet"]), help="The network.")
@click.option("--steps", default=60, type=click.IntRange(1), help="Training steps.")
@click.option("--batch", default=32, type=click.IntRange(2), help="Images per step and rank.")
@click.option("--size", default=32, type=click.IntRange(16), help="Height and width, a multiple of 8.")
@click.option("--width", default=64, type=click.IntRange(8), help="Width of the model, a multiple of 8.")
@click.option("--policy", default=None, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A policy file.")
def main(kind: str, steps: int, batch: int, size: int, width: int, policy: Path | None) -> None:
    """Learn the direction of stripes. Statistics of BatchNorm are each rank's own, as under DistributedDataParallel."""
    with launched() as place:
        torch.manual_seed(0)
        model = build(kind, size, width).to(place.device)
        zhooks.attach(model, policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1 + place.rank)
        for step in range(steps):
            pixels, labels = images(batch, size, generator)
            loss = model(pixel_values=pixels.to(place.device), labels=labels.to(place.device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            place.show(step, steps, loss.item())


if __name__ == "__main__":
    main()
