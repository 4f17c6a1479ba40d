"""Units found by themselves, in the models people train: which modules are gathered together, and through what.

pytest runs it; models are built on meta, nothing is downloaded and no process is started. It never attaches a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.errors import AttachError
from offload.policy import Policy
from zhooks.layout import Group, find_units

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 3}


def units(model: nn.Module, **patterns: Any) -> list[Group]:
    """The units of ``model`` under these [units] keys, after checking what must hold for any model."""
    groups = find_units(model, Policy.of({"units": {"min_numel": 1000, **patterns}}))
    placed = [id(param) for group in groups for param in group.params.values()]
    assert sorted(placed) == sorted(id(param) for param in model.parameters()), "a parameter in no unit, or in two"
    assert len({group.name for group in groups}) == len(groups)
    assert all(group.entries and group.params for group in groups)
    for group in groups:
        inside = {id(module) for entry in group.entries for module in entry.modules()}
        owned = {id(param) for param in group.params.values()}
        for name, module in model.named_modules():
            if any(id(param) in owned for param in module.parameters(recurse=False)):
                assert id(module) in inside, f"{name} uses parameters of {group.name} without entering it"
    return groups


def names(groups: list[Group]) -> list[str]:
    return [group.name for group in groups]


def blocks(groups: list[Group], holder: str) -> list[str]:
    return [group.name for group in groups if group.name.startswith(f"{holder}.")]


def meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def transformers_model(name: str, **config: Any) -> nn.Module:
    import transformers

    family = name.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    family = family.removesuffix("ForImageClassification").removesuffix("Model")
    made = getattr(transformers, f"{family}Config")(**config)
    return meta(lambda: getattr(transformers, name)(made))


# ---- transformers


def test_gpt2_has_a_unit_a_block_and_its_tied_embedding_is_entered_from_both_ends() -> None:
    model = transformers_model("GPT2LMHeadModel", n_layer=3, n_embd=64, n_head=2)
    groups = units(model)
    assert blocks(groups, "transformer.h") == [f"transformer.h.{n}" for n in range(3)]
    embedding = next(group for group in groups if "transformer.wte" in group.name)
    assert {type(entry).__name__ for entry in embedding.entries} >= {"Embedding", "Linear"}


def test_llama_has_a_unit_a_layer_and_units_for_its_two_embeddings() -> None:
    model = transformers_model("LlamaForCausalLM", **SMALL, num_key_value_heads=2, vocab_size=2000)
    expected = ["model.embed_tokens", *(f"model.layers.{n}" for n in range(3)), "LlamaForCausalLM", "lm_head"]
    assert names(units(model)) == expected


def test_bert_has_a_unit_a_layer() -> None:
    groups = units(transformers_model("BertModel", **SMALL, vocab_size=2000))
    assert blocks(groups, "encoder.layer") == [f"encoder.layer.{n}" for n in range(3)]


def test_t5_has_a_unit_a_block_on_both_sides_and_shares_one_embedding() -> None:
    model = transformers_model("T5ForConditionalGeneration", num_layers=3, d_model=64, d_ff=128, vocab_size=2000)
    groups = units(model)
    assert blocks(groups, "encoder.block") == [f"encoder.block.{n}" for n in range(3)]
    assert blocks(groups, "decoder.block") == [f"decoder.block.{n}" for n in range(3)]
    shared = next(group for group in groups if group.name == "shared")
    assert {id(entry) for entry in shared.entries} >= {
        id(model.shared), id(model.encoder.embed_tokens), id(model.decoder.embed_tokens), id(model.lm_head)
    }  # fmt: skip


def test_vit_has_a_unit_a_layer() -> None:
    groups = units(transformers_model("ViTForImageClassification", **SMALL))
    assert len([name for name in names(groups) if "layer" in name]) == 3


def test_swin_has_a_unit_a_stage() -> None:
    model = transformers_model("SwinForImageClassification", depths=[2, 2], num_heads=[2, 4], embed_dim=32)
    assert blocks(units(model), "swin.encoder.layers") == ["swin.encoder.layers.0", "swin.encoder.layers.1"]


def test_resnet_has_a_unit_a_stage() -> None:
    groups = units(transformers_model("ResNetForImageClassification"))
    assert blocks(groups, "resnet.encoder.stages") == [f"resnet.encoder.stages.{n}" for n in range(4)]


def test_the_experts_of_mixtral_stay_in_their_layer() -> None:
    config = {**SMALL, "num_key_value_heads": 2, "vocab_size": 2000, "num_local_experts": 4}
    groups = units(transformers_model("MixtralForCausalLM", **config))
    assert not [name for name in names(groups) if "expert" in name]
    layers = [group for group in groups if group.name.startswith("model.layers.")]
    assert [group.name for group in layers] == [f"model.layers.{n}" for n in range(3)]
    assert all(any("expert" in name for name in group.params) for group in layers)


class Mixture(nn.Module):
    """Experts in a list of their own at the root, each with children and large enough to be a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(4))


