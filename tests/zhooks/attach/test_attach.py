"""Attach and detach: what is restored, how meta models are filled and at what peak, how ranks are made equal.

pytest runs it, on one, two and four ranks. States, full values and whole loops are test_full_state.py's.
"""

from __future__ import annotations

import copy
import inspect
import json
import linecache
import re
import warnings
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from tests.support.on_ranks import hooks_left, on_ranks, place
from tests.support.ranks import Pool
from tests.support.values import full, grad_of, same, sharded
from zhooks.keywords import ELSEWHERE

STAGES = (0, 1, 2, 3)


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


@on_ranks(1, 2)
def test_globs_that_match_nothing_here_are_described_and_warned_of_once() -> None:
    rules = [{"match": "0.*", "parameter": {"tier": "host"}}, {"match": "decoder.*", "parameter": {"tier": "host"}}]
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    policy = {"units": {"min_numel": 0}, "rule": rules, "activation": {"sharded_inputs": ["1", "encoder.*"]}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attachment = zhooks.attach(model, policy=policy)
        warned = len(caught)
        attachment.apply({**policy, "rule": rules[:1]})
        attachment.apply({"units": policy["units"], "rule": rules[1:]})
    lines = [linecache.getline(one.filename, one.lineno).strip() for one in caught]
    assert [line.partition("(")[0].rpartition(" ")[2] for line in lines] == (
        [] if place()[0] else ["zhooks.attach"] * 2 + ["attachment.apply"] * 2
    )
    texts = [str(one.message).partition(" matches nothing")[0] for one in caught]
    rule, inputs = '[[rule]] match = "decoder.*"', '[activation] sharded_inputs "encoder.*"'
    assert texts == ([] if place()[0] else [rule, inputs, inputs, rule])
    assert warned == (0 if place()[0] else 2)
    told = [line for line in attachment.describe().splitlines() if line.startswith("Matches nothing here")]
    assert told == [f"Matches nothing here: {rule}."]


@pytest.mark.parametrize(
    ("match", "said"),
    [
        ("encoder.layers.*.wieght", "The closest names of parameters are encoder.layers.0.weight, encoder.layers.1.weight;"),
        (
            "*.embed*",
            "The names of parameters are encoder.layers.0.weight, encoder.layers.0.bias, encoder.layers.1.weight, ...;",
        ),
        ("*", ""),
    ],
)
def test_a_glob_that_matches_nothing_is_warned_of_with_the_closest_names_or_the_first(match: str, said: str) -> None:
    layers = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})
    model = nn.ModuleDict({"encoder": layers})
    policy = {"units": {"min_numel": 0}, "rule": [{"match": match, "parameter": {"tier": "host"}}]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zhooks.attach(model, policy=policy).detach()
    assert [str(one.message).partition("no effect. ")[2].partition(" * matches")[0] for one in caught] == [said] * bool(said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stage": 2}, 'It is a key of the policy: policy={"stage": 2}.'),
        ({"prefetch": 3}, 'It is a key of the policy: policy={"schedule": {"prefetch": 3}}.'),
        (
            {"tier": "host"},
            'It is a key of the policy: policy={"parameter": {"tier": "host"}}, also for gradient and optimizer and activation',
        ),
        ({"precision": "bf16"}, 'It is a key of the policy: policy={"precision": {...}}.'),
        ({"rule": []}, 'It is a key of the policy: policy={"rule": [{...}]}.'),
        ({"match": "*.bias"}, 'It is a key of the policy: policy={"rule": [{"match": "*.bias"}]}.'),
        ({"offload_policy": None}, 'Write policy={"optimizer": {"tier": "host"}}, also for '),
        ({"optimizers": None}, "Did you mean optimizer?"),
        ({"polcy": None}, "Did you mean policy?"),
        ({"xyz": 1}, "Expected model, optimizer, policy, mesh, init or sync; all else is set by the policy."),
    ],
)
def test_a_keyword_that_attach_does_not_have_is_a_type_error_that_says_where_it_belongs(
    given: dict[str, Any], said: str
) -> None:
    model = net()
    with pytest.raises(TypeError) as raised:
        zhooks.attach(model, **given)
    assert str(raised.value).startswith(f"attach() got an unexpected keyword argument {next(iter(given))!r}. {said}")
    assert type(next(model.parameters())) is nn.Parameter and not hooks_left(model)
    assert list(inspect.signature(zhooks.attach).parameters) == ["model", "optimizer", "policy", "mesh", "init", "sync"]


