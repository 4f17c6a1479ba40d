"""How many process groups an attachment has, when they are made, and which of them facts of the host travel by.

pytest runs it, on two and four ranks over Gloo; what a GPU's backends would do is told from what each is asked for.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from offload.policy import Policy
from tests.support.on_ranks import on_accelerators, on_ranks
from zhooks.comm import CONTROL, Call, open_comm
from zhooks.comm.stock import HOST_NBYTES, Stock
from zhooks.layout import resolve


class Counted:
    """The groups of this rank that were made while it was open, by the backend they were asked for."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.made: list[dict[str, Any]] = []
        self._real = dist.new_group
        patched.setattr(dist, "new_group", self._make)

    def _make(self, ranks: list[int], **said: Any) -> Any:
        # A backend of a GPU cannot be made here: Gloo stands for it.
        group = self._real(ranks, **{key: value for key, value in said.items() if key not in ("backend", "device_id")})
        if dist.get_rank() in ranks:
            self.made.append(said)
        return group


#: [comm] timeout_s by default, less what a roll call takes of it.
LIMIT = timedelta(seconds=Policy().comm.timeout_s - 2.0)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@on_ranks(2)
def test_ranks_of_one_host_need_no_group_and_no_step_makes_one() -> None:
    for transport, groups in (("shm", 0), ("p2p", 1), ("stock", 3)):
        with pytest.MonkeyPatch.context() as patched:
            counted, model = Counted(patched), net()
            attachment = zhooks.attach(model, policy={"comm": {"transport": transport, "timeout_s": 300}})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            assert len(counted.made) == groups, transport
            for _ in range(2):
                model(torch.ones(2, 6)).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            attachment.state_dict()
            assert len(counted.made) == groups, f"{transport}: a step made one"
            attachment.detach()


@on_ranks(4)
def test_an_axis_has_the_groups_of_the_channels_it_is_used_on() -> None:
    for names, groups in ((("replicate", "shard"), 5), (("dp", "tp"), 6), (("pp", "dp"), 4)):
        with pytest.MonkeyPatch.context() as patched:
            counted = Counted(patched)
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            before = len(counted.made)
            opened = open_comm(resolve(mesh), Policy.of({"comm": {"transport": "stock"}}), torch.device("cpu"))
            assert len(counted.made) - before == groups, names
            opened.close()


@on_ranks(2)
def test_on_a_gpu_an_axis_has_two_groups_connected_at_once_and_gloo_beside_that_of_the_control_channel() -> None:
    device = torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patched:
        counted = Counted(patched)
        patched.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
        opened = open_comm(resolve(None), Policy(), device)
        control = {"device_id": device, "timeout": LIMIT, "backend": "cpu:gloo,cuda:nccl"}
        assert counted.made == [{**control, "backend": None}, control]
        assert isinstance(opened.shard, Stock)
        facts = torch.tensor([dist.get_rank(), 1])
        # A copy to the device would raise here.
        opened.world.all_reduce(Call(CONTROL, "end of backward", "all units"), facts, "max")
        assert facts.tolist() == [1, 1]
        opened.world.broadcast(Call(CONTROL, "agree on order", "all units"), facts)
        if not torch.cuda.is_available():
            with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda|nvidia"):
                opened.world.broadcast(Call(CONTROL, "broadcast parameters", "unit"), torch.zeros(HOST_NBYTES))
        opened.close()


@on_accelerators(2)
def test_no_step_on_a_device_needs_a_third_group() -> None:
    with pytest.MonkeyPatch.context() as patched:
        counted, model = Counted(patched), net().to("accel")
        attachment = zhooks.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 6, device="accel")).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        attachment.state_dict()
        assert len(counted.made) == 2
        attachment.detach()


@on_ranks(2)
def test_the_groups_of_any_device_have_the_backend_of_its_type() -> None:
    device = torch.device("maia", 0)
    for config, registered, said in (
        ("cpu:gloo,maia:own", {}, None),
        ("maia:own", {}, "cpu:gloo,maia:own"),
        ("cpu:gloo", {"maia": "own"}, "cpu:gloo,maia:own"),
    ):
        with pytest.MonkeyPatch.context() as patched:
            counted = Counted(patched)
            patched.setattr(dist, "get_backend_config", lambda group=None, config=config: config)
            patched.setattr(dist.Backend, "default_device_backend_map", registered)
            opened = open_comm(resolve(None), Policy(), device)
            assert counted.made[-1] == {"device_id": device, "timeout": LIMIT, "backend": said}, config
            assert isinstance(opened.shard, Stock)
            opened.close()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo")
        patched.setattr(dist.Backend, "default_device_backend_map", {})
        with pytest.raises(zhooks.CapabilityError, match="to have a backend for parameters on maia, found cpu:gloo"):
            open_comm(resolve(None), Policy(), device)