def test_experts_in_a_list_belong_to_the_unit_around_them() -> None:
    assert names(units(meta(Mixture))) == ["Mixture"]


def test_nn_transformer_has_a_unit_a_layer_on_both_sides() -> None:
    groups = units(meta(lambda: nn.Transformer(64, 2, 3, 3, 128, batch_first=True)))
    assert blocks(groups, "encoder.layers") == [f"encoder.layers.{n}" for n in range(3)]
    assert blocks(groups, "decoder.layers") == [f"decoder.layers.{n}" for n in range(3)]


# ---- other libraries


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_torch_geometric_convolutions_are_units_and_the_rest_is_the_roots(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_geometric import nn as pyg
    model = getattr(pyg, name)(64, 128, 3, 8)
    groups = units(model, min_numel=0)
    assert blocks(groups, "convs") == ["convs.0", "convs.1", "convs.2"]
    assert len(units(model, min_numel=65536)) == 1


def test_lora_adapters_stay_in_the_unit_of_the_block_they_adapt() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        base = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=500))
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"]))
    groups = [group for group in units(model) if ".h." in group.name]
    assert len(groups) == 3
    assert all(len([name for name in group.params if "lora_" in name]) == 2 for group in groups)


# ---- plain modules


def mlp(width: int = 64, layers: int = 3) -> nn.Module:
    return meta(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))


def test_a_plain_mlp_has_a_unit_a_layer_that_is_large_enough() -> None:
    assert names(units(mlp(), min_numel=4000)) == ["0", "1", "2"]
    assert names(units(mlp(), min_numel=0)) == ["0", "1", "2"]


def test_a_model_of_small_layers_is_one_unit() -> None:
    (group,) = units(mlp(16, 100), min_numel=65536)
    assert group.numel == 100 * (16 * 16 + 16)


@pytest.mark.parametrize("min_numel", [0, 65536])
def test_a_single_layer_is_one_unit(min_numel: int) -> None:
    model = meta(lambda: nn.Linear(3, 3))
    (group,) = units(model, min_numel=min_numel)
    assert group.entries == [model]


def test_a_recurrent_network_is_one_unit() -> None:
    assert len(units(meta(lambda: nn.LSTM(32, 64, 2)))) == 1


class Block(nn.Module):
    """A block of one layer, so that it has structure of its own."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class Tied(nn.Module):
    """An output layer that shares the embedding's weight, and blocks that share their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.blocks: Any = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].linear.weight = self.blocks[0].linear.weight
        self.leave = nn.Linear(32, 100, bias=False)
        self.leave.weight = self.embed.weight


def test_tied_parameters_lie_in_one_unit_that_every_user_enters() -> None:
    with torch.device("meta"):
        model = Tied()
    groups = units(model)
    first = next(group for group in groups if "blocks.0.linear.weight" in group.params)
    assert id(model.blocks[3].linear) in {id(entry) for entry in first.entries}


def test_a_module_that_sits_in_two_places_is_one_unit() -> None:
    def build() -> nn.Sequential:
        block = Block()
        return nn.Sequential(block, Block(), block)

    assert names(units(meta(build))) == ["0", "1"]


# ---- coalescing


