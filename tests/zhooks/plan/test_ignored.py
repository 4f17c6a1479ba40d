"""What ``[units] ignore`` leaves as it is: plain, not reduced, in every checkpoint, counted; refused where that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import folder, hooks_left, on_ranks, place
from tests.support.values import same, whole

IGNORE: dict[str, Any] = {"units": {"ignore": ["body.1", "scale"], "min_numel": 0}}


class Net(nn.Module):
    """Two blocks and a parameter of its own; ``body.1`` and ``scale`` are what is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.body: Any = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def left(model: Net) -> list[nn.Parameter]:
    return [*model.body[1].parameters(), model.scale]


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range, *, reduce: bool = False) -> None:
    rank, world = place()
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        for param in left(model) if reduce else ():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= world
        optimizer.step()


@on_ranks(1, 2, stage=(0, 1, 3), checkpoint=("none", "unit"))
def test_a_model_with_ignored_parameters_trains_as_under_data_parallelism_once_they_are_reduced(
    stage: int, checkpoint: str
) -> None:
    world = place()[1]
    model, plain = net(), net()
    policy = {**IGNORE, "stage": stage, "activation": {"checkpoint": checkpoint}}
    attachment = zhooks.attach(model, policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        reference.zero_grad()
        for rank in range(world):
            plain(batch(step, rank)).square().mean().div(world).backward()
        reference.step()
    train(model, optimizer, range(3), reduce=world > 1)
    assert all(type(param) is nn.Parameter for param in left(model))
    assert all(isinstance(model.body[at].weight, zhooks.ShardedTensor) for at in (0, 2))
    torch.testing.assert_close([whole(param) for param in model.parameters()], list(plain.parameters()))
    attachment.detach()
    assert hooks_left(model) == []
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))


@on_ranks(2)
def test_gradients_and_values_of_what_is_ignored_stay_each_ranks_own() -> None:
    rank, _ = place()
    model = net(seed=rank)
    kept = model.scale.detach().fill_(rank + 1.0).clone()
    buffer = model.body[1][1].running_mean
    buffer.fill_(float(rank))
    zhooks.attach(model, policy=IGNORE)
    assert torch.equal(model.scale, kept) and buffer.tolist() == [float(rank)] * 8
    assert same([model.body[0].weight], [net(seed=0).body[0].weight]), "what is attached is rank 0's"
    model(batch(0, rank)).square().mean().backward()
    grads = [torch.empty(6) for _ in range(2)]
    assert model.scale.grad is not None
    dist.all_gather(grads, model.scale.grad)
    assert not torch.equal(*grads)


@on_ranks(1, 2, stage=(1, 3))
def test_a_checkpoint_holds_ignored_values_gradients_and_states_of_every_rank(stage: int) -> None:
    rank, _ = place()
    model, optimizer = _trained(stage)
    attachment, policy = model.attachment, {**IGNORE, "stage": stage}
    model(batch(7, rank)).square().mean().backward()
    with folder() as path:
        attachment.save(path / "checkpoint", optimizer)
        train(model, optimizer, range(2, 4))
        attachment.load(path / "checkpoint", optimizer)
        other = net(seed=9)
        second = zhooks.attach(other, policy=policy)
        fresh = torch.optim.Adam(other.parameters(), lr=0.01)
        second.load(path / "checkpoint", fresh)
    for found, made in ((model, optimizer), (other, fresh)):
        expected, by = _trained(stage)
        expected(batch(7, rank)).square().mean().backward()
        for mine, wanted in zip(left(found), left(expected), strict=True):
            assert torch.equal(mine, wanted)
            assert mine.grad is not None and wanted.grad is not None and torch.equal(mine.grad, wanted.grad)
            assert torch.equal(made.state[mine]["exp_avg"], by.state[wanted]["exp_avg"])
        assert torch.equal(found.body[1][1].running_mean, expected.body[1][1].running_mean)
        assert same(found.parameters(), map(whole, expected.parameters()))


def _trained(stage: int) -> tuple[Any, torch.optim.Optimizer]:
    """Two steps in which ranks go their own ways in what is ignored."""
    model: Any = net()
    model.attachment = zhooks.attach(model, policy={**IGNORE, "stage": stage})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    return model, optimizer


