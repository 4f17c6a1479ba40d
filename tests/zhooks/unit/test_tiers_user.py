"""What somebody new to tiers met first: descriptions, states of the wrong shape, homes with a tilde, models built on meta.

pytest runs it; each test is one user's surprise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.policy import Policy


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def test_describe_says_on_which_tier_each_cell_rests() -> None:
    policy: dict[str, Any] = {"gradient": {"tier": "host"}, "optimizer": {"tier": "host"}, "parameter": {"tier": "host"}}
    with_tiers = zhooks.attach(build(), policy=policy).describe()
    without = zhooks.attach(build()).describe()
    assert with_tiers.count("S host") == 3 * 1
    assert "host" not in without


def test_a_plain_state_dict_is_refused_with_the_way_to_pass_it() -> None:
    attachment = zhooks.attach(build())
    with pytest.raises(zhooks.CheckpointError, match=r'Pass a plain model\'s state as \{"model": state\}'):
        attachment.load_state_dict(build().state_dict())
    attachment.load_state_dict({"model": build().state_dict()})


def test_a_tilde_in_the_disk_path_is_the_home_folder() -> None:
    assert Policy.of({"disk": {"path": "~/scratch"}}).disk.folder == Path.home() / "scratch"


def test_apply_between_forward_and_backward_is_named_and_training_goes_on(tmp_path: Path) -> None:
    model = build()
    policy: dict[str, Any] = {"parameter": {"tier": "disk"}, "disk": {"path": str(tmp_path)}}
    attachment = zhooks.attach(model, policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 8)).sum()
    attachment.apply(policy)
    with pytest.raises(zhooks.ShardedOpError, match=r"apply\(\)"):
        loss.backward()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    attachment.detach()


class Ruled(nn.Module):
    """A model with a rule for its modules, as transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def test_the_rule_of_a_model_built_on_meta_wins_over_its_modules_own_reset() -> None:
    with torch.device("meta"):
        model = Ruled()
    attachment = zhooks.attach(model)
    state = attachment.state_dict()["model"]
    assert state["inner.weight"].eq(0.25).all()
    # What the rule does not mention keeps the module's own values.
    assert 0 < state["inner.bias"].abs().max() <= 0.125
