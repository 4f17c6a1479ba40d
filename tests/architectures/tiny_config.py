"""Configurations of transformers made small: widths divided by one number, few layers, few tokens.

``of_transformers.py`` asks for one after another until a model can be built and trained.  It knows what kinds of names
configurations give to widths, depths, counts and tokens, and never which class builds a model from one.

Note: [One number]
Widths stand in relations that only the model knows (heads times head size, an adapter's input, a projection's output).
Dividing all of them by one number keeps the relations; heads stay as many as they are.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import re
from dataclasses import dataclass
from typing import Any

VOCABULARY = 160
#: Tokens of a meaning are above those that inputs are drawn from.
FIRST_MEANING = 100
POSITIONS = 256
EXPERTS = 8
#: Inner widths above are divided even where that leaves a remainder.
_ODD = 1024

_WIDTH = re.compile(
    r"(hidden|size|dim|width|channel|d_model|d_ff|d_kv|d_inner|n_embd|n_inner|rank|embd|embed|lora|ffn|feature|planes|filters"
    r"|^d_|head_v|intermediate|inner|stem|neck)"
)
_NOT_WIDTH = re.compile(
    r"(image|patch|window|vocab|kernel|batch|chunk|buffer|codebook_size|max_|^num_|token|_id$|index|^n_|group|position|layer_norm"
    r"|input_size|spatial|stride|mel_bins|downsample|context|sample|block_size|segment|bucket|cache|pool_size|grid|local|merge|num_channels"
    r"|type_vocab|temporal|num_head|hop|fft|crop|horizon|length|time|scale_|rate|mult|levels|layers|hidden_states|rope|masked_unit|feat_size|pos_emb)"
)
_WIDTH_ANYWAY = re.compile(
    r"(n_embd|n_inner|num_filters|mamba_d_ssm|max_pool_dim|qk_rope_head_dim|mm_tokens_per|d_head|upsample_groups|scaled_images_feature|intermediate_feature)"
)
_DEPTH = re.compile(
    r"(num_.*layers$|^num_layers|n_layers?$|^depth$|_depth$|num_blocks|^encoder_layers$|^decoder_layers$|_layers$|num_layer|layers_num)"
)
_NOT_DEPTH = re.compile(r"(residual|skip|dense|feat_extract|mlp|conv|adapter|insert|fc_|share|hash|nextn|iou|kv_shared)")
_DEPTHS = re.compile(r"(depth|num_blocks|numb_of_layers|layers$|num_modules|layer_repeats)")
_EXPERTS = re.compile(r"(num_(local_)?experts|n_routed_experts|moe_num_experts|num_routed_experts|ffn_num_experts)$")
#: Types whose heads rotate by time, height and width even where their configuration does not say by how much of each.
_THREE_AXES = re.compile(r"(qwen2_vl|qwen2_5_vl|qwen2_5_omni|glm4v|glm46v|glm_ocr|glm_image|ernie4_5_vl|hunyuan_vl)")
_HEADS = re.compile(r"(num_(attention_|key_value_|query_)?heads$|attention_heads$|^n_heads?$|_num_heads$)")
_QUERIES = re.compile(r"^(num_queries|num_query_tokens|two_stage_num_proposals|num_top_queries)$")
_PLACES = ("out_indices", "_out_indices", "out_features", "_out_features", "stage_names")
_TOKEN = re.compile(r"(token_id|token_index|_token|_id|_idx|_index)$")


#: What a configuration leaves open that a model needs, by model type.
_SERIES = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3], "feature_size": 6}
_CHANNELS = {
    "in_channels": [32, 16, 24, 40, 80, 112, 192], "out_channels": [16, 24, 40, 80, 112, 192, 320],
    "width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128,
}  # fmt: skip
_NEEDED: dict[str, dict[str, Any]] = {
    "time_series_transformer": _SERIES,
    "informer": _SERIES,
    "autoformer": _SERIES,
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl_text": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 48},
    "blip-2": {"image_token_index": 7},
    "instructblip": {"image_token_index": 7},
    "instructblipvideo": {"video_token_index": 7},
    "chameleon": {"vocabulary_map": {"<image>": 8}},
    "emu3": {"vocabulary_map": {"<image>": 8, "<|extra_200|>": 9}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "diffusion_gemma_text": {"num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 256},
    "step3p5": {"sliding_window": 8},
    "superpoint": {"max_keypoints": 16},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 16},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2},
    "hiera": {"decoder_hidden_size": 512, "decoder_depth": 2, "decoder_num_heads": 4},
}
#: What stays out of proportion: set after all else is small.
_FIXED: dict[str, dict[str, Any]] = {
    "efficientnet": _CHANNELS,
    "align_vision_model": _CHANNELS,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "cvt": {"depth": [1, 2, 3]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4},
    "gemma3n_text": {"intermediate_size": [64, 64], "num_kv_shared_layers": 0},
    "gemma4_audio": {"subsampling_conv_channels": [128, 2]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "layer_types": ["full_attention", "full_attention"],
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
}


@dataclass(frozen=True, slots=True)
class Size:
    """How small: what widths are divided by, and the side that images get (None: the configuration's own).

    Attributes:
        heads: as many heads as that, with all stages of backbones and few queries; None keeps heads, and cuts stages.
        remade: the configuration is made anew from the smaller values, so that it derives others from them itself.
    """

    divisor: int
    image: int | None
    heads: int | None = None
    remade: bool = False

    def __str__(self) -> str:
        words = [
            f"widths/{self.divisor}",
            f"{self.image} pixels" if self.image else "",
            f"{self.heads} heads" if self.heads else "",
            "made anew" if self.remade else "",
        ]
        return ", ".join(filter(None, words))


SIZES = (
    Size(16, 64), Size(8, 64), Size(32, 64), Size(16, 64, heads=4), Size(8, 64, heads=4), Size(16, None),
    Size(16, None, heads=4), Size(16, 64, remade=True), Size(16, 64, heads=4, remade=True), Size(16, None, remade=True),
    Size(4, 64), Size(4, None), Size(1, 64), Size(1, None),
)  # fmt: skip


def small(config: Any, size: Size) -> Any:
    """``config`` and all configurations inside it made small, in place or in another that takes its place."""
    _without_timm(config)
    _shrink(config, size, _Tokens())
    return _remade(config) if size.remade else config


def _without_timm(config: Any) -> None:
    """A backbone of the library timm becomes a ResNet with as many outputs."""
    backbone = getattr(config, "backbone_config", None)
    if getattr(backbone, "model_type", "") != "timm_backbone" or importlib.util.find_spec("timm") is not None:
        return
    stages = [f"stage{stage}" for stage in range(1, 5)][-len(backbone.out_indices or (4,)) :]
    resnet = importlib.import_module("transformers").ResNetConfig
    other = resnet(
        embedding_size=64, hidden_sizes=[64, 96, 128, 160], depths=[1, 1, 1, 1], layer_type="basic", out_features=stages
    )
    _set(config, "backbone_config", other)


def _remade(config: Any) -> Any:
    """The configuration that its class makes from the values that it was changed to."""
    fresh, taken = type(config)(), inspect.signature(type(config).__init__).parameters
    changed = {name: _remade(value) if _is_config(value) else value for name, value in vars(config).items() if name in taken}
    changed = {name: value for name, value in changed.items() if value != getattr(fresh, name, None)}
    return type(config)(**changed)


class _Tokens:
    """Small numbers for tokens that have a meaning, each its own."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, number: int) -> int:
        return self._known.setdefault(number, FIRST_MEANING + len(self._known) % (VOCABULARY - FIRST_MEANING))


def _is_config(value: Any) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


def _shrink(config: Any, size: Size, tokens: _Tokens) -> None:
    for name, value in _NEEDED.get(getattr(config, "model_type", ""), {}).items():
        _set(config, name, value)
    facts = dict(vars(config))
    # A backbone's outputs are named by their places among all its layers.
    several = len(facts.get("_out_indices") or ()) > (0 if size.heads else 1)
    depths = [facts.get(name) for name in ("num_hidden_layers", "n_layer", "num_layers")]
    layers = 0 if several and size.heads else next((depth for depth in depths if isinstance(depth, int)), 0)
    kept = _kept_layers(facts, layers)
    for name, value in facts.items():
        if _is_config(value):
            _shrink(value, size, tokens)
        elif isinstance(value, dict):
            for inner in value.values():
                if _is_config(inner):
                    _shrink(inner, size, tokens)
            three = "mrope_section" in value or (name == "rope_parameters" and _THREE_AXES.search(config.model_type))
            if three and "num_attention_heads" in facts:
                value["mrope_section"] = _sections(facts, value, size)
        elif several and (name in _PLACES or _DEPTH.search(name)):
            continue
        else:
            smaller = _smaller(name, value, size, tokens, layers, kept)
            if smaller != value:
                _set(config, name, smaller)
    for name, value in (("use_cache", False), ("dtype", None)):
        if name in facts:
            _set(config, name, value)
    if size.heads:
        _few_heads(config, facts, size.heads)
    for name, value in _FIXED.get(getattr(config, "model_type", ""), {}).items():
        _set(config, name, copy.deepcopy(value))


def _few_heads(config: Any, facts: dict[str, Any], most: int) -> None:
    for name, value in facts.items():
        if type(value) is int and _HEADS.search(name) and value > most:
            _set(config, name, most)
        elif type(value) is int and _QUERIES.search(name):
            _set(config, name, min(value, 8))
        elif name == "num_kv_shared_layers":
            _set(config, name, 0)
        elif isinstance(value, (list, tuple)) and value and _HEADS.search(name) and all(type(one) is int for one in value):
            _set(config, name, type(value)(min(one, most) for one in value))


def _sections(facts: dict[str, Any], rope: dict[str, Any], size: Size) -> list[int]:
    """The halves of a head that rotate by time, height and width: as many as the smaller head has."""
    heads = min(facts["num_attention_heads"], size.heads or facts["num_attention_heads"])
    head = facts.get("head_dim") or facts["hidden_size"] // heads
    head = _width("head_dim", head, size.divisor)
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    # Height and width are as many: where those are the first two, time is the last.
    known = rope.get("mrope_section") or [0, 1]
    return sections[::-1] if known[0] == known[1] else sections


def _set(config: Any, name: str, value: Any) -> None:
    # A strict configuration checks each attribute against the others, which are not small yet.
    object.__setattr__(config, name, value)


def _kept_layers(facts: dict[str, Any], layers: int) -> list[int]:
    """The two layers that stay: the first, and the first of another kind."""
    for name in ("layer_types", "layers_block_type", "block_types", "mlp_layer_types"):
        kinds = facts.get(name)
        if isinstance(kinds, (list, tuple)) and len(kinds) == layers and layers:
            other = next((place for place, kind in enumerate(kinds) if kind != kinds[0]), 1)
            return [0, min(other, layers - 1)]
    return [0, 1]


def _smaller(name: str, value: Any, size: Size, tokens: _Tokens, layers: int, kept: list[int]) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return _smaller_number(name, value, size, tokens)
    if isinstance(value, (list, tuple)) and value:
        return type(value)(_smaller_list(name, list(value), size, tokens, layers, kept))
    return value


def _smaller_number(name: str, value: int, size: Size, tokens: _Tokens) -> int:
    if re.search(r"(vocab_size|group_vocab)", name) and "type_vocab" not in name:
        return min(value, VOCABULARY)
    if name == "num_groups":
        return min(value, 2)
    if name == "context_length":
        return min(value, 2 * POSITIONS)
    if _TOKEN.search(name):
        return tokens.of(value) if value >= FIRST_MEANING else value
    if _EXPERTS.search(name):
        return min(value, EXPERTS)
    if name in ("n_group", "topk_group", "num_expert_group", "zero_expert_num"):
        return 1
    if re.search(r"(experts_per_tok|num_selected_experts|moe_topk|moe_k|top_k_experts)", name):
        return min(value, 2)
    if re.search(r"max_position_embeddings$|^n_positions$|max_source_positions|max_target_positions|^n_ctx$", name):
        return min(value, POSITIONS)
    if _DEPTH.search(name) and not _NOT_DEPTH.search(name):
        return min(value, 2)
    if name in ("image_size", "img_size", "input_size") and size.image is not None and value > size.image:
        return size.image
    return _width(name, value, size.divisor)


def _width(name: str, value: int, divisor: int) -> int:
    wide = (_WIDTH.search(name) and not _NOT_WIDTH.search(name)) or _WIDTH_ANYWAY.search(name)
    if wide and "intermediate" in name and value > _ODD:
        # Nothing else has that width, so any number will do.
        return value // divisor // 8 * 8
    if name == "base_channels":
        # Norms in groups of 32.
        return max(value // divisor, 32)
    if not wide or value < 2 * divisor or value % divisor:
        return value
    return value // divisor


def _smaller_list(name: str, value: list[Any], size: Size, tokens: _Tokens, layers: int, kept: list[int]) -> list[Any]:
    if layers > 2 and len(value) == layers:
        return [value[place] for place in kept]
    if not all(type(one) is int for one in value):
        return value
    if _DEPTHS.search(name):
        return [min(one, 2) for one in value]
    if name == "image_size" and size.image is not None:
        return [size.image for _ in value]
    if name in ("out_indices", "_out_indices") or "indexes" in name or "deepstack" in name:
        return sorted({min(one, 1) for one in value}) if max(value) > 4 else value
    if _TOKEN.search(name):
        return [tokens.of(one) if one >= FIRST_MEANING else one for one in value]
    divisor = size.divisor
    if value[0] == 3 and len(value) > 1 and "channels" in name:
        # The first are the image's.
        return [3, *(_width(name, one, divisor) for one in value[1:])]
    while divisor > 1 and any(one % divisor or one < 2 * divisor for one in value):
        divisor //= 2
    return [_width(name, one, divisor) for one in value]
