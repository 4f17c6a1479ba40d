"""Models of the libraries people use: each is simulated without a race, or refused with the line and what to write instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zhooks
from tests.support.torches import Muon
from tests.support.virtual import on_virtual
from zhooks.simulate import Simulation, simulate

LAYERS = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
MOE = {**LAYERS, "num_key_value_heads": 2, "vocab_size": 100, "num_local_experts": 4}


def ids(*size: int) -> Tensor:
    return torch.zeros(*size, dtype=torch.long, device="virtual")


def simulated(make: Callable[[], nn.Module], loss: Callable[[Any], Tensor], **given: Any) -> Simulation:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        return model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    found = simulate(build, step, world=4, **given)
    assert not found.races and found.flops > 0 and found.step_s > 0
    return found


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
            nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 10),
        )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding, self.cells, self.head = nn.Embedding(50, 32), kind(32, 32, 2, dropout=0.1), nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(self.embedding(tokens))[0])
        return out


class Legacy(nn.Module):
    """Makes a parameter as old code does, which ``torch.device`` does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.Tensor(16)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.scale
        return out


@on_virtual(model=("convolutions", "lstm", "gru", "legacy"))
def test_models_of_torch_are_simulated(model: str) -> None:
    if model == "convolutions":
        simulated(Convolutions, lambda net: F.cross_entropy(net(torch.empty(4, 3, 32, 32, device="virtual")), ids(4)))
    elif model == "legacy":
        simulated(Legacy, lambda net: net(torch.empty(2, 16, device="virtual")).square().mean())
    else:
        kind = nn.LSTM if model == "lstm" else nn.GRU
        simulated(lambda: Recurrent(kind), lambda net: F.cross_entropy(net(ids(8, 4)).flatten(0, 1), ids(32)))


def language(name: str, config: str, **values: Any) -> tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]:
    import transformers

    def make() -> nn.Module:
        made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**values))
        return made

    return make, lambda model: model(input_ids=ids(2, 32), labels=ids(2, 32)).loss


def of_library(name: str) -> tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]:
    few = {"vocab_size": 100}
    pixels = torch.empty(2, 3, 32, 32, device="virtual")
    if name == "gpt2":
        return language("GPT2LMHeadModel", "GPT2Config", n_layer=2, n_embd=64, n_head=4, **few)
    if name == "llama":
        return language("LlamaForCausalLM", "LlamaConfig", **LAYERS, **few)
    if name == "t5":
        sizes = {"num_layers": 2, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "decoder_start_token_id": 0}
        return language("T5ForConditionalGeneration", "T5Config", **sizes, **few)
    if name == "bert":
        return language("BertForMaskedLM", "BertConfig", **LAYERS, **few)
    if name == "mixtral":
        return language("MixtralForCausalLM", "MixtralConfig", **MOE)
    if name == "vit":
        make, _ = language("ViTForImageClassification", "ViTConfig", **LAYERS, image_size=32, patch_size=8)
        return make, lambda model: model(pixels).logits.float().mean()
    if name == "lora":
        from peft import LoraConfig, get_peft_model

        base, loss = language("LlamaForCausalLM", "LlamaConfig", **LAYERS, **few)
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)

        def adapted() -> nn.Module:
            with warnings.catch_warnings():
                # peft asks transformers for an attribute's old name.
                warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
                return get_peft_model(base(), adapters)

        return adapted, loss
    from diffusers import UNet2DConditionModel

    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    given = (torch.empty(2, 4, 16, 16, device="virtual"), ids(2), torch.empty(2, 7, 32, device="virtual"))
    unet: Any = partial(
        UNet2DConditionModel, sample_size=16, block_out_channels=(32, 64), layers_per_block=1, down_block_types=down,
        up_block_types=up, cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    return unet, lambda model: model(*given).sample.square().mean()


@pytest.mark.slow
@on_virtual(model=("gpt2", "llama", "t5", "bert", "vit", "mixtral", "unet", "lora"))
def test_models_of_libraries_are_simulated(model: str) -> None:
    from offload.virtual import Machine
    from tests.support.virtual import Flat

    with Machine(Flat()).on():  # tells torch of the device
        make, loss = of_library(model)
    simulated(make, loss)


@pytest.mark.slow
@on_virtual()
def test_experts_compute_the_same_whether_their_products_are_grouped_or_batched() -> None:
    flops = []
    for experts in ("grouped_mm", "batched_mm"):
        make, loss = language("MixtralForCausalLM", "MixtralConfig", **MOE, experts_implementation=experts)
        flops.append(simulated(make, loss).flops)
    assert flops[0] == flops[1]
    make, loss = language("MixtralForCausalLM", "MixtralConfig", **MOE, experts_implementation="eager")
    with pytest.raises(zhooks.SimulationError, match=r"nonzero.* at .*modeling_mixtral.py:\d+, called from .*grouped_mm"):
        simulated(make, loss)


@on_virtual()
def test_an_optimizer_that_owns_whole_parameters_is_simulated() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 32, bias=False))
        return model, Muon(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.empty(8, 32, device="virtual")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert simulate(build, step, world=4).step_s > 0
