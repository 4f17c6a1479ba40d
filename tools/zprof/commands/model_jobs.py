"""Owns jobs of models that are known by a size or a configuration alone: causal language models of transformers, no weights.

``zprof plan`` makes one for ``--params`` and ``--config``. Nothing is downloaded, and a configuration's own code is never run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zprof.commands.jobs import Job
from zprof.problem import CapabilityProblem, Misuse

__all__ = ["job_of_config", "job_of_size"]

#: Of Llama 2.
_VOCABULARY, _HEAD = 32_000, 128
#: Hidden sizes in heads, and hidden elements for each layer, as in models of this shape; 128 of them are usual.
_MOST_HEADS, _ASPECTS = 256, (64, 192)
#: Sizes that differ by less from what was asked for are as good as each other.
_NEAR = 0.02


def job_of_config(folder: Path, batch: int, sequence: int) -> Job:
    """A training step of the model that a Hugging Face config folder (or its ``config.json``) describes.

    Raises:
        Misuse: there is no configuration of a causal language model.
        CapabilityProblem: transformers is missing.
    """
    transformers = _transformers("--config")
    place = folder.parent if folder.name == "config.json" else folder
    if not (place / "config.json").is_file():
        raise Misuse(f"--config {folder}: expected a folder with a config.json, found none")
    try:
        config = transformers.AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise Misuse(f"--config {folder}: {' '.join(str(error).split())[:300]}") from None
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Misuse(f"--config {folder}: expected a causal language model of transformers, found {type(config).__name__}")
    return _job(str(folder), transformers, config, batch, sequence)


def job_of_size(numel: int, batch: int, sequence: int) -> Job:
    """A training step of a Llama-shaped model of about so many parameters; its name says which.

    Raises:
        CapabilityProblem: transformers is missing.
    """
    transformers = _transformers("--params")
    hidden, layers = _shape(numel)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=_inner(hidden),
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // _HEAD),
        max_position_embeddings=max(2048, sequence),
    )
    found = _numel(hidden, layers)
    name = f"a Llama of {found / 1e9:.2f}B parameters ({layers} layers, hidden {hidden}, vocabulary {_VOCABULARY:,})"
    return _job(name, transformers, config, batch, sequence)


def _transformers(option: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise CapabilityProblem(f"{option}: expected transformers, found none; pip install transformers") from None
    return transformers


def _inner(hidden: int) -> int:
    """Of the feed-forward layers: 8/3 of the hidden size, in whole heads."""
    return -(-8 * hidden // (3 * _HEAD)) * _HEAD


def _numel(hidden: int, layers: int) -> int:
    layer = 4 * hidden * hidden + 3 * hidden * _inner(hidden) + 2 * hidden
    return 2 * _VOCABULARY * hidden + layers * layer + hidden


def _shape(numel: int) -> tuple[int, int]:
    """Hidden size and layers of a model of about that size, in the usual proportions."""
    hiddens = [_HEAD * heads for heads in range(1, _MOST_HEADS + 1)]
    shapes = [(h, layers) for h in hiddens for layers in range(max(1, h // _ASPECTS[1]), h // _ASPECTS[0] + 1)]
    off = {shape: abs(_numel(*shape) - numel) / numel for shape in shapes}
    bound = max(_NEAR, min(off.values()))
    near = [shape for shape in shapes if off[shape] <= bound]
    return min(near, key=lambda shape: abs(shape[0] / shape[1] - _HEAD))


def _job(name: str, transformers: Any, config: Any, batch: int, sequence: int) -> Job:
    import torch

    def build() -> Any:
        model = transformers.AutoModelForCausalLM.from_config(config)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(model: Any, optimizer: Any, *, micro_batch: int = batch, accumulation: int = 1) -> None:
        for _ in range(accumulation):
            tokens = torch.empty(micro_batch, sequence, dtype=torch.int64, device="virtual")
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Job(name, build, step)
