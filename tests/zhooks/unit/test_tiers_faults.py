"""Tiers that refuse, fail or lie under a living attachment: an error with the block's name, and a model that goes on.

pytest runs it on one rank: a rank that raises alone is test_hooks_and_errors.py's subject.
"""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.disk import Bytes, SystemIo
from offload.tier import Tier
from tests.support.forked import start
from tests.support.inside import break_disk, disk_of, has_store, store_of
from tests.support.on_ranks import hooks_left
from tests.support.tiers import adamw, loss_of, policy, step
from tests.support.values import copies, same
from tests.support.waiting import soon
from tests.support.zoo import ZOO


class Faulty(SystemIo):
    """A disk that fails at the reads or writes that were chosen, by how many pass before."""

    def __init__(self) -> None:
        self.code = errno.EIO
        self.reads_left: int | None = None
        self.writes_left: int | None = None

    def heal(self) -> None:
        self.reads_left = self.writes_left = None

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self.reads_left = self._count(self.reads_left)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self.writes_left = self._count(self.writes_left)
        return super().pwritev(fd, buffers, offset)

    def _count(self, left: int | None) -> int | None:
        if left is None:
            return None
        if left == 0:
            raise OSError(self.code, os.strerror(self.code))
        return left - 1


def on_disk(tmp_path: Path, tier: str = "disk", **more: Any) -> dict[str, Any]:
    return policy(tier, disk={"path": str(tmp_path)}, **more)


def attached(
    tmp_path: Path, tier: str = "disk", **more: Any
) -> tuple[Any, zhooks.Attachment, torch.optim.Optimizer, Faulty]:
    """A model after its first step, everything at rest, and the disk below it."""
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=on_disk(tmp_path, tier, **more))
    optimizer = adamw(model)
    step(model, optimizer, 0)
    store_of(attachment).flush()
    faulty = Faulty()
    break_disk(store_of(attachment), faulty)
    return model, attachment, optimizer, faulty


def plainly(steps: Sequence[int]) -> tuple[list[float], list[Tensor]]:
    model = ZOO["mlp"].build(7)
    optimizer = adamw(model)
    losses = [step(model, optimizer, number) for number in steps]
    return losses, copies(model.parameters())


def values(model: nn.Module) -> list[Tensor]:
    return copies(model.parameters())


# ---- refused before anything happens --------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_budget_that_is_too_small_is_refused_before_anything_is_allocated(tmp_path: Path, tier: str) -> None:
    model, plain = ZOO["mlp"].build(7), ZOO["mlp"].build(7)
    kept = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(zhooks.BudgetError, match=rf"\[budget\] {tier} is too small. Expected memory for the para"):
        zhooks.attach(model, policy=on_disk(tmp_path, tier, budget={tier: 1000}))
    assert [param.data_ptr() for param in model.parameters()] == kept and list(tmp_path.iterdir()) == []
    assert not hooks_left(model) and same(values(model), values(plain))
    step(model, adamw(model), 0)


@pytest.mark.parametrize("nbytes", [5000, 7000])
def test_a_budget_that_what_is_there_outgrows_is_refused_by_attach(tmp_path: Path, nbytes: int) -> None:
    model, plain = ZOO["mlp"].build(7), ZOO["mlp"].build(7)
    with pytest.raises(zhooks.BudgetError, match=r"^\[budget\] host is too small. Expected memory for the para"):
        zhooks.attach(model, policy=on_disk(tmp_path, "host", budget={"host": nbytes}))
    assert not hooks_left(model) and same(values(model), values(plain)) and list(tmp_path.iterdir()) == []
    assert step(model, adamw(model), 0) == step(plain, adamw(plain), 0) and same(values(model), values(plain))


