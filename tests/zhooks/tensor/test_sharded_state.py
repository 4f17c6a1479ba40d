"""The sharded tensor copied, moved and written: state dicts kept in memory, deep copies, refused writes.

pytest runs it, on one rank and on two. Files are tests/zhooks/checkpoint/test_torch_state.py's; full states, for any
world size, the Attachment's: test_full_state.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from tests.support.on_ranks import on_ranks
from tests.support.values import full, same, sharded

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- state dicts kept in memory


@on_ranks(1, 2)
def test_a_resumed_model_in_the_same_attachment_goes_back_to_the_saved_step() -> None:
    model = net()
    zhooks.attach(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(2))
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    wanted = train(model, optimizer, range(2, 4))
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert train(model, optimizer, range(2, 4)) == wanted


@on_ranks(1, 2)
def test_a_full_state_dict_of_the_plain_model_loads_too() -> None:
    model, other = net(), net(seed=4)
    zhooks.attach(model)
    model.load_state_dict(other.state_dict())
    assert same(full(model), list(other.parameters()))


@on_ranks(2)
def test_a_state_of_another_layout_loads_whole_while_its_ranks_still_meet_and_is_refused_after() -> None:
    """Two layouts of one model: ranges that lie elsewhere are put together, on every rank or on none."""
    model, other = net(), net(seed=4)
    attachment, wanted = zhooks.attach(model), list(net().parameters())
    saved = copy.deepcopy(model.state_dict())
    zhooks.attach(other, policy={"units": {"min_numel": 0}})
    assert any(saved[name].to_local().numel() != sharded(param).to_local().numel() for name, param in other.named_parameters())
    other.load_state_dict(saved)
    assert same(full(other), wanted)
    with torch.no_grad():
        other[0].weight.zero_()
    before = full(other)
    attachment.detach()
    with pytest.raises(zhooks.ShardedOpError, match="found that it was detached"):
        other.load_state_dict(saved)
    assert same(full(other), before)


# ---- deep copies


@on_ranks(2)
def test_a_norm_that_is_read_before_detach_is_there_after_and_another_says_to_read_it() -> None:
    model = net()
    wanted = model[0].weight.norm().item()
    attachment = zhooks.attach(model)
    with torch.no_grad():
        read, kept = model[0].weight.norm(), model[0].weight.norm()
    read.item()
    attachment.detach()
    assert read.item() == pytest.approx(wanted)
    with pytest.raises(zhooks.ShardedOpError, match=r"read norms \(norm\.item\(\)\) before detach\(\)"):
        kept.item()


@on_ranks(1, 2)
def test_torchs_averaged_model_follows_the_training() -> None:
    model, plain = net(), net()
    zhooks.attach(model)
    averages = [torch.optim.swa_utils.AveragedModel(either) for either in (model, plain)]
    optimizers = [OPTIMIZERS["sgd"](either.parameters()) for either in (model, plain)]
    for step in range(3):
        for either, optimizer, average in zip((model, plain), optimizers, averages, strict=True):
            train(either, optimizer, range(step, step + 1))
            average.update_parameters(either)
    for ours, theirs in zip(averages[0].module.parameters(), averages[1].module.parameters(), strict=True):
        assert torch.equal(sharded(ours).full_tensor(), theirs)


# ---- moved and written


@on_ranks(1, 2)
def test_moving_the_model_where_it_is_changes_nothing() -> None:
    model, plain = net(), net()
    zhooks.attach(model)
    before = list(model.parameters())
    versions = [param._version for param in before]
    model(torch.ones(4, 6)).sum().backward()
    grads = [param.grad for param in before]
    first = torch.device("cpu", 0)
    for there in ("cpu", "cpu:0", first):
        assert model.to(there) is model
    model.float().cpu().to(device=first, dtype=torch.float32, non_blocking=True)
    model._apply(lambda tensor: tensor.to("cpu:0"))
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert all(now.grad is then for now, then in zip(model.parameters(), grads, strict=True))
    assert [param._version for param in before] == versions, "nothing was written"
    for tensor in (before[0], before[0].detach(), grads[0]):
        assert tensor.to("cpu:0") is tensor.to(first, torch.float32) is tensor.to(torch.zeros(1)) is tensor.cpu() is tensor
    copied = before[0].detach().to("cpu:0", copy=True)
    assert copied is not before[0] and copied.device == torch.device("cpu")
    assert torch.zeros_like(before[0].detach(), device="cpu:0").device == torch.device("cpu")
    assert torch.equal(model(torch.ones(4, 6)), plain(torch.ones(4, 6)))


@on_ranks(1)
def test_a_model_that_is_moved_elsewhere_is_refused_at_its_next_forward() -> None:
    model = net()
    zhooks.attach(model)
    model.to("meta")
    with pytest.raises(zhooks.AttachError, match=r"0.weight was .*model.to\(\), .*call detach\(\), change it"):
        model(torch.ones(4, 6))


@on_ranks(1, 2, dtype=(torch.bfloat16, torch.float64))
def test_another_dtype_after_attach_is_refused_and_the_model_is_as_it_was(dtype: torch.dtype) -> None:
    model, plain = net(), net()
    zhooks.attach(model)
    words = rf"0\.weight\.data. Expected a tensor of shape \(7, 6\), torch\.float32 on cpu, found \(7, 6\), {dtype} on cpu"
    with pytest.raises(zhooks.ShardedOpError, match=words):
        model.to(dtype)
    assert all(tensor.dtype is torch.float32 for tensor in [*model.parameters(), model[2].running_mean])
    assert torch.equal(model(torch.ones(4, 6)), plain(torch.ones(4, 6)))


@on_ranks(1, 2, how=("smaller", "meta"))
def test_assigning_data_of_another_shape_or_device_is_refused_and_nothing_changed(how: str) -> None:
    model = net()
    zhooks.attach(model)
    before = full(model)
    data = {"smaller": torch.empty(0), "meta": torch.empty(7, 6, device="meta")}[how]
    found = {"smaller": r"\(0,\), torch\.float32 on cpu", "meta": r"\(7, 6\), torch\.float32 on meta"}[how]
    with pytest.raises(zhooks.ShardedOpError, match=rf"0\.weight\.data. Expected a tensor of .*, found {found}\. Call"):
        model[0].weight.data = data
    assert same(full(model), before) and isinstance(model[0].weight, zhooks.ShardedTensor)


@on_ranks(1, 2)
def test_assigning_whole_data_writes_the_values() -> None:
    model = net()
    zhooks.attach(model)
    weight = model[0].weight
    weight.data = torch.arange(42.0).view(7, 6)
    assert model[0].weight is weight and isinstance(weight, zhooks.ShardedTensor) and weight.shape == (7, 6)
    assert torch.equal(weight.full_tensor(), torch.arange(42.0).view(7, 6))


@on_ranks(1, 2)
def test_writes_through_data_reach_the_model() -> None:
    model, plain = net(), net()
    zhooks.attach(model)
    model(torch.ones(4, 6))
    for either in (model, plain):
        either[0].weight.data.mul_(0.5)
        either[3].bias.data.copy_(torch.arange(3.0))
        either[3].weight.data.add_(either[3].weight.data, alpha=-0.5)
    assert torch.equal(model[0].weight.full_tensor(), plain[0].weight)
    assert torch.equal(model[3](torch.ones(4, 7)), plain[3](torch.ones(4, 7)))


@on_ranks(1, 2)
def test_writing_a_row_of_a_parameter_reaches_the_model() -> None:
    model, plain = net(), net()
    zhooks.attach(model)
    with torch.no_grad():
        model[0].weight[0] = plain[0].weight[0] = 1.0
        assert torch.equal(model[0].weight.full_tensor(), plain[0].weight)
        assert torch.equal(model[0](torch.ones(2, 6)), plain[0](torch.ones(2, 6)))


@on_ranks(1, 2, how=("row", "view", "turned", "diagonal"))
def test_writing_into_a_view_of_a_parameter_is_refused_and_says_how_to(how: str) -> None:
    model, plain = net(), net()
    zhooks.attach(model)
    weight = model[0].weight
    views = {
        "row": lambda: weight[0],
        "view": lambda: weight.view(-1),
        "turned": lambda: weight.t(),
        "diagonal": lambda: weight.diagonal(),
    }
    with torch.no_grad(), pytest.raises(zhooks.ShardedOpError, match=r"write.*gathered\(parameter, write=True\)"):
        views[how]().zero_()
    assert torch.equal(weight.full_tensor(), plain[0].weight)
