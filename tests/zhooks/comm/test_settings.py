"""Ranks that were given other settings are told so by name, in time, before anything has changed; nothing stays behind.

pytest runs it, on two and four ranks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from tests.support.on_ranks import on_ranks, place
from tests.support.small_net import net, steps
from tests.support.values import full, same, sharded
from zhooks.cpu_transport import shared_memory

OTHERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (r"stage = 3 on rank 0 and stage = 2 on rank 1", {"stage": 3}, {"stage": 2}),
    (r"comm.timeout_s = 3.0 on rank 0 and comm.timeout_s = 60.0", {"comm": {"timeout_s": 3}}, {"comm": {"timeout_s": 60}}),
    (r"comm.transport = .shm. on rank 0 and comm.transport", {"comm": {"transport": "shm"}}, {"comm": {"transport": "p2p"}}),
    (r"comm.bucket = \d+ on rank 0", {}, {"comm": {"bucket": 1 << 20}}),
    (r"optimizer.tier = .device. on rank 0 and optimizer.tier = .host.", {}, {"optimizer": {"tier": "host"}}),
    (r"rule = \[\] on rank 0", {}, {"rule": [{"match": "0.*", "optimizer.tier": "host"}]}),
]


@on_ranks(2)
def test_a_policy_that_differs_by_rank_is_refused_by_its_key_and_changes_nothing() -> None:
    rank, _ = place()
    for found, first, second in OTHERS:
        model = net()
        with pytest.raises(zhooks.AttachError, match=f"policy. Expected the same on every rank, found {found}"):
            zhooks.attach(model, policy=second if rank else first)
        assert all(type(param) is nn.Parameter for param in model.parameters())
    zhooks.attach(net(), policy={"comm": {"timeout_s": 300}}).detach()


@on_ranks(2)
def test_what_a_machine_has_memory_for_may_differ_by_rank() -> None:
    rank, _ = place()
    mine = {"budget": {"device": f"{64 + rank} MiB"}, "disk": {"threads": 4 + rank}, "host": {"slab": f"{1 + rank} MiB"}}
    model, plain = net(), net()
    attachment = zhooks.attach(model, policy=mine)
    assert attachment.policy.values() == zhooks.Policy.of(mine).values(), "each rank keeps its own"
    for one in (model, plain):
        steps(one)
    assert same(full(model), plain.parameters())
    attachment.detach()


@on_ranks(2)
def test_other_arguments_of_attach_are_refused_by_name() -> None:
    rank, _ = place()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))
    policy = {"comm": {"timeout_s": 300}}
    with pytest.raises(zhooks.AttachError, match=r"in attach. .* sync = True on rank 0 and sync = False on rank 1"):
        zhooks.attach(net(), policy=policy, sync=rank == 0)
    with pytest.raises(zhooks.AttachError, match=r"in mesh. .* axes = shard 2 on rank 0 and axes = shard 2 x tp 1 on rank 1"):
        zhooks.attach(net(), policy=policy, mesh=mesh if rank else None)
    model = net()
    kind = torch.optim.SGD if rank else torch.optim.AdamW
    with pytest.raises(zhooks.AttachError, match=r"in optimizer. .* found type = torch.*AdamW on rank 0 and type = .*SGD on"):
        zhooks.attach(model, kind(model.parameters(), lr=0.1), policy=policy)


@on_ranks(4)
def test_stages_of_a_pipeline_have_policies_of_their_own_but_not_within_one() -> None:
    rank, _ = place()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    zhooks.attach(net(), policy={"stage": 2 + rank // 2, "comm": {"timeout_s": 300}}, mesh=mesh).detach()
    with pytest.raises(zhooks.AttachError, match=r"found stage = 3 on rank 2 and stage = 2 on rank 3"):
        zhooks.attach(net(), policy={"stage": (3, 3, 3, 2)[rank], "comm": {"timeout_s": 300}}, mesh=mesh)


# ---- a rank that is refused before it compares anything


@on_ranks(2)
def test_what_one_rank_refuses_all_refuse_at_once_and_the_next_attach_trains() -> None:
    rank, _ = place()
    attached = net()
    zhooks.attach(attached, policy={"comm": {"timeout_s": 300}})
    plain = net()
    unread = "/nowhere/policy.toml"
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    elsewhere = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3, device="meta"))
    no_tp = {"activation": {"partition": "tp", "checkpoint": "unit"}}
    stranger = torch.optim.SGD(net().parameters(), lr=0.1)
    others: list[tuple[int, type[Exception], str, nn.Module, dict[str, Any]]] = [
        (1, zhooks.PolicyError, "/nowhere/policy.toml", plain, {"policy": unread}),
        (0, zhooks.AttachError, "attached already", attached, {}),
        (1, zhooks.AttachError, "lazy parameter", lazy, {}),
        (0, zhooks.AttachError, "all parameters on one device", elsewhere, {}),
        (1, zhooks.AttachError, "to hold parameters of Sequential", plain, {"optimizer": stranger}),
        (0, zhooks.AttachError, "a DeviceMesh, e.g.", plain, {"mesh": "dp"}),
        (1, zhooks.AttachError, 'an axis named "tp" in the mesh', plain, {"policy": no_tp}),
        (0, zhooks.PolicyError, "x{1000}", plain, {"policy": Unreadable()}),
    ]
    for who, kind, said, model, given in others:
        mine = {"policy": {"comm": {"timeout_s": 300}}}
        with pytest.raises(kind) as caught:
            zhooks.attach(model if rank == who else plain, **({**mine, **given} if rank == who else mine))
        assert re.search(said, str(caught.value), re.DOTALL), (said, caught.value)
        assert str(caught.value).startswith(f"rank {who}: ") == (rank != who), caught.value
        assert len(str(caught.value)) < 3000 or rank == who
        assert all(type(param) is nn.Parameter for param in plain.parameters())
    # Each rank that has a reason of its own says that.
    with pytest.raises(zhooks.AttachError, match="^Cannot attach parameter .* lazy" if rank else "^attach .* already"):
        zhooks.attach(lazy if rank else attached)
    attachment = zhooks.attach(plain, policy={"comm": {"timeout_s": 300}})
    steps(plain)
    attachment.detach()


class Unreadable:
    """A path whose policy cannot be read, at length."""

    def __fspath__(self) -> str:
        raise zhooks.PolicyError("x" * 5000)


# ---- waiting for a rank that does not come


@pytest.mark.parametrize("kind", ["TCPStore", "FileStore", "HashStore", "PrefixStore"])
def test_a_rank_that_never_comes_is_named_whatever_the_store(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {
        "TCPStore": lambda: dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False),
        "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), 2),
        "HashStore": dist.HashStore,
        "PrefixStore": lambda: dist.PrefixStore("job", dist.FileStore(str(tmp_path / "store"), 2)),
    }[kind]()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: made)
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 0), ("get_backend", "gloo")):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    with pytest.raises(zhooks.DivergenceError, match=r"attach model 1 of its process within 0.1 s.* \(rank 1: 0\)"):
        zhooks.attach(net(), policy={"comm": {"timeout_s": 0.1}})


# ---- after attach


@on_ranks(2)
def test_optimizers_that_differ_by_rank_are_refused_at_their_first_step() -> None:
    rank, _ = place()
    others = (
        (r"type = torch\.\S*AdamW on rank 0 and type = torch\.\S*SGD on rank 1", lambda all_, kind, lr: kind(all_, lr=0.1)),
        (r"group 0 lr = 0.1 on rank 0 and group 0 lr = 0.2 on rank 1", lambda all_, kind, lr: torch.optim.SGD(all_, lr=lr)),
        (r"group 0 parameters = 4 .* and group 0 parameters = 3", lambda all_, kind, lr: torch.optim.SGD(all_[rank:], lr=0.1)),
    )
    for said, make in others:
        model = net()
        attachment = zhooks.attach(model, policy={"comm": {"timeout_s": 300}})
        optimizer = make(list(model.parameters()), torch.optim.SGD if rank else torch.optim.AdamW, 0.2 if rank else 0.1)
        before = [sharded(param).full_tensor().clone() for param in model.parameters()]
        model(torch.ones(2, 6)).sum().backward()
        with pytest.raises(zhooks.DivergenceError, match=f"optimizer. Expected the same on every rank, found {said}"):
            optimizer.step()
        assert all(torch.equal(sharded(a).full_tensor(), b) for a, b in zip(model.parameters(), before, strict=True))
        attachment.detach()


@on_ranks(2)
def test_an_optimizer_is_compared_once() -> None:
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        real = shared_memory.SharedMemory.all_reduce

        def heard(self: Any, call: Any, tensor: Any, op: str) -> None:
            calls.append(call.what)
            real(self, call, tensor, op)

        patched.setattr(shared_memory.SharedMemory, "all_reduce", heard)
        model = net()
        zhooks.attach(model, policy={"comm": {"timeout_s": 300}})
        first, second = calls.count("compare settings"), steps(model)
        assert second is None and calls.count("compare settings") == first + 1
        torch.optim.SGD(net().parameters(), lr=0.1).step()
        assert calls.count("compare settings") == first + 1, "one of another model is nobody's business"


@on_ranks(2)
def test_a_policy_applied_later_is_compared_too() -> None:
    rank, _ = place()
    model = net()
    attachment = zhooks.attach(model, policy={"stage": 3, "comm": {"timeout_s": 300}})
    with pytest.raises(zhooks.PolicyError, match=r"in policy. .* found stage = 2 on rank 0 and stage = 1 on rank 1"):
        attachment.apply({"stage": 2 - rank, "comm": {"timeout_s": 300}})
    steps(model)
    attachment.detach()