@pytest.mark.parametrize("nbytes", [9000, 12_000, 16_000])
def test_a_budget_that_states_outgrow_is_refused_before_the_step_with_the_sum_that_is_needed(
    tmp_path: Path, nbytes: int
) -> None:
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=on_disk(tmp_path, "host", budget={"host": nbytes}))
    optimizer = adamw(model)
    loss_of(model, 0).backward()
    before = values(model)
    with pytest.raises(zhooks.BudgetError, match=r"\[budget\] host.* for the states of AdamW") as refused:
        optimizer.step()
    assert not optimizer.state and same(values(model), before)
    enough = re.search(r"Raise it to ([\d.]+ KiB), or", str(refused.value))
    assert enough is not None
    # Once is enough, and nothing is left over.
    attachment.apply(on_disk(tmp_path, "host", budget={"host": enough[1]}))
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 1)
    most = store_of(attachment).budget.high_water(Tier.HOST)
    assert most == pytest.approx(float(enough[1].split()[0]) * 1024, abs=16)
    attachment.detach()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("param", [None, "bf16"])
@pytest.mark.parametrize("cells", ["disk", "states", "gradients"])
def test_host_memory_that_one_unit_passes_through_on_its_way_from_the_disk_is_in_the_sums_of_attach_and_step(
    tmp_path: Path, cells: str, param: str | None, stage: int
) -> None:
    where = {"disk": ("parameter", "gradient", "optimizer"), "states": ("optimizer",), "gradients": ("gradient",)}[cells]

    def placed(nbytes: int | str) -> dict[str, Any]:
        told: dict[str, Any] = {cell: {"tier": "disk"} for cell in where}
        told |= {"stage": stage, "units": {"min_numel": 0}, "disk": {"path": str(tmp_path)}, "budget": {"host": nbytes}}
        return told if param is None else {**told, "precision": {"param": param}}

    def enough(refused: pytest.ExceptionInfo[zhooks.BudgetError]) -> str:
        found = re.search(r"for what passes to and from the disk.* Raise it to at least ([\d.]+ KiB)", str(refused.value))
        assert found is not None, str(refused.value)
        return found[1]

    model = ZOO["mlp"].build(7)
    optimizer, before, needed = adamw(model), values(model), "0.1 KiB"
    if cells != "states" or param is not None:
        with pytest.raises(zhooks.BudgetError) as refused:
            zhooks.attach(model, policy=placed(100))
        assert not hooks_left(model) and same(values(model), before) and list(tmp_path.iterdir()) == []
        needed = enough(refused)
    attachment = zhooks.attach(model, policy=placed(needed))
    loss_of(model, 0).backward()
    if cells != "gradients":
        with pytest.raises(zhooks.BudgetError) as refused:
            optimizer.step()
        assert not optimizer.state and same(values(model), before)
        needed = enough(refused)
        attachment.apply(placed(needed))
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 1)
    most = store_of(attachment).budget.high_water(Tier.HOST)
    assert most == pytest.approx(float(needed.split()[0]) * 1024, abs=16)
    attachment.detach()


def test_states_that_cannot_be_foreseen_are_refused_where_they_are_placed_and_the_error_says_at_least(tmp_path: Path) -> None:
    class Odd(torch.optim.AdamW):
        """Built from more than its groups, so that no other can step in its stead."""

        def __init__(self, params: Any, name: str) -> None:
            super().__init__(params)
            self.name = name

    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=on_disk(tmp_path, "host", budget={"host": 12_000}))
    optimizer = Odd(model.parameters(), "odd")
    loss_of(model, 0).backward()
    with pytest.raises(zhooks.BudgetError, match=r"host tier cannot admit optimizer/exp_avg.* At least that much is lacking"):
        optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        loss_of(model, 1)
    attachment.apply(on_disk(tmp_path, "host", budget={"host": 100_000}))
    step(model, optimizer, 1)
    attachment.detach()


