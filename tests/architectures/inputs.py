"""Batches for a model of transformers, from its configuration and the names of its forward's arguments.

``of_transformers.py`` tries one way of feeding a model after another until its forward runs.  It never looks at a model's
class, and never runs one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.architectures.facts import FRAMES, ROWS, SAMPLES, TOKENS, Fill, number, uniform
from tests.architectures.processed import COMPANIONS, PROCESSED
from tests.architectures.subject import Inputs

#: Tokens without a meaning (``tiny_config.FIRST_MEANING`` are the first that have one).
LEAST_TOKEN, MOST_TOKEN = 10, 90

Draw = Callable[[torch.Generator], Inputs]

_SIGHTS = ("pixel_values", "pixel_values_videos", "flattened_patches", "pixel_values_images")


def ways(config: Any, signature: inspect.Signature, main: str) -> Iterator[tuple[str, Draw]]:
    """Ways of feeding a model, the likeliest first: what they are called, and the batch."""
    seen: set[tuple[str, ...]] = set()
    arguments = set(signature.parameters) - {"self"}
    required = [name for name, one in signature.parameters.items() if name in arguments and _is_required(one)]
    for names, tables in [
        *((names, [_FILLS]) for names in _choices(arguments, main)),
        *((names, [_FILLS | table for table in PROCESSED]) for names in _processed(arguments, main, required)),
    ]:
        for fills in (fills for table in tables for fills in _fills(names, table)):
            called = tuple(sorted(f"{name}:{fill.__name__.strip('_')}" for name, fill in fills.items()))
            if called not in seen:
                seen.add(called)
                yield ", ".join(names), partial(_draw, config=config, fills=fills)


def _draw(generator: torch.Generator, config: Any, fills: dict[str, Fill]) -> Inputs:
    drawn: dict[str, Any] = {name: fill(generator, config) for name, fill in fills.items()}
    if "labels" in drawn:
        drawn["labels"] = drawn["input_ids"]
    if "query" in drawn:
        drawn.pop("query")
    return drawn


def _choices(arguments: set[str], main: str) -> Iterator[list[str]]:
    text: list[str] = [name for name in ("input_ids", "decoder_input_ids") if name in arguments]
    beside = ("bbox", "visual_embeds", "visual_attention_mask", "image", "pixel_mask")
    extras: list[str] = [name for name in beside if name in arguments]
    sights: list[str] = [name for name in _SIGHTS if name in arguments]
    sounds: list[str] = [name for name in ("input_values", "input_features", "audio_values") if name in arguments]
    series: list[str] = [
        name
        for name in ("past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features", "freq")
        if name in arguments
    ]
    if main in arguments and main in text:
        yield [*text, *(["labels"] if "labels" in arguments else [])]
        yield text
    if main in arguments and main not in text:
        yield [main]
        yield [main, *[name for name in text if name.startswith("decoder")]]
    if series:
        yield series[:1]
        yield series
    for others in (sights, sounds, extras, [*sights, *extras]):
        if others:
            yield others
            yield [*others[:1], *[name for name in text if name.startswith("decoder")]]
            yield [*text[:1], *others[:1]]
            yield [*text, *others]
    yield [*text, *sights, *sounds]
    if "inputs" in arguments:
        yield ["inputs"]
    known = [name for name in arguments if name in _OTHER]
    if known:
        yield known
        yield [*text[:1], *known]
        yield [*sights[:1], *known]


def _is_required(one: inspect.Parameter) -> bool:
    return one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)


def _processed(arguments: set[str], main: str, required: list[str]) -> Iterator[list[str]]:
    """Arguments that a processor makes together: those that a forward cannot do without, then more and more of the others."""
    known = [name for name in COMPANIONS if name in arguments]
    first = list(dict.fromkeys([*([main] if main in arguments else []), *required]))
    yield first
    yield required
    for more in (known[:1], known):
        yield list(dict.fromkeys([*first, *more]))
        yield list(dict.fromkeys([*first, *more, *[name for name in ("input_ids", "decoder_input_ids") if name in arguments]]))


def _fills(names: list[str], table: Mapping[str, tuple[Fill, ...]]) -> Iterator[dict[str, Fill]]:
    """Every way to give these arguments values: some arguments have several shapes."""
    several = [name for name in names if len(table.get(name, ())) > 1]
    if not all(name in table for name in names) or not names:
        return
    first = {name: table[name][0] for name in names}
    yield first
    for name in several:
        for fill in table[name][1:]:
            yield {**first, name: fill}


def _tokens(generator: torch.Generator, config: Any) -> Tensor:
    most = min(MOST_TOKEN, number(config, "vocab_size", default=MOST_TOKEN))
    return torch.randint(min(LEAST_TOKEN, most // 2), most, (ROWS, TOKENS), generator=generator)


def _codes(generator: torch.Generator, config: Any) -> Tensor:
    books = number(config, "num_codebooks", "num_quantizers", "n_codes_total", default=4)
    return torch.randint(1, 8, (ROWS, books, TOKENS), generator=generator)


def _codes_last(generator: torch.Generator, config: Any) -> Tensor:
    return _codes(generator, config).transpose(1, 2).contiguous()


def _sizes(config: Any) -> tuple[int, int]:
    for one in (config, getattr(config, "vision_config", None), getattr(config, "backbone_config", None)):
        value = getattr(one, "image_size", None)
        if isinstance(value, (list, tuple)) and len(value) >= 2:
            return int(value[-2]), int(value[-1])
    side = number(config, "image_size", "img_size", default=64)
    return side, side


def _images(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, number(config, "num_channels", "in_channels", default=3), *_sizes(config))


def _large_images(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, number(config, "num_channels", "in_channels", default=3), 128, 128)


def _videos(generator: torch.Generator, config: Any) -> Tensor:
    frames = number(config, "num_frames", "frames_per_clip", default=2)
    return uniform(generator, ROWS, frames, number(config, "num_channels", "in_channels", default=3), *_sizes(config))


def _several_images(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, 2, number(config, "num_channels", default=3), *_sizes(config))


def _flattened(generator: torch.Generator, config: Any) -> Tensor:
    side = number(config, "patch_size", default=16)
    patches = uniform(generator, ROWS, 6, side * side * number(config, "num_channels", default=3))
    places = torch.arange(1.0, 7.0).reshape(1, 6, 1).expand(ROWS, 6, 2)
    return torch.cat([places, patches], dim=-1)


def _wave(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, SAMPLES)


def _wave_of_one_channel(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, number(config, "audio_channels", default=1), SAMPLES)


def _mels(config: Any) -> int:
    return number(config, "num_mel_bins", "input_feat_per_channel", "n_mels", "input_dim", "feature_size", default=80)


def _frames_last(generator: torch.Generator, config: Any) -> Tensor:
    frames = 2 * number(config, "max_source_positions", default=FRAMES // 2)
    return uniform(generator, ROWS, _mels(config), frames)


def _frames_first(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, number(config, "max_length", "spec_size", default=FRAMES), _mels(config))


def _spectrogram(generator: torch.Generator, config: Any) -> Tensor:
    side = number(config, "spec_size", default=FRAMES)
    return uniform(generator, ROWS, 1, side, number(config, "num_mel_bins", default=side))


def _features_first(generator: torch.Generator, config: Any) -> Tensor:
    width = number(config, "feature_projection_input_dim", "hidden_size", default=_mels(config))
    return uniform(generator, ROWS, FRAMES, width)


def _short_frames_first(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, FRAMES, _mels(config))


def _boxes(generator: torch.Generator, config: Any) -> Tensor:
    corner = torch.randint(0, 40, (ROWS, TOKENS, 2), generator=generator)
    return torch.cat([corner, corner + 20], dim=-1)


def _visual(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, 4, number(config, "visual_embedding_dim", "visual_feat_dim", default=32))


def _ones_of_visual(generator: torch.Generator, config: Any) -> Tensor:
    return torch.ones(ROWS, 4)


def _past(config: Any) -> int:
    lags = getattr(config, "lags_sequence", None) or [0]
    return number(config, "context_length", "prediction_length", default=32) + max(lags)


def _past_series(generator: torch.Generator, config: Any) -> Tensor:
    channels = number(config, "num_input_channels", "input_size", default=1)
    shape = (ROWS, _past(config)) if channels == 1 else (ROWS, _past(config), channels)
    return uniform(generator, *shape)


def _past_channels(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, _past(config), number(config, "num_input_channels", "input_size", default=1))


def _past_times(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, _past(config), max(1, number(config, "num_time_features", default=1)))


def _past_ones(generator: torch.Generator, config: Any) -> Tensor:
    return torch.ones(ROWS, _past(config))


def _future_series(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, number(config, "prediction_length", default=24))


def _future_times(generator: torch.Generator, config: Any) -> Tensor:
    length = number(config, "prediction_length", default=24)
    return uniform(generator, ROWS, length, max(1, number(config, "num_time_features", default=1)))


def _list_of_series(generator: torch.Generator, config: Any) -> list[Tensor]:
    return list(uniform(generator, ROWS, number(config, "context_length", default=32)))


def _zeros(generator: torch.Generator, config: Any) -> Tensor:
    return torch.zeros(ROWS, 1, dtype=torch.long)


def _pixels_as_features(generator: torch.Generator, config: Any) -> Tensor:
    return uniform(generator, ROWS, TOKENS, number(config, "d_model", "hidden_size", default=32))


def _class_labels(generator: torch.Generator, config: Any) -> Tensor:
    return torch.randint(0, 2, (ROWS,), generator=generator)


_OTHER: dict[str, tuple[Fill, ...]] = {
    "inputs_embeds": (_pixels_as_features,),
    "hidden_states": (_pixels_as_features,),
    "spectrogram": (_short_frames_first,),
    "task_inputs": (_tokens,),
    "text_inputs": (_tokens,),
    "audio_codes": (_codes, _codes_last),
}
_FILLS: dict[str, tuple[Fill, ...]] = {
    "input_ids": (_tokens, _codes, _codes_last),
    "decoder_input_ids": (_tokens,),
    "labels": (_tokens,),
    "pixel_values": (_images, _videos, _several_images, _large_images),
    "pixel_values_videos": (_videos,),
    "pixel_values_images": (_images,),
    "pixel_mask": (_ones_of_visual,),
    "flattened_patches": (_flattened,),
    "input_values": (_wave, _wave_of_one_channel, _frames_first),
    "audio_values": (_spectrogram,),
    "input_features": (_frames_last, _frames_first, _short_frames_first, _features_first, _spectrogram),
    "bbox": (_boxes,),
    "image": (_images,),
    "visual_embeds": (_visual,),
    "visual_attention_mask": (_ones_of_visual,),
    "past_values": (_past_series, _past_channels, _list_of_series),
    "past_time_features": (_past_times,),
    "past_observed_mask": (_past_ones,),
    "future_values": (_future_series,),
    "future_time_features": (_future_times,),
    "freq": (_zeros,),
    "inputs": (_tokens,),
    **_OTHER,
}
