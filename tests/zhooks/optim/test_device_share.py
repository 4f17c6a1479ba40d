"""States divided over the device and a tier: any share trains the same bits, and a run goes from one to another.

pytest runs it on ranks over Gloo. Which flats stay on the device is tests/zhooks/plan/test_device_share.py's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from tests.support.inside import flats_of, stepper_of, tier_of
from tests.support.matrix_optimizers import MATRIX_OPTIMIZERS, net, train
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.plain_matrices import check_equal, check_states, plain
from tests.support.resuming import Run, stir
from tests.support.slow import slow
from tests.support.tiers import adamw, loss_of, run, step, three_steps
from tests.support.tp_runs import attached, data_place, mesh_of
from tests.support.tp_runs import train as tp_train
from tests.support.values import copies, same
from tests.support.zoo import ZOO
from zhooks.optim import tensors_in
from zhooks.optim.groups import options_kept
from zhooks.optim.overlap import Update
from zhooks.tensor import StoredTensor

CELLS = ("parameter", "gradient", "optimizer")


def policy(share: float, tier: str = "host", *, stage: int = 3, **optimizer: Any) -> dict[str, Any]:
    """All three cells on the tier, of the states a share on the device."""
    cells: dict[str, Any] = {cell: {"tier": tier} for cell in CELLS if stage in (0, 3) or cell != "parameter"}
    cells["optimizer"] = {"tier": tier, "device_share": share, **optimizer}
    return {"stage": stage, "units": {"min_numel": 0}, **cells}


def tiers_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """Where the states are."""
    states = [state for param in model.parameters() for state in optimizer.state[param].values()]
    return {tier_of(state) for state in states if isinstance(state, zhooks.ShardedTensor)}


@on_ranks(1, 2, tier=("host", "disk"), compute=("device", "host"), overlap=(False, True))
def test_any_share_has_the_bits_of_none(tier: str, compute: str, overlap: bool) -> None:
    wanted = run(three_steps("gpt"), policy(0, tier), "gpt")
    for share in (0.3, 0.7, 1):
        chosen = {**policy(share, tier, compute=compute, overlap=overlap)}
        found = run(three_steps("gpt"), chosen, "gpt")
        assert found[0] == wanted[0] and same(found[1], wanted[1])


@on_ranks(1, 2, half=(*slow(False), True))
def test_the_compiled_kernels_have_the_same_bits_on_both_sides(half: bool) -> None:
    more = {"precision": {"param": "bf16"}} if half else {}
    results = [
        run(three_steps("gpt"), {**policy(share, compute=compute, kernel="numba"), **more}, "gpt")
        for share, compute in ((0, "device"), (0.5, "device"), (0.5, "host"))
    ]
    assert all(found[0] == results[0][0] and same(found[1], results[0][1]) for found in results)


@on_ranks(1, 2, stage=(0, 1, 2, 3))
def test_states_of_both_sides_are_where_the_description_has_them(stage: int) -> None:
    model = ZOO["gpt"].build(7)
    attachment = zhooks.attach(model, policy=policy(0.5, stage=stage))
    optimizer = adamw(model)
    step(model, optimizer, 0, "gpt")
    assert tiers_of(model, optimizer) == {"device", "host"}
    for flat in flats_of(attachment):
        for param in flat.params:
            assert tier_of(optimizer.state[param]["exp_avg"]) == flat.kind.tiers.optimizer.value
    text = attachment.describe()
    near = sum(flat.layout.numel for flat in flats_of(attachment) if flat.kind.tiers.optimizer.value == "device")
    share = near / sum(flat.layout.numel for flat in flats_of(attachment))
    assert 0.2 < share <= 0.5
    assert f"[optimizer] device_share = 0.5: masters and states of {share:.1%} of the elements on the device." in text
    attachment.detach()


@on_ranks(1, 2, path=((0, 0.6, 0.2, 1), *slow((1, 0.3, 0, 0.7))), tier=("host", "disk"))
def test_a_living_model_goes_from_one_share_to_another(path: tuple[float, ...], tier: str) -> None:
    moves = False

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> list[float]:
        losses = []
        for number in range(2 * len(path)):
            if attachment is not None and moves and number % 2 == 0 and number:
                share = path[number // 2]
                attachment.apply(policy(share, tier))
                assert tiers_of(model, optimizer) == ({tier} if share == 0 else {"device"} if share == 1 else {"device", tier})
            losses.append(step(model, optimizer, number, "gpt"))
        return losses

    wanted = run(loop, policy(0), "gpt")
    moves = True
    found = run(loop, policy(path[0], tier), "gpt")
    assert found[0] == wanted[0] and same(found[1], wanted[1])


@on_ranks(1, 2, shares=((0.3, 0.7), *slow((0.7, 0), (0, 1))), half=(False, True))
def test_a_run_that_was_saved_goes_on_under_another_share(shares: tuple[float, float], half: bool) -> None:
    more = {"precision": {"param": "bf16"}} if half else {}
    with folder() as path:
        first, again = (Run({**policy(share), **more}, seed=seed) for share, seed in zip(shares, (0, 5), strict=True))
        first.train(range(2))
        first.save(path / "run")
        first.train(range(2, 4))
        stir()
        again.load(path / "run")
        for flat in flats_of(again.attachment):
            for param in flat.params:
                assert tier_of(again.optimizer.state[param]["exp_avg"]) == flat.kind.tiers.optimizer.value
        again.train(range(2, 4))
    assert again.losses == first.losses[2:] and same(again.everything(), first.everything())


@on_ranks(1, 2)
def test_full_states_and_gathered_values_are_the_plain_ones() -> None:
    model, twin = ZOO["gpt"].build(7), ZOO["gpt"].build(7)
    attachment = zhooks.attach(model, policy=policy(0.5, "disk"))
    other = zhooks.attach(twin, policy={"units": {"min_numel": 0}})
    mine, plain_one = adamw(model), adamw(twin)
    for number in range(2):
        assert step(model, mine, number, "gpt") == step(twin, plain_one, number, "gpt")
    found, wanted = attachment.state_dict(mine), other.state_dict(plain_one)
    if place()[0] == 0:
        for number, states in wanted["optimizer"]["state"].items():
            assert all(torch.equal(found["optimizer"]["state"][number][key], value) for key, value in states.items())
    with attachment.gathered(write=True) as values:
        expected = [value.clone() for value in values]
        for value in values:
            value.mul_(0.5)
    assert same(expected, [2 * value for value in copies(model.parameters())])
    attachment.load_state_dict(found, mine)
    other.load_state_dict(wanted, plain_one)
    assert step(model, mine, 2, "gpt") == step(twin, plain_one, 2, "gpt")
    assert tiers_of(model, mine) == {"device", "disk"}
    attachment.detach()
    other.detach()
    assert same(copies(model.parameters()), copies(twin.parameters()))


@on_ranks(1, 2, tier=("host", "disk"), kind=("muon", *slow("shampoo", "muon_with_adam")), compute=("device", "host"))
def test_owners_keep_whole_states_on_the_side_of_their_flat(tier: str, kind: str, compute: str) -> None:
    model = net()
    attachment = zhooks.attach(model, policy=policy(0.5, tier, compute=compute))
    optimizer = MATRIX_OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, range(4))
    expected, states = plain(kind, range(4))
    check_equal(model, expected)
    for flat in flats_of(attachment):
        side = flat.kind.tiers.optimizer.value
        for one in (one for param in flat.params for one in tensors_in(optimizer.state.get(param, {}))):
            if isinstance(one, zhooks.ShardedTensor):
                assert tier_of(one) == side
            elif one.dim():
                assert isinstance(one, StoredTensor) == (side != "device")
    attachment.detach()
    check_equal(model, expected)
    check_states(optimizer.state_dict(), states)


@on_ranks(1, 2)
def test_freezing_and_unfreezing_moves_states_between_the_two_without_changing_a_bit() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> list[Any]:
        seen: list[Any] = []
        for number in range(6):
            for param in list(model.parameters())[:2]:
                param.requires_grad_(number not in (2, 3))
            seen.append(step(model, optimizer, number))
        return seen

    wanted, found = run(loop, policy(0)), run(loop, policy(0.6))
    assert found[0] == wanted[0] and same(found[1], wanted[1])


@on_ranks(1, 2)
def test_updates_on_the_device_come_in_backward_beside_those_on_the_host() -> None:
    model = ZOO["gpt"].build(7)
    attachment = zhooks.attach(model, policy=policy(0.5, compute="host", overlap=True))
    optimizer = adamw(model)
    step(model, optimizer, 0, "gpt")
    log = zhooks.Recorder()
    attachment.observe(log)
    loss_of(model, 1, "gpt").backward()
    optimizer.step()
    names = log.names()
    end = next(number for number, name in enumerate(names) if name.startswith("end backward"))
    updated = {name.removeprefix("begin update ") for name in names[:end] if name.startswith("begin update")}
    assert updated == {flat.name for flat in flats_of(attachment)}
    attachment.detach()


@on_ranks(1, 2)
def test_an_update_on_the_device_in_backward_waits_for_none_on_the_host() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    attachment = zhooks.attach(model, policy=policy(0.7, compute="host", overlap=True))
    optimizer = torch.optim.AdamW(model.parameters())

    def backward() -> None:
        model(torch.ones(2, 8)).square().mean().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    *near, far = flats_of(attachment)
    kernel: Any = stepper_of(attachment).updater.kernel_of(far)
    update, begun, seen = kernel.update, threading.Event(), []

    def watched(optimizer: Any, job: Any, arguments: Any) -> None:
        if job.flat is far:
            seen.append(begun.wait(60))
        else:
            begun.set()
        update(optimizer, job, arguments)

    kernel.update = watched
    backward()
    kernel.update = update
    optimizer.step()
    assert seen == [True] and {flat.kind.tiers.optimizer.value for flat in near} == {"device"}
    attachment.detach()


def test_a_share_takes_no_more_room_beside_backward_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
    # Two flats of 64 KiB a tensor under way, and what backward itself has of a third; a share of 0 needs as much.
    room = {"budget": {"host": "600 KiB"}, "host": {"slab": "64 KiB"}}
    attachment = zhooks.attach(model, policy=policy(0.5, "disk", compute="host", overlap=True) | room)
    optimizer = torch.optim.AdamW(model.parameters())
    far = flats_of(attachment)[3:5]
    stepper: Any = stepper_of(attachment)
    kernel = stepper.updater.kernel_of(far[0])
    update, wait, go_on = kernel.update, Update.wait, threading.Event()

    def held(optimizer: Any, job: Any, arguments: Any) -> None:
        if job.flat in far:
            assert go_on.wait(60)
        update(optimizer, job, arguments)

    def waited(job: Update) -> None:
        if job.flat is far[-1]:
            go_on.set()
        wait(job)

    for number in range(2):
        if number:
            go_on.clear()
            monkeypatch.setattr(kernel, "update", held)
            monkeypatch.setattr(Update, "wait", waited)
        try:
            model(torch.ones(2, 128)).square().mean().backward()
        finally:
            go_on.set()
        optimizer.step()
        optimizer.zero_grad()
    attachment.detach()


class Asked:
    """A key that does something when it is asked what it is."""

    def __init__(self, does: Callable[[], None]) -> None:
        self.does = does

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        self.does()
        return object


def test_states_may_be_handed_over_by_a_thread_while_another_update_begins() -> None:
    # What stochastic rounding does beside backward: a stand-in's states for a parameter's.
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    states: Any = optimizer.state
    states[Asked(lambda: optimizer.state.update({nn.Parameter(torch.ones(1)): {}}))] = {}
    with options_kept(optimizer):
        optimizer.param_groups[0]["count"] = 1
    assert "count" not in optimizer.param_groups[0]


@on_ranks(1, 2, tier=("host", "disk"), compute=(*slow("device"), "host"))
def test_stochastic_rounding_draws_the_same_at_any_share(tier: str, compute: str) -> None:
    found = [
        run(three_steps("gpt"), policy(share, tier, compute=compute, rounding="stochastic"), build=half_of_gpt)
        for share in (0, 0.5)
    ]
    assert found[0][0] == found[1][0] and same(found[0][1], found[1][1])


def half_of_gpt() -> nn.Module:
    return ZOO["gpt"].build(7).bfloat16()


@pytest.mark.slow
@on_ranks(2)
def test_a_model_that_is_divided_over_tp_trains_the_same_at_any_share() -> None:
    losses = []
    for share in (0, 0.5):
        mesh = mesh_of(2)
        model, attachment = attached(mesh, 3, policy=policy(share))
        losses.append(tp_train(model, torch.optim.AdamW(model.parameters()), data_place(mesh), 3))
        assert share == 0 or {flat.kind.tiers.optimizer.value for flat in flats_of(attachment)} == {"device", "host"}
        attachment.detach()
    assert losses[0] == losses[1]


def test_a_share_of_what_is_on_the_device_anyway_is_refused() -> None:
    with pytest.raises(zhooks.PolicyError, match=r'\[optimizer\] device_share: found 0.3 and tier = "device"'):
        zhooks.attach(nn.Linear(2, 2), policy={"optimizer": {"device_share": 0.3}})