def test_what_other_libraries_arguments_are_answered_with_is_a_policy_or_an_argument() -> None:
    for function, answers in ELSEWHERE.items():
        known = inspect.signature(attrgetter(function)(zhooks)).parameters
        for name, answer in answers.items():
            assert name not in known
            if (written := re.search(r"policy=(\{.*\}\})", answer)) is not None:
                zhooks.Policy.of(json.loads(written[1]))
            elif (argument := re.match(r"Write (\w+)=", answer)) is not None:
                assert argument[1] in known


def test_what_is_wrong_with_the_arguments_of_a_method_is_said_of_the_attachment() -> None:
    attachment: Any = zhooks.attach(net())
    methods = inspect.getmembers(zhooks.Attachment, inspect.isfunction)
    public = [name for name, _ in methods if not name.startswith("_")]
    for name in public:
        with pytest.raises(TypeError, match=rf"^Attachment\.{name}\(\) got an unexpected keyword argument 'xyz'\. "):
            getattr(attachment, name)(xyz=1)
    assert {"detach", "gathered", "load", "recover", "resume", "save", "unshard"} <= {*public}
    calls: list[tuple[dict[str, Any], str]] = [
        ({"strict": False}, r"load\(\) got .* 'strict'\. .*call model\.load_state_dict\(state, strict=False\) on every rank\."),
        ({"optimizers": ()}, r"load\(\) got .* 'optimizers'\. Did you mean optimizer\?"),
        ({"stage": 3}, r"load\(\) got .* 'stage'\. Expected folder, optimizer or objects\."),
        ({}, r"load\(\) missing 1 required positional argument: 'folder'"),
    ]
    for given, said in calls:
        with pytest.raises(TypeError, match=rf"^Attachment\.{said}$"):
            attachment.load(**given)
    with pytest.raises(TypeError, match=r"'stage'\. It is a key of the policy: policy=\{\"stage\": 3\}\.$"):
        attachment.apply(stage=3)


@on_ranks(1)
def test_who_takes_the_attachment_for_the_model_is_told_to_keep_using_the_model() -> None:
    model = net()
    attachment: Any = zhooks.attach(model)
    with pytest.raises(TypeError, match=r"changes the model in place, so keep using the model: model\(\.\.\.\)"):
        attachment(batch(0))
    with pytest.raises(AttributeError, match=r"keep using the model: model\.parameters\."):
        attachment.parameters()
    with pytest.raises(AttributeError, match=r"has no attribute nothing_of_ours\.$"):
        attachment.nothing_of_ours()
    assert attachment.state_dict()["model"].keys() == model.state_dict().keys()


# ---- detach


@on_ranks(1, 2, stage=STAGES)
def test_detach_restores_a_plain_model_that_trains_on_like_one_that_was_never_attached(stage: int) -> None:
    model, plain = net(), net()
    optimizers = [adamw(model), adamw(plain)]
    before = list(model.parameters())
    attachment = zhooks.attach(model, policy={"stage": stage})
    for either, optimizer in zip((model, plain), optimizers, strict=True):
        train(either, optimizer, range(3))
        either(batch(9)).square().mean().backward()
    assert attachment.detach() is model
    assert not hooks_left(model)
    assert set(model.__dict__) == set(plain.__dict__)
    for now, then, theirs in zip(model.parameters(), before, plain.parameters(), strict=True):
        assert now is then and type(now) is nn.Parameter
        assert torch.equal(now, theirs) and now.stride() == theirs.stride()
        assert type(now.grad) is Tensor and torch.equal(now.grad, grad_of(theirs))
    assert all(type(value) is Tensor for value in states(optimizers[0]))
    assert all(torch.equal(a, b) for a, b in zip(states(optimizers[0]), states(optimizers[1]), strict=True))
    for either, optimizer in zip((model, plain), optimizers, strict=True):
        optimizer.zero_grad()
        train(either, optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


@on_ranks(1, 2)
def test_a_detached_model_can_be_attached_again_and_detached_only_once() -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model)
    attachment.detach()
    with pytest.raises(zhooks.AttachError, match="detached already"):
        attachment.detach()
    again = zhooks.attach(model, policy={"stage": 1})
    for either in (model, plain):
        train(either, adamw(either), range(2))
    again.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@on_ranks(2)