@pytest.mark.parametrize("nbytes", [1000, 1024])
def test_states_of_a_parameter_without_a_gradient_are_not_counted_and_the_sum_is_called_the_least(nbytes: int) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    tight = policy("device", units={"min_numel": 0}) | {"optimizer": {"tier": "host"}, "budget": {"host": nbytes}}
    attachment = zhooks.attach(model, policy=tight)
    optimizer = torch.optim.AdamW(model.parameters())
    model[:2](torch.ones(2, 8)).sum().backward()
    if nbytes == 1024:
        optimizer.step()
    else:
        least = r"states of AdamW, at least 1 KiB per rank.* Raise it to at least 1 KiB"
        with pytest.raises(zhooks.BudgetError, match=least):
            optimizer.step()
    attachment.detach()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("gradient", ["device", "host"])
def test_a_run_is_not_refused_under_a_budget_of_what_it_was_seen_to_take(gradient: str, overlap: bool) -> None:
    def trained(**budget: Any) -> int:
        """What the host held at most in three steps, of a model that does not use all of its layers in the first."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        told = {"tier": "host", "overlap": overlap}
        placed = policy("device", units={"min_numel": 0}) | {"optimizer": told, "gradient": {"tier": gradient}}
        attachment = zhooks.attach(model, policy={**placed, **budget})
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(3):
            (model if number else model[:3])(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        most = store_of(attachment).budget.high_water(Tier.HOST)
        attachment.detach()
        return most

    most = trained()
    assert trained(budget={"host": most}) == most


def test_a_budget_bounds_the_memory_and_the_file_behind_the_tiers_and_memory_says_what_is_unused(tmp_path: Path) -> None:
    mixed = on_disk(tmp_path, "host", budget={"host": "1 MiB", "disk": "2 MiB"}) | {"optimizer": {"tier": "disk"}}
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=mixed)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    store = store_of(attachment)
    store.flush()
    for _ in range(2):
        assert store.host.reserved <= 1 << 20
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= (2 << 20) + 4096
        unused = {(row.what, row.tier): row.nbytes or 0 for row in attachment.memory().rest}
        ends = {tier: unused["ends of pages", tier.value] for tier in (Tier.HOST, Tier.DISK)}
        assert all(0 < nbytes < 4096 * len(list(model.parameters())) * 8 for nbytes in ends.values())
        free = unused["free in host slabs", "host"], unused["free in scratch file", "disk"]
        assert free[0] == store.host.reserved - store.budget.used(Tier.HOST) - ends[Tier.HOST]
        assert free[1] == store.disk.reserved - store.budget.used(Tier.DISK) - ends[Tier.DISK]
        attachment.apply(mixed | {"budget": {"host": "2 MiB", "disk": "3 MiB"}})
        store.flush()
    assert (store.host.limit, store.disk.limit) == (2 << 20, 3 << 20)
    attachment.detach()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_attach_is_refused_where_no_thread_can_be_started(
    tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    model, plain = ZOO["mlp"].build(7), ZOO["mlp"].build(7)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(zhooks.CapabilityError, match=r"cannot start thread .*ulimit -u"):
        zhooks.attach(model, policy=on_disk(tmp_path, tier))
    monkeypatch.undo()
    assert not hooks_left(model) and same(values(model), values(plain)) and list(tmp_path.iterdir()) == []
    step(model, adamw(model), 0)


@pytest.mark.parametrize("path", ["file", "dead"])
def test_a_folder_that_cannot_be_used_is_refused_and_the_model_is_as_it_was(tmp_path: Path, path: str) -> None:
    place = tmp_path / "file"
    place.write_text("mine")
    chosen = place if path == "file" else place / "below"
    model = ZOO["mlp"].build(7)
    with pytest.raises(zhooks.PolicyError, match=r"as \[disk\] path. Expected a folder"):
        zhooks.attach(model, policy=on_disk(chosen))
    assert not hooks_left(model) and place.read_text() == "mine"
    assert same(values(model), values(ZOO["mlp"].build(7)))
    step(model, adamw(model), 0)


@pytest.mark.parametrize("left", range(4))
def test_a_disk_that_fails_during_attach_leaves_the_plain_model(
    tmp_path: Path, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = Faulty()
    # attach opens its own file: its seam is reached through the name that offload.disk looks up.
    monkeypatch.setattr("offload.disk.disk_tier.SystemIo", lambda: faulty)
    model = ZOO["mlp"].build(7)
    faulty.writes_left = left
    attachment = None
    with pytest.raises(zhooks.TierError, match=r"^disk tier cannot (open|write parameter/).*EIO"):
        attachment = zhooks.attach(model, policy=on_disk(tmp_path))
        # The write-backs of attach itself were still under way: whoever waits next hears of them.
        store_of(attachment).flush()
    faulty.heal()
    if attachment is not None:
        with suppress(zhooks.TierError):
            store_of(attachment).flush()
        attachment.detach()
    assert not hooks_left(model) and list(tmp_path.iterdir()) == []
    assert same(values(model), values(ZOO["mlp"].build(7)))
    step(model, adamw(model), 0)


# ---- during training ------------------------------------------------------------------------------------------------


def test_a_forward_reads_nothing_from_disk_where_parameters_are_on_the_host(tmp_path: Path) -> None:
    model, attachment, optimizer, faulty = attached(tmp_path, "mixed")
    faulty.reads_left = 0
    for _ in range(3):
        loss_of(model, 1)
    faulty.heal()
    assert step(model, optimizer, 1) == plainly(range(2))[0][1]
    attachment.detach()


@pytest.mark.parametrize("left", range(6))
def test_a_read_that_fails_in_forward_names_the_parameter_and_the_next_forward_is_right(tmp_path: Path, left: int) -> None:
    model, attachment, optimizer, faulty = attached(tmp_path)
    faulty.reads_left = left
    failed = 0
    for _ in range(3):
        try:
            loss_of(model, 1)
        except zhooks.TierError as error:
            failed += 1
            assert "cannot read parameter/" in str(error) and "EIO" in str(error)
    assert failed
    faulty.heal()
    losses = [step(model, optimizer, number) for number in (1, 2)]
    wanted = plainly(range(3))
    assert losses == wanted[0][1:] and same(values(model), wanted[1])
    attachment.detach()


@pytest.mark.parametrize("where", ["use", "sum"])
def test_a_read_that_fails_outside_a_forward_leaves_no_half_filled_values(tmp_path: Path, where: str) -> None:
    model, attachment, _, faulty = attached(tmp_path)
    wanted = plainly(range(1))[1]
    param = model[4].weight
    faulty.reads_left = 0
    for _ in range(2):
        with pytest.raises(zhooks.TierError, match="cannot read parameter/"), torch.no_grad():
            _ = param @ param.t() if where == "use" else param.sum()
    faulty.heal()
    with torch.no_grad():
        assert torch.equal(param @ param.t(), wanted[-2] @ wanted[-2].t())
    attachment.detach()


@pytest.mark.parametrize(
    ("verb", "left"), [*(("reads_left", left) for left in range(3)), *(("writes_left", left) for left in range(5))]
)
def test_a_disk_that_fails_in_backward_raises_and_the_step_repeated_from_zero_is_right(
    tmp_path: Path, verb: str, left: int
) -> None:
    model, attachment, optimizer, faulty = attached(tmp_path)
    loss = loss_of(model, 1)
    setattr(faulty, verb, left)
    with pytest.raises(zhooks.TierError, match="cannot read parameter/" if verb == "reads_left" else "cannot write gradient/"):
        loss.backward()
        store_of(attachment).flush()
    faulty.heal()
    del loss
    # Another write that had failed before may be what the end of that backward finds.
    with suppress(zhooks.TierError):
        optimizer.zero_grad()
    optimizer.zero_grad()
    _go_on(model, optimizer)
    wanted = plainly(range(3))
    assert same(values(model), wanted[1])
    attachment.detach()


def _go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Steps 1 and 2; errors of writes that had failed before may surface once, before anything is updated."""
    for number in (1, 2):
        for _ in range(4):
            try:
                loss = loss_of(model, number)
                loss.backward()
                break
            except zhooks.TierError:
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("left", range(0, 16, 3))
def test_a_read_that_fails_in_the_optimizer_says_how_far_it_had_come(tmp_path: Path, left: int) -> None:
    model, attachment, optimizer, faulty = attached(tmp_path)
    before, wanted = values(model), plainly(range(2))[1]
    loss_of(model, 1).backward()
    store_of(attachment).flush()
    faulty.reads_left = left
    with pytest.raises(zhooks.TierError, match=r"cannot read (parameter|gradient|optimizer)/.*EIO") as caught:
        optimizer.step()
    faulty.heal()
    found = values(model)
    params = list(model.parameters())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in params]
    updated = [index for index in range(len(params)) if not torch.equal(found[index], before[index])]
    # A unit here is a Linear: weight and bias. What was updated is what the whole step would have made of it.
    assert len(updated) % 2 == 0 and all(torch.equal(found[index], wanted[index]) for index in updated)
    told = re.findall(r"(\d) of 5 units had been updated in this step", str(caught.value))
    assert told == ([str(len(updated) // 2)] if updated else []) and bool(updated) == (left > 3)
    optimizer.zero_grad()
    step(model, optimizer, 2)
    attachment.detach()


@pytest.mark.parametrize("left", [0, 1, 5, 14])
def test_a_write_that_fails_in_the_optimizer_loses_no_value(tmp_path: Path, left: int) -> None:
    """They fail in the step or, those of its last units, after it: the next entry raises, and all is still there."""
    model, attachment, optimizer, faulty = attached(tmp_path)
    store = store_of(attachment)
    store.staging_limit = 1 << 30
    before, wanted = values(model), plainly(range(2))[1]
    loss_of(model, 1).backward()
    store.flush()
    faulty.code, faulty.writes_left = errno.ENOSPC, left
    returned = False
    with pytest.raises(zhooks.TierError, match=r"cannot write (parameter|optimizer)/.*ENOSPC"):
        optimizer.step()
        returned = True
        store.flush()
    with suppress(zhooks.TierError):
        # What else was under way when the step raised.
        store.flush()
    faulty.heal()
    store.flush()
    optimizer.zero_grad()
    # A unit is a weight and a bias. Each has all of its update, or nothing of it.
    updated = [not torch.equal(now, then) for now, then in zip(values(model), before, strict=True)]
    assert updated[::2] == updated[1::2] and (all(updated) or not returned)
    assert same(values(model), [new if done else old for new, old, done in zip(wanted, before, updated, strict=True)])
    if returned:
        assert step(model, optimizer, 2) == plainly(range(3))[0][2]
    attachment.detach()


def test_a_save_has_what_could_not_be_written_back_and_reads_the_rest_from_disk(tmp_path: Path) -> None:
    model, attachment, optimizer, faulty = attached(tmp_path / "scratch")
    first, *between, last = model.parameters()
    wanted = [2 * copies([first])[0], *copies([*between, last])]
    averages = [*copies(optimizer.state[param]["exp_avg"] for param in (first, *between)),
                3 * copies([optimizer.state[last]["exp_avg"]])[0]]  # fmt: skip
    faulty.writes_left = 0
    with torch.no_grad():
        first.mul_(2)
        optimizer.state[last]["exp_avg"].mul_(3)
    with pytest.raises(zhooks.TierError, match="cannot write"):
        store_of(attachment).flush()
    attachment.save(tmp_path / "run", optimizer)
    faulty.heal()
    store_of(attachment).flush()
    assert same(values(model), wanted)
    other = ZOO["mlp"].build(8)
    loaded = zhooks.attach(other, policy=on_disk(tmp_path / "other"))
    stepped = adamw(other)
    loaded.load(tmp_path / "run", stepped)
    assert same(values(other), wanted)
    assert same(copies(stepped.state[param]["exp_avg"] for param in other.parameters()), averages)
    loaded.detach()
    attachment.detach()


@pytest.mark.parametrize("damage", ["bit", "cut"])
def test_a_scratch_file_that_was_altered_between_steps_is_noticed_and_names_what_was_lost(tmp_path: Path, damage: str) -> None:
    model, attachment, optimizer, _ = attached(tmp_path)
    store = store_of(attachment)
    if damage == "cut":
        os.truncate(store.disk.path, 8192)
    else:
        whole = bytearray(store.disk.path.read_bytes()[4096:])
        with store.disk.path.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(byte ^ 1 for byte in whole))
    with pytest.raises(zhooks.TierError, match=r"cannot read parameter/.*the block is lost"):
        step(model, optimizer, 1)
    with pytest.raises(zhooks.TierError, match=r"cannot read .*/.*the block is lost"):
        optimizer.step() if damage == "cut" else attachment.state_dict(optimizer)
        attachment.state_dict(optimizer)
    fresh = {name: value.clone() for name, value in ZOO["mlp"].build(7).state_dict().items()}
    attachment.load_state_dict({"model": fresh})
    again = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = ZOO["mlp"].build(7)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    optimizer.zero_grad()
    assert [step(model, again, n) for n in range(2)] == [step(twin, plain, n) for n in range(2)]


def test_a_folder_that_vanishes_does_not_disturb_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=on_disk(folder))
    optimizer = adamw(model)
    step(model, optimizer, 0)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    losses = [step(model, optimizer, number) for number in (1, 2)]
    wanted = plainly(range(3))
    assert losses == wanted[0][1:] and same(values(model), wanted[1])
    attachment.detach()
    assert same(values(model), wanted[1])


# ---- the end --------------------------------------------------------------------------------------------------------

KILLED = """
import sys, time, torch, zhooks
from pathlib import Path
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
attachment = zhooks.attach(model, policy={"parameter": {"tier": "disk"}, "disk": {"path": sys.argv[1]}})
model(torch.ones(1, 64)).sum().backward()
Path(sys.argv[2]).touch()
time.sleep(600)
"""


def test_a_killed_process_leaves_a_stale_file_that_the_next_attach_removes(tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path, ready = tmp_path_factory.mktemp("scratch"), tmp_path_factory.mktemp("told") / "ready"
    child = start("-c", KILLED, str(tmp_path), str(ready))
    assert soon(ready.exists)
    (stale,) = tmp_path.iterdir()
    assert stale.name.startswith("zhooks-r0-") and stale.stat().st_mode & 0o777 == 0o600
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=on_disk(tmp_path))
    assert stale.exists(), "its process lives"
    attachment.detach()
    child.kill()
    assert list(tmp_path.iterdir()) == [stale]
    attachment = zhooks.attach(model, policy=on_disk(tmp_path))
    assert not stale.exists()
    attachment.detach()
    assert list(tmp_path.iterdir()) == []


def test_an_attachment_that_nobody_keeps_takes_its_file_along(tmp_path: Path) -> None:
    model = ZOO["mlp"].build(7)
    zhooks.attach(model, policy=on_disk(tmp_path))
    optimizer = adamw(model)
    step(model, optimizer, 0)
    assert len(list(tmp_path.iterdir())) == 1
    del model, optimizer
    gc.collect()
    assert soon(lambda: list(tmp_path.iterdir()) == []), "once the last write is over"


# ---- memory ---------------------------------------------------------------------------------------------------------

STEADY: dict[str, dict[str, Any]] = {
    "device": policy("device"),
    "disk": policy("disk"),
    "host, updated early": policy("host", optimizer={"tier": "host", "overlap": True}),
    "activations away": {**policy("disk"), "activation": {"tier": "host", "min_bytes": 0}},
    "loss scale": {**policy("host"), "precision": {"param": "bf16", "loss_scale": "dynamic"}},
}


def objects() -> Counter[str]:
    """Everything Python keeps that could hold something else, by type."""
    gc.collect()
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


@pytest.mark.parametrize("name", STEADY)
def test_nothing_of_a_step_outlives_it(tmp_path: Path, name: str) -> None:
    """Not an object, a thread, a byte of any tier or a range of the scratch file more after ten steps than before."""
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy={**STEADY[name], "disk": {"path": str(tmp_path)}})
    optimizer = adamw(model)
    numbers = itertools.count()

    def steps(count: int) -> tuple[Counter[str], dict[str, Any]]:
        for _ in range(count):
            step(model, optimizer, next(numbers))
        held: dict[str, Any] = {"threads": threading.active_count()}
        if has_store(attachment):
            store = store_of(attachment)
            store.flush()
            held |= {f"bytes on {tier.value}": store.budget.used(tier) for tier in Tier}
            held |= {"host memory taken": store.host.used, "staging": store.staged}
            if list(tmp_path.iterdir()):
                held["scratch file taken"] = disk_of(store).used
        return objects(), held

    steps(4)
    (before, held_before), (after, held_after) = steps(2), steps(10)
    assert held_after == held_before
    assert {kind: count for kind, count in (after - before).items() if count >= 10} == {}
    attachment.detach()


