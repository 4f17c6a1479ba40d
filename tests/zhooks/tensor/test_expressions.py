"""Expressions of attached parameters outside of their modules' forwards, without gradients, beside plain PyTorch.

pytest runs it. Ranks have values of their own in most cases: what each computes is what it would compute with the plain model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import on_ranks, place
from tests.support.values import full, same, sharded


class Policy(nn.Module):
    """Parameters of all sizes that are used without a module's forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mu = nn.Linear(3, 2)
        self.log_std, self.scale = nn.Parameter(torch.randn(2)), nn.Parameter(torch.tensor(1.5))
        self.gamma, self.frozen = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(7), requires_grad=False)
        self.table, self.other = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(5, 7).clone().t().contiguous().t())


def rows() -> Tensor:
    return torch.arange(28.0).reshape(4, 7) / 28 + place()[0]


def vector() -> Tensor:
    return torch.arange(7.0) + place()[0]


def number() -> Tensor:
    return torch.tensor(2.0) + place()[0]


def drawn(make: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(place()[0])
    return make()


def with_row(like: Tensor, value: Tensor) -> Tensor:
    like[0] = value
    return like


READ: dict[str, Callable[[Any], Any]] = {
    "rollout": lambda net: torch.distributions.Normal(net.mu(rows()[:, :3]), net.log_std.exp()).stddev,
    "entropy": lambda net: torch.distributions.Normal(torch.zeros(4, 2), net.log_std.exp()).entropy(),
    "clamped": lambda net: net.log_std.clamp(-5, 2).exp().expand(4, 2),
    "expand_as": lambda net: net.log_std.exp().expand_as(torch.zeros(4, 2)),
    "noise": lambda net: net.log_std.exp() * vector()[:2],
    "logits": lambda net: net.scale.exp() * rows(),
    "item": lambda net: net.scale.exp().item(),
    "a rank's tensor": lambda net: net.scale.exp() * number(),
    "a rank's number": lambda net: (net.scale * (1 + place()[0])).item(),
    "temperature": lambda net: rows() / net.scale.exp(),
    "softmax": lambda net: (net.gamma * 2).softmax(0),
    "layer scale": lambda net: rows() * (1 + net.gamma),
    "gate": lambda net: torch.sigmoid(net.gamma) * rows() + (1 - torch.sigmoid(net.gamma)) * rows(),
    "tanh gate": lambda net: net.scale.tanh() * rows(),
    "own vector": lambda net: net.gamma.exp() * vector(),
    "own vector, total": lambda net: (net.gamma * vector()).sum(),
    "own number, row": lambda net: (net.table * number())[1],
    "weight norm": lambda net: net.table / net.table.norm(dim=1, keepdim=True),
    "weight norm of squares": lambda net: net.table.square().sum(1).sqrt(),
    "norm": lambda net: (net.table * 2).norm() + 0,
    "weight standardisation": lambda net: (net.table - net.table.mean(1, True)) / (net.table.std(1, keepdim=True) + 1e-5),
    "squares": lambda net: net.table.pow(2).sum(),
    "finite": lambda net: torch.isfinite(net.table).all(),
    "float": lambda net: float(net.scale.exp()),
    "int": lambda net: int(net.scale.exp()),
    "bool": lambda net: bool(net.scale.exp() > 1),
    "format": lambda net: float(f"{net.scale.exp():.4f}"),
    "compare": lambda net: (net.gamma > 0).nonzero(),
    "mask": lambda net: net.table[:, net.gamma.exp() > 1],
    "row": lambda net: net.table.exp()[2],
    "slice": lambda net: net.table.exp()[1:3, ::2],
    "embedding": lambda net: F.embedding(torch.tensor([1, 2]), net.table * 0.5),
    "matmul": lambda net: rows() @ (net.table * 0.5).T,
    "linear": lambda net: F.linear(rows(), net.table.abs()),
    "product of two": lambda net: net.table.exp() @ net.other.exp().t(),
    "quantised": lambda net: F.linear(rows(), (net.table / 0.1).round() * 0.1),
    "view": lambda net: net.table.exp().view(-1) @ torch.ones(35),
    "reshape": lambda net: net.table.exp().reshape(7, 5),
    "flatten": lambda net: net.other.exp().flatten(),
    "transpose": lambda net: net.table.exp().t() @ torch.ones(5),
    "where": lambda net: torch.where(rows() > 0.5, net.gamma.exp(), rows()),
    "where of own": lambda net: torch.where(vector() > 2, net.gamma, net.gamma * 2),
    "where of its own": lambda net: torch.where(net.gamma > 0, net.gamma, net.gamma * 0.1),
    "cat": lambda net: torch.cat([net.gamma.exp(), net.log_std.exp(), vector()]),
    "stack": lambda net: torch.stack([net.scale.exp(), net.scale * 2]),
    "numpy": lambda net: net.gamma.exp().numpy().tolist(),
    "numpy of a parameter": lambda net: net.gamma.detach().cpu().numpy().tolist(),
    "tolist": lambda net: [net.gamma.exp().tolist(), net.table.tolist()],
    "iterate": lambda net: [float(value) for value in net.gamma.exp()],
    "max": lambda net: net.table.exp().max(1).values,
    "argmax": lambda net: net.table.exp().argmax(),
    "topk": lambda net: net.gamma.abs().topk(3).values,
    "cumsum": lambda net: net.gamma.exp().cumsum(0),
    "outer": lambda net: torch.outer(net.gamma.exp(), net.gamma.tanh()),
    "two shapes": lambda net: net.table.exp() * net.gamma.exp() + net.table * net.gamma,
    "two strides": lambda net: (net.table.exp() + net.other.exp())[0],
    "clone": lambda net: net.gamma.clone() @ vector(),
    "clone of data": lambda net: net.gamma.data.clone() @ vector(),
    "clone, changed": lambda net: net.gamma.clone().mul_(2).clamp_(-1, 1) @ vector(),
    "clone, added": lambda net: net.table.clone().add_(net.table)[0],
    "double": lambda net: net.gamma.double() @ vector().double(),
    "copied": lambda net: copy.deepcopy(net.gamma.detach()) @ vector(),
    "of a copy": lambda net: copy.deepcopy(net.gamma).exp() @ vector(),
    "ones": lambda net: torch.full_like(net.gamma, 2.0) @ vector(),
    "perturbed": lambda net: drawn(lambda: (net.gamma + torch.randn_like(net.gamma)) @ vector()),
    "difference": lambda net: vector() - net.gamma,
    "moving average": lambda net: vector().sub_(0.1 * (vector() - net.gamma)),
    "added": lambda net: vector().add_(net.gamma.exp()),
    "copied into": lambda net: vector().copy_(net.gamma.exp()),
    "put into": lambda net: with_row(rows(), net.gamma.exp()),
    "frozen": lambda net: net.frozen.exp() * rows(),
    "power": lambda net: 2**net.gamma @ vector(),
    "lerp": lambda net: torch.lerp(net.gamma, net.gamma.exp(), 0.3) @ vector(),
    "addcmul": lambda net: torch.addcmul(net.gamma, vector(), vector()),
    "std": lambda net: net.gamma.exp().std(),
    "quantile": lambda net: net.gamma.exp().quantile(0.5),
    "loss": lambda net: F.mse_loss(net.gamma.exp(), vector()),
    "normalised": lambda net: F.normalize(net.table * 2, dim=1) @ vector(),
    "mean of rows": lambda net: net.table.exp().mean(0),
}  # fmt: skip


@on_ranks(1, 2, stage=(0, 1, 3), tier=("device", "host", "disk"))
def test_an_expression_of_a_parameter_without_gradients_is_what_plain_pytorch_computes(stage: int, tier: str) -> None:
    kept = {} if tier == "device" else {cell: {"tier": tier} for cell in ("optimizer", "parameter")[: 2 if stage == 3 else 1]}
    model, plain = Policy(), Policy()
    attachment = zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}, **kept})
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            for name, read in READ.items():
                got, wanted = ((value.detach() if isinstance(value, Tensor) else value) for value in (read(model), read(plain)))
                if isinstance(got, zhooks.ShardedTensor):
                    got = got.full_tensor()
                torch.testing.assert_close(got, wanted, msg=f"{name} under {without.__name__}", rtol=1e-6, atol=1e-6)
    assert same(full(model), plain.parameters())
    attachment.detach()