@on_ranks(1, 2)
def test_full_states_hold_what_is_ignored_and_load_into_the_plain_model_and_back() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=IGNORE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    state = attachment.state_dict(optimizer)
    with folder() as path:
        attachment.save_full(path / "model.safetensors")
        written = _read(path / "model.safetensors")
    plain, expected = net(seed=1), {name: whole(value) for name, value in model.state_dict().items()}
    other = net(seed=2)
    second = zhooks.attach(other, policy=IGNORE)
    fresh = torch.optim.Adam(other.parameters(), lr=0.01)
    second.load_state_dict(state, fresh)
    assert same(other.state_dict().values(), expected.values())
    assert torch.equal(fresh.state[other.scale]["exp_avg"], optimizer.state[model.scale]["exp_avg"])
    assert written.keys() == expected.keys() and all(torch.equal(written[name], expected[name]) for name in expected)
    if place()[0] == 0:
        plain.load_state_dict(state["model"])
        assert same(plain.state_dict().values(), expected.values())
        torch.optim.Adam(plain.parameters()).load_state_dict(state["optimizer"])


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@on_ranks(2, verb=("state_dict", "save_full"))
def test_a_full_state_of_ranks_that_differ_in_what_is_ignored_is_refused_by_name(verb: str) -> None:
    model, optimizer = _trained(3)
    with folder() as path, pytest.raises(zhooks.CheckpointError, match=r"same on every rank.*found other values of body\.1\.0"):
        if verb == "state_dict":
            model.attachment.state_dict(optimizer)
        else:
            model.attachment.save_full(path / "model.safetensors")


@on_ranks(2)
def test_an_optimizer_of_ignored_parameters_alone_must_be_named_where_all_are_meant() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=IGNORE)
    ours = torch.optim.Adam([param for param in model.parameters() if isinstance(param, zhooks.ShardedTensor)], lr=0.01)
    own = torch.optim.SGD(left(model), lr=0.1, momentum=0.9)
    model(batch(0)).square().mean().backward()
    ours.step()
    own.step()
    with folder() as path:
        with pytest.raises(zhooks.CheckpointError, match=r"found SGD with parameters that are in \[units\] ignore"):
            attachment.save(path / "checkpoint")
        attachment.save(path / "checkpoint", [ours, own])
        kept = own.state[model.scale]["momentum_buffer"].clone()
        own.state[model.scale]["momentum_buffer"].zero_()
        attachment.load(path / "checkpoint", [ours, own])
    assert torch.equal(own.state[model.scale]["momentum_buffer"], kept)


@on_ranks(1, 2)
def test_gathered_shows_what_is_ignored_and_refuses_to_write_it() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=IGNORE)
    with attachment.gathered() as values:
        assert same(values, net().parameters())
    refused = pytest.raises(zhooks.CheckpointError, match="expected attached parameters, found scale")
    with refused, attachment.gathered(model.scale, write=True):
        pass


@on_ranks(2)
def test_memory_counts_what_is_ignored_and_describe_names_it() -> None:
    model, optimizer = _trained(3)
    numel = sum(param.numel() for param in left(model))
    held = model.attachment.memory().transient
    assert held["ignored parameters"] == 4 * numel
    assert held["ignored states"] == sum(
        state.nbytes for param in left(model) for state in optimizer.state[param].values()
    )
    assert "ignored gradients" not in held, "set to None"
    assert f"Ignored, and not reduced: 5 parameters, {numel} elements (scale, body.1.0.weight" in model.attachment.describe()


@on_ranks(2)
def test_the_device_budget_counts_what_is_ignored() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "big": nn.Linear(1024, 256)})
    with pytest.raises(zhooks.BudgetError, match="found 1 MiB"):
        zhooks.attach(model, policy={"units": {"ignore": ["big"]}, "budget": {"device": "1 MiB"}})


@on_ranks(2)
def test_modules_and_parameters_that_are_added_below_an_ignored_module_are_nobodys_business() -> None:
    model = net()
    zhooks.attach(model, policy=IGNORE)
    model.body[1].add_module("adapter", nn.Linear(8, 8))
    model(batch(0)).sum().backward()
    model.body[0].adapter = nn.Parameter(torch.ones(1))
    with pytest.raises(zhooks.AttachError, match=r"Parameter body\.0\.adapter"):
        model(batch(0))


@on_ranks(2)
def test_an_ignored_module_may_have_sparse_gradients_and_its_own_data_parallelism() -> None:
    rank, _ = place()

    class Ranking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.head: nn.Module = nn.Linear(4, 4)
            self.top = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.top(self.head(self.table(x)))

    torch.manual_seed(0)
    model = Ranking()
    model.head = nn.parallel.DistributedDataParallel(model.head)
    zhooks.attach(model, policy={"units": {"ignore": ["table", "head"]}})
    model(torch.tensor([rank])).sum().backward()
    assert model.table.weight.grad is not None and model.table.weight.grad.layout is torch.sparse_coo
    mine = next(model.head.parameters()).grad
    assert mine is not None
    grads = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(grads, mine)
    assert torch.equal(*grads), "DistributedDataParallel reduces what attach ignores"