def test_an_attached_model_keeps_tied_weights_tied_after_detach() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    attachment = zhooks.attach(model)
    assert model[1].weight is model[0].weight
    model(torch.arange(8)).sum().backward()
    attachment.detach()
    assert model[1].weight is model[0].weight and type(model[1].weight) is nn.Parameter


@on_ranks(1)
def test_the_doors_of_torch_close_with_the_last_attachment() -> None:
    from torch.optim.optimizer import _foreach_supported_types

    before = list(_foreach_supported_types)
    one, other = zhooks.attach(net()), zhooks.attach(net())
    assert zhooks.ShardedTensor in _foreach_supported_types
    one.detach()
    assert zhooks.ShardedTensor in _foreach_supported_types
    other.detach()
    assert _foreach_supported_types == before


class Empty(nn.Module):
    """A module whose only parameter holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.nothing.sum()


@on_ranks(1, 2, stage=STAGES)
def test_a_unit_whose_parameters_are_all_empty_is_attached_trained_and_detached(stage: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Empty(), Empty())
    attachment = zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}})
    optimizer = adamw(model)
    model(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert attachment.memory().nbytes == attachment.memory().formula
    attachment.detach()
    assert type(model[1].nothing) is nn.Parameter and model[1].nothing.shape == (0, 4)


# ---- the optimizer passed with its state


@on_ranks(2, stage=STAGES)
def test_an_optimizer_that_holds_state_is_sharded_and_goes_on(stage: int) -> None:
    model, plain = net(), net()
    optimizers = [adamw(model), adamw(plain)]
    for either, optimizer in zip((model, plain), optimizers, strict=True):
        train(either, optimizer, range(2))
    attachment = zhooks.attach(model, optimizers[0], policy={"stage": stage})
    if stage > 0 and place()[1] == 2:
        held = sum(state["exp_avg"].to_local().numel() for state in optimizers[0].state.values())
        assert held < sum(param.numel() for param in plain.parameters())
    for either, optimizer in zip((model, plain), optimizers, strict=True):
        train(either, optimizer, range(2, 5))
    attachment.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


# ---- meta models


class Rotary(nn.Module):
    """A non-persistent buffer computed by ``reset_parameters``, as rotary embeddings have."""

    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.angles.copy_(torch.arange(8.0) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos()


def with_buffer() -> Any:
    return nn.Sequential(nn.Linear(6, 8), Rotary(), nn.LayerNorm(8), nn.Linear(8, 3))


@on_ranks(2, stage=STAGES)
def test_a_meta_model_is_filled_by_reset_parameters_its_lost_buffers_included(stage: int) -> None:
    torch.manual_seed(5)
    plain = with_buffer()
    with torch.device("meta"):
        model = with_buffer()
    torch.manual_seed(5)
    attachment = zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}})
    assert torch.equal(model[1].angles, torch.arange(8.0) / 8)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cpu"}
    assert same(full(model), plain.parameters())
    x = batch(0)
    assert torch.equal(model(x), attachment.detach()(x))


@on_ranks(1, 2)
def test_a_meta_model_is_filled_by_the_function_given() -> None:
    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.5)
        for buffer in module.buffers(recurse=False):
            buffer.fill_(0.25)

    with torch.device("meta"):
        model = with_buffer()
    zhooks.attach(model, init=init)
    assert all(torch.equal(sharded(param).full_tensor(), torch.full(param.shape, 0.5)) for param in model.parameters())
    assert torch.equal(model[1].angles, torch.full((8,), 0.25))


class Ruled(nn.Module):
    """A model with a rule for its modules, as transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_the_rule_of_a_model_built_on_meta_wins_over_its_modules_own_reset() -> None:
    with torch.device("meta"):
        model = Ruled()
    attachment = zhooks.attach(model)
    state = attachment.state_dict()["model"]
    assert state["inner.weight"].eq(0.25).all()
    # What the rule does not mention keeps the module's own values.
    assert 0 < state["inner.bias"].abs().max() <= 0.125


