"""What [precision] casts at the outermost call: floating tensors in containers and in dataclasses, and nothing else.

pytest runs it over real ranks. Modules that rules have compute in another dtype are layout/test_precision_rules.py's.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import on_ranks


@dataclass
class Batch:
    x: Tensor
    ids: Tensor = field(default_factory=lambda: torch.arange(2))
    name: str = "batch"


@dataclass(frozen=True, slots=True)
class Fixed:
    x: Tensor


@dataclass
class Outer:
    inner: list[Batch]


class Reader(nn.Module):
    """Takes its input out of whatever it is given, and gives it back in the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, given: Any) -> Any:
        self.seen.append(given)
        inner = given.inner[0] if isinstance(given, Outer) else given
        return Batch(self.layer(inner["x"] if isinstance(inner, dict) else inner.x))


@on_ranks(1, 2)
def test_floating_tensors_in_dataclasses_are_cast_and_the_callers_own_stay() -> None:
    model = Reader()
    attachment = zhooks.attach(model, policy={"precision": {"param": "bf16", "output": "fp32"}})
    x = torch.ones(2, 4)
    for given in (Batch(x), Fixed(x), Outer([Batch(x)]), {"x": x}):
        out = model(given)
        assert out.x.dtype is torch.float32, "outputs are cast in dataclasses, too"
        assert out.ids.dtype is torch.int64
        out.x.sum().backward()
        assert type(model.seen[-1]) is type(given)
    assert x.dtype is torch.float32
    assert model.seen[0] is not None and model.seen[0].name == "batch" and model.seen[0].x.dtype is torch.bfloat16
    attachment.detach()


@on_ranks(1, 2)
def test_what_is_of_the_dtype_already_is_handed_on_as_it_is() -> None:
    model = Reader()
    zhooks.attach(model, policy={"precision": {"param": "bf16"}})
    given = Batch(torch.ones(2, 4, dtype=torch.bfloat16))
    model(given)
    assert model.seen[-1] is given


@on_ranks(1, precision=({}, {"param": "bf16"}, {"param": "bf16", "cast_inputs": "unit"}, {"param": "fp16", "loss_scale": 8}))
def test_what_a_forward_was_given_is_freed_without_collecting_garbage(precision: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zhooks.attach(model, policy={"precision": precision, "units": {"min_numel": 0}})
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            given = torch.ones(2, 4)
            alive = weakref.ref(given)
            model(given).float().sum().backward()
            del given
            assert alive() is None
    finally:
        gc.enable()
