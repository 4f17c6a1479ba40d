"""Whole packages of optimizers beside plain PyTorch: each trains to the same weights, or is refused before its first step.

Packages that are not installed are skipped (``pip install -e '.[optimizers]'``). What does not train a plain model is not
judged.
"""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zhooks
from offload.errors import ShardedOpError
from tests.support.on_ranks import on_ranks

STEPS = 5


class Net(nn.Module):
    """An embedding, matrices and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.norm, self.out = nn.Embedding(20, 16), nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.up(self.embed(x)))))


Make = Callable[[nn.Module], Optimizer]


def made_by(package: str) -> Iterator[tuple[str, Make]]:
    """The package's optimizers, by name, with their defaults."""
    module: Any = importlib.import_module(package)
    if package == "timm.optim":
        for name in module.list_optimizers():
            yield name, lambda net, name=name: module.create_optimizer_v2(net, name, lr=1e-3)  # type: ignore[misc]
        return
    for name in dir(module):
        kind = getattr(module, name)
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            yield name, lambda net, kind=kind: kind(net.parameters(), lr=1e-3)  # type: ignore[misc]


def trained(make: Make, attached: bool) -> list[Tensor]:
    net = Net()
    attachment = zhooks.attach(net, policy={"stage": 3}) if attached else None
    try:
        optimizer, generator = make(net), torch.Generator().manual_seed(1)
        for step in range(STEPS):
            x = torch.randint(0, 20, (8, 6), generator=generator)
            torch.manual_seed(100 + step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x).view(-1, 20), ((x * 3 + 1) % 20).view(-1)).backward()
            optimizer.step()
    finally:
        if attachment is not None:
            attachment.detach()
    return [param.detach().clone() for param in net.parameters()]


@pytest.mark.slow
@on_ranks(2, package=("pytorch_optimizer", "timm.optim", "heavyball", "bitsandbytes.optim"), limit_s=3600)
def test_every_optimizer_of_a_package_trains_as_on_a_plain_model_or_is_refused(package: str) -> None:
    try:
        cases = dict(made_by(package))
    except ImportError as error:
        pytest.skip(f"{package}: {error}")
    ends: dict[str, str] = {}
    for name, make in cases.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                want = trained(make, attached=False)
            except Exception:
                continue
            try:
                got = trained(make, attached=True)
            except ShardedOpError as error:
                ends[name] = f"refused: {error}"
                continue
            except Exception as error:
                ends[name] = f"raised {type(error).__name__}: {error}"
                continue
        off = max(float((one - other).abs().max()) for one, other in zip(want, got, strict=True))
        ends[name] = "equal" if off == 0 else "close" if off <= 1e-5 else f"off by {off}"
    bad = {name: end for name, end in ends.items() if not end.startswith(("equal", "close", "refused"))}
    assert not bad, bad
    assert "equal" in ends.values()


@pytest.mark.slow
@on_ranks(1, 2, optim=("adamw_bnb_8bit", "paged_adamw_8bit"))
def test_the_trainer_steps_with_8_bits_but_for_embeddings(optim: str) -> None:
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    from zhooks.integrations.transformers import Trainer

    torch.manual_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 500, (16, 8))]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(
            folder, max_steps=2, report_to=[], use_cpu=True, optim=optim, save_strategy="no", disable_tqdm=True
        )
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
        trainer: Any = Trainer(model, arguments, train_dataset=data, zhooks={"stage": 3})
        trainer.train()
        states = trainer.optimizer.optimizer.state
    bits = {name: states[param]["state1"].dtype for name, param in model.named_parameters() if states[param].here}
    for name, dtype in bits.items():
        assert dtype == (torch.uint8 if "mlp" in name or "lm_head" in name else torch.float32), (name, dtype)
