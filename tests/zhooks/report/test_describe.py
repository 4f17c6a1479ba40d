"""What ``describe`` says of an attachment: each unit, its dtypes, and on which tier each of its states is.

pytest runs it, in this process. What it says of a plan that was chosen is tests/zhooks/simulate's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zhooks


def described(**policy: Any) -> list[list[str]]:
    """The words of each row of units of a model of two linear layers, which are one unit."""
    torch.manual_seed(0)
    attachment = zhooks.attach(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), policy=policy)
    header, _, *rows = attachment.describe().splitlines()
    attachment.detach()
    assert header.split() == ["unit", "params", "numel", "padding", "kept", "->", "use", "parameter", "gradient", "optimizer"]
    return [row.split() for row in rows if row.startswith("Sequential")]


def test_each_cell_says_how_it_is_divided_and_on_which_tier_it_is() -> None:
    assert described() == [["Sequential", "4", "212", "0", "fp32", "->", "fp32", "S", "S", "S"]]
    assert described(stage=1) == [["Sequential", "4", "212", "0", "fp32", "->", "fp32", "R", "P", "S"]]
    cells = {"gradient": {"tier": "host"}, "optimizer": {"tier": "disk"}, "parameter": {"tier": "host"}}
    assert described(**cells) == [["Sequential", "4", "212", "0", "fp32", "->", "fp32", "S", "host", "S", "host", "S", "disk"]]


def test_the_total_says_how_its_units_come_to_more_rows() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    assert "\n1 unit, 212 elements, " in zhooks.attach(model).describe()
    half_frozen = nn.Sequential(nn.Linear(8, 16).requires_grad_(False), nn.Linear(16, 4))
    lines = zhooks.attach(half_frozen).describe().splitlines()
    # Below a header, a rule and two rows.
    assert lines[4].startswith("1 unit in 2 flat buffers (rows), 212 elements, ")
