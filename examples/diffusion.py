"""Denoising diffusion with a UNet from diffusers, on generated images: bright discs on a dark background.

    python examples/diffusion.py
    torchrun --nproc-per-node 2 examples/diffusion.py
"""

# torch leaves Tensor.backward without annotations.
# mypy: untyped-calls-exclude=torch
from __future__ import annotations

from pathlib import Path

import click
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from torch import Tensor

import zhooks
from ranks import launched


def discs(count: int, size: int, generator: torch.Generator) -> Tensor:
    """[count, 1, size, size] in [-1, 1]: a disc each, somewhere."""
    centre = size * (0.3 + 0.4 * torch.rand(count, 2, 1, 1, generator=generator))
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    distance = ((rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2).sqrt()
    return torch.tanh(size / 4 - distance)[:, None]


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=60, type=click.IntRange(1), help="Training steps.")
@click.option("--batch", default=16, type=click.IntRange(1), help="Images per step and rank.")
@click.option("--size", default=16, type=click.IntRange(8), help="Height and width, a multiple of 4.")
@click.option("--width", default=32, type=click.IntRange(8), help="Channels of the first level, a multiple of 8.")
@click.option("--policy", default=None, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A policy file.")
def main(steps: int, batch: int, size: int, width: int, policy: Path | None) -> None:
    """Learn to predict the noise that was added to images (DDPM, arXiv:2006.11239)."""
    with launched() as place:
        torch.manual_seed(0)
        blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
        shape = {"sample_size": size, "in_channels": 1, "out_channels": 1, "block_out_channels": (width, 2 * width)}
        model = UNet2DModel(**shape, **blocks, layers_per_block=1, norm_num_groups=8).to(place.device)
        noises = DDPMScheduler(num_train_timesteps=100)
        zhooks.attach(model, policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1 + place.rank)
        for step in range(steps):
            clean = discs(batch, size, generator)
            noise = torch.randn(clean.shape, generator=generator)
            times = torch.randint(100, (batch,), generator=generator)
            noisy = noises.add_noise(clean, noise, times).to(place.device)
            loss = F.mse_loss(model(noisy, times.to(place.device)).sample, noise.to(place.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            place.show(step, steps, loss.item())


if __name__ == "__main__":
    main()
