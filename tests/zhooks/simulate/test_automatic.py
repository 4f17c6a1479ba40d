"""``attach(policy="auto")``: a placement that this machine holds, the same on all ranks, under which training is the same."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from offload.budget import Bound, Machine
from offload.errors import CapabilityError
from offload.events import Recorder
from offload.text import parse_size
from tests.support.on_ranks import from_first, on_ranks, place
from tests.support.values import sharded

WIDTH = 256


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])


def trained(policy: Any, steps: int = 3) -> tuple[list[Tensor], zhooks.Attachment]:
    rank, _ = place()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attachment = zhooks.attach(model, optimizer, policy=policy)
    for number in range(steps):
        model(torch.full((4, WIDTH), 0.1 * (1 + rank + number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [sharded(param).full_tensor().clone() for param in model.parameters()], attachment


def memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """The machine has so much of it for each of two ranks."""
    monkeypatch.setattr(Machine, "memory_bounds", lambda self, pinned=False: [Bound("made up", nbytes, "none")])
    monkeypatch.setattr(Machine, "is_memory", lambda self, folder: False)


@on_ranks(1, 2)
def test_training_under_the_chosen_policy_is_plain_training_bit_for_bit() -> None:
    chosen, attachment = trained("auto")
    given, _ = trained(None)
    assert all(torch.equal(a, b) for a, b in zip(chosen, given, strict=True))
    assert 'policy = "auto" chose stage' in attachment.describe()


@on_ranks(2)
def test_without_a_package_that_chooses_it_is_refused_on_all_ranks() -> None:
    rank, _ = place()
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(import_module("zhooks.attach"), "CHOOSERS", [])
        with pytest.raises(CapabilityError, match=r"needs the package zhooks\.simulate"):
            trained("auto")


@on_ranks(2)
def test_the_least_memory_of_any_rank_chooses_for_all() -> None:
    rank, _ = place()
    with pytest.MonkeyPatch.context() as patched:
        # The model is 1 MiB, and its states as much twice: rank 1 cannot hold all that.
        memory(patched, (1 << 30) if rank == 0 else (5 << 20))
        _, attachment = trained("auto", steps=1)
        with pytest.MonkeyPatch.context() as roomy:
            memory(roomy, 1 << 30)
            _, free = trained("auto", steps=1)
    chosen = attachment.policy
    assert "disk" in (chosen.parameter.tier, chosen.optimizer.tier) and chosen.stage == 3
    assert (free.policy.parameter.tier, free.policy.optimizer.tier) == ("device", "device")
    assert from_first(chosen.values()) == chosen.values()


@on_ranks(2)
def test_what_one_rank_cannot_find_out_is_refused_on_all() -> None:
    rank, _ = place()

    def gone(self: Machine, folder: Path) -> int:
        raise zhooks.TierError("disk: gone")

    with pytest.MonkeyPatch.context() as patched:
        memory(patched, 1 << 30)
        if rank == 1:
            patched.setattr(Machine, "disk_free", gone)
        with pytest.raises(zhooks.ZhooksError, match="disk: gone"):
            zhooks.attach(net(), policy="auto")


@on_ranks(2)
def test_memory_is_divided_by_the_ranks_of_a_machine() -> None:
    rank, _ = place()
    with pytest.MonkeyPatch.context() as patched:
        memory(patched, 1 << 24)
        shared = zhooks.attach(net(), policy="auto").describe()
    with pytest.MonkeyPatch.context() as patched:
        memory(patched, 1 << 24)
        patched.setattr(Machine, "places", lambda self: (f"machine-{rank}", f"container-{rank}"))
        alone = zhooks.attach(net(), policy="auto").describe()
    with pytest.MonkeyPatch.context() as patched:
        memory(patched, 1 << 24)
        stages = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "shard"))
        beside = zhooks.attach(net(), policy="auto", mesh=stages).describe()
    within = [parse_size(re.findall(r"within ([0-9.]+ \w+) of the device", text)[0]) for text in (shared, alone, beside)]
    # Half of a rank's 8 MiB or 16, and of the model's own 1.004 MiB.
    assert within[1] - within[0] == pytest.approx(1 << 22, rel=0.01) and within[2] == within[0]


def staged(widths: tuple[int, int], policies: Any = ("auto", "auto")) -> zhooks.Attachment:
    """Attach a stage on each of two ranks, as wide as said."""
    rank, _ = place()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "shard"))
    model = nn.Sequential(*[nn.Linear(widths[rank], widths[rank]) for _ in range(4)])
    return zhooks.attach(model, torch.optim.AdamW(model.parameters()), policy=policies[rank], mesh=mesh)


@on_ranks(2)
def test_stages_of_a_pipeline_take_the_policy_that_fits_the_neediest_of_them() -> None:
    with pytest.MonkeyPatch.context() as patched:
        memory(patched, 8 << 20)
        small = staged((16, 16))
        # 1 MiB of parameters, as many gradients and twice as many states beside 16 wide ones that fit anywhere.
        mixed = staged((16, 256))
    assert small.policy.optimizer.tier == "device"
    assert mixed.policy.optimizer.tier == "disk", "on the small stage, too"
    assert from_first(mixed.policy.values()) == mixed.policy.values()
    assert "placements fit every stage" in mixed.describe()


@on_ranks(2)
def test_stages_that_none_fits_together_are_refused_with_the_most_that_one_of_them_needs() -> None:
    with pytest.MonkeyPatch.context() as patched:
        memory(patched, 1 << 10)
        with pytest.raises(zhooks.BudgetError, match=r"found none\. The least needed is device ") as caught:
            staged((16, 256))
    assert from_first(str(caught.value)) == str(caught.value)


@on_ranks(2)
def test_a_stage_with_a_policy_beside_one_without_is_refused_on_both() -> None:
    with pytest.raises(zhooks.AttachError, match="found policy = auto on rank 0 and policy = given on rank 1"):
        staged((16, 16), ("auto", None))


@on_ranks(1)
def test_where_nothing_fits_it_is_refused_with_the_least_that_would_and_the_model_is_as_it_was() -> None:
    model = net()
    before = list(model.parameters())
    with pytest.MonkeyPatch.context() as patched:
        memory(patched, 1 << 10)
        with pytest.raises(zhooks.BudgetError, match=r"found none\. The least needed is device .*; or device .* and disk"):
            zhooks.attach(model, policy="auto")
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert not isinstance(before[0], zhooks.ShardedTensor)


@on_ranks(1)
def test_an_observer_hears_why_and_another_policy_ends_that() -> None:
    _, attachment = trained("auto")
    recorder = Recorder()
    with attachment.observe(recorder):
        pass
    said = [event.key for event in recorder.events if event.what == "policy chosen"]
    assert len(said) == 1 and said[0] in attachment.describe()
    attachment.apply({"stage": 3, "schedule": {"prefetch": 2}})
    assert "auto" not in attachment.describe()


@on_ranks(2)
def test_ranks_of_which_one_alone_says_auto_are_refused() -> None:
    rank, _ = place()
    with pytest.raises(zhooks.ZhooksError, match="policy"):
        zhooks.attach(net(), policy="auto" if rank == 0 else None)


def test_another_word_is_still_the_path_of_a_file() -> None:
    with pytest.raises(zhooks.PolicyError, match=r"^automatic: no such policy file"):
        zhooks.attach(net(), policy="automatic")
    with pytest.raises(zhooks.PolicyError, match=r"^auto: no such policy file"):
        zhooks.Policy.of("auto")
