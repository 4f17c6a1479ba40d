"""Every policy in examples/policies/ trains a small GPT, to the same losses and parameters as with nothing moved.

pytest runs it on ranks over Gloo. It never states what a policy costs: zprof does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zhooks
from offload.policy import Policy
from tests.support.on_ranks import on_ranks, place
from tests.support.paths import ROOT
from tests.support.slow import slow
from tests.support.zoo import ZOO

FOLDER = ROOT / "examples" / "policies"
NAMES = tuple(sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".toml", ".json")))


def on_the_device(policy: Policy) -> dict[str, Any]:
    """The same arithmetic with everything where plain PyTorch has it."""
    values = policy.values()
    for cell in ("parameter", "gradient", "optimizer", "activation"):
        values.get(cell, {}).pop("tier", None)
    values.get("optimizer", {}).pop("compute", None)
    rules = [{key: value for key, value in rule.items() if key in ("match", "precision")} for rule in values.pop("rule")]
    return values | {"rule": [rule for rule in rules if "precision" in rule]}


def train(policy: Any, mesh: Any, *, adapters: bool) -> tuple[list[float], dict[str, Tensor]]:
    rank, world = place()
    specimen = ZOO["gpt"]
    model = specimen.build(11)
    if adapters:
        peft = pytest.importorskip("peft")
        torch.manual_seed(3)
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules="all-linear"), model)
    attachment = zhooks.attach(model, policy=policy, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        loss = specimen.loss(model, specimen.batch(step, rank, world))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    attachment.detach()
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@on_ranks(*slow(1), 2, name=(*NAMES[::3], *slow(*(name for name in NAMES if name not in NAMES[::3]))))
def test_an_example_trains_to_the_same_bits_as_on_the_device(name: str) -> None:
    policy = Policy.load(FOLDER / name)
    mesh = None
    if name.startswith("hybrid") and dist.is_initialized():
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    moved, still = (train(each, mesh, adapters=name == "lora.toml") for each in (policy, on_the_device(policy)))
    assert moved[0] == still[0]
    assert all(torch.equal(moved[1][key], value) for key, value in still[1].items())