class Scaled(nn.Module):
    """What its ``__init__`` computes is lost on meta; ``reset_parameters`` fills as much as it is told to."""

    steps: Tensor

    def __init__(self, written: tuple[str, ...]) -> None:
        super().__init__()
        self.written = written
        self.scale = nn.Parameter(torch.ones(4, 2).t())
        self.register_buffer("steps", torch.arange(4), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("count", torch.tensor(0))

    def reset_parameters(self) -> None:
        for name in self.written:
            tensor = getattr(self, name)
            tensor.data.zero_() if isinstance(tensor, nn.Parameter) else setattr(self, name, torch.zeros_like(tensor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.sum() * self.steps


@on_ranks(2, left=((), ("scale",), ("steps",), ("mask", "count")), stage=STAGES)
def test_what_an_initialiser_of_a_meta_model_leaves_out_is_refused(left: tuple[str, ...], stage: int) -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(4, 4), Scaled(tuple({"scale", "steps", "mask", "count"} - set(left))))
    policy = {"stage": stage, "units": {"min_numel": 0}}
    if not left:
        zhooks.attach(model, policy=policy)
        assert not model[1].scale.full_tensor().any()
        assert not model[1].steps.any()
        return
    names = ", ".join(f"1.{name}" for name in left)
    with pytest.raises(zhooks.AttachError, match=f"reset_parameters and _init_weights to fill every .* written to {names}. A"):
        zhooks.attach(model, policy=policy)


def test_a_function_that_skips_modules_of_a_meta_model_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    with pytest.raises(zhooks.AttachError, match=r"needs init to fill every .* nothing written to 1\.weight, 1\.bias\. A"):
        zhooks.attach(model, init=init)


@on_ranks(2)
def test_tied_parameters_of_a_meta_model_stay_tied() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
        model[1].weight = model[0].weight
    zhooks.attach(model, policy={"units": {"min_numel": 0}})
    assert model[1].weight is model[0].weight
    model(torch.arange(8)).sum().backward()
    assert model[0].weight.grad is not None


PEAK_WIDTH, PEAK_LAYERS = 1600, 10


def peak_of_attach(transport: str) -> tuple[int, int, int]:
    """Bytes the process grew by at its highest during attach, bytes of its shards, and of one unit."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(PEAK_WIDTH, PEAK_WIDTH) for _ in range(PEAK_LAYERS)))
    # What a first attach loads and starts once is no part of this model's peak.
    zhooks.attach(net(), policy={"comm": {"transport": transport}}).detach()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = high_water()
    attachment = zhooks.attach(model, policy={"comm": {"transport": transport}})
    grown = high_water() - before
    unit = (PEAK_WIDTH * PEAK_WIDTH + PEAK_WIDTH) * 4
    return grown, attachment.memory().nbytes, unit


def high_water() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.fixture
def fresh_ranks() -> Iterator[Pool]:
    """Two processes with nothing in their heaps."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory")
def test_no_rank_peaks_above_its_shards_and_one_unit_while_a_meta_model_is_attached(fresh_ranks: Pool) -> None:
    for rank, (grown, shards, unit) in enumerate(fresh_ranks.run(f"{__name__}:peak_of_attach", transport="auto")):
        mib = [round(nbytes / 2**20, 1) for nbytes in (grown, shards, unit)]
        assert grown <= 1.1 * (shards + unit), (
            f"rank {rank}: grew by {mib[0]} MiB for shards of {mib[1]} and a unit of {mib[2]}"
        )


# ---- ranks are made equal


@on_ranks(2, stage=(0, 3))
def test_ranks_start_from_the_first_ranks_parameters_and_buffers(stage: int) -> None:
    model, first = net(seed=place()[0]), net(seed=0)
    model[2].running_mean.fill_(float(place()[0]))
    zhooks.attach(model, policy={"stage": stage})
    assert same(full(model), first.parameters())
    assert torch.equal(model[2].running_mean, torch.zeros(8))


@on_ranks(1, 2)
def test_equal_ranks_pass_the_check_that_replaces_the_broadcast() -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model, sync=False)
    attachment.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


