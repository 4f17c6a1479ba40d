"""Units that are recomputed and given objects beside tensors: a forward may change them, and its second run must not see that.

pytest runs it.  It never asks for tiers or ranks: an object is this rank's own affair.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.errors import CapabilityError

POLICY: dict[str, Any] = {"units": {"min_numel": 0}, "activation": {"checkpoint": "unit"}}


@dataclass(slots=True)
class Layer:
    keys: list[Tensor] = field(default_factory=list)


class Count:
    """A slot of a private name."""

    __slots__ = ("__number",)

    def __init__(self) -> None:
        self.__number = 0

    def more(self) -> int:
        self.__number += 1
        return self.__number


class Cache:
    """As caches of keys are: objects in objects, and more of what a state may hold."""

    def __init__(self) -> None:
        self.layers = [Layer() for _ in range(3)]
        self.seen: dict[str, int] = {}
        self.order = OrderedDict(first=[0])
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.recent: deque[int] = deque(maxlen=2)
        self.names = {"start"}
        self.pair = ([0], "constant")
        self.itself = self
        self.count = Count()
        self.lock = threading.Lock()

    def update(self, place: int, keys: Tensor) -> Tensor:
        with self.lock:
            assert self.itself is self
            layer = self.layers[place]
            layer.keys.append(keys)
            self.seen[str(place)] = self.seen.get(str(place), 0) + 1
            self.order["first"][0] += 1
            self.counts["all"] += 1
            self.recent.append(place)
            self.names.add(str(place))
            self.pair[0][0] += 1
            weight = self.order["first"][0] + self.counts["all"] + len(self.recent) + len(self.names) + self.pair[0][0]
            weight += self.count.more()
            return torch.cat(layer.keys, dim=1) * weight * self.seen[str(place)]


class Attention(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.query, self.key = place, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        keys = cache.update(self.place, self.key(x))
        return x + torch.tanh(self.query(x) @ keys.transpose(1, 2) / 50) @ keys / 50


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(place) for place in range(3))

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, cache=cache)
        return x.square().mean()


def built() -> Model:
    torch.manual_seed(3)
    return Model()


def gradients(model: nn.Module, cache: Any) -> list[Tensor]:
    torch.manual_seed(4)
    x = torch.randn(2, 5, 6)
    model(x, cache).backward()
    return [param.grad for param in model.parameters()]  # type: ignore[misc]


def test_a_second_forward_finds_the_cache_it_was_given_as_the_first_one_found_it() -> None:
    plain, ours = built(), built()
    expected = gradients(plain, Cache())
    attachment = zhooks.attach(ours, policy=POLICY)
    cache = Cache()
    found = gradients(ours, cache)
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(expected, found, strict=True))  # type: ignore[attr-defined]
    assert [len(layer.keys) for layer in cache.layers] == [1, 1, 1], "the caller's cache has every key once"
    assert cache.counts["all"] == 3
    attachment.detach()


def test_a_backward_that_is_run_twice_finds_it_so_twice() -> None:
    plain, ours = built(), built()
    attachment = zhooks.attach(ours, policy=POLICY)
    for model in (plain, ours):
        loss = model(torch.ones(2, 5, 6), Cache())
        loss.backward(retain_graph=True)
        loss.backward()
    attachment.detach()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


class Static(Cache):
    """Writes keys into memory it made before."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(3, 2, 5, 6)

    def update(self, place: int, keys: Tensor) -> Tensor:
        with torch.no_grad():
            self.memory[place] += keys
        return self.memory[place].clone()


def test_a_tensor_in_it_that_is_changed_in_place_is_an_error_that_names_the_unit() -> None:
    model = built()
    attachment = zhooks.attach(model, policy=POLICY)
    loss = model(torch.ones(2, 5, 6), Static())
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .a tensor in an object passed to unit blocks"):
        loss.backward()
    attachment.detach()


class Large(Cache):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [[row] for row in range(30_000)]


def test_more_objects_than_anybody_would_copy_are_refused_before_the_unit_runs() -> None:
    model = built()
    attachment = zhooks.attach(model, policy=POLICY)
    cache = Large()
    with pytest.raises(CapabilityError, match=r"unit blocks.*more than 20,000 objects"):
        model(torch.ones(2, 5, 6), cache)
    assert not cache.layers[0].keys
    attachment.detach()
