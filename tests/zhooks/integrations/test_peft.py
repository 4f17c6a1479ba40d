"""Adapters of PEFT on an attached model: what they train, what is held of a frozen base, what is saved, what is refused.

pytest runs it, on one rank and on two. The oracle is the same model without zhooks, on the batches of all ranks.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.int8 import Int8
from tests.support.launched import launched
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.slow import slow
from tests.support.values import copies

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
# transformers asks PEFT's model for a name that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

KINDS = ("lora", "dora", "ia3", "prompt", "prefix", "saved")
POLICY = {"stage": 3, "units": {"min_numel": 0}}


def adapters(kind: str) -> Any:
    usual: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    low_rank = {"r": 2, "target_modules": ["q_proj", "v_proj"], **usual}
    match kind:
        case "lora":
            return peft.LoraConfig(**low_rank)
        case "dora":
            return peft.LoraConfig(use_dora=True, **low_rank)
        case "saved":
            return peft.LoraConfig(modules_to_save=["lm_head"], **low_rank)
        case "ia3":
            return peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **usual)
        case "prompt":
            return peft.PromptTuningConfig(num_virtual_tokens=3, **usual)
        case _:
            return peft.PrefixTuningConfig(num_virtual_tokens=3, **usual)


def base() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adapted(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    warnings.simplefilter("ignore")
    model = base().to(dtype)
    torch.manual_seed(1)
    return peft.get_peft_model(model, adapters(kind))


def tokens(seed: int) -> Tensor:
    return torch.randint(2, 32, (4, 8), generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """The parameters after three steps of what is trainable."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.05)
    for step in range(3):
        mine = tokens(step).chunk(world)[rank]
        model(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(zip(dict(model.named_parameters()), copies(model.parameters()), strict=True))


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5, msg=partial("{}: {}".format, name))


@on_ranks(*slow(1), 2, limit_s=180.0, kind=(*KINDS[::2], *slow(*KINDS[1::2])))
def test_adapters_train_generate_and_are_saved_alone_as_without_zhooks(kind: str) -> None:
    rank, world = place()
    model, plain = adapted(kind), adapted(kind)
    zhooks.attach(model, policy=POLICY)
    expected = trained(plain)
    close(trained(model, rank, world), expected)
    asked = {"input_ids": tokens(9)[:1], "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.eval().generate(**asked), plain.eval().generate(**asked))
    if kind not in ("prompt", "prefix"):
        with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
            assert torch.equal(model(input_ids=tokens(9)).logits, plain(input_ids=tokens(9)).logits)
    # As docs/how-to/integrations.md says: nothing of the base is gathered.
    state = {name: param.full_tensor() for name, param in model.named_parameters() if param.requires_grad}
    with folder() as path:
        model.save_pretrained(path / "adapter", state_dict=state, is_main_process=rank == 0)
        if rank == 0:
            files = {file.name for file in (path / "adapter").iterdir()}
            assert "adapter_model.safetensors" in files and "model.safetensors" not in files
            loaded = peft.PeftModel.from_pretrained(base(), path / "adapter")
            close(dict(loaded.named_parameters()), expected)


@on_ranks(1, 2, precision=(None, "bf16"))
def test_a_frozen_base_in_16_bits_takes_two_bytes_a_parameter_over_all_ranks(precision: str | None) -> None:
    rank, world = place()
    model = adapted("lora", torch.bfloat16)
    frozen = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert frozen == 2 * sum(param.numel() for param in model.parameters() if not param.requires_grad)
    attachment = zhooks.attach(model, policy={"stage": 3, "precision": {"param": precision}} if precision else {"stage": 3})
    trained(model, rank, world)
    # Adapters have a gradient, a copy, masters and AdamW's two states of at most 4 bytes; padding is a few elements a flat.
    assert attachment.memory().nbytes <= (frozen + 5 * 4 * trainable) / world + 1024


@on_ranks(1, 2)
def test_several_adapters_take_turns() -> None:
    rank, world = place()
    models = adapted("lora"), adapted("lora")
    for model in models:
        torch.manual_seed(2)
        model.add_adapter("other", adapters("lora"))
    attached, plain = models
    zhooks.attach(attached, policy=POLICY)
    for name in ("other", "default"):
        attached.set_adapter(name)
        plain.set_adapter(name)
        close(trained(attached, rank, world), trained(plain))


@on_ranks(1, 2)
def test_an_adapter_that_is_added_later_is_refused_by_its_name() -> None:
    model = adapted("lora")
    attachment = zhooks.attach(model, policy=POLICY)
    model.add_adapter("late", adapters("lora"))
    model.set_adapter("late")
    with pytest.raises(zhooks.AttachError, match=r"lora_A\.late\.weight and \d+ more is not attached. Expected"):
        model(input_ids=tokens(0))
    attachment.detach()
    zhooks.attach(model, policy=POLICY)
    assert model(input_ids=tokens(0)).logits.isfinite().all()


@on_ranks(1, 2, kind=("dora", *slow("lora", "ia3")))
def test_a_detached_model_is_merged_as_without_zhooks(kind: str) -> None:
    rank, world = place()
    model, plain = adapted(kind), adapted(kind)
    attachment = zhooks.attach(model, policy=POLICY)
    trained(model, rank, world)
    trained(plain)
    whole: Any = attachment.detach()
    merged, other = whole.merge_and_unload(), plain.merge_and_unload()
    assert isinstance(merged, transformers.LlamaForCausalLM)
    close(dict(merged.named_parameters()), dict(other.named_parameters()))


def quantised_base() -> Any:
    model = base().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            scale = weight.abs().amax(1, keepdim=True) / 127
            module.weight = nn.Parameter(Int8((weight / scale).round().to(torch.int8), scale), requires_grad=False)
    return model


@on_ranks(1, 2, limit_s=180.0)
def test_the_trainer_saves_adapters_over_a_quantised_base_alone_and_no_quantised_model() -> None:
    from zhooks.integrations.transformers import Trainer, TrainingArguments

    with launched() as (rank, _), folder() as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(quantised_base(), adapters("lora"))
        arguments = TrainingArguments(
            output_dir=str(path), use_cpu=True, max_steps=2, learning_rate=0.1, report_to=[], disable_tqdm=True,
            save_strategy="no",
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in tokens(0)]
        trainer = Trainer(model, arguments, train_dataset=data, zhooks=POLICY)
        trainer.train()
        assert trainer.attachment is not None and len(trainer.attachment.left_out) == 15
        trainer.save_model(str(path / "adapter"))
        trainer.attachment.save_pretrained(path / "exported")
        trainer.accelerator.wait_for_everyone()
        state = dict(zip(dict(model.named_parameters()), copies(model.parameters()), strict=True))
        if rank == 0:
            names = {file.name for file in (path / "adapter").iterdir()}
            assert "adapter_model.safetensors" in names and "model.safetensors" not in names
            for written in ("adapter", "exported"):
                loaded = peft.PeftModel.from_pretrained(quantised_base(), path / written)
                low_rank = {name: param for name, param in loaded.named_parameters() if "lora_" in name}
                assert len(low_rank) == 8 and all(torch.equal(param, state[name]) for name, param in low_rank.items())
                assert any(param.any() for name, param in low_rank.items() if "lora_B" in name)
        with pytest.raises(zhooks.CheckpointError, match=r"found 15 frozen .*, such as base_model.*q_proj.base_layer.weight"):
            trainer.accelerator.get_state_dict(trainer.model)
