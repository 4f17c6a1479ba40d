"""Arguments that a model's processor makes beside an image or a sound: patches in rows with a grid, masks, positions, prompts.

``inputs.py`` feeds them together where a model wants none of the plainer batches.  It never looks at a model's class.

Note: [Grid]
An image is ``SIDE`` x ``SIDE`` patches of one moment; all images of a batch are one row of patches after another, and the
grid says how many patches each has in time, height and width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.architectures.facts import FRAMES, ROWS, TOKENS, Fill, number, uniform

SIDE = 4


def _side(config: Any) -> int:
    return number(config, "patch_size", "spatial_patch_size", default=16)


def _channels(config: Any) -> int:
    return number(config, "in_channels", "num_channels", "in_chans", default=3)


def _row_of_patches(generator: torch.Generator, config: Any) -> Tensor:
    width = _channels(config) * number(config, "temporal_patch_size", default=1) * _side(config) ** 2
    return uniform(generator, ROWS * SIDE * SIDE, width)


def _row_of_pairs(generator: torch.Generator, config: Any) -> Tensor:
    """Patches of two moments each, where the configuration has another word for it."""
    return uniform(generator, ROWS * SIDE * SIDE, 2 * _channels(config) * _side(config) ** 2)


def _row_of_pictures(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS * SIDE * SIDE, _channels(config), _side(config), _side(config))


def _patches(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, SIDE * SIDE, _channels(config) * _side(config) ** 2)


def _strip(generator: torch.Generator, config: Any) -> Tensor:
    """All patches of an image beside each other."""
    return uniform(generator, ROWS, _channels(config), _side(config), SIDE * SIDE * _side(config))


def _grid(generator: torch.Generator, config: Any) -> Tensor:
    return torch.tensor([[1, SIDE, SIDE]] * ROWS)


def _shapes(generator: torch.Generator, config: Any) -> Tensor:
    return torch.tensor([[SIDE, SIDE]] * ROWS)


def _places(generator: torch.Generator, config: Any) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    return torch.stack([columns, rows], dim=-1).reshape(1, SIDE * SIDE, 2).expand(ROWS, -1, -1).contiguous()


def _ones_of_patches(generator: torch.Generator, config: Any) -> Tensor:
    return torch.ones(ROWS, SIDE * SIDE, dtype=torch.long)


def _images(generator: torch.Generator, config: Any) -> Tensor:
    side = number(config, "image_size", "img_size", default=64)
    return uniform(generator, ROWS, _channels(config), side, side)


def _several(generator: torch.Generator, config: Any) -> Tensor:
    side = number(config, "image_size", "img_size", default=64)
    return uniform(generator, ROWS, 2, _channels(config), side, side)


def _ones_of_several(generator: torch.Generator, config: Any) -> Tensor:
    return torch.ones(ROWS, TOKENS, 2)


def _tokens_after_image(generator: torch.Generator, config: Any) -> Tensor:
    """As many tokens that stand for the image as the model puts in their place, then text."""
    image = number(config, "image_token_index", "video_token_index", "image_token_id", default=7)
    places = torch.full((ROWS, number(config, "num_query_tokens", "image_seq_length", default=TOKENS)), image)
    return torch.cat([places, torch.randint(10, 90, (ROWS, TOKENS), generator=generator)], dim=1)


def _prompted(generator: torch.Generator, config: Any) -> Tensor:
    """An image in the upper half of the size that a model takes, its prompt in the lower one."""
    size = config.image_size
    height, width = (size[0] // 2, size[1]) if isinstance(size, (list, tuple)) else (size // 2, size)
    return uniform(generator, ROWS, _channels(config), height, width)


def _mels(config: Any) -> int:
    names = ("num_mel_bins", "input_feat_per_channel", "n_mels", "input_dim", "input_size", "feature_size")
    return number(config, *names, default=80)


def _frames_first(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, FRAMES, _mels(config))


def _frames_last(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, _mels(config), 2 * number(config, "max_source_positions", default=FRAMES // 2))


def _wide_frames(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, FRAMES, number(config, "input_size", "input_dim", "input_feat_size", default=128))


def _ones_of_frames(generator: torch.Generator, config: Any) -> Tensor:
    return torch.ones(ROWS, FRAMES, dtype=torch.long)


def _ones_of_long_frames(generator: torch.Generator, config: Any) -> Tensor:
    return torch.ones(ROWS, 2 * number(config, "max_source_positions", default=FRAMES // 2), dtype=torch.long)


def _nothing_of_frames(generator: torch.Generator, config: Any) -> Tensor:
    return torch.zeros(ROWS, FRAMES, dtype=torch.bool)


def _zeros_of_tokens(generator: torch.Generator, config: Any) -> Tensor:
    return torch.zeros(ROWS, TOKENS, dtype=torch.long)


def _few_tokens(generator: torch.Generator, config: Any) -> Tensor:
    return torch.randint(10, 90, (ROWS, TOKENS), generator=generator)


def _codes_of_channels(generator: torch.Generator, config: Any) -> Tensor:
    books = number(config, "num_codebooks", "num_quantizers", "num_channels", default=4)
    return torch.randint(1, 8, (ROWS, TOKENS, books), generator=generator)


def _codes_in_rows(generator: torch.Generator, config: Any) -> Tensor:
    books = number(config, "num_codebooks", "num_quantizers", default=4)
    return torch.randint(1, 8, (ROWS * books, TOKENS), generator=generator)


def _wave_in_blocks(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, 96 * 40)


def _wave_of_one_channel(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, number(config, "audio_channels", default=1), 3200)


def _regions(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, 4, number(config, "visual_feat_dim", default=32))


def _corners(generator: torch.Generator, config: Any) -> Tensor:
    return torch.rand(ROWS, 4, number(config, "visual_pos_dim", default=4), generator=generator)


def _boxes_of_tokens(generator: torch.Generator, config: Any) -> Tensor:
    return torch.rand(ROWS, TOKENS, 8, generator=generator)


def _hidden(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, TOKENS, number(config, "hidden_size", "d_model", default=32))


def _hidden_of_encoder(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, TOKENS, number(config, "encoder_hidden_size", "hidden_size", default=32))


def _channels_of_latents(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, number(config, "hidden_size", "latent_dim", "codebook_dim", default=32), TOKENS)


def _states(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, TOKENS, number(config, "state_dim", default=17))


def _actions(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, TOKENS, number(config, "act_dim", default=4))


def _rewards(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, TOKENS, 1)


def _moments(generator: torch.Generator, config: Any) -> Tensor:
    return torch.arange(TOKENS).expand(ROWS, -1).contiguous()


_ALWAYS: dict[str, tuple[Fill, ...]] = {
    "grid_thw": (_grid,),
    "image_grid_thw": (_grid,),
    "spatial_shapes": (_shapes,),
    "target_sizes": (_shapes,),
    "pixel_position_ids": (_places,),
    "image_position_ids": (_places,),
    "pixel_attention_mask": (_ones_of_patches,),
    "input_features_mask": (_ones_of_frames, _ones_of_long_frames),
    "audio_mel": (_wide_frames,),
    "image_attention_mask": (_ones_of_several,),
    "qformer_input_ids": (_few_tokens,),
    "audio_mel_mask": (_nothing_of_frames,),
    "mm_token_type_ids": (_zeros_of_tokens,),
    "visual_feats": (_regions,),
    "visual_pos": (_corners,),
    "prompt_pixel_values": (_prompted,),
    "prompt_masks": (_prompted,),
    "query_embeds": (_hidden,),
    "encoder_hidden_states": (_hidden_of_encoder,),
    "noise_embeds": (_hidden,),
    "context_hidden_states": (_hidden,),
    "latents": (_hidden, _channels_of_latents),
    "states": (_states,),
    "actions": (_actions,),
    "rewards": (_rewards,),
    "returns_to_go": (_rewards,),
    "timesteps": (_moments,),
}
#: Tables of values by argument: what the first table has no way of feeding, the next one may.
PROCESSED: tuple[dict[str, tuple[Fill, ...]], ...] = (
    {
        **_ALWAYS,
        "pixel_values": (_row_of_patches, _row_of_pictures, _patches, _strip, _row_of_pairs, _prompted, _images, _several),
        "hidden_states": (_row_of_patches, _hidden),
        "bbox": (_boxes_of_tokens,),
        "input_features": (_frames_first, _frames_last, _wide_frames),
        "input_ids": (_tokens_after_image,),
        "input_values": (_wave_of_one_channel, _wave_in_blocks),
        "decoder_input_ids": (_codes_of_channels, _codes_in_rows),
    },
    {**_ALWAYS, "pixel_values": (_several, _images)},
    {**_ALWAYS, "input_features": (_frames_last,), "input_features_mask": (_ones_of_long_frames,)},
)
#: What forwards may leave out by their signatures and yet need, in the order in which they are added.
COMPANIONS = (
    "image_attention_mask", "qformer_input_ids", "visual_feats", "visual_pos", "bbox", "decoder_input_ids",
    "input_features_mask", "image_grid_thw", "mm_token_type_ids", "input_features", "pixel_values",
    "actions", "rewards", "returns_to_go", "timesteps",
    "pixel_attention_mask", "spatial_shapes", "target_sizes", "encoder_hidden_states",
)  # fmt: skip
