"""Activations on other tiers and recomputed: the same bits as plain PyTorch, the same errors, and nothing left behind.

pytest runs it, on pools of ranks where a world is named.  It never looks at where a copy lies:
tests/offload/stash/test_stash.py does.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.errors import BudgetError
from offload.events import Recorder
from tests.support.activation_nets import SEED, built, step_of
from tests.support.averaging import average_gradients
from tests.support.inside import runtime_of
from tests.support.on_ranks import on_ranks, place
from tests.support.slow import slow
from tests.support.values import same, whole
from tests.support.zoo import ZOO

LARGE = 1 << 30
#: Models that keep what others keep, and more of it.
COMMON = ("gpt", "tied", "mixture")
#: Every way to keep what backward needs; "kept" has the last part of a forward stay on the device.
WAYS: dict[str, dict[str, Any]] = {
    "host": {"tier": "host"},
    "disk": {"tier": "disk"},
    "kept": {"tier": "host", "keep": 4096},
    "all-kept": {"tier": "disk", "keep": LARGE},
    "unit": {"checkpoint": "unit"},
    "unit-host": {"checkpoint": "unit", "tier": "host"},
    "unit-disk": {"checkpoint": "unit", "tier": "disk"},
}


def policy_of(way: str, stage: int, folder: str) -> dict[str, Any]:
    """Everything is put away, however small, and every block is a unit."""
    return {
        "stage": stage,
        "units": {"min_numel": 0},
        "comm": {"timeout_s": 60},
        "activation": {"min_bytes": 0, **WAYS[way]},
        "disk": {"path": folder},
    }


def left(attachment: Any) -> int:
    """Bytes of activations that are still away."""
    gc.collect()
    stash = runtime_of(attachment).saved.stash
    return stash.flush() if stash is not None else 0


def zoo_notes(name: str, policy: dict[str, Any] | None) -> list[Tensor]:
    """Losses, gradients and the state of two steps, with dropout."""
    rank, world = place()
    specimen = ZOO[name]
    model = specimen.build(SEED)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attachment = None if policy is None else zhooks.attach(model, policy=policy)
    torch.manual_seed(SEED)
    notes = []
    for step in range(2):
        loss = specimen.loss(model, specimen.batch(step, rank, world))
        loss.backward()
        if attachment is None:
            average_gradients(model, world)
        notes.append(loss.detach().clone())
        notes += [whole(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    if attachment is not None:
        assert left(attachment) == 0
        attachment.detach()
    return notes + [value.detach().clone() for value in model.state_dict().values()]


@on_ranks(1, 2, name=(*COMMON, *slow(*sorted(ZOO.keys() - set(COMMON)))), stage=(3, 0), limit_s=120.0)
def test_training_is_bit_equal_wherever_activations_wait(name: str, stage: int) -> None:
    plain = zoo_notes(name, None)
    _, world = place()
    # What differs at world 2 is when units are gathered, not where activations wait.
    ways = tuple(WAYS) if world == 1 else ("kept", "disk", "unit-host")
    with tempfile.TemporaryDirectory() as folder:
        for way in ways:
            found = zoo_notes(name, policy_of(way, stage, folder))
            assert len(found) == len(plain), way
            assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True)), way


# ---- what autograd may do


class Broken(Exception):
    """What a test raises in the middle of a pass."""


EACH = pytest.mark.parametrize("way", WAYS)


@EACH
@pytest.mark.parametrize("stage", [3, 0])
def test_running_statistics_dropout_and_nested_inputs_are_as_in_plain_training(way: str, stage: int, tmp_path: Path) -> None:
    plain, model = built(), built()
    attachment = zhooks.attach(model, policy=policy_of(way, stage, str(tmp_path)))
    for number in range(3):
        assert same(step_of(model, number), step_of(plain, number))
    attachment.detach()
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))


@EACH
def test_a_kept_graph_may_run_three_times(way: str, tmp_path: Path) -> None:
    plain, model = built(), built()
    attachment = zhooks.attach(model, policy=policy_of(way, 3, str(tmp_path)))
    for number in range(2):
        assert same(step_of(model, number, times=3), step_of(plain, number, times=3))
    assert left(attachment) == 0
    attachment.detach()
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))


@EACH
def test_two_graphs_may_go_backward_in_either_order(way: str, tmp_path: Path) -> None:
    def notes(model: nn.Module, first: int) -> list[Tensor]:
        torch.manual_seed(3)
        losses = [model(torch.randn(5, 6)).square().mean() for _ in range(2)]
        losses[first].backward()
        losses[1 - first].backward()
        found = [whole(p.grad) for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    plain, model = built(), built()
    attachment = zhooks.attach(model, policy=policy_of(way, 3, str(tmp_path)))
    for first in (0, 1):
        assert same(notes(model, first), notes(plain, first))
    attachment.detach()


@EACH
def test_an_exception_in_mid_forward_leaves_nothing_and_the_next_step_is_right(way: str, tmp_path: Path) -> None:
    plain, model = built(), built()
    attachment = zhooks.attach(model, policy=policy_of(way, 3, str(tmp_path)))
    for net in (plain, model):
        raising = net.blocks[1].norm.register_forward_hook(raise_broken)
        torch.manual_seed(5)
        with pytest.raises(Broken):
            net(torch.randn(5, 6))
        raising.remove()
    assert left(attachment) == 0
    assert same(step_of(model, 0), step_of(plain, 0))
    attachment.detach()
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))


@EACH
def test_an_exception_in_mid_backward_leaves_nothing_and_the_next_step_is_right(way: str, tmp_path: Path) -> None:
    plain, model = built(), built()
    attachment = zhooks.attach(model, policy=policy_of(way, 3, str(tmp_path)))
    for net in (plain, model):
        torch.manual_seed(5)
        out = net(torch.randn(5, 6))
        broken = out.grad_fn.next_functions[1][0].register_prehook(raise_broken)
        with pytest.raises(Broken):
            out.square().mean().backward()
        broken.remove()
        del out, broken
        net.zero_grad()
    assert left(attachment) == 0
    assert same(step_of(model, 0), step_of(plain, 0))
    attachment.detach()


def raise_broken(*_: Any) -> None:
    raise Broken


class Writes(nn.Module):
    """Changes a tensor in place after an operator has saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x).exp()
        out = self.leave(hidden.sigmoid())
        hidden.add_(1)
        return out