@on_ranks(2, stage=(1, 3))
def test_what_is_computed_from_parameters_alone_stays_sharded(stage: int) -> None:
    model = Policy()
    zhooks.attach(model, policy={"stage": stage})
    with torch.no_grad():
        average = model.table.clone()
        average = 0.9 * average + 0.1 * model.table * 2
        assert sharded(average).to_local().shape == sharded(model.table).to_local().shape


@on_ranks(2, stage=(1, 3))
def test_an_expression_that_ranks_compute_with_different_numbers_is_refused_on_all(stage: int) -> None:
    model = Policy()
    attachment = zhooks.attach(model, policy={"stage": stage})
    with torch.no_grad():
        own = 1.0 + place()[0]
        for read in (
            lambda: (model.gamma * own) @ vector(),
            lambda: (model.gamma * own).sum(),
            lambda: (model.gamma * own).norm() + 0,
            lambda: model.gamma.clone().mul_(own).exp().tolist(),
        ):
            with pytest.raises(zhooks.ShardedOpError, match=r"expression of gamma.*same numbers.*gamma\.full_tensor\(\)"):
                read()
        # What each has for itself went into it in place.
        mine = model.gamma.clone()
        mine.detach().mul_(vector())
        with pytest.raises(zhooks.ShardedOpError, match="gamma"):
            mine.softmax(0)
    attachment.detach()


