"""What torch's own ways to save and load find at an attached model: whole values, or a refusal by name on every rank.

pytest runs it, on one rank and on two. Checkpoints of the Attachment are test_save_load.py's and test_full_state.py's, those of
torch.distributed.checkpoint test_torch_distributed.py's.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import zhooks
from tests.support.on_ranks import folder, from_first, hooks_left, on_ranks, place
from tests.support.values import same, whole

SMALL = {"units": {"min_numel": 0}}
TIERED = {"stage": 3, "optimizer": {"tier": "host", "overlap": True}}
WHOLE = StateDictOptions(full_state_dict=True)
ON_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Job:
    """A model, attached unless ``policy`` is None, and its optimizer; every rank sees the same batches."""

    def __init__(self, policy: dict[str, Any] | None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 3))
        self.attachment = None if policy is None else zhooks.attach(self.model, policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def values(self) -> list[Tensor]:
        return [p.full_tensor() if isinstance(p, zhooks.ShardedTensor) else p.clone() for p in self.model.parameters()]


def through_a_file(value: Any, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


# ---- files


def writers(job: Job) -> dict[str, Callable[[], Any]]:
    model, optimizer = job.model, job.optimizer
    import safetensors.torch

    return {
        "the model's state dict": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "the optimizer's": lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
        "the model": lambda: torch.save(model, io.BytesIO()),
        "an older pickle": lambda: torch.save(model.state_dict(), io.BytesIO(), _use_new_zipfile_serialization=False),
        "pickle": lambda: pickle.dumps(dict(model.named_parameters())),
        "a copied state dict": lambda: pickle.dumps(copy.deepcopy(model.state_dict())),
        "safetensors": lambda: safetensors.torch.save(model.state_dict()),
        "a safetensors model": lambda: safetensors.torch.save_model(model, "nowhere"),
    }


@on_ranks(2, stage=(1, 3))
def test_a_file_of_one_ranks_ranges_is_refused_with_what_to_do_on_all_ranks_or_on_rank_0_alone(stage: int) -> None:
    job = Job({"stage": stage})
    job.train(range(1))
    for alone in (False, True):
        for name, write in writers(job).items():
            if alone and place()[0]:
                continue
            with pytest.raises(zhooks.ShardedOpError, match=r"Expected the whole tensor, found .*attachment\.save_full"):
                write()
                pytest.fail(name)
    job.train(range(1, 2))


@on_ranks(2)
def test_what_save_pretrained_writes_is_offered_for_a_model_that_has_it_alone() -> None:
    class Pretrained(nn.Sequential):
        def save_pretrained(self, folder: str) -> None: ...

    for kind in (nn.Sequential, Pretrained):
        attachment = zhooks.attach(model := kind(nn.Linear(4, 4), nn.Linear(4, 4)))
        with pytest.raises(zhooks.ShardedOpError, match=r"attachment\.save_full") as refused:
            torch.save(model.state_dict(), io.BytesIO())
        assert str(refused.value).count("save_pretrained") == (2 if kind is Pretrained else 0)
        attachment.detach()


@on_ranks(1, stage=(0, 3))
def test_at_a_world_of_one_files_are_plain_and_whole_and_the_stock_loop_resumes(stage: int) -> None:
    job, plain = Job({"stage": stage}), Job(None)
    assert job.train(range(3)) == plain.train(range(3))
    saved = through_a_file({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()})
    assert all(type(value) is Tensor for value in saved["model"].values())
    assert same(saved["model"].values(), plain.model.state_dict().values())
    whole = through_a_file(job.model, weights_only=False)
    assert all(type(param) is nn.Parameter and param.requires_grad for param in whole.parameters())
    assert same(whole.eval()(torch.ones(2, 6)), copy.deepcopy(plain.model).eval()(torch.ones(2, 6)))
    wanted = plain.train(range(3, 6))
    for policy in ({"stage": stage}, None):
        resumed = Job(policy, seed=9)
        resumed.model.load_state_dict(saved["model"])
        resumed.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        assert resumed.train(range(3, 6)) == wanted
        assert same(resumed.values(), plain.values())


@on_ranks(2)
def test_at_stage_0_every_ranks_file_is_whole() -> None:
    job, plain = Job({"stage": 0}), Job(None)
    assert job.train(range(2)) == plain.train(range(2))
    saved = through_a_file({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()})
    assert same(saved["model"].values(), plain.model.state_dict().values())
    assert torch.equal(saved["optimizer"]["state"][0]["exp_avg"], plain.optimizer.state[plain.model[0].weight]["exp_avg"])


# ---- loading


@on_ranks(1, 2, policy=({"stage": 3}, {"stage": 1}, {"stage": 0}, TIERED))
def test_plain_full_states_load_into_model_and_optimizer(policy: dict[str, Any]) -> None:
    plain = Job(None)
    plain.train(range(3))
    saved = copy.deepcopy((plain.model.state_dict(), plain.optimizer.state_dict()))
    job = Job(policy, seed=9)
    job.model.load_state_dict(saved[0])
    job.optimizer.load_state_dict(saved[1])
    assert job.train(range(3, 6)) == plain.train(range(3, 6))
    assert same(job.values(), plain.values())
    state = job.optimizer.state[job.model[0].weight]["exp_avg"]
    assert isinstance(state, zhooks.ShardedTensor)
    assert torch.equal(state.full_tensor(), plain.optimizer.state[plain.model[0].weight]["exp_avg"])
    with folder() as path:
        # Loaded into an optimizer that has stepped, and saved before a step has met what was loaded.
        job.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
        job.attachment.save(path / "run", job.optimizer)
        wanted = job.train(range(6, 8))
        job.attachment.load(path / "run", job.optimizer)
        assert job.train(range(6, 8)) == wanted


@on_ranks(2)
def test_an_optimizer_state_loaded_on_one_rank_alone_is_refused_on_all_before_the_step() -> None:
    plain, job = Job(None), Job({"stage": 3})
    plain.train(range(1))
    if place()[0] == 0:
        job.optimizer.load_state_dict(plain.optimizer.state_dict())
    before = job.values()
    for _ in range(2):
        with pytest.raises(zhooks.CheckpointError, match=r"AdamW\.step expected the same optimizer states on every rank"):
            job.train(range(1))
    assert same(job.values(), before)
    job.optimizer.load_state_dict(plain.optimizer.state_dict())
    job.train(range(1))


@on_ranks(2)
def test_a_state_dict_that_differs_by_rank_is_refused_on_all_before_anything_is_changed() -> None:
    job, plain = Job({"stage": 3}), Job(None, seed=5)
    before = job.values()
    good, last = plain.model.state_dict(), place()[0] == 1
    others = {
        "shape": {**good, "3.weight": torch.ones(3, 8)},
        "a missing name": {name: value for name, value in good.items() if name != "3.weight"},
        "dtype": {**good, "0.bias": good["0.bias"].double()},
        "nothing": {},
    }
    for name, other in others.items():
        with pytest.raises(zhooks.CheckpointError, match="every rank to load a state dict with the same names"):
            job.model.load_state_dict(other if last else good, strict=False)
        assert same(job.values(), before), name
    with pytest.raises(zhooks.CheckpointError, match="every rank to load"):
        job.model[3].load_state_dict({} if last else plain.model[3].state_dict(), strict=False)
    wrapped = nn.ModuleDict({"inner": job.model})
    with pytest.raises(zhooks.CheckpointError, match="every rank to load"):
        wrapped.load_state_dict({} if last else {f"inner.{name}": value for name, value in good.items()}, strict=False)
    assert same(job.values(), before)
    with pytest.raises(RuntimeError, match=r"size mismatch for 3\.weight"):
        job.model.load_state_dict(others["shape"])
    job.model.load_state_dict(good)
    assert same(job.values(), plain.values())


@on_ranks(1, 2)
def test_a_load_that_would_replace_parameters_is_refused() -> None:
    job, plain = Job({"stage": 3}), Job(None, seed=5)
    before, params = job.values(), list(job.model.parameters())
    with pytest.raises(zhooks.CheckpointError, match="found assign=True"):
        job.model.load_state_dict(plain.model.state_dict(), assign=True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(zhooks.CheckpointError, match="set_swap_module_params_on_conversion"):
            job.model.load_state_dict(plain.model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert same(job.values(), before) and all(one is two for one, two in zip(job.model.parameters(), params, strict=True))


@on_ranks(1)
def test_copies_and_detached_models_keep_no_hook_of_an_attachment_that_acts() -> None:
    job, other = Job({"stage": 3}), Job(None, seed=5)
    copied = copy.deepcopy(job.model)
    assert hooks_left(job.model)
    copied.load_state_dict(other.model.state_dict())
    assert same([whole(param) for param in copied.parameters()], other.model.parameters())
    assert not same(job.values(), other.values()), "a copy has values of its own"
    job.attachment.detach()
    assert not hooks_left(job.model)
    job.model.load_state_dict(other.model.state_dict(), assign=True)
    assert same(job.values(), other.values()) and all(type(param) is nn.Parameter for param in job.model.parameters())


# ---- torch.distributed.checkpoint.state_dict


@on_ranks(1, 2, stage=(1, 3))
def test_full_state_dicts_of_torchs_checkpoint_functions_are_whole(stage: int) -> None:
    job, plain = Job({"stage": stage} | SMALL), Job(None)
    job.train(range(2)), plain.train(range(2))
    states_of_plain: Any = get_optimizer_state_dict(plain.model, plain.optimizer)["state"]
    wanted: tuple[Any, Any] = get_model_state_dict(plain.model), states_of_plain
    first = place()[0] == 0
    for options, here in ((WHOLE, True), (ON_FIRST, first)):
        model = get_model_state_dict(job.model, options=options)
        states: Any = get_optimizer_state_dict(job.model, job.optimizer, options=options)
        if not here:
            assert model == {} and states == {}
            continue
        assert model.keys() == wanted[0].keys() and same(model.values(), wanted[0].values())
        assert all(type(value) is Tensor for value in model.values())
        for name, state in wanted[1].items():
            assert states["state"][name].keys() == state.keys() and same(states["state"][name].values(), state.values())
    inner = get_model_state_dict(job.model[3], options=WHOLE)
    assert same(inner.values(), plain.model[3].state_dict().values())
    wrapped: Any = get_model_state_dict(nn.ModuleDict({"inner": job.model}), options=WHOLE)
    assert torch.equal(wrapped["inner.0.weight"], wanted[0]["0.weight"])
    ranges = get_model_state_dict(job.model)
    assert isinstance(ranges["0.weight"], zhooks.ShardedTensor)
    assert isinstance(job.optimizer.state[job.model[0].weight]["exp_avg"], zhooks.ShardedTensor)
    assert job.train(range(2, 4)) == plain.train(range(2, 4))


@on_ranks(2, options=(WHOLE, FROM_FIRST))
def test_full_state_dicts_load_by_torchs_checkpoint_functions(options: StateDictOptions) -> None:
    plain = Job(None)
    plain.train(range(2))
    job = Job({"stage": 3}, seed=9)
    job.train(range(1))
    mine = options is WHOLE or options == WHOLE or place()[0] == 0
    model, states = get_model_state_dict(plain.model), get_optimizer_state_dict(plain.model, plain.optimizer)
    set_model_state_dict(job.model, copy.deepcopy(model) if mine else {}, options=options)
    set_optimizer_state_dict(job.model, job.optimizer, copy.deepcopy(states) if mine else {}, options=options)
    assert job.train(range(2, 5)) == plain.train(range(2, 5))
    assert same(job.values(), plain.values())
    from_first(None)


# ---- Accelerate and Lightning


@on_ranks(2, limit_s=120.0)
def test_accelerates_ways_to_save_and_load_are_refused_by_name_on_every_rank_or_load_whole() -> None:
    accelerate = pytest.importorskip("accelerate")
    job, plain = Job({"stage": 3}), Job(None)
    # As who trains under Accelerate without its DDP does.
    job.model._is_accelerate_prepared = True
    accelerator = accelerate.Accelerator(cpu=True)
    model, _ = accelerator.prepare(job.model, job.optimizer)
    assert job.train(range(2)) == plain.train(range(2))
    with folder() as path:
        saves = {
            "save_state": lambda: accelerator.save_state(str(path / "one")),
            "with pickle": lambda: accelerator.save_state(str(path / "two"), safe_serialization=False),
            "save_model": lambda: accelerator.save_model(model, str(path / "three")),
        }
        for name, save in saves.items():
            with pytest.raises(zhooks.ShardedOpError, match=r"Expected the whole tensor.*attachment\.save\(folder\)"):
                save()
                pytest.fail(name)
        if place()[0] == 0:
            (path / "plain").mkdir()
            torch.save(plain.model.state_dict(), path / "plain" / "pytorch_model.bin")
            torch.save(plain.optimizer.state_dict(), path / "plain" / "optimizer.bin")
        from_first(None)
        job.train(range(5, 7))
        accelerator.load_state(str(path / "plain"))
        assert job.train(range(2, 4)) == plain.train(range(2, 4))
    accelerate.state.AcceleratorState._reset_state(True)


@on_ranks(1, 2, limit_s=120.0)
def test_mixed_precision_that_accelerate_leaves_out_is_refused_before_the_first_update() -> None:
    accelerate = pytest.importorskip("accelerate")
    for policy, refused in (({"stage": 3}, True), ({"stage": 3, "precision": {"param": "bf16"}}, False)):
        job = Job(policy)
        job.model._is_accelerate_prepared = True
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        accelerator.prepare(job.model, job.optimizer)
        before = job.values()
        if refused:
            with pytest.raises(zhooks.CapabilityError, match=r'mixed_precision = "bf16".*\[precision\] param = "bf16"'):
                job.train(range(1))
            assert same(job.values(), before)
        else:
            job.train(range(1))
        accelerate.state.AcceleratorState._reset_state(True)


@on_ranks(1, 2, limit_s=120.0)
def test_lightnings_checkpoint_is_whole_at_a_world_of_one_and_refused_by_name_beyond() -> None:
    """What ModelCheckpoint writes: the module's state dict beside the optimizers', pickled into memory first."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.job = Job({"stage": 3})
            self.net = self.job.model

    module = Module()
    module.job.train(range(1))
    from lightning.fabric.utilities.cloud_io import _atomic_save

    checkpoint = {"state_dict": module.state_dict(), "optimizer_states": [module.job.optimizer.state_dict()]}
    with folder() as path:
        file = path / f"{place()[0]}.ckpt"
        if place()[1] == 1:
            _atomic_save(checkpoint, file)
            loaded = torch.load(file, weights_only=True)["state_dict"]
            assert torch.equal(loaded["net.0.weight"], module.net[0].weight.full_tensor())
        else:
            with pytest.raises(zhooks.ShardedOpError, match="Expected the whole tensor"):
                _atomic_save(checkpoint, file)
            assert not file.exists()
