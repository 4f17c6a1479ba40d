"""A gradient that a parameter is given is the parameter's own, with hooks on it and without.

pytest runs it on one rank. What hooks see is test_node_hooks.py's, what is reduced test_reduction.py's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.values import copies


class Given(nn.Module):
    """Its gradient is what ``backward`` is given, the very tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self) -> Tensor:
        return self.weight.clone()


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_who_writes_what_backward_was_given_writes_no_gradient(hooked: bool, tier: str) -> None:
    model = Given()
    attachment = zhooks.attach(model, policy={"gradient": {"tier": tier}, "optimizer": {"tier": tier}})
    if hooked:
        model.weight.register_hook(lambda grad: None)
    for times in (1, 2):
        given = torch.ones(4)
        model().backward(given)
        given.zero_()
        assert copies([model.weight.grad])[0].tolist() == [times] * 4
    attachment.detach()