def test_small_neighbours_are_coalesced_up_to_the_floor() -> None:
    model = meta(lambda: nn.Sequential(*(Block() for _ in range(6))))
    numel = 32 * 32 + 32
    groups = units(model, min_numel=2 * numel)
    assert names(groups) == ["0..1", "2..3", "4..5"]
    assert [group.numel for group in groups] == [2 * numel] * 3
    assert all(len(group.entries) == 2 for group in groups)


def test_zero_coalesces_nothing() -> None:
    model = meta(lambda: nn.Sequential(*(Block(2) for _ in range(4))))
    assert names(units(model, min_numel=0)) == ["0", "1", "2", "3"]


def test_a_large_neighbour_is_not_joined_to_a_small_one() -> None:
    model = meta(lambda: nn.Sequential(Block(4), Block(64), Block(4), Block(4)))
    assert names(units(model, min_numel=1000)) == ["0", "1", "2..3"]


# ---- patterns


class Named(nn.Module):
    """Two kinds of blocks under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.ModuleList(Block() for _ in range(2))
        self.leave = nn.Linear(32, 100)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"classes": ["Block"]}, ["left.0", "left.1", "right.0", "right.1", "Named"]),
        ({"names": ["left.*", "leave"]}, ["left.0", "left.1", "Named", "leave"]),
        ({"names": ["right"]}, ["Named", "right"]),
        (
            {"names": ["left.0"], "classes": ["Linear"]},
            ["left.0", "left.1.linear", "right.0.linear", "right.1.linear", "leave"],
        ),
    ],
)
def test_patterns_of_the_policy_choose_the_units(patterns: dict[str, list[str]], expected: list[str]) -> None:
    assert names(units(meta(Named), **patterns)) == expected


def test_the_outermost_match_of_a_pattern_is_the_unit() -> None:
    assert names(units(meta(Named), names=["left*"])) == ["left", "Named"]


def test_a_pattern_that_matches_nothing_is_refused_and_names_the_classes_there_are() -> None:
    with pytest.raises(AttachError, match=r"\[units\] needs Blok to match a module, found none\. .*Block"):
        units(meta(Named), classes=["Blok"])
    with pytest.raises(AttachError, match=r"needs lft\.\* to match a module"):
        units(meta(Named), names=["left.*", "lft.*"])


def test_a_list_chosen_by_a_pattern_is_entered_through_modules_that_are_called() -> None:
    for group in units(meta(Named), names=["left", "right"]):
        assert not any(isinstance(entry, nn.ModuleList) for entry in group.entries), group.name


def test_min_numel_coalesces_what_patterns_chose() -> None:
    assert names(units(meta(Named), classes=["Block"], min_numel=3000)) == ["left.0..right.0", "right.1", "Named"]


class Shared(nn.Module):
    """An encoder that is the decoder, too, and a head that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        self.decoder, self.head = self.encoder, nn.Linear(32, 32, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("called", ["encoder", "decoder", "dec*"])
def test_a_module_in_several_places_is_chosen_by_each_of_its_names(called: str) -> None:
    found = units(Shared(), names=[called])
    assert names(found) == ["Shared", "encoder"]
    assert list(found[1].params) == [f"encoder.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]


def test_a_unit_knows_every_name_of_its_parameters() -> None:
    found = {group.name: group for group in units(Shared(), names=["decoder", "head"])}
    assert found["head"].names("embed.weight") == ("embed.weight", "head.weight")
    assert found["encoder"].names("encoder.0.bias") == ("encoder.0.bias", "decoder.0.bias")


@pytest.mark.parametrize(
    ("match", "ruled"), [("head.*", 1), ("embed.*", 1), ("decoder.0.*", 2), ("encoder.0.*", 2), ("*code*.weight", 2)]
)
def test_a_rule_speaks_of_a_parameter_by_each_of_its_names(match: str, ruled: int) -> None:
    attachment = zhooks.attach(Shared(), policy={"rule": [{"match": match, "parameter.tier": "host"}]})
    said = attachment.describe()
    assert "Matches nothing" not in said
    assert [int(line.split()[1]) for line in said.splitlines() if " S host " in line] == [ruled]
    attachment.detach()
