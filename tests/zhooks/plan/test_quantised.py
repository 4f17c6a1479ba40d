"""Frozen parameters of tensor subclasses: left as they are, trained around, by checksum in checkpoints, refused where wrong.

pytest runs it on one rank and on two, with two subclasses of its own: one that says what it is made of, as torchao's do, and
one of packed data with attributes, as those of bitsandbytes are. The libraries themselves are tried where they are installed.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zhooks
from tests.support.int8 import Int8
from tests.support.on_ranks import folder, hooks_left, on_ranks, place
from tests.support.values import same, whole

KINDS = ("flattened", "packed")
POLICY: dict[str, Any] = {"stage": 3, "units": {"min_numel": 0}}


class Packed(nn.Parameter):
    """Whole numbers, and the scale as an attribute, which the module takes over at its first forward."""

    scale: Tensor | None


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return (weight.detach() / scale).round().to(torch.int8), scale


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        numbers, scale = quantised(linear.weight)
        self.weight = Packed(numbers, requires_grad=False)
        self.weight.scale = scale
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale, self.weight.scale = self.weight.scale, None
        assert self.scale is not None
        return F.linear(x, self.weight * self.scale)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "SCB"] = self.scale if self.scale is not None else self.weight.scale


class Adapted(nn.Module):
    """A quantised base and a low-rank adapter that is trained."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def net(kind: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    bases: list[nn.Module] = []
    for linear in (nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)):
        if kind == "flattened":
            linear.weight = nn.Parameter(Int8(*quantised(linear.weight)), requires_grad=False)
        bases.append(PackedLinear(linear) if kind == "packed" else linear)
    torch.manual_seed(7)
    return nn.Sequential(Adapted(bases[0]), nn.Tanh(), Adapted(bases[1]))


def bases(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if name.endswith("base.weight")}


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, ranks: tuple[int, ...]) -> None:
    """Steps over the mean of these ranks' batches."""
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (model(batch(step, rank)).square().mean() / len(ranks)).backward()
        optimizer.step()


def trained(kind: str, policy: dict[str, Any] | None = None) -> tuple[Any, zhooks.Attachment, torch.optim.Optimizer]:
    model = net(kind)
    attachment = zhooks.attach(model, policy=policy or POLICY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, range(2), (place()[0],))
    return model, attachment, optimizer


@on_ranks(1, 2, kind=KINDS, stage=(1, 3), checkpoint=("none", "unit"))
def test_adapters_over_a_quantised_base_train_as_in_plain_pytorch(kind: str, stage: int, checkpoint: str) -> None:
    rank, world = place()
    model, plain = net(kind), net(kind)
    before = bases(model)
    attachment = zhooks.attach(model, policy={**POLICY, "stage": stage, "activation": {"checkpoint": checkpoint}})
    optimizer, reference = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, plain))
    train(model, optimizer, range(3), (rank,))
    train(plain, reference, range(3), tuple(range(world)))
    assert set(attachment.left_out) == set(before) and all(bases(model)[name] is param for name, param in before.items())
    attachment.detach()
    assert hooks_left(model) == [] and all(bases(model)[name] is param for name, param in before.items())
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name in before:
            continue
        assert world > 1 or torch.equal(found, expected), name
        torch.testing.assert_close(found, expected)


@on_ranks(2, kind=KINDS)
def test_reports_and_the_device_budget_count_what_a_quantised_parameter_is_made_of(kind: str) -> None:
    _, attachment, _ = trained(kind)
    nbytes = 2 * (64 + 8 * 4)
    assert attachment.memory().transient["frozen subclasses"] == nbytes
    assert "left as they are on every rank: 2 parameters" in attachment.describe()
    assert "0.base.weight, 2.base.weight" in attachment.describe() and "Ignored" not in attachment.describe()
    attachment.detach()
    big: Any = nn.ModuleList([nn.Linear(8, 8), nn.Linear(2048, 1024, bias=False)])
    numbers, scale = quantised(big[1].weight)
    big[1].weight = nn.Parameter(Int8(numbers, scale), requires_grad=False)
    with pytest.raises(zhooks.BudgetError, match=r"2\.\d+ MiB|2 MiB|3 MiB"):
        zhooks.attach(big, policy={"budget": {"device": "1 MiB"}})
    zhooks.attach(big, policy={"budget": {"device": "3 MiB"}})


