"""Subjects of diffusers: denoisers, autoencoders and a ControlNet, each small, each fed as its pipeline would feed it.

``train.py`` asks for one by its name.  Classes of one family (a transformer's successors) are here once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.architectures.subject import Inputs, Skipped, Subject

ROWS = 2
Maker = tuple[Callable[[], dict[str, Any]], Callable[[torch.Generator], Inputs]]


def types() -> list[str]:
    """All that are here."""
    return list(_SUBJECTS)


def subject(name: str) -> Subject:
    """The subject of one class.

    Raises:
        Skipped: this diffusers has no such class.
    """
    import diffusers

    cls = getattr(diffusers, name, None)
    if cls is None:
        raise Skipped(f"diffusers {diffusers.__version__} has no {name}")
    settings, draw = _SUBJECTS[name]

    def make() -> nn.Module:
        built: nn.Module = cls(**settings())
        return built

    return Subject(f"diffusers/{name}", name, make, draw)


def _noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(ROWS, *shape, generator=generator)


def _times(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 1000, (ROWS,), generator=generator)


def _image_and_time(generator: torch.Generator) -> Inputs:
    return {"sample": _noise(generator, 3, 16, 16), "timestep": _times(generator)}


def _latent_and_text(generator: torch.Generator) -> Inputs:
    return {
        "sample": _noise(generator, 4, 8, 8), "timestep": _times(generator), "encoder_hidden_states": _noise(generator, 5, 16),
    }  # fmt: skip


def _latent_text_and_control(generator: torch.Generator) -> Inputs:
    return {**_latent_and_text(generator), "controlnet_cond": _noise(generator, 3, 64, 64)}


def _image(generator: torch.Generator) -> Inputs:
    return {"sample": _noise(generator, 3, 16, 16)}


def _image_of_class(generator: torch.Generator) -> Inputs:
    return {
        "hidden_states": _noise(generator, 4, 8, 8), "timestep": _times(generator),
        "class_labels": torch.randint(0, 10, (ROWS,), generator=generator),
    }  # fmt: skip


def _latent_with_text(generator: torch.Generator) -> Inputs:
    return {"hidden_states": _noise(generator, 4, 8, 8), "encoder_hidden_states": _noise(generator, 5, 16)}


def _sd3(generator: torch.Generator) -> Inputs:
    return {
        "hidden_states": _noise(generator, 4, 8, 8), "encoder_hidden_states": _noise(generator, 5, 16),
        "pooled_projections": _noise(generator, 24), "timestep": _times(generator),
    }  # fmt: skip


def _flux(generator: torch.Generator) -> Inputs:
    return {
        "hidden_states": _noise(generator, 16, 4), "encoder_hidden_states": _noise(generator, 5, 16),
        "pooled_projections": _noise(generator, 24), "timestep": torch.rand(ROWS, generator=generator),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip


def _unet2d() -> dict[str, Any]:
    return {
        "sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8,
        "attention_head_dim": 8, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }  # fmt: skip


def _unet_of_text() -> dict[str, Any]:
    return {
        "sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8,
        "attention_head_dim": 4, "cross_attention_dim": 16, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    }  # fmt: skip


def _both_ways() -> dict[str, Any]:
    return {**_unet_of_text(), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}


def _control() -> dict[str, Any]:
    unet = {name: value for name, value in _unet_of_text().items() if name != "sample_size"}
    return {**unet, "conditioning_embedding_out_channels": (8, 8, 16, 16)}


def _autoencoder() -> dict[str, Any]:
    return {
        "block_out_channels": (16, 32), "norm_num_groups": 8, "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }  # fmt: skip


def _dit() -> dict[str, Any]:
    return {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
        "sample_size": 8, "num_embeds_ada_norm": 10,
    }  # fmt: skip


def _transformer2d() -> dict[str, Any]:
    return {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "norm_num_groups": 4,
        "cross_attention_dim": 16,
    }  # fmt: skip


def _sd3_settings() -> dict[str, Any]:
    return {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 2, "joint_attention_dim": 16, "caption_projection_dim": 16, "pooled_projection_dim": 24,
        "out_channels": 4,
    }  # fmt: skip


def _flux_settings() -> dict[str, Any]:
    return {
        "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 16, "pooled_projection_dim": 24, "axes_dims_rope": (4, 4, 8),
    }  # fmt: skip


_SUBJECTS: dict[str, Maker] = {
    "UNet2DModel": (_unet2d, _image_and_time),
    "UNet2DConditionModel": (_both_ways, _latent_and_text),
    "ControlNetModel": (_control, _latent_text_and_control),
    "AutoencoderKL": (_autoencoder, _image),
    "VQModel": (_autoencoder, _image),
    "DiTTransformer2DModel": (_dit, _image_of_class),
    "Transformer2DModel": (_transformer2d, _latent_with_text),
    "SD3Transformer2DModel": (_sd3_settings, _sd3),
    "FluxTransformer2DModel": (_flux_settings, _flux),
}
