"""What of a model is left alone: by any of its names, with everything below, and frozen parameters of tensor subclasses.

pytest runs it without ranks. What attachments do with what is left alone is asked in the plan's test_ignored.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

import zhooks
from offload.errors import AttachError
from tests.support.int8 import Int8
from zhooks.layout import Ignored


class Net(nn.Module):
    """A body that is the head's, too, with a norm, which has buffers; and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.head = nn.ModuleDict({"body": self.body, "out": nn.Linear(2, 2, bias=False)})
        self.scale = nn.Parameter(torch.ones(3))


def left_of(model: nn.Module, *globs: str) -> Ignored:
    return Ignored.of(model, globs, zhooks.ShardedTensor)


def names(named: Iterable[tuple[str, object]]) -> list[str]:
    return [name for name, _ in named]


BODY = ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"]


@pytest.mark.parametrize("glob", ["body", "head.body", "*.body", "?ody"])
def test_a_module_is_left_alone_by_any_of_its_names_and_everything_below_it_with_it(glob: str) -> None:
    model = Net()
    left = left_of(model, glob)
    assert left and left.modules == set(model.body.modules())
    assert list(left.params) == list(left.named) == BODY
    assert names(left.named_modules(model)) == ["", "head", "head.out"]
    assert names(left.named_parameters(model)) == ["scale", "head.out.weight"]
    assert [id(param) for param in left.parameters(model)] == [id(model.scale), id(model.head["out"].weight)]
    assert names(left.named_buffers(model)) == []
    assert left.buffers() == set(map(id, model.buffers()))
    assert left.identities() == set(map(id, model.body.parameters()))


def test_a_parameter_is_left_alone_without_its_module() -> None:
    model = Net()
    left = left_of(model, "scale", "head.body.0.bias")
    assert list(left.params) == ["scale", "body.0.bias"] and not left.modules
    assert names(left.named_modules(model)) == ["", "body", "body.0", "body.1", "head", "head.out"]
    assert names(left.named_parameters(model)) == ["body.0.weight", "body.1.weight", "body.1.bias", "head.out.weight"]
    assert names(left.named_buffers(model)) == ["body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"]
    assert left.nbytes("scale") == 12 and left.nbytes("body.0.bias") == 8


def test_nothing_is_left_alone_where_nothing_is_named() -> None:
    model = Net()
    left = left_of(model)
    assert not left and not Ignored()
    assert left.parameters(model) == list(model.parameters())
    assert names(left.named_parameters(model)) == names(model.named_parameters())


def test_a_star_names_all_but_the_root_itself() -> None:
    model = Net()
    left = left_of(model, "*")
    assert names(left.named_modules(model)) == [""] and left.parameters(model) == []


def test_names_that_match_nothing_are_refused_and_those_that_do_are_not_said() -> None:
    with pytest.raises(AttachError, match=r"ignore needs back, tail to match a module or a parameter, found none"):
        left_of(Net(), "tail", "body", "back")


@pytest.mark.parametrize("globs", [(), ("scale",), ("*.out",)])
def test_a_frozen_parameter_of_a_tensor_subclass_is_left_alone_whether_it_is_named_or_not(globs: tuple[str, ...]) -> None:
    model = Net()
    made = Int8(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1))
    model.head["out"].weight = nn.Parameter(made, requires_grad=False)
    left = left_of(model, *globs)
    named = {"scale": ["scale"], "*.out": ["head.out.weight"]}[globs[0]] if globs else []
    assert list(left.named) == named
    assert list(left.frozen) == ["head.out.weight"] and left.frozen["head.out.weight"].key == "weight"
    assert left.frozen["head.out.weight"].module is model.head["out"]
    assert left.unnamed == (set() if "*.out" in globs else {"head.out.weight"})
    assert left.nbytes("head.out.weight") == 4 + 8
    assert "head.out.weight" not in names(left.named_parameters(model))


def test_one_that_is_trained_is_no_frozen_one_nor_is_what_an_attachment_has_made() -> None:
    model = Net()
    attachment = zhooks.attach(model)
    model.requires_grad_(False)
    assert not left_of(model)
    attachment.detach()
    trained = Int8(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1))
    model.head["out"].weight = nn.Parameter(trained, requires_grad=True)
    assert not left_of(model)