@on_ranks(1, 2, kind=KINDS)
def test_checkpoints_hold_a_checksum_of_the_base_and_load_beside_the_same_base(kind: str) -> None:
    rank, _ = place()
    model, attachment, optimizer = trained(kind)
    state = attachment.state_dict(optimizer)
    expected = [whole(param) for param in model.parameters() if param.requires_grad]
    with folder() as path:
        attachment.save(path / "checkpoint", optimizer)
        for load in ("shards", "full"):
            other = net(kind)
            second = zhooks.attach(other, policy=POLICY)
            fresh = torch.optim.AdamW(other.parameters(), lr=0.05)
            if load == "shards":
                second.load(path / "checkpoint", fresh)
            else:
                second.load_state_dict(state, fresh)
            assert same([whole(param) for param in other.parameters() if param.requires_grad], expected)
            train(other, fresh, range(2, 3), (rank,))
        train(model, optimizer, range(2, 3), (rank,))
        assert same(*([whole(p) for p in each.parameters() if p.requires_grad] for each in (model, other)))
    if rank == 0:
        assert set(state["left_out"]) == {"0.base.weight", "2.base.weight"}
        assert not any("base" in name for name in state["model"])
        plain = net(kind)
        missing, unknown = plain.load_state_dict(state["model"], strict=False)
        assert not unknown and set(missing) >= set(state["left_out"])


@on_ranks(1, 2, kind=KINDS, verb=("load", "load_state_dict"))
def test_adapters_of_another_base_are_refused_and_nothing_is_changed(kind: str, verb: str) -> None:
    _, attachment, optimizer = trained(kind)
    state = attachment.state_dict(optimizer)
    other = net(kind, seed=3)
    second = zhooks.attach(other, policy=POLICY)
    before = [whole(param) for param in other.parameters() if param.requires_grad]
    refused = pytest.raises(zhooks.CheckpointError, match=r"quantised base.*found different values of 0\.base\.weight")
    with folder() as path:
        attachment.save(path / "checkpoint", optimizer)
        with refused:
            if verb == "load":
                second.load(path / "checkpoint", torch.optim.AdamW(other.parameters()))
            else:
                second.load_state_dict(state)
    assert same([whole(param) for param in other.parameters() if param.requires_grad], before)


@on_ranks(1, 2)
def test_a_state_without_checksums_is_refused_and_so_is_one_with_them_over_a_plain_base() -> None:
    _, attachment, _ = trained("flattened")
    state = attachment.state_dict()
    bare = {key: value for key, value in state.items() if key != "left_out"}
    with pytest.raises(zhooks.CheckpointError, match=r"found 0\.base\.weight only here"):
        attachment.load_state_dict(bare)
    plain = nn.Sequential(Adapted(nn.Identity()), nn.Tanh(), Adapted(nn.Identity()))
    second = zhooks.attach(plain, policy=POLICY)
    with pytest.raises(zhooks.CheckpointError, match=r"found 0\.base\.weight only in the checkpoint"):
        second.load_state_dict(state)


@on_ranks(1, 2, kind=KINDS)
def test_a_file_of_full_weights_of_a_quantised_model_is_refused_by_name(kind: str) -> None:
    from zhooks.integrations.weights import whole_weights

    model, attachment, _ = trained(kind)
    with folder() as path:
        with pytest.raises(zhooks.CheckpointError, match=r"save_full.* found 2 frozen of tensor subclasses \(0\.base"):
            attachment.save_full(path / "model.safetensors")
        assert list(path.iterdir()) == []
    with pytest.raises(zhooks.CheckpointError, match=r"whole weights.* such as 0\.base\.weight"):
        whole_weights(model, attachment)


@on_ranks(2, kind=KINDS, differ=("values", "classes"))
def test_ranks_with_other_bases_are_refused_before_anything_changed(kind: str, differ: str) -> None:
    rank, _ = place()
    model = net(kind, seed=rank if differ == "values" else 0)
    if differ == "classes" and rank:
        model[2] = Adapted(nn.Linear(8, 8, bias=False))
    with pytest.raises(zhooks.AttachError, match=r"expected the same model and policy on every rank"):
        zhooks.attach(model, policy=POLICY)
    assert hooks_left(model) == [] and not any(isinstance(param, zhooks.ShardedTensor) for param in model.parameters())


@on_ranks(2, kind=KINDS)
def test_what_ignore_names_may_differ_between_ranks_and_is_each_ranks_own_in_checkpoints(kind: str) -> None:
    rank, _ = place()
    model = net(kind, seed=rank)
    attachment = zhooks.attach(model, policy={**POLICY, "units": {"ignore": ["*base*"], "min_numel": 0}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, range(1), (rank,))
    assert attachment.memory().transient["ignored parameters"] == 2 * (64 + 8 * 4)
    with folder() as path:
        attachment.save(path / "checkpoint", optimizer)
        attachment.load(path / "checkpoint", optimizer)
    with pytest.raises(zhooks.CheckpointError, match=r"same on every rank.*found other values of 0\.base\.weight"):
        attachment.state_dict(optimizer)


@on_ranks(1, 2, verb=("forward", "save"))
def test_a_quantised_parameter_that_is_unfrozen_later_is_refused_by_name(verb: str) -> None:
    model, attachment, optimizer = trained("flattened")
    model[2].base.weight.requires_grad_(True)
    if verb == "forward":
        with pytest.raises(zhooks.AttachError, match=r"Parameter 2\.base\.weight was unfrozen. Expected it to stay frozen"):
            model(batch(0))
    else:
        refused = pytest.raises(zhooks.CheckpointError, match=r"expected the ignored 2\.base\.weight .* frozen since attach")
        with folder() as path, refused:
            attachment.save(path / "checkpoint", optimizer)
    model[2].base.weight.requires_grad_(False)
    model(batch(0)).sum().backward()


class Opaque(Tensor):
    """A subclass that has no memory of its own and does not say what it is made of."""

    @staticmethod
    def __new__(cls) -> Opaque:
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, (8, 8))
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls()