@on_ranks(1, 2)
def test_an_array_of_a_parameter_cannot_be_written() -> None:
    model = Policy()
    zhooks.attach(model)
    for array in (model.gamma.detach().numpy(), model.gamma.detach().__array__()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0
    with pytest.raises(RuntimeError, match="requires grad"):
        model.gamma.numpy()


@on_ranks(1, 2)
def test_what_was_read_of_a_parameter_may_be_kept_over_detach() -> None:
    model, plain = Policy(), Policy()
    attachment = zhooks.attach(model)
    with torch.no_grad():
        kept = [read(model.table) for read in (lambda one: one[0], lambda one: one.T, lambda one: one.view(-1), torch.exp)]
        attachment.detach()
        assert torch.equal(kept[0], plain.table[0]) and torch.equal(kept[1], plain.table.T)
    assert type(model.table) is nn.Parameter


class RowScaled(torch.optim.Optimizer):
    """Scales its step by rows of what it makes of a parameter and numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(0.1 * param.grad / (param * 0.5).view(len(param), -1).norm(dim=1).view(-1, *[1] * (param.dim() - 1)))


@on_ranks(1, 2)
def test_an_optimizer_that_reads_rows_of_an_expression_steps_as_in_plain_pytorch() -> None:
    model, plain = Policy().mu, Policy().mu
    zhooks.attach(model)
    for net in (model, plain):
        optimizer = RowScaled(net.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert same(full(model), plain.parameters())


class Three(nn.Module):
    """Two parameters of one shape in the first half of their buffer: a rank beyond the first has nothing of either."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.arange(9.0).view(3, 3)), nn.Parameter(torch.full((3, 3), 2.0))
        self.large = nn.Parameter(torch.ones(20, 20))


BETWEEN: dict[str, Callable[[Any], Any]] = {
    "add": lambda net: net.one + net.other,
    "difference, times": lambda net: (net.one - net.other) * net.other,
    "in place": lambda net: net.one.add_(net.other),
    "copy": lambda net: net.one.copy_(net.other),
    "lerp": lambda net: net.one.lerp_(net.other, 0.5),
    "lists": lambda net: torch._foreach_add([net.one], [net.other])[0],
    "lists in place": lambda net: torch._foreach_mul_([net.one], [net.other]),
}


@on_ranks(1, 2, 3, stage=(0, 1, 2, 3), name=tuple(BETWEEN))
def test_two_parameters_of_one_shape_meet_alike_on_every_rank(stage: int, name: str) -> None:
    model, plain = Three(), Three()
    zhooks.attach(model, policy={"stage": stage, "comm": {"timeout_s": 60}})
    with torch.no_grad():
        found, expected = BETWEEN[name](model), BETWEEN[name](plain)
        if isinstance(expected, Tensor):
            assert torch.equal(found.full_tensor() if hasattr(found, "full_tensor") else found, expected)
    assert same(full(model), plain.parameters())


@on_ranks(2, 3, stage=(1, 3))
def test_a_dot_product_with_a_plain_tensor_needs_the_same_one_on_every_rank(stage: int) -> None:
    model = Three()
    zhooks.attach(model, policy={"stage": stage})
    (model.one.sum() + model.other.sum() + model.large.sum()).backward()
    gradient = model.one.grad.view(-1)
    assert float(torch.dot(gradient, torch.arange(9.0))) == 36.0
    with pytest.raises(zhooks.ShardedOpError, match=r"dot product with .*same plain tensor on every rank"):
        torch.dot(gradient, torch.arange(9.0) + place()[0])
