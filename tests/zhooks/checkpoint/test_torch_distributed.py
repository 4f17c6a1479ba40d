"""torch.distributed.checkpoint of attached models: saved at one world, stage and tier, loaded at any other, and beside FSDP2.

pytest runs it; what is saved at one world is loaded at others, so that the tests call pools of ranks themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import zhooks
from tests.support.matrix_optimizers import MATRIX_OPTIMIZERS, net
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.pipelines import mesh_of as pipeline_mesh
from tests.support.ranks import Pool
from tests.support.slow import slow
from tests.support.torches import not_with_2_8
from tests.support.tp_gpt import Gpt, batch, loss_of, plain_gpt
from tests.support.tp_runs import attached, mesh_of
from tests.support.values import same, whole

HERE = "tests.zhooks.checkpoint.test_torch_distributed"
Ranks = Callable[[int], Pool]
Policy = dict[str, Any] | str
FINE = {"units": {"min_numel": 0, "max_numel": 48}}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
HOST = {"parameter": {"tier": "host"}, "gradient": {"tier": "host"}, "optimizer": {"tier": "host"}}
DISK = {"parameter": {"tier": "disk"}, "gradient": {"tier": "disk"}, "optimizer": {"tier": "disk"}}
OVERLAP = {"optimizer": {"tier": "host", "overlap": True}}


@contextmanager
def by_itself() -> Iterator[bool]:
    """Whether no other rank takes part, of which torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield not dist.is_initialized()


class Net(nn.Module):
    """Tensors of 0 to 4 dims, one without elements, one that memory goes through in another order, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm, self.out = nn.BatchNorm2d(5), nn.Linear(5, 7)
        self.scale, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.norm(self.conv(x)).mean((2, 3)) * self.scale)
        return made + self.none.sum()


class Job:
    """The model, attached where ``policy`` is a dict, and its optimizer; every rank sees the same batches."""

    def __init__(self, policy: Policy, seed: int = 0, kind: str = "adamw") -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = Net() if kind == "adamw" else net()
        if seed and kind != "adamw":
            for param in self.model.parameters():
                nn.init.normal_(param)
        self.attachment = zhooks.attach(self.model, policy=FINE | policy) if isinstance(policy, dict) else None
        if policy == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model)
        make = MATRIX_OPTIMIZERS.get(kind, lambda params: torch.optim.AdamW(params, lr=0.01))
        self.optimizer = make(self.model.parameters())

    def train(self, steps: Sequence[int]) -> list[float]:
        losses = []
        for step in steps:
            shape = (2, 2, 5, 5) if isinstance(self.model, Net) else (4, 12)
            x = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def values(self) -> list[Tensor]:
        """Parameters and buffers, then every tensor among the states."""
        states = [state for param in self.optimizer.state.values() for state in param.values()]
        return [whole(value) for value in (*self.model.state_dict().values(), *states) if isinstance(value, Tensor)]

    def parts(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def load(self, path: str, options: StateDictOptions | None = None) -> None:
        parts = self.parts(options)
        with by_itself() as alone:
            dcp.load(parts, checkpoint_id=path, no_dist=alone)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"], options=options
        )


def save_job(path: str, policy: Policy, kind: str = "adamw", flat: bool = False) -> Any:
    """Three steps, a save, three steps: the losses of those, and what was saved."""
    job = Job(policy, kind=kind)
    job.train(range(3))
    with by_itself() as alone:
        dcp.save(job.parts(FLAT if flat else None), checkpoint_id=path, no_dist=alone)
    values = job.values()
    return job.train(range(3, 6)), values


def load_job(path: str, policy: Policy, kind: str = "adamw", flat: bool = False) -> Any:
    """What was loaded into a model of another seed, and the losses of three steps from there."""
    job = Job(policy, seed=9, kind=kind)
    job.load(path, FLAT if flat else None)
    values = job.values()
    return job.train(range(3, 6)), values


def check(ranks: Ranks, path: Path, first: tuple[int, Policy], others: Sequence[tuple[int, Policy]], **how: Any) -> None:
    world, policy = first
    saved = ranks(world).run(f"{HERE}:save_job", path=str(path), policy=policy, **how)[0]
    for world, policy in others:
        for losses, values in ranks(world).run(f"{HERE}:load_job", path=str(path), policy=policy, **how):
            assert losses == saved[0], (world, policy)
            assert same(values, saved[1]), (world, policy)


# ---- at another world, stage and tier


def test_what_two_ranks_save_at_stage_3_loads_at_any_stage_tier_and_world(ranks: Ranks, tmp_path: Path) -> None:
    others: list[tuple[int, Policy]] = [(2, {"stage": 3}), (1, {"stage": 3}), (2, {"stage": 1} | OVERLAP), (1, {"stage": 0})]
    others += [(2, {"stage": 3} | HOST)]
    check(ranks, tmp_path / "saved", (2, {"stage": 3}), others)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("policy", [{"stage": 0}, {"stage": 2} | OVERLAP, {"stage": 3} | DISK], ids=["0", "2host", "3disk"])
def test_what_is_saved_at_any_stage_and_tier_loads_on_two_ranks(
    ranks: Ranks, tmp_path: Path, world: int, policy: Policy
) -> None:
    check(ranks, tmp_path / "saved", (world, policy), [(2, {"stage": 3} | (DISK if world == 1 else {}))], flat=world == 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("cells", [{}, HOST, DISK, OVERLAP], ids=["device", "host", "disk", "overlap"])
def test_what_four_ranks_save_loads_on_one_two_and_four(
    ranks: Ranks, tmp_path: Path, stage: int, cells: dict[str, Any]
) -> None:
    cells = cells if stage == 3 else {name: cell for name, cell in cells.items() if name != "parameter"}
    policy = {"stage": stage} | ({} if stage == 0 else cells)
    check(ranks, tmp_path / "saved", (4, policy), [(1, {"stage": 3} | HOST), (2, {"stage": 1}), (4, {"stage": 3} | DISK)])


# ---- other models


@not_with_2_8("its fully_shard adds gradients up over Gloo, where it should average them")
def test_a_plain_model_and_fsdp2_load_what_an_attached_one_saved_and_the_other_way_round(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, tmp_path / "ours", (2, {"stage": 3}), [(1, "plain"), (2, "fsdp2")], kind="linear")
    check(ranks, tmp_path / "theirs", (2, "fsdp2"), [(2, {"stage": 3} | HOST)], kind="linear")
    check(ranks, tmp_path / "plain", (1, "plain"), [(2, {"stage": 3})])


def tp_save(path: str) -> Any:
    model, _ = attached(mesh_of(2), 3, sequence=True)
    assert isinstance(model, Gpt)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    return [whole(value) for value in model.state_dict().values()]


def tp_load(path: str, tp: int) -> Any:
    """Into a model of another seed, over another mesh; the tensors of the state dict are the model's, so that is all."""
    model: nn.Module = plain_gpt(seed=9)
    if tp == 1:
        zhooks.attach(model, policy={"stage": 3} | FINE)
    else:
        model = attached(mesh_of(tp), 1)[0]
    with torch.no_grad():
        model(batch(0)[0])
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    # What was gathered by an earlier use is stale.
    return [whole(value) for value in model.state_dict().values()], loss_of(model, *batch(0)).item()


