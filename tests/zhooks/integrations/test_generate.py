"""``generate`` of transformers on attached models: the same tokens as the plain model's, however they are chosen.

pytest runs it, on one rank and on two. The oracle is the plain model's own ``generate``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zhooks
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.slow import slow

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.0")

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 8},
    "beams": {"num_beams": 2},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
}
SIZE = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16, "intermediate_size": 16}


def language_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=32, bos_token_id=1, eos_token_id=2, pad_token_id=0, **SIZE)
    return transformers.LlamaForCausalLM(config).eval()


def prompt(seed: int) -> torch.Tensor:
    return torch.randint(3, 32, (2, 4), generator=torch.Generator().manual_seed(seed))


def generated(model: Any, seed: int, tokens: int, way: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(seed)
    given, chosen = prompt(seed), {"do_sample": False, **way}
    made: torch.Tensor = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, **chosen)
    return made


POLICIES: tuple[Any, ...] = (
    *slow({"stage": 0}, {"stage": 2}),
    {"stage": 3},
    *slow({"stage": 3, "parameter": {"tier": "host"}}),
    {"stage": 3, "parameter": {"tier": "disk"}, "budget": {"device": "1 MiB"}},
)


@on_ranks(1, 2, limit_s=180.0, policy=POLICIES)
def test_every_way_of_generating_makes_the_plain_models_tokens(policy: dict[str, Any]) -> None:
    model, plain = language_model(), language_model()
    with folder() as path:
        attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, "disk": {"path": str(path)}, **policy})
        for way in WAYS.values():
            expected = generated(plain, 1, 5, way)
            assert torch.equal(generated(model, 1, 5, way), expected)
            with attachment.resident():
                assert torch.equal(generated(model, 1, 5, way), expected)
        attachment.detach()


@on_ranks(2, limit_s=180.0, resident=(True, False))
def test_ranks_generate_texts_of_other_lengths(resident: bool) -> None:
    model, plain, rank = language_model(), language_model(), place()[0]
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}})
    for name, way in WAYS.items():
        tokens = 3 + 4 * rank
        expected = generated(plain, rank, tokens, way)
        if resident:
            with attachment.resident():
                assert torch.equal(generated(model, rank, tokens, way), expected), name
        elif name != "static cache":  # which transformers itself cannot do then
            assert torch.equal(generated(model, rank, tokens, {**way, "synced_gpus": True}), expected), name


@on_ranks(2, limit_s=180.0)
def test_assisted_generation_and_prompt_lookup_make_the_plain_models_tokens() -> None:
    model, plain, draft = language_model(), language_model(), language_model()
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}})
    given = prompt(1)[:1]
    chosen = {"attention_mask": torch.ones_like(given), "max_new_tokens": 8, "do_sample": False}
    for way in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 2}):
        expected = plain.generate(given, **chosen, **way)
        assert torch.equal(model.generate(given, **chosen, **way), expected)
        with attachment.resident():
            assert torch.equal(model.generate(given, **chosen, **way), expected)


@on_ranks(1, limit_s=180.0)
def test_a_folder_that_is_loaded_for_inference_is_planned_without_gradients_and_masters() -> None:
    from zhooks.integrations.pretrained import from_pretrained

    plain = language_model().bfloat16()
    with folder() as path:
        plain.save_pretrained(path / "model")
        share = sum(param.nbytes for param in plain.parameters())
        # Gradients, or a second copy of the parameters, would not fit.
        budget = {"device": int(1.4 * share), "disk": int(1.4 * share) + (1 << 16)}
        attachment = from_pretrained(
            transformers.LlamaForCausalLM,
            path / "model",
            policy={"units": {"min_numel": 0}, "parameter": {"tier": "disk"}, "disk": {"path": str(path)}, "budget": budget},
            dtype=torch.bfloat16,
            trainable=False,
        )
        assert torch.equal(generated(attachment.model, 1, 5, {}), generated(plain, 1, 5, {}))
        assert share <= attachment.memory().nbytes <= 1.1 * share
        attachment.detach()