GROWTH = """
import json, pathlib, re, sys, time
import psutil, torch, zhooks
from offload.disk import SystemIo
from tests.support.forked import start
from tests.support.inside import has_store, store_of
from torch import nn

tier, folder = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
process = psutil.Process()
layers, width = 40, 512
warm = nn.Linear(width, width)
warm(torch.ones(2, width)).sum().backward()
torch.optim.AdamW(warm.parameters()).step()
before = process.memory_info().rss
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
cells = {cell: {"tier": tier} for cell in ("parameter", "gradient", "optimizer")}
policy = {"units": {"min_numel": 0}, "disk": {"path": folder}, **cells}
attachment = zhooks.attach(model, policy=policy, init=lambda module: getattr(module, "reset_parameters", lambda: None)())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
pwritev, marks, losses = SystemIo.pwritev, [], []
def late(self, *arguments):
    time.sleep(0.03)
    return pwritev(self, *arguments)
for step in range(50 if tier == "disk" else 5):
    # A disk that is busy with something else from here on: more writes are under way at once.
    SystemIo.pwritev = late if step >= 30 else pwritev
    loss = model(torch.ones(2, width)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    # Pages that writes under way have touched stay: as many as there ever were at once, which is the disk's pace.
    touched = store_of(attachment).host.high_water if has_store(attachment) else 0
    marks.append(process.memory_info().rss - before - touched)
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024 - before
print(json.dumps({"peak": peak, "marks": marks, "losses": losses}))
"""


def grown(tier: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, tier, str(folder)], capture_output=True, text=True, check=True, timeout=300
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_model_larger_than_its_memory_trains_on_disk_with_flat_residency(tmp_path: Path) -> None:
    """40 layers of 1 MiB: 160 MiB of parameters, gradients and Adam states, of which a few layers are ever in memory."""
    total = 40 * (512 * 512 + 512) * 16
    there, away = grown("device", tmp_path), grown("disk", tmp_path)
    assert away["losses"][:5] == there["losses"]
    assert there["peak"] > 0.75 * total
    assert away["peak"] < 0.5 * total, f"{away['peak'] >> 20} MiB of {total >> 20} MiB"
    marks = away["marks"][9:]
    # One twentieth of the model: on a machine with more threads than cores the allocator once takes up to 5 MiB more.
    assert max(marks) - marks[0] < total // 20, [mark >> 20 for mark in away["marks"]]
    assert list(tmp_path.iterdir()) == []
