"""Where the scale enters and leaves: gradients are true wherever a loss took its values, and what goes round is refused.

pytest runs it on ranks over Gloo; the oracle is the plain model.  It never looks at a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import zhooks
from tests.support.on_ranks import on_ranks
from tests.support.scaling_model import Model, adamw, attached, batch, build, loss_of
from tests.support.values import copies, grad_of, same, sharded


class Wrapped(nn.Module):
    """Returns its loss among other things, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def forward(self, inputs: Tensor, wanted: Tensor) -> dict[str, Any]:
        found = self.model(inputs)
        return {"loss": (found - wanted).square().mean(), "found": [found]}


def penalised(model: Any, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Parameters in the loss, before and after the forward."""
    early: Tensor = sum(p.square().sum() for p in model.body.parameters())
    return early * 0.1 + (model(inputs) - wanted).square().mean() + model.head.weight.abs().sum() * 0.01


def parts(model: Any, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Modules of the model called one by one, the loop's own arithmetic between them."""
    hidden = torch.sin(model.body(inputs)) * 2
    return (model.head(hidden) * model.gain - wanted).square().mean() + nn.functional.linear(hidden, model.head.weight).sum()


def twice(model: Any, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Two forwards, the second of what the first computed."""
    first = model(inputs)
    return (model(torch.cat([first] * 4, 1)) - wanted).square().mean() + first.sum()


def inplace(model: Any, inputs: Tensor, wanted: Tensor) -> Tensor:
    out = model(inputs)
    out -= wanted
    return out.square().mean()


def again(model: Any, inputs: Tensor, wanted: Tensor) -> Tensor:
    out = torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=False)
    return (out - wanted).square().mean()


def reentrant(model: Any, inputs: Tensor, wanted: Tensor) -> Tensor:
    out = torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=True)
    return (out - wanted).square().mean()


LOOPS = {each.__name__: each for each in (penalised, parts, twice, inplace, again, reentrant)}


@on_ranks(2, name=tuple(LOOPS))
def test_gradients_are_true_wherever_the_loss_took_its_values(name: str) -> None:
    plain, (model, _) = build(), attached({"loss_scale": 1024.0}, stage=3 if name != "parts" else 2)
    inputs, wanted = batch(0, 0)
    ours = inputs.clone().requires_grad_()
    theirs = inputs.clone().requires_grad_()
    LOOPS[name](model, ours, wanted).backward()
    LOOPS[name](plain, theirs, wanted).backward()
    assert torch.allclose(grad_of(ours), grad_of(theirs), rtol=1e-5, atol=1e-7)
    for (at, mine), his in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad.full_tensor(), grad_of(his), rtol=1e-5, atol=1e-7), at


@on_ranks(2)
def test_autograd_grad_and_a_model_that_returns_its_loss() -> None:
    plain, (model, _) = Wrapped(), attached({"loss_scale": 512.0}, Wrapped())
    inputs, wanted = batch(0, 0)
    out = model(inputs, wanted)
    asked = torch.autograd.grad(out["loss"] + out["found"][0].sum(), [*model.parameters(), out["found"][0]])
    reference = plain(inputs, wanted)
    loss = reference["loss"] + reference["found"][0].sum()
    for mine, his in zip(asked[:-1], torch.autograd.grad(loss, list(plain.parameters())), strict=True):
        assert torch.allclose(sharded(mine).full_tensor(), his, rtol=1e-5, atol=1e-7)
    assert torch.equal(asked[-1], torch.ones(8, 4))
    assert out["loss"].item() == pytest.approx(reference["loss"].item())


@on_ranks(2)
def test_a_backward_from_an_edge_of_the_graph_is_one_from_its_value() -> None:
    plain, (model, _) = build(), attached({"loss_scale": 1024.0})
    inputs, wanted = batch(0, 0)
    ours = inputs.clone().requires_grad_()
    theirs = inputs.clone().requires_grad_()
    start = torch.tensor(0.5)
    root, leaf = get_gradient_edge((model(ours) - wanted).square().mean()), get_gradient_edge(ours)
    torch.autograd.backward(root, start, retain_graph=True)
    (asked,) = torch.autograd.grad(root, leaf, start)
    (plain(theirs) - wanted).square().mean().backward(start)
    for mine in (grad_of(ours), asked):
        assert torch.allclose(mine, grad_of(theirs), rtol=1e-5, atol=1e-7)
    for (at, mine), his in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad.full_tensor(), grad_of(his), rtol=1e-5, atol=1e-7), at


@on_ranks(1)
def test_a_generator_and_its_judge_may_have_scales_of_their_own() -> None:
    ours, plain = [build(), nn.Linear(4, 1)], [build(), nn.Linear(4, 1)]
    plain[1].load_state_dict(ours[1].state_dict())
    attached({"loss_scale": 256.0}, ours[0])
    attached({"loss_scale": 64.0}, ours[1])
    inputs, _ = batch(0, 0)
    for generator, judge in (ours, plain):
        judge(generator(inputs)).square().mean().backward()
    for mine, his in zip(ours, plain, strict=True):
        for one, two in zip(mine.parameters(), his.parameters(), strict=True):
            assert torch.allclose(one.grad.full_tensor(), grad_of(two), rtol=1e-5, atol=1e-7)


def hooked_value(model: Model, inputs: Tensor, wanted: Tensor) -> None:
    kept: list[Tensor] = []
    handle = model.body[2].register_forward_hook(lambda module, args, out: kept.append(out))
    try:
        ((model(inputs) - wanted).square().mean() + kept[0].square().mean()).backward()
    finally:
        handle.remove()


def hooked_alone(model: Model, inputs: Tensor, wanted: Tensor) -> None:
    kept: list[Tensor] = []
    handle = model.body[2].register_forward_hook(lambda module, args, out: kept.append(out))
    try:
        model(inputs)
        kept[0].square().mean().backward()
    finally:
        handle.remove()


def inner_gradient(model: Model, inputs: Tensor, wanted: Tensor) -> None:
    kept: list[Tensor] = []
    handle = model.body[2].register_forward_hook(lambda module, args, out: kept.append(out))
    try:
        torch.autograd.grad((model(inputs) - wanted).square().mean(), kept[0])
    finally:
        handle.remove()


def inner_edge(model: Model, inputs: Tensor, wanted: Tensor) -> None:
    kept: list[Any] = []
    handle = model.body[2].register_forward_hook(lambda module, args, out: kept.append(get_gradient_edge(out)))
    try:
        torch.autograd.grad((model(inputs) - wanted).square().mean(), kept[0])
    finally:
        handle.remove()


def smuggled(model: Model, inputs: Tensor, wanted: Tensor) -> None:
    prompt = torch.zeros(32, requires_grad=True)
    handle = model.body[2].register_forward_hook(lambda module, args, out: out + prompt)
    try:
        (model(inputs) - wanted).square().mean().backward()
    finally:
        handle.remove()


def graph_of_gradients(model: Model, inputs: Tensor, wanted: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)


def closure(model: Model, inputs: Tensor, wanted: Tensor) -> None:
    adamw(model).step(lambda: (model(inputs) - wanted).square().mean())


def scaler_beside(model: Model, inputs: Tensor, wanted: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((model(inputs) - wanted).square().mean()).backward()
    scaler.step(adamw(model))


def fused_beside(model: Model, inputs: Tensor, wanted: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((model(inputs) - wanted).square().mean()).backward()
    scaler.step(adamw(model, fused=True))


def checkpointed_function(model: Model, inputs: Tensor, wanted: Tensor) -> None:
    def run(values: Tensor) -> Tensor:
        return nn.functional.linear(values, model.head.weight)

    hidden = model.body(inputs)
    torch.utils.checkpoint.checkpoint(run, hidden, use_reentrant=True).sum().backward()


REFUSED: dict[str, tuple[Callable[[Model, Tensor, Tensor], None], type[Exception], str]] = {
    "hooked_value": (hooked_value, zhooks.ScaleError, "a value inside the model, computed"),
    "hooked_alone": (hooked_alone, zhooks.ScaleError, "a value inside the model, computed"),
    "inner_gradient": (inner_gradient, zhooks.ScaleError, "of a value inside the model"),
    "inner_edge": (inner_edge, zhooks.ScaleError, "of a value inside the model"),
    "smuggled": (smuggled, zhooks.ScaleError, r"shape \[32\] that requires grad and did not enter"),
    "graph_of_gradients": (graph_of_gradients, zhooks.ShardedOpError, "create_graph=True"),
    "closure": (closure, zhooks.ShardedOpError, "expected a step without a closure"),
    "scaler_beside": (scaler_beside, zhooks.ScaleError, "either torch.amp.GradScaler or .precision. loss_scale, found both"),
    "fused_beside": (fused_beside, zhooks.ScaleError, "either torch.amp.GradScaler or .precision. loss_scale, found both"),
    "checkpointed_function": (checkpointed_function, zhooks.ScaleError, "use_reentrant=False"),
}


@on_ranks(1, name=tuple(REFUSED))
def test_what_goes_round_the_scale_is_refused_and_the_model_goes_on(name: str) -> None:
    do, kind, words = REFUSED[name]
    model, attachment = attached({"loss_scale": 32.0})
    before = copies(model.parameters())
    with pytest.raises(kind, match=words):
        do(model, *batch(0, 0))
    assert same(copies(model.parameters()), before)
    model.zero_grad()
    loss_of(model, 1, 0).backward()
    plain = build()
    loss_of(plain, 1, 0).backward()
    for mine, his in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad.full_tensor(), grad_of(his), rtol=1e-5, atol=1e-7)
    attachment.detach()


@pytest.mark.slow
@on_ranks(2, name=tuple(REFUSED))
def test_ranks_refuse_together(name: str) -> None:
    test_what_goes_round_the_scale_is_refused_and_the_model_goes_on.job(name)


@pytest.mark.slow
@on_ranks(1, name=tuple(LOOPS))
def test_gradients_are_true_on_one_rank(name: str) -> None:
    test_gradients_are_true_wherever_the_loss_took_its_values.job(name)


def test_outputs_in_containers_torch_does_not_know_pass_the_boundary() -> None:
    @dataclass
    class Out:
        found: Tensor
        extra: dict[str, Any]

    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def forward(self, inputs: Tensor) -> Out:
            found = self.model(inputs)
            return Out(found, {"twice": [found * 2], "text": "kept"})

    plain, (model, attachment) = Boxed(), attached({"loss_scale": 16.0}, Boxed())
    inputs, wanted = batch(0, 0)
    for each in (plain, model):
        out = each(inputs)
        assert type(out) is Out and out.extra["text"] == "kept"
        ((out.found - wanted).square().mean() + out.extra["twice"][0].sum()).backward()
    for mine, his in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad.full_tensor(), grad_of(his), rtol=1e-5, atol=1e-7)
    attachment.detach()