@EACH
def test_a_write_after_saving_is_plain_pytorchs_error(way: str, tmp_path: Path) -> None:
    plain, model = Writes(), Writes()
    attachment = zhooks.attach(model, policy=policy_of(way, 3, str(tmp_path)))
    for net in (plain, model):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            net(torch.randn(4, 6)).sum().backward()
    attachment.detach()


@EACH
def test_evaluation_keeps_nothing_away(way: str, tmp_path: Path) -> None:
    model = built()
    attachment = zhooks.attach(model, policy=policy_of(way, 3, str(tmp_path)))
    with torch.no_grad():
        model(torch.randn(5, 6))
    assert left(attachment) == 0
    attachment.detach()


@EACH
def test_a_graph_that_is_thrown_away_leaves_nothing(way: str, tmp_path: Path) -> None:
    model = built()
    attachment = zhooks.attach(model, policy=policy_of(way, 3, str(tmp_path)))
    model(torch.randn(5, 6))
    assert left(attachment) == 0
    attachment.detach()


def test_users_own_saved_tensor_hooks_take_over(tmp_path: Path) -> None:
    model = built()
    attachment = zhooks.attach(model, policy=policy_of("host", 3, str(tmp_path)))
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor.shape) or tensor, lambda kept: kept):
        loss = model(torch.randn(5, 6)).sum()
    assert seen
    assert left(attachment) == 0
    loss.backward()
    attachment.detach()


def test_parameters_are_never_copied(tmp_path: Path) -> None:
    recorder = Recorder()
    for stage in (0, 3):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        attachment = zhooks.attach(model, policy=policy_of("host", stage, str(tmp_path)))
        with attachment.observe(recorder):
            model(torch.randn(2, 64)).sum().backward()
        attachment.detach()
    moved = [event.nbytes for event in recorder.events if event.what == "stash" and event.kind == "begin"]
    assert moved
    assert max(moved) < 64 * 64 * 4


def test_events_name_the_unit_that_ran(tmp_path: Path) -> None:
    recorder = Recorder()
    model = built()
    attachment = zhooks.attach(model, policy=policy_of("disk", 3, str(tmp_path)))
    with attachment.observe(recorder):
        step_of(model, 0)
        left(attachment)
    assert any(key.startswith("blocks.1 activation") for key, _, _ in recorder.spans("stash"))
    assert any(key.startswith("blocks.1 activation") for key, _, _ in recorder.spans("unstash"))
    attachment.detach()


def test_a_host_budget_that_is_too_small_names_the_policy_and_leaves_the_model_usable(tmp_path: Path) -> None:
    plain, model = built(), built()
    policy = policy_of("host", 3, str(tmp_path)) | {"budget": {"host": 3000}}
    attachment = zhooks.attach(model, policy=policy)
    with pytest.raises(BudgetError, match=r"\[activation\]"):
        model(torch.randn(50, 6))
    with torch.no_grad():
        for net in (model, plain):
            net.eval()
        x = torch.randn(2, 6)
        assert torch.equal(model(x), plain(x))
    attachment.detach()
