"""What a frozen parameter of a tensor subclass is made of: found wherever libraries keep it, counted once, known by a checksum.

pytest runs it without ranks, on subclasses of its own. What attachments do with it is test_quantised.py's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.int8 import Int8
from zhooks.layout import FrozenSubclass


class Packed(nn.Parameter):
    """Whole numbers, and whatever attributes a library gives them."""


def packed(**attributes: Any) -> Packed:
    """A parameter of 64 bytes."""
    made = Packed(torch.arange(64, dtype=torch.int8), requires_grad=False)
    vars(made).update(attributes)
    return made


def frozen(param: nn.Parameter, module: nn.Module | None = None) -> FrozenSubclass:
    module = nn.Module() if module is None else module
    module.weight = param
    return FrozenSubclass(param, module, "weight")


def int8(rows: int = 4) -> Int8:
    """8 bytes and 4 a row."""
    return Int8(torch.ones(rows, 8, dtype=torch.int8), torch.ones(rows, 1))


def deep(levels: int, tensor: Tensor) -> Any:
    return tensor if levels == 0 else SimpleNamespace(inner=deep(levels - 1, tensor))


@pytest.mark.parametrize(
    ("attributes", "nbytes"),
    [
        ({}, 0),
        ({"scale": torch.ones(4)}, 16),
        ({"state": SimpleNamespace(code=torch.ones(2), more={"offset": torch.ones(1)}, names=["fp4", 3])}, 12),
        ({"scales": [torch.ones(4), (torch.ones(2), torch.ones(1))]}, 28),
        ({"scale": int8()}, 48),
        ({"scales": [int8(), torch.ones(4)]}, 64),
        ({"state": deep(4, torch.ones(4))}, 16),
        ({"state": deep(5, torch.ones(4))}, 0),
        ({"module": nn.Linear(8, 8), "kind": SimpleNamespace, "call": torch.ones(4).add_, "math": torch}, 0),
    ],
)
def test_packed_data_and_what_attributes_hold_are_counted_but_no_modules_and_classes(
    attributes: dict[str, Any], nbytes: int
) -> None:
    assert frozen(packed(**attributes)).nbytes() == 64 + nbytes


def test_memory_that_is_referred_to_several_times_is_counted_once() -> None:
    scale = torch.ones(4)
    state = SimpleNamespace(scale=scale, first=scale[:1])
    state.itself = state
    param = packed(scale=scale, state=state)
    vars(param)["bits"] = param.detach().as_subclass(Tensor).view(torch.uint8)
    assert frozen(param).nbytes() == 64 + 16


def test_what_the_module_has_taken_over_is_the_parameters_still() -> None:
    module = nn.Module()
    vars(module).update(state=torch.ones(4), states={"code": torch.ones(2)}, far=[[torch.ones(9)]], _cache=torch.ones(7))
    assert frozen(packed(), module).nbytes() == 64 + 16 + 8


def test_of_a_subclass_that_says_it_the_inner_tensors_are_all_however_deep() -> None:
    inside = Int8(torch.ones(4, 8, dtype=torch.int8), int8().scale)
    inside.numbers = int8()
    param = nn.Parameter(inside, requires_grad=False)
    vars(param)["note"] = torch.ones(100)
    module = nn.Module()
    vars(module)["state"] = torch.ones(100)
    one = frozen(param, module)
    assert one.nbytes() == (32 + 16) + 16
    assert all(type(tensor) is Tensor and not tensor.requires_grad for tensor in one.tensors())


def test_it_is_called_by_its_class_and_that_ones_module() -> None:
    assert frozen(packed()).kind == f"{__name__}.Packed"


def test_no_value_is_changed_or_copied() -> None:
    scale = torch.ones(4)
    param = packed(scale=scale)
    data, attribute = frozen(param).tensors()
    assert data.data_ptr() == param.data_ptr() and attribute.data_ptr() == scale.data_ptr()


class Saves(nn.Module):
    """Writes scales beside its weight, as bitsandbytes' layers do."""

    def __init__(self, **beside: Any) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(3))
        self.beside = beside

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: value for name, value in self.beside.items()})


class SavesNothing(nn.Module):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise NotImplementedError


def test_what_a_module_saves_beside_parameters_and_buffers_are_its_other_tensors() -> None:
    scale = torch.ones(4)
    found = frozen(packed(), Saves(scale=scale, format="int8")).beside()
    assert set(found) == {"scale"} and found["scale"] is scale
    assert frozen(packed(), nn.Linear(2, 2)).beside() == {}
    assert frozen(packed(), SavesNothing()).beside() == {}


def checksum(values: Tensor, module: nn.Module | None = None, **attributes: Any) -> str:
    param = Packed(values, requires_grad=False)
    vars(param).update(attributes)
    return frozen(param, module).checksum()


def test_a_checksum_is_of_all_values_wherever_they_are_kept() -> None:
    values, scale = torch.arange(8, dtype=torch.int8), torch.tensor([1.0, 2.0])
    known = checksum(values, scale=scale)
    assert known == checksum(values.clone(), scale=scale.clone()) == checksum(values, state={"scale": scale})
    assert known == checksum(values, Saves(scale=scale)), "the module has taken it over and saves it"
    others = [
        checksum(values.roll(1), scale=scale),
        checksum(values.view(2, 4), scale=scale),
        checksum(values.view(torch.uint8), scale=scale),
        checksum(values, scale=scale.roll(1)),
        checksum(values, scale=scale.view(2, 1)),
        checksum(values, scale=scale.view(torch.int32)),
        checksum(values, Saves(scale=scale, offset=torch.ones(1)), scale=scale),
        checksum(values),
    ]
    assert known not in others and len(set(others)) == len(others)


class Described(Int8):
    """Says of itself what every object says that has no other text, and how its numbers are to be read."""

    how = "rows"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], (self.how, object())


def test_a_checksum_of_a_subclass_that_says_what_it_is_made_of_has_names_and_description_but_no_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers, scale = torch.arange(16, dtype=torch.int8).view(2, 8), torch.ones(2, 1)

    def of(made: Tensor) -> str:
        return frozen(nn.Parameter(made, requires_grad=False)).checksum()

    same = [of(Described(numbers, scale)) for _ in range(3)]
    assert len(set(same)) == 1
    others = [of(Int8(numbers, scale)), of(Described(numbers, 2 * scale)), of(Described(numbers.view(torch.uint8), scale))]
    monkeypatch.setattr(Described, "how", "columns")
    others.append(of(Described(numbers, scale)))
    assert len({same[0], *others}) == 5