@pytest.mark.slow
def test_what_a_dp_by_tp_mesh_saves_loads_over_other_meshes(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(4).run(f"{HERE}:tp_save", path=str(tmp_path / "saved"))[0]
    plain = plain_gpt()
    assert same(saved, plain.state_dict().values())
    for world, tp in ((2, 1), (2, 2), (4, 2)):
        for values, loss in ranks(world).run(f"{HERE}:tp_load", path=str(tmp_path / "saved"), tp=tp):
            assert same(values, saved)
            assert loss == pytest.approx(loss_of(plain, *batch(0)).item(), abs=1e-6)


# ---- whole states on their owner


@pytest.mark.slow
@pytest.mark.parametrize(
    "cells",
    [pytest.param({}, id="device"), pytest.param({"optimizer": {"tier": "host"}}, id="host")],
)
def test_states_that_one_rank_keeps_whole_go_through(ranks: Ranks, tmp_path: Path, cells: dict[str, Any]) -> None:
    policy = {"stage": 3} | cells
    for kind in ("adafactor", "muon_with_adam"):
        how: dict[str, Any] = {"path": str(tmp_path / kind), "policy": policy, "kind": kind}
        losses = ranks(2).run(f"{HERE}:save_job", **how)[0][0]
        for world in (2, 1):
            for again, _ in ranks(world).run(f"{HERE}:load_job", **how):
                assert again == losses, (kind, world)


# ---- beside training


@not_with_2_8("its async_save copies into plain tensors, which sharded ones refuse")
@on_ranks(2, policy=(*slow({"stage": 3}), {"stage": 3} | DISK, {"stage": 1} | OVERLAP))
def test_an_asynchronous_save_has_what_was_there_when_it_was_called(policy: dict[str, Any]) -> None:
    job = Job(policy)
    job.train(range(3))
    with folder() as path:
        group = dist.new_group()
        before = job.values()
        saving = dcp.async_save(job.parts(), checkpoint_id=str(path / "saved"), process_group=group)
        wanted = job.train(range(3, 6))
        saving.result()
        again = Job({"stage": 3}, seed=9)
        again.load(str(path / "saved"))
        assert same(again.values(), before)
        assert again.train(range(3, 6)) == wanted


# ---- refused


@on_ranks(2)
def test_a_rank_that_saves_by_itself_is_refused() -> None:
    """It has a range of each tensor, and torch would write that as if it were all there is."""
    job, refused = Job({"stage": 3}), r"expected all ranks to save together.*attachment\.save\(folder\)"
    groups = [dist.new_group([rank]) for rank in range(2)]
    ways: tuple[dict[str, Any], ...] = (
        {"no_dist": True}, {"process_group": groups[place()[0]]},
        *([{"use_collectives": False}] if "use_collectives" in signature(dcp.save).parameters else []),
    )  # fmt: skip
    with folder() as path, by_itself():
        for number, way in enumerate(ways):
            for state in (job.model.state_dict(), {"state": get_state_dict(job.model, job.optimizer)[1]}):
                with pytest.raises((dcp.CheckpointException, zhooks.ShardedOpError), match=refused):
                    dcp.save(state, checkpoint_id=str(path / f"{place()[0]}-{number}"), **way)
        assert not list(path.glob("*/.metadata"))
        alone = Job({"stage": 0})
        dcp.save(alone.model.state_dict(), checkpoint_id=str(path / f"alone{place()[0]}"), no_dist=True)


@on_ranks(2, tier=("device", "host"))
def test_a_rank_that_saves_states_of_owners_alone_by_itself_is_refused(tier: str) -> None:
    """Nothing in them is a range: what other ranks own would be missing, and nobody would know."""
    job = Job({"stage": 3, "optimizer": {"tier": tier}}, kind="muon_with_adam")
    job.train(range(1))
    of_one = {"state": job.optimizer.state_dict()["state"]}
    states = {"state": {name: held for name, held in of_one["state"].items() if not any_ranges(held)}}
    refusals = dcp.CheckpointException, zhooks.ShardedOpError
    with folder() as path, by_itself():
        with pytest.raises(refusals, match=r"parameter's owner holds it.*no_dist=True"):
            dcp.save(states, checkpoint_id=str(path / f"{place()[0]}"), no_dist=True)
        assert not list(path.glob("*/.metadata"))
        dist.barrier()
        dcp.save(states, checkpoint_id=str(path / "together"))


def any_ranges(held: dict[str, Any]) -> bool:
    return any(isinstance(value, zhooks.ShardedTensor) for value in held.values())


@not_with_2_8("its writer for Hugging Face keeps whole tensors only")
@on_ranks(2)
def test_a_storage_that_keeps_one_chunk_of_a_tensor_is_refused_on_every_rank() -> None:
    job = Job({"stage": 3})
    with folder() as path:
        writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)
        with pytest.raises(dcp.CheckpointException, match=r"found HuggingFaceStorageWriter.*attachment\.save_full\(file\)"):
            dcp.save(job.model.state_dict(), storage_writer=writer)


@on_ranks(2)
def test_pipeline_stages_whose_names_may_be_the_same_are_refused_on_every_rank() -> None:
    model = nn.Linear(4, 4)
    zhooks.attach(model, policy={"stage": 3}, mesh=pipeline_mesh(2, 1))
    with folder() as path:
        with pytest.raises(dcp.CheckpointException, match=r"several pipeline stages.*attachment\.save\(folder\)"):
            dcp.save(model.state_dict(), checkpoint_id=str(path / "saved"))
        assert not (path / "saved" / ".metadata").exists()


@on_ranks(2)
def test_a_checkpoint_of_another_shape_or_without_a_name_changes_nothing() -> None:
    job = Job({"stage": 3})
    before = job.values()
    with folder() as path:
        other = {name: torch.ones(value.shape) for name, value in job.model.state_dict().items()}
        for wrong in ({**other, "out.bias": torch.ones(8)}, {name: other[name] for name in other if name != "out.bias"}):
            dcp.save(wrong, checkpoint_id=str(path / str(len(wrong))))
            with pytest.raises(dcp.CheckpointException, match=r"out\.bias"):
                dcp.load(job.model.state_dict(), checkpoint_id=str(path / str(len(wrong))))
            assert same(job.values(), before)