# ---- a mesh of two axes


class PlainReplica:
    """The average over all ranks by hand: what data parallel training means."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, adamw(model)

    def step(self, number: int, world: int) -> None:
        sums: list[Any] = [None] * len(list(self.model.parameters()))
        for rank in range(world):
            self.model.zero_grad()
            self.model(batch(number, rank)).square().mean().backward()
            grads = [param.grad for param in self.model.parameters()]
            sums = [grad if total is None else total + grad for total, grad in zip(sums, grads, strict=True)]
        for param, total in zip(self.model.parameters(), sums, strict=True):
            param.grad = total / world
        self.optimizer.step()


@on_ranks(4, case=((0, 2), (1, 2), (2, 2), (3, 2), (3, 4)))
def test_hybrid_sharding_trains_like_plain_replicas(case: tuple[int, int]) -> None:
    stage, replicas = case
    rank, world = place()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    plain = PlainReplica(copy.deepcopy(model))
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    attachment = zhooks.attach(model, policy={"stage": stage}, mesh=mesh)
    assert f"shard x {world // replicas}, replicate x {replicas}" in attachment.describe()
    optimizer = adamw(model)
    for number in range(3):
        model(batch(number, rank)).square().mean().backward()
        optimizer.step()
        held = attachment.memory()
        assert held.nbytes == held.formula
        optimizer.zero_grad()
        plain.step(number, world)
    for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(sharded(ours).full_tensor(), theirs.detach(), rtol=1e-4, atol=1e-6)
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, full(model))
    assert all(torch.equal(a, b) for other in everybody for a, b in zip(other, everybody[0], strict=True))


@on_ranks(2, stage=(0, 1, 2, 3))
def test_a_unit_of_several_dtypes_and_frozen_parameters_keeps_every_value(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    model.register_parameter("narrow", nn.Parameter(torch.randn(5).to(torch.bfloat16)))
    model[2].bias.requires_grad_(False)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    zhooks.attach(model, policy={"stage": stage})
    for name, param in model.named_parameters():
        assert torch.equal(sharded(param).full_tensor(), expected[name]), name


class CountedWalks(nn.Sequential):
    """How often somebody walked over all modules of the model."""

    walks = 0

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        self.walks += 1
        return super().named_modules(*args, **kwargs)


@on_ranks(1, meta=(False, True))
def test_the_model_is_walked_as_often_however_many_units_it_has(meta: bool) -> None:
    counts = []
    for layers in (2, 12):
        with torch.device("meta" if meta else "cpu"):
            model = CountedWalks(*[nn.Linear(4, 4) for _ in range(layers)])
        attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}})
        assert len(attachment.session.units) == layers
        attached, model.walks = model.walks, 0
        for layer in model:
            layer.requires_grad_(False)
        model(torch.ones(1, 4))
        counts.append((attached, model.walks))
        attachment.detach()
    assert counts[0] == counts[1]


def test_ranks_that_torchrun_started_are_refused_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    model = net()
    with pytest.raises(zhooks.AttachError, match=r"rank 1 of 2, found none.*init_process_group\(\) before attach"):
        zhooks.attach(model)
    assert not hooks_left(model)
    monkeypatch.setenv("WORLD_SIZE", "1")
    zhooks.attach(model).detach()
