"""Subjects of transformers: for every model type a small model that trains in plain PyTorch, found by trying.

``train.py`` asks for one by its type, on every rank, and gets the same everywhere.  What cannot be made small, built or
trained is ``Skipped`` with the last attempt's reason; no type is left out silently.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import time
import warnings
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from tests.architectures.bounds import SEARCH_S, bounded
from tests.architectures.inputs import ways
from tests.architectures.subject import MOST_PARAMETERS, SEED, Skipped, Subject, score, seeded
from tests.architectures.tiny_config import SIZES, Size, small

#: Which of a type's classes is taken, the likeliest to be trained by anybody first.
_TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "PRETRAINING",
    "CTC", "IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION",
    "VIDEO_CLASSIFICATION", "DEPTH_ESTIMATION", "AUDIO_CLASSIFICATION", "TIME_SERIES_PREDICTION", "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
)  # fmt: skip
_ATTEMPTS = 60


def types() -> list[str]:
    """All model types that have a class of a model of their own."""
    return sorted(name for name in _configurations() if _classes(name))


def without_a_model() -> list[str]:
    """Types of configurations that no class of a model is made from: parts of others."""
    return sorted(name for name in _configurations() if not _classes(name))


def subject(name: str) -> Subject:
    """The subject of one model type.

    Raises:
        Skipped: no size and no way of feeding it worked.
    """
    attempts: list[str] = []
    end = time.process_time() + SEARCH_S
    for size in SIZES:
        for built in _classes(name):
            for found in _of_class(name, built, size, attempts):
                return found
            if len(attempts) > _ATTEMPTS:
                break
        if time.process_time() > end:
            attempts.append(f"none found in {SEARCH_S:.0f} s")
            break
    raise Skipped("; ".join([attempts[0], attempts[-1]]) if attempts else "nothing to try")


def _of_class(name: str, built: str, size: Size, attempts: list[str]) -> Iterator[Subject]:
    try:
        config = small(_config(name), size)
        cls = _load(built)
        with torch.device("meta"):
            numel = sum(param.numel() for param in cls(copy.deepcopy(config)).parameters())
        if numel > MOST_PARAMETERS:
            raise Skipped(f"{numel:,} parameters at {size}")
        make = partial(_make, cls, config)
        with seeded(SEED), bounded():
            model = make().float().train()
    except Exception as error:
        attempts.append(_words(built, size, error))
        return
    for way, draw in ways(config, inspect.signature(type(model).forward), str(model.main_input_name)):
        chosen = Subject(f"transformers/{name}", f"{built} ({size}; {way})", make, draw, searched=True)
        try:
            with bounded():
                _check(chosen, model)
        except Exception as error:
            attempts.append(_words(f"{built} fed {way}", size, error))
            continue
        yield chosen
        return


def _make(cls: type[nn.Module], config: Any) -> nn.Module:
    return cls(copy.deepcopy(config))


def _check(chosen: Subject, model: nn.Module) -> None:
    """It runs, its score is finite and some parameter gets a gradient."""
    model.zero_grad()
    with seeded(SEED):
        loss = score(model(**chosen.draw(torch.Generator().manual_seed(0))))
    if not torch.isfinite(loss):
        raise Skipped(f"its score is {float(loss)}")
    loss.backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    if not grads or not all(bool(torch.isfinite(grad).all()) for grad in grads):
        raise Skipped("its gradients are not finite" if grads else "no parameter gets a gradient")


def _words(what: str, size: Size, error: Exception) -> str:
    return f"{what} ({size}): {type(error).__name__}: {str(error).strip()[:200]}"


def _config(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[name]()


@cache
def _configurations() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return list(CONFIG_MAPPING_NAMES)


@cache
def _classes(name: str) -> list[str]:
    """Names of the classes that transformers' tables have for a type, the one to take first; none twice."""
    from transformers.models.auto import modeling_auto

    tables = {table: getattr(modeling_auto, table) for table in dir(modeling_auto) if table.endswith("_MAPPING_NAMES")}
    first = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _TASKS]
    last = ["MODEL_MAPPING_NAMES"]
    rest = sorted(set(tables) - {*first, *last})
    found: list[str] = []
    for table in (*first, *last, *rest):
        of_type = tables.get(table, {}).get(name, ())
        for cls in (of_type,) if isinstance(of_type, str) else of_type:
            if cls not in found and not cls.endswith("Config"):
                found.append(cls)
    return found


def _load(built: str) -> type[nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls: type[nn.Module] = getattr(importlib.import_module("transformers"), built)
    return cls