@pytest.mark.parametrize("kind", ["trainable", "opaque", "nothing else", "meta"])
def test_tensor_subclasses_that_cannot_stay_are_refused_by_name(kind: str) -> None:
    model: Any = net("flattened")
    message = r"parameter 0\.base\.weight. Expected torch\.nn\.Parameter, found .*(Int8|Opaque).*frozen \(requires_grad_"
    if kind == "trainable":
        model[0].base.weight.requires_grad_(True)
    elif kind == "opaque":
        model[0].base.weight = nn.Parameter(Opaque(), requires_grad=False)
    elif kind == "meta":
        model[0].base.weight = Packed(torch.empty(8, 8, device="meta"), requires_grad=False)
        message = r"expected 0\.base\.weight to have memory, found it on meta"
    else:
        model = model[0].base
        message = "found only frozen tensor subclasses"
    with pytest.raises(zhooks.AttachError, match=message):
        zhooks.attach(model, policy=POLICY)
    assert hooks_left(model) == [] and not any(isinstance(param, zhooks.ShardedTensor) for param in model.parameters())


@on_ranks(1, 2, kind=KINDS)
def test_gathered_shows_a_quantised_parameter_as_it_is_and_refuses_to_write_it(kind: str) -> None:
    model, attachment, _ = trained(kind)
    with attachment.gathered() as values:
        assert all(value is param for value, param in zip(values, model.parameters(), strict=True) if not param.requires_grad)
    refused = pytest.raises(zhooks.CheckpointError, match=r"expected attached parameters, found 0\.base\.weight")
    with refused, attachment.gathered(model[0].base.weight, write=True):
        pass


@on_ranks(1, kind=KINDS)
def test_a_quantised_base_trains_with_activations_on_the_host(kind: str) -> None:
    model, plain = net(kind), net(kind)
    zhooks.attach(model, policy={**POLICY, "activation": {"tier": "host", "min_bytes": 0}})
    for each in (model, plain):
        train(each, torch.optim.AdamW(each.parameters(), lr=0.05), range(2), (0,))
    assert same(*([whole(p) for p in each.parameters() if p.requires_grad] for each in (model, plain)))


def of_library(kind: str) -> nn.Sequential:
    """The same with weights that torchao or bitsandbytes has quantised."""
    model = net("plain").requires_grad_(False)
    for at in (0, 2):
        linear = nn.Linear(64, 64, bias=False)
        if kind == "torchao":
            quantization = pytest.importorskip("torchao.quantization")
            quantization.quantize_(linear.requires_grad_(False), quantization.Int8WeightOnlyConfig())
            model[at].base = linear
        else:
            layers = pytest.importorskip("bitsandbytes").nn
            four = kind == "4 bits"
            made = layers.Linear4bit(64, 64, bias=False) if four else layers.Linear8bitLt(64, 64, False, has_fp16_weights=False)
            made.load_state_dict(linear.state_dict())
            model[at].base = made.to("cpu").requires_grad_(False)
        torch.manual_seed(at)
        model[at].down, model[at].up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64)
    return model


@pytest.mark.slow
@on_ranks(1, 2, limit_s=300.0, kind=("torchao", "4 bits", "8 bits"))
def test_adapters_over_weights_of_torchao_and_bitsandbytes_train_and_are_loaded_as_in_plain_pytorch(kind: str) -> None:
    rank, world = place()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: range) -> None:
        for each in ranks:
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(each))
            (model(x).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, plain = of_library(kind), of_library(kind)
        attachment = zhooks.attach(model, policy=POLICY)
        optimizer, reference = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, plain))
        for _ in range(2):
            step(model, optimizer, range(rank, rank + 1))
            step(plain, reference, range(world))
        assert len(attachment.left_out) == 2 and attachment.memory().transient["frozen subclasses"] < 2 * 64 * 64 * 2
        state = attachment.state_dict(optimizer)
        with folder() as path:
            attachment.save(path / "checkpoint", optimizer)
            other = of_library(kind)
            second, fresh = zhooks.attach(other, policy=POLICY), torch.optim.AdamW(other.parameters(), lr=0.05)
            second.load(path / "checkpoint", fresh)
            second.load_state_dict(state, fresh)
        attachment.detach()
        second.detach()
    for found in (model, other):
        for (name, value), (_, expected) in zip(found.named_parameters(), plain.named_parameters(), strict=True):
            if value.requires_grad:
                assert world > 1 or torch.equal(value, expected), name
                torch.testing.assert_close(value, expected)