@on_ranks(2)
def test_a_parameter_is_ignored_everywhere_if_one_of_its_names_is() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "mid": nn.Linear(4, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    zhooks.attach(model, policy={"units": {"ignore": ["head"]}})
    assert type(model["embed"].weight) is nn.Parameter and model["embed"].weight is model["head"].weight
    assert isinstance(model["mid"].weight, zhooks.ShardedTensor)


@pytest.mark.parametrize(
    ("model", "policy", "message"),
    [
        (net, {"units": {"ignore": ["body.7"]}}, r"\[units\] ignore needs body\.7 to match a module or a parameter"),
        (net, {"units": {"ignore": ["*"]}}, r"expected Net to have parameters, found that \[units\] ignore names all"),
        (net, {**IGNORE, "precision": {"loss_scale": "dynamic"}}, r"no trainable parameters in \[units\] ignore"),
        (lambda: _on_meta(), IGNORE, r"expected scale to have memory, found it on meta"),
        (lambda: _half_on_meta(), {"units": {"ignore": ["bias"]}}, r"module \(root\) to be on meta or ignored"),
    ],
)
def test_what_cannot_be_ignored_is_refused_before_anything_changed(model: Any, policy: dict[str, Any], message: str) -> None:
    made = model()
    before = list(made.parameters())
    with pytest.raises(zhooks.AttachError, match=message):
        zhooks.attach(made, policy=policy)
    assert all(type(param) is nn.Parameter for param in made.parameters())
    assert all(a is b for a, b in zip(made.parameters(), before, strict=True)) and hooks_left(made) == []


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def _half_on_meta() -> nn.Module:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model.bias = nn.Parameter(torch.ones(4))
    return model


@on_ranks(2)
def test_ranks_that_ignore_different_parameters_are_refused() -> None:
    rank, _ = place()
    with pytest.raises(zhooks.AttachError, match=r"found units\.ignore"):
        zhooks.attach(net(), policy={"units": {"ignore": ["scale"] if rank else ["body.1"]}})


@on_ranks(2)
def test_one_clip_over_attached_and_ignored_gradients_is_right_where_ranks_agree_and_refused_where_they_do_not() -> None:
    rank, _ = place()
    model, plain = net(), net()
    zhooks.attach(model, policy=IGNORE)
    model(batch(0)).square().mean().backward()
    plain(batch(0)).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    torch.testing.assert_close(whole(model.body[0].weight.grad), plain.body[0].weight.grad)
    model.zero_grad()
    model(batch(0, rank)).square().mean().backward()
    with pytest.raises(zhooks.ShardedOpError, match=r"Expected the others to be the same on every rank"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def test_names_to_ignore_are_those_without_the_wrappers_of_compiled_modules(tmp_path: Path) -> None:
    model, plain = net(), net()
    model.body[1] = torch.compile(model.body[1], backend="eager")
    compiled: Any = torch.compile(model, backend="eager")
    attachment = zhooks.attach(compiled, policy=IGNORE)
    assert attachment.model is model
    assert all(type(param) is nn.Parameter for param in left(model))
    attachment.save(tmp_path / "saved", optimizer=())
    with torch.no_grad():
        for param in left(model):
            param.zero_()
    attachment.load(tmp_path / "saved", optimizer=())
    assert {name: value.tolist() for name, value in attachment.state_dict()["model"].items()} == {
        name: value.tolist() for name, value in plain.state_dict().items()
    }


@on_ranks(2)
def test_an_overflow_in_an_ignored_gradient_of_one_rank_skips_the_step_of_all() -> None:
    rank, _ = place()
    model = net()
    zhooks.attach(model, policy=IGNORE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = [whole(param) for param in model.parameters()]
    scaler.scale(model(batch(0)).square().mean()).backward()
    if rank:
        model.scale.grad = torch.full((6,), float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert same([whole(param) for param in model.parameters()], before)
    assert scaler.get_scale() == 1.0


@on_ranks(2, how=("host", "disk", "overlap", "activations", "apply", "freeze"))
def test_tiers_early_updates_stashed_activations_other_policies_and_freezes_leave_it_right(how: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "host": {"parameter": {"tier": "host"}, "optimizer": {"tier": "host"}, "gradient": {"tier": "host"}},
        "disk": {"optimizer": {"tier": "disk"}},
        "overlap": {"optimizer": {"overlap": True}},
        "activations": {"activation": {"tier": "host", "min_bytes": 0}},
    }
    model, plain = net(), net()
    attachment = zhooks.attach(model, policy={**IGNORE, **changes.get(how, {})})
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, plain))
    for step in range(4):
        if step == 2 and how == "apply":
            attachment.apply({**IGNORE, "stage": 1})
        for one, optimizer in ((model, ours), (plain, theirs)):
            if step == 2 and how == "freeze":
                one.body[0].weight.requires_grad_(False)
                one.body[1][0].weight.requires_grad_(False)
            optimizer.zero_grad()
            one(batch(step)).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close([whole(param) for param in model.parameters()], [whole(param) for param in plain.parameters()])
    assert torch.equal(model.body[1][1].running_mean, plain.body[1][1].running_mean)
