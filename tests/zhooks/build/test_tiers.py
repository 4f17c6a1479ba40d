"""What a machine has for the tiers of all its ranks, however they talk to each other."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from offload.budget import Bound, Machine
from tests.support.forked import launch
from tests.support.on_ranks import on_ranks, place

#: Of 64 KiB of parameters and as much of gradients, each rank of two stores half, and of two stages all.
MODEL, HALF = (128, 128), 64 << 10


def attach(patched: pytest.MonkeyPatch, nbytes: int, transport: str = "auto", **given: object) -> None:
    """Attach on a machine of so much memory, and detach."""
    patched.setattr(Machine, "memory_bounds", lambda self, pinned=False: [Bound("made up", nbytes, "none")])
    tiers = {cell: {"tier": "host"} for cell in ("parameter", "gradient")}
    model = nn.Linear(*MODEL, bias=False)
    zhooks.attach(model, policy={**tiers, "comm": {"transport": transport}}, **given).detach()  # type: ignore[arg-type]


@on_ranks(2, transport=("shm", "p2p", "stock"))
def test_ranks_of_a_machine_share_its_memory_whatever_they_talk_over(transport: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        attach(patched, 2 * HALF, transport)
        with pytest.raises(zhooks.BudgetError, match=r"64 KiB per rank .*, 128 KiB for 2 ranks; made up leaves .*, 1 B short"):
            attach(patched, 2 * HALF - 1, transport)


@on_ranks(2, transport=("p2p", "stock"))
def test_ranks_of_two_machines_have_the_memory_of_each_for_themselves(transport: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Machine, "places", lambda self: (f"machine {place()[0]}", f"container {place()[0]}"))
        attach(patched, HALF, transport)
        with pytest.raises(zhooks.BudgetError, match=r"64 KiB per rank \(host 64 KiB\); made up leaves"):
            attach(patched, HALF - 1, transport)


@on_ranks(2)
def test_another_stage_of_a_pipeline_is_not_taken_to_hold_as_much() -> None:
    stages = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "shard"))
    with pytest.MonkeyPatch.context() as patched:
        attach(patched, 2 * HALF, mesh=stages)
        with pytest.raises(zhooks.BudgetError, match=r"128 KiB per rank \(host 128 KiB\); made up leaves"):
            attach(patched, 2 * HALF - 1, mesh=stages)


UNSET = """
import json, sys, tempfile, warnings
import torch.distributed as dist
from torch import nn
import zhooks
dist.init_process_group("gloo")
tempfile.tempdir = sys.argv[1]
heard = []
def said(begin):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        begin()
    heard.append(["tmpfs" in str(each.message) for each in found])
model = nn.Linear(8, 8)
for policy in ({}, {"optimizer": {"tier": "disk"}}, {"activation": {"tier": "disk"}},
               {"optimizer": {"tier": "disk"}, "disk": {"path": sys.argv[1]}}):
    said(lambda: zhooks.attach(model, policy=policy).detach())
attachment = zhooks.attach(model, policy={"gradient": {"tier": "host"}})
for policy in ({"gradient": {"tier": "disk"}}, {"gradient": {"tier": "host"}}):
    said(lambda: attachment.apply(policy))
attachment.detach()
print(json.dumps(heard))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_disk_tier_that_nobody_placed_and_that_is_in_memory_is_said_once(in_memory: bool, tmp_path: Path) -> None:
    if not in_memory and Machine().is_memory(tmp_path):
        pytest.skip("tests' own folders are in memory here")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else tmp_path) as folder:
        ranks = launch(2, "-c", UNSET, folder)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr
    once = [[True]] if in_memory else [[]]
    silent: list[list[bool]] = [[]]
    assert json.loads(ranks[0].stdout) == silent + once + once + silent + once + silent
    assert json.loads(ranks[1].stdout) == silent * 6
